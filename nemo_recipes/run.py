"""``python -m megacpp_mcore.nemo_recipes.run --recipe NAME [KEY=VALUE …]``: runs a recipe with Bridge's own ``pretrain``.

Start it with torchrun for more than one process. Bridge itself is not changed; this module prepares the process as the
launcher does (launch policy, CPU lane, patches, data verification, recording of the run), and refuses, before
Megatron starts, whatever cannot work.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.overrides import is_ours
from megacpp_mcore.arguments.overrides import read as read_overrides
from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.errors import ArgumentMismatchError, DataError, LaunchError, MegacppError, ModelError
from megacpp_mcore.launch import extensions, launcher, process
from megacpp_mcore.model import Layout
from megacpp_mcore.model.recipes import RECIPES, Recipe, recipe
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import HYBRID, named_as
from megacpp_mcore.nemo_recipes import bridge
from megacpp_mcore.nemo_recipes.bridge_loop import BridgeLoop
from megacpp_mcore.nemo_recipes.read_bridge import read
from megacpp_mcore.observe import recording as observation
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.policy import ranks
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.util import schema, stand_in, te_imports
from megacpp_mcore.util.collectives import say
from megacpp_mcore.util.files import is_remote
from megacpp_mcore.util.nearest import nearest

PATCHES = ("dataset-helpers", "sample-indices")
"""Patches for every run. The spec applies its own."""


_COUNTS = ("train.train_iters", "train.micro_batch_size", "train.global_batch_size")
"""Counts that a recipe must set: the schedule is derived from them."""

_LAYOUT = {
    "model.tensor_model_parallel_size": "tensor",
    "model.pipeline_model_parallel_size": "pipeline",
    "model.virtual_pipeline_model_parallel_size": "virtual",
    "model.expert_model_parallel_size": "expert",
    "model.sequence_parallel": "sequence_parallel",
}
"""Override key to the layout field that it changes."""

_STAGES = ("model.pipeline_model_parallel_layout=", "model.hybrid_layer_pattern=")

_PLANNED = {
    "recompute": ("model.recompute_",),
    "CUDA graphs": ("model.cuda_graph_",),
    "precision": ("mixed_precision", "model.bf16", "model.fp16", "model.fp8", "model.te_precision"),
}
"""Launch-policy value to the key prefixes of overrides that mark it as set by the user."""


def run(
    name: str,
    overrides: Sequence[str] = (),
    recording: launcher.Recording | None = None,
    model_class: str | None = None,
) -> None:
    """Train recipe ``name``, changed by ``overrides``: ``key=value`` as in ``recipe emit --set``, or ``section.key=value`` of
    Bridge's.

    ``model_class`` is Megatron's that holds the layers, ``gpt`` or ``hybrid``; None: the recipe's.

    Raises:
        LaunchError, ConfigFileError, ModelError, ArgumentMismatchError, DataError: it cannot work; before Megatron starts.
    """
    ours = [override for override in overrides if is_ours(override)]
    overrides = [override for override in overrides if not is_ours(override)]
    for override in overrides:
        check_form(override)  # before the minute in which Bridge is imported
    check_once(ours, overrides)
    chosen = changed(with_own_model(recipe(name), plugin_config.from_environment()), ours)
    chosen = dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, model_class=model_class or chosen.run.model_class))
    settings = chosen.run.settings
    with contextlib.ExitStack() as stack:
        stack.enter_context(stand_in.process_environment())
        if settings is not None:
            stack.enter_context(stand_in.environment({plugin_config.VARIABLE: str(settings.path)}))
        layout = layout_of(chosen, overrides)
        check_processes(chosen, layout)
        check_stages(chosen, layout, overrides)
        environment = dict(os.environ)  # the user's, before the CPU lane modifies it
        on_cpu = chosen.run.training.device == "cpu"
        if on_cpu:
            stack.enter_context(process.cpu_lane())
        else:
            os.environ |= te_imports.cudnn_home(environment)  # before Bridge imports Transformer Engine
        stack.enter_context(process.children_end_with_it())
        stack.enter_context(extensions.stale_locks_removed())
        stack.enter_context(process.revert_patches_on_exit())
        say(f"patches: {', '.join(registry.default().apply(PATCHES)) or 'applied already'}")
        bridge.prepare()
        stack.enter_context(bridge.signals_a_step_later())
        if on_cpu:
            say(f"CPU lane: {stack.enter_context(bridge.preserve_rng_during_warmup())}")
        config = configured(chosen, overrides)
        check_config(config, layout)
        say(f"recipe {name} | device {chosen.run.training.device} | world size {os.environ['WORLD_SIZE']}")
        described = read(chosen.run, config, int(os.environ["WORLD_SIZE"]))
        launched = launch_policy(described, config, overrides, environment)
        for line in launched.lines(settings):
            say(line)
        stack.enter_context(stand_in.environment(launched.environment()))
        policy.check_memory(described)  # initializes CUDA, which reads the environment once
        stack.enter_context(policy.active(settings))
        stack.enter_context(torch.autograd.set_multithreading_enabled(True))  # as in the launcher
        say(verify_data(config))
        if doubt := doubt_about(config):
            say(doubt)
        from megatron.bridge.training.callbacks import CallbackManager
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from megacpp_mcore.layer_specs import training_step

        callbacks = CallbackManager()
        cache = config.dataset.path_to_cache
        callbacks.register("on_train_start", lambda _: ranks.compare_facts(lambda: ranks.of_datasets(cache)))
        callbacks.register("on_train_start", lambda _: claim_save_folder(config))
        stack.callback(checkpoint_folder.release)
        requested = _observation(config, recording or launcher.Recording(), settings)
        say(requested.describe())
        stack.enter_context(observation.observed(requested, launched, BridgeLoop(config, callbacks)))
        pretrain(config, training_step.count_from(forward_step), callbacks=callbacks)
        process.leave_process_group()


def _observation(config: Any, recording: launcher.Recording, settings: PluginConfig | None) -> observation.Observation:
    """Return the recording of the run described by ``config``, as for a stock run with the same ``--save``.

    Raises:
        LaunchError: the run cannot be recorded.
    """
    saved = config.checkpoint.save
    words = [] if saved is None else ["--save", str(saved)]
    chosen = observation.choose(words, settings=settings, **vars(recording))
    if config.logger.skip_train_metrics_log and chosen.folder is not None:
        raise LaunchError(
            "logger.skip_train_metrics_log is true, and a run that logs no step cannot be recorded; leave it out, or switch "
            "recording off with --no-observe"
        )
    return chosen


def layout_of(chosen: Recipe, overrides: Sequence[str]) -> Layout:
    """Apply ``overrides`` to the recipe's layout; values that are not numbers or booleans are left for Bridge to refuse.

    Raises:
        ModelError: the layout is inconsistent.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _LAYOUT and value.isdecimal():
            changes[_LAYOUT[key]] = int(value)
        elif key in _LAYOUT and value.lower() in ("true", "false"):
            changes[_LAYOUT[key]] = value.lower() == "true"
    return dataclasses.replace(chosen.run.layout, **changes)


