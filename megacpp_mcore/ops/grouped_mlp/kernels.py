"""Triton kernels of the routed experts, all but the matrix products: who goes where, rows of tokens, activation, sums of rows.

No program waits for another one and nothing is added atomically: the same inputs give the same bits. Rows are sorted by expert,
then by token.

Legend: T tokens, E experts, K experts of each token, R rows (T × K), B blocks of tokens, D model width, F expert width.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import INTERPRETED, exp2

LOG2E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
GAUSS = tl.constexpr(0.3989422804014327)
"""1 / √(2π)."""
TANH_SCALE = tl.constexpr(1.5957691216057308)
"""2 · √(2/π)."""
TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def count(routing_TE, count_BE, T, E, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """The rows that each block of TOKENS tokens has at each expert."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = (token[:, None] < T) & (expert[None, :] < E)
    routed = tl.load(routing_TE + token[:, None].to(tl.int64) * E + expert[None, :], mask=inside, other=0)
    tl.store(count_BE + block * E + expert, tl.sum(routed.to(tl.int32), 0), mask=expert < E)


@triton.jit
def place(
    routing_TE,
    probs_TE,
    count_BE,
    end_E,
    row_TK,
    prob_R,
    T,
    E,
    B,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Where each expert's rows end; the rows of each token, by its experts in order; the probability of each row.

    A token without exactly K experts has a row of −1 among its own. Nothing is written outside of the R rows.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, B, SPAN):
        other = start + tl.arange(0, SPAN)
        inside = (other[:, None] < B) & (expert[None, :] < E)
        counts = tl.load(count_BE + other[:, None] * E + expert[None, :], mask=inside, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other[:, None] < block, counts, 0), 0)
    end = tl.cumsum(total, 0)
    R = T * K
    if block == 0:
        tl.store(end_E + expert, tl.minimum(end, R), mask=expert < E)
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = (token[:, None] < T) & (expert[None, :] < E)
    at = token[:, None].to(tl.int64) * E + expert[None, :]
    routed = tl.load(routing_TE + at, mask=inside, other=0).to(tl.int32)
    row = (end - total + before)[None, :] + tl.cumsum(routed, 0) - routed
    slot = tl.cumsum(routed, 1) - routed
    number = tl.sum(routed, 1)
    real = (routed > 0) & (slot < K) & (row < R)
    right = (number == K)[:, None] & (row < R)
    tl.store(row_TK + token[:, None] * K + slot, tl.where(right, row, -1), mask=(routed > 0) & (slot < K))
    tl.store(prob_R + row, tl.load(probs_TE + at, mask=real, other=0.0).to(tl.float32), mask=real)
    slots = tl.arange(0, SLOTS)[None, :]
    missing = (token[:, None] < T) & (slots >= number[:, None]) & (slots < K)
    tl.store(row_TK + token[:, None] * K + slots, tl.full([TOKENS, SLOTS], -1, tl.int32), mask=missing)


@triton.jit
def spread(x_TD, row_TK, x_RD, stride, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Each token, ``stride`` from the next, to its rows."""
    token = tl.program_id(0)
    for start in tl.static_range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_TD + token.to(tl.int64) * stride + column, mask=column < D)
        for slot in tl.static_range(K):
            row = tl.load(row_TK + token * K + slot)
            tl.store(x_RD + row.to(tl.int64) * D + column, x, mask=(column < D) & (row >= 0))


@triton.jit
def combine(
    y_RD,
    row_TK,
    y_TD,
    routing_TE,
    dprob_R,
    dprobs_TE,
    E,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each token's sum over its rows, and in a backward pass the gradients of its probabilities; NaN without K experts."""
    token = tl.program_id(0)
    for start in tl.static_range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(K):
            row = tl.load(row_TK + token * K + slot)
            y = tl.load(y_RD + row.to(tl.int64) * D + column, mask=(column < D) & (row >= 0), other=float("nan"))
            total += y.to(tl.float32)
        tl.store(y_TD + token.to(tl.int64) * D + column, total.to(y_TD.dtype.element_ty), mask=column < D)
    if dprobs_TE is not None:
        expert = tl.arange(0, EXPERTS)
        at = token.to(tl.int64) * E + expert
        routed = tl.load(routing_TE + at, mask=expert < E, other=0).to(tl.int32)
        slot = tl.cumsum(routed, 0) - routed
        real = (routed > 0) & (slot < K)
        row = tl.load(row_TK + token * K + slot, mask=real, other=-1)
        dprob = tl.load(dprob_R + row, mask=real & (row >= 0), other=float("nan"))
        tl.store(dprobs_TE + at, tl.where(routed > 0, dprob, 0.0), mask=expert < E)


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def _activation(h, TANH: tl.constexpr):
    """The factor of ``h`` in its GELU, and the derivative of the GELU."""
    if TANH:
        square = h * h
        factor = _reciprocal(1.0 + exp2(-LOG2E * TANH_SCALE * h * (1.0 + TANH_CUBE * square)))
        slope = factor + h * factor * (1.0 - factor) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * square)
    else:
        # Abramowitz and Stegun, 7.1.26: within 1.5e-7 of the error function.
        bell = exp2(-0.5 * LOG2E * h * h)
        t = _reciprocal(1.0 + 0.3275911 * SQRT_HALF * tl.abs(h))
        series = 1.061405429
        series = series * t - 1.453152027
        series = series * t + 1.421413741
        series = series * t - 0.284496736
        series = series * t + 0.254829592
        tail = 0.5 * series * t * bell
        factor = tl.where(h < 0, tail, 1.0 - tail)
        slope = factor + h * GAUSS * bell
    return factor, slope


@triton.jit
def activate(h_RF, prob_R, a_RF, R, F: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The activation of ROWS rows, times each one's probability if there are any."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob = tl.full([ROWS], 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row[:, None] < R) & (column[None, :] < F)
        at = row[:, None].to(tl.int64) * F + column[None, :]
        h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
        factor, _ = _activation(h, TANH)
        a = h * factor
        if prob_R is not None:
            a *= prob[:, None]
        tl.store(a_RF + at, a.to(a_RF.dtype.element_ty), mask=inside)


@triton.jit
def activate_backward(
    h_RF,
    prob_R,
    da_RF,
    a_RF,
    dh_RF,
    dprob_R,
    R,
    F: tl.constexpr,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the gradient of what ``activate`` gives: that, of its input and of the probabilities. ``dh_RF`` may be ``da_RF``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    prob = tl.full([ROWS], 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < R, other=0.0).to(tl.float32)
    dprob = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row[:, None] < R) & (column[None, :] < F)
        at = row[:, None].to(tl.int64) * F + column[None, :]
        h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_RF + at, mask=inside, other=0.0).to(tl.float32)
        factor, slope = _activation(h, TANH)
        a = h * factor
        dh = da * slope
        if prob_R is not None:
            dprob += tl.sum(da * a, 1)
            a *= prob[:, None]
            dh *= prob[:, None]
        tl.store(a_RF + at, a.to(a_RF.dtype.element_ty), mask=inside)
        tl.store(dh_RF + at, dh.to(dh_RF.dtype.element_ty), mask=inside)
    if prob_R is not None:
        tl.store(dprob_R + row, dprob.to(dprob_R.dtype.element_ty), mask=row < R)
