"""Triton kernels of the routed experts: placement of tokens, products with their prologues and epilogues, sums over rows.

No program waits for another, and no two add to the same element: the same inputs give the same bits. Rows are sorted by
expert, then by token. Products gather the tokens themselves.

Legend: T tokens, E experts, K experts per token (maximum), R rows (T × K), B blocks of tokens, P tiles of columns,
D model width, F expert width.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E, exp2, reciprocal

SQRT_HALF = tl.constexpr(0.7071067811865476)
GAUSS = tl.constexpr(0.3989422804014327)
"""1 / √(2π)."""
TANH_SCALE = tl.constexpr(1.5957691216057308)
"""2 · √(2/π)."""
TANH_CUBE = tl.constexpr(0.044715)

ACTIVATE = tl.constexpr(1)
BACKWARD = tl.constexpr(2)
"""Epilogue of a product."""

WRONG = tl.constexpr(-1)
NONE = tl.constexpr(-2)
"""Stand-ins for a token's row: the token has an invalid number of experts, or fewer than K where that is allowed."""


@triton.jit
def count(routing_TE, count_BE, T, E, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the rows of each block of TOKENS tokens at each expert."""
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
    token_R,
    prob_R,
    T,
    E,
    B,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPAN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute where each expert's rows end; each token's rows, in the order of its experts; each row's token and probability.

    A token without exactly K experts (unless EXACT: with more) has :data:`WRONG` among its rows. Nothing is written beyond the
    R rows.
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
    real = (routed > 0) & (row < R)
    right = ((number == K) if EXACT else (number <= K))[:, None] & (row < R)
    tl.store(row_TK + token[:, None] * K + slot, tl.where(right, row, WRONG), mask=(routed > 0) & (slot < K))
    tl.store(token_R + row, tl.broadcast_to(token[:, None], row.shape), mask=real)
    tl.store(prob_R + row, tl.load(probs_TE + at, mask=real, other=0.0).to(tl.float32), mask=real)
    slots = tl.arange(0, SLOTS)[None, :]
    missing = (token[:, None] < T) & (slots >= number[:, None]) & (slots < K)
    absent = tl.full([TOKENS, SLOTS], WRONG if EXACT else NONE, tl.int32)
    tl.store(row_TK + token[:, None] * K + slots, absent, mask=missing)


@triton.jit
def combine(
    y_RD,
    row_TK,
    y_TD,
    routing_TE,
    dprob_PR,
    dprobs_TE,
    E,
    R,
    D: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Sum each token's rows, and in backward the gradients of its probabilities; NaN where a row is :data:`WRONG`."""
    token = tl.program_id(0)
    for start in tl.static_range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(K):
            row = tl.load(row_TK + token * K + slot)
            y = tl.load(y_RD + row.to(tl.int64) * D + column, mask=(column < D) & (row >= 0), other=float("nan"))
            if not EXACT:
                y = tl.where(row == NONE, 0.0, y)
            total += y.to(tl.float32)
        tl.store(y_TD + token.to(tl.int64) * D + column, total.to(y_TD.dtype.element_ty), mask=column < D)
    if dprobs_TE is not None:
        expert = tl.arange(0, EXPERTS)
        at = token.to(tl.int64) * E + expert
        routed = tl.load(routing_TE + at, mask=expert < E, other=0).to(tl.int32)
        slot = tl.cumsum(routed, 0) - routed
        real = (routed > 0) & (slot < K)
        row = tl.load(row_TK + token * K + slot, mask=real, other=-1)
        dprob = tl.zeros([EXPERTS], tl.float32)
        for part in tl.static_range(P):
            at_part = dprob_PR + tl.cast(R, tl.int64) * part + row
            dprob += tl.load(at_part, mask=real & (row >= 0), other=float("nan"))
        tl.store(dprobs_TE + at, tl.where(routed > 0, dprob, 0.0), mask=expert < E)


@triton.jit
def _activation(h, TANH: tl.constexpr):
    """Compute the factor of ``h`` in its GELU, and the derivative of the GELU."""
    if TANH:
        square = h * h
        factor = reciprocal(1.0 + exp2(-LOG2E * TANH_SCALE * h * (1.0 + TANH_CUBE * square)))
        slope = factor + h * factor * (1.0 - factor) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * square)
    else:
        # The error function to within 1.5e-7: Abramowitz and Stegun, 7.1.26.
        bell = exp2(-0.5 * LOG2E * h * h)
        t = reciprocal(1.0 + 0.3275911 * SQRT_HALF * tl.abs(h))
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
def _tile(end_E, E, OUTER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXPERTS: tl.constexpr):
    """Find this program's expert (E: no tile), first row, end of the expert's rows, and first column.

    Column tiles vary fastest, so that neighbouring programs share rows.
    """
    across: tl.constexpr = (OUTER + BN - 1) // BN
    number = tl.program_id(0) // across
    expert = tl.arange(0, EXPERTS)
    end = tl.load(end_E + expert, mask=expert < E, other=0)
    first = tl.load(end_E + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = tl.where(expert < E, (end - first + BM - 1) // BM, 0)
    behind = tl.cumsum(tiles, 0)
    mine = tl.sum(((behind <= number) & (expert < E)).to(tl.int32), 0)
    here = expert == mine
    start = tl.sum(tl.where(here, first + (number - behind + tiles) * BM, 0), 0)
    return mine, start, tl.sum(tl.where(here, end, 0), 0), tl.program_id(0) % across * BN


@triton.jit
def _finish(
    total, row, limit, column, prob, h_RF, y_RF, dh_RF,
    OUTER: tl.constexpr, MODE: tl.constexpr, TANH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Run a product's epilogue on the rows before ``limit``, in SPLIT parts of its columns to limit register pressure.

    Returns the gradient of the rows' probabilities in MODE :data:`BACKWARD`, else zeros.
    """
    if SPLIT > 1:
        left, right = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        one = _finish(left, row, limit, column, prob, h_RF, y_RF, dh_RF, OUTER, MODE, TANH, BM, BN // 2, SPLIT // 2)
        two = _finish(right, row, limit, column + BN // 2, prob, h_RF, y_RF, dh_RF, OUTER, MODE, TANH, BM, BN // 2, SPLIT // 2)
        return one + two
    else:
        columns = column + tl.arange(0, BN)
        inside = (row < limit)[:, None] & (columns < OUTER)[None, :]
        at = row.to(tl.int64)[:, None] * OUTER + columns[None, :]
        dprob = tl.zeros([BM], tl.float32)
        if MODE == ACTIVATE:
            rounded = total.to(h_RF.dtype.element_ty)
            tl.store(h_RF + at, rounded, mask=inside)
            h = rounded.to(tl.float32)
            factor, _ = _activation(h, TANH)
            tl.store(y_RF + at, (h * factor * prob[:, None]).to(y_RF.dtype.element_ty), mask=inside)
        else:
            h = tl.load(h_RF + at, mask=inside, other=0.0).to(tl.float32)
            factor, slope = _activation(h, TANH)
            a = h * factor
            dprob = tl.sum(total * a, 1)
            tl.store(y_RF + at, (a * prob[:, None]).to(y_RF.dtype.element_ty), mask=inside)
            tl.store(dh_RF + at, (total * slope * prob[:, None]).to(dh_RF.dtype.element_ty), mask=inside)
        return dprob


@triton.jit
def product(
    x,
    x_tiles,
    w_tiles,
    token_R,
    end_E,
    prob_R,
    h_RF,
    y_RF,
    dh_RF,
    dprob_PR,
    E,
    R,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    OUTER_FIRST: tl.constexpr,
    MODE: tl.constexpr,
    TANH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply rows by the matrix of their expert, [OUTER, INNER] or [INNER, OUTER], and run the epilogue of MODE.

    :data:`ACTIVATE` stores the product as ``h``, and its activation times the row's probability as ``y``.
    :data:`BACKWARD` takes the product as the gradient of such a ``y``; it recomputes ``y`` and stores the gradient of ``h``
    and, as one partial sum per tile of columns, that of the probabilities.

    Rows are gathered from the tokens ``token_R``; without it they are loaded as tiles. If the rows end before R, those after
    them in the last tile have probability zero: tiles of a weight gradient reach into them.
    """
    expert, start, end, column = _tile(end_E, E, OUTER, BM, BN, EXPERTS)
    if expert >= E:
        return
    row = start + tl.arange(0, BM)
    inner = tl.arange(0, BK)
    at = None
    if token_R is not None:
        token = tl.load(token_R + row, mask=row < end, other=0)
        at = x + token.to(tl.int64)[:, None] * INNER + inner[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, INNER, BK, num_stages=STAGES):
        if token_R is None:
            left = x_tiles.load([start, k])
        elif INNER % BK:
            left = tl.load(at + k, mask=(inner + k < INNER)[None, :], other=0.0)
        else:
            left = tl.load(at + k)
        if OUTER_FIRST:
            total = tl.dot(left, w_tiles.load([expert * OUTER + column, k]).T, total)
        else:
            total = tl.dot(left, w_tiles.load([expert * INNER + k, column]), total)
    prob = tl.full([BM], 1.0, tl.float32)
    if prob_R is not None:
        prob = tl.load(prob_R + row, mask=row < end, other=0.0).to(tl.float32)
    limit = tl.where(end == tl.load(end_E + E - 1), R, end)
    dprob = _finish(total, row, limit, column, prob, h_RF, y_RF, dh_RF, OUTER, MODE, TANH, BM, BN, SPLIT)
    if dprob_PR is not None:
        tl.store(dprob_PR + (column // BN).to(tl.int64) * R + row, dprob, mask=row < end)


@triton.jit
def weight_gradient(
    x,
    token_R,
    h_tiles,
    end_E,
    dw,
    M: tl.constexpr,
    N: tl.constexpr,
    TOKENS_LEFT: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute [M, N] of an expert: leftᵀ · right over its rows. ``x``, gathered as in ``product``, is left (M wide) or right.

    Tiles of ``h`` may reach into other experts' rows, which are multiplied by zeros. With ADD the float32 sum is added to
    ``dw`` atomically, which saves loading it; no other program adds to the same element.
    """
    expert = tl.program_id(1)
    across: tl.constexpr = (N + BN - 1) // BN
    left_column = tl.program_id(0) // across * BM
    right_column = tl.program_id(0) % across * BN
    end = tl.load(end_E + expert)
    first = tl.load(end_E + expert - 1, mask=expert > 0, other=0)
    k = tl.arange(0, BK)
    if TOKENS_LEFT:
        x_column = left_column + tl.arange(0, BM)
        wide = x_column < M
    else:
        x_column = right_column + tl.arange(0, BN)
        wide = x_column < N
    total = tl.zeros([BM, BN], tl.float32)
    upcoming = first + k
    if token_R is not None:
        upcoming = tl.load(token_R + first + k, mask=first + k < end, other=0)
    for start in tl.range(first, end, BK, num_stages=STAGES):
        row = start + k
        token = upcoming
        if token_R is None:
            upcoming = row + BK
        else:
            upcoming = tl.load(token_R + row + BK, mask=row + BK < end, other=0)
        at = x + token.to(tl.int64)[:, None] * (M if TOKENS_LEFT else N) + x_column[None, :]
        tokens = tl.load(at, mask=(row < end)[:, None] & wide[None, :], other=0.0)
        if TOKENS_LEFT:
            total = tl.dot(tokens.T, h_tiles.load([start, right_column]), total)
        else:
            total = tl.dot(h_tiles.load([start, left_column]).T, tokens, total)
    m = left_column + tl.arange(0, BM)
    n = right_column + tl.arange(0, BN)
    at = dw + expert.to(tl.int64) * (M * N) + m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        tl.atomic_add(at, total, mask=inside, sem="relaxed")
    else:
        tl.store(at, total.to(dw.dtype.element_ty), mask=inside)
