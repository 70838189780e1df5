"""The import firewall for other packages' kernels: where each entry point is, and whether it runs here.

No other module of the package names one of these packages. All of them are optional, and none is imported before it is
probed or called; a probe compiles and runs the smallest call, forward and backward, and compares it with plain PyTorch.

=============  =======================  ====================================================================================
extra          package                  what excludes it
=============  =======================  ====================================================================================
``flash4``     flash-attn-4 4.0.0b36    needs apache-tvm-ffi ≥ 0.1.11: not in one environment with ``ssm`` (tilelang: ≤ 0.1.9)
``quack``      quack-kernels 0.6.5      runs with either, but brings NVIDIA's CuTe DSL; resolved together with ``flash4``
``liger``      liger-kernel 0.8.5       nothing: only Triton
=============  =======================  ====================================================================================
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from megacpp_mcore.errors import BackendError
from megacpp_mcore.ops.testing import worst_row
from megacpp_mcore.util.probe import ProbeResult, probe_import

ENTRIES: Mapping[str, str] = MappingProxyType(
    {
        "flash4": "flash_attn.cute:flash_attn_func",
        "flash4_packed": "flash_attn.cute:flash_attn_varlen_func",
        "quack": "quack.linear_cross_entropy:chunked_linear_cross_entropy",
        "quack_product": "quack.gemm_interface:gemm_tuned.fn",
        "quack_backward": "quack.gemm_interface:gemm_dact",
        "quack_tile": "quack.gemm_config:GemmConfig",
        "quack_epilogue": "quack.epilogue:gemm_epilogue",
        "quack_column": "quack.epilogue.ops:ColVecLoad",
        "quack_gelu": "quack.activation:gelu_erf",
        "quack_gelu_tanh": "quack.activation:gelu_tanh_approx",
        "liger": "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
    }
)
"""Every entry point, ``module:attribute``, by our name for it."""

TOLERANCE = 5e-2
"""Largest row error allowed in a probe's results, 16-bit against float32: unfused code in bf16 has 2e-2."""


def entry(name: str) -> Callable[..., Any]:
    """Return the entry point ``name`` of :data:`ENTRIES`.

    Raises:
        BackendError: it cannot be imported.
    """
    module, _, attribute = ENTRIES[name].partition(":")
    try:
        function: Callable[..., Any] = operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:
        raise BackendError(
            f"{module} cannot be used ({error!r}): install the extra {_extra(name)} of megacpp-mcore, or choose another backend"
        ) from error
    return function


def _extra(name: str) -> str:
    return name.partition("_")[0]


def installed(name: str) -> ProbeResult:
    """Return whether the module of the entry point ``name`` of :data:`ENTRIES` can be imported."""
    probe = probe_import(ENTRIES[name].partition(":")[0])
    return probe if probe.ok else ProbeResult(False, f"{probe.reason}; it comes with the extra {_extra(name)} of megacpp-mcore")


def tried(
    what: str,
    call: Callable[..., torch.Tensor],
    truth: Callable[..., torch.Tensor],
    leaves: Callable[[], Sequence[torch.Tensor]],
) -> ProbeResult:
    """Return whether ``call`` agrees with ``truth``, forward and backward, on this machine's GPU.

    Args:
        what: description of the call, for messages.
        call: the function under test, called with the leaves.
        truth: the same in plain PyTorch, called with the leaves in float32.
        leaves: creates the differentiable inputs, on the GPU, in 16 bits.
    """
    if not torch.cuda.is_available():
        return ProbeResult(False, "torch sees no CUDA device")
    try:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [leaf.requires_grad_() for leaf in leaves()]
            expected = _outcome(truth, [leaf.detach().float().requires_grad_() for leaf in inputs])
            actual = _outcome(call, inputs)
        worst = max(worst_row(a, b, what) for a, b in zip(actual, expected, strict=True))
    except Exception as error:
        return ProbeResult(False, f"{what} failed: {error!r}".replace("\n", " "))
    if not worst < TOLERANCE:
        return ProbeResult(False, f"{what} differs from plain PyTorch by {worst:.2g}")
    return ProbeResult(True)


def _outcome(call: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), list(leaves))]
