"""Routed experts with products in FP8 (E4M3), forward and for the gradients of rows, on Hopper: PyTorch's with scales of rows.

Either side of a product is scaled so that the largest value of what is summed together is E4M3's largest: weights along the one
side forward, along the other one backward, in each call. The gradients of weights are products in bfloat16, those of
:mod:`megacpp_mcore.ops.grouped_mlp.triton`: for FP8 their operands would have to be scaled and laid out along rows. ``auto``
does not choose it: results differ from those in bfloat16 by the rounding of E4M3, 2.6 % of a value (rms).

Legend: T tokens, E experts, K experts of each token, R rows (T × K), D model width, F expert width; N and W rows and columns of
any matrix.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp.kernels import _activation
from megacpp_mcore.ops.grouped_mlp.triton import Products, Rows, run_grouped, run_routed

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""Of E4M3's values."""
LEAST = tl.constexpr(1e-30)
"""What the largest value of a row is taken for if it is less: a scale has an inverse."""

CAPABILITY = (9, 0)
"""Of the GPUs for which PyTorch has a grouped product with scales of rows."""

ELEMENTS = 4096
"""That a program has at a time, at least one row of them."""

COLUMNS = {"BN": 256, "BW": 64, "num_warps": 8}
"""How columns are scaled: rows and columns of a tile."""


class Scaled(NamedTuple):
    """A matrix or a stack of them in E4M3, and the float32 factor of each row."""

    values: torch.Tensor
    scale: torch.Tensor


def grouped_mlp(
    x_RD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_R: torch.Tensor | None,
    *,
    activation: str = "gelu",
) -> torch.Tensor:
    """:func:`megacpp_mcore.ops.grouped_mlp.triton.grouped_mlp`, its products of rows in FP8.

    Raises:
        ModelError: as there; widths are no multiples of 16; or the GPU is not one of :data:`CAPABILITY`.
    """
    _check_device(x_RD)
    return run_grouped(x_RD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_R, activation, FP8)


def routed_mlp(
    x_TD: torch.Tensor,
    routing_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    topk: int,
    activation: str = "gelu",
) -> torch.Tensor:
    """:func:`megacpp_mcore.ops.grouped_mlp.triton.routed_mlp`, its products of rows in FP8.

    Raises:
        ModelError: as there; widths are no multiples of 16; or the GPU is not one of :data:`CAPABILITY`.
    """
    _check_device(x_TD)
    return run_routed(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, activation, FP8)


def _check_device(x: torch.Tensor) -> None:
    found = torch.cuda.get_device_capability(x.device) if x.is_cuda else "no GPU"
    if found != CAPABILITY:
        raise ModelError(
            f"the experts' products in FP8 need a GPU of compute capability {CAPABILITY} (Hopper), and x is on {x.device}: "
            f"{found}; take the experts in bfloat16"
        )


@triton.jit
def _scale(largest):
    """Of rows with these largest values."""
    return tl.maximum(largest, LEAST) / LARGEST


@triton.jit
def scale_rows(
    x_NW, row_NC, values, scales, N, W: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS rows, each to where it is, or to its COPIES rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, W, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < N)[:, None] & (column < W)[None, :]
        x = tl.load(x_NW + row.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    scale = _scale(largest)
    for start in tl.static_range(0, W, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < N)[:, None] & (column < W)[None, :]
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
def scale_columns(w_ENW, values_EWN, scale_EW, N, W, BN: tl.constexpr, BW: tl.constexpr):
    """BW columns of an expert's matrix, which become rows."""
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BW + tl.arange(0, BW)
    at = w_ENW + expert * N * W + column[None, :]
    largest = tl.zeros([BW], tl.float32)
    for start in tl.range(0, N, BN):
        row = start + tl.arange(0, BN)
        inside = (row < N)[:, None] & (column < W)[None, :]
        w = tl.load(at + row.to(tl.int64)[:, None] * W, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(w), 0))
    scale = _scale(largest)
    tl.store(scale_EW + expert * W + column, scale, mask=column < W)
    to = values_EWN + expert * N * W + column.to(tl.int64)[:, None] * N
    for start in tl.range(0, N, BN):
        row = start + tl.arange(0, BN)
        inside = (row < N)[:, None] & (column < W)[None, :]
        w = tl.load(at + row.to(tl.int64)[:, None] * W, mask=inside, other=0.0).to(tl.float32)
        value = (w * (1.0 / scale)[None, :]).to(values_EWN.dtype.element_ty)
        tl.store(to + row[None, :], value.T, mask=(row < N)[None, :] & (column < W)[:, None])


