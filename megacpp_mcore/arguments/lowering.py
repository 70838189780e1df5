"""Model + layout + training plan -> stock Megatron arguments, and the reverse: checking a stock run against the model.

One table, :func:`model_arguments`, serves both directions, so that the output of ``recipe emit`` and the checks of a run
cannot drift apart. Pure Python; flags are those of Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megacpp_mcore.errors import ArgumentMismatchError, ModelError
from megacpp_mcore.model import DEFAULT, PRESETS, Model, hybrid, precision
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.families.base import Argument, absent, option, switch
from megacpp_mcore.model.run import FEATURES, FIELDS, TORCH_FSDP, Run
from megacpp_mcore.model.run import words_of as field_words
from megacpp_mcore.model.training import BY_MUON, DEFAULT_MODEL_CLASS, GPT, HYBRID, MUON_SCALE, check_optimizer
from megacpp_mcore.util import flags

SPECS: Mapping[str, str] = MappingProxyType({f"{name}{end}": name for name in PRESETS for end in ("", "_hybrid")})
"""The second word of ``--spec megacpp_mcore NAME`` to the preset it builds without a file, with either model class."""
SCRIPTS: Mapping[str, str] = MappingProxyType({GPT: "pretrain_gpt.py", HYBRID: "pretrain_hybrid.py"})
"""Model class to the stock script that builds it."""

_IN_MODULES = ("megacpp_mcore.layer_specs.nam56r.nam56r", "megacpp_mcore.layer_specs.hybrid_model.nam56r_hybrid")
"""Dotted paths of the specs that build a single model class."""

_UNUSED: Mapping[tuple[str, ...], str] = {
    (
        "--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups", "--mamba-num-heads",
        "--disable-mamba-mem-eff-path", "--mamba-training-ssm-states-dtype",
    ): "belongs to Megatron's Mamba-2; set Mamba-3's sizes by `overrides: {mamba3: …}` in the file of MEGACPP_CONFIG",
    (
        "--linear-conv-kernel-dim", "--linear-key-head-dim", "--linear-value-head-dim", "--linear-num-key-heads",
        "--linear-num-value-heads", "--linear-attention-freq", "--gdp-num-householder", "--gdp-cutedsl-kernel",
        "--gdp-num-chunk-states-to-recompute",
    ): "configures gated delta nets and products, which the model does not have",
    (
        "--rotary-seq-len-interpolation-factor", "--use-rope-scaling", "--rope-scaling-factor", "--mrope-section",
        "--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow",
        "--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int",
    ): "scales positions differently than MLA; set its YaRN by `overrides: {mla: {yarn: …}}`",
    (
        "--apply-query-key-layer-scaling", "--add-qkv-bias", "--num-query-groups",
    ): "configures attention that the model does not have",
    (
        "--moe-router-pre-softmax", "--moe-router-quantile-balancing-ema", "--moe-token-drop-policy",
    ): "configures a router that the model does not have",
    ("--openai-gelu",): "is a different GELU from the model's",
    ("--moe-use-upcycling",): "makes experts from a dense model's layers, which the model does not have",
    ("--cpu-offloading-num-layers",): "offloads activations of Megatron's layers only; recompute saves memory, too",
    ("--rampup-batch-size",): "is no longer passed on by Megatron; --step-batch-size-schedule makes batches grow",
    ("--freeze-all-layers",): "freezes no layer of the model with Megatron 0.19",
    ("--init-method-xavier-uniform",): "is another initialization than the model's",
    ("--head-lr-mult",): "is used by no model of Megatron's",
    ("--sft",): "reads conversations, but the model trains on texts of `megacpp-mcore data prepare`",
    (
        "--attention-backend", "--use-flash-attn", "--flash-attention-version", "--use-kitchen-attention",
        "--kitchen-attention-backend", "--batch-invariant-mode",
    ): "selects kernels of Megatron's attention; set the model's by `backends: {mla: …}` in the file of MEGACPP_CONFIG",
}  # fmt: skip
"""Megatron flags that the layers of this package would silently ignore, and why."""


def check_unused(words: Sequence[str]) -> None:
    """Refuse a command line for one of our specs with flags that would have no effect, whatever their value.

    Raises:
        ArgumentMismatchError: one line per flag.
    """
    options = flags.read(words)
    problems = [f"{flag} {why}" for unused, why in _UNUSED.items() for flag in unused if flag in options]
    # Where documents are kept apart it is commonly given, and moot.
    kept_apart = options.keys() & {"--reset-attention-mask", "--dataloader-inter-document-masking"}
    if "--reset-position-ids" in options and not kept_apart:
        problems.append("--reset-position-ids resets positions that only learned embeddings read, and keeps no documents apart")
    if problems:
        raise ArgumentMismatchError(
            f"{'; '.join(problems)}. NAM56R's layers ignore {'them: remove them' if len(problems) > 1 else 'it: remove it'}"
        )


def check_overwritten(model: Model, words: Sequence[str]) -> None:
    """Refuse a HybridModel command line with depths or an attention variant that Megatron would overwrite by its pattern.

    Raises:
        ArgumentMismatchError: one line per flag.
    """
    options = flags.read(words)
    by_pattern = {
        "--num-layers": model.depth,
        "--mtp-num-layers": model.mtp.depth,
        "--experimental-attention-variant": "dsa",
    }
    problems = [
        f"{flag}: found {text}, expected {expected} as in --hybrid-layer-pattern; remove the flag"
        for flag, expected in by_pattern.items()
        if (text := flags.first(options, flag)) and text != str(expected)
    ]
    if problems:
        raise ArgumentMismatchError("; ".join(problems))


def spec_of(model: str) -> tuple[str, str]:
    """Return the two words of ``--spec`` for a model's name; a model other than a preset has to be in the settings file."""
    return "megacpp_mcore", model if model in PRESETS else DEFAULT


