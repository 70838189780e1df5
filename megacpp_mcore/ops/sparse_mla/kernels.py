"""Triton kernels of sparse MLA: one program handles one query with all heads of the launch, and gathers its selected keys.

In forward the rows of a score tile are heads, so that the softmax runs along a row. In backward they are keys, so that
probabilities and score gradients already have the register layout of the next products' operands.

Legend: S queries, T keys, B batch, H heads, M heads of one launch rounded up to a power of two, K width of a query or key, V of
its latent, which is the value, R of its rotary part (K = V + R), N selected keys, P columns of the index: N rounded up to a
multiple of :data:`KEYS`. Offsets between rows of the model's own tensors are given in units of 8 elements, so that the compiler
knows their alignment.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E, exp2, has_ptx

KEYS = 64
"""Keys in one tile: the rows of a warp group's tensor-core product."""

FEW = tl.constexpr(192)
"""For queries with at most this many keys the mean is recomputed."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Initial running maximum. With −inf, a query that selects nothing would become NaN."""


@triton.jit
def _here(x):
    """Return the integer ``x``, opaque to the compiler, so that it does not hoist dependent computations above a loop."""
    if has_ptx():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def _load_halves(rows, mask, V: tl.constexpr, R: tl.constexpr):
    """Load the latent and the rotary part of the rows at ``rows`` [X, 1]; zeros where masked."""
    v, r = tl.arange(0, V)[None, :], tl.arange(0, R)[None, :]
    return tl.load(rows + v, mask=mask, other=0.0), tl.load(rows + V + r, mask=mask, other=0.0)


