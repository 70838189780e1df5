"""Triton kernels of sparse MLA for latents that no program holds more than once: DeepSeek's 512 columns beside 64 rotary ones.

One program has one query with 64 of its heads, the rows of every tile, and eight warps. Forward, a tile of keys lies in shared
memory twice, so that one is gathered while the other is multiplied. Backward, the sums of the queries, the queries and their
output's gradient, and a tile of keys do not fit together: the probabilities and the gradients of the scores are written out for
a chunk of queries, from which two further kernels make the gradients of the queries and of the keys.

Legend: as in :mod:`megacpp_mcore.ops.sparse_mla.kernels`; C queries of one chunk, W columns of a slice of the latent.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import exp2
from megacpp_mcore.ops.sparse_mla.kernels import FEW, KEYS, LOG2E, LOWEST, _add, _here, _load_halves

TILE = tl.constexpr(KEYS)
"""Columns of the index in the largest tile of any kernel."""

SPAN = tl.constexpr(1024)
"""Columns of the index that are looked at together."""


@triton.jit
def _columns(index_row, P):
    """How many keys the row selects, and how many of its columns, in whole tiles, there are up to the last of them: behind that
    nothing is computed."""
    i = tl.arange(0, SPAN)
    count, end = tl.zeros([SPAN], tl.int32), tl.zeros([SPAN], tl.int32)
    for start in tl.range(0, P, SPAN):
        seen = tl.load(index_row + start + i, mask=start + i < P, other=-1) >= 0
        count += seen.to(tl.int32)
        end = tl.where(seen, start + i + 1, end)
    return tl.sum(count), tl.cdiv(tl.max(end), TILE) * TILE


@triton.jit
def _load_keys(index_row, kv_ptr, kv_t, start, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr):
    """Whether there is a key in each of the columns from ``start`` on, and its latent and rotary part."""
    key = tl.load(index_row + start + tl.arange(0, KEYS)).to(tl.int64)
    k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
    return key >= 0, k_l, k_r


@triton.jit(do_not_specialize=["scale", "S", "H", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b"])
def forward(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, scale, S, H, P, first, q_s, q_b, q_h, kv_t, kv_b,
            M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """o [S, B, H, V], and lse [B, S, H]: the log2 of a softmax's denominator, inf where nothing is selected.

    Grid: S, B. The heads are those from ``first`` to ``first + M``, so far as there are.
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
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
        x = tl.dot(q_r, tl.trans(k_r), tl.dot(q_l, tl.trans(k_l)))
        x = tl.where(seen[None, :], x, float("-inf"))
        before = top
        top = tl.maximum(before, tl.max(x, 1) * (scale * LOG2E))
        p, shrink = exp2(x * (scale * LOG2E) - top[:, None]), exp2(before - top)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k_l.dtype), k_l, o * shrink[:, None])
    s, h = _here(tl.program_id(0)).to(tl.int64), first + _here(tl.arange(0, M))
    o *= tl.where(total == 0, 0.0, 1 / total)[:, None]  # a NaN is not 0
    o_ptr += ((s * B + b) * H + h[:, None]) * V + tl.arange(0, V)[None, :]
    tl.store(o_ptr, o.to(o_ptr.dtype.element_ty), mask=(h < H)[:, None])
    lse = tl.where(total == 0, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + (b * S + s) * H + h, lse, mask=h < H)


@triton.jit
def _products(q_l, q_r, do, lse, seen, k_l, k_r, scale):
    """The probabilities [M, KEYS], and do·v."""
    x = tl.dot(q_r, tl.trans(k_r), tl.dot(q_l, tl.trans(k_l)))
    p = tl.where(seen[None, :], exp2(x * (scale * LOG2E) - lse[:, None]), 0.0)
    return p, tl.dot(do, tl.trans(k_l))


@triton.jit(
    do_not_specialize=[
        "scale", "S", "H", "N", "P", "begin", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b", "do_s", "do_b", "do_h"
    ]
)  # fmt: skip
def scores(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, do_ptr, p_ptr, dx_ptr, sum_ptr, scale,
           S, H, N, P, begin, first, q_s, q_b, q_h, kv_t, kv_b, do_s, do_b, do_h,
           M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """p and dx [C, B, P, M]: the probabilities and the gradients of q·k, up to the largest tile of a query's last key. And what
    these heads add to the sum of probabilities over heads [B, S, N], where given.

    Grid: C, B. The queries are those from ``begin`` on, the heads those from ``first`` on: where there is none, zeros.

    The mean of do·v, which is taken off it, is do·o; or summed anew where that is too rough, as in
    :func:`megacpp_mcore.ops.sparse_mla.kernels.means`.
    """
    row, b, B = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    s = (begin + row).to(tl.int64)
    h, n, v = first + tl.arange(0, M), tl.arange(0, KEYS), tl.arange(0, V)
    mask = (h < H)[:, None]
    q_rows = q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8)
    q_l, q_r = _load_halves(q_rows, mask, V, R)
    do_ptr += (s * do_s + b * do_b) * 8
    do = tl.load(do_ptr + h.to(tl.int64)[:, None] * (do_h * 8) + v[None, :], mask=mask, other=0.0)
    lse = tl.load(lse_ptr + (b * S + s) * H + h, mask=h < H, other=float("inf"))  # no head: probability 0
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    selected, end = _columns(index_ptr, P)
    if selected <= FEW:
        mean = tl.zeros([M], tl.float32)
        for start in tl.range(0, end, KEYS, num_stages=STAGES):
            seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
            p, dp = _products(q_l, q_r, do, lse, seen, k_l, k_r, scale)
            mean += tl.sum(p * dp, 1)
    else:
        o = tl.load(o_ptr + ((s * B + b) * H + h[:, None]) * V + v[None, :], mask=mask, other=0.0)
        mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    p_ptr, dx_ptr = p_ptr + (row * B + b) * P * M, dx_ptr + (row * B + b) * P * M
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
        p, dp = _products(q_l, q_r, do, lse, seen, k_l, k_r, scale)
        if sum_ptr is not None:  # no other program of a launch adds here, so that the order is one
            tl.atomic_add(sum_ptr + (b * S + s) * N + start + n, tl.sum(p, 0), mask=start + n < N, sem="relaxed")
        dx = p * (dp - mean[:, None]) * scale
        to = start * M + n[None, :] * M + tl.arange(0, M)[:, None]
        tl.store(p_ptr + to, p.to(q_l.dtype))
        tl.store(dx_ptr + to, dx.to(q_l.dtype))


