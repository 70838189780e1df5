"""The import firewall of Transformer Engine: availability, switches, and every entry point that this package uses.

Importing this module imports neither torch nor Transformer Engine. Of the package's other modules only the patch
``mla-core-attention`` and benchmarks name Transformer Engine's; Megatron's own wrappers (``megatron.core.extensions``) import
it on their own.

Checked against Transformer Engine 2.17 to 2.20, which renamed none of the entry points below.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import BackendError
from megacpp_mcore.util import host
from megacpp_mcore.util.nearest import nearest
from megacpp_mcore.util.probe import ProbeResult, probe_import

DISABLE_TE = "MEGACPP_DISABLE_TE"
"""The environment variable that keeps this package from using Transformer Engine: 1 or 0."""

TRANSFORMER_ENGINE = "transformer_engine"
CUDNN_HOME = "CUDNN_HOME"
"""The environment variable that names the folder of its cuDNN."""

ALIGNMENT = 16
"""Rows and columns of FP8 GEMM operands have to be multiples of this (Transformer Engine 2.20.2)."""

_PYTORCH, _RECIPE = "transformer_engine.pytorch", "transformer_engine.common.recipe"
_MEGATRON = "megatron.core.extensions.transformer_engine"

ENTRIES: Mapping[str, str] = {
    name: module
    for module, names in {
        _PYTORCH: "Linear LayerNormLinear LayerNormMLP GroupedLinear DotProductAttention moe_permute_with_probs "
        "moe_permute_and_pad_with_probs moe_unpermute autocast is_fp8_available is_fp8_block_scaling_available "
        "is_mxfp8_available QuantizedTensorStorage",
        f"{_PYTORCH}.quantization": "FP8GlobalStateManager",
        f"{_PYTORCH}.module.base": "TransformerEngineBaseModule",
        _RECIPE: "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling",
        _MEGATRON: "TELayerNormColumnParallelLinear TEColumnParallelLinear TERowParallelLinear",
    }.items()
    for name in names.split()
}
"""Every entry point, with its module; Megatron's are its wrappers."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of Transformer Engine that a run may use, or has to; each may be set under ``transformer_engine``.

    Attributes:
        enabled: whether any may be used; false equals ``MEGACPP_DISABLE_TE=1`` for this run.
        attention: whether the backend ``te`` of the op ``mla`` may be chosen.
        experts: whether the backend ``te`` of the ops ``grouped_mlp`` and ``routed_mlp`` may be chosen.
        permute: whether its permutation of tokens to expert order may be used, which ``te`` of ``routed_mlp`` needs.
        block: whether :class:`megacpp_mcore.te.block.Block` may be built.
        mtp: whether the feed-forward of the MTP block has its norm inside of the first linear layer. Checkpoints stay.
        linear: whether dense linear layers of a model built with ``--transformer-impl local`` are replaced.
    """

    enabled: bool = True
    attention: bool = True
    experts: bool = True
    permute: bool = True
    block: bool = True
    mtp: bool = False
    linear: bool = False


FEATURES = tuple(field.name for field in dataclasses.fields(Features) if field.name != "enabled")

_switches: dict[str, Any] = {"features": Features(), "source": ""}


def configure(features: Features | None, source: str = "") -> None:
    """Set the switches of this process; ``source`` is where they come from, for messages. None: the defaults."""
    _switches.update(features=features or Features(), source=source)


def features() -> Features:
    """Return the switches of this process."""
    return _switches["features"]


def disabled() -> str:
    """Return why Transformer Engine is disabled although it may be installed; empty if it is not disabled.

    Raises:
        BackendError: the environment variable has a value that is neither yes nor no.
    """
    value = os.environ.get(DISABLE_TE, "")
    if value not in ("", "0", "1"):
        raise BackendError(f"{DISABLE_TE} is {value!r}; expected 1 (no Transformer Engine), 0 or nothing")
    if value == "1":
        return f"{DISABLE_TE}=1 disables Transformer Engine"
    if not features().enabled:
        return f"transformer_engine: {{enabled: false}} in {_switches['source']} disables Transformer Engine"
    return ""


def cudnn_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Transformer Engine, not imported yet, loads the cuDNN that torch has loaded.

    By itself it prefers the system's (2.20.2, ``common/__init__.py``: ``_load_cuda_library``). One of another version finds
    torch's sublibraries instead of its own, refuses them, and attention silently runs unfused. What a user has set in
    ``environment`` is left.
    """
    folder = None if host.version("transformer-engine") is None else host.loaded_from("libcudnn")
    return {} if folder is None or {CUDNN_HOME, "CUDNN_PATH"} & environment.keys() else {CUDNN_HOME: str(folder)}


def available() -> ProbeResult:
    """Return whether Transformer Engine works here and is not disabled; never raises for a missing or broken installation."""
    reason = disabled()
    return ProbeResult(False, reason) if reason else _installed()


@functools.cache
def _installed() -> ProbeResult:
    """Return whether its PyTorch part imports; a bare ``transformer-engine``, without the compiled part, does not count."""
    return probe_import(_PYTORCH)


def feature(*names: str) -> ProbeResult:
    """Return whether the features ``names`` of :data:`FEATURES` are switched on and Transformer Engine works here.

    Raises:
        BackendError: there is no such feature.
    """
    for name in names:
        if name not in FEATURES:
            raise BackendError(f"there is no feature of Transformer Engine called {name!r}; {nearest(name, FEATURES)}")
        if not getattr(features(), name):
            where = _switches["source"] or "the defaults"
            return ProbeResult(False, f"transformer_engine: {{{name}: false}} in {where}")
    return available()


def entry(name: str) -> Any:
    """Return the entry point called ``name`` in :data:`ENTRIES`.

    Raises:
        BackendError: Transformer Engine is disabled, does not work here, or this version lacks the entry point.
    """
    probe = available()
    if not probe.ok:
        raise BackendError(f"{name} of Transformer Engine cannot be used: {probe.reason}")
    return _entry(name)


@functools.cache
def _entry(name: str) -> Any:
    try:
        return getattr(importlib.import_module(ENTRIES[name]), name)
    except (ImportError, AttributeError) as error:
        installed = host.version("transformer-engine")
        raise BackendError(f"Transformer Engine {installed} has no {ENTRIES[name]}:{name}; 2.17 to 2.20 do") from error
