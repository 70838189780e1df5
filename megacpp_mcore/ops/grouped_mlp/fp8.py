"""Routed experts with FP8 (E4M3) products on Hopper, by PyTorch's grouped product with row-wise scales.

Operands are scaled so that their largest value maps to E4M3's largest: activations per row, weights per matrix, so that one
kernel can write both layouts. In training, weights are quantised once per optimizer step. For weight gradients both operands
are transposed, with one scale per tensor, and each expert's rows are padded with zeros to begin at a multiple of a tile; a
kernel of this module multiplies them, because it can accumulate into a float32 buffer and PyTorch's product cannot. ``auto``
does not choose this backend: its results differ from bfloat16 by E4M3's rounding, 2.6 % of a value (rms).

Legend: T tokens, E experts, K experts per token, R rows (T × K; the last are unused if tokens have fewer experts), P row
positions with padding, D model width, F expert width; N and W rows and columns of any matrix.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_mcore.ops import fp8
from megacpp_mcore.ops.fp8 import LARGEST, LARGEST_ROW, MULTIPLE, Scaled, check_device, kept, largest_of, scale_of
from megacpp_mcore.ops.grouped_mlp import triton as bf16
from megacpp_mcore.ops.grouped_mlp.kernels import _activation
from megacpp_mcore.ops.grouped_mlp.triton import Products, Rows
from megacpp_mcore.ops.triton_launch import launch

ELEMENTS = 4096
"""Elements of a program's tile: whole rows, or a part of one longer row."""

TRANSPOSED = {"BP": 128, "BW": 64, "num_warps": 8}
ACROSS = 2
"""Launch options of the transpose: rows and columns of a tile, programs across the columns."""

WEIGHT_GRADIENT = {"BM": 128, "BN": 256, "BK": 128, "STAGES": 4, "num_warps": 8}
"""Launch options of :func:`weight_gradient`; experts' rows are padded to multiples of BK."""

BACKWARD = {"elements": 1024, "warps": 4}
"""Launch options of :func:`activate_backward`: most elements of a tile of more than one row."""


