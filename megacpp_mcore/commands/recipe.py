"""``megacpp-mcore recipe list|show|flops|memory|emit``: describes models and recipes, and prints a recipe's stock command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering, overrides, stock_command
from megacpp_mcore.arguments import read as reading
from megacpp_mcore.arguments.lowering import SCRIPTS, lower
from megacpp_mcore.arguments.stock_command import DATA_VARIABLE, LAUNCH, WAYS, Slurm, StockCommand
from megacpp_mcore.commands import model_card
from megacpp_mcore.data.readable import refuse_suffix
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.launch import plan
from megacpp_mcore.model import PRESETS, Layout, Model, hybrid, memory, preset
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops import utilisation as flops_report
from megacpp_mcore.model.flops.recompute import MODULES, Recomputation, recomputed
from megacpp_mcore.model.recipes import RECIPES, Recipe
from megacpp_mcore.model.run import CAPTURED, Run
from megacpp_mcore.model.training import DEFAULT_MODEL_CLASS, RECOMPUTED, Recompute, Training, named_as
from megacpp_mcore.util import flags
from megacpp_mcore.util.files import writable
from megacpp_mcore.util.nearest import nearest

_FORMS: Mapping[str, Callable[[StockCommand], str]] = {
    "cli": stock_command.as_cli, "yaml": stock_command.as_yaml, "args": stock_command.as_args,
}  # fmt: skip
_NUMBER = {"type": int, "metavar": "N"}
_OF_TRAINING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "device": ("device", {"choices": ("cuda", "cpu"), "help": "default: cpu for nam56r_tiny…, cuda for the others"}),
    "impl": (
        "transformer_impl",
        {"choices": ("transformer_engine", "local"), "help": "default: local on cpu, else TE"},
    ),
    "micro-batch-size": ("micro_batch_size", {**_NUMBER, "help": "default: 1, or the recipe's"}),
    "global-batch-size": ("global_batch_size", {**_NUMBER, "help": "default: 8, or the recipe's"}),
    "train-iters": ("train_iters", {**_NUMBER, "help": "default: 1000"}),
    "lr": ("learning_rate", {"type": float, "help": "default: 3e-4"}),
}
"""Options of ``recipe emit`` that are fields of :class:`Training`, with the fields' names."""
_OF_LAYOUT: dict[str, Mapping[str, Any]] = {
    **{
        name: {**_NUMBER, "help": f"{name} parallelism (default: 1)"}
        for name in ("tensor", "pipeline", "virtual", "expert", "context")
    },
    "sequence-parallel": {"action": "store_true", "default": None},
}
_OF_RUN: dict[str, Mapping[str, Any]] = {
    "settings": {"metavar": "FILE", "help": "write the changed model there, for MEGACPP_CONFIG; --set of a model needs it"},
    "overwrite": {"action": "store_true", "help": "replace the file of --settings, whatever its content"},
    "model-class": {"choices": tuple(SCRIPTS), "help": "hybrid (default): pretrain_hybrid.py; gpt: pretrain_gpt.py"},
    "via": {
        "choices": WAYS,
        "help": "launch (default): the script by megacpp-mcore launch, which checks data and GPUs first and prints the launch "
                "policy; wheel: the same without a script; bare: only the script, under torchrun",
    },
    "nodes": {"type": flags.positive, "metavar": "N", "help": "hosts (default: 1)"},
    "gpus-per-node": {
        "type": flags.positive, "metavar": "N", "help": "default: what the layout needs, spread over the nodes"
    },
    "data": {"metavar": "PREFIX", "help": "dataset prefix; default: the shell variable DATA_PREFIX"},
    "tokenizer": {"metavar": "DIR", "help": "Hugging Face tokenizer folder; default: bytes or ids as they are"},
}  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Add ``recipe`` to the command line."""
    words = "list the models, show one, or print the stock command that trains it"
    parser = subparsers.add_parser("recipe", help=words)
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="one line a model, then one a recipe")
    listing.add_argument("--markdown", action="store_true", help="print the page docs/model-card.md")
    show = actions.add_parser("show", help="the whole definition of a model, its layers and parameter counts, as JSON")
    flops_parser = actions.add_parser("flops", help="FLOPs of a training step by family, and what recompute adds")
    memory_parser = actions.add_parser("memory", help="the estimated memory of a GPU by part, and what to recompute")
    for action in (show, flops_parser, memory_parser):
        action.add_argument("name")
        _add_set(action, "model values to override")
    add_flops_arguments(flops_parser)
    add = memory_parser.add_argument
    add("--gpu-gb", type=flags.not_negative, default=H200_GB, help="of the GPU, in 10^9 bytes (default: an H200)")
    for wanted, what in (("gpus", "GPUs"), ("context", "context parallelism"), ("micro-batch-size", "rows of one")):
        add(f"--{wanted}", type=flags.positive, metavar="N", help=f"{what}; default: 1, or the recipe's")
    usage = "%(prog)s NAME [OPTIONS] [-- ARGUMENTS of Megatron]"
    emit = actions.add_parser("emit", help="the complete stock Megatron command for a model", usage=usage)
    emit.add_argument("name", help="the model or recipe")
    forms = "a shell command, a YAML file, an sbatch script, or only the arguments, one word a line"
    emit.add_argument("--as", dest="form", choices=(*_FORMS, "slurm"), default="cli", help=forms)
    _add_set(emit, "model, layout and run values to override")
    of_training = {name: options for name, (_, options) in _OF_TRAINING.items()}
    for name, options in (_OF_RUN | _OF_LAYOUT | of_training).items():  # each is None unless used
        emit.add_argument(f"--{name}", **options)
    for option in dataclasses.fields(Slurm):
        kind = int if option.name == "cpus_per_task" else str
        emit.add_argument(f"--{option.name.replace('_', '-')}", type=kind, help="of the job (--as slurm)")


def _add_set(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--set", dest="values", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=f"{what}: dsa.topk=64"
    )


def run(args: argparse.Namespace) -> int:
    """Run ``recipe`` and return the exit status."""
    if args.action == "list" and args.markdown:
        print(model_card.page(), end="")
    elif args.action == "list":
        width = max(map(len, (*PRESETS, *RECIPES)))
        for model in PRESETS.values():
            print(f"{model.name:<{width}} {_summary(model)}")
        for recipe in RECIPES.values():
            print(f"{recipe.name:<{width}} {_plan(recipe)}")
    elif args.action == "show":
        print(json.dumps(_shown(args.name, args.values), indent=2))
    elif args.action == "flops":
        print(counted(_changed_model(args.name, args.values), args))
    elif args.action == "memory":
        print("\n".join(estimated(args)))
    else:
        print(emit(args))
    return 0


H200_GB = 150.1
"""Memory of an H200, as torch has it."""


def estimated(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that ``recipe memory`` prints.

    Raises:
        ModelError: no such run is possible, or its memory is not known.
    """
    recipe, model = _recipe(args.name), _changed_model(args.name, args.values)
    run = recipe.run if recipe else Run(model)
    layout = dataclasses.replace(run.layout, context=args.context or run.layout.context)
    model.check_layout(layout)
    sizes = {"processes": args.gpus, "micro_batch_size": args.micro_batch_size}
    training = dataclasses.replace(run.training, **{name: value for name, value in sizes.items() if value is not None})
    settings = run.settings if recipe is None or recipe.settings is None else plugin_config.of_recipe(recipe)
    run = dataclasses.replace(run, model=model, layout=layout, training=training, settings=settings)
    held, ways = memory.states(run), memory.choices(run)
    if held is None or not ways:
        raise ModelError(f"the memory of {args.name} is not estimated: its optimizer is {training.optimizer}, not adam")
    fitting = [way for way in ways if way.total <= memory.usable(round(args.gpu_gb * 1e9))]
    best = fitting[0] if fitting else ways[-1]
    parts = {"states": held.total} | (memory.activations(run, best.how) or {})
    parts |= {"FP8 copies of weights": copies} if (copies := memory.quantised(run, held)) else {}
    rows = training.micro_batch_size * model.seq_length // layout.context
    yield f"{args.name}: {rows} tokens a GPU and micro-batch, {run.processes} GPU{'s' * (run.processes > 1)}, estimated"
    yield f"\n{'recompute':40}{'GB':>8}{'more µs a token':>18}"
    for way in ways:
        note = "" if way in fitting else "   does not fit"
        yield f"{way.how!s:40}{way.total / 1e9:8.1f}{way.seconds * 1e6:18.1f}{note}"
    yield f"\n{f'by part, recompute {best.how}':40}{'GB':>8}"
    for name, size in parts.items():
        yield f"{name:40}{size / 1e9:8.1f}"
    if fitting:
        yield f"\nthe quickest that fits {args.gpu_gb} GB: {_recompute_words(best.how)}"
    else:
        yield f"\nno way fits {args.gpu_gb} GB: use more GPUs, --context, or shorter rows"


