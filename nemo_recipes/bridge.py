"""Makes Megatron-Bridge importable, or says exactly why it is not.

Bridge 0.6.2 imports Transformer Engine in one line of a module about LoRA layers (``peft/lora_layers.py``), though training
works without it. If it is missing, :func:`prepare` imports that one module with stand-ins that refuse every use, and then
removes them: for all other imports Transformer Engine is still missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from packaging.version import InvalidVersion, Version

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.patches.exit_signal import answer_a_step_later
from megacpp_mcore.util import host
from megacpp_mcore.versions import MEGATRON_BRIDGE, MEGATRON_CORE

_LEAST = {
    "megatron-core": (
        MEGATRON_CORE.partition(",")[0].removeprefix(">="),
        "a plain `pip install megatron-bridge` goes back to 0.13 without a word",
    ),
    "nvidia-resiliency-ext": (
        "0.6",
        "Bridge imports it, and pip takes 0.4.1, which megatron-core cannot import, on systems before glibc 2.39",
    ),
}
"""Other required packages: the minimum version, and what goes wrong otherwise."""

INSTALLATION = "install it with `make bridge`, or as docs/entry-points.md says"

_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


def problem() -> str | None:
    """Return what is wrong with the installation of Megatron-Bridge; None if no problem is known."""
    bridge = host.version("megatron-bridge")
    if bridge is None:
        return f"Megatron-Bridge is not installed, and its recipes need it; {INSTALLATION}"
    for name, (least, why) in _LEAST.items():
        installed = host.version(name)
        if installed is None or Version(least) > _release(installed):
            return f"{name} is {installed or 'not installed'}, expected {least} or later: {why}; {INSTALLATION}"
    if bridge.partition("+")[0] != MEGATRON_BRIDGE:
        return f"megatron-bridge is {bridge}, expected {MEGATRON_BRIDGE}; {INSTALLATION}"
    missing = [name for name in ("megatron.energon", "modelopt", "omegaconf", "hydra") if not _found(name)]
    if missing:
        return f"Megatron-Bridge needs {', '.join(missing)}, not installed here; {INSTALLATION}"
    return None


def _release(version: str) -> Version:
    """Return the release of ``version``, a candidate or nightly counting as its release; 0 if it is not a version."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def prepare() -> None:
    """Import Megatron-Bridge, allow configurations to name our classes and functions, and register our AutoBridge mapping.

    Raises:
        LaunchError: Bridge is not installed, or cannot be imported; the message says why.
    """
    if (reason := problem()) is not None:
        raise LaunchError(reason)
    # Imported before the stand-ins exist, so that these modules see that Transformer Engine is missing.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron.core.transformer.moe.moe_utils")
    finder = _LoraLayersFinder() if not _found("transformer_engine") else None
    if finder is not None:
        sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("megatron.bridge")
        allow: Callable[[str], None] = importlib.import_module(
            "megatron.bridge.utils.instantiate_utils"
        ).register_allowed_target_prefix
    except ImportError as error:
        raise LaunchError(f"Megatron-Bridge cannot be imported: {error}; {INSTALLATION}") from error
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)
    allow("megacpp_mcore")
    importlib.import_module("megacpp_mcore.nemo_recipes.auto_bridge")  # registers itself


@contextlib.contextmanager
def preserve_rng_during_warmup() -> Iterator[str]:
    """Apply the CPU lane's fix for Megatron's own loop to Bridge, within the context; yields the line that reports it.

    Bridge has a copy of Megatron's function that runs fused functions once, on random inputs as large as the micro-batch
    (``training/initialize.py``). On the CPU lane the same generator draws the weights, which would depend on the batch.
    """
    import torch

    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    warm_up = torch.random.fork_rng(devices=[])(initialize._warmup_jit_function)
    with mock.patch.object(initialize, "_warmup_jit_function", warm_up):
        yield f"{initialize.__name__}._warmup_jit_function does not move the generator (weights do not depend on batches)"


def signals_a_step_later() -> contextlib.AbstractContextManager[Any]:
    """Return a context with the patch ``exit-signal`` for Bridge's copy of Megatron's class."""
    handler = importlib.import_module("megatron.bridge.training.utils.sig_utils").DistributedSignalHandler
    return mock.patch.object(handler, "signals_received", answer_a_step_later.make(handler.signals_received))


class _Refusing(types.ModuleType):
    """A stand-in for a part of Transformer Engine that raises on any use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LaunchError(f"{self.__name__}.{name} needs Transformer Engine; use a GPU host with the extra 'te'")


class _WithStandIns(importlib.machinery.SourceFileLoader):
    """Executes a module with the stand-ins in ``sys.modules``, and removes them afterwards."""

    def exec_module(self, module: types.ModuleType) -> None:
        # The modules that it imports must be imported without stand-ins.
        for name in ("megatron.bridge.peft.adapter_wrapper", "megatron.bridge.peft.lora_merge"):
            importlib.import_module(name)
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
        package, torch_part, ops = (_Refusing(name) for name in names)
        package.__dict__["pytorch"], torch_part.__dict__["ops"] = torch_part, ops
        ops.__dict__["Sequential"] = "Sequential"  # used only as a return annotation
        sys.modules.update(zip(names, (package, torch_part, ops), strict=True))
        try:
            super().exec_module(module)
        finally:
            for name in names:
                sys.modules.pop(name, None)


class _LoraLayersFinder(importlib.abc.MetaPathFinder):
    """Finds ``megatron.bridge.peft.lora_layers`` like the other finders, but loads it with :class:`_WithStandIns`."""

    def find_spec(
        self, fullname: str, path: Any = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LORA_LAYERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _WithStandIns(fullname, spec.origin)
        return spec