@triton.jit
def _halves(g):
    """Return the left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(g, (g.shape[0], 2, g.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _add(rows, g, mask, unit):
    """Add ``g`` [X, Y] atomically to the rows at ``rows`` [X, 1], half the columns at a time to reduce register pressure.

    With ``unit``, as integers in multiples of 1/unit: integer sums do not depend on the order.
    """
    Y: tl.constexpr = g.shape[1]
    left, right = _halves(g)
    if unit is None:
        y = tl.arange(0, Y // 2)[None, :]
        tl.atomic_add(rows + y, left, mask=mask, sem="relaxed")
        tl.atomic_add(rows + Y // 2 + y, right, mask=mask, sem="relaxed")
    else:
        _add_integers(rows, left * unit, mask)
        _add_integers(rows + Y // 2, right * unit, mask)


@triton.jit
def _add_integers(rows, g, mask):
    """Add integers, one element per lane, adjacent elements in adjacent lanes.

    Triton's own choice, two elements per lane, takes 1.25 ms instead of 0.77 (8192 queries, 56 heads, 256 keys, H200). Opaque
    columns and the transpose force this layout.
    """
    Y: tl.constexpr = g.shape[1]
    left, right = _halves(g)
    columns, mask = tl.trans(rows) + _here(tl.arange(0, Y // 2))[:, None], tl.trans(mask)
    tl.atomic_add(columns, tl.trans(left).to(tl.int64), mask=mask, sem="relaxed")
    tl.atomic_add(columns + Y // 2, tl.trans(right).to(tl.int64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["scale", "S", "H", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b"])
def forward(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, scale, S, H, P, first, q_s, q_b, q_h, kv_t, kv_b,
            M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute o [S, B, H, V], and lse [B, S, H]: the log2 of a softmax's denominator, inf where nothing is selected.

    Grid: S, B. Heads: ``first`` to ``first + M - 1``, masked at H.
    """
    s, b, B = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    h, n, v = first + tl.arange(0, M), tl.arange(0, KEYS), tl.arange(0, V)
    mask = (h < H)[:, None]
    q_l, q_r = _load_halves(q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8), mask, V, R)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    o = tl.zeros([M, V], tl.float32)
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    for start in tl.range(0, P, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + n).to(tl.int64)
        k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
        x = tl.dot(q_r, tl.trans(k_r), tl.dot(q_l, tl.trans(k_l)))
        x = tl.where((key >= 0)[None, :], x, float("-inf"))
        before = top
        top = tl.maximum(before, tl.max(x, 1) * (scale * LOG2E))
        p, shrink = exp2(x * (scale * LOG2E) - top[:, None]), exp2(before - top)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k_l.dtype), k_l, o * shrink[:, None])
    o = tl.where(total[:, None] == 0, 0.0, o / total[:, None])  # a NaN is not 0
    tl.store(o_ptr + ((s * B + b) * H + h[:, None]) * V + v[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(total == 0, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + (b * S + s) * H + h, lse, mask=h < H)


@triton.jit
def log2_scores(q_l, k_l, q_r, k_r, scale):
    """Compute the scores [M, KEYS] in units of log 2.

    The two products are scaled separately and then added: if the second accumulated onto the first, Triton would make both
    halves of a program's warps compute all of the first.
    """
    return tl.dot(q_l, tl.trans(k_l)) * (scale * LOG2E) + tl.dot(q_r, tl.trans(k_r)) * (scale * LOG2E)


@triton.jit(do_not_specialize=["scale", "S", "H", "N", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b"])
def sums(q_ptr, kv_ptr, index_ptr, sum_ptr, scale, S, H, N, P, first, q_s, q_b, q_h, kv_t, kv_b,
         M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write the sum of probabilities over heads [B, S, N]; from the second group of heads on, add to it.

    Grid and heads as in forward.
    """
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, n = first + tl.arange(0, M), tl.arange(0, KEYS)
    q_rows = q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8)
    q_l, q_r = _load_halves(q_rows, (h < H)[:, None], V, R)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    index_ptr += (b * S + s) * P
    sum_ptr += (b * S + s) * N
    kv_ptr += b * (kv_b * 8)
    for start in tl.range(0, P, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + n).to(tl.int64)
        k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
        x = tl.where((key >= 0)[None, :], log2_scores(q_l, k_l, q_r, k_r, scale), float("-inf"))
        before = top
        top = tl.maximum(before, tl.max(x, 1))
        total = total * exp2(before - top) + tl.sum(exp2(x - top[:, None]), 1)
    lse = tl.where((total == 0) | (h >= H), float("inf"), top + tl.log2(total))  # heads beyond H: probability 0
    for start in tl.range(0, P, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + n).to(tl.int64)
        k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
        x = log2_scores(q_l, k_l, q_r, k_r, scale)
        p = tl.sum(tl.where((key >= 0)[None, :], exp2(x - lse[:, None]), 0.0), 0)
        at = sum_ptr + start + n
        if first > 0:
            p += tl.load(at, mask=start + n < N, other=0.0)
        tl.store(at, p, mask=start + n < N)


@triton.jit(do_not_specialize=["scale", "S", "H", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b", "do_s", "do_b", "do_h"])
def means(q_ptr, kv_ptr, index_ptr, o_ptr, lse_ptr, do_ptr, mean_ptr, scale,
          S, H, P, first, q_s, q_b, q_h, kv_t, kv_b, do_s, do_b, do_h,
          M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute the mean of do·v over the keys, weighted by probability, times the scale, [B, S, H]. Grid as in forward.

    Mathematically it is do·o. With few keys, where the mean cancels most of the gradient, the rounding of o is large compared
    to the rest: there the mean is recomputed.
    """
    s, b, B = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    h, n, v = first + tl.arange(0, M), tl.arange(0, KEYS), tl.arange(0, V)
    mask = (h < H)[:, None]
    do_ptr += (s * do_s + b * do_b) * 8
    do = tl.load(do_ptr + h.to(tl.int64)[:, None] * (do_h * 8) + v[None, :], mask=mask, other=0.0)
    index_ptr += (b * S + s) * P
    selected = tl.zeros([KEYS], tl.int32)
    for start in tl.range(0, P, KEYS):
        selected += (tl.load(index_ptr + start + n) >= 0).to(tl.int32)
    if tl.sum(selected) <= FEW:
        q_l, q_r = _load_halves(q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8), mask, V, R)
        lse = tl.load(lse_ptr + (b * S + s) * H + h, mask=h < H, other=float("inf"))
        kv_ptr += b * (kv_b * 8)
        mean = tl.zeros([M], tl.float32)
        for start in tl.range(0, P, KEYS, num_stages=STAGES):
            key = tl.load(index_ptr + start + n).to(tl.int64)
            k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), (key >= 0)[:, None], V, R)
            x = tl.dot(q_r, tl.trans(k_r), tl.dot(q_l, tl.trans(k_l)))
            p = tl.where((key >= 0)[None, :], exp2(x * (scale * LOG2E) - lse[:, None]), 0.0)
            mean += tl.sum(p * tl.dot(do, tl.trans(k_l)), 1)
    else:
        o = tl.load(o_ptr + ((s * B + b) * H + h[:, None]) * V + v[None, :], mask=mask, other=0.0)
        mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(mean_ptr + (b * S + s) * H + h, mean * scale, mask=h < H)


@triton.jit(
    do_not_specialize=[
        "scale", "S", "H", "N", "P", "first", "q_s", "q_b", "q_h", "kv_t", "kv_b", "do_s", "do_b", "do_h"
    ]
)  # fmt: skip
def backward(q_ptr, kv_ptr, index_ptr, mean_ptr, lse_ptr, do_ptr, dq_ptr, dkv_ptr, sum_ptr, unit_ptr, scale,
             S, H, N, P, first, q_s, q_b, q_h, kv_t, kv_b, do_s, do_b, do_h,
             M: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write dq [S, B, H, K]; accumulate into dkv [T, B, K] and, if given, the sum of probabilities over heads [B, S, N].

    Grid and heads as in forward. dkv is float32; or, with ``unit``, a float32 on the device, int64 in multiples of 1/unit.
    """
    s, b, B = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    h, n, v = first + tl.arange(0, M), tl.arange(0, KEYS), tl.arange(0, V)
    mask = (h < H)[:, None]
    q_l, q_r = _load_halves(q_ptr + (s * q_s + b * q_b) * 8 + h.to(tl.int64)[:, None] * (q_h * 8), mask, V, R)
    do_ptr += (s * do_s + b * do_b) * 8
    do = tl.load(do_ptr + h.to(tl.int64)[:, None] * (do_h * 8) + v[None, :], mask=mask, other=0.0)
    mean = tl.load(mean_ptr + (b * S + s) * H + h, mask=h < H, other=0.0)
    lse = tl.load(lse_ptr + (b * S + s) * H + h, mask=h < H, other=float("inf"))  # heads beyond H: probability 0
    dq_l, dq_r = tl.zeros([V, M], tl.float32), tl.zeros([R, M], tl.float32)
    unit = None if unit_ptr is None else tl.load(unit_ptr)
    index_ptr += (b * S + s) * P
    kv_ptr += b * (kv_b * 8)
    for start in tl.range(0, P, KEYS, num_stages=STAGES):
        key = tl.load(index_ptr + start + n).to(tl.int64)
        seen = (key >= 0)[:, None]
        k_l, k_r = _load_halves(kv_ptr + key[:, None] * (kv_t * 8), seen, V, R)
        x = tl.dot(k_r, tl.trans(q_r), tl.dot(k_l, tl.trans(q_l)))
        p = tl.where(seen, exp2(x * (scale * LOG2E) - lse[None, :]), 0.0)
        if sum_ptr is not None:  # no other program of a launch adds here, so the reduction order is fixed
            tl.atomic_add(sum_ptr + (b * S + s) * N + start + n, tl.sum(p, 1), mask=start + n < N, sem="relaxed")
        dx = (p * (tl.dot(k_l, tl.trans(do)) * scale - mean[None, :])).to(q_l.dtype)
        dq_l, dq_r = tl.dot(tl.trans(k_l), dx, dq_l), tl.dot(tl.trans(k_r), dx, dq_r)
        row = dkv_ptr + (key[:, None] * B + b) * (V + R)
        _add(row, tl.dot(dx, q_l, tl.dot(p.to(q_l.dtype), do)), seen, unit)
        _add(row + V, tl.dot(dx, q_r), seen, unit)
    s, h = _here(tl.program_id(0)).to(tl.int64), _here(first + tl.arange(0, M))
    dq_ptr += ((s * B + b) * H + h[:, None]) * (V + R)
    tl.store(dq_ptr + v[None, :], tl.trans(dq_l).to(q_l.dtype), mask=(h < H)[:, None])
    tl.store(dq_ptr + V + tl.arange(0, R)[None, :], tl.trans(dq_r).to(q_l.dtype), mask=(h < H)[:, None])
