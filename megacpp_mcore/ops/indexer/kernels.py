"""Triton kernels of the DSA indexer: scores of a chunk of queries, each query's top-k keys, and the gradient at those keys.

Legend: S queries and keys, B batch, H indexer heads, D indexer head width, N selected keys of a query, R queries of a chunk,
W columns of a chunk's rows of scores.

Between the two kernels of the selection, scores are float32: −∞ for keys that a query may not select, the highest finite number
instead of NaN, and lower finite numbers otherwise. No score is +∞, since the search compares by the sign of a difference, and
that of ∞ − ∞ depends on the processor. For other callers :func:`score_keys` also writes plain scores of all keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HIDDEN = tl.constexpr(float("-inf"))

_HIGHEST = tl.constexpr(3.4028234663852886e38)
"""The highest finite float32, which stands for NaN; −∞ becomes the lowest."""

_SECOND = tl.constexpr(3.4028232635611926e38)
"""The next lower finite float32, which stands for +∞."""

_LOWEST_RANK = tl.constexpr(-0x7F800000)
"""Rank of the lowest finite float32."""

_BY_VALUE = tl.constexpr(24)
"""Search steps that interpolate between scores; later steps bisect the float32 numbers in between."""


@triton.jit
def _rank(x):
    """Map float32 numbers to integers in the same order, except that −0 is below +0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(rank):
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _negative(x):
    """-1 where the sign bit is set, else 0: after a subtraction, a comparison in one instruction."""
    return x.to(tl.int32, bitcast=True) >> 31


@triton.jit
def _relu(x):
    """Compute ``max(x, 0)``, preserving NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["S", "first", "rows", "H", "before"])
def score_keys(
    q_SBHD,
    k_SBD,
    w_SBH,
    seq_BS,
    score_BRW,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    w_s,
    w_b,
    w_h,
    S,
    first,
    rows,
    W,
    H,
    score_b,
    before,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Score the keys for queries ``first`` to ``first + rows - 1``; program (tile of keys, tile of queries, batch).

    With CAUSAL, tiles with only keys later than their queries are not written, W is a multiple of KEYS, S counts the keys,
    of which ``before`` precede the first row of q and w, and ``score_b`` is None, as batch rows are adjacent.
    Without it there are W keys, each scored for every
    query, ``seq_BS`` is None, and scores are plain sums, NaN and infinities included. ``x_s`` and the like are
    strides. No score is −0, as accumulators start at +0.
    """
    r, j = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    b, d = tl.program_id(2).to(tl.int64), tl.arange(0, D)
    if CAUSAL and tl.program_id(0) * KEYS > first + tl.program_id(1) * QUERIES + QUERIES - 1:
        return
    i, at, heads = tl.minimum(first + r, S - 1), tl.minimum(j, (S if CAUSAL else W) - 1), H
    seq = seq_BS
    if seq_BS is not None:
        seq += b * S
        of_queries, of_keys = tl.load(seq + i), tl.load(seq + at)
        apart = (tl.max(of_keys, 0) < tl.min(of_queries, 0)) | (tl.max(of_queries, 0) < tl.min(of_keys, 0))
        heads = tl.where(apart, 0, H)
    k = tl.load(k_SBD + b * k_b + at.to(tl.int64)[None, :] * k_s + d[:, None])
    of_query = (i - before).to(tl.int64)
    q_at = q_SBHD + b * q_b + of_query[:, None] * q_s + d[None, :]
    w_at = w_SBH + b * w_b + of_query * w_s
    score = tl.zeros([QUERIES, KEYS], tl.float32)
    for h in tl.range(0, heads, num_stages=STAGES):
        w = tl.load(w_at + h * w_h).to(tl.float32)
        logit = tl.dot(tl.load(q_at + h * q_h), k)
        score += w[:, None] * _relu(logit)
    if not CAUSAL:
        out = score_BRW + b * score_b + r.to(tl.int64)[:, None] * W + j[None, :]
        tl.store(out, score, mask=(r < rows)[:, None] & (j < W)[None, :])
        return
    score = tl.where(score == score, tl.clamp(score, -_HIGHEST, _SECOND), _HIGHEST)
    visible = j[None, :] <= i[:, None]
    if seq_BS is not None:
        visible = visible & (tl.load(seq + i)[:, None] == tl.load(seq + at)[None, :])
    out = score_BRW + (b * rows + r).to(tl.int64)[:, None] * W + j[None, :]
    tl.store(out, tl.where(visible, score, _HIDDEN), mask=(r < rows)[:, None])


@triton.jit
def _scores(row, start, end, BLOCK: tl.constexpr):
    """Load BLOCK scores of a row from ``start`` on."""
    j = start + tl.arange(0, BLOCK)
    return tl.load(row + j, mask=j < end, other=_HIDDEN)