def preset_of(spec: Sequence[str] | None) -> str | None:
    """Return the preset that a ``--spec`` value names; None for specs of other packages."""
    words = ".".join(spec or ())
    module, _, name = words.rpartition(".")
    return SPECS.get(name) if module == "megacpp_mcore" or words in _IN_MODULES else None


def model_class_of(arguments: Any) -> str:
    """Return the model class that Megatron's ``arguments`` build: a pattern makes it a HybridModel."""
    return GPT if getattr(arguments, "hybrid_layer_pattern", None) is None else HYBRID


def model_arguments(model: Model, model_class: str = GPT) -> tuple[Argument, ...]:
    """List the stock arguments that describe the model, in a fixed order; for HybridModel also the fields its pattern sets.

    Raises:
        ModelError: unknown model class.
    """
    if model_class not in SCRIPTS:
        raise ModelError(f"the model class is {model_class!r}; expected one of {', '.join(SCRIPTS)}")
    arguments = _gpt_arguments(model)
    return tuple(arguments if model_class == GPT else _on_hybrid(model, arguments))


def model_flags(model: Model) -> set[str]:
    """Return every flag that decides what is trained: those of the model's arguments with either class, present or absent."""
    arguments = (argument for model_class in SCRIPTS for argument in model_arguments(model, model_class))
    return {*(argument.flag for argument in arguments), "--seq-length", "--hybrid-layer-pattern", "--spec"}


def _on_hybrid(model: Model, arguments: Sequence[Argument]) -> list[Argument]:
    """Adapt GPTModel's ``arguments`` to HybridModel: fields that its pattern sets are only checked, not passed."""
    sparse = set(model.roles) & set(grammar.SPARSE)
    by_pattern = "by --hybrid-layer-pattern"
    replaced = {
        "num_layers": Argument((), "num_layers", model.depth, by_pattern),
        "is_hybrid_model": Argument((), "is_hybrid_model", True, by_pattern),
        "mtp_num_layers": Argument((), "mtp_num_layers", model.mtp.depth or None, by_pattern),
        # Megatron itself sets it where the pattern has a D.
        "experimental_attention_variant": absent(
            "--experimental-attention-variant", "experimental_attention_variant", "dsa" if sparse else None
        ),
        "moe_layer_freq": absent("--moe-layer-freq", "moe_layer_freq", 1),
    }
    return [replaced.get(argument.field, argument) for argument in arguments]