@triton.jit
def activate(
    h_RF, prob_R, values, scales, R, F: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The activation of ROWS rows times their probabilities, scaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob = tl.full([ROWS], 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        h = tl.load(h_RF + row.to(tl.int64)[:, None] * F + column[None, :], mask=inside, other=0.0).to(tl.float32)
        factor, _ = _activation(h, TANH)
        largest = tl.maximum(largest, tl.max(tl.abs(h * factor * prob[:, None]), 1))
    scale = _scale(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        h = tl.load(h_RF + row.to(tl.int64)[:, None] * F + column[None, :], mask=inside, other=0.0).to(tl.float32)
        factor, _ = _activation(h, TANH)
        value = (h * factor * (prob * (1.0 / scale))[:, None]).to(values.dtype.element_ty)
        tl.store(values + row.to(tl.int64)[:, None] * F + column[None, :], value, mask=inside)
    tl.store(scales + row, scale, mask=row < R)


@triton.jit
def activate_backward(
    h_RF,
    prob_R,
    da_RF,
    a_RF,
    dprob_R,
    values,
    scales,
    R,
    F: tl.constexpr,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the gradient of the second product's left side to that of the first product, in its place and scaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob = tl.full([ROWS], 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    dprob = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_RF + at, mask=inside, other=0.0).to(tl.float32)
        factor, slope = _activation(h, TANH)
        dprob += tl.sum(da * h * factor, 1)
        largest = tl.maximum(largest, tl.max(tl.abs(da * slope * prob[:, None]), 1))
    scale = _scale(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < R)[:, None] & (column < F)[None, :]
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_RF + at, mask=inside, other=0.0).to(tl.float32)
        factor, slope = _activation(h, TANH)
        dh = da * slope * prob[:, None]
        tl.store(a_RF + at, (h * factor * prob[:, None]).to(a_RF.dtype.element_ty), mask=inside)
        tl.store(da_RF + at, dh.to(da_RF.dtype.element_ty), mask=inside)
        tl.store(values + at, (dh * (1.0 / scale)[:, None]).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < R)
    tl.store(dprob_R + row, dprob, mask=row < R)


def _tile(width: int, warps: int = 4) -> dict[str, int]:
    block = min(ELEMENTS, triton.next_power_of_2(width))
    return {"ROWS": ELEMENTS // block, "BLOCK": block, "num_warps": warps}


def _empty(like: torch.Tensor, *shape: int) -> Scaled:
    return Scaled(like.new_empty(shape, dtype=E4M3), like.new_empty(shape[:-1], dtype=torch.float32))


def of_rows(x: torch.Tensor, row_TK: torch.Tensor | None = None) -> Scaled:
    """Each row of ``x`` scaled, as that or as each of its rows."""
    width, copies = x.shape[-1], 1 if row_TK is None else row_TK.shape[1]
    rows, tile = x.numel() // width, _tile(width)
    scaled = _empty(x, *x.shape) if row_TK is None else _empty(x, rows * copies, width)
    if rows:
        scale_rows[(triton.cdiv(rows, tile["ROWS"]),)](x, row_TK, *scaled, rows, W=width, COPIES=copies, **tile)
    return scaled


def of_columns(w_ENW: torch.Tensor) -> Scaled:
    """Each expert's matrix the other way round, its rows scaled."""
    E, N, W = w_ENW.shape
    scaled = _empty(w_ENW, E, W, N)
    scale_columns[(triton.cdiv(W, COLUMNS["BW"]), E)](w_ENW, *scaled, N, W, **COLUMNS)
    return scaled


def product(left: Scaled, right_ENW: Scaled, rows: Rows) -> torch.Tensor:
    """Each row times its expert's matrix, whose rows are columns of the result."""
    return torch._scaled_grouped_mm(
        left.values, right_ENW.values.transpose(1, 2), left.scale, right_ENW.scale, offs=rows.end_E,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def _hidden(x: torch.Tensor, rows: Rows, w1_EFD: torch.Tensor, activation: str) -> tuple[torch.Tensor, Scaled]:
    h_RF = product(of_rows(x, rows.row_TK), of_rows(w1_EFD), rows)
    (R, F), tile, left = h_RF.shape, _tile(h_RF.shape[1]), _empty(h_RF, *h_RF.shape)
    if R:
        grid = (triton.cdiv(R, tile["ROWS"]),)
        activate[grid](h_RF, rows.prob_R, *left, R, F=F, TANH=activation == "gelu_tanh", **tile)
    return h_RF, left


def _output(left: Scaled, w2_EDF: torch.Tensor, rows: Rows) -> torch.Tensor:
    return product(left, of_rows(w2_EDF), rows)


def _hidden_gradient(
    dy: torch.Tensor, rows: Rows, w2_EDF: torch.Tensor, h_RF: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scaled]:
    dh_RF = product(of_rows(dy, rows.row_TK), of_columns(w2_EDF), rows)
    (R, F), tile, left = h_RF.shape, _tile(h_RF.shape[1], 8), _empty(h_RF, *h_RF.shape)
    a_RF, dprob_PR = torch.empty_like(h_RF), h_RF.new_empty(1, R, dtype=torch.float32)
    if R:
        grid = (triton.cdiv(R, tile["ROWS"]),)
        tanh = activation == "gelu_tanh"
        activate_backward[grid](h_RF, rows.prob_R, dh_RF, a_RF, dprob_PR, *left, R, F=F, TANH=tanh, **tile)
    return a_RF, dh_RF, dprob_PR, left


def _input_gradient(left: Scaled, w1_EFD: torch.Tensor, rows: Rows) -> torch.Tensor:
    return product(left, of_columns(w1_EFD), rows)


FP8 = Products(16, _hidden, _output, _hidden_gradient, _input_gradient)
