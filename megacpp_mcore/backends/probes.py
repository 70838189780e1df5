"""Probes of this machine's backend requirements, each by a real import, once a process. No torch at import."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megacpp_mcore.errors import BackendError

DISABLE_TE = "MEGACPP_DISABLE_TE"
"""The environment variable that takes Transformer Engine away from whatever this package chooses: 1 or 0."""

TRANSFORMER_ENGINE = "transformer_engine"
TRITON = "triton"
CUDA = "cuda"

APEX_PARTS = ("amp_C", "apex.optimizers", "fused_weight_gradient_mlp_cuda")
"""What NVIDIA Apex brings when built from source with its extensions; nothing else that is called apex has them."""


@dataclass(frozen=True)
class ProbeResult:
    """Whether something can be used on this machine; ``reason`` says why not."""

    ok: bool
    reason: str = ""


def te_disabled() -> str:
    """Why Transformer Engine is disabled although it may be installed; empty if it is not disabled.

    Raises:
        BackendError: the variable has a value that is neither yes nor no.
    """
    value = os.environ.get(DISABLE_TE, "")
    if value not in ("", "0", "1"):
        raise BackendError(f"{DISABLE_TE} is {value!r}; expected 1 (no Transformer Engine), 0 or nothing")
    return f"{DISABLE_TE}=1 disables Transformer Engine" if value == "1" else ""


def requirement(name: str) -> ProbeResult:
    """Whether what is called ``name`` in :data:`REQUIREMENTS` works here; Transformer Engine also if it is not disabled."""
    if name == TRANSFORMER_ENGINE and te_disabled():
        return ProbeResult(False, te_disabled())
    return _probed(name)


@functools.cache
def _probed(name: str) -> ProbeResult:
    return REQUIREMENTS[name]()


def probe_import(module: str) -> ProbeResult:
    """Import ``module`` (torch first: extensions link against it) and say why that failed, if it did."""
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return ProbeResult(False, f"{module.partition('.')[0]} is not installed")
        importlib.import_module("torch")
        importlib.import_module(module)
    except Exception as error:
        return ProbeResult(False, f"importing {module} failed: {error!r}")
    return ProbeResult(True)


@functools.cache
def apex_parts() -> dict[str, ProbeResult]:
    """Which parts of NVIDIA Apex work here, each by a real import, run once.

    A package of another origin that is called ``apex`` is not imported: without ``amp_C`` its parts are not NVIDIA's.
    """
    found = {part: probe_import(part) for part in ("amp_C", "fused_weight_gradient_mlp_cuda")}
    if found["amp_C"].ok:
        found["apex.optimizers"] = probe_import("apex.optimizers")
    else:
        found["apex.optimizers"] = ProbeResult(False, "it needs amp_C")
    return {part: found[part] for part in APEX_PARTS}


def _triton() -> ProbeResult:
    """Triton with a driver for this machine, which it builds with a C compiler: Megatron needs no more than the import."""
    imported = probe_import("triton")
    if not imported.ok:
        return imported
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:
        return ProbeResult(False, f"triton has no driver for this machine: {error}")
    return ProbeResult(True)


def _cuda() -> ProbeResult:
    is_there = importlib.import_module("torch").cuda.is_available()
    return ProbeResult(is_there, "" if is_there else "torch sees no CUDA device")


def hopper() -> ProbeResult:
    """A GPU of compute capability 9.0, for which alone PyTorch 2.11 has grouped FP8 products with scales of rows."""
    capability = importlib.import_module("torch").cuda.get_device_capability()
    return ProbeResult(
        capability == (9, 0), "" if capability == (9, 0) else f"the GPU is {capability}, not Hopper (9, 0)"
    )


REQUIREMENTS: Mapping[str, Callable[[], ProbeResult]] = MappingProxyType(
    {
        TRANSFORMER_ENGINE: functools.partial(probe_import, "transformer_engine.pytorch"),
        TRITON: _triton,
        CUDA: _cuda,
    }
)
"""What a candidate may require, by name."""