@triton.jit
def scale_rows(x_NW, row_NC, values, scales, N, W: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise ROWS rows, in their own order or copied to COPIES destinations each (negative: skipped)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, W, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < N)[:, None] & (column < W)[None, :]
        x = tl.load(x_NW + row.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    scale = scale_of(largest)
    for start in tl.static_range(0, W, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < N)[:, None] & (column < W)[None, :]
        if W > BLOCK:
            x = tl.load(x_NW + row.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = (x * (1.0 / scale)[:, None]).to(values.dtype.element_ty)
        if row_NC is None:
            tl.store(values + row.to(tl.int64)[:, None] * W + column[None, :], value, mask=inside)
        else:
            for copy in tl.static_range(COPIES):
                to = tl.load(row_NC + row * COPIES + copy, mask=row < N, other=-1).to(tl.int64)
                tl.store(values + to[:, None] * W + column[None, :], value, mask=inside & (to >= 0)[:, None])
    if row_NC is None:
        tl.store(scales + row, scale, mask=row < N)
    else:
        for copy in tl.static_range(COPIES):
            to = tl.load(row_NC + row * COPIES + copy, mask=row < N, other=-1)
            tl.store(scales + to, scale, mask=to >= 0)


@triton.jit
def _prob(prob_R, row, R):
    prob = tl.full(row.shape, 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    return prob[:, None]


@triton.jit
def _at(matrix, row, column, W: tl.constexpr):
    return matrix + row.to(tl.int64)[:, None] * W + column[None, :]


@triton.jit
def activate(
    h_RF, prob_R, end_E, values, scales, E, F: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantise the activation of ROWS rows times their probabilities."""
    R = tl.load(end_E + E - 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob = _prob(prob_R, row, R)
    largest = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        a = _activated(h_RF, prob, row, column, inside, F, TANH)
        largest = tl.maximum(largest, tl.max(tl.abs(a), 1))
    scale = scale_of(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        if F > BLOCK:
            a = _activated(h_RF, prob, row, column, inside, F, TANH)
        tl.store(_at(values, row, column, F), (a * (1.0 / scale)[:, None]).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < R)


@triton.jit
def _activated(h_RF, prob, row, column, inside, F: tl.constexpr, TANH: tl.constexpr):
    h = tl.load(_at(h_RF, row, column, F), mask=inside, other=0.0).to(tl.float32)
    factor, _ = _activation(h, TANH)
    return h * factor * prob


@triton.jit
def activate_backward(
    h_RF,
    prob_R,
    da_RF,
    x_scale_R,
    dy_scale_R,
    a_RF,
    dprob_R,
    largest_4R,
    values,
    scales,
    end_E,
    R,
    E,
    F: tl.constexpr,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace ``da`` by ``dh``, the gradient of the first product, and quantise it; recompute ``a``.

    Also store the row maxima of ``a``, ``dh``, and of their partners in weight gradients, ``dy`` and ``x``; 0 for unused rows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = tl.load(end_E + E - 1)
    prob = _prob(prob_R, row, used)
    largest = tl.zeros([ROWS], tl.float32)
    largest_a = tl.zeros([ROWS], tl.float32)
    dprob = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < used)[:, None] & (column < F)[None, :]
        a, dh, each = _activated_backward(h_RF, da_RF, prob, row, column, inside, F, TANH)
        dprob += each
        largest = tl.maximum(largest, tl.max(tl.abs(dh), 1))
        largest_a = tl.maximum(largest_a, tl.max(tl.abs(a), 1))
    scale = scale_of(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < used)[:, None] & (column < F)[None, :]
        if F > BLOCK:
            a, dh, _ = _activated_backward(h_RF, da_RF, prob, row, column, inside, F, TANH)
        tl.store(_at(a_RF, row, column, F), a.to(a_RF.dtype.element_ty), mask=inside)
        tl.store(_at(da_RF, row, column, F), dh.to(da_RF.dtype.element_ty), mask=inside)
        tl.store(_at(values, row, column, F), (dh * (1.0 / scale)[:, None]).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < used)
    tl.store(dprob_R + row, dprob, mask=row < used)
    tl.store(largest_4R + row, largest_a, mask=row < R)
    tl.store(largest_4R + R + row, largest, mask=row < R)
    dy_scale = tl.load(dy_scale_R + row, mask=row < used, other=0.0)
    tl.store(largest_4R + 2 * R + row, dy_scale * LARGEST, mask=row < R)
    x_scale = tl.load(x_scale_R + row, mask=row < used, other=0.0)
    tl.store(largest_4R + 3 * R + row, x_scale * LARGEST, mask=row < R)


@triton.jit
def _activated_backward(h_RF, da_RF, prob, row, column, inside, F: tl.constexpr, TANH: tl.constexpr):
    """Compute activation · probability, the gradient of ``h``, and each row's part of the probability's gradient."""
    h = tl.load(_at(h_RF, row, column, F), mask=inside, other=0.0).to(tl.float32)
    da = tl.load(_at(da_RF, row, column, F), mask=inside, other=0.0).to(tl.float32)
    factor, slope = _activation(h, TANH)
    a = h * factor
    return a * prob, da * slope * prob, tl.sum(da * a, 1)


@triton.jit
def pad(end_E, row_P, end_P, E, EXPERTS: tl.constexpr, MULTIPLE: tl.constexpr):
    """Write the row at each position (-1: padding), each expert beginning at a multiple of MULTIPLE, and the experts' ends."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(end_E + expert, mask=expert < E, other=0)
    first = tl.load(end_E + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    places = tl.where(expert < E, (end - first + MULTIPLE - 1) // MULTIPLE * MULTIPLE, 0)
    behind = tl.cumsum(places, 0)
    start = tl.program_id(0) * MULTIPLE
    here = expert == tl.sum(((behind <= start) & (expert < E)).to(tl.int32), 0)
    row = tl.sum(tl.where(here, first + start - behind + places, 0), 0) + tl.arange(0, MULTIPLE)
    last = tl.sum(tl.where(here, end, 0), 0)
    tl.store(row_P + start + tl.arange(0, MULTIPLE), tl.where(row < last, row, -1))
    if start == 0:
        tl.store(end_P + expert, behind, mask=expert < E)


@triton.jit
def transpose_rows(
    x, token_R, row_P, end_P, largest, values_WP, scale_1, E, P,
    W: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Transpose and quantise STEPS · BW columns of rows, or of the rows' tokens."""
    if (tl.program_id(0) > 0) & (tl.program_id(0) * BP >= tl.load(end_P + E - 1)):
        return
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    row = tl.load(row_P + place, mask=place < P, other=-1)
    real = row >= 0
    if token_R is not None:
        row = tl.load(token_R + row, mask=real, other=0)
    scale = scale_of(tl.max(tl.load(largest + tl.arange(0, PARTS)), 0))
    at = x + row.to(tl.int64)[:, None] * W
    column = tl.program_id(1) * (STEPS * BW) + tl.arange(0, BW)
    upcoming = tl.load(at + column[None, :], mask=real[:, None] & (column < W)[None, :], other=0.0)
    for step in tl.range(STEPS):
        value = (upcoming.to(tl.float32) * (1.0 / scale)).to(values_WP.dtype.element_ty)
        behind = column + BW
        upcoming = tl.load(at + behind[None, :], mask=real[:, None] & (behind < W)[None, :] & (step < STEPS - 1), other=0.0)
        to = values_WP + column.to(tl.int64)[:, None] * P + place[None, :]
        tl.store(to, value.T, mask=(column < W)[:, None] & (place < P)[None, :])
        column = behind
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_1, scale)


@triton.jit
def weight_gradient(
    left_tiles, right_tiles, left_scale_1, right_scale_1, end_P, dw_EMN,
    M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute [M, N] of an expert: left · rightᵀ over its positions, accumulated in Hopper's fast mode; with ADD, added to the
    float32 output.

    The addition is atomic, which saves loading the output; no other program adds to the same element.
    """
    expert = tl.program_id(1)
    across: tl.constexpr = (N + BN - 1) // BN
    left_row, right_row = tl.program_id(0) // across * BM, tl.program_id(0) % across * BN
    end = tl.load(end_P + expert)
    first = tl.load(end_P + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(first, end, BK, num_stages=STAGES):
        total = tl.dot(left_tiles.load([left_row, k]), right_tiles.load([right_row, k]).T, total)
    total *= tl.load(left_scale_1) * tl.load(right_scale_1)
    m, n = left_row + tl.arange(0, BM), right_row + tl.arange(0, BN)
    at = dw_EMN + expert.to(tl.int64) * (M * N) + m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        tl.atomic_add(at, total, mask=inside, sem="relaxed")
    else:
        tl.store(at, total.to(dw_EMN.dtype.element_ty), mask=inside)


def _tile(width: int, elements: int | None = None, warps: int = 4) -> dict[str, int]:
    block = min(ELEMENTS, triton.next_power_of_2(width))
    return {"ROWS": max(1, (elements or ELEMENTS) // block), "BLOCK": block, "num_warps": warps}


def of_rows(x: torch.Tensor, row_TK: torch.Tensor | None = None) -> Scaled:
    """Quantise ``x`` by rows, in its own order or copied to the rows ``row_TK`` of each token."""
    width, copies = x.shape[-1], 1 if row_TK is None else row_TK.shape[1]
    rows, tile = x.numel() // width, _tile(width)
    scaled = fp8.empty(x, *x.shape) if row_TK is None else fp8.empty(x, rows * copies, width)
    if rows:
        launch(scale_rows, (triton.cdiv(rows, tile["ROWS"]),), x, row_TK, *scaled, rows, W=width, COPIES=copies, **tile)
    return scaled


class Weights(NamedTuple):
    """Both matrices of every expert in E4M3, with one scale per matrix: in the forward pass's layout, and transposed."""

    w1_EFD: torch.Tensor
    w1_scale_EF: torch.Tensor
    w1_EDF: torch.Tensor
    w1_scale_ED: torch.Tensor
    w2_EDF: torch.Tensor
    w2_scale_ED: torch.Tensor
    w2_EFD: torch.Tensor
    w2_scale_EF: torch.Tensor


def of_weights(w1_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> Weights:
    """Quantise both matrices; parameters in training only once per optimizer step."""
    return Weights(*kept(w1_EFD), *kept(w2_EDF))


def product(left: Scaled, right_ENW: torch.Tensor, scale_EN: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Multiply each row by the transpose of its expert's matrix."""
    return torch._scaled_grouped_mm(
        left.values, right_ENW.transpose(1, 2), left.scale, scale_EN, offs=rows.end_E, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def _hidden(x: torch.Tensor, rows: Rows, weights: Weights, activation: str) -> tuple[Sequence[torch.Tensor], Scaled]:
    quantised = of_rows(x, rows.row_TK)
    h_RF, x_scale_R = product(quantised, weights.w1_EFD, weights.w1_scale_EF, rows), quantised.scale
    del quantised  # free its memory for what follows
    (R, F), tile, left = h_RF.shape, _tile(h_RF.shape[1]), fp8.empty(h_RF, *h_RF.shape)
    if R:
        grid = (triton.cdiv(R, tile["ROWS"]),)
        launch(
            activate, grid, h_RF, rows.prob_R, rows.end_E, *left, len(rows.end_E), F=F, TANH=activation == "gelu_tanh", **tile
        )  # fmt: skip
    return (h_RF, x_scale_R), left


def _output(left: Scaled, weights: Weights, rows: Rows) -> torch.Tensor:
    return product(left, weights.w2_EDF, weights.w2_scale_ED, rows)


class Transposed(NamedTuple):
    """A transposed operand in E4M3 and its scale; the row at each position, and where each expert's positions end."""

    values_WP: torch.Tensor
    scale_1: torch.Tensor
    row_P: torch.Tensor
    end_P: torch.Tensor


def transposed(
    x: torch.Tensor, token_R: torch.Tensor | None, largest: torch.Tensor, row_P: torch.Tensor, end_P: torch.Tensor
) -> Transposed:
    """Transpose the rows ``row_P`` of ``x`` and quantise them with one scale."""
    W, E, P = x.shape[1], end_P.shape[0], row_P.shape[0]
    values_WP, scale_1 = x.new_empty(W, P, dtype=fp8.E4M3), x.new_empty(1, dtype=torch.float32)
    launch(
        transpose_rows, (triton.cdiv(P, TRANSPOSED["BP"]), ACROSS), x, token_R, row_P, end_P, largest, values_WP, scale_1,
        E, P, W=W, PARTS=largest.numel(), STEPS=triton.cdiv(W, TRANSPOSED["BW"] * ACROSS), **TRANSPOSED,
    )  # fmt: skip
    return Transposed(values_WP, scale_1, row_P, end_P)


def padded(end_E: torch.Tensor, R: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row at each position, with every expert beginning at a tile boundary, and where each expert ends."""
    E, tile = end_E.shape[0], WEIGHT_GRADIENT["BK"]
    row_P, end_P = end_E.new_empty(triton.cdiv(R + (tile - 1) * E, tile) * tile), torch.empty_like(end_E)
    experts = triton.next_power_of_2(E)
    launch(pad, (row_P.shape[0] // tile,), end_E, row_P, end_P, E, EXPERTS=experts, MULTIPLE=tile, num_warps=1)
    return row_P, end_P


def _hidden_gradient(
    dy: torch.Tensor, rows: Rows, saved: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], activation: str
) -> tuple[tuple[Transposed, torch.Tensor], tuple[Transposed, torch.Tensor], torch.Tensor, Scaled]:
    """Besides the transposed ``a`` and ``dh``, return partial maxima of their partners ``dy`` and ``x``."""
    weights, (h_RF, x_scale_R) = Weights(*saved), kept
    quantised = of_rows(dy, rows.row_TK)
    dh_RF, dy_scale_R = product(quantised, weights.w2_EFD, weights.w2_scale_EF, rows), quantised.scale
    del quantised
    (R, F), tile, left = h_RF.shape, _tile(h_RF.shape[1], **BACKWARD), fp8.empty(h_RF, *h_RF.shape)
    a_RF, dprob_PR = torch.empty_like(h_RF), h_RF.new_empty(1, R, dtype=torch.float32)
    largest_4R = h_RF.new_empty(4, R, dtype=torch.float32)
    if R:
        launch(
            activate_backward, (triton.cdiv(R, tile["ROWS"]),), h_RF, rows.prob_R, dh_RF, x_scale_R, dy_scale_R, a_RF,
            dprob_PR, largest_4R, *left, rows.end_E, R, len(rows.end_E), F=F, TANH=activation == "gelu_tanh", **tile,
        )  # fmt: skip
    places, (of_a, of_dh, of_dy, of_x) = padded(rows.end_E, R), largest_of(largest_4R, LARGEST_ROW)
    a, dh = transposed(a_RF, None, of_a, *places), transposed(dh_RF, None, of_dh, *places)
    return (a, of_dy), (dh, of_x), dprob_PR, left


def _input_gradient(left: Scaled, saved: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    weights = Weights(*saved)
    return product(left, weights.w1_EDF, weights.w1_scale_ED, rows)


def _weight_gradient(
    x: torch.Tensor, rows: Rows, h: tuple[Transposed, torch.Tensor], *, tokens_left: bool, total: torch.Tensor | None
) -> torch.Tensor:
    (other, largest), E, tile = h, len(rows.end_E), WEIGHT_GRADIENT
    M, N = (x.shape[1], len(other.values_WP)) if tokens_left else (len(other.values_WP), x.shape[1])
    if not x.shape[0]:
        return x.new_zeros(E, M, N) if total is None else total
    mine = transposed(x, rows.token_R, largest, other.row_P, other.end_P)
    left, right = (mine, other) if tokens_left else (other, mine)
    adds = total is not None and total.dtype == torch.float32
    dw_EMN = total if total is not None and adds else x.new_empty(E, M, N)
    tiles = (
        TensorDescriptor.from_tensor(operand.values_WP, [height, tile["BK"]])
        for operand, height in ((left, tile["BM"]), (right, tile["BN"]))
    )
    launch(
        weight_gradient, (triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]), E), *tiles, left.scale_1, right.scale_1,
        other.end_P, dw_EMN, M=M, N=N, ADD=adds, **tile,
    )  # fmt: skip
    return dw_EMN if total is None or adds else total.add_(dw_EMN)


FP8 = Products(MULTIPLE, of_weights, _hidden, _output, _hidden_gradient, _input_gradient, _weight_gradient, check_device)

grouped_mlp, routed_mlp = (functools.partial(op, products=FP8) for op in (bf16.grouped_mlp, bf16.routed_mlp))
"""The ops with FP8 products. They also raise ModelError where widths are not multiples of 16, or the GPU's compute capability
is not :data:`megacpp_mcore.ops.fp8.CAPABILITY`."""
