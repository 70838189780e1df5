"""Reads a :class:`~megacpp_mcore.model.run.Run` from Megatron's arguments: the inverse of ``lower``.

A launch reads it from the command line before Megatron is imported; a spec corrects it from Megatron's configuration.
Pure Python; flags and their defaults are those of Megatron-LM core_v0.19.0, ``megatron/training/arguments.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megacpp_mcore.arguments import lowering
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.model import DEFAULT, Layout, Model, hybrid, preset
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.precision import EXPERTS_FILE, FP8_EXPERTS
from megacpp_mcore.model.run import FIELDS, Run, given_in
from megacpp_mcore.model.training import GPT, HYBRID, Training, named_as
from megacpp_mcore.util import flags

if TYPE_CHECKING:
    from megacpp_mcore.settings import PluginConfig

PRECISION_FILE = "--te-precision-config-file"
RUN = "megacpp_run"
"""The attribute of Megatron's configuration in which a spec leaves the :class:`Run` that it has read."""

_STAGES = "--pipeline-model-parallel-layout"
_OWN_STATES = (
    "--optimizer-cpu-offload", "--offload-optimizer-states", "--main-params-dtype", "--fp8-param-gather",
    "--use-megatron-fsdp", "--num-distributed-optimizer-instances",
    "--skip-train", "--yaml-cfg", "--use-checkpoint-args",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that change a rank's states from :func:`megacpp_mcore.model.memory.states`, or leave them to other sources."""

_DATA = (
    "--data-path", "--split", "--mock-data", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path",
    "--per-split-data-args-path",
)  # fmt: skip
_TOKENIZER = (
    "--tokenizer-type", "--tokenizer-model", "--vocab-size", "--null-tokenizer-eod-id", "--null-tokenizer-pad-id",
)  # fmt: skip
_NUMBERS: Mapping[str, tuple[str, Any]] = {
    "micro_batch_size": ("--micro-batch-size", 1),
    "global_batch_size": ("--global-batch-size", None),
    "train_iters": ("--train-iters", None),
    "optimizer": ("--optimizer", "adam"),
    "learning_rate": ("--lr", None),
    "weight_decay": ("--weight-decay", 0.01),
    "adam_beta2": ("--adam-beta2", 0.999),
    "clip_grad": ("--clip-grad", 1.0),
    "seed": ("--seed", 1234),
}
"""Fields of :class:`Training` to flags and Megatron's defaults; without one, that of :class:`Training` applies."""


def read(
    words: Sequence[str],
    *,
    device: str,
    processes: int,
    model: Model | None = None,
    settings: PluginConfig | None = None,
) -> Run:
    """Read the run that a command line describes, with ``processes`` processes on ``cuda`` or ``cpu``.

    Args:
        model: what a spec of this package builds; None: that of ``settings``, or the preset that their ``--spec`` names.
        settings: the file of ``MEGACPP_CONFIG``; None without.

    Raises:
        LaunchError: a value is not a number, or below its minimum.
        ModelError: a combination that no run can have.
    """
    options = flags.read(words)
    named = lowering.preset_of(options.get("--spec"))
    model_class = HYBRID if named is not None and "--hybrid-layer-pattern" in options else GPT
    if model is None and settings is not None:
        model = settings.model
    if model is None and named is not None:
        model = preset(named)
    layout = _layout(options, model, model_class)
    plan, file = _precision(options)
    impl = flags.first(options, "--transformer-impl") or ("local" if device == "cpu" else "transformer_engine")
    if model is None and impl != "transformer_engine":
        impl = "local"  # Megatron has more kinds, none of them Transformer Engine's
    with named_as({name: flag for name, (flag, _) in _NUMBERS.items()}):
        training = Training(
            device=device,
            precision=plan,
            transformer_impl=impl,
            data=_words_of(options, _DATA),
            tokenizer=_words_of(options, _TOKENIZER),
            processes=processes,
            **({} if model is None else _numbers(options)),
        )
    run = Run(model, layout, training, model_class, settings=settings)
    values = {name: field.default for name, field in FIELDS.items()} | given_in(options)
    values |= {
        "precision_file": file,
        "grad_bytes": _grad_bytes(options),
        "experts": "--num-experts" in options if model is None else run.has_moe,
        "own_states": not options.keys().isdisjoint(_OWN_STATES),
        "own_stages": model is not None and _STAGES in options and not grammar.parse(model.pattern).staged,
    }
    captured = dataclasses.replace(training, cuda_graphs=values["cuda_graph_impl"] == "local")
    if dataclasses.replace(run, training=captured, asked=values).is_captured:
        run = dataclasses.replace(run, training=captured)
    run = dataclasses.replace(run.carried_out(values), given=_explicit_fields(options))
    return run if model is None else _with_extra(run, model, options)


def layout_of(config: Any) -> Layout:
    """Read the layout of Megatron's configuration, or of its parsed arguments."""
    return Layout(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        virtual=config.virtual_pipeline_model_parallel_size or 1,
        expert=config.expert_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        context=config.context_parallel_size,
    )


def model_of(sources: Sequence[object], settings: PluginConfig | None, named: str = DEFAULT, model_class: str = GPT) -> Model:
    """Return the model of a run: that of the settings' file, or the preset that the run names; checked.

    Args:
        sources: the run's configuration objects, as :func:`megacpp_mcore.arguments.lowering.mismatches` takes them.
        named: by the run's spec; a source's own ``megacpp_preset`` takes precedence.

    Raises:
        ModelError: no preset has the name, or the file is about another model.
        ArgumentMismatchError: the configuration contradicts the model; lists the contradictions, and the closest preset.
    """
    named = next((name for source in sources if (name := getattr(source, "megacpp_preset", None))), named)
    if settings is None:
        model, origin = preset(named), ""
    elif named in (DEFAULT, settings.preset, settings.model.name):
        model, origin = settings.model, f" of {settings.path} (MEGACPP_CONFIG)"
    else:
        raise ModelError(
            f"the run names {named}, and {settings.path} (MEGACPP_CONFIG) is about {settings.preset}; remove one of them"
        )
    lowering.check_arguments(model, sources, origin, model_class=model_class)
    return model


def _layout(options: flags.Flags, model: Model | None, model_class: str) -> Layout:
    """Read the layout, without what Megatron switches off without tensor parallelism, or refuses without stages."""
    tensor, pipeline, expert, context = (
        flags.whole(options, f"--{name}-parallel-size", LaunchError, 1) or 1
        for name in ("tensor-model", "pipeline-model", "expert-model", "context")
    )
    virtual = flags.whole(options, "--num-virtual-stages-per-pipeline-rank", LaunchError, 1) or 1
    stages = 1 if model is None else len(grammar.parse(model.pattern).stages)
    if model_class == HYBRID:
        stages = len(hybrid.chunks(flags.first(options, "--hybrid-layer-pattern") or ""))
    if stages > 1:
        virtual = max(1, stages // pipeline)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual if pipeline > 1 else 1,
        expert=expert,
        sequence_parallel="--sequence-parallel" in options and tensor > 1,
        context=context,
    )


def _numbers(options: flags.Flags) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Training):
        if field.name not in _NUMBERS:
            continue
        flag, default = _NUMBERS[field.name]
        text = flags.first(options, flag)
        if text is None:
            values |= {} if default is None else {field.name: default}
        elif field.type == "int":
            values[field.name] = flags.whole(options, flag, LaunchError, 1)
        elif field.type == "str":
            values[field.name] = text
        else:
            try:
                values[field.name] = float(text)
            except ValueError:
                raise LaunchError(f"{flag} is {text!r}; expected a number") from None
    return values