def check_processes(chosen: Recipe, layout: Layout) -> None:
    """Refuse a number of processes, or of GPUs, that does not fit the recipe under ``layout``; more replicas are allowed.

    Raises:
        LaunchError: names the number to start.
    """
    started = int(os.environ["WORLD_SIZE"])
    unchanged = layout == chosen.run.layout
    needed = chosen.processes if unchanged else layout.processes
    if started % needed:
        sharding = (
            "" if unchanged else f", sharded as tensor {layout.tensor} × pipeline {layout.pipeline} × expert {layout.expert},"
        )
        raise LaunchError(
            f"recipe {chosen.name}{sharding} needs {needed} processes, got {started}: run `torchrun --nproc-per-node {needed} "
            f"-m megacpp_mcore.nemo_recipes.run …` (with --nnodes for more than one host), or a multiple of them, for more "
            "data-parallel replicas"
        )
    if chosen.run.training.device == "cuda":
        available, required = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        if available < required:
            raise LaunchError(
                f"recipe {chosen.name} needs {required} GPU{'' if required == 1 else 's'} on this host, and "
                f"torch sees {available}; choose a recipe for fewer: {', '.join(RECIPES)}"
            )


def check_stages(chosen: Recipe, layout: Layout, overrides: Sequence[str]) -> None:
    """Refuse a layout that does not fit the model; stages defined by an override are checked by the spec.

    Raises:
        ModelError: names the size that is not divisible, or the DSA schedule that the stages need.
    """
    if chosen.run.model_class == HYBRID and any(override.startswith(_STAGES[0]) for override in overrides):
        raise ModelError(f"{_STAGES[0]} is for GPTModel; stages of HybridModel are marked by '|' in {_STAGES[1]}")
    if any(override.startswith(_STAGES) for override in overrides):
        chosen.model.check_divisible(layout)
    else:
        chosen.model.check_layout(layout)