def _gpt_arguments(model: Model) -> list[Argument]:
    arguments = [
        option("--num-layers", model.depth),
        option("--hidden-size", model.hidden_size),
        option("--num-attention-heads", model.heads),
        option("--ffn-hidden-size", model.ffn_hidden_size),
        option("--max-position-embeddings", model.seq_length, "seq_length"),
        option("--position-embedding-type", "rope"),
        option("--rotary-base", int(model.rope_theta)),
        # With fan-in init, the model's own rule replaces Megatron's (layer_specs/initial.py).
        absent("--init-method-std", "init_method_std", 0.02)
        if model.start.std is None
        else option("--init-method-std", model.start.std),
        option("--embedding-init-method-std", model.start.embedding_std),
        option("--normalization", "RMSNorm"),
        option("--norm-epsilon", model.norm_eps, "layernorm_epsilon"),
        option("--attention-dropout", 0.0),
        option("--hidden-dropout", 0.0),
        switch("--disable-bias-linear", "add_bias_linear", False),
        switch("--untie-embeddings-and-output-weights", "share_embeddings_and_output_weights", False),
        switch("--no-rope-fusion", "apply_rope_fusion", False),
        absent("--apply-layernorm-1p", "layernorm_zero_centered_gamma", False),
        absent("--swiglu", "gated_linear_unit", False),
        absent("--squared-relu", "activation_func", "gelu"),
        absent("--use-mup", "use_mup", False),
        absent("--experimental-attention-variant", "experimental_attention_variant", None),
        absent("--apply-residual-connection-post-layernorm", "apply_residual_connection_post_layernorm", False),
        absent("--use-te-activation-func", "use_te_activation_func", False),  # the tanh form of GELU
        absent("--activation-func-clamp-value", "activation_func_clamp_value", None),
        absent("--glu-linear-offset", "glu_linear_offset", 0.0),
        absent("--heterogeneous-layers-config-path", "heterogeneous_block_specs", False),
        absent("--hybrid-layer-pattern", "is_hybrid_model", False),
    ]
    for family in FAMILIES.values():
        used = family in model.families
        arguments += family.arguments(model.shape, *model.sizes(family)) if used else family.without
    if model.mtp.depth:
        arguments += [
            option("--mtp-num-layers", model.mtp.depth),
            option("--mtp-loss-scaling-factor", model.mtp.loss_scale),
            switch("--mtp-use-repeated-layer", "mtp_use_repeated_layer", True),
            absent("--mtp-detach-heads", "mtp_detach_heads", False),
        ]
    else:
        arguments.append(absent("--mtp-num-layers", "mtp_num_layers", None))
    return arguments


def lower(run: Run) -> tuple[str, ...]:
    """Return all arguments of a stock ``pretrain_gpt.py`` or ``pretrain_hybrid.py`` run, without the script's name.

    Raises:
        ModelError: the run has no model of this package, its layout does not fit it, its experts cannot run in the FP8 that
            the training plan requests, its optimizer has no moments of their dtype, FSDP2 does not support the layout, or the
            model class is unknown.
    """
    model, training = run.model, run.training
    if model is None:
        raise ModelError("the run has no model of this package, so only Megatron's own arguments are known")
    model.check_layout(run.layout)
    if training.plan.file is not None and (why := precision.unfit(model)):
        raise ModelError(f"precision {training.precision}: {why}")
    check_optimizer(training.optimizer, precision_aware=run.execution.precision_aware)
    check_torch_fsdp(run)
    return words_of(model, run)


def words_of(model: Model, run: Run) -> tuple[str, ...]:
    """Return the arguments of :func:`lower` for a run of ``model``, without its checks."""
    layout, training, how = run.layout, run.training, run.execution
    words = [word for argument in model_arguments(model, run.model_class) for word in argument.words]
    words += ["--seq-length", str(model.seq_length)]
    if run.has_moe:
        words += ["--moe-token-dispatcher-type", how.moe_dispatcher]
    words += [
        "--tensor-model-parallel-size", str(layout.tensor),
        "--pipeline-model-parallel-size", str(layout.pipeline),
        "--expert-model-parallel-size", str(layout.expert),
        "--expert-tensor-parallel-size", "1",
    ]  # fmt: skip
    if layout.context > 1:
        # Megatron's HybridModel accepts only this type with the DSA symbol, whichever backend computes it.
        words += ["--context-parallel-size", str(layout.context), "--cp-comm-type", "allgather"]
    if (divisor := padding_of(layout.tensor)) != _PADDING:
        words += ["--make-vocab-size-divisible-by", str(divisor)]
    words += ["--sequence-parallel"] if layout.sequence_parallel else []
    stages = grammar.parse(model.pattern).stages
    if run.model_class == HYBRID:
        words += ["--hybrid-layer-pattern", hybrid.plan(model, layout).text]
    elif len(stages) > 1:
        words += ["--pipeline-model-parallel-layout", pipeline_layout(stages, model.mtp.depth)]
    elif layout.virtual > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(layout.virtual)]
    words += _training_words(run)
    placed = {"moe_dispatcher", "bucket_elements", "log_interval", "cpu_initialization"}
    placed |= {feature.field for feature in FEATURES}
    for name in FIELDS:
        if name not in placed and (name == "cuda_graph_impl" or name in run.asked):
            words += field_words(name, getattr(how, name))
    if run.asked.get("grad_bytes") == 2 and training.plan.model_dtype == "bf16":
        words.append("--grad-reduce-in-bf16")
    if how.torch_fsdp and "--ckpt-format" not in training.extra:
        words += ["--ckpt-format", TORCH_FSDP_FORMAT]
    return (*words, *training.tokenizer, *training.data, *training.extra, "--spec", *spec_of(model.name))


