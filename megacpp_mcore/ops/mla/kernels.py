"""Triton kernels of causal attention in which each query sees a run of keys that ends with its own: a document, or a window.

Both ends of the runs are non-decreasing along the rows, so a program's tiles fall into three parts: only the first and the
last, where runs begin and end, need a mask, and tiles outside are not loaded. Launches do not depend on the number of
documents.

Legend: S rows, B batch, H heads, K width of a query or key, V of a value. ``first`` [B, S] is the first key that a query sees,
``last`` [B, S] the last query that sees a key. Offsets between rows of the model's own tensors are given in units of 8
elements, so that the compiler knows their alignment.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E, exp2

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Initial running maximum: rows after the last one see nothing, and would be NaN with −inf."""


@triton.jit
def _tile(base, rows, stride, S, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, WIDTH]; zeros after the last row."""
    places = base + rows.to(tl.int64)[:, None] * (stride * 8) + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        return tl.load(places, mask=(rows < S)[:, None], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _store(base, rows, stride, S, values):
    """Store values [rows, width] in the layout of :func:`_tile`."""
    places = base + rows.to(tl.int64)[:, None] * (stride * 8) + tl.arange(0, values.shape[1])[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=(rows < S)[:, None])


@triton.jit
def _rows_of(ptr, b, h, stride_b, stride_h):
    """Return the pointer to the rows of batch ``b`` and head ``h``."""
    return ptr + (b * stride_b + h * stride_h) * 8


@triton.jit
def _part(part: tl.constexpr, begin, whole_from, whole_to, end):
    """Return the range of tiles of a part, 0 to 2; the tiles of part 1 need no mask."""
    if part == 0:
        return begin, whole_from
    elif part == 1:
        return whole_from, whole_to
    else:
        return whole_to, end


@triton.jit
def _keys_of(first_ptr, start, S, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key of each query of a tile, and the bounds of its tiles of keys as :func:`_part` takes them.

    ``first_ptr`` is that of the batch.
    """
    rows = start + tl.arange(0, ROWS)
    first = tl.load(first_ptr + rows, mask=rows < S, other=S)
    begin, whole_to = tl.load(first_ptr + start) // KEYS * KEYS, start // KEYS * KEYS
    newest = tl.load(first_ptr + tl.minimum(start + ROWS, S) - 1)
    whole_from = tl.minimum((newest + KEYS - 1) // KEYS * KEYS, whole_to)
    return first, begin, whole_from, whole_to, tl.minimum(start + ROWS, S)


@triton.jit(do_not_specialize=["scale", "S", "q_s", "q_b", "q_h", "k_s", "k_b", "k_h", "v_s", "v_b", "v_h"])
def forward(q_ptr, k_ptr, v_ptr, first_ptr, o_ptr, lse_ptr, scale, S, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
            K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute o [S, B, H, V], and lse [B, H, S]: the log2 of a softmax's denominator.

    Grid: tiles of queries, H, B.
    """
    start, h, b = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    H, B = tl.num_programs(1), tl.num_programs(2)
    rows, factor = start + tl.arange(0, ROWS), scale * LOG2E
    q = _tile(_rows_of(q_ptr, b, h, q_b, q_h), rows, q_s, S, K, True)
    k_base, v_base = _rows_of(k_ptr, b, h, k_b, k_h), _rows_of(v_ptr, b, h, v_b, v_h)
    first, begin, whole_from, whole_to, end = _keys_of(first_ptr + b * S, start, S, ROWS, KEYS)
    o = tl.zeros([ROWS, V], tl.float32)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(3):
        part_begin, part_end = _part(part, begin, whole_from, whole_to, end)
        for key in tl.range(part_begin, part_end, KEYS, num_stages=STAGES):
            keys = key + tl.arange(0, KEYS)
            x = tl.dot(q, tl.trans(_tile(k_base, keys, k_s, S, K, part != 1)))
            if part != 1:
                x = tl.where((first[:, None] <= keys[None, :]) & (keys[None, :] <= rows[:, None]), x, float("-inf"))
            before = top
            top = tl.maximum(before, tl.max(x, 1) * factor)
            p, shrink = exp2(x * factor - top[:, None]), exp2(before - top)
            total = total * shrink + tl.sum(p, 1)
            v = _tile(v_base, keys, v_s, S, V, part != 1)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
    mask = rows < S
    places = o_ptr + ((rows.to(tl.int64) * B + b) * H + h)[:, None] * V + tl.arange(0, V)[None, :]
    tl.store(places, (o / total[:, None]).to(o_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(lse_ptr + (b * H + h) * S + rows, top + tl.log2(total), mask=mask)


@triton.jit(do_not_specialize=["S", "do_s", "do_b", "do_h"])
def means(o_ptr, do_ptr, mean_ptr, S, do_s, do_b, do_h, V: tl.constexpr, ROWS: tl.constexpr):
    """Compute mean [B, H, S]: the mean of a query's probability gradients, o · do.

    Grid: tiles of queries, H, B.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    H, B = tl.num_programs(1), tl.num_programs(2)
    mask = rows < S
    places = o_ptr + ((rows.to(tl.int64) * B + b) * H + h)[:, None] * V + tl.arange(0, V)[None, :]
    o = tl.load(places, mask=mask[:, None], other=0.0).to(tl.float32)
    do = _tile(_rows_of(do_ptr, b, h, do_b, do_h), rows, do_s, S, V, True).to(tl.float32)
    tl.store(mean_ptr + (b * H + h) * S + rows, tl.sum(o * do, 1), mask=mask)


@triton.jit(do_not_specialize=[
    "scale", "S", "q_s", "q_b", "q_h", "k_s", "k_b", "k_h", "v_s", "v_b", "v_h", "do_s", "do_b", "do_h",
    "dq_s", "dq_b", "dq_h",
])  # fmt: skip
def backward_queries(q_ptr, k_ptr, v_ptr, first_ptr, do_ptr, lse_ptr, mean_ptr, dq_ptr, scale, S, q_s, q_b, q_h,
                     k_s, k_b, k_h, v_s, v_b, v_h, do_s, do_b, do_h, dq_s, dq_b, dq_h,
                     K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                     STAGES: tl.constexpr):  # fmt: skip
    """Compute dq, which has its own strides.

    Grid: tiles of queries, H, B.
    """
    start, h, b = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows, factor, of_head = start + tl.arange(0, ROWS), scale * LOG2E, (b * tl.num_programs(1) + h) * S
    q = _tile(_rows_of(q_ptr, b, h, q_b, q_h), rows, q_s, S, K, True)
    do = _tile(_rows_of(do_ptr, b, h, do_b, do_h), rows, do_s, S, V, True)
    lse = tl.load(lse_ptr + of_head + rows, mask=rows < S, other=0.0)
    mean = tl.load(mean_ptr + of_head + rows, mask=rows < S, other=0.0)
    k_base, v_base = _rows_of(k_ptr, b, h, k_b, k_h), _rows_of(v_ptr, b, h, v_b, v_h)
    first, begin, whole_from, whole_to, end = _keys_of(first_ptr + b * S, start, S, ROWS, KEYS)
    dq = tl.zeros([ROWS, K], tl.float32)
    for part in tl.static_range(3):
        part_begin, part_end = _part(part, begin, whole_from, whole_to, end)
        for key in tl.range(part_begin, part_end, KEYS, num_stages=STAGES):
            keys = key + tl.arange(0, KEYS)
            k = _tile(k_base, keys, k_s, S, K, part != 1)
            p = exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
            if part != 1:
                p = tl.where((first[:, None] <= keys[None, :]) & (keys[None, :] <= rows[:, None]), p, 0.0)
            dp = tl.dot(do, tl.trans(_tile(v_base, keys, v_s, S, V, part != 1)))
            dq = tl.dot((p * (dp - mean[:, None])).to(k.dtype), k, dq)
    _store(_rows_of(dq_ptr, b, h, dq_b, dq_h), rows, dq_s, S, dq * scale)


@triton.jit(do_not_specialize=[
    "scale", "S", "q_s", "q_b", "q_h", "k_s", "k_b", "k_h", "v_s", "v_b", "v_h", "do_s", "do_b", "do_h",
    "dk_s", "dk_b", "dk_h", "dv_s", "dv_b", "dv_h",
])  # fmt: skip
def backward_keys(q_ptr, k_ptr, v_ptr, last_ptr, do_ptr, lse_ptr, mean_ptr, dk_ptr, dv_ptr, scale, S, q_s, q_b, q_h,
                  k_s, k_b, k_h, v_s, v_b, v_h, do_s, do_b, do_h, dk_s, dk_b, dk_h, dv_s, dv_b, dv_h,
                  K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Compute dk and dv, which have their own strides.

    Grid: tiles of keys, H, B.
    """
    first, h, b = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    keys, factor, of_head = first + tl.arange(0, KEYS), scale * LOG2E, (b * tl.num_programs(1) + h) * S
    k = _tile(_rows_of(k_ptr, b, h, k_b, k_h), keys, k_s, S, K, True)
    v = _tile(_rows_of(v_ptr, b, h, v_b, v_h), keys, v_s, S, V, True)
    q_base, do_base = _rows_of(q_ptr, b, h, q_b, q_h), _rows_of(do_ptr, b, h, do_b, do_h)
    last_ptr += b * S
    last = tl.load(last_ptr + keys, mask=keys < S, other=-1)
    begin, end = first // ROWS * ROWS, tl.load(last_ptr + tl.minimum(first + KEYS, S) - 1) + 1
    whole_from = tl.minimum((first + KEYS + ROWS - 1) // ROWS * ROWS, end)
    whole_to = tl.maximum((tl.load(last_ptr + first) + 1) // ROWS * ROWS, whole_from)
    dk, dv = tl.zeros([KEYS, K], tl.float32), tl.zeros([KEYS, V], tl.float32)
    lse_ptr += of_head
    mean_ptr += of_head
    for part in tl.static_range(3):
        part_begin, part_end = _part(part, begin, whole_from, whole_to, end)
        for row in tl.range(part_begin, part_end, ROWS, num_stages=STAGES):
            rows = row + tl.arange(0, ROWS)
            q, do = _tile(q_base, rows, q_s, S, K, part != 1), _tile(do_base, rows, do_s, S, V, part != 1)
            inside = rows < S if part != 1 else rows >= 0
            lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
            mean = tl.load(mean_ptr + rows, mask=inside, other=0.0)
            p = exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
            if part != 1:
                p = tl.where((keys[:, None] <= rows[None, :]) & (rows[None, :] <= last[:, None]), p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            dp = tl.dot(v, tl.trans(do))
            dk = tl.dot((p * (dp - mean[None, :])).to(q.dtype), q, dk)
    _store(_rows_of(dk_ptr, b, h, dk_b, dk_h), keys, dk_s, S, dk * scale)
    _store(_rows_of(dv_ptr, b, h, dv_b, dv_h), keys, dv_s, S, dv)