def check_config(config: Any, layout: Layout) -> None:
    """Refuse a global batch that cannot be divided among the data-parallel replicas, and logits that are gathered.

    Raises:
        LaunchError: names the numbers.
    """
    if not config.model.parallel_output:
        raise LaunchError("model.parallel_output is false; Megatron's loss expects vocabulary-sharded logits: keep it true")
    replicas = layout.replicas(int(os.environ["WORLD_SIZE"]))
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch % (micro * replicas):
        raise LaunchError(
            f"the global batch of {batch} is not a multiple of the micro-batch ({micro}) × {replicas} data-parallel replicas; "
            "change train.global_batch_size, train.micro_batch_size or the number of processes"
        )


def launch_policy(run: Run, config: Any, overrides: Sequence[str], environment: Mapping[str, str]) -> policy.LaunchPolicy:
    """Return the launch policy of ``run``, as ``config`` has it, in ``environment``; overrides count as set by the user."""
    launched = policy.resolve(
        run,
        environment=environment,
        recipe={name: str(value) for name, value in config.env_vars.items()},
        from_recipe=True,
        tf32_products=policy.tf32_products(),
    )
    keys = [override.partition("=")[0] for override in overrides]
    values = tuple(
        dataclasses.replace(setting, source=policy.USER)
        if any(key.startswith(_PLANNED.get(setting.name, ())) for key in keys)
        else setting
        for setting in launched.values
    )
    return dataclasses.replace(launched, values=values)


def configured(chosen: Recipe, overrides: Sequence[str]) -> Any:
    """Return the recipe's ``ConfigContainer`` with ``overrides``, checked to name data and to be the recipe's model.

    Raises:
        LaunchError: an override that Bridge cannot parse, an unknown key (the nearest are suggested), or an optimizer that
            cannot train so, or is not installed.
        ArgumentMismatchError: the overrides change the model.
        ModelError: the optimizer does not exist, or has no moments of their dtype.
        DataError: no data is named.
    """
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    from megacpp_mcore.data.arguments import dataset_prefixes
    from megacpp_mcore.data.tokenizer import end_of_document
    from megacpp_mcore.nemo_recipes import bridge_recipes

    config = bridge_recipes.container(chosen)
    for override in overrides:
        check_override(config, override)
    keys = [override.partition("=")[0] for override in overrides]
    fields = [key.removeprefix("model.") for key in keys if key.startswith("model.")]
    lowering.check_unused([f"--{field.replace('_', '-')}" for field in fields])  # Megatron's flags are named after them
    before = {key: _value(config, key) for key in keys}
    try:
        process_config_with_overrides(config, cli_overrides=list(overrides))
    except OverridesError as error:
        raise LaunchError(f"the overrides {' '.join(overrides)} cannot be read: {error}; write KEY=VALUE") from error
    for key in keys:
        _check_type(key, before[key], _value(config, key))
    usual = read(chosen.run, config, int(os.environ["WORLD_SIZE"])).as_usual()
    bridge_recipes.derive(config, usual, keys)
    config.check_optimizer()
    config.model.vocab_size = chosen.model.vocab_size  # later set by the tokenizer
    try:
        lowering.check_arguments(chosen.model, (config.model,), f" of recipe {chosen.name}", chosen.run.model_class)
    except ArgumentMismatchError as error:
        raise ArgumentMismatchError(f"{error}\nOverrides of a recipe may not change its model.") from error
    finally:
        config.model.vocab_size = None
    prefixes, tokenizer = dataset_prefixes(data_words(config)), config.tokenizer
    if tokenizer.tokenizer_type == "NullTokenizer" and tokenizer.null_tokenizer_eod_id is None:
        tokenizer.null_tokenizer_eod_id = end_of_document(prefixes)
    return config


