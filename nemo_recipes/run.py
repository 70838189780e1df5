"""``python -m megacpp_mcore.nemo_recipes.run --recipe NAME [KEY=VALUE …]``: chooses a recipe for Bridge's own ``pretrain``.

Start it with torchrun for more than one process. Nothing of Bridge is changed; this module makes the process ready as the
launcher does (CPU lane, patches, data verified), and refuses what cannot work before Megatron starts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

from megacpp_mcore import launcher, lowering
from megacpp_mcore.errors import ArgumentMismatchError, DataError, LaunchError, MegacppError
from megacpp_mcore.nemo_recipes import bridge
from megacpp_mcore.patches import registry
from megacpp_mcore.recipes import RECIPES, Recipe, recipe

PATCHES = ("dataset-helpers",)
"""What every run needs. The spec applies its own."""


def run(name: str, overrides: Sequence[str] = ()) -> None:
    """Train recipe ``name``, changed by ``overrides`` of the form ``section.key=value`` (Hydra's syntax).

    Raises:
        LaunchError, ModelError, ArgumentMismatchError, DataError: what cannot work, before Megatron starts.
    """
    chosen = recipe(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(launcher.process_environment())
        check_processes(chosen)
        if chosen.training.device == "cpu":
            stack.enter_context(launcher.cpu_lane())
        stack.enter_context(launcher.patches_of_the_run())
        launcher.say(f"patches: {', '.join(registry.default().apply(PATCHES).applied) or 'applied already'}")
        bridge.prepare()
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        config = configured(chosen, overrides)
        launcher.say(f"recipe {name} | device {chosen.training.device} | world size {os.environ['WORLD_SIZE']}")
        if os.environ["RANK"] == "0":
            launcher.say(verify_data(config))
        pretrain(config, forward_step)
        launcher.leave_process_group()


def check_processes(chosen: Recipe) -> None:
    """Refuse a number of processes, or of GPUs, that the recipe is not for."""
    started = int(os.environ["WORLD_SIZE"])
    if started != chosen.processes:
        raise LaunchError(
            f"recipe {chosen.name} is for {chosen.processes} processes, and {started} "
            f"{'was' if started == 1 else 'were'} started; start them with `torchrun --nproc-per-node {chosen.processes} "
            f"-m megacpp_mcore.nemo_recipes.run …` (with --nnodes for more than one host)"
        )
    if chosen.training.device == "cuda":
        import torch

        here, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        if here < wanted:
            raise LaunchError(
                f"recipe {chosen.name} needs {wanted} GPU{'' if wanted == 1 else 's'} on this host, and "
                f"torch sees {here}; choose a recipe for fewer: {', '.join(RECIPES)}"
            )


def configured(chosen: Recipe, overrides: Sequence[str]) -> Any:
    """The recipe's ``ConfigContainer`` with ``overrides`` applied, its data named, and its model still the one it names.

    Raises:
        LaunchError: an override that Bridge cannot read, or whose key there is not (the nearest are offered).
        ArgumentMismatchError: overrides that make it another model.
        DataError: no data is named.
    """
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    from megacpp_mcore.nemo_recipes import nam56r

    config = nam56r.container(chosen)
    for override in overrides:
        check_override(config, override)
    keys = [override.partition("=")[0] for override in overrides]
    before = {key: _value(config, key) for key in keys}
    try:
        process_config_with_overrides(config, cli_overrides=list(overrides))
    except OverridesError as error:
        raise LaunchError(f"the overrides {' '.join(overrides)} cannot be read: {error}; write KEY=VALUE") from error
    for key in keys:
        _check_type(key, before[key], _value(config, key))
    _derive(config, keys)
    config.model.vocab_size = chosen.model.vocab_size  # which the tokenizer brings later
    try:
        lowering.check_arguments(chosen.model, (config.model,), f" of recipe {chosen.name}")
    except ArgumentMismatchError as error:
        raise ArgumentMismatchError(f"{error}\nOverrides of a recipe may not change its model.") from error
    finally:
        config.model.vocab_size = None
    _name_end_of_document(config)
    return config


def _derive(config: Any, keys: Sequence[str]) -> None:
    """What a recipe derives from the steps and the learning rate follows them when they change, unless named itself."""
    derived = {
        "scheduler.lr_warmup_iters": config.train.train_iters // 10,
        "validation.eval_interval": config.train.train_iters,
        "optimizer.min_lr": float(f"{config.optimizer.lr / 10:g}"),
    }
    for key, value in derived.items():
        if key not in keys:
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)


def check_override(config: Any, override: str) -> None:
    """Refuse an override that is not ``section.key=value`` of a key that there is; the nearest are offered.

    Hydra's ``+new=…`` and ``~old`` are refused as well: on a configuration made of dataclasses Bridge 0.6.2 drops them without
    a word.
    """
    key, equals, _ = override.partition("=")
    if not equals or key.startswith(("+", "~")):
        raise LaunchError(f"the override {override!r} is not of the form KEY=VALUE, for instance train.train_iters=20")
    holder, path = config, ""
    for part in key.split("."):
        if not dataclasses.is_dataclass(holder):  # a mapping or a plain value, which Hydra judges
            return
        names = [field.name for field in dataclasses.fields(holder)]
        if part not in names:
            near = difflib.get_close_matches(part, names, n=3)
            offered = (
                f"did you mean {' or '.join(path + one for one in near)}?" if near else f"it has {', '.join(names)}"
            )
            raise LaunchError(f"the recipe's configuration has no {path + part!r}; {offered}")
        holder, path = getattr(holder, part), f"{path}{part}."


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def _check_type(key: str, before: Any, after: Any) -> None:
    """Refuse a value of another type than the recipe's, which Bridge would store as it is."""
    allowed = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(before))
    if allowed is None or after is None:
        return
    if not isinstance(after, allowed) or (isinstance(after, bool) and bool not in allowed):
        raise LaunchError(
            f"{key}={after!r} is of type {type(after).__name__}; expected {type(before).__name__}, as {before!r} is"
        )


