"""Token embedding on a GPU that accumulates its gradient into ``main_grad`` row by row, in one Triton kernel.

Autograd fills a dense gradient of the whole table for every use of it, and adds that to the buffer. Here tokens are sorted, and
each row that occurs accumulates the gradients of its tokens, in float32 and in token order: the same inputs
give the same bits, and no memory of vocabulary size is touched.

Legend: B batch, S sequence, T tokens (B × S), V vocabulary, D width.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.main_grad import MainGrad, check_main_grad
from megacpp_mcore.ops.triton_launch import launch
from megacpp_mcore.te import quantized

WIDTHS = 16
"""Widths must be multiples of this: other rows are not aligned, and the kernel would spill registers."""

LAUNCH: dict[str, int] = {"MANY": 32, "FEW": 4, "COLUMNS": 512, "num_warps": 2}
"""Tiles of the kernel, tokens and columns, and its launch options."""


def embedding(token_BS: torch.Tensor, weight_VD: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
    """Return ``weight_VD[token_BS]``, ``[B, S, D]``; its gradient is accumulated into ``main_grad``, rounded only there.

    Raises:
        ModelError: tokens are not 2-D, the width is not a multiple of :data:`WIDTHS`, the buffer does not
            fit the weight, or the weight is quantised.
    """
    quantized.refuse(weight=weight_VD)
    check_main_grad(weight_VD, main_grad)
    if token_BS.dim() != 2:
        raise ModelError(f"tokens have shape {tuple(token_BS.shape)}; expected two axes, batch and sequence")
    if weight_VD.shape[1] % WIDTHS:
        raise ModelError(f"the table is {weight_VD.shape[1]} wide; expected a multiple of {WIDTHS}: use torch's embedding")
    rows_BSD: torch.Tensor = _Embedding.apply(token_BS, weight_VD, main_grad)
    return rows_BSD


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_BS: torch.Tensor, weight_VD: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
        ctx.save_for_backward(token_BS)
        ctx.main_grad = main_grad
        return torch.nn.functional.embedding(token_BS, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BSD: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        (token_BS,) = ctx.saved_tensors
        add_gradient(ctx.main_grad.buffer, token_BS, gradient_BSD)
        return None, ctx.main_grad.placeholder(), None


def add_gradient(total_VD: torch.Tensor, token_BS: torch.Tensor, gradient_BSD: torch.Tensor) -> None:
    """Add the gradient of every token to the row of its entry."""
    (S, D), T = gradient_BSD.shape[1:], token_BS.numel()
    if not T:
        return
    if gradient_BSD.stride(2) != 1 or any(stride % WIDTHS for stride in gradient_BSD.stride()[:2]):
        gradient_BSD = gradient_BSD.contiguous()
    entry_T, order_T = token_BS.reshape(-1).sort(stable=True)
    end_T = torch.searchsorted(entry_T, entry_T, right=True, out_int32=True)
    launch(
        add_rows, (T, triton.cdiv(D, LAUNCH["COLUMNS"])), entry_T, order_T, end_T, gradient_BSD, total_VD, S,
        *gradient_BSD.stride()[:2], D=D, **LAUNCH,
    )  # fmt: skip


@triton.jit
def _sum_of(order_T, place, end, gradient_BSD, d, S, stride_b, stride_s, D: tl.constexpr, FULL: tl.constexpr):
    """Add the rows of the tokens at some places of the sorted order; FULL: all of them are before ``end``."""
    inside = d[None, :] < D
    if FULL:
        token = tl.load(order_T + place).to(tl.int32)
    else:
        token = tl.load(order_T + place, mask=place < end, other=0).to(tl.int32)
        inside = inside & (place < end)[:, None]
    row = (token // S).to(tl.int64) * stride_b + (token % S).to(tl.int64) * stride_s
    return tl.sum(tl.load(gradient_BSD + row[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32), 0)


@triton.jit
def add_rows(entry_T, order_T, end_T, gradient_BSD, total_VD, S, stride_b, stride_s,
             D: tl.constexpr, MANY: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Add the rows of one entry's tokens, in the program of the first of them in sorted order: MANY at a time (a letter in
    byte-level text has many), then FEW."""
    t, d = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    entry = tl.load(entry_T + t)
    if (t == 0) | (tl.load(entry_T + tl.maximum(t - 1, 0)) != entry):
        end = tl.load(end_T + t)
        rest = end - (end - t) % MANY
        total_D = tl.zeros([COLUMNS], tl.float32)
        for first in range(t, rest, MANY):
            place = first + tl.arange(0, MANY)
            total_D += _sum_of(order_T, place, end, gradient_BSD, d, S, stride_b, stride_s, D, True)
        for first in range(rest, end, FEW):
            place = first + tl.arange(0, FEW)
            total_D += _sum_of(order_T, place, end, gradient_BSD, d, S, stride_b, stride_s, D, False)
        at = total_VD + entry * D + d
        tl.store(at, (tl.load(at, mask=d < D).to(tl.float32) + total_D).to(total_VD.dtype.element_ty), mask=d < D)
