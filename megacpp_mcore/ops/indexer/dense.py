"""Triton kernels of the DSA indexer's dense loss, for ``chunked.py``: the target over all keys, and the gradients.

Queries are processed in chunks of R; no tensor has both a head dimension and all pairs of queries and keys. The same inputs
give the same bits.

Legend: S queries, R queries of a chunk, T keys, B batch, A attention heads, K attention head width (V + W columns, W may be 0),
H indexer heads, D indexer head width, P partial sums of the keys' gradient. Strides of queries and keys are given in units of 8
elements, so that the compiler knows their alignment.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E, exp2
from megacpp_mcore.ops.slices import aligned, eighths
from megacpp_mcore.ops.triton_launch import launch, options

HALVES = {128: (128, 0), 576: (512, 64)}
"""For each attention head width, its columns as two powers of two."""

SUMS = {
    128: {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2},
    576: {"QUERIES": 64, "KEYS": 64, "num_warps": 8, "num_stages": 2},
}
TARGETS = {
    128: {"QUERIES": 64, "KEYS": 128, "num_warps": 8, "num_stages": 2},
    576: options("targets, 576", {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}),
}
LEARN = {
    64: {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    128: {"QUERIES": 64, "KEYS": 64, "num_warps": 8, "num_stages": 2},
}
"""Launch options, by head width, of the target's denominators, the target, and the gradients: among tiles without register
spills, those estimated to read least from the L2 cache. No others were timed."""

PARTS = 4
"""Partial sums, over subsets of heads, of the keys' gradient, which is a sum over queries and heads."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST = tl.constexpr(1024.0)
"""Value that the largest logit gradient is scaled to as an operand, to stay in float16's range."""

