"""RMSNorm by Triton kernels, on a GPU: the function of :mod:`megacpp_mcore.ops.rms_norm.reference`.

One launch forward; backward one that adds the residual's gradient to that of the norm, rounded once, and one that adds up the
weight's, in one order.

Legend: T rows, D values of a row, P programs of the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.rms_norm import kernels
from megacpp_mcore.ops.rms_norm.reference import check

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LARGEST = 8192
"""Values of a row that a program has registers for."""

FORWARD: dict[str, int] = {"num_warps": 4}
BACKWARD: dict[str, int] = {"num_warps": 8}
PROGRAMS = 2
"""Of the backward pass, of a multiprocessor."""

PARTS: dict[str, int] = {"PARTS": 32, "BLOCK": 32, "num_warps": 4}


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the reference of this name does, for rows of at most :data:`LARGEST` values.

    Raises:
        ModelError: as there, or the rows are longer, or of another dtype than :data:`DTYPES`.
    """
    check(x, weight_D)
    if x.dtype not in DTYPES or weight_D.dtype not in DTYPES or len(weight_D) > LARGEST:
        raise ModelError(
            f"rms_norm's kernels were given rows of {len(weight_D)} {x.dtype} and a weight of {weight_D.dtype}; they take "
            f"at most {LARGEST} of {', '.join(map(str, DTYPES))}: use the reference"
        )
    normed, residual = _RMSNorm.apply(x, weight_D, eps)
    return normed, residual


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight_D = x.contiguous(), weight_D.contiguous()
        T, D = rows.numel() // len(weight_D), len(weight_D)
        normed, scale_T = torch.empty_like(rows), rows.new_empty(T, dtype=torch.float32)
        if T:
            kernels.forward[(T,)](rows, weight_D, normed, scale_T, eps, D=D, BLOCK=triton.next_power_of_2(D), **FORWARD)
        ctx.save_for_backward(rows, weight_D, scale_T)
        ctx.set_materialize_grads(False)
        return normed, x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnormed: torch.Tensor | None, dresidual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        if dnormed is None:
            return dresidual, None, None
        rows, weight_D, scale_T = ctx.saved_tensors
        T, D = len(scale_T), len(weight_D)
        dx, dweight_D = torch.empty_like(rows), torch.empty_like(weight_D)
        if not T:
            dweight_D.zero_()
        else:
            P = min(T, PROGRAMS * _processors(rows.device))
            dweight_PD = scale_T.new_empty(P, D)
            kernels.backward[(P,)](
                rows,
                weight_D,
                scale_T,
                dnormed.contiguous(),
                None if dresidual is None else dresidual.contiguous(),
                dx,
                dweight_PD,
                T,
                D=D,
                BLOCK=triton.next_power_of_2(D),
                **BACKWARD,
            )
            kernels.add_parts[(triton.cdiv(D, PARTS["BLOCK"]),)](dweight_PD, dweight_D, P, D=D, **PARTS)
        return dx, dweight_D, None


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; of a CPU, where Triton interprets, few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