def with_own_model(chosen: Recipe, settings: PluginConfig | None) -> Recipe:
    """Return the recipe with its settings, and the model that the file of MEGACPP_CONFIG makes of the recipe's.

    Raises:
        LaunchError: the file is about another model.
    """
    if settings is not None and settings.preset != chosen.model.name:
        raise LaunchError(
            f"{plugin_config.VARIABLE} names {settings.path}, about {settings.preset}; recipe {chosen.name} trains "
            f"{chosen.model.name}: name a file about that, or a recipe of {settings.preset}"
        )
    settings = plugin_config.of_recipe(chosen, settings)
    model = chosen.model if settings is None else settings.model
    return dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, model=model, settings=settings))


def changed(chosen: Recipe, words: Sequence[str]) -> Recipe:
    """Return ``chosen`` with other values of its layout and training plan, as in ``recipe emit --set``.

    Raises:
        ModelError: as :func:`megacpp_mcore.arguments.overrides.read`, or a value of the model: that has to be in a file.
    """
    changes = read_overrides(words)
    if changes.model:
        raise ModelError(
            f"{', '.join(changes.model)} would change the model, and a run is checked against its model: name a file with it "
            f"in {plugin_config.VARIABLE} (`megacpp-mcore recipe emit {chosen.model.name} --set … --settings FILE` writes it)"
        )
    if "processes" in changes.training:
        raise LaunchError("the number of processes is torchrun's --nnodes × --nproc-per-node; leave processes out")
    layout = dataclasses.replace(chosen.run.layout, **changes.layout)
    processes = chosen.processes if layout == chosen.run.layout else layout.processes  # or a multiple: check_processes
    with named_as({}):
        training = dataclasses.replace(chosen.run.training, processes=processes, **changes.training)
    return dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, layout=layout, training=training))


