"""RMSNorm by Triton kernels on a GPU: the function of :mod:`megacpp_mcore.ops.rms_norm.reference`.

One launch forward; two backward: one adds the residual's gradient to the norm's, rounded once, and one sums the weight
gradient's partial sums in a fixed order.

Legend: T rows, D values of a row, P programs of the backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.rms_norm import kernels
from megacpp_mcore.ops.rms_norm.reference import check
from megacpp_mcore.ops.triton_launch import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LARGEST = 8192
"""Longest row that a program holds in registers."""

PROGRAMS = 2
"""Programs of the backward pass per multiprocessor."""

FORWARD: dict[str, int] = {"num_warps": 4}
BACKWARD: dict[str, int] = {"num_warps": 8}
ADD_PARTS: dict[str, int] = {"PARTS": 32, "COLUMNS": 32, "num_warps": 4}
"""Launch options; the tile of :func:`kernels.add_parts`, programs and values."""


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the reference's :func:`rms_norm` for rows of at most :data:`LARGEST` values.

    Raises:
        ModelError: as in the reference, or the rows are longer, or their dtype is not in :data:`DTYPES`.
    """
    check(x, weight_D)
    if x.dtype not in DTYPES or weight_D.dtype not in DTYPES or len(weight_D) > LARGEST:
        raise ModelError(
            f"rms_norm's kernels got rows of {len(weight_D)} {x.dtype} and a weight of {weight_D.dtype}; they take "
            f"at most {LARGEST} of {', '.join(map(str, DTYPES))}: use the reference"
        )
    normed, residual = _RMSNorm.apply(x, weight_D, eps)
    return normed, residual


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight_D = x.contiguous(), weight_D.contiguous()
        T, D = rows.numel() // len(weight_D), len(weight_D)
        # Not empty_like, which keeps strides: with one sample, its strides may keep a matrix product from folding axes.
        normed, scale_T = rows.new_empty(rows.shape), rows.new_empty(T, dtype=torch.float32)
        if T:
            launch(kernels.forward, (T,), rows, weight_D, normed, scale_T, eps, **row(D), **FORWARD)
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
        if not T:
            return rows.new_empty(rows.shape), torch.zeros_like(weight_D), None
        dnormed = dnormed.contiguous()
        dresidual = None if dresidual is None else dresidual.contiguous()
        P = min(T, PROGRAMS * _processors(rows.device))
        dx, dweight_D, dweight_PD = rows.new_empty(rows.shape), torch.empty_like(weight_D), scale_T.new_empty(P, D)
        given = (rows, weight_D, scale_T, dnormed, dresidual)
        launch(kernels.backward, (P,), *given, dx, dweight_PD, T, **row(D), **BACKWARD)
        launch(kernels.add_parts, (triton.cdiv(D, ADD_PARTS["COLUMNS"]),), dweight_PD, dweight_D, P, D=D, **ADD_PARTS)
        return dx, dweight_D, None


def row(D: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels that process whole rows."""
    return {"D": D, "BLOCK": triton.next_power_of_2(D)}


@cache
def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; a small number on a CPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