_PADDING = 128  # Megatron's default


def padding_of(tensor: int) -> int:
    """Return Megatron's vocabulary divisor, to be multiplied by TP: the padded vocabulary is then the same at every TP."""
    return _PADDING // tensor if _PADDING % tensor == 0 else _PADDING


def pipeline_layout(stages: Sequence[str], mtp_depth: int) -> str:
    """Return ``--pipeline-model-parallel-layout`` of staged patterns: E embedding, t layer, m MTP depth, L loss."""
    parts = [f"t*{len(stage)}" for stage in stages]
    parts[0] = "E" + parts[0]
    parts[-1] += ("m" * mtp_depth) + "L"
    return "|".join(parts)


def _training_words(run: Run) -> list[str]:
    training, how = run.training, run.execution
    words = [
        "--micro-batch-size", str(training.micro_batch_size),
        "--global-batch-size", str(training.global_batch_size),
        "--train-iters", str(training.train_iters),
        *(() if training.optimizer == "adam" else ("--optimizer", training.optimizer)),
        *(("--muon-extra-scale-factor", str(MUON_SCALE)) if training.optimizer in BY_MUON else ()),
        "--lr", f"{training.learning_rate:g}",
        "--min-lr", f"{training.min_lr:g}",
        "--lr-decay-style", "cosine",
        "--lr-warmup-iters", str(training.warm_up_steps),
        "--weight-decay", str(training.weight_decay),
        "--adam-beta2", str(training.adam_beta2),
        "--clip-grad", str(training.clip_grad),
        "--seed", str(training.seed),
        "--transformer-impl", training.transformer_impl,
        "--exit-signal-handler",
        "--log-interval", str(how.log_interval),
        "--eval-iters", "0",
        "--eval-interval", str(training.train_iters),
        "--no-masked-softmax-fusion",
        "--no-bias-dropout-fusion",
        # --reset-attention-mask needs that mask.
        *([] if "--reset-attention-mask" in training.extra else ["--no-create-attention-mask-in-dataloader"]),
        *(word for feature in FEATURES for word in field_words(feature.field, getattr(how, feature.field))),
        *field_words("bucket_elements", how.bucket_elements),
    ]  # fmt: skip
    if training.plan.model_dtype == "bf16":
        words.append("--bf16")
    if training.plan.file is not None:
        words += ["--te-precision-config-file", str(training.plan.file)]
    if training.transformer_impl == "local":
        words.append("--no-persist-layer-norm")
    elif training.device == "cuda":
        words.append("--moe-grouped-gemm")
    if training.device == "cpu":
        words += ["--distributed-backend", "gloo"]
    words += field_words("cpu_initialization", how.cpu_initialization)
    return words + (["--num-workers", "0"] if training.device == "cpu" else [])