@triton.jit
def _narrowed(row, end, n_others, lower, n_lower, upper, n_upper, step, N, BLOCK: tl.constexpr):
    """Run one search step of :func:`take_best` on ``end`` scores from ``row`` on; ``n_others`` more reach every bound."""
    low, high = _value(lower), _value(upper)
    part = (n_lower - N + 0.5) / (n_lower - n_upper + 1)
    between = _rank(low + (high - low) * tl.where(step % 3 == 0, 0.5, part))
    between = tl.where(step < _BY_VALUE, between, lower + (upper - lower) // 2)
    between = tl.minimum(tl.maximum(between, lower + 1), upper - 1)
    at_least, count = _value(between), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, end, BLOCK):
        count += _negative(_scores(row, start, end, BLOCK) - at_least)
    n_between = n_others + tl.cdiv(end, BLOCK) * BLOCK + tl.sum(count, 0)
    if n_between > N:
        lower, n_lower = between, n_between
    else:
        upper, n_upper = between, n_between
    return lower, n_lower, upper, n_upper


@triton.jit(do_not_specialize=["S", "first", "rows", "N", "before"])
def take_best(
    score_BRW,
    near_BRC,
    index_BSN,
    S,
    first,
    rows,
    W,
    N,
    before,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Select each row's top N keys, ascending, then -1; ties go to the lower key. Program (query, batch).

    There are S rows of indices, and ``before`` keys before the first row's own.

    The threshold is searched between two scores, held as ranks: more than N keys reach the lower bound, at most N the
    upper one. The search ends when exactly N keys reach the upper bound, or when the bounds are adjacent numbers: then the keys
    equal to the lower one are ties, and the first of them are taken. Zero, the score of every key that no head responds to, is
    tried first. Each step reads the row, BLOCK scores at a time, and the final pass KEYS at a time; the row stays in L1.
    With ``near_BRC``, for rows that do not fit L1, the scores between the bounds are copied there once there are at most NEAR,
    and the remaining steps read only these.
    """
    r, b = rows - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = first + r
    row = score_BRW + (b * rows + r) * W
    end = tl.multiple_of((i // KEYS + 1) * KEYS, KEYS)
    read = tl.cdiv(end, BLOCK) * BLOCK
    best, count = tl.full([BLOCK], _HIDDEN, tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, end, BLOCK):
        x = _scores(row, start, end, BLOCK)
        best = tl.maximum(best, x)
        count -= _negative(0.0 - x)
    n_positive, n_seen = tl.sum(count, 0), N
    lower, n_lower, upper, n_upper = 0, N, 1, n_positive
    if n_positive > N:
        lower, n_lower, upper, n_upper = 1, n_positive, _rank(tl.max(best, 0)) + 1, 0
    elif n_positive < N:
        count, count_seen = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, end, BLOCK):
            x = _scores(row, start, end, BLOCK)
            count += _negative(x)
            count_seen += _negative(x + _HIGHEST)
        n_natural, n_seen = read + tl.sum(count, 0), read + tl.sum(count_seen, 0)
        if n_seen <= N:
            upper, n_upper = _LOWEST_RANK, N
        elif n_natural < N:
            lower, n_lower, upper, n_upper = _LOWEST_RANK, n_seen, 0, n_natural
    step = 0
    few: tl.constexpr = 0 if near_BRC is None else NEAR
    while (n_upper < N) & (upper - lower > 1) & (n_lower - n_upper > few):
        lower, n_lower, upper, n_upper = _narrowed(row, end, 0, lower, n_lower, upper, n_upper, step, N, BLOCK)
        step += 1
    if near_BRC is not None:  # noqa: SIM102 - resolved at compile time
        if (n_upper < N) & (upper - lower > 1):
            near, n_near, n_others = near_BRC + (b * rows + r) * NEAR, 0, n_upper
            low, high = _value(lower), _value(upper)
            for start in tl.range(0, end, BLOCK):
                x = _scores(row, start, end, BLOCK)
                inside = ((x >= low) & (x < high)).to(tl.int32)
                tl.store(near + n_near + tl.cumsum(inside, 0) - inside, x, mask=inside > 0)
                n_near += tl.sum(inside, 0)
            tl.debug_barrier()  # for the other threads of this program
            while (n_upper < N) & (upper - lower > 1):
                lower, n_lower, upper, n_upper = _narrowed(
                    near, n_near, n_others, lower, n_lower, upper, n_upper, step, N, BLOCK
                )
                step += 1
    wanted, take, equal_to = N - n_upper, _value(upper), _value(lower)
    index = index_BSN + (b * S + i - before) * N
    # One path, with or without ties: with two branches, ptxas 12.8 (Triton 3.6) placed some ties one position too low.
    n_above, n_equal = 0, 0
    for start in tl.range(0, end, KEYS):
        x = _scores(row, start, end, KEYS)
        above, equal = (x >= take).to(tl.int32), (x == equal_to).to(tl.int32)
        so_far = tl.cumsum(above + (equal << 16), 0)
        equals = n_equal + (so_far >> 16) - equal
        place = n_above + (so_far & 0xFFFF) - above + tl.minimum(equals, wanted)
        taken = above + equal * (equals < wanted).to(tl.int32)
        tl.store(index + place, start + tl.arange(0, KEYS), mask=taken > 0)
        both = tl.sum(above + (equal << 16), 0)
        n_above += both & 0xFFFF
        n_equal += both >> 16
    if n_seen < N:
        for start in tl.range(0, N, KEYS):
            n = start + tl.arange(0, KEYS)
            tl.store(index + n, -1, mask=(n >= n_seen) & (n < N))


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _scored(q, w, k, k_s, index, target, start, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return, for BLOCK selected keys of a query from ``start`` on: their rows, which are valid, the keys, the logits of all
    heads, the scores (−∞ where not valid) and the target."""
    n = start + tl.arange(0, BLOCK)
    at = tl.load(index + n, mask=n < N, other=-1)
    valid = at >= 0
    at = tl.maximum(at, 0).to(tl.int64)
    keys = tl.load(k + at[:, None] * k_s + tl.arange(0, D)[None, :])
    p = tl.load(target + n, mask=valid, other=0.0).to(tl.float32)
    logit = tl.dot(keys, tl.trans(q))
    score = tl.sum(_relu(logit) * w[None, :], 1)
    return at, valid, keys, logit, tl.where(valid, score, float("-inf")), p


@triton.jit(do_not_specialize=["S"])
def learn(
    q_SBHD,
    k_TBD,
    w_SBH,
    index_BSN,
    target_BSN,
    weight,
    units,
    dq_SBHD,
    dk_TBD,
    dw_SBH,
    divergence_BS,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    w_s,
    w_b,
    w_h,
    S,
    B,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a query's divergence, the gradients of its q and w, and its contribution to k's; program (query, batch).

    ``weight`` points to the factor on the gradients. dq, dk (initially zero) and dw are contiguous; dk is float32 or, with
    ``units`` (pointer to the integer that represents 1), int64: integer sums do not depend on the order. HEADS is H rounded up
    to a power of two. The gradient of the logits, an operand in the dtype of q, is first scaled to at most 1024, to stay in
    float16's range.
    """
    i, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, HEADS), tl.arange(0, D)
    is_head = h < H
    q = tl.load(q_SBHD + i * q_s + b * q_b + h[:, None] * q_h + d[None, :], mask=is_head[:, None], other=0.0)
    w = tl.load(w_SBH + i * w_s + b * w_b + h * w_h, mask=is_head, other=0.0).to(tl.float32)
    row = (b * S + i) * N
    k, index, target = k_TBD + b * k_b, index_BSN + row, target_BSN + row
    ONE: tl.constexpr = N <= BLOCK
    if ONE:
        at, valid, keys, logit, score, p = _scored(q, w, k, k_s, index, target, 0, N, D, BLOCK)
    top, total, mass = float("-inf"), 0.0, 0.0
    for start in tl.range(0, N, BLOCK):
        if not ONE:
            at, valid, keys, logit, score, p = _scored(q, w, k, k_s, index, target, start, N, D, BLOCK)
        higher = tl.maximum(top, tl.max(score, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        part, part_of_mass = tl.reduce((tl.exp(score - shift), p), 0, _add)
        total, mass, top = total * tl.exp(top - shift) + part, mass + part_of_mass, higher
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(top == float("-inf"), 1.0, total)
    mass_or_tiny = tl.maximum(mass, 1.1754943508222875e-38)
    bound = tl.max(tl.abs(w), 0) / 1024
    inverse = tl.where(bound > 1e-30, 1.0 / bound, bound)
    factor = tl.where(mass == 0.0, 0.0, tl.load(weight))
    to_dq = factor * bound
    to_dk = to_dq if units is None else to_dq * tl.load(units)
    divergence = 0.0
    dq, dw = tl.zeros([D, HEADS], tl.float32), tl.zeros([HEADS], tl.float32)
    for start in tl.range(0, N, BLOCK):
        if not ONE:
            at, valid, keys, logit, score, p = _scored(q, w, k, k_s, index, target, start, N, D, BLOCK)
        p = p / mass_or_tiny
        x = score - shift
        divergence += tl.sum(tl.where(p > 0, p * tl.log(p), 0.0) - tl.where(valid, p * (x - tl.log(total)), 0.0), 0)
        g = tl.where(valid, tl.exp(x) / total - p, 0.0)
        dw += tl.sum(_relu(logit) * g[:, None], 0)
        dlogit = tl.where(logit <= 0, 0.0, (g * inverse)[:, None] * w[None, :]).to(q.dtype)
        dq = tl.dot(tl.trans(keys), dlogit, dq)
        dk = (tl.dot(dlogit, q) * to_dk).to(dk_TBD.dtype.element_ty)
        to = dk_TBD + (at[:, None] * B + b) * D + d[None, :]
        tl.atomic_add(to, dk, mask=valid[:, None], sem="relaxed")
    out = (i * B + b) * H
    tl.store(divergence_BS + b * S + i, divergence)
    tl.store(dw_SBH + out + h, dw * factor, mask=is_head)
    tl.store(dq_SBHD + (out + h[:, None]) * D + d[None, :], tl.trans(dq) * to_dq, mask=is_head[:, None])
