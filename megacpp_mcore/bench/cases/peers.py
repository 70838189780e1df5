"""Peers that several benchmarks have: what is installed of them, and how stock's and mamba-ssm's modules are made."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megacpp_mcore.backends import probe_import


def lacking(module: str, name: str = "") -> str:
    """Why the peer that needs ``module`` cannot run here; empty if it can. ``name`` is what people call it."""
    found = probe_import(module)
    return "" if found.ok else f"no peer installed: {name or module.partition('.')[0]} ({found.reason})"


def with_engine(device: str) -> bool:
    """Whether stock is measured with Transformer Engine's layers, which need a GPU, or with Megatron's own."""
    return device == "cuda" and probe_import("transformer_engine.pytorch").ok


def mamba3_module() -> Any:
    """``mamba_ssm.modules.mamba3`` without the package's ``__init__``, which wants transformers and Mamba-1's extension.

    Raises:
        ImportError: mamba-ssm, or what it needs, is not there.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise ImportError("mamba-ssm is not installed")
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")
        package.__spec__ = spec  # find_spec reads it from here once the module is there
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["mamba_ssm"] = package
    return importlib.import_module("mamba_ssm.modules.mamba3")


def mamba_ssm_lacking(device: str, rank: int) -> str:
    """Why mamba-ssm's Mamba-3 of a MIMO rank (1: SISO) cannot run here; empty if it can."""
    if device != "cuda":
        return "no peer here: mamba-ssm runs on a GPU alone"
    try:
        module = mamba3_module()
    except Exception as error:
        return f"no peer installed: mamba-ssm ({type(error).__name__}: {error})"
    if rank > 1 and module.mamba3_mimo_combined is None:
        return "no peer installed: mamba-ssm's MIMO kernels (they need tilelang)"
    return ""


@contextlib.contextmanager
def patched(name: str) -> Iterator[None]:
    """The patch ``name`` in place, and no other; afterwards everything is as before."""
    from megacpp_mcore.patches.machinery.registry import Registry, default

    registry = Registry(default().select([name]))
    registry.apply([name])
    try:
        yield
    finally:
        registry.revert()
