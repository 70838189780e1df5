"""Peers that several benchmarks have: what is installed of them, and how stock's and mamba-ssm's modules are made."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from megacpp_mcore.backends import probe_import
from megacpp_mcore.bench.catalog import Options
from megacpp_mcore.bench.problem import Variant
from megacpp_mcore.util import te_imports

ENGINE = "transformer_engine.pytorch"
MIX = ("mimo_x", "mimo_z", "mimo_o")
MAMBA3_WEIGHTS = {
    "dt_bias": "dt_bias", "b_bias": "B_bias", "c_bias": "C_bias", "b_norm_weight": "B_norm.weight",
    "c_norm_weight": "C_norm.weight", "D": "D", **{name: name for name in MIX},
}  # fmt: skip
"""Mamba-3's weights between its projections, by mamba-ssm's names; the last three exist only in MIMO."""


def lacking(device: str, module: str, name: str) -> str:
    """Return why the peer ``name``, which needs ``module`` and a GPU, cannot run here; empty if it can."""
    if device != "cuda":
        return f"no peer here: {name} runs on a GPU alone"
    found = te_imports.available() if module == ENGINE else probe_import(module)
    return "" if found.ok else f"no peer installed: {name} ({found.reason})"


def with_engine(device: str) -> bool:
    """Return whether stock is measured with Transformer Engine's layers, which need a GPU, or with Megatron's own."""
    return device == "cuda" and te_imports.available().ok


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


def mamba3_peer(
    options: Options,
    rank: int,
    weights: Mapping[str, torch.Tensor],
    variant: Callable[[str, Any], Variant],
    *args: Any,
    **sizes: Any,
) -> Variant:
    """Make mamba-ssm's Mamba-3 on ``[B, S, width]`` a peer, or why it cannot run here.

    Args:
        options: device and dtype.
        rank: of MIMO (1: SISO).
        weights: its parameters between its projections, by our names.
        variant: makes the variant from the peer's name and the module.
        args: its width.
        sizes: its other arguments.
    """
    name = f"mamba-ssm {'MIMO' if rank > 1 else 'SISO, 4 warps'}"
    if options.device != "cuda":
        return Variant.missing(name, "no peer here: mamba-ssm runs on a GPU alone")
    try:
        source = mamba3_source()
    except Exception as error:
        return Variant.missing(name, f"no peer installed: mamba-ssm ({type(error).__name__}: {error})")
    if rank > 1 and source.mamba3_mimo_combined is None:
        return Variant.missing(name, "no peer installed: mamba-ssm's MIMO kernels (they need tilelang)")
    module = source.Mamba3(
        *args, is_mimo=rank > 1, mimo_rank=rank, device=options.device, dtype=getattr(torch, options.dtype), **sizes
    )
    with torch.no_grad():
        for weight, value in weights.items():
            target = module.get_parameter(MAMBA3_WEIGHTS[weight])
            target.copy_(value.view(target.shape))
    return variant(name, module)


class HeadNorm(torch.nn.Module):
    """The RMSNorm of each head that our Mamba-3 applies to its output: ``[…, H·P] -> […, H·P]``."""

    def __init__(self, weight: torch.Tensor, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().clone())
        self.head_dim, self.eps = head_dim, eps

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """Norm and scale ``y``."""
        by_head = torch.nn.functional.rms_norm(y.unflatten(-1, (-1, self.head_dim)), (self.head_dim,), eps=self.eps)
        return by_head.flatten(-2) * self.weight


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
