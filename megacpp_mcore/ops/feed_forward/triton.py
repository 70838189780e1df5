"""A dense feed-forward layer with GELU; all six matrix products of training are FP8 on Hopper, by PyTorch's scaled product.

Each operand is quantised once, by the kernel that computes it: the activation and its gradient never exist in bfloat16. Each
token's row has one scale, a power of two; weights have one per matrix. The products for weight gradients reduce over tokens,
which Hopper needs contiguous: the same bytes are transposed, with one scale per tensor, the largest of its rows'. As scales
are powers of two, that rounds only values below 2⁻⁶ of E4M3's unit.

Forward accumulates in Hopper's fast mode, backward in float32, as Transformer Engine's recipes do.

Legend: T tokens, D model width, F inner width, W columns of any matrix, P tokens with padding.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import fp8
from megacpp_mcore.ops.feed_forward.reference import MainGrads, check
from megacpp_mcore.ops.fp8 import Scaled, scale_of
from megacpp_mcore.ops.grouped_mlp.kernels import _activation
from megacpp_mcore.ops.main_grad import MainGrad, check_main_grad
from megacpp_mcore.ops.triton_launch import launch
from megacpp_mcore.te import quantized

DTYPES = (torch.bfloat16,)
WIDEST = 32768
"""Columns of a row that one program holds in registers."""
TRANSPOSED = {"BP": 128, "BW": 64, "num_warps": 16}
"""Launch options of :func:`transpose`: tokens and columns of a tile."""
FAST = {"forward": True, "backward": False}
"""Whether products accumulate in Hopper's fast mode."""


