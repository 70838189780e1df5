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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp.kernels import _activation
from megacpp_mcore.ops.grouped_mlp.triton import Products, Rows, packed, run_grouped, run_routed

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""Of E4M3's values."""
LEAST = tl.constexpr(1e-30)
"""What the largest value of a row is taken for if it is less: a scale has an inverse."""

CAPABILITY = (9, 0)
"""Of the GPUs for which PyTorch has a grouped product with scales of rows."""

ELEMENTS = 4096
"""That a program has at a time, at least one row of them."""

WEIGHTS = {"BF": 32, "BD": 128, "num_warps": 8}
"""How weights are scaled: of F and D, what a tile has."""


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
def scale_weights(
    w,
    values_EFD,
    values_EDF,
    scale_EF,
    F: tl.constexpr,
    D: tl.constexpr,
    D_FIRST: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
):
    """BF of the F of an expert's matrix, [D, F] if D comes first, else [F, D]: the same values in both orders."""
    expert = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    along_F: tl.constexpr = 1 if D_FIRST else D
    along_D: tl.constexpr = F if D_FIRST else 1
    at = w + expert * F * D + f.to(tl.int64)[:, None] * along_F
    largest = tl.zeros([BF], tl.float32)
    for start in tl.range(0, D, BD):
        d = start + tl.arange(0, BD)
        inside = (f < F)[:, None] & (d < D)[None, :]
        part = tl.load(at + d.to(tl.int64)[None, :] * along_D, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 1).to(tl.float32))
    scale = _scale(largest)
    tl.store(scale_EF + expert * F + f, scale, mask=f < F)
    to_EFD = values_EFD + expert * F * D + f.to(tl.int64)[:, None] * D
    to_EDF = values_EDF + expert * F * D + f[:, None]
    for start in tl.range(0, D, BD):
        d = (D - 1) // BD * BD - start + tl.arange(0, BD)  # what was read last is in the cache
        inside = (f < F)[:, None] & (d < D)[None, :]
        part = tl.load(at + d.to(tl.int64)[None, :] * along_D, mask=inside, other=0.0).to(tl.float32)
        value = (part * (1.0 / scale)[:, None]).to(values_EFD.dtype.element_ty)
        tl.store(to_EFD + d[None, :], value, mask=inside)
        tl.store(to_EDF + d.to(tl.int64)[None, :] * F, value, mask=inside)