def _recompute_words(how: Recomputation) -> str:
    """Return what to write for ``how``: in the settings file, and Megatron's arguments."""
    words = [f"recompute: [{', '.join(how.own.on)}] in the file of MEGACPP_CONFIG"] if how.own.on else []
    if how.granularity == "full":
        words.append(f"--recompute-granularity full --recompute-method {how.method} --recompute-num-layers {how.num_layers}")
    return "; ".join(words) or "recompute nothing"


def _shown(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the model or recipe called ``name``, ready for JSON; a model with the values that ``words`` set."""
    model, recipe = _changed_model(name, words), _recipe(name)
    held = memory.states(recipe.run if recipe else Run(model))
    described = model.record() | {
        "layers": model.layers,
        "attention_roles": {number: role for number, role in enumerate(model.roles, 1) if role},
        "hybrid_layer_pattern": hybrid.plan(model).text,
        "parameters": model.parameters() | {"total": sum(model.parameters().values())},
        "states_bytes": {} if held is None else dataclasses.asdict(held) | {"total": held.total},
    }
    if recipe is None:
        return described
    training = dataclasses.asdict(recipe.run.training)
    plan = {key: value for key, value in training.items() if not isinstance(value, tuple)}
    plan["settings"] = recipe.settings and str(recipe.settings)
    layout = dataclasses.asdict(recipe.run.layout)
    return {"name": name, "processes": recipe.processes, "layout": layout, "training": plan, "model": described}


def _changed_model(name: str, words: Sequence[str]) -> Model:
    """Return the model of the model or recipe called ``name``, with the values that ``words`` set."""
    of_model, *others = overrides.read(words)
    if of_run := {**others[0], **others[1]}:
        raise ModelError(f"{', '.join(of_run)} is a run setting; pass it to `recipe emit`")
    recipe = _recipe(name)
    return overrides.apply(chosen_model(recipe.model.name if recipe else name)[0], of_model)


def _recipe(name: str) -> Recipe | None:
    """Return the recipe called ``name``; None when that names a model, a preset or the file of MEGACPP_CONFIG."""
    if name in RECIPES:
        return RECIPES[name]
    loaded = plugin_config.from_environment()
    models = (*PRESETS, *([loaded.model.name] if loaded is not None else []))
    if name not in models:
        raise ModelError(f"there is no model or recipe {name!r}; {nearest(name, (*models, *RECIPES))}")
    return None


def chosen_model(name: str) -> tuple[Model, plugin_config.PluginConfig | None]:
    """Return the model that a user means by ``name``, and the file of MEGACPP_CONFIG when it is that file's model.

    A file about another model is ignored, with a line on standard error.
    """
    loaded = plugin_config.from_environment()
    if loaded is not None and name in (loaded.preset, loaded.model.name):
        return loaded.model, loaded
    model = preset(name)
    if loaded is not None:
        note = f"{plugin_config.VARIABLE} names {loaded.path}, which is about {loaded.preset}; {name} is used unchanged"
        print(f"note: {note}", file=sys.stderr)
    return model, None


def emit(args: argparse.Namespace) -> str:
    """Return the text that ``recipe emit`` prints.

    Raises:
        LaunchError, ModelError, DataError: the options contradict each other, or no such run is possible.
    """
    slurm = Slurm(**{option.name: getattr(args, option.name) for option in dataclasses.fields(Slurm)})
    if args.form != "slurm" and slurm.given():
        raise LaunchError(f"--{slurm.given()[0][0]} is an option of a batch job; add --as slurm, or leave it out")
    command = command_of(args)
    environment = dict(os.environ)
    if file := environment.get(plugin_config.VARIABLE):
        environment[plugin_config.VARIABLE] = os.path.realpath(file)  # as the command names it
    missing = [f"{name}={value}" for name, value in command.env.items() if environment.get(name) != str(value)]
    if args.form == "args" and missing:
        lacking = f"the arguments do not include the run's environment; set {' '.join(missing)}"
        if plugin_config.VARIABLE in lacking and not args.settings:  # without it the same words train something else
            raise LaunchError(f"{lacking} first, or use --as cli")
        print(f"note: {lacking}", file=sys.stderr)
    return stock_command.as_slurm(command, slurm) if args.form == "slurm" else _FORMS[args.form](command)


def command_of(args: argparse.Namespace) -> StockCommand:
    """Return the run that the options of ``recipe emit`` describe; writes the file of ``--settings`` if one is needed.

    Raises:
        LaunchError, ModelError, DataError: as :func:`emit`.
    """
    changes = overrides.read(args.values)
    recipe = _recipe(args.name)
    name = recipe.model.name if recipe else args.name
    original, loaded = chosen_model(name)
    loaded = loaded if recipe is None or recipe.settings is None else plugin_config.of_recipe(recipe)
    model = overrides.apply(original, changes.model)
    of_layout = _once(args, changes.layout, {option: option.replace("-", "_") for option in _OF_LAYOUT})
    of_training = _once(args, changes.training, {option: field for option, (field, _) in _OF_TRAINING.items()})
    # A model without a recipe: the tiny ones are for a laptop, the others for GPUs.
    device = of_training.get("device", "cpu" if name.startswith("nam56r_tiny") else "cuda")
    usual = Training(device="cpu", precision="fp32", transformer_impl="local") if device == "cpu" else Training()
    base = recipe.run if recipe else Run(original, training=usual)
    layout = dataclasses.replace(base.layout, **of_layout)
    model.check_layout(layout)  # first, because processes and batch follow from it
    if model == original and args.settings is not None:
        raise LaunchError(f"--settings {args.settings} is for a model that --set changes, but nothing is changed; remove it")
    if args.data is not None and not os.path.exists(args.data + ".idx"):
        refuse_suffix(args.data)
        print(f"note: there is no {args.data}.idx; the command needs a prepared dataset there", file=sys.stderr)
    if "processes" in of_training:
        raise LaunchError("the number of processes is --nodes × --gpus-per-node; use those options instead of --set")
    from megacpp_mcore.data.tokenizer import tokenizer_words  # imports numpy, which the command line starts without

    options = {field: f"--{option}" for option, (field, _) in _OF_TRAINING.items() if field not in changes.training}
    with named_as(options):
        training = dataclasses.replace(
            base.training,
            data=("--data-path", args.data or DATA_VARIABLE, "--split", "100,0,0"),
            tokenizer=tokenizer_words(model, args.tokenizer, args.data),
            **of_training,
        )
    nodes, per_node = _processes(args, layout, training, base.training.processes)
    training = dataclasses.replace(training, processes=nodes * per_node)
    run = Run(model, layout, training, args.model_class or DEFAULT_MODEL_CLASS, base.asked, loaded)
    script = SCRIPTS[run.model_class]
    arguments = _with_extra(model, run, tuple(args.stock_command), None if args.via == "wheel" else Path(script))
    if of_training.get("cuda_graphs") and not run.is_captured:
        print(f"note: cuda_graphs=true is left out: {CAPTURED}", file=sys.stderr)
    settings = None if loaded is None else loaded.path
    if model != original:  # last: a run that is refused writes nothing
        settings = _write_settings(args, name, model, loaded)
    env = {} if settings is None else {plugin_config.VARIABLE: os.path.realpath(settings)}
    if layout.tensor > 1 and training.device == "cuda":
        # Megatron 0.19 stops without it on GPUs before Blackwell; the CPU lane sets it itself.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return StockCommand(
        recipe=model.name,
        device=training.device,
        via=args.via or LAUNCH,
        script=script,
        nodes=nodes,
        processes_per_node=per_node,
        env=env,
        arguments=arguments,
    )


def _with_extra(model: Model, run: Run, extra: tuple[str, ...], script: Path | None) -> tuple[str, ...]:
    """Return the arguments of ``run``, of ``model``, with ``extra`` among them, which must not change the model or the plan."""
    words = lower(run)
    if not extra:
        return words
    arguments = lower(dataclasses.replace(run, training=dataclasses.replace(run.training, extra=extra)))
    own, added = flags.read(words), flags.read(extra)
    if not extra[0].startswith("--"):
        raise LaunchError(f"{extra[0]} after -- belongs to no argument; expected --name, and then its values")
    if changed := [flag for flag in added if flag in lowering.model_flags(model) and added[flag] != own.get(flag)]:
        raise LaunchError(f"{', '.join(changed)} after -- would change the model; use --set, or another name")
    plan.check_words(script, arguments, here=False)
    lowering.check_unused(extra)

    def described(words: Sequence[str]) -> dict[str, Any]:
        read = reading.read(words, device=run.device, processes=run.processes, model=model)
        training = dataclasses.replace(read.training, extra=(), data=(), tokenizer=())
        return dataclasses.asdict(read.layout) | dataclasses.asdict(training)

    after = described(arguments)
    if differ := [name for name, value in described(words).items() if after[name] != value]:
        raise LaunchError(f"{' '.join(extra)} after -- would change {', '.join(differ)}; use --set {differ[0]}=…")
    return arguments


def _once(args: argparse.Namespace, values: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` of ``--set`` and those of the options ``fields`` (to field names); refuse one set by both."""
    merged = dict(values)
    for option, field in fields.items():
        value = getattr(args, option.replace("-", "_"))
        if value is not None and field in merged:
            raise LaunchError(f"--{option} and --set {field} are the same setting; pass only one")
        if value is not None:
            merged[field] = value
    return merged


def _processes(args: argparse.Namespace, layout: Layout, training: Training, usual: int) -> tuple[int, int]:
    """Return nodes and processes per node, checked against layout and batch; default: ``usual``, or the fewest possible."""
    nodes, least = args.nodes or 1, layout.processes
    wanted = least if usual % least else usual
    if args.gpus_per_node is None and wanted % nodes:
        raise LaunchError(f"{wanted} processes do not spread evenly over {nodes} nodes; set --gpus-per-node")
    per_node = args.gpus_per_node or wanted // nodes
    if nodes * per_node % least:
        raise LaunchError(
            f"the layout needs a multiple of {least} processes, and {nodes} nodes × {per_node} are {nodes * per_node}; change "
            "--nodes, --gpus-per-node or the layout"
        )
    replicas = layout.replicas(nodes * per_node)
    if training.global_batch_size % (training.micro_batch_size * replicas):
        raise ModelError(
            f"the global batch of {training.global_batch_size} is not a multiple of the micro-batch "
            f"({training.micro_batch_size}) × {replicas} data-parallel replicas; change --global-batch-size or "
            "--micro-batch-size"
        )
    return nodes, per_node


def _write_settings(args: argparse.Namespace, name: str, model: Model, loaded: plugin_config.PluginConfig | None) -> Path:
    """Write the file of ``--settings`` for ``model``, with the other settings of ``loaded``; no other file is replaced."""
    if args.settings is None:
        raise LaunchError(
            "--set changes the model, and a run is checked against its model, which has to be in a file that "
            f"{plugin_config.VARIABLE} names; add --settings FILE, which is written"
        )
    base = loaded.preset if loaded is not None else name
    # The file's other settings are kept: they were checked when it was loaded.
    content = {} if loaded is None else yaml.safe_load(loaded.path.read_text(encoding="utf-8"))
    content |= {"model": base, "overrides": overrides.differences(model, preset(base))}
    text, path = yaml.safe_dump(content, sort_keys=False), Path(args.settings)
    writable(path)
    try:
        if not args.overwrite and path.exists() and path.read_bytes() != text.encode():
            raise LaunchError(f"{path} exists with different content; choose another file, or add --overwrite")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error}); name another file with --settings") from error
    return path