@triton.jit
def _power_of_two(scale):
    """Round ``scale``, a normal positive number, up to a power of two."""
    return ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def _row(x_W, h_W, start: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Return BLOCK columns, from ``start``, of the row to be quantised."""
    column = start + tl.arange(0, BLOCK)
    value = tl.full([BLOCK], 1.0, tl.float32)
    if x_W is not None:
        value = tl.load(x_W + column, mask=column < W, other=0.0).to(tl.float32)
    if h_W is not None:
        h = tl.load(h_W + column, mask=column < W, other=0.0).to(tl.float32)
        factor, slope = _activation(h, False)
        value *= h * factor if x_W is None else slope
    return value


@triton.jit
def scale_rows(x_TW, h_TW, values_TW, scale_T, W: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Quantise a row of ``x``; of GELU(h), without ``x``; or of ``x`` times GELU's derivative at ``h``. One row per program.

    The row is held in two parts: one block of 2ⁿ columns would be far wider than the row.
    """
    t = tl.program_id(0).to(tl.int64)
    x_W = None if x_TW is None else x_TW + t * W
    h_W = None if h_TW is None else h_TW + t * W
    head = _row(x_W, h_W, 0, W, HEAD)
    largest = tl.max(tl.abs(head), 0)
    if TAIL:
        tail = _row(x_W, h_W, HEAD, W, TAIL)
        largest = tl.maximum(largest, tl.max(tl.abs(tail), 0))
    scale = _power_of_two(scale_of(largest))
    inverse = tl.div_rn(1.0, scale)
    column = tl.arange(0, HEAD)
    tl.store(values_TW + t * W + column, (head * inverse).to(values_TW.dtype.element_ty), mask=column < W)
    if TAIL:
        column = HEAD + tl.arange(0, TAIL)
        tl.store(values_TW + t * W + column, (tail * inverse).to(values_TW.dtype.element_ty), mask=column < W)
    tl.store(scale_T + t, scale)


@triton.jit
def transpose(
    values_TW, scale_T, scale, values_WP, T, P, W: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """Transpose a tile and replace its row scales by a single one; positions after the last token are zero."""
    token = tl.program_id(0) * BP + tl.arange(0, BP)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    factor = tl.load(scale_T + token, mask=token < T, other=0.0) * tl.div_rn(1.0, tl.load(scale))
    inside = (token < T)[:, None] & (column < W)[None, :]
    value = tl.load(values_TW + token.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value = (value * factor[:, None]).to(values_WP.dtype.element_ty)
    to = values_WP + column.to(tl.int64)[:, None] * P + token[None, :]
    tl.store(to, value.T, mask=(column < W)[:, None] & (token < P)[None, :])


def row(width: int) -> dict[str, int]:
    """Return the constants and launch options of :func:`scale_rows` for rows of ``width`` columns."""
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 0
    return {"W": width, "HEAD": head, "TAIL": tail, "num_warps": max(1, min(16, head // 512))}


def of_rows(given_TW: torch.Tensor, h_TW: torch.Tensor | None = None, *, activates: bool = False) -> Scaled:
    """Quantise contiguous rows, their GELU, or the rows times the derivative of GELU at ``h``."""
    T, W = given_TW.shape
    scaled = fp8.empty(given_TW, T, W)
    x_TW, h_TW = (None, given_TW) if activates else (given_TW, h_TW)
    if T:
        launch(scale_rows, (T,), x_TW, h_TW, *scaled, **row(W))
    return scaled


def of_columns(rows: Scaled) -> Scaled:
    """Transpose quantised rows, at least one, pad them to a multiple of 16 tokens, and give them one scale."""
    (T, W), scale = rows.values.shape, rows.scale.amax()
    P = triton.cdiv(T, fp8.MULTIPLE) * fp8.MULTIPLE
    values_WP = rows.values.new_empty(W, P)
    grid = triton.cdiv(P, TRANSPOSED["BP"]), triton.cdiv(W, TRANSPOSED["BW"])
    launch(transpose, grid, *rows, scale, values_WP, T, P, W=W, **TRANSPOSED)
    return Scaled(values_WP, scale)


def product(left: Scaled, right: Scaled, *, fast: bool) -> torch.Tensor:
    """``left @ right.T`` in bfloat16; both have a scale per row, or both a single one."""
    by_row = left.scale.dim() > 0
    return torch._scaled_mm(
        left.values, right.values.t(), scale_a=left.scale[:, None] if by_row else left.scale,
        scale_b=right.scale[None, :] if by_row else right.scale, out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip


def feed_forward(
    x: torch.Tensor, w1_FD: torch.Tensor, w2_DF: torch.Tensor, main_grads: MainGrads = (None, None)
) -> torch.Tensor:
    """Compute as :func:`megacpp_mcore.ops.feed_forward.reference.feed_forward` does, in FP8.

    Raises:
        ModelError: as in the reference; the GPU is not Hopper; a dtype is not bfloat16; a width is not a multiple of 16, or too
            wide for one program.
    """
    quantized.refuse(x=x, w1=w1_FD, w2=w2_DF)
    check(x, w1_FD, w2_DF)
    for weight, main_grad in zip((w1_FD, w2_DF), main_grads, strict=True):
        check_main_grad(weight, main_grad)
    fp8.check_device(x, "the feed-forward layer's products")
    if {x.dtype, w1_FD.dtype, w2_DF.dtype} - {*DTYPES}:
        raise ModelError(f"x and weights are {x.dtype}, {w1_FD.dtype}, {w2_DF.dtype}; expected {DTYPES[0]}")
    F, D = w1_FD.shape
    if D % fp8.MULTIPLE or F % fp8.MULTIPLE or not 0 < min(D, F) <= max(D, F) <= WIDEST:
        raise ModelError(
            f"the feed-forward layer has widths {D} and {F}; in FP8 expected multiples of {fp8.MULTIPLE} up to {WIDEST}: "
            "change the width, or remove feed_forward from the backends"
        )
    x_TD = x.reshape(-1, D).contiguous()
    y_TD: torch.Tensor = _FeedForward.apply(x_TD, w1_FD, w2_DF, _kept(w1_FD), _kept(w2_DF), main_grads)
    return y_TD.view(x.shape)


def _kept(weight: torch.Tensor) -> tuple[Scaled, Scaled]:
    """Return a weight in FP8, and its transpose."""
    forth, forth_scale, back, back_scale = (tensor[0] for tensor in fp8.kept(weight, len(weight)))
    return Scaled(forth, forth_scale), Scaled(back, back_scale)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w1_FD: torch.Tensor,
        w2_DF: torch.Tensor,
        first: tuple[Scaled, Scaled],
        second: tuple[Scaled, Scaled],
        main_grads: MainGrads,
    ) -> torch.Tensor:
        x = of_rows(x_TD)
        h_TF = product(x, first[0], fast=FAST["forward"])
        a = of_rows(h_TF, activates=True)
        ctx.save_for_backward(h_TF, *x, *a, *first[1], *second[1])
        ctx.main_grads = main_grads
        return product(a, second[0], fast=FAST["forward"])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[Any, ...]:
        h_TF, *saved = ctx.saved_tensors
        x, a, first, second = (Scaled(*pair) for pair in zip(saved[::2], saved[1::2], strict=True))
        fast, dx_TD, dw1_FD, dw2_DF = FAST["backward"], None, None, None
        dy = of_rows(dy_TD.contiguous())
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dh = of_rows(product(dy, second, fast=fast), h_TF)
            if ctx.needs_input_grad[0]:
                dx_TD = product(dh, first, fast=fast)
            if ctx.needs_input_grad[1]:
                dw1_FD = _weight_gradient(dh, x, ctx.main_grads[0])
            del dh  # free its memory for what follows
        if ctx.needs_input_grad[2]:
            dw2_DF = _weight_gradient(dy, a, ctx.main_grads[1])
        return dx_TD, dw1_FD, dw2_DF, None, None, None


def _weight_gradient(left: Scaled, right: Scaled, main_grad: MainGrad | None) -> torch.Tensor | None:
    """Return ``left.T @ right``, or, once that is added to the buffer, its placeholder for autograd."""
    if len(left.values):
        gradient = product(of_columns(left), of_columns(right), fast=FAST["backward"])
        if main_grad is None:
            return gradient
        size = gradient.numel()
        launch(fp8.add, (triton.cdiv(size, fp8.ADDED),), main_grad.buffer, gradient, size, BLOCK=fp8.ADDED)
    elif main_grad is None:
        return left.scale.new_zeros(left.values.shape[1], right.values.shape[1], dtype=torch.bfloat16)
    return main_grad.placeholder()