def check_once(ours: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse a setting that is passed both as one of ours and as a key of Bridge's.

    Raises:
        LaunchError: names both.
    """
    names = {word.partition("=")[0] for word in ours}
    for key in (override.partition("=")[0] for override in overrides):
        name = {**_LAYOUT, "optimizer.lr": "learning_rate"}.get(key, key.rpartition(".")[2])
        if name in names:
            raise LaunchError(f"{name} and {key} are the same setting; pass only one")


def check_form(override: str) -> None:
    """Refuse an override that is not ``section.key=value``.

    Hydra's ``+new=…`` and ``~old`` are refused as well: on a configuration of dataclasses Bridge 0.6.2 silently drops them.

    Raises:
        LaunchError: it has another form, or its value is not a number where one is needed.
    """
    key, equals, value = override.partition("=")
    if not equals or key.startswith(("+", "~")):
        raise LaunchError(f"the override {override!r} is not of the form KEY=VALUE, for instance train.train_iters=20")
    if key in _COUNTS and not (value.isdecimal() and int(value)):
        raise LaunchError(f"{key} is {value!r}; expected a whole number, 1 or more")


def check_override(config: Any, override: str) -> None:
    """Refuse an override of a key that does not exist; the nearest keys are suggested.

    Raises:
        LaunchError: the key does not exist.
    """
    key = override.partition("=")[0]
    holder, path = config, ""
    for part in key.split("."):
        if holder is None:
            raise LaunchError(
                f"the override {override!r} sets a field of {path[:-1]}, which is None in this recipe; leave it out"
            )
        if isinstance(holder, Mapping):
            fields = dict(holder)
        elif dataclasses.is_dataclass(holder):
            fields = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
        else:  # a plain value, of which Hydra refuses parts
            return
        if part not in fields:
            offered = nearest(path + part, [path + name for name in fields])
            raise LaunchError(f"the recipe's configuration has no {path + part!r}; {offered}")
        holder, path = fields[part], f"{path}{part}."


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def _check_type(key: str, before: Any, after: Any) -> None:
    """Refuse a value whose type differs from the recipe's, or a mapping for a section: Bridge would store it unchecked."""
    if "." not in key and isinstance(after, dict):
        raise LaunchError(
            f"{key}={after!r} is a mapping for a whole section; name its fields one by one, as {key}.FIELD=VALUE"
            + (", in a recipe that has the section: here it is None" if before is None else "")
        )
    if type(before) not in (bool, int, float, str) or after is None:
        return
    try:
        schema.check(after, type(before), key)
    except schema.SchemaError as error:
        raise LaunchError(f"{error}, as {before!r} is") from error


def data_words(config: Any) -> list[str]:
    """Return the run's data and tokenizer as stock arguments, for :mod:`megacpp_mcore.data.arguments`.

    Raises:
        DataError: no data is named.
    """
    from megacpp_mcore.data.arguments import bridge_words  # late: imports numpy, which --help does not need

    tokenizer, words = config.tokenizer, bridge_words(config.dataset)
    if not words:
        raise DataError(
            "the recipe trains on real text and none is named; add dataset.data_path=PREFIX, the prefix that "
            "`megacpp-mcore data prepare` (or `data corpus`) printed"
        )
    words += ["--eval-iters", str(config.validation.eval_iters or 0), "--tokenizer-type", str(tokenizer.tokenizer_type)]
    for field in ("tokenizer_model", "vocab_size", "null_tokenizer_eod_id", "null_tokenizer_pad_id"):
        value = getattr(tokenizer, field, None)
        if value is not None:
            words += ["--" + field.replace("_", "-"), str(value)]
    return words


def doubt_about(config: Any) -> str | None:
    """Return a warning about a checkpoint of another user, which Bridge unpickles without an allow-list of classes; or None."""
    for load in (config.checkpoint.load, config.checkpoint.pretrained_checkpoint):
        if load and not is_remote(load) and os.path.exists(load) and os.stat(load).st_uid != os.geteuid():
            return f"{load} is another user's, and Megatron-Bridge runs what its pickles say: end the run unless you trust it"
    return None


def claim_save_folder(config: Any) -> None:
    """Refuse a run whose ``checkpoint.save`` another run writes to, or has checkpoints that it would overwrite.

    Raises:
        CheckpointError: as :func:`megacpp_mcore.checkpoints.folder.claim`.
    """
    ckpt, minutes = config.checkpoint, config.dist.distributed_timeout_minutes
    if ckpt.save:
        checkpoint_folder.claim(ckpt.save, ckpt.load, ckpt.ckpt_step, finetune=ckpt.finetune, timeout_minutes=minutes)


def verify_data(config: Any) -> str:
    """Check the run's datasets against their manifests, once per host, and give Megatron an index cache specific to these.

    Returns:
        A line that says what was checked.
    """
    from megacpp_mcore.data.arguments import cache_words, verify_arguments

    words, cache_path = data_words(config), config.dataset.path_to_cache
    line = verify_arguments(words) if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    cache = cache_words([*words, *(["--data-cache-path", str(cache_path)] if cache_path else [])])
    config.dataset.path_to_cache = cache[1] if cache else None
    return f"{line}; its indices are cached in {config.dataset.path_to_cache}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megacpp_mcore.nemo_recipes.run", description=__doc__)
    parser.add_argument("--recipe", metavar="NAME", help="what to train")
    parser.add_argument("--list", action="store_true", help="name the recipes")
    parser.add_argument("--model-class", choices=tuple(lowering.SCRIPTS), help="Megatron's model class that holds the layers")
    launcher.Recording.add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    if options.list or options.recipe is None:
        print("\n".join(RECIPES))
        return 0 if options.list else 2
    try:
        run(
            options.recipe.removesuffix("_config"),
            options.overrides,
            launcher.Recording.read(options),
            options.model_class,
        )
    except MegacppError as error:
        print(f"megacpp-mcore: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
