"""Triton kernels between MLA's projections and its core attention: every value is read once and written once, in its
consumer's layout.

Legend: S tokens, B batch, T = S · B, H heads, C width of a head's content, K its width after the matrix, R width of the rotary
part, V width of a value, Q and L ranks of the query's and the key's latent, N heads of an indexer. Offsets between rows of the
model's own tensors are given in units of 8 elements, so that the compiler knows their alignment.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_pairs(rows, mask, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the first and second values of the pairs of rows at ``rows``, in float32."""
    i: tl.constexpr = R // 2
    if INTERLEAVED:
        x = tl.load(rows + tl.arange(0, R)[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(x, (x.shape[0], i, 2)))
    else:
        first = tl.load(rows + tl.arange(0, i)[None, :], mask=mask, other=0.0)
        second = tl.load(rows + i + tl.arange(0, i)[None, :], mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(rows, first, second, mask, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store pairs in the layout that :func:`_load_pairs` reads."""
    i: tl.constexpr = R // 2
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        x = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (first.shape[0], R))
        tl.store(rows + tl.arange(0, R)[None, :], x, mask=mask)
    else:
        tl.store(rows + tl.arange(0, i)[None, :], first.to(dtype), mask=mask)
        tl.store(rows + i + tl.arange(0, i)[None, :], second.to(dtype), mask=mask)


@triton.jit
def _angles(rotation_ptr, s, mask, R: tl.constexpr):
    """Load cosines and sines of tokens ``s``."""
    rows = rotation_ptr + s[:, None] * R + tl.arange(0, R // 2)[None, :]
    return tl.load(rows, mask=mask, other=0.0), tl.load(rows + R // 2, mask=mask, other=0.0)


@triton.jit
def _matrix(w_ptr, h, w_h, w_row, C: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load the matrix [C, K] of head ``h``; its rows (TRANSPOSED: columns) are contiguous, ``w_row`` apart."""
    w_ptr += h * (w_h * 8)
    if TRANSPOSED:
        return tl.trans(tl.load(w_ptr + tl.arange(0, K)[:, None] * (w_row * 8) + tl.arange(0, C)[None, :]))
    else:
        return tl.load(w_ptr + tl.arange(0, C)[:, None] * (w_row * 8) + tl.arange(0, K)[None, :])


@triton.jit(do_not_specialize=["S", "x_s", "x_b", "x_h", "w_h", "w_row"])
def project(x_ptr, w_ptr, rotation_ptr, y_ptr, S, x_s, x_b, x_h, w_h, w_row, C: tl.constexpr, K: tl.constexpr,
            R: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Compute y [S, B, H, K + R]: content times w, and the rotary part, rotated. Without w, K = C.

    Grid: H, tiles of S, B.
    """
    h, b, H, B = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0), tl.num_programs(2)
    s = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = (s < S)[:, None]
    x_rows = x_ptr + s[:, None] * (x_s * 8) + (b * x_b + h * x_h) * 8
    y_rows = y_ptr + ((s[:, None] * B + b) * H + h) * (K + R)
    if C > 0:
        content = tl.load(x_rows + tl.arange(0, C)[None, :], mask=live, other=0.0)
        if w_ptr is not None:
            made = tl.dot(content, _matrix(w_ptr, h, w_h, w_row, C, K, TRANSPOSED))
            content = made.to(y_ptr.dtype.element_ty)
        tl.store(y_rows + tl.arange(0, K)[None, :], content, mask=live)
    if R > 0:
        first, second = _load_pairs(x_rows + C, live, R, INTERLEAVED)
        cos, sin = _angles(rotation_ptr, s, live, R)
        _store_pairs(y_rows + K, first * cos - second * sin, second * cos + first * sin, live, R, False)


@triton.jit(do_not_specialize=["S", "x_s", "x_b", "x_h", "w_h", "w_row", "dy_s", "dy_b", "dy_h"])
def project_backward(x_ptr, w_ptr, rotation_ptr, dy_ptr, dx_ptr, dw_ptr, S, x_s, x_b, x_h, w_h, w_row, dy_s, dy_b, dy_h,
                     C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
                     TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Compute dx [S, B, H, C + R], and one partial sum per program of w's gradient: dw [B, pieces, H, C, K], float32.

    Grid: H, pieces of S of TILES · TOKENS tokens, B.
    """
    h, b, H, B = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0), tl.num_programs(2)
    piece = tl.program_id(1).to(tl.int64)
    if w_ptr is not None:
        w = _matrix(w_ptr, h, w_h, w_row, C, K, TRANSPOSED)
        dw = tl.zeros([C, K], tl.float32)
    for tile in tl.range(0, TILES):
        s = (piece * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        live = (s < S)[:, None]
        dy_rows = dy_ptr + s[:, None] * (dy_s * 8) + (b * dy_b + h * dy_h) * 8
        dx_rows = dx_ptr + ((s[:, None] * B + b) * H + h) * (C + R)
        if C > 0:
            d_content = tl.load(dy_rows + tl.arange(0, K)[None, :], mask=live, other=0.0)
            if w_ptr is not None:
                x_rows = x_ptr + s[:, None] * (x_s * 8) + (b * x_b + h * x_h) * 8
                content = tl.load(x_rows + tl.arange(0, C)[None, :], mask=live, other=0.0)
                dw = tl.dot(tl.trans(content), d_content, dw)
                d_content = tl.dot(d_content, tl.trans(w)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_rows + tl.arange(0, C)[None, :], d_content, mask=live)
        if R > 0:
            first, second = _load_pairs(dy_rows + K, live, R, False)
            cos, sin = _angles(rotation_ptr, s, live, R)
            _store_pairs(dx_rows + C, first * cos + second * sin, second * cos - first * sin, live, R, INTERLEAVED)
    if w_ptr is not None:
        dw_ptr += ((b * tl.num_programs(1) + piece) * H + h) * (C * K)
        tl.store(dw_ptr + tl.arange(0, C)[:, None] * K + tl.arange(0, K)[None, :], dw)


@triton.jit(do_not_specialize=["S", "kv_s", "kv_b", "kv_h", "r_s", "r_b"])
def keys_and_values(kv_ptr, r_ptr, rotation_ptr, k_ptr, v_ptr, S, kv_s, kv_b, kv_h, r_s, r_b, C: tl.constexpr,
                    R: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Compute k [S, B, H, C + R]: kv's content and the rotary part, rotated; v [S, B, H, V]: the rest of kv.

    Grid: H, tiles of S, B.
    """
    h, b, H, B = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0), tl.num_programs(2)
    s = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = (s < S)[:, None]
    kv_rows = kv_ptr + s[:, None] * (kv_s * 8) + (b * kv_b + h * kv_h) * 8
    rows = (s[:, None] * B + b) * H + h
    content = tl.load(kv_rows + tl.arange(0, C)[None, :], mask=live, other=0.0)
    tl.store(k_ptr + rows * (C + R) + tl.arange(0, C)[None, :], content, mask=live)
    if V > 0:
        value = tl.load(kv_rows + C + tl.arange(0, V)[None, :], mask=live, other=0.0)
        tl.store(v_ptr + rows * V + tl.arange(0, V)[None, :], value, mask=live)
    first, second = _load_pairs(r_ptr + s[:, None] * (r_s * 8) + b * (r_b * 8), live, R, INTERLEAVED)
    cos, sin = _angles(rotation_ptr, s, live, R)
    k_rows = k_ptr + rows * (C + R) + C
    _store_pairs(k_rows, first * cos - second * sin, second * cos + first * sin, live, R, False)


@triton.jit(do_not_specialize=["S", "H", "dk_s", "dk_b", "dk_h", "dv_s", "dv_b", "dv_h"])
def keys_and_values_backward(dk_ptr, dv_ptr, rotation_ptr, dkv_ptr, dr_ptr, S, H, dk_s, dk_b, dk_h, dv_s, dv_b, dv_h,
                             C: tl.constexpr, R: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr,
                             TOKENS: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Compute dkv [S, B, H, C + V], and dr [S, B, R], summed over heads.

    Grid: tiles of S, B.
    """
    b, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, start = tl.arange(0, TOKENS * HEADS), tl.program_id(0).to(tl.int64) * TOKENS
    token = start + row // HEADS
    first, second = tl.zeros([TOKENS * HEADS, R // 2], tl.float32), tl.zeros([TOKENS * HEADS, R // 2], tl.float32)
    for some in tl.range(0, H, HEADS):
        h = some + row % HEADS
        live = ((token < S) & (h < H))[:, None]
        dk_rows = dk_ptr + token[:, None] * (dk_s * 8) + b * (dk_b * 8) + h.to(tl.int64)[:, None] * (dk_h * 8)
        dkv_rows = dkv_ptr + ((token[:, None] * B + b) * H + h[:, None]) * (C + V)
        d_content = tl.load(dk_rows + tl.arange(0, C)[None, :], mask=live, other=0.0)
        tl.store(dkv_rows + tl.arange(0, C)[None, :], d_content, mask=live)
        if V > 0:
            dv_rows = dv_ptr + token[:, None] * (dv_s * 8) + b * (dv_b * 8) + h.to(tl.int64)[:, None] * (dv_h * 8)
            dv = tl.load(dv_rows + tl.arange(0, V)[None, :], mask=live, other=0.0)
            tl.store(dkv_rows + C + tl.arange(0, V)[None, :], dv, mask=live)
        d_first, d_second = _load_pairs(dk_rows + C, live, R, False)
        first, second = first + d_first, second + d_second
    first = tl.sum(tl.reshape(first, (TOKENS, HEADS, R // 2)), 1)
    second = tl.sum(tl.reshape(second, (TOKENS, HEADS, R // 2)), 1)
    s = start + tl.arange(0, TOKENS)
    live = (s < S)[:, None]
    cos, sin = _angles(rotation_ptr, s, live, R)
    dr_rows = dr_ptr + (s[:, None] * B + b) * R
    _store_pairs(dr_rows, first * cos + second * sin, second * cos - first * sin, live, R, INTERLEAVED)


@triton.jit
def _norm(x_rows, w_ptr, y_rows, live, eps, N: tl.constexpr):
    """Compute y: RMSNorm of rows of N values."""
    n = tl.arange(0, N)
    x = tl.load(x_rows + n[None, :], mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    y = x * scale[:, None] * tl.load(w_ptr + n).to(tl.float32)[None, :]
    tl.store(y_rows + n[None, :], y.to(y_rows.dtype.element_ty), mask=live)


@triton.jit
def _norm_backward(x_rows, w_ptr, dy_rows, dx_rows, dw_ptr, live, eps, N: tl.constexpr):
    """Run backward of :func:`_norm`: dx, and dw summed over these rows."""
    n = tl.arange(0, N)
    x = tl.load(x_rows + n[None, :], mask=live, other=0.0).to(tl.float32)
    dy = tl.load(dy_rows + n[None, :], mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    x *= scale
    tl.store(dw_ptr + n, tl.sum(dy * x, 0))
    dy *= tl.load(w_ptr + n).to(tl.float32)[None, :]
    dx = (dy - x * (tl.sum(dy * x, 1) / N)[:, None]) * scale
    tl.store(dx_rows + n[None, :], dx.to(dx_rows.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["eps", "T"])
def norms(x_ptr, q_w_ptr, k_w_ptr, q_ptr, k_ptr, eps, T, Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """Compute q [T, Q] and k [T, L], the two latents in x [T, Q + L + R], normed.

    Grid: tiles of T.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x_rows, live = x_ptr + t * (Q + L + R), t < T
    _norm(x_rows, q_w_ptr, q_ptr + t * Q, live, eps, Q)
    _norm(x_rows + Q, k_w_ptr, k_ptr + t * L, live, eps, L)


@triton.jit(do_not_specialize=["eps", "T", "B", "dr_s", "dr_b"])
def norms_backward(x_ptr, q_w_ptr, k_w_ptr, dq_ptr, dk_ptr, dr_ptr, dx_ptr, dw_ptr, eps, T, B, dr_s, dr_b,
                   Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Compute dx [T, Q + L + R], with a copy of dr at its end, and per program a partial sum of dw [programs, Q + L].

    Grid: tiles of T.
    """
    tile = tl.program_id(0).to(tl.int64)
    t = tile * ROWS + tl.arange(0, ROWS)[:, None]
    x_rows, dx_rows, live = x_ptr + t * (Q + L + R), dx_ptr + t * (Q + L + R), t < T
    dw_ptr += tile * (Q + L)
    _norm_backward(x_rows, q_w_ptr, dq_ptr + t * Q, dx_rows, dw_ptr, live, eps, Q)
    _norm_backward(x_rows + Q, k_w_ptr, dk_ptr + t * L, dx_rows + Q, dw_ptr + Q, live, eps, L)
    r = tl.arange(0, R)[None, :]
    dr = tl.load(dr_ptr + t // B * (dr_s * 8) + t % B * (dr_b * 8) + r, mask=live, other=0.0)
    tl.store(dx_rows + Q + L + r, dr, mask=live)


@triton.jit
def _normed_pairs(x_rows, live, eps, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return pairs of rows of R values after LayerNorm without weights, and 1 / standard deviation."""
    first, second = _load_pairs(x_rows, live, R, INTERLEAVED)
    mean = ((tl.sum(first, 1) + tl.sum(second, 1)) / R)[:, None]
    first, second = first - mean, second - mean
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / R + eps)[:, None]
    return first * scale, second * scale, scale


@triton.jit
def _vector(ptr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load pairs of a vector, as rows [1, R / 2]."""
    return _load_pairs(ptr + tl.zeros([1, 1], tl.int32), tl.full([1, 1], 1, tl.int1), R, INTERLEAVED)


@triton.jit(do_not_specialize=["eps", "scale", "T", "B"])
def indexer_keys(x_ptr, norm_ptr, bias_ptr, rotation_ptr, k_ptr, w_ptr, eps, scale, T, B, R: tl.constexpr,
                 N: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Compute k [T, R]: the first R values of x [T, R + N], after LayerNorm and rotation; w [T, N]: the rest times ``scale``.

    Grid: tiles of T.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, n, x_rows = (t < T)[:, None], tl.arange(0, HEADS)[None, :], x_ptr + t[:, None] * (R + N)
    first, second, _ = _normed_pairs(x_rows, live, eps, R, INTERLEAVED)
    norm_a, norm_b = _vector(norm_ptr, R, INTERLEAVED)
    bias_a, bias_b = _vector(bias_ptr, R, INTERLEAVED)
    first, second = first * norm_a + bias_a, second * norm_b + bias_b
    cos, sin = _angles(rotation_ptr, t // B, live, R)
    _store_pairs(k_ptr + t[:, None] * R, first * cos - second * sin, second * cos + first * sin, live, R, False)
    w = tl.load(x_rows + R + n, mask=live & (n < N), other=0.0).to(tl.float32) * scale
    tl.store(w_ptr + t[:, None] * N + n, w.to(w_ptr.dtype.element_ty), mask=live & (n < N))


@triton.jit(do_not_specialize=["eps", "scale", "T", "B"])
def indexer_keys_backward(x_ptr, norm_ptr, rotation_ptr, dk_ptr, dw_ptr, dx_ptr, dnorm_ptr, eps, scale, T, B,
                          R: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
                          ROWS: tl.constexpr):  # fmt: skip
    """Compute dx [T, R + N], and one partial sum per program of the gradients of norm and bias: dnorm [programs, 2, R].

    Grid: tiles of T.
    """
    tile = tl.program_id(0).to(tl.int64)
    t = tile * ROWS + tl.arange(0, ROWS)
    live, n = (t < T)[:, None], tl.arange(0, HEADS)[None, :]
    dx_rows = dx_ptr + t[:, None] * (R + N)
    x_a, x_b, over = _normed_pairs(x_ptr + t[:, None] * (R + N), live, eps, R, INTERLEAVED)
    first, second = _load_pairs(dk_ptr + t[:, None] * R, live, R, False)
    cos, sin = _angles(rotation_ptr, t // B, live, R)
    first, second = first * cos + second * sin, second * cos - first * sin
    dnorm_rows = dnorm_ptr + tile * (2 * R) + tl.zeros([1, 1], tl.int32)
    _store_pairs(dnorm_rows, tl.sum(first * x_a, 0)[None, :], tl.sum(second * x_b, 0)[None, :], None, R, INTERLEAVED)
    _store_pairs(dnorm_rows + R, tl.sum(first, 0)[None, :], tl.sum(second, 0)[None, :], None, R, INTERLEAVED)
    norm_a, norm_b = _vector(norm_ptr, R, INTERLEAVED)
    first, second = first * norm_a, second * norm_b
    mean = ((tl.sum(first, 1) + tl.sum(second, 1)) / R)[:, None]
    along = ((tl.sum(first * x_a, 1) + tl.sum(second * x_b, 1)) / R)[:, None]
    d_a, d_b = (first - mean - x_a * along) * over, (second - mean - x_b * along) * over
    _store_pairs(dx_rows, d_a, d_b, live, R, INTERLEAVED)
    dw = tl.load(dw_ptr + t[:, None] * N + n, mask=live & (n < N), other=0.0).to(tl.float32) * scale
    tl.store(dx_rows + R + n, dw.to(dx_ptr.dtype.element_ty), mask=live & (n < N))
