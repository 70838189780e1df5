"""The input projection of Mamba-3 with its wide parts (z, x, B, C) in FP8 on Hopper, by PyTorch's row-scaled product.

The narrow parts (step, decay, trapezoid, angles) control the recurrence, and their errors accumulate in its state: they stay in
bfloat16, forward and backward. For the wide parts, x and the gradient have a scale per token, weights one per matrix. The
product for the weight gradient reduces over tokens, so its scales belong to columns: one per :data:`BLOCK` columns, as parts
differ in magnitude. The kernel that quantises rows also writes the maxima of their blocks; another one, which transposes, reads
the tensor once more.

Forward accumulates in Hopper's fast mode, backward in float32, as Transformer Engine's recipes do: backward sums 8192 products
or more, where the fast mode's 14 bits would show.

Legend: T tokens, D model width, N all rows of the weight, W columns of any matrix, C blocks of columns, P tokens with padding.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import fp8
from megacpp_mcore.ops.fp8 import Scaled, scale_of
from megacpp_mcore.ops.main_grad import MainGrad, add_product_, check_main_grad
from megacpp_mcore.ops.triton_launch import launch
from megacpp_mcore.te import quantized

DTYPES = (torch.bfloat16,)
BLOCK = 1024
"""Columns that share a scale in the weight gradient; the widths of NAM56R's parts are multiples of it."""
WIDEST = 32 * BLOCK
"""Columns of a row that one program holds in registers."""
COLUMNS = {"BP": 128, "BW": 64, "num_warps": 8}
"""Launch options of :func:`scale_columns`: tokens and columns of a tile."""
FAST = {"forward": True, "backward": False}
"""Whether products accumulate in Hopper's fast mode."""