@triton.jit
def _row(row, R, prob_R, end_E, E, EXPERTS: tl.constexpr):
    """The probabilities of rows, and their experts."""
    prob = tl.full(row.shape, 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    expert = tl.arange(0, EXPERTS)
    end_E = tl.load(end_E + expert, mask=expert < E, other=2147483647)
    return prob, tl.sum((end_E[None, :] <= row[:, None]).to(tl.int32), 1)


@triton.jit
def activate(
    h_RF,
    prob_R,
    end_E,
    scale_EF,
    values,
    scales,
    R,
    E,
    F: tl.constexpr,
    TANH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The activation of ROWS rows times their probabilities and the second matrix' scales, scaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob, expert = _row(row, R, prob_R, end_E, E, EXPERTS)
    largest = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        a = _activated(h_RF, scale_EF, prob, expert, row, column, R, E, F, TANH)
        largest = tl.maximum(largest, tl.max(tl.abs(a), 1))
    scale = _scale(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        if F > BLOCK:
            a = _activated(h_RF, scale_EF, prob, expert, row, column, R, E, F, TANH)
        value = (a * (1.0 / scale)[:, None]).to(values.dtype.element_ty)
        inside = (row < R)[:, None] & (column < F)[None, :]
        tl.store(values + row.to(tl.int64)[:, None] * F + column[None, :], value, mask=inside)
    tl.store(scales + row, scale, mask=row < R)


@triton.jit
def _activated(h_RF, scale_EF, prob, expert, row, column, R, E, F: tl.constexpr, TANH: tl.constexpr):
    inside = (row < R)[:, None] & (column < F)[None, :]
    h = tl.load(h_RF + row.to(tl.int64)[:, None] * F + column[None, :], mask=inside, other=0.0).to(tl.float32)
    factor, _ = _activation(h, TANH)
    inside = (expert < E)[:, None] & (column < F)[None, :]
    return (
        h * factor * prob[:, None] * tl.load(scale_EF + expert[:, None] * F + column[None, :], mask=inside, other=1.0)
    )


@triton.jit
def activate_backward(
    h_RF,
    prob_R,
    end_E,
    scale_EF,
    da_RF,
    a_RF,
    dprob_R,
    values,
    scales,
    R,
    E,
    F: tl.constexpr,
    TANH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the gradient of the second product's left side to that of the first product, in its place.

    That times the first matrix' scales, scaled, is the last product's left side.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob, expert = _row(row, R, prob_R, end_E, E, EXPERTS)
    largest = tl.zeros([ROWS], tl.float32)
    dprob = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        a, dh, left, d = _activated_backward(h_RF, da_RF, scale_EF, prob, expert, row, column, R, E, F, TANH)
        dprob += d
        largest = tl.maximum(largest, tl.max(tl.abs(left), 1))
    scale = _scale(largest)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        if F > BLOCK:
            a, dh, left, _ = _activated_backward(h_RF, da_RF, scale_EF, prob, expert, row, column, R, E, F, TANH)
        inside = (row < R)[:, None] & (column < F)[None, :]
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        tl.store(a_RF + at, a.to(a_RF.dtype.element_ty), mask=inside)
        tl.store(da_RF + at, dh.to(da_RF.dtype.element_ty), mask=inside)
        tl.store(values + at, (left * (1.0 / scale)[:, None]).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < R)
    tl.store(dprob_R + row, dprob, mask=row < R)


@triton.jit
def _activated_backward(h_RF, da_RF, scale_EF, prob, expert, row, column, R, E, F: tl.constexpr, TANH: tl.constexpr):
    inside = (row < R)[:, None] & (column < F)[None, :]
    at = row.to(tl.int64)[:, None] * F + column[None, :]
    h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
    da = tl.load(da_RF + at, mask=inside, other=0.0).to(tl.float32)
    factor, slope = _activation(h, TANH)
    a, dh = h * factor, da * slope * prob[:, None]
    inside = (expert < E)[:, None] & (column < F)[None, :]
    weight = tl.load(scale_EF + expert[:, None] * F + column[None, :], mask=inside, other=1.0)
    return a * prob[:, None], dh, dh * weight, tl.sum(da * a, 1)


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


class Weights(NamedTuple):
    """Both matrices of every expert in E4M3, scaled for each of F. Each product of rows has the order that it needs.

    Where D is summed over, the scales are factors of the result's columns; where F is, of the other side before it is scaled.
    """

    first_EFD: torch.Tensor
    first_EDF: torch.Tensor
    first_scale_EF: torch.Tensor
    second_EFD: torch.Tensor
    second_EDF: torch.Tensor
    second_scale_EF: torch.Tensor
    one_ED: torch.Tensor


def of_weights(w1_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> Weights:
    """Both matrices scaled, of parameters in training once an optimizer's step (:func:`_kept`)."""
    E, _, D = w1_EFD.shape
    one_ED = w1_EFD.new_ones(E, D, dtype=torch.float32)
    return Weights(*_kept(w1_EFD, d_first=False), *_kept(w2_EDF, d_first=True), one_ED)


Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_quantized = WeakTensorKeyDictionary()


def forget(*_: Any) -> None:
    """Quantise all weights anew the next time; every step of an optimizer ends with it."""
    _quantized.clear()


# Megatron's distributed optimizer writes to buffers that parameters are views of, which no version of a parameter counts;
# but behind a step of PyTorch's, and before the next forward pass.
register_optimizer_step_post_hook(forget)


def _kept(w: torch.Tensor, *, d_first: bool) -> Quantized:
    """What :func:`_scaled` made of ``w`` since the last step of an optimizer, for a parameter that has not changed since.

    Made anew, and not kept, where gradients are off, as in an evaluation, which may have other weights in the same place; and
    in a CUDA graph, whose replay has to make it of the weights of then.
    """
    is_training = torch.is_grad_enabled() and w.requires_grad and w.is_leaf
    if not is_training or (w.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _scaled(w, d_first=d_first)
    state = w._version, w.data_ptr(), w.shape
    found = _quantized.get(w)
    if found is None or found[0] != state:
        found = _quantized[w] = state, _scaled(w, d_first=d_first)
    made: Quantized = found[1]
    return made


@torch.no_grad()
def _scaled(w: torch.Tensor, *, d_first: bool) -> Quantized:
    """``[E, F, D]``, ``[E, D, F]`` and the scales ``[E, F]`` of every expert's matrix."""
    w, (E, F, D) = packed(w), w.transpose(1, 2).shape if d_first else w.shape
    values_EFD, values_EDF = (w.new_empty(shape, dtype=E4M3) for shape in ((E, F, D), (E, D, F)))
    found = values_EFD, values_EDF, w.new_empty(E, F, dtype=torch.float32)
    scale_weights[(triton.cdiv(F, WEIGHTS["BF"]), E)](w, *found, F=F, D=D, D_FIRST=d_first, **WEIGHTS)
    return found


def product(left: Scaled, right_ENW: torch.Tensor, scale_EN: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Each row times its expert's matrix, whose rows are columns of the result."""
    return torch._scaled_grouped_mm(
        left.values, right_ENW.transpose(1, 2), left.scale, scale_EN, offs=rows.end_E, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


def _hidden(x: torch.Tensor, rows: Rows, weights: Weights, activation: str) -> tuple[torch.Tensor, Scaled]:
    h_RF = product(of_rows(x, rows.row_TK), weights.first_EFD, weights.first_scale_EF, rows)
    left = _empty(h_RF, *h_RF.shape)
    _activation_kernel(activate, 4, h_RF, rows, weights.second_scale_EF, activation, *left)
    return h_RF, left


def _output(left: Scaled, weights: Weights, rows: Rows) -> torch.Tensor:
    return product(left, weights.second_EDF, weights.one_ED, rows)


def _hidden_gradient(
    dy: torch.Tensor, rows: Rows, saved: Sequence[torch.Tensor], h_RF: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scaled]:
    weights = Weights(*saved)
    dh_RF = product(of_rows(dy, rows.row_TK), weights.second_EFD, weights.second_scale_EF, rows)
    a_RF, dprob_PR = torch.empty_like(h_RF), h_RF.new_empty(1, h_RF.shape[0], dtype=torch.float32)
    left = _empty(h_RF, *h_RF.shape)
    _activation_kernel(
        activate_backward, 8, h_RF, rows, weights.first_scale_EF, activation, dh_RF, a_RF, dprob_PR, *left
    )
    return a_RF, dh_RF, dprob_PR, left


def _activation_kernel(
    kernel: Any,
    warps: int,
    h_RF: torch.Tensor,
    rows: Rows,
    scale_EF: torch.Tensor,
    activation: str,
    *others: torch.Tensor,
) -> None:
    (R, F), E, tile = h_RF.shape, scale_EF.shape[0], _tile(h_RF.shape[1], warps)
    if R:
        kernel[(triton.cdiv(R, tile["ROWS"]),)](
            h_RF, rows.prob_R, rows.end_E, scale_EF, *others, R, E, F=F, TANH=activation == "gelu_tanh",
            EXPERTS=triton.next_power_of_2(E), **tile,
        )  # fmt: skip


def _input_gradient(left: Scaled, saved: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    weights = Weights(*saved)
    return product(left, weights.first_EDF, weights.one_ED, rows)


FP8 = Products(16, of_weights, _hidden, _output, _hidden_gradient, _input_gradient)