@triton.jit(do_not_specialize=["S", "H", "P", "begin", "first", "kv_t", "kv_b"])
def queries(kv_ptr, index_ptr, dx_ptr, dq_ptr, S, H, P, begin, first, kv_t, kv_b,
            M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dq [S, B, H, K] of a chunk's queries. Grid, queries and heads as scores."""
    row, b, B = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    s = (begin + row).to(tl.int64)
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    dx_ptr += (row * B + b) * P * M + tl.arange(0, KEYS)[:, None] * M + tl.arange(0, M)[None, :]
    dq_l, dq_r = tl.zeros([M, V], tl.float32), tl.zeros([M, R], tl.float32)
    _selected, end = _columns(index_ptr, P)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        _seen, k_l, k_r = _load_keys(index_ptr, kv_ptr, kv_t, start, V, R, KEYS)
        dx = tl.trans(tl.load(dx_ptr + start * M))
        dq_l, dq_r = tl.dot(dx, k_l, dq_l), tl.dot(dx, k_r, dq_r)
    s, h = (begin + _here(tl.program_id(0))).to(tl.int64), first + _here(tl.arange(0, M))
    dq_ptr += ((s * B + b) * H + h[:, None]) * (V + R)
    tl.store(dq_ptr + tl.arange(0, V)[None, :], dq_l.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None])
    tl.store(dq_ptr + V + tl.arange(0, R)[None, :], dq_r.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None])


@triton.jit
def _load_slices(rows, mask, V: tl.constexpr, W: tl.constexpr):
    """The first V columns of the rows that begin at ``rows`` [X, 1], W at a time; zeros where masked."""
    slices = ()
    for c in tl.static_range(0, V, W):
        slices = slices + (tl.load(rows + c + tl.arange(0, W)[None, :], mask=mask, other=0.0),)  # noqa: RUF005
    return slices


@triton.jit(do_not_specialize=["S", "H", "P", "begin", "first", "q_s", "q_b", "q_h", "do_s", "do_b", "do_h"])
def keys(q_ptr, index_ptr, do_ptr, p_ptr, dx_ptr, dkv_ptr, unit_ptr,
         S, H, P, begin, first, q_s, q_b, q_h, do_s, do_b, do_h,
         M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
         KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Added to dkv [T, B, K]: what a chunk's queries give. Grid, queries and heads as scores.

    ``unit``: None, and dkv is float32; or a float32 on the device, and dkv is int64, in 1/unit.
    """
    row, b, B = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    s = (begin + row).to(tl.int64)
    h = first + tl.arange(0, M)
    mask, h = (h < H)[:, None], h.to(tl.int64)[:, None]
    q_rows = q_ptr + (s * q_s + b * q_b) * 8 + h * (q_h * 8)
    q_l = _load_slices(q_rows, mask, V, W)
    q_r = tl.load(q_rows + V + tl.arange(0, R)[None, :], mask=mask, other=0.0)
    do = _load_slices(do_ptr + (s * do_s + b * do_b) * 8 + h * (do_h * 8), mask, V, W)
    unit = None if unit_ptr is None else tl.load(unit_ptr)
    index_ptr += (b * S + s) * P
    at = (row * B + b) * P * M + tl.arange(0, KEYS)[:, None] * M + tl.arange(0, M)[None, :]
    _selected, end = _columns(index_ptr, P)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + tl.arange(0, KEYS)).to(tl.int64)
        p, dx = tl.load(p_ptr + at + start * M), tl.load(dx_ptr + at + start * M)
        seen, to = (key >= 0)[:, None], dkv_ptr + (key[:, None] * B + b) * (V + R)
        for c in tl.static_range(V // W):
            _add(to + c * W, tl.dot(dx, q_l[c], tl.dot(p, do[c])), seen, unit)
        _add(to + V, tl.dot(dx, q_r), seen, unit)
