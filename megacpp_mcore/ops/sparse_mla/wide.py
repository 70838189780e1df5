"""Triton kernels of sparse MLA for wide latents: DeepSeek's 512 columns plus 64 rotary ones.

One program has one query and eight warps. In forward it has 64 heads, and their output accumulator takes half of the registers.
In backward a query, its output's gradient, a tile of keys and the accumulator of the query's gradient do not fit together:
``scores`` writes probabilities and score gradients for a chunk of queries, from which ``queries`` and ``keys`` compute the
gradients of queries and keys. These two handle the heads of two launches of ``scores``, so that keys are gathered and their
gradients added only once, but only a part of the columns per program.

Loops use ``disable_licm`` where hoisting would hold the addresses of all operands in registers, and spill.

Legend: as in :mod:`megacpp_mcore.ops.sparse_mla.kernels`; C queries of one chunk, ALL heads of a chunk, rounded up, M heads of
one launch of ``scores``, W columns of a slice of the latent.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import exp2
from megacpp_mcore.ops.sparse_mla.kernels import FEW, KEYS, LOWEST, _add, _here, _load_halves, log2_scores

TILE = tl.constexpr(KEYS)
"""Columns of the index in the largest tile of any kernel."""

SPAN = tl.constexpr(1024)
"""Columns of the index that are read at a time."""


@triton.jit
def _columns(index_row, P):
    """Return how many keys the row selects, and the columns up to the last one, in whole tiles: later ones are skipped."""
    i = tl.arange(0, SPAN)
    count, end = tl.zeros([SPAN], tl.int32), tl.zeros([SPAN], tl.int32)
    for start in tl.range(0, P, SPAN):
        seen = tl.load(index_row + start + i, mask=start + i < P, other=-1) >= 0
        count += seen.to(tl.int32)
        end = tl.where(seen, start + i + 1, end)
    return tl.sum(count), tl.cdiv(tl.max(end), TILE) * TILE


@triton.jit
def _load_keys(index_row, kv_ptr, kv_t, start, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr):
    """Return which of the KEYS columns from ``start`` on have a key, and the keys' latents and rotary parts."""
    return _gather(tl.load(index_row + start + tl.arange(0, KEYS)), kv_ptr, kv_t, V, R)