TORCH_FSDP_FORMAT = "torch_dcp"
_UNDER_TORCH_FSDP: Mapping[str, tuple[Any, str]] = {
    "pipeline parallelism": (1, "a stage's weights would be gathered again for every micro-batch"),
    "expert parallelism":
        (1, "replicas with different experts would pass for shards of one; Megatron asserts it; Megatron-FSDP supports it"),
    "tensor parallelism": (1, "gradients of experts would not be summed over its ranks"),
    "context parallelism": (1, "no run has verified its gradients"),
    "calculate_per_token_loss": (False, "gradients would be divided by the replicas and by the tokens of all of them"),
    "cuda_graph_impl": ("none", "gathered weights have no fixed address"),
    "MTP depths under --recompute-granularity full": (1, "recomputing the shared MTP block again would drop gradients"),
    "use_distributed_optimizer": (False, "optimizer state is sharded already"),
    "ckpt_format": (TORCH_FSDP_FORMAT, "no other format holds the optimizer state of sharded weights"),
}  # fmt: skip
"""Values required of a run under FSDP2, and why."""


def check_torch_fsdp(run: Run) -> None:
    """Refuse a layout that FSDP2 does not support; do nothing without FSDP2.

    Raises:
        ModelError: lists every obstacle.
    """
    if run.torch_fsdp:
        sharded = {"pipeline": run.layout.pipeline, "expert": run.layout.expert}
        sharded |= {"tensor": run.layout.tensor, "context": run.layout.context}
        check_under_torch_fsdp({f"{name} parallelism": size for name, size in sharded.items()})


def check_under_torch_fsdp(values: Mapping[str, Any]) -> None:
    """Refuse values under which a run would train wrongly, or not at all, with FSDP2.

    Keys are Megatron's argument names, or ``pipeline parallelism`` and the like.

    Raises:
        ModelError: lists every obstacle.
    """
    obstacles = [
        f"{name} is {value!r}, expected {_UNDER_TORCH_FSDP[name][0]!r} ({_UNDER_TORCH_FSDP[name][1]})"
        for name, value in values.items()
        if value != _UNDER_TORCH_FSDP[name][0]
    ]
    if obstacles:
        raise ModelError(f"{TORCH_FSDP}: {'; '.join(obstacles)}; change that, or remove {TORCH_FSDP}")


def mismatches(model: Model, sources: Sequence[object], model_class: str = GPT) -> list[str]:
    """List every contradiction between a run's configuration and ``model``, one sentence each.

    ``sources`` are the run's configuration objects, searched in order for each field (Megatron's TransformerConfig first,
    then its GPTModelConfig or HybridModelConfig).
    """
    problems = []
    for argument in model_arguments(model, model_class):
        holder = next((source for source in sources if hasattr(source, argument.field)), None)
        if holder is None:
            problems.append(f"{argument.field}: not configured; expected {argument.expected!r} ({argument.remedy})")
            continue
        value = getattr(holder, argument.field)
        if not same(value, argument.expected):
            problems.append(f"{argument.field}: found {value!r}, expected {argument.expected!r} ({argument.remedy})")
    if model_class == HYBRID:
        problems += hybrid.contradictions(model, _first(sources, "hybrid_layer_pattern", None))
    return problems + _precision_mismatches(model, sources) + _vocabulary_mismatch(model, sources)


def check_sizes(model: Model, words: Sequence[str], origin: str = "", model_class: str = GPT) -> None:
    """Refuse a command line with other numbers or patterns than the model's; flags it omits are not compared.

    Raises:
        ArgumentMismatchError: as :func:`check_arguments`, which compares everything once Megatron has read the words.
    """
    options = flags.read(words)

    def differing(model: Model) -> list[str]:
        problems = [
            f"{argument.field}: found {text}, expected {argument.expected!r} ({argument.remedy})"
            for argument in model_arguments(model, model_class)
            if (text := flags.first(options, argument.flag)) and _differs(text, argument.expected)
        ]
        text = flags.first(options, "--hybrid-layer-pattern") if model_class == HYBRID else None
        return problems if text is None else problems + hybrid.contradictions(model, text)

    _refuse(model, differing, origin, model_class)


def _differs(text: str, expected: Any) -> bool:
    """Return whether ``text`` is a number, or list of numbers, other than ``expected``; other texts are not compared."""
    try:
        number = json.loads(text)
    except ValueError:
        return False
    return type(number) is type(expected) and number != expected


