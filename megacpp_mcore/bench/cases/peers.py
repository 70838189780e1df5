"""Peers: what is installed of them, how their modules are imported, and linear layers of Transformer Engine's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megacpp_mcore.backends import probe_import
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Inputs, Variant
from megacpp_mcore.te.fp8_scopes import RECIPES
from megacpp_mcore.util import te_imports

ENGINE = "transformer_engine.pytorch"
QUANTIZED = 0.15
"""The worst row of products in FP8: two operands of E4M3 are off by 2.6 % each (rms), a gradient in E5M2 by 5 %."""


def lacking(device: str, module: str, name: str) -> str:
    """Return why the peer ``name``, which needs ``module`` and a GPU, cannot run here; empty if it can."""
    if device != "cuda":
        return f"no peer here: {name} runs on a GPU alone"
    found = te_imports.available() if module == ENGINE else probe_import(module)
    return "" if found.ok else f"no peer installed: {name} ({found.reason})"


def with_engine(device: str) -> bool:
    """Return whether stock is measured with Transformer Engine's layers, which need a GPU, or with Megatron's own."""
    return device == "cuda" and te_imports.available().ok


def engine_linear(weight: torch.Tensor) -> Any:
    """Make Transformer Engine's linear layer of the sizes of ``weight``; of one with an expert axis, the grouped one."""
    *experts, outputs, width = weight.shape
    kind = te_imports.entry("GroupedLinear" if experts else "Linear")
    return kind(*experts, width, outputs, bias=False, params_dtype=weight.dtype, device=weight.device)


def engine_in_fp8(
    options: Options, inputs: Inputs, names: tuple[str, ...], call: Callable[..., torch.Tensor]
) -> Iterator[Variant]:
    """Yield a variant of each of Transformer Engine's FP8 recipes, which quantise the weights in every call.

    ``call`` computes the output from the input ``x`` and linear layers of the weights ``names``.
    """
    for recipe, (kind, asks) in ((each, RECIPES[each]) for each in ("current", "block")):
        name = f"Transformer Engine, FP8 {recipe}"
        if not (reason := lacking(options.device, ENGINE, name)):
            can, why = te_imports.entry(asks)(return_reason=True)
            reason = "" if can else f"not here: {why}"
        if reason:
            yield Variant.missing(name, reason)
            continue
        linears = {weight: engine_linear(inputs.leaves[weight]) for weight in names}
        scope = partial(te_imports.entry("autocast"), enabled=True, recipe=te_imports.entry(kind)())

        def run(inputs: Inputs, linears: Any = linears, scope: Any = scope) -> torch.Tensor:
            with scope():
                return call(inputs.leaves["x"], *linears.values())

        weights = inputs.copied_to({weight: linear.weight for weight, linear in linears.items()})
        yield Variant.of(name, PEER, run, weights, limit=QUANTIZED)


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
        package.__spec__ = spec  # find_spec reads it from here once the module is there
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["mamba_ssm"] = package
    source: Any = importlib.import_module("mamba_ssm.modules.mamba3")
    if hasattr(source, "heavy_tail_activation"):
        source.heavy_tail_activation = torch.nn.functional.softplus
    from triton.runtime.autotuner import Autotuner

    modules = [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton.mamba3.")]
    for kernel in (value for module in modules for value in vars(module).values() if isinstance(value, Autotuner)):
        few = [one for one in kernel.configs if (one.num_warps, one.num_stages, one.maxnreg) == (4, 2, None)]
        kernel.configs = few or kernel.configs
    return source


@contextlib.contextmanager
def patched(name: str) -> Iterator[None]:
    """Apply only the patch ``name`` for the duration; afterwards everything is as before."""
    from megacpp_mcore.patches.machinery.registry import Registry, default

    registry = Registry(default().select([name]))
    registry.apply([name])
    try:
        yield
    finally:
        registry.revert()