def data_words(config: Any) -> list[str]:
    """The run's data and tokenizer as stock arguments, which :mod:`megacpp_mcore.data.arguments` reads.

    Raises:
        DataError: no data is named.
    """
    dataset, tokenizer = config.dataset, config.tokenizer
    path = getattr(dataset, "data_path", None)
    if not path and not getattr(dataset, "blend", None) and not getattr(dataset, "blend_per_split", None):
        raise DataError(
            "the recipe trains on real text and none is named; add dataset.data_path=PREFIX, the prefix that "
            "`megacpp-mcore data prepare` (or `data corpus`) printed"
        )
    paths = path.split() if isinstance(path, str) else list(path or ())
    words = ["--data-path", *map(str, paths)] if paths else []
    words += ["--tokenizer-type", str(tokenizer.tokenizer_type)]
    for field in ("tokenizer_model", "vocab_size", "null_tokenizer_eod_id", "null_tokenizer_pad_id"):
        value = getattr(tokenizer, field, None)
        if value is not None:
            words += ["--" + field.replace("_", "-"), str(value)]
    return words


def verify_data(config: Any) -> str:
    """Check the datasets of the run against their manifests; the line that says what was checked."""
    from megacpp_mcore.data.arguments import verify_arguments

    return verify_arguments(data_words(config))


def _name_end_of_document(config: Any) -> None:
    """Megatron's tokenizer of plain ids needs the id that ends documents; the dataset's manifest says it."""
    from megacpp_mcore.data.arguments import dataset_prefixes
    from megacpp_mcore.data.manifest import load_manifest

    prefixes = dataset_prefixes(data_words(config))
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_type != "NullTokenizer" or tokenizer.null_tokenizer_eod_id is not None:
        return
    for prefix in prefixes:
        if os.path.exists(prefix + ".manifest.json"):
            tokenizer.null_tokenizer_eod_id = load_manifest(prefix).tokenizer["eod_id"]
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megacpp_mcore.nemo_recipes.run", description=__doc__)
    parser.add_argument("--recipe", metavar="NAME", help="what to train")
    parser.add_argument("--list", action="store_true", help="name the recipes")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if options.list or options.recipe is None:
        print("\n".join(RECIPES))
        return 0 if options.list else 2
    try:
        run(options.recipe.removesuffix("_config"), options.overrides)
    except MegacppError as error:
        print(f"megacpp-mcore: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