def _precision_mismatches(model: Model, sources: Sequence[object]) -> list[str]:
    """List mismatches of per-module precision with :data:`precision.EXPERTS_FILE`, and settings that this file requires."""
    recipe = _first(sources, "quant_recipe", None)
    if recipe is None:
        return []
    problems = []
    if not precision.is_experts_recipe(recipe):
        matchers = ", ".join(f"{matcher}" for matcher in recipe.matchers) or "no matcher"
        problems.append(
            f"quant_recipe: found {matchers} with {recipe.configs}, expected those of {precision.EXPERTS_FILE}, FP8 in the "
            f"experts only (--te-precision-config-file {precision.EXPERTS_FILE}, or leave it out)"
        )
    # With any other value stock silently ignores the file, or runs FP8 that has not been compared with BF16.
    for field, expected, remedy in (
        ("transformer_impl", "transformer_engine", "--transformer-impl transformer_engine"),
        ("bf16", True, "--bf16"),
        ("moe_grouped_gemm", True, "--moe-grouped-gemm"),
        ("use_transformer_engine_op_fuser", False, "without --use-transformer-engine-op-fuser"),
    ):
        value = _first(sources, field, expected)
        if not same(value, expected):
            problems.append(f"{field}: found {value!r}, expected {expected!r} with FP8 experts ({remedy})")
    why = precision.unfit(model)
    return problems + ([f"quant_recipe: {why} (without --te-precision-config-file)"] if why else [])


def _vocabulary_mismatch(model: Model, sources: Sequence[object]) -> list[str]:
    """Return a mismatch of the vocabulary size, which is padded or not in Megatron's configuration, depending on the run."""
    vocab_size = _first(sources, "vocab_size", None)
    divisor = int(_first(sources, "make_vocab_size_divisible_by", _PADDING))  # to be multiplied by tensor parallelism
    padded = model.vocab_size_padded(_first(sources, "tensor_model_parallel_size", 1), divisor)
    if vocab_size in (model.vocab_size, padded):
        return []
    return [
        f"vocab_size: found {vocab_size!r}, expected {model.vocab_size}, or {padded} with padding "
        "(choose a tokenizer of that size, or override vocab_size in the file MEGACPP_CONFIG names)"
    ]


def _first(sources: Sequence[object], field: str, default: Any) -> Any:
    return next((getattr(source, field) for source in sources if hasattr(source, field)), default)


def same(found: Any, expected: Any) -> bool:
    """Return whether a value of Megatron's configuration is the expected one."""
    if isinstance(found, (list, tuple)) and isinstance(expected, list):
        return list(found) == expected
    if isinstance(found, list) and len(found) == 1 and not isinstance(expected, list):
        return same(found[0], expected)
    if callable(found) and isinstance(expected, str):
        return bool(getattr(found, "__name__", None) == expected)
    if expected is None or isinstance(expected, bool) or isinstance(found, bool):
        return found is expected or (expected is False and found is None)
    return bool(found == expected)


def check_arguments(model: Model, sources: Sequence[object], origin: str = "", model_class: str = GPT) -> None:
    """Refuse a run whose configuration contradicts ``model``, listing all contradictions at once, and ``origin``.

    Raises:
        ArgumentMismatchError: one line per contradiction, with the argument that resolves it; the closest preset, if the
            configuration fits another one better.
    """
    _refuse(model, lambda candidate: mismatches(candidate, sources, model_class), origin, model_class)


def _refuse(model: Model, differing: Callable[[Model], list[str]], origin: str, model_class: str) -> None:
    """Raise if a run differs from ``model``; ``differing`` lists the differences from any model."""
    problems = differing(model)
    if problems:
        places = {preset.name: [line.partition(":")[0] for line in differing(preset)] for preset in PRESETS.values()}
        closest = min(places, key=lambda name: len(places[name]))
        spec, equal, advice = f"--spec {' '.join(spec_of(closest))}", "", ""
        class_option = "" if model_class == DEFAULT_MODEL_CLASS else f" --model-class {model_class}"
        if not places[closest]:
            equal = f", and are those of {closest} ({spec})"
        elif len(places[closest]) < len(problems):
            advice = f"\nThe closest preset is {closest}, {spec}; it differs in {', '.join(places[closest])}."
        raise ArgumentMismatchError(
            f"the run's arguments contradict {model.name}{origin} in {len(problems)} place{'s' if len(problems) > 1 else ''}"
            f"{equal}:\n  "
            + "\n  ".join(problems)
            + f"\n`megacpp-mcore recipe emit {model.name} --as cli{class_option}` prints "
            f"the whole command.{advice}"
        )