@triton.jit
def _gather(key, kv_ptr, kv_t, V: tl.constexpr, R: tl.constexpr):
    """Return which keys are valid (not negative), and their latents and rotary parts."""
    k_l, k_r = _load_halves(kv_ptr + key.to(tl.int64)[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
    return key >= 0, k_l, k_r


@triton.jit
def _index(index_row, start, end, KEYS: tl.constexpr):
    """Load KEYS columns of the index from ``start`` on; -1 from ``end`` on."""
    i = start + tl.arange(0, KEYS)
    return tl.load(index_row + i, mask=i < end, other=-1)


@triton.jit(do_not_specialize=["scale", "S", "H", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b"])
def forward(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, scale, S, H, P, first, q_s, q_b, q_h, kv_t, kv_b,
            M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute o [S, B, H, V], and lse [B, S, H]: the log2 of a softmax's denominator, inf where nothing is selected.

    Grid: S, B. Heads: ``first`` to ``first + M - 1``, masked at H.
    """
    s, b, B = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    h = first + tl.arange(0, M)
    q_rows = q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8)
    q_l, q_r = _load_halves(q_rows, (h < H)[:, None], V, R)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    o = tl.zeros([M, V], tl.float32)
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    _selected, end = _columns(index_ptr, P)
    for start in tl.range(0, end, KEYS, num_stages=STAGES, disable_licm=True):
        seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
        # The branch is always taken. It hides the scores from the product with p: otherwise Triton, for that product's layout,
        # would make both halves of the program's warps compute all scores. The other value of p must not be a constant, which
        # would be kept in memory.
        p, shrink = (start + tl.zeros([M, KEYS], tl.int32)).to(k_l.dtype), total
        if start < end:
            x = log2_scores(q_l, k_l, q_r, k_r, scale)
            x = tl.where(seen[None, :], x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, 1))
            exact, shrink = exp2(x - higher[:, None]), exp2(top - higher)
            p, top, total = exact.to(k_l.dtype), higher, total * shrink + tl.sum(exact, 1)
        o = tl.dot(p, k_l, o * shrink[:, None])
    s, h = _here(tl.program_id(0)).to(tl.int64), first + _here(tl.arange(0, M))
    o *= tl.where(total == 0, 0.0, 1 / total)[:, None]  # a NaN is not 0
    o_ptr += ((s * B + b) * H + h[:, None]) * V + tl.arange(0, V)[None, :]
    tl.store(o_ptr, o.to(o_ptr.dtype.element_ty), mask=(h < H)[:, None])
    lse = tl.where(total == 0, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + (b * S + s) * H + h, lse, mask=h < H)


@triton.jit
def _products(q_l, q_r, do, lse, seen, k_l, k_r, scale):
    """Compute the probabilities [M, KEYS], and do·v."""
    x = log2_scores(q_l, k_l, q_r, k_r, scale)
    return tl.where(seen[None, :], exp2(x - lse[:, None]), 0.0), tl.dot(do, tl.trans(k_l))


@triton.jit(
    do_not_specialize=[
        "scale", "S", "H", "N", "P", "begin", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b", "do_s", "do_b", "do_h"
    ]
)  # fmt: skip
def scores(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, do_ptr, d_ptr, sum_ptr, scale,
           S, H, N, P, begin, first, q_s, q_b, q_h, kv_t, kv_b, do_s, do_b, do_h,
           M: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
           KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write to ``d`` [C, B, P, 2, ALL], for the GROUP-th M of the ALL heads from ``first`` on, the gradients of q·k and the
    probabilities: up to the tile of a query's last key, zeros for heads beyond H. Accumulate the probabilities, summed over
    heads, into [B, S, N], if given.

    Grid: C, B, for the queries from ``begin`` on.

    The mean of do·v, which is subtracted, is do·o; or recomputed where that is too inaccurate, as in
    :func:`megacpp_mcore.ops.sparse_mla.kernels.means`.
    """
    row, b, B = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    s = (begin + row).to(tl.int64)
    h, n, v = first + GROUP * M + tl.arange(0, M), tl.arange(0, KEYS), tl.arange(0, V)
    mask = (h < H)[:, None]
    q_rows = q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8)
    q_l, q_r = _load_halves(q_rows, mask, V, R)
    do_ptr += (s * do_s + b * do_b) * 8
    do = tl.load(do_ptr + h.to(tl.int64)[:, None] * (do_h * 8) + v[None, :], mask=mask, other=0.0)
    lse = tl.load(lse_ptr + (b * S + s) * H + h, mask=h < H, other=float("inf"))  # heads beyond H: probability 0
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    selected, end = _columns(index_ptr, P)
    if selected <= FEW:
        mean = tl.zeros([M], tl.float32)
        for start in tl.range(0, end, KEYS, num_stages=STAGES, disable_licm=True):
            seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
            p, dp = _products(q_l, q_r, do, lse, seen, k_l, k_r, scale)
            mean += tl.sum(p * dp, 1)
    else:
        o = tl.load(o_ptr + ((s * B + b) * H + h[:, None]) * V + v[None, :], mask=mask, other=0.0)
        mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    d_ptr += (row * B + b) * P * (2 * ALL) + GROUP * M
    seen, k_l, k_r = _gather(_index(index_ptr, 0, end, KEYS), kv_ptr, kv_t, V, R)
    key = _index(index_ptr, KEYS, end, KEYS)
    for start in tl.range(0, end, KEYS, num_stages=STAGES, disable_licm=True):
        # Prefetched in registers while this tile is multiplied: shared memory has no room for Triton's own stages.
        seen_next, l_next, r_next = _gather(key, kv_ptr, kv_t, V, R)
        key = _index(index_ptr, start + 2 * KEYS, end, KEYS)
        p, dp = _products(q_l, q_r, do, lse, seen, k_l, k_r, scale)
        if sum_ptr is not None:  # no other program of a launch adds here, so the reduction order is fixed
            tl.atomic_add(sum_ptr + (b * S + s) * N + start + n, tl.sum(p, 0), mask=start + n < N, sem="relaxed")
        dx = p * (dp - mean[:, None]) * scale
        to = d_ptr + start * (2 * ALL) + n[None, :] * (2 * ALL) + tl.arange(0, M)[:, None]
        tl.store(to, dx.to(q_l.dtype))
        tl.store(to + ALL, p.to(q_l.dtype))
        seen, k_l, k_r = seen_next, l_next, r_next


@triton.jit(do_not_specialize=["S", "H", "P", "begin", "first", "kv_t", "kv_b"])
def queries(kv_ptr, index_ptr, d_ptr, dq_ptr, S, H, P, begin, first, kv_t, kv_b,
            ALL: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
            KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute dq [S, B, H, K] of a chunk's queries and ALL heads. Grid: C, B, PARTS equal parts of the columns."""
    row, b, B, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(2)
    s = (begin + row).to(tl.int64)
    v, r = part * (V // PARTS) + tl.arange(0, V // PARTS), V + part * (R // PARTS) + tl.arange(0, R // PARTS)
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    d_ptr += (row * B + b) * P * (2 * ALL) + tl.arange(0, KEYS)[:, None] * (2 * ALL) + tl.arange(0, ALL)[None, :]
    dq_l, dq_r = tl.zeros([ALL, V // PARTS], tl.float32), tl.zeros([ALL, R // PARTS], tl.float32)
    _selected, end = _columns(index_ptr, P)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + tl.arange(0, KEYS)).to(tl.int64)
        k_rows, seen = kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None]
        k_l, k_r = (
            tl.load(k_rows + v[None, :], mask=seen, other=0.0),
            tl.load(k_rows + r[None, :], mask=seen, other=0.0),
        )
        dx = tl.trans(tl.load(d_ptr + start * (2 * ALL)))
        dq_l, dq_r = tl.dot(dx, k_l, dq_l), tl.dot(dx, k_r, dq_r)
    s, h = (begin + _here(tl.program_id(0))).to(tl.int64), first + _here(tl.arange(0, ALL))
    part = _here(tl.program_id(2))
    dq_ptr += ((s * B + b) * H + h[:, None]) * (V + R)
    v, r = part * (V // PARTS) + tl.arange(0, V // PARTS), V + part * (R // PARTS) + tl.arange(0, R // PARTS)
    tl.store(dq_ptr + v[None, :], dq_l.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None])
    tl.store(dq_ptr + r[None, :], dq_r.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None])


@triton.jit(do_not_specialize=["S", "H", "P", "begin", "first", "q_s", "q_b", "q_h", "do_s", "do_b", "do_h"])
def keys(q_ptr, index_ptr, do_ptr, d_ptr, dkv_ptr, unit_ptr,
         S, H, P, begin, first, q_s, q_b, q_h, do_s, do_b, do_h,
         ALL: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
         KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Accumulate into dkv [T, B, K] the contributions of a chunk's queries and ALL heads. Grid as in queries.

    dkv is float32; or, with ``unit``, a float32 on the device, int64 in multiples of 1/unit.
    """
    row, b, B, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.program_id(2)
    s = (begin + row).to(tl.int64)
    m = tl.arange(0, 2 * ALL)
    h, is_q = first + m % ALL, m < ALL
    from_q = q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64) * (q_h * 8)
    from_do = do_ptr + (s * do_s + b * do_b) * 8 + h.to(tl.int64) * (do_h * 8)
    rows = tl.where(is_q, from_q, from_do)[:, None]
    w, r = part * (V // PARTS) + tl.arange(0, W), V + part * (R // PARTS) + tl.arange(0, R // PARTS)
    latents = ()
    for c in tl.static_range(0, V // PARTS, W):
        latents = latents + (tl.load(rows + c + w[None, :], mask=(h < H)[:, None], other=0.0),)  # noqa: RUF005
    rotary = tl.load(rows + r[None, :], mask=((h < H) & is_q)[:, None], other=0.0)
    unit = None if unit_ptr is None else tl.load(unit_ptr)
    index_ptr += (b * S + s) * P
    d_ptr += (row * B + b) * P * (2 * ALL) + tl.arange(0, KEYS)[:, None] * (2 * ALL) + m[None, :]
    dkv_ptr += b * (V + R)
    _selected, end = _columns(index_ptr, P)
    key_next, d_next = _index(index_ptr, 0, end, KEYS), tl.load(d_ptr, mask=tl.arange(0, KEYS)[:, None] < end)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        key, d, after = key_next.to(tl.int64), d_next, start + KEYS
        key_next = _index(index_ptr, after, end, KEYS)  # prefetched, as in scores
        d_next = tl.load(d_ptr + after * (2 * ALL), mask=(after + tl.arange(0, KEYS))[:, None] < end)
        seen, to = (key >= 0)[:, None], dkv_ptr + key[:, None] * (B * (V + R))
        for c in tl.static_range(V // PARTS // W):
            _add(to + part * (V // PARTS) + c * W, tl.dot(d, latents[c]), seen, unit)
        _add(to + V + part * (R // PARTS), tl.dot(d, rotary), seen, unit)