def add_flops_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``recipe flops``; recompute is spelled as in Megatron and in our file."""
    add, ours = parser.add_argument, f"ours: {', '.join(RECOMPUTED)}"
    add("--seq-length", type=int, metavar="N", help="tokens of a sequence (default: the model's)")
    add("--recompute-granularity", choices=("full", "selective"), help="as in Megatron")
    add("--recompute-method", choices=("uniform", "block"), help="as in Megatron")
    add("--recompute-num-layers", type=int, metavar="N", help="as in Megatron, of one pipeline stage")
    add("--recompute-modules", nargs="+", choices=MODULES, metavar="NAME", help="as in Megatron")
    add("--recompute", nargs="+", choices=RECOMPUTED, default=[], metavar="FAMILY", help=ours)
    add("--json", action="store_true", help="the counts of one sequence as JSON, as receipts keep them")


def counted(model: Model, args: argparse.Namespace) -> str:
    """Format the output of ``recipe flops`` for ``model``.

    Raises:
        ModelError: a length below 1, or recompute settings that no run can have.
    """
    how = Recomputation.of_run(args, Recompute(**dict.fromkeys(args.recompute, True)))
    if not args.json:
        return flops_report.page(model, how, seq_length=args.seq_length)
    step = flops.step(model, seq_length=args.seq_length)
    return json.dumps(flops_report.record(step, recomputed(model, step, how)), indent=2)


def _summary(model: Model) -> str:
    counts = ", ".join(f"{model.layers.count(letter)} {letter}" for letter in FAMILIES if letter in model.layers)
    total = sum(model.parameters().values()) / 1e9
    return f"{model.depth} layers ({counts}), hidden {model.hidden_size}, {total:.4g} B parameters, MTP {model.mtp.depth}"


def _plan(recipe: Recipe) -> str:
    training = recipe.run.training
    layout = ", ".join(
        f"{name} {value}" for name, value in dataclasses.asdict(recipe.run.layout).items() if value not in (1, False)
    )
    return (
        f"{recipe.model.name} on {recipe.processes} × {training.device}, "
        f"{training.precision}{' and FP8' * recipe.name.endswith('_fp8')}, {layout or 'not cut'}, "
        f"batch {training.global_batch_size} by {training.micro_batch_size}{', CUDA graphs' * training.cuda_graphs}"
    )