def _precision(options: flags.Flags) -> tuple[str, str | None]:
    """Return the precision plan, and the precision file if its content differs from this package's."""
    dtype = "bf16" if "--bf16" in options else "fp32"
    file = flags.first(options, PRECISION_FILE)
    if file is None:
        return dtype, None
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return dtype, file  # Megatron reports why it cannot be read
    is_ours = content == yaml.safe_load(EXPERTS_FILE.read_text(encoding="utf-8"))
    return (FP8_EXPERTS, None) if is_ours and dtype == "bf16" else (dtype, file)


def _grad_bytes(options: flags.Flags) -> int:
    """Return the bytes of a gradient element in the buckets, as decided by Megatron's ``validate_args``."""
    in_fp32 = "--accumulate-allreduce-grads-in-fp32" in options
    if "--bf16" in options:
        halved = flags.first(options, "--main-grads-dtype") == "bf16" and not in_fp32
        return 2 if halved or "--grad-reduce-in-bf16" in options else 4
    return 2 if "--fp16" in options and not in_fp32 else 4


def _explicit_fields(options: flags.Flags) -> frozenset[str]:
    """Return the fields of an execution, and ``precision``, that the arguments name."""
    names = {
        name
        for name, field in FIELDS.items()
        if not options.keys().isdisjoint(field.metadata.get("words", field.metadata.get("names", ())))
    }
    return frozenset(names | ({"precision"} if names & {"fp16", "fp8", "precision_file"} or "--bf16" in options else set()))


def _words_of(options: flags.Flags, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for flag, values in options.items() if flag in names for word in (flag, *values))


def _with_extra(run: Run, model: Model, options: flags.Flags) -> Run:
    """Add the words that ``run`` has no field for; none if its layout does not fit the model, which is refused later."""
    try:
        emitted = flags.read(lowering.words_of(model, run))
    except ModelError:
        return run
    extra = [word for flag, values in options.items() if emitted.get(flag) != values for word in (flag, *values)]
    return dataclasses.replace(run, training=dataclasses.replace(run.training, extra=tuple(extra)))