@triton.jit
def scale_rows(x_TW, values_TW, scale_T, largest_CT, T, W: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a row, and write the largest absolute value of each of its blocks. One program per row."""
    t, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_TW + t * W + column, mask=column < W, other=0.0).to(tl.float32)
    largest_C = tl.max(tl.abs(x), 1)
    scale = scale_of(tl.max(largest_C, 0))
    value = (x * (1.0 / scale)).to(values_TW.dtype.element_ty)
    tl.store(values_TW + t * W + column, value, mask=column < W)
    tl.store(scale_T + t, scale)
    if largest_CT is not None:
        tl.store(largest_CT + block.to(tl.int64) * T + t, largest_C, mask=block * BLOCK < W)


@triton.jit
def scale_columns(
    x_TW, largest_CM, values_WP, scale_W, T, P,
    W: tl.constexpr, BLOCK: tl.constexpr, MAXIMA: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Transpose a tile and quantise it with the scale of its block of columns; positions after the last token are zero."""
    token = tl.program_id(0) * BP + tl.arange(0, BP)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    maxima = largest_CM + tl.program_id(1) * BW // BLOCK * MAXIMA + tl.arange(0, MAXIMA)
    scale = scale_of(tl.max(tl.load(maxima), 0))
    inside = (token < T)[:, None] & (column < W)[None, :]
    x = tl.load(x_TW + token.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value = (x * (1.0 / scale)).to(values_WP.dtype.element_ty)
    to = values_WP + column.to(tl.int64)[:, None] * P + token[None, :]
    tl.store(to, value.T, mask=(column < W)[:, None] & (token < P)[None, :])
    if tl.program_id(0) == 0:
        tl.store(scale_W + column, tl.full([BW], 1.0, tl.float32) * scale, mask=column < W)


def row(width: int) -> dict[str, int]:
    """Return the constants and launch options of :func:`scale_rows` for rows of ``width`` columns."""
    blocks = triton.next_power_of_2(triton.cdiv(width, BLOCK))
    return {"W": width, "BLOCKS": blocks, "BLOCK": BLOCK, "num_warps": max(4, min(16, blocks))}


def of_rows(x_TW: torch.Tensor, *, with_maxima: bool) -> tuple[Scaled, torch.Tensor | None]:
    """Quantise a contiguous ``x`` by rows; return also the maxima of its blocks ``[C, T]`` if requested."""
    T, W = x_TW.shape
    scaled = fp8.empty(x_TW, T, W)
    largest_CT = x_TW.new_empty(triton.cdiv(W, BLOCK), T, dtype=torch.float32) if with_maxima else None
    if T:
        launch(scale_rows, (T,), x_TW, *scaled, largest_CT, T, **row(W))
    return scaled, largest_CT


def of_columns(x_TW: torch.Tensor, largest_CT: torch.Tensor) -> Scaled:
    """Transpose a contiguous ``x``, pad it to a multiple of 16 tokens, and quantise it by blocks of columns."""
    (T, W), largest_CM = x_TW.shape, fp8.largest_of(largest_CT, fp8.LARGEST_ROW)
    P = triton.cdiv(T, fp8.MULTIPLE) * fp8.MULTIPLE
    scaled = fp8.empty(x_TW, W, P)
    launch(
        scale_columns, (triton.cdiv(P, COLUMNS["BP"]), triton.cdiv(W, COLUMNS["BW"])), x_TW, largest_CM, *scaled, T, P,
        W=W, BLOCK=BLOCK, MAXIMA=largest_CM.shape[1], **COLUMNS,
    )  # fmt: skip
    return scaled


def product(left: Scaled, right: Scaled, *, fast: bool) -> torch.Tensor:
    """Compute ``left @ right.T`` of quantised rows, in bfloat16."""
    return torch._scaled_mm(
        left.values, right.values.t(), scale_a=left.scale[:, None], scale_b=right.scale[None, :],
        out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip


def project(
    x: torch.Tensor,
    weight_ND: torch.Tensor,
    main_grad: MainGrad | None,
    rows: int,
    *,
    gradient_in_fp8: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``x [..., D] @ weight.T`` as ``[..., rows]``, with the first ``rows`` of the weight in FP8, and the rest.

    Args:
        x, weight_ND, main_grad, rows: as in :func:`megacpp_mcore.ops.mamba3_projection.reference.project`.
        gradient_in_fp8: whether the product for the weight's gradient is in FP8, too.

    Raises:
        ModelError: as in the reference; the GPU is not Hopper; a dtype is not bfloat16; a width is not a multiple of 16, or too
            wide for one program.
    """
    quantized.refuse(x=x, weight=weight_ND)
    check_main_grad(weight_ND, main_grad)
    fp8.check_device(x, "Mamba-3's input projections")
    if {x.dtype, weight_ND.dtype} - {*DTYPES}:
        raise ModelError(f"x and weight are {x.dtype}, {weight_ND.dtype}; expected {DTYPES[0]}")
    D = weight_ND.shape[1]
    if rows % fp8.MULTIPLE or D % fp8.MULTIPLE or not 0 < rows <= len(weight_ND) or max(rows, D) > WIDEST:
        raise ModelError(
            f"{rows} rows in FP8 of a weight {tuple(weight_ND.shape)}; expected multiples of {fp8.MULTIPLE} up to {WIDEST}: "
            "change the width or the tensor parallelism, or remove mamba3_projection from the backends"
        )
    forth, forth_scale, back, back_scale = (tensor[0] for tensor in fp8.kept(weight_ND, rows))
    x_TD = x.reshape(-1, D).contiguous()
    wide_TN, narrow_TN = _Projection.apply(
        x_TD, weight_ND, Scaled(forth, forth_scale), Scaled(back, back_scale), main_grad, gradient_in_fp8
    )
    return wide_TN.view(*x.shape[:-1], rows), narrow_TN.view(*x.shape[:-1], len(weight_ND) - rows)


project_gradient_bf16 = functools.partial(project, gradient_in_fp8=False)
"""The same with the weight gradient in bfloat16."""


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_ND: torch.Tensor,
        forth: Scaled,
        back: Scaled,
        main_grad: MainGrad | None,
        gradient_in_fp8: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(forth.values)
        left, largest_CT = of_rows(x_TD, with_maxima=gradient_in_fp8 and ctx.needs_input_grad[1])
        wide_TN = product(left, forth, fast=FAST["forward"])
        ctx.save_for_backward(x_TD, weight_ND, largest_CT, *back)
        ctx.main_grad, ctx.gradient_in_fp8, ctx.rows = main_grad, gradient_in_fp8, rows
        return wide_TN, torch.nn.functional.linear(x_TD, weight_ND[rows:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwide_TN: torch.Tensor, dnarrow_TN: torch.Tensor) -> tuple[Any, ...]:
        x_TD, weight_ND, largest_x_CT, *back = ctx.saved_tensors
        dwide_TN, left, largest_CT, dx_TD, dweight_ND = dwide_TN.contiguous(), None, None, None, None
        in_fp8 = ctx.gradient_in_fp8 and ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0] or in_fp8:
            left, largest_CT = of_rows(dwide_TN, with_maxima=in_fp8)
        if left is not None and ctx.needs_input_grad[0]:
            dx_TD = product(left, Scaled(*back), fast=FAST["backward"])
            dx_TD.addmm_(dnarrow_TN, weight_ND[ctx.rows :])
        del left  # free its memory for what follows
        if ctx.needs_input_grad[1]:
            maxima = None if largest_CT is None else (largest_x_CT, largest_CT)
            dweight_ND = _weight_gradient(ctx, x_TD, dwide_TN, dnarrow_TN, maxima)
        return dx_TD, dweight_ND, None, None, None, None


def _weight_gradient(
    ctx: Any,
    x_TD: torch.Tensor,
    dwide_TN: torch.Tensor,
    dnarrow_TN: torch.Tensor,
    maxima: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor | None:
    buffer, rows = ctx.main_grad and ctx.main_grad.buffer, ctx.rows
    wide_ND = None
    if maxima is not None and len(x_TD):
        left, right = of_columns(dwide_TN, maxima[1]), of_columns(x_TD, maxima[0])
        wide_ND = product(left, right, fast=FAST["backward"])
    if buffer is None:
        wide_ND = dwide_TN.t() @ x_TD if wide_ND is None else wide_ND
        return torch.cat([wide_ND, dnarrow_TN.t() @ x_TD])
    if wide_ND is None:
        add_product_(buffer[:rows], dwide_TN.t(), x_TD)
    else:
        launch(fp8.add, (triton.cdiv(wide_ND.numel(), fp8.ADDED),), buffer, wide_ND, wide_ND.numel(), BLOCK=fp8.ADDED)
    add_product_(buffer[rows:], dnarrow_TN.t(), x_TD)
    placeholder: torch.Tensor | None = ctx.main_grad.placeholder()
    return placeholder
