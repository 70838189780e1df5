"""Peers: which are installed, how their modules are imported and built."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from megacpp_mcore.backends import probe_import
from megacpp_mcore.util import te_imports

ENGINE = "transformer_engine.pytorch"


def lacking(device: str, module: str = ENGINE, name: str = "Transformer Engine") -> str:
    """Return why the peer ``name``, which needs ``module`` and a GPU, cannot run here; empty if it can."""
    if device != "cuda":
        return f"no peer here: {name} runs only on a GPU"
    probed = te_imports.available() if module == ENGINE else probe_import(module)
    return "" if probed.ok else f"no peer installed: {name} ({probed.reason})"


def engine_linear(weight: torch.Tensor) -> Any:
    """Build Transformer Engine's linear layer with the sizes of ``weight``; with an expert axis, the grouped one."""
    *experts, outputs, width = weight.shape
    kind = te_imports.entry("GroupedLinear" if experts else "Linear")
    return kind(*experts, width, outputs, bias=False, params_dtype=weight.dtype, device=weight.device)


def mamba3_source() -> Any:
    """Import ``mamba_ssm.modules.mamba3`` without the package's ``__init__``, which imports transformers and Mamba-1.

    Tuning of its Mamba-3 kernels is restricted to four warps, two stages and the compiler's own number of registers: its own
    search, 234 builds for one pass forward and back, takes minutes. Its source has a different activation of the decay since
    c69aaab; it gets the one of its releases, which the model uses.

    Raises:
        ImportError: mamba-ssm, or a dependency, is not installed.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise ImportError("mamba-ssm is not installed")
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")
        package.__spec__ = spec  # find_spec reads it from here once the module exists
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["mamba_ssm"] = package
    source: Any = importlib.import_module("mamba_ssm.modules.mamba3")
    if hasattr(source, "heavy_tail_activation"):
        source.heavy_tail_activation = torch.nn.functional.softplus
    from triton.runtime.autotuner import Autotuner

    modules = [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton.mamba3.")]
    for kernel in (value for module in modules for value in vars(module).values() if isinstance(value, Autotuner)):
        few = [c for c in kernel.configs if (c.num_warps, c.num_stages, c.maxnreg) == (4, 2, None)]
        kernel.configs = few or kernel.configs
    return source


@contextlib.contextmanager
def patched(name: str) -> Iterator[None]:
    """Apply only the patch ``name`` for the duration of the context, then revert it."""
    from megacpp_mcore.patches.machinery.registry import default

    applied = default().apply([name])
    try:
        yield
    finally:
        default().revert(applied)