Bounds = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``starts_S``, ``ends_S`` and ``position_T``: query i sees the keys j with ``starts[i] <= position[j] < ends[i]``; contiguous
int32."""


@triton.jit
def _seen(starts, ends, position, i, j, S, T):
    """Return which keys ``j`` the queries ``i`` see, and whether any pair may be visible."""
    start, end = tl.load(starts + tl.minimum(i, S - 1)), tl.load(ends + tl.minimum(i, S - 1))
    at = tl.load(position + tl.minimum(j, T - 1))
    seen = (at[None, :] >= start[:, None]) & (at[None, :] < end[:, None]) & (j < T)[None, :]
    return seen, (tl.max(at, 0) >= tl.min(start, 0)) & (tl.min(at, 0) < tl.max(end, 0))


@triton.jit
def _span(starts, ends, position, i, S, T, KEYS: tl.constexpr):
    """Return the range of key tiles in which the queries ``i`` may see any key: for loops without a branch."""
    lower, upper = T, 0
    for first in tl.range(0, T, KEYS):
        _, any_seen = _seen(starts, ends, position, i, first + tl.arange(0, KEYS), S, T)
        lower = tl.where(any_seen, tl.minimum(lower, first), lower)
        upper = tl.where(any_seen, first + KEYS, upper)
    return lower, upper


@triton.jit
def _rows(at, V: tl.constexpr, W: tl.constexpr):
    """Load the columns of the rows at ``at`` [X, 1] in two parts; if there is no second part, return the first one twice."""
    left = tl.load(at + tl.arange(0, V)[None, :])
    right = left
    if W > 0:
        right = tl.load(at + V + tl.arange(0, W)[None, :])
    return left, right


@triton.jit
def _scores(q_l, q_r, k_l, k_r, scale, W: tl.constexpr):
    """Compute scores in units of log 2."""
    x = tl.dot(q_l, tl.trans(k_l))
    if W > 0:
        x += tl.dot(q_r, tl.trans(k_r))
    return x * (scale * LOG2E)


@triton.jit(do_not_specialize=["scale", "S", "T", "A", "q_s", "q_b", "q_a", "k_t", "k_b"])
def log_sums(query, key, starts, ends, position, lse_BAS, scale, S, T, A, q_s, q_b, q_a, k_t, k_b,
             V: tl.constexpr, W: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute log2 of each query's and head's denominator, inf without keys. Program (tile of queries, head, batch)."""
    i, a, b = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_at = query + (a.to(tl.int64) * q_a + b * q_b) * 8
    q_l, q_r = _rows(q_at + tl.minimum(i, S - 1).to(tl.int64)[:, None] * (q_s * 8), V, W)
    key += b * (k_b * 8)
    top, total = tl.full([QUERIES], LOWEST, tl.float32), tl.zeros([QUERIES], tl.float32)
    lower, upper = _span(starts, ends, position, i, S, T, KEYS)
    for first in tl.range(lower, upper, KEYS):
        j = first + tl.arange(0, KEYS)
        seen, _ = _seen(starts, ends, position, i, j, S, T)
        k_l, k_r = _rows(key + tl.minimum(j, T - 1).to(tl.int64)[:, None] * (k_t * 8), V, W)
        x = tl.where(seen, _scores(q_l, q_r, k_l, k_r, scale, W), float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * exp2(top - higher) + tl.sum(exp2(x - higher[:, None]), 1)
        top = higher
    lse = tl.where(total == 0, float("inf"), top + tl.log2(total))
    tl.store(lse_BAS + (b * A + a) * S + i, lse, mask=i < S)


@triton.jit(do_not_specialize=["scale", "S", "T", "A", "begin", "R", "q_s", "q_b", "q_a", "k_t", "k_b"])
def targets(query, key, starts, ends, position, lse_BAS, sum_BRT, scale, S, T, A, begin, R, q_s, q_b, q_a, k_t, k_b,
            V: tl.constexpr, W: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Sum the probabilities of the R queries from ``begin`` on over heads. Program (tile of keys, of queries, batch)."""
    r, j = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    i, b = tl.minimum(begin + r, S - 1), tl.program_id(2).to(tl.int64)
    seen, any_seen = _seen(starts, ends, position, i, j, S, T)
    k_l, k_r = _rows(key + (b * k_b + tl.minimum(j, T - 1).to(tl.int64)[:, None] * k_t) * 8, V, W)
    q_at, lse_at = query + (b * q_b + i.to(tl.int64)[:, None] * q_s) * 8, lse_BAS + b * A * S + i
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for a in tl.range(0, tl.where(any_seen, A, 0)):
        q_l, q_r = _rows(q_at + tl.cast(a, tl.int64) * (q_a * 8), V, W)
        lse = tl.load(lse_at + tl.cast(a, tl.int64) * S)
        total += exp2(_scores(q_l, q_r, k_l, k_r, scale, W) - lse[:, None])
    out = sum_BRT + (b * R + r)[:, None] * T + j[None, :]
    tl.store(out, tl.where(seen, total, 0.0), mask=(r < R)[:, None] & (j < T)[None, :])


@triton.jit
def _chunk(g_BRT, r, j, b, R, T):
    """Load a tile of the chunk's score gradients [queries, keys]."""
    at = g_BRT + (b * R + r).to(tl.int64)[:, None] * T + j[None, :]
    return tl.load(at, mask=(r < R)[:, None] & (j < T)[None, :], other=0.0)


@triton.jit(do_not_specialize=["S", "T", "H", "B", "begin", "R", "q_s", "q_b", "q_h", "k_t", "k_b"])
def learn_queries(g_BRT, q_SBHD, k_TBD, w_SBH, weight_BS, starts, ends, position, dq_SBHD, dw_SBH, S, T, H, B, begin, R,
                  q_s, q_b, q_h, k_t, k_b, w_s, w_b, w_h,
                  D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute the gradients of the chunk's q and w. Program (tile of queries, head, batch)."""
    r, d = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.minimum(begin + r, S - 1)
    q = tl.load(q_SBHD + (h * q_h + b * q_b + i.to(tl.int64)[:, None] * q_s) * 8 + d[None, :])
    w = tl.load(w_SBH + h * w_h + b * w_b + i.to(tl.int64) * w_s).to(tl.float32)
    weight = tl.load(weight_BS + b * S + i)
    k_TBD += b * (k_b * 8)
    dq, dw = tl.zeros([QUERIES, D], tl.float32), tl.zeros([QUERIES], tl.float32)
    lower, upper = _span(starts, ends, position, i, S, T, KEYS)
    for first in tl.range(lower, upper, KEYS):
        j = first + tl.arange(0, KEYS)
        g = _chunk(g_BRT, r, j, b, R, T)
        k = tl.load(k_TBD + tl.minimum(j, T - 1).to(tl.int64)[:, None] * (k_t * 8) + d[None, :])
        logit = tl.dot(q, tl.trans(k))
        g = tl.where(logit <= 0, 0.0, g)  # a NaN logit keeps its gradient
        dw += tl.sum(tl.where(logit <= 0, 0.0, g * logit), 1)  # a logit of -inf contributes nothing
        dq = tl.dot((g * LARGEST).to(k.dtype), k, dq)
    out = ((i.to(tl.int64) * B + b) * H + h) * D
    is_row = r < R
    tl.store(dq_SBHD + out[:, None] + d[None, :], dq * (w * weight / LARGEST)[:, None], mask=is_row[:, None])
    tl.store(dw_SBH + (i.to(tl.int64) * B + b) * H + h, dw * weight, mask=is_row)


@triton.jit(do_not_specialize=["S", "T", "H", "B", "begin", "R", "q_s", "q_b", "q_h", "k_t", "k_b"])
def learn_keys(g_BRT, q_SBHD, k_TBD, w_SBH, weight_BS, starts, ends, position, dk_PBTD, S, T, H, B, begin, R,
               q_s, q_b, q_h, k_t, k_b, w_s, w_b, w_h,
               D: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Accumulate the chunk's part of the gradient of k, over every PARTS-th head. Program (tile of keys, part, batch)."""
    j, d = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    part, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k = tl.load(k_TBD + (b * k_b + tl.minimum(j, T - 1).to(tl.int64)[:, None] * k_t) * 8 + d[None, :])
    q_SBHD, w_SBH, weight_BS = q_SBHD + b * (q_b * 8), w_SBH + b * w_b, weight_BS + b * S
    dk = tl.zeros([KEYS, D], tl.float32)
    for first in tl.range(0, R, QUERIES):
        r = first + tl.arange(0, QUERIES)
        i = tl.minimum(begin + r, S - 1)
        _, any_seen = _seen(starts, ends, position, i, j, S, T)
        if any_seen:
            g = tl.trans(_chunk(g_BRT, r, j, b, R, T))
            weight = tl.load(weight_BS + i)
            q_at, w_at = q_SBHD + i.to(tl.int64)[:, None] * (q_s * 8) + d[None, :], w_SBH + i.to(tl.int64) * w_s
            for h in tl.range(part, H, PARTS):
                q = tl.load(q_at + tl.cast(h, tl.int64) * (q_h * 8))
                w = tl.load(w_at + h * w_h).to(tl.float32) * weight
                bound = tl.maximum(tl.max(tl.abs(w), 0), 1e-30) / LARGEST
                logit = tl.dot(k, tl.trans(q))
                dlogit = tl.where(logit <= 0, 0.0, g * (w / bound)[None, :])
                dk += tl.dot(dlogit.to(q.dtype), q) * bound
    out = dk_PBTD + ((part * B + b) * T + j)[:, None] * D + d[None, :]
    inside = (j < T)[:, None]
    tl.store(out, tl.load(out, mask=inside, other=0.0) + dk, mask=inside)


def denominators(query_SBAK: torch.Tensor, key_TBK: torch.Tensor, bounds: Bounds, softmax_scale: float) -> torch.Tensor:
    """Compute log2 of each query's softmax denominator over the keys it sees, float32 ``[B, A, S]``; inf for none."""
    (S, B, A, K), T = query_SBAK.shape, len(key_TBK)
    query, key, (V, W) = aligned(query_SBAK), aligned(key_TBK), HALVES[K]
    lse_BAS = query.new_empty(B, A, S, dtype=torch.float32)
    launch(
        log_sums, (triton.cdiv(S, SUMS[K]["QUERIES"]), A, B), query, key, *bounds, lse_BAS, softmax_scale, S, T, A,
        *eighths(query, 3), *eighths(key), V=V, W=W, **SUMS[K],
    )  # fmt: skip
    return lse_BAS


def summed_probabilities(
    query_SBAK: torch.Tensor,
    key_TBK: torch.Tensor,
    lse_BAS: torch.Tensor,
    bounds: Bounds,
    softmax_scale: float,
    rows: range,
) -> torch.Tensor:
    """Compute the attention probabilities of queries ``rows``, summed over heads, float32 ``[B, R, T]``; 0 for unseen keys.

    Args:
        query_SBAK, key_TBK: bfloat16 or float16, the same for both, of a width in :data:`HALVES`.
        lse_BAS: their :func:`denominators`.
        bounds: which keys a query sees.
        softmax_scale: positive.
        rows: the queries of the chunk.
    """
    (S, B, A, K), T, R = query_SBAK.shape, len(key_TBK), len(rows)
    query, key, (V, W) = aligned(query_SBAK), aligned(key_TBK), HALVES[K]
    sum_BRT = query.new_empty(B, R, T, dtype=torch.float32)
    launch(
        targets, (triton.cdiv(T, TARGETS[K]["KEYS"]), triton.cdiv(R, TARGETS[K]["QUERIES"]), B), query, key, *bounds, lse_BAS,
        sum_BRT, softmax_scale, S, T, A, rows.start, R, *eighths(query, 3), *eighths(key), V=V, W=W, **TARGETS[K],
    )  # fmt: skip
    return sum_BRT


def add_gradients(
    g_BRT: torch.Tensor,
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    weight_BS: torch.Tensor,
    bounds: Bounds,
    rows: range,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the gradients of q and w at ``rows``, and accumulate the rows' contribution to that of k.

    Args:
        g_BRT: gradients of the scores, float32, within ±1; 0 at unseen keys.
        q_SBHD, k_TBD: bfloat16 or float16, the same for both, D 64 or 128.
        w_SBH: head weights.
        weight_BS: factor on each query's gradient, float32.
        bounds: which keys a query sees.
        rows: the queries of the chunk.
        gradients: of q and w, contiguous, and of k as P partial sums, float32 ``[P, B, T, D]``.
    """
    (S, B, H, D), T, R, (dq_SBHD, dw_SBH, dk_PBTD) = q_SBHD.shape, len(k_TBD), len(rows), gradients
    q, k = aligned(q_SBHD), aligned(k_TBD)
    given, sizes = (g_BRT, q, k, w_SBH, weight_BS, *bounds), (S, T, H, B, rows.start, R)
    strides = (*eighths(q, 3), *eighths(k), *w_SBH.stride())
    launch(
        learn_queries, (triton.cdiv(R, LEARN[D]["QUERIES"]), H, B), *given, dq_SBHD, dw_SBH, *sizes, *strides, D=D, **LEARN[D]
    )  # fmt: skip
    launch(
        learn_keys, (triton.cdiv(T, LEARN[D]["KEYS"]), len(dk_PBTD), B), *given, dk_PBTD, *sizes, *strides, D=D,
        PARTS=len(dk_PBTD), **LEARN[D],
    )  # fmt: skip
