"""Triton kernels of Mamba-3: rotary angles and decays, chunk states, state passing, the chunk scan, and their gradients.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R rank, A rotation angles. One program processes a
*segment* of T tokens, in steps of a *chunk* of L tokens: M = L·R rows, rank-major (row r·L + t), so that a sum over ranks
stays in a thread. S is padded to ``SP``, a multiple of T, by tokens that add nothing and decay nothing.

The state axis is *interleaved* inside the kernels: columns 2i and 2i + 1 are plane i of the rotation. MIMO's half pairing
is reordered once, where B and C are normed.

Tables: ``la`` [B, H, SP] the inclusive sum of log2 decays in a chunk, ``w`` and ``gamma`` [B, H, SP] as in the reference's
docstring, ``cos_sin`` [B, H, SP, 2A] adjacent cosine and sine of each angle, ``bn`` and ``cn`` [B, G, R, SP, N]
normed B and C, states [B, H, SP / T + 1, P, N].
Offsets between tokens of the model's own tensors [S, B, …] are given in units of 8 elements, so that the compiler knows
their alignment.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E, exp2, has_ptx, reciprocal, softplus

PI = tl.constexpr(3.141592653589793)
RESET = tl.constexpr(-160.0)
"""Added to the log2 decay of a document's first token: 2^-160 is 0 in float32, so it sees nothing before it."""


# --- helpers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, add=None):
    """Multiply without rounding float32 operands to TF32."""
    return tl.dot(a, b, add, input_precision="ieee")


@triton.jit
def _sigmoid(u):
    return reciprocal(1.0 + exp2(u * -LOG2E))


@triton.jit
def _silu(u):
    """Compute u·sigmoid(u) through tanh: one approximate instruction, accurate to 2^-11, for 16-bit outputs."""
    half = 0.5 * u
    if has_ptx():
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
        return half + half * tanh
    else:
        return half + half * (2.0 * _sigmoid(u) - 1.0)


@triton.jit
def _cos_sin(angle):
    """Compute cosine and sine of an angle in [0, 2π], approximately: accurate to 2^-20 within half a turn of 0."""
    if has_ptx():
        u = angle - PI
        cos = tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
        sin = tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
        return -cos, -sin
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def _tanh(u):
    return 2.0 * _sigmoid(2.0 * u) - 1.0


@triton.jit
def _rate(u, HEAVY: tl.constexpr):
    """Compute the decay rate and its derivative."""
    if HEAVY:
        below = 1.0 / (1.0 - tl.minimum(u, 0.0))
        return tl.where(u < 0, below, 1.0 + u), tl.where(u < 0, below * below, 1.0)
    else:
        return softplus(u), _sigmoid(u)


@triton.jit
def _segmented_add(flag_a, sum_a, flag_b, sum_b):
    return flag_a | flag_b, tl.where(flag_b > 0, sum_b, sum_a + sum_b)


@triton.jit
def _documents(seq_ptr, b, t, S):
    """Load the document of each token; padding belongs to the last one."""
    return tl.load(seq_ptr + b.to(tl.int64) * S + tl.maximum(tl.minimum(t, S - 1), 0))


@triton.jit
def _starts(seq_ptr, b, t, S):
    """Return whether a token is the first of a document that is not the row's first."""
    return _documents(seq_ptr, b, t, S) != _documents(seq_ptr, b, t - 1, S)


@triton.jit
def _over_ranks(x, R: tl.constexpr, L: tl.constexpr, X: tl.constexpr):
    """Sum [M, X] over ranks: [L, X]."""
    if R == 1:
        return x
    else:
        return tl.sum(tl.reshape(x, (R, L, X)), 0)


@triton.jit
def _rows_over_ranks(x, R: tl.constexpr, L: tl.constexpr):
    """Sum [M] over ranks: [L]."""
    if R == 1:
        return x
    else:
        return tl.sum(tl.reshape(x, (R, L)), 0)


@triton.jit
def _cos_sin_of(cos_sin_ptr, first, N: tl.constexpr, A: tl.constexpr, L: tl.constexpr):
    """Load the cosines and sines of a chunk's angles in N columns from ``first`` on, [1, L, N / 2] float32; 1 and 0 in
    planes without rotation."""
    n = first + tl.arange(0, N)
    rotated = tl.broadcast_to((n < 2 * A)[None, :], (L, N))
    still = tl.broadcast_to(((n + 1) % 2)[None, :], (L, N)).to(cos_sin_ptr.dtype.element_ty)
    value = tl.load(cos_sin_ptr + tl.arange(0, L)[:, None] * (2 * A) + n[None, :], mask=rotated, other=still)
    cos, sin = tl.split(tl.reshape(value.to(tl.float32), (L, N // 2, 2)))
    return cos[None, :, :], sin[None, :, :]


@triton.jit
def _planes(value, R: tl.constexpr, L: tl.constexpr, N: tl.constexpr):
    """Split [M, N] into the two columns of each plane, [R, L, N / 2] float32 each."""
    return tl.split(tl.reshape(value.to(tl.float32), (R, L, N // 2, 2)))


@triton.jit
def _rotated(value, cos, sin, R: tl.constexpr, L: tl.constexpr, N: tl.constexpr):
    """Rotate B or C of a chunk, biased, [M, N]: float32."""
    first, second = _planes(value, R, L, N)
    return tl.reshape(tl.join(first * cos - second * sin, first * sin + second * cos), (R * L, N))


@triton.jit
def _tile(ptr, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr).to(tl.float32)
    else:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _in_parts(ptr, at, mask, stride, PARTS: tl.constexpr):
    """Sum the elements at ``at`` over the parts; 0 outside of the mask."""
    total = tl.load(ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride + at, mask=mask, other=0.0)
    return total


# --- tables -----------------------------------------------------------------------------------------------------------


@triton.jit
def _columns_of_planes(N: tl.constexpr, MIMO: tl.constexpr):
    """Return the offsets of each plane's two columns in the model's layout."""
    i = tl.arange(0, N // 2)
    if MIMO:
        return i, i + N // 2
    else:
        return 2 * i, 2 * i + 1


@triton.jit
def _model_planes(row, inside, ROWS: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr):
    """Load each plane's two columns from rows of B or C in the model's layout, [ROWS, N / 2] float32 each."""
    if MIMO:
        i = tl.arange(0, N // 2)[None, :]
        first = tl.load(row + i, mask=inside, other=0.0)
        second = tl.load(row + i + N // 2, mask=inside, other=0.0)
    else:
        both = tl.load(row + tl.arange(0, N)[None, :], mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(both, (ROWS, N // 2, 2)))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def norm_fwd(b_ptr, c_ptr, b_weight_ptr, c_weight_ptr, y_ptr, s_s, s_b, s_g, s_r, S, SP, B, eps,
             G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Norm B and C, [S, B, G, R, N] each, into the tables [2, B, G, R, SP, N]; programs (SP / ROWS, G·R, 2·B)."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gr, table = tl.program_id(1), tl.program_id(2)
    a, c = _columns_of_planes(N, MIMO)
    if table < B:
        x_ptr, weight_ptr = b_ptr, b_weight_ptr
    else:
        x_ptr, weight_ptr = c_ptr, c_weight_ptr
    row = x_ptr + t.to(tl.int64)[:, None] * (s_s * 8) + (table % B).to(tl.int64) * s_b * 8 + (gr // R) * s_g + (gr % R) * s_r
    first, second = _model_planes(row, (t < S)[:, None], ROWS, N, MIMO)
    scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / N + eps)[:, None]
    first = first * scale * tl.load(weight_ptr + a).to(tl.float32)[None, :]
    second = second * scale * tl.load(weight_ptr + c).to(tl.float32)[None, :]
    out = y_ptr + (table.to(tl.int64) * (G * R) + gr) * SP * N + t[:, None] * N + tl.arange(0, N)[None, :]
    y = tl.reshape(tl.join(first, second), (ROWS, N))
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(t < SP)[:, None])


@triton.jit
def norm_bwd(b_ptr, c_ptr, b_weight_ptr, c_weight_ptr, dy_ptr, db_ptr, dc_ptr, dw_ptr, s_s, s_b, s_g, s_r, sg_s, sg_b,
             sg_g, sg_r, S, SP, B, eps,
             G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, MIMO: tl.constexpr, SHARES: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """Backward of :func:`norm_fwd`: from ``dy`` [SHARES, 2, B, G, R, SP, N], summed over shares, to ``db`` and ``dc``
    [S, B, G, R, N], and one partial sum per program of the weights' gradients, ``dw`` [2, B·G·R·SP / ROWS, N]."""
    tile, gr, table = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * ROWS + tl.arange(0, ROWS)
    a, c = _columns_of_planes(N, MIMO)
    if table < B:
        x_ptr, weight_ptr, dx_ptr = b_ptr, b_weight_ptr, db_ptr
    else:
        x_ptr, weight_ptr, dx_ptr = c_ptr, c_weight_ptr, dc_ptr
    b = (table % B).to(tl.int64)
    row = x_ptr + t.to(tl.int64)[:, None] * (s_s * 8) + b * s_b * 8 + (gr // R) * s_g + (gr % R) * s_r
    inside = (t < S)[:, None]
    first, second = _model_planes(row, inside, ROWS, N, MIMO)
    n = tl.arange(0, N)
    plane = (table.to(tl.int64) * (G * R) + gr) * SP * N
    one_share = tl.num_programs(2).to(tl.int64) * (G * R) * SP * N
    dy = _in_parts(dy_ptr, plane + t[:, None] * N + n[None, :], inside, one_share, SHARES)
    d_first, d_second = tl.split(tl.reshape(dy, (ROWS, N // 2, 2)))
    scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / N + eps)[:, None]
    first, second = first * scale, second * scale
    program = (table * (G * R) + gr) * tl.num_programs(0) + tile
    tl.store(dw_ptr + program * N + a, tl.sum(d_first * first, 0))
    tl.store(dw_ptr + program * N + c, tl.sum(d_second * second, 0))
    d_first *= tl.load(weight_ptr + a).to(tl.float32)[None, :]
    d_second *= tl.load(weight_ptr + c).to(tl.float32)[None, :]
    mean = ((tl.sum(d_first * first, 1) + tl.sum(d_second * second, 1)) / N)[:, None]
    out = dx_ptr + t.to(tl.int64)[:, None] * (sg_s * 8) + b * sg_b * 8 + (gr // R) * sg_g + (gr % R) * sg_r
    d_first = (scale * (d_first - first * mean)).to(dx_ptr.dtype.element_ty)
    d_second = (scale * (d_second - second * mean)).to(dx_ptr.dtype.element_ty)
    if MIMO:
        tl.store(out + a[None, :], d_first, mask=inside)
        tl.store(out + c[None, :], d_second, mask=inside)
    else:
        tl.store(out + n[None, :], tl.reshape(tl.join(d_first, d_second), (ROWS, N)), mask=inside)


@triton.jit
def _steps(dd_dt_ptr, dt_bias_ptr, s_s, s_b, t, b, h, S):
    """Compute Δ of tokens, 0 outside of the sequence."""
    inside = (t >= 0) & (t < S)
    u = tl.load(dd_dt_ptr + t.to(tl.int64) * s_s + b.to(tl.int64) * s_b + h, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, softplus(u + tl.load(dt_bias_ptr + h).to(tl.float32)), 0.0)


@triton.jit
def _lambdas(trap_ptr, s_s, s_b, t, b, h, S):
    inside = (t >= 0) & (t < S)
    return _sigmoid(tl.load(trap_ptr + t.to(tl.int64) * s_s + b.to(tl.int64) * s_b + h, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _tanh_angles(angles_ptr, s_s, s_b, t, b, S, A: tl.constexpr, AP: tl.constexpr):
    """Compute tanh of the angle projection, [T, AP]."""
    i = tl.arange(0, AP)
    mask = (t < S)[:, None] & (i < A)[None, :]
    u = tl.load(angles_ptr + t.to(tl.int64)[:, None] * s_s + b.to(tl.int64) * s_b + i[None, :], mask=mask, other=0.0)
    return _tanh(u.to(tl.float32))


@triton.jit
def _summed_angles(angle, seq_ptr, b, t, S, T: tl.constexpr, AP: tl.constexpr, PACKED: tl.constexpr):
    """Sum [T, AP] over tokens, from 0 at each document's start; also return whether one starts at or before each token."""
    if PACKED:
        starts = tl.broadcast_to(_starts(seq_ptr, b, t, S).to(tl.int32)[:, None], (T, AP))
        flags, sums = tl.associative_scan((starts, angle), 0, _segmented_add)
        return sums, flags
    else:
        return tl.cumsum(angle, 0), tl.zeros((T, AP), tl.int32)


@triton.jit
def angle_totals(dd_dt_ptr, dt_bias_ptr, angles_ptr, seq_ptr, total_ptr, restart_ptr, s_s, s_b, sa_s, sa_b, S, NSEG,
                 H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, T: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Sum a segment's increments of θ since its last document start, [B, H, NSEG, A]; store whether it has one, [B, NSEG]."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = seg * T + tl.arange(0, T)
    delta = _steps(dd_dt_ptr, dt_bias_ptr, s_s, s_b, t, b, h, S)
    angle = (delta * PI)[:, None] * _tanh_angles(angles_ptr, sa_s, sa_b, t, b, S, A, AP)
    i = tl.arange(0, AP)
    if PACKED:
        starts = tl.where(_starts(seq_ptr, b, t, S), t, -1)
        start = tl.max(starts, 0)
        total = tl.sum(tl.where((t >= start)[:, None], angle, 0.0), 0)
        tl.store(restart_ptr + b * NSEG + seg, (start >= 0).to(tl.int32))
    else:
        total = tl.sum(angle, 0)
    tl.store(total_ptr + ((b * H + h) * NSEG + seg).to(tl.int64) * A + i, total, mask=i < A)


@triton.jit
def angle_carries(total_ptr, restart_ptr, initial_ptr, carry_ptr,
                  H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, NSEG: tl.constexpr, BLOCK: tl.constexpr,
                  PACKED: tl.constexpr, INITIAL: tl.constexpr):  # fmt: skip
    """Compute θ before each segment, mod 2π, [B, H, NSEG, A]; programs (H, B). The sum runs in float64."""
    h, b = tl.program_id(0), tl.program_id(1)
    bh = b * H + h
    i = tl.arange(0, AP)
    if INITIAL:
        carry = tl.load(initial_ptr + bh * A + i, mask=i < A, other=0.0).to(tl.float64)
    else:
        carry = tl.zeros((AP,), tl.float64)
    base = bh.to(tl.int64) * NSEG * A
    rows = tl.arange(0, BLOCK)
    for first in range(0, NSEG, BLOCK):
        s = first + rows
        mask = (s < NSEG)[:, None] & (i < A)[None, :]
        total = tl.load(total_ptr + base + s[:, None] * A + i[None, :], mask=mask, other=0.0).to(tl.float64)
        if PACKED:
            restart = tl.load(restart_ptr + b * NSEG + s, mask=s < NSEG, other=0)
            flags, sums = tl.associative_scan(
                (tl.broadcast_to(restart[:, None], (BLOCK, AP)), total), 0, _segmented_add
            )  # fmt: skip
            after = tl.where(flags > 0, sums, sums + carry[None, :])
        else:
            after = tl.cumsum(total, 0) + carry[None, :]
        after = after - tl.floor(after * (0.5 / PI)) * (2.0 * PI)
        # Shifted by one: a segment's final θ is where the next one starts.
        last = s[:, None] + 1 < NSEG
        tl.store(carry_ptr + base + (s[:, None] + 1) * A + i[None, :], after.to(tl.float32), mask=mask & last)
        if first == 0:
            tl.store(carry_ptr + base + i, carry.to(tl.float32), mask=i < A)
        carry = tl.sum(tl.where((rows == BLOCK - 1)[:, None], after, 0.0), 0)


@triton.jit
def tables_fwd(dd_dt_ptr, dd_A_ptr, trap_ptr, angles_ptr, dt_bias_ptr, seq_ptr, carry_ptr, la_ptr, w_ptr, gamma_ptr,
               cos_sin_ptr, theta_ptr, s_s, s_b, sA_s, sA_b, st_s, st_b, sa_s, sa_b, S, SP, NSEG, floor,
               H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, T: tl.constexpr, L: tl.constexpr, HEAVY: tl.constexpr,
               PACKED: tl.constexpr, FINAL: tl.constexpr):  # fmt: skip
    """Compute la, w, γ, cosines and sines of a segment, and (FINAL) θ of the last token; programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = (b * H + h).to(tl.int64)
    t = seg * T + tl.arange(0, T)
    inside = t < S
    delta = _steps(dd_dt_ptr, dt_bias_ptr, s_s, s_b, t, b, h, S)
    following = _steps(dd_dt_ptr, dt_bias_ptr, s_s, s_b, t + 1, b, h, S)
    own = _lambdas(trap_ptr, st_s, st_b, t, b, h, S) * delta
    pending = (1.0 - _lambdas(trap_ptr, st_s, st_b, t + 1, b, h, S)) * following
    u = tl.load(dd_A_ptr + t.to(tl.int64) * sA_s + b.to(tl.int64) * sA_b + h, mask=inside, other=0.0).to(tl.float32)
    rate, _ = _rate(u, HEAVY)
    decay = tl.maximum(rate, floor, propagate_nan=tl.PropagateNan.ALL) * delta * -LOG2E
    if PACKED:
        decay += tl.where(_starts(seq_ptr, b, t, S), RESET, 0.0)
    la = tl.reshape(tl.cumsum(tl.reshape(decay, (T // L, L)), 1), (T,))
    tl.store(la_ptr + bh * SP + t, la)
    tl.store(w_ptr + bh * SP + t, own + pending)
    tl.store(gamma_ptr + bh * SP + t, own)

    i = tl.arange(0, AP)
    angle = (delta * PI)[:, None] * _tanh_angles(angles_ptr, sa_s, sa_b, t, b, S, A, AP)
    sums, restarted = _summed_angles(angle, seq_ptr, b, t, S, T, AP, PACKED)
    carry = tl.load(carry_ptr + (bh * NSEG + seg) * A + i, mask=i < A, other=0.0)
    theta = tl.where(restarted > 0, sums, sums + carry[None, :])
    theta = theta - tl.floor(theta * (0.5 / PI)) * (2.0 * PI)
    cos, sin = _cos_sin(theta)
    cos_sin = tl.reshape(tl.join(cos, sin), (T, 2 * AP)).to(cos_sin_ptr.dtype.element_ty)
    j = tl.arange(0, 2 * AP)
    out = cos_sin_ptr + (bh * SP + t)[:, None] * (2 * A) + j[None, :]
    tl.store(out, cos_sin, mask=tl.broadcast_to((j < 2 * A)[None, :], (T, 2 * AP)))
    if FINAL:
        last = (i < A)[None, :] & (t == S - 1)[:, None]
        tl.store(theta_ptr + bh * A + tl.broadcast_to(i[None, :], (T, AP)), theta, mask=last)


# --- states between segments ------------------------------------------------------------------------------------------


@triton.jit
def _decays(la_ptr, w_ptr, rows, L: tl.constexpr):
    """Load a chunk's decays: from its start to each token [M], from each token to its end [M], and over the chunk [1]."""
    la, w = tl.load(la_ptr + rows), tl.load(w_ptr + rows)
    last = tl.load(la_ptr + L - 1)
    from_start, to_end, chunk_decay = exp2(la), exp2(last - la) * w, tl.exp2(last)
    return from_start, to_end, chunk_decay


@triton.jit
def chunk_state_fwd(x_ptr, bn_ptr, cn_ptr, b_bias_ptr, c_bias_ptr, mx_ptr, cos_sin_ptr, la_ptr, w_ptr, k_ptr, q_ptr,
                    state_ptr, decay_ptr, sx_s, sx_b, sx_h, S, SP, NSEG,
                    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, A: tl.constexpr,
                    L: tl.constexpr, CHUNKS: tl.constexpr, MIMO: tl.constexpr, EVEN: tl.constexpr,
                    BACKWARD: tl.constexpr):  # fmt: skip
    """Rotate keys and queries (B and C, biased), [B, H, SP / L, M, N]; compute a segment's contribution to the state [P, N]
    and its decay of the state before it. Programs (H, NSEG, B).

    BACKWARD, for segments of one chunk at rank 1: the contribution to the gradient of the state before the segment, with ``x``
    the gradient of the scan's output, and keys and queries swapped."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    DT: tl.constexpr = x_ptr.dtype.element_ty
    bh = (b * H + h).to(tl.int64)
    m, n, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)
    token, rank = m % L, m // L
    t0 = seg * (CHUNKS * L)
    rows = (rank * SP + token)[:, None] * N + n[None, :]
    bias = h * (R * N) + rank[:, None] * N + n[None, :]
    mix = mx_ptr + h * (R * P) + rank[:, None] * P + p[None, :]
    tile = m[:, None] * N + n[None, :]
    bc = (b * G + h // (H // G)).to(tl.int64) * (R * SP * N) + t0 * N
    cos_sin_ptr += (bh * SP + t0) * (2 * A)
    x_ptr += (t0.to(tl.int64) * sx_s + b.to(tl.int64) * sx_b + h.to(tl.int64) * sx_h) * 8
    la_ptr += bh * SP + t0
    w_ptr += bh * SP + t0
    k_ptr += (bh * SP + t0) * (R * N)
    q_ptr += (bh * SP + t0) * (R * N)
    state = tl.zeros((P, N), tl.float32)
    segment_decay = 1.0
    for _ in tl.range(CHUNKS):
        # Load before storing, if registers suffice: the compiler does not move loads across stores.
        cos, sin = _cos_sin_of(cos_sin_ptr, 0, N, A, L)
        x = _tokens(x_ptr, sx_s, t0, S, L, P, EVEN)
        from_start, to_end, chunk_decay = _decays(la_ptr, w_ptr, token, L)
        q = _rotated(tl.load(cn_ptr + bc + rows) + tl.load(c_bias_ptr + bias), cos, sin, R, L, N)
        if N > 64:
            tl.store(q_ptr + tile, q.to(DT))
        k = _rotated(tl.load(bn_ptr + bc + rows) + tl.load(b_bias_ptr + bias), cos, sin, R, L, N).to(DT)
        v = _values(x, mix, R, L, P, MIMO) * (from_start if BACKWARD else to_end)[:, None]
        if N <= 64:
            tl.store(q_ptr + tile, q.to(DT))
        tl.store(k_ptr + tile, k)
        state = _dot(v.to(DT).T, k, state * chunk_decay)
        segment_decay = segment_decay * chunk_decay
        t0 += L
        bc += L * N
        cos_sin_ptr += L * (2 * A)
        x_ptr += L * (sx_s * 8)
        la_ptr += L
        w_ptr += L
        k_ptr += M * N
        q_ptr += M * N
    out = state_ptr + (bh * (NSEG + 1) + seg) * (P * N) + p[:, None] * N + n[None, :]
    tl.store(out, state.to(state_ptr.dtype.element_ty))
    tl.store(decay_ptr + bh * NSEG + seg, segment_decay)


@triton.jit
def rotate_fwd(bn_ptr, cn_ptr, b_bias_ptr, c_bias_ptr, cos_sin_ptr, k_ptr, q_ptr, SP,
               H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, A: tl.constexpr, L: tl.constexpr,
               CHUNKS: tl.constexpr):  # fmt: skip
    """Rotate keys and queries as :func:`chunk_state_fwd` does. Programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    DT: tl.constexpr = k_ptr.dtype.element_ty
    bh = (b * H + h).to(tl.int64)
    m, n = tl.arange(0, M), tl.arange(0, N)
    token, rank = m % L, m // L
    t0 = seg * (CHUNKS * L)
    rows = (rank * SP + token)[:, None] * N + n[None, :]
    bias = h * (R * N) + rank[:, None] * N + n[None, :]
    tile = m[:, None] * N + n[None, :]
    bc = (b * G + h // (H // G)).to(tl.int64) * (R * SP * N) + t0 * N
    table = bh * SP + t0
    for _ in tl.range(CHUNKS):
        cos, sin = _cos_sin_of(cos_sin_ptr + table * (2 * A), 0, N, A, L)
        q = _rotated(tl.load(cn_ptr + bc + rows) + tl.load(c_bias_ptr + bias), cos, sin, R, L, N)
        tl.store(q_ptr + table * (R * N) + tile, q.to(DT))
        k = _rotated(tl.load(bn_ptr + bc + rows) + tl.load(b_bias_ptr + bias), cos, sin, R, L, N)
        tl.store(k_ptr + table * (R * N) + tile, k.to(DT))
        bc += L * N
        table += L


@triton.jit
def chunk_state_bwd(q_ptr, do_ptr, la_ptr, w_ptr, dstate_ptr, decay_ptr, SP, NSEG,
                    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                    CHUNKS: tl.constexpr):  # fmt: skip
    """Compute a segment's contribution to the gradient of the state before it [P, N], and its decay. Programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    DT: tl.constexpr = q_ptr.dtype.element_ty
    bh = (b * H + h).to(tl.int64)
    m, n, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)
    token = m % L
    t0 = seg * (CHUNKS * L)
    table = bh * SP + t0
    q_ptr += table * (R * N)
    do_ptr += table * (R * P)
    dstate = tl.zeros((P, N), tl.float32)
    segment_decay = 1.0
    for chunk in tl.range(CHUNKS):
        q = tl.load(q_ptr + chunk * (M * N) + m[:, None] * N + n[None, :])
        do = tl.load(do_ptr + chunk * (M * P) + m[:, None] * P + p[None, :])
        row = table + chunk * L
        from_start, _, chunk_decay = _decays(la_ptr + row, w_ptr + row, token, L)
        q = (q.to(tl.float32) * (from_start * segment_decay)[:, None]).to(DT)
        dstate = _dot(do.T, q, dstate)
        segment_decay = segment_decay * chunk_decay
    out = dstate_ptr + (bh * (NSEG + 1) + seg) * (P * N) + p[:, None] * N + n[None, :]
    tl.store(out, dstate.to(dstate_ptr.dtype.element_ty))
    tl.store(decay_ptr + bh * NSEG + seg, segment_decay)


@triton.jit
def _four_segments(base, decays, first, PN: tl.constexpr, NSEG: tl.constexpr, REVERSE: tl.constexpr):
    """Load four segments' contributions to the state and their decays; if there are fewer, the last segment is repeated."""
    added = ()
    decay = ()
    for j in tl.static_range(4):
        s = min(first + j, NSEG - 1)
        s = NSEG - 1 - s if REVERSE else s
        added = added + (tl.load(base + s * PN),)  # noqa: RUF005
        decay = decay + (tl.load(decays + s),)  # noqa: RUF005
    return added, decay


@triton.jit
def state_passing(state_ptr, decay_ptr, initial_ptr, final_ptr,
                  H: tl.constexpr, PN: tl.constexpr, NSEG: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
                  INITIAL: tl.constexpr):  # fmt: skip
    """Scan the segments' contributions, in place, into the state before each segment; in reverse, from the last, into the
    gradient of the state after each one, shifted by one. ``final`` [B, H, PN] float32 is the result at the other end.
    Programs (PN / BLOCK, H, B)."""
    bh = (tl.program_id(2) * H + tl.program_id(1)).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if INITIAL:
        carry = tl.load(initial_ptr + bh * PN + e)
    else:
        carry = tl.zeros((BLOCK,), tl.float32)
    base = state_ptr + bh * (NSEG + 1) * PN + e
    decays = decay_ptr + bh * NSEG
    DT: tl.constexpr = state_ptr.dtype.element_ty
    if REVERSE:
        tl.store(base + NSEG * PN, carry.to(DT))
    added, decay = _four_segments(base, decays, 0, PN, NSEG, REVERSE)
    for first in range(0, NSEG, 4):
        # Prefetch the next four before storing: the compiler does not move loads across stores.
        added_next, decay_next = _four_segments(base, decays, first + 4, PN, NSEG, REVERSE)
        for j in tl.static_range(4):
            if first + j < NSEG:
                s = NSEG - 1 - first - j if REVERSE else first + j
                if REVERSE:
                    carry = carry * decay[j] + added[j].to(tl.float32)
                    tl.store(base + s * PN, carry.to(DT))
                else:
                    tl.store(base + s * PN, carry.to(DT))
                    carry = carry * decay[j] + added[j].to(tl.float32)
        added, decay = added_next, decay_next
    if not REVERSE:
        tl.store(base + NSEG * PN, carry.to(DT))
    tl.store(final_ptr + bh * PN + e, carry)


# --- the scan ---------------------------------------------------------------------------------------------------------


@triton.jit
def _weights(la_q, la_k, w_k, gamma_k, at_q, at_k):
    """Weight a key's token for a query's token: γ for the same token, the decayed w for an earlier one, 0 for a later one.

    Arguments for queries and for keys broadcast against each other, so this works in both orientations.
    """
    return tl.where(at_q > at_k, exp2(la_q - la_k) * w_k, tl.where(at_q == at_k, gamma_k, 0.0))


@triton.jit
def _weighted(scores, weights, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr):
    """Multiply scores [M, M] by their tokens' weights, [M, M] or [M, L] (shared by all ranks of a column's token)."""
    if weights.shape[1] == M:
        return scores * weights
    else:
        return tl.reshape(tl.reshape(scores, (M, R, L)) * weights[:, None, :], (M, M))


@triton.jit
def _values_and_weights(x_ptr, mx_ptr, la_ptr, w_ptr, gamma_ptr, token, inside, SP,
                        M: tl.constexpr, P: tl.constexpr, L: tl.constexpr, MIMO: tl.constexpr, EVEN: tl.constexpr,
                        QUERIES_DOWN: tl.constexpr, ACROSS: tl.constexpr, VALUES: tl.constexpr = True):  # fmt: skip
    """Load a chunk's values [M, P] float32 if requested, the results of :func:`_decays`, and the weights [M, ACROSS] of
    queries by keys or keys by queries. ACROSS is M, or L (one weight per token): fewer registers, more instructions.

    The condition is always true. It keeps Triton from pipelining the loads under it, so that only descriptor loads are
    prefetched: there is not enough shared memory, nor registers, for more.
    """
    v = tl.zeros((M, P), tl.float32)
    from_start, to_end, chunk_decay = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32), 0.0
    weights = tl.zeros((M, ACROSS), tl.float32)
    if SP > 0:
        from_start, to_end, chunk_decay = _decays(la_ptr, w_ptr, token, L)
        if VALUES:
            v = _tile(x_ptr, inside, EVEN)
            if MIMO:
                v = v * tl.load(mx_ptr).to(tl.float32)
        pos = tl.arange(0, ACROSS) % L
        down, across = tl.load(la_ptr + token)[:, None], tl.load(la_ptr + pos)[None, :]
        if QUERIES_DOWN:
            w, gamma = tl.load(w_ptr + pos)[None, :], tl.load(gamma_ptr + pos)[None, :]
            weights = _weights(down, across, w, gamma, token[:, None], pos[None, :])
        else:
            w, gamma = tl.load(w_ptr + token)[:, None], tl.load(gamma_ptr + token)[:, None]
            weights = _weights(across, down, w, gamma, pos[None, :], token[:, None])
    return v, from_start, to_end, chunk_decay, weights


@triton.jit
def _values(x, mix_ptr, R: tl.constexpr, L: tl.constexpr, P: tl.constexpr, MIMO: tl.constexpr):
    """Mix x of a chunk, [L, P] or loaded by its descriptor, into the values of every rank, [M, P] float32."""
    v = _for_ranks(tl.reshape(x, (L, P)), R, L, P)
    if MIMO:
        v = v * tl.load(mix_ptr).to(tl.float32)
    return v


@triton.jit
def _sum_tokens(x, sums, DT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr):
    """Add the sum of [M, X] over tokens to ``sums`` [ROWS, X], one row per rank: a tensor-core product with 0 and 1."""
    r, m = tl.arange(0, ROWS), tl.arange(0, R * L)
    return _dot((m[None, :] // L == r[:, None]).to(DT), x.to(DT), sums)


@triton.jit
def _tokens(ptr, stride, start, S, L: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr):
    """Load x or z of a chunk, [L, P], from token ``start`` on. Padding repeats the last token, which has no effect."""
    pos, p = tl.arange(0, L), tl.arange(0, P)
    if not EVEN:
        pos = tl.minimum(pos, S - 1 - start)
    return tl.load(ptr + pos[:, None] * (stride * 8) + p[None, :])


@triton.jit
def _for_ranks(x, R: tl.constexpr, L: tl.constexpr, P: tl.constexpr):
    """Repeat [L, P] for every rank, as [M, P] float32."""
    return tl.reshape(tl.broadcast_to(x.to(tl.float32)[None, :, :], (R, L, P)), (R * L, P))


@triton.jit
def chunk_scan_fwd(x_desc, z_ptr, k_desc, q_desc, mx_ptr, mz_ptr, mo_ptr, D_ptr, norm_ptr, la_ptr, w_ptr, gamma_ptr,
                   state_ptr, y_ptr, o_desc, sz_s, sz_b, S, SP, NSEG, B, eps,
                   H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                   CHUNKS: tl.constexpr, MIMO: tl.constexpr, EVEN: tl.constexpr, RAW: tl.constexpr, GATED: tl.constexpr,
                   NORM: tl.constexpr):  # fmt: skip
    """Compute the output of a segment from the state before it: GATED, y [S, B, H, P], with NORM normed; RAW, the gate's
    input for every rank, o [B, H, SP / L, M, P]; or both. Programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    ACROSS: tl.constexpr = L if N <= 64 else M
    AHEAD: tl.constexpr = R > 1 and GATED  # prefetch z a chunk ahead: with several ranks it is small
    DT: tl.constexpr = x_desc.dtype
    bh = (b * H + h).to(tl.int64)
    m, n, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)
    token, rank, pos = m % L, m // L, tl.arange(0, L)
    t0 = seg * (CHUNKS * L)
    mix = h * (R * P) + rank[:, None] * P + p[None, :]
    z_rows = token[:, None] * (sz_s * 8) + p[None, :]
    y_rows = pos[:, None] * (B * H * P) + p[None, :]
    table = bh * SP + t0
    z_ptr += t0.to(tl.int64) * (sz_s * 8) + b.to(tl.int64) * sz_b * 8 + h * P
    if GATED:
        y_ptr += (t0.to(tl.int64) * B + b) * (H * P) + h * P
    skip = tl.load(D_ptr + h).to(tl.float32)
    state = tl.load(state_ptr + (bh * (NSEG + 1) + seg) * (P * N) + p[:, None] * N + n[None, :]).to(tl.float32)
    if AHEAD:
        z = _tokens(z_ptr, sz_s, t0, S, L, P, EVEN)
    for chunk in tl.range(CHUNKS):
        start = t0 + chunk * L
        if AHEAD:
            following = min(chunk + 1, CHUNKS - 1) * L
            z_next = _tokens(z_ptr + following * (sz_s * 8), sz_s, t0 + following, S, L, P, EVEN)
        row = table + chunk * L
        first = (row * R).to(tl.int32)
        k, q = k_desc.load([first, 0]), q_desc.load([first, 0])
        inside = (start + token < S)[:, None]
        v = _values(x_desc.load([start, b, h, 0]), mx_ptr + mix, R, L, P, MIMO)
        _, from_start, to_end, chunk_decay, weights = _values_and_weights(
            None, None, la_ptr + row, w_ptr + row, gamma_ptr + row, token, None, SP, M, P, L, MIMO, True, True, ACROSS, False,
        )  # fmt: skip
        rounded = state.to(DT)
        state = _dot((v * to_end[:, None]).to(DT).T, k, state * chunk_decay)
        v = v.to(DT)
        o = _dot(q, rounded.T) * from_start[:, None]
        scores = _dot(q, k.T)
        scores = _weighted(scores, weights, M, R, L) + tl.where(m[:, None] == m[None, :], skip, 0.0)
        o = _dot(scores.to(DT), v, o)
        if RAW:
            o_desc.store([first, 0], o.to(DT))
        if GATED:
            o = o.to(DT).to(tl.float32)
            if AHEAD:
                gate = _for_ranks(z, R, L, P)
            else:
                gate = _tile(z_ptr + chunk * L * (sz_s * 8) + z_rows, inside, EVEN)
            if MIMO:
                o = o * _silu(gate * tl.load(mz_ptr + mix).to(tl.float32)) * tl.load(mo_ptr + mix).to(tl.float32)
            else:
                o = o * _silu(gate)
            mixed = _over_ranks(o, R, L, P).to(DT)  # here, not after the norm: rank 4 would spill
            if NORM:
                mixed = mixed.to(tl.float32)
                scale = tl.rsqrt(tl.sum(mixed * mixed, 1) / P + eps)
                mixed = mixed * scale[:, None] * tl.load(norm_ptr + h * P + p).to(tl.float32)[None, :]
                mixed = mixed.to(DT)
            if EVEN:
                tl.store(y_ptr + y_rows, mixed)
            else:
                tl.store(y_ptr + y_rows, mixed, mask=(start + pos < S)[:, None])
            y_ptr += L * B * (H * P)
        if AHEAD:
            z = z_next


@triton.jit
def _gate_inputs(z_ptr, dy_ptr, y_ptr, sz_s, sy_s, first, t0, S,
                 R: tl.constexpr, P: tl.constexpr, L: tl.constexpr, TOKENS: tl.constexpr,
                 EVEN: tl.constexpr):  # fmt: skip
    """Load z, dy and every rank's y of TOKENS tokens of a segment, [TOKENS, P]."""
    pos, p = tl.arange(0, TOKENS), tl.arange(0, P)
    t = first + pos[:, None]
    if EVEN:
        z = tl.load(z_ptr + t * (sz_s * 8) + p[None, :])
        dy = tl.load(dy_ptr + t * (sy_s * 8) + p[None, :])
    else:
        z = tl.load(z_ptr + t * (sz_s * 8) + p[None, :], mask=t0 + t < S, other=0.0)
        dy = tl.load(dy_ptr + t * (sy_s * 8) + p[None, :], mask=t0 + t < S, other=0.0)
    ys = ()
    for rank in tl.static_range(R):
        at = first // L * (R * L * P) + rank * (L * P) + first % L * P
        ys = ys + (tl.load(y_ptr + at + pos[:, None] * P + p[None, :]),)  # noqa: RUF005
    return z, dy, ys


@triton.jit
def _sigmoids(z, mz_ptr, R: tl.constexpr, P: tl.constexpr, MIMO: tl.constexpr):
    """Compute every rank's sigmoid(z · mimo_z), [TOKENS, P]."""
    sigmoids = ()
    for rank in tl.static_range(R):
        u = z
        if MIMO:
            u = z * tl.load(mz_ptr + rank * P).to(tl.float32)[None, :]
        sigmoids = sigmoids + (_sigmoid(u),)  # noqa: RUF005
    return sigmoids


@triton.jit
def gate_bwd(x_ptr, z_ptr, dy_ptr, mx_ptr, mz_ptr, mo_ptr, norm_ptr, y_ptr, do_ptr, dz_ptr, dmz_ptr, dmo_ptr, dD_ptr,
             dnorm_ptr, sx_s, sx_b, sz_s, sz_b, sy_s, sy_b, sg_s, sg_b, part_s, S, SP, NSEG, eps,
             H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, L: tl.constexpr, CHUNKS: tl.constexpr, MIMO: tl.constexpr,
             EVEN: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Backward of the gate, the rank mix and, with NORM, the norm: from the gate's input ``y`` [B, H, SP / L, M, P], of a RAW
    scan, to its gradient ``do``, which may overwrite it; dz; and one partial sum per segment of the gradients of mimo_z,
    mimo_o, D and the norm's weight. Programs (H, NSEG, B).

    Rank by rank, in tiles [TOKENS, P]: sums over ranks stay in a thread, and register pressure is low."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t0 = seg * (CHUNKS * L)
    TOKENS: tl.constexpr = min(L, max(4, 16 // R))
    pos, p = tl.arange(0, TOKENS), tl.arange(0, P)
    tile = pos[:, None] * P + p[None, :]
    mix = h * (R * P) + p
    dz_rows = pos[:, None] * (sg_s * 8) + p[None, :]
    y_ptr += ((b * H + h).to(tl.int64) * SP + t0) * (R * P)
    do_ptr += ((b * H + h).to(tl.int64) * SP + t0) * (R * P)
    x_ptr += t0.to(tl.int64) * (sx_s * 8) + b.to(tl.int64) * sx_b * 8 + h * P
    z_ptr += t0.to(tl.int64) * (sz_s * 8) + b.to(tl.int64) * sz_b * 8 + h * P
    dy_ptr += t0.to(tl.int64) * (sy_s * 8) + b.to(tl.int64) * sy_b * 8 + h * P
    dz_ptr += t0.to(tl.int64) * (sg_s * 8) + b.to(tl.int64) * sg_b * 8 + h * P
    dmz = ()
    dmo = ()
    for _ in tl.static_range(R):
        dmz = dmz + (tl.zeros((TOKENS, P), tl.float32),)  # noqa: RUF005
        dmo = dmo + (tl.zeros((TOKENS, P), tl.float32),)  # noqa: RUF005
    dD = tl.zeros((TOKENS, P), tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + h * P + p).to(tl.float32)[None, :]
        dnorm = tl.zeros((TOKENS, P), tl.float32)
    STEPS: tl.constexpr = CHUNKS * L // TOKENS
    z, dy, ys = _gate_inputs(z_ptr, dy_ptr, y_ptr, sz_s, sy_s, 0, t0, S, R, P, L, TOKENS, EVEN)
    for step in tl.range(STEPS):
        first = step * TOKENS
        # Prefetch the next tokens' inputs before storing: the compiler does not move loads across stores.
        z_next, dy_next, ys_next = _gate_inputs(
            z_ptr, dy_ptr, y_ptr, sz_s, sy_s, min(step + 1, STEPS - 1) * TOKENS, t0, S, R, P, L, TOKENS, EVEN
        )  # fmt: skip
        dz = tl.zeros((TOKENS, P), tl.float32)
        z, dy = z.to(tl.float32), dy.to(tl.float32)
        x = _tile(x_ptr + (first + pos[:, None]) * (sx_s * 8) + p[None, :], (t0 + first + pos < S)[:, None], EVEN)
        sigmoids = _sigmoids(z, mz_ptr + mix, R, P, MIMO)
        if NORM:
            out = tl.zeros((TOKENS, P), tl.float32)
            for rank in tl.static_range(R):
                gated = ys[rank].to(tl.float32) * z * sigmoids[rank]
                if MIMO:
                    mz = tl.load(mz_ptr + mix + rank * P).to(tl.float32)
                    mo = tl.load(mo_ptr + mix + rank * P).to(tl.float32)
                    gated = gated * (mz * mo)[None, :]
                out += gated
            scale = tl.rsqrt(tl.sum(out * out, 1) / P + eps)[:, None]
            out = out * scale
            dnorm += dy * out
            dy = dy * weight
            dy = scale * (dy - out * (tl.sum(dy * out, 1) / P)[:, None])
        dmz_sum = ()
        dmo_sum = ()
        dos = ()
        for rank in tl.static_range(R):
            y = ys[rank].to(tl.float32)
            s = sigmoids[rank]
            if MIMO:
                mx = tl.load(mx_ptr + mix + rank * P).to(tl.float32)[None, :]
                mz = tl.load(mz_ptr + mix + rank * P).to(tl.float32)[None, :]
                mixed = dy * tl.load(mo_ptr + mix + rank * P).to(tl.float32)[None, :]
                u = z * mz
                dmo_sum = dmo_sum + (dmo[rank] + dy * y * (u * s),)  # noqa: RUF005
                du = mixed * y * (s * (1.0 + u * (1.0 - s)))
                dmz_sum = dmz_sum + (dmz[rank] + du * z,)  # noqa: RUF005
                dz += du * mz
                do = mixed * (u * s)
                dD += do * mx * x
            else:
                dz += dy * y * (s * (1.0 + z * (1.0 - s)))
                do = dy * (z * s)
                dD += do * x
            dos = dos + (do.to(do_ptr.dtype.element_ty),)  # noqa: RUF005
        for rank in tl.static_range(R):
            tl.store(do_ptr + first // L * (R * L * P) + rank * (L * P) + first % L * P + tile, dos[rank])
        if MIMO:
            dmz = dmz_sum
            dmo = dmo_sum
        dz = dz.to(dz_ptr.dtype.element_ty)
        if EVEN:
            tl.store(dz_ptr + first * (sg_s * 8) + dz_rows, dz)
        else:
            tl.store(dz_ptr + first * (sg_s * 8) + dz_rows, dz, mask=(t0 + first + pos < S)[:, None])
        z, dy, ys = z_next, dy_next, ys_next
    part = (b * NSEG + seg).to(tl.int64) * part_s
    tl.store(dD_ptr + part + h, tl.sum(tl.sum(dD, 1), 0))
    if NORM:
        tl.store(dnorm_ptr + part + h * P + p, tl.sum(dnorm, 0))
    if MIMO:
        for rank in tl.static_range(R):
            tl.store(dmz_ptr + part + h * (R * P) + rank * P + p, tl.sum(dmz[rank], 0))
            tl.store(dmo_ptr + part + h * (R * P) + rank * P + p, tl.sum(dmo[rank], 0))


@triton.jit
def chunk_scan_bwd_queries(x_desc, k_desc, do_desc, mx_ptr, la_ptr, w_ptr, gamma_ptr, state_ptr, dq_desc, SP, NSEG,
                           H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                           CHUNKS: tl.constexpr, MIMO: tl.constexpr):  # fmt: skip
    """Compute the gradients of the queries [B, H, SP / L, M, N]; first token to last; programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    DT: tl.constexpr = x_desc.dtype
    bh = (b * H + h).to(tl.int64)
    m, n, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)
    token, rank = m % L, m // L
    t0 = seg * (CHUNKS * L)
    mix = h * (R * P) + rank[:, None] * P + p[None, :]
    table = bh * SP + t0
    state = tl.load(state_ptr + (bh * (NSEG + 1) + seg) * (P * N) + p[:, None] * N + n[None, :]).to(tl.float32)
    for chunk in tl.range(CHUNKS):
        row = table + chunk * L
        first = (row * R).to(tl.int32)
        k, do = k_desc.load([first, 0]), do_desc.load([first, 0])
        v = _values(x_desc.load([t0 + chunk * L, b, h, 0]), mx_ptr + mix, R, L, P, MIMO)
        _, from_start, to_end, chunk_decay, weights = _values_and_weights(
            None, None, la_ptr + row, w_ptr + row, gamma_ptr + row, token, None, SP, M, P, L, MIMO, True, True, M, False,
        )  # fmt: skip
        rounded = state.to(DT)
        state = _dot((v * to_end[:, None]).to(DT).T, k, state * chunk_decay)
        dweights = _dot(do, v.to(DT).T)
        dweights = _weighted(dweights, weights, M, R, L).to(DT)
        dq = _dot(do, rounded) * from_start[:, None]
        dq = _dot(dweights, k, dq)
        dq_desc.store([first, 0], dq.to(DT))


@triton.jit
def chunk_scan_bwd_keys(x_ptr, k_desc, q_desc, do_desc, mx_ptr, D_ptr, la_ptr, w_ptr, gamma_ptr, state_ptr, dstate_ptr,
                        dk_desc, dq_desc, dx_ptr, dmx_ptr, dgamma_ptr, sx_s, sx_b, sg_s, sg_b, part_s, S, SP, NSEG,
                        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                        CHUNKS: tl.constexpr, MIMO: tl.constexpr, EVEN: tl.constexpr, KEYS: tl.constexpr,
                        VALUES: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    """KEYS: the gradients of the keys [B, H, SP / L, M, N]. VALUES: those of x, of mimo_x (a partial sum per segment) and of γ.
    One at a time if both do not fit in registers. QUERIES, with KEYS and segments of one chunk: also those of the queries,
    which may overwrite ``do``. Last token to first; programs (H, NSEG, B)."""
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = L * R
    ROWS: tl.constexpr = 16
    DT: tl.constexpr = x_ptr.dtype.element_ty
    bh = (b * H + h).to(tl.int64)
    m, n, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, P)
    token, rank, pos = m % L, m // L, tl.arange(0, L)
    t0 = seg * (CHUNKS * L)
    mix = h * (R * P) + rank[:, None] * P + p[None, :]
    x_rows = token[:, None] * (sx_s * 8) + p[None, :]
    dx_rows = pos[:, None] * (sg_s * 8) + p[None, :]
    table = bh * SP + t0
    boundary = (bh * (NSEG + 1) + seg) * (P * N) + p[:, None] * N + n[None, :]
    x_ptr += t0.to(tl.int64) * (sx_s * 8) + b.to(tl.int64) * sx_b * 8 + h * P
    dx_ptr += t0.to(tl.int64) * (sg_s * 8) + b.to(tl.int64) * sg_b * 8 + h * P
    skip = tl.load(D_ptr + h).to(tl.float32)
    dstate = tl.load(dstate_ptr + boundary + P * N).to(tl.float32)
    dmx = tl.zeros((ROWS, P), tl.float32)
    for back in tl.range(CHUNKS):
        chunk = CHUNKS - 1 - back
        start = t0 + chunk * L
        row = table + chunk * L
        first = (row * R).to(tl.int32)
        k, q, do = k_desc.load([first, 0]), q_desc.load([first, 0]), do_desc.load([first, 0])
        inside = (start + token < S)[:, None]
        x_at = x_ptr + chunk * L * (sx_s * 8) + x_rows
        v, from_start, to_end, chunk_decay, weights = _values_and_weights(
            x_at, mx_ptr + mix, la_ptr + row, w_ptr + row, gamma_ptr + row, token, inside, SP, M, P, L, MIMO, EVEN, False, L
        )  # fmt: skip
        v = v.to(DT)
        rounded = dstate.to(DT)
        do_decayed = (do.to(tl.float32) * from_start[:, None]).to(DT)
        dstate = _dot(do_decayed.T, q, dstate * chunk_decay)
        dweights = _dot(v, do.T)
        if VALUES:
            scores = _dot(k, q.T)
            dgamma = tl.sum(tl.where(token[:, None] == token[None, :], dweights * scores, 0.0), 1)
            tl.store(dgamma_ptr + row + pos, _rows_over_ranks(dgamma, R, L))
            scores = (_weighted(scores, weights, M, R, L) + tl.where(m[:, None] == m[None, :], skip, 0.0)).to(DT)
            dv = _dot(k, rounded.T) * to_end[:, None]
            dv = _dot(scores, do, dv).to(DT).to(tl.float32)
            if MIMO:
                # Reload x and mimo_x from the cache: there are not enough registers to hold them.
                dmx = _sum_tokens(dv * _tile(x_at, inside, EVEN), dmx, DT, R, L, ROWS)
                dv = dv * tl.load(mx_ptr + mix).to(tl.float32)
            dx = _over_ranks(dv, R, L, P).to(DT)
            out = dx_ptr + chunk * L * (sg_s * 8) + dx_rows
            if EVEN:
                tl.store(out, dx)
            else:
                tl.store(out, dx, mask=(start + pos < S)[:, None])
        if KEYS:
            dweights = _weighted(dweights, weights, M, R, L).to(DT)
            dk = _dot(v, rounded) * to_end[:, None]
            dk = _dot(dweights, q, dk)
            dk_desc.store([first, 0], dk.to(DT))
            if QUERIES:
                dq = _dot(do, tl.load(state_ptr + boundary)) * from_start[:, None]
                dq = _dot(dweights.T, k, dq)
                dq_desc.store([first, 0], dq.to(DT))
    if MIMO and VALUES:
        r = tl.arange(0, ROWS)
        part = (b * NSEG + seg).to(tl.int64) * part_s + h * (R * P) + r[:, None] * P + p[None, :]
        tl.store(dmx_ptr + part, dmx, mask=(r < R)[:, None])


@triton.jit
def boundary_gradients(state_ptr, dstate_ptr, value_ptr, angle_ptr, BOUNDARIES,
                       H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, A: tl.constexpr):  # fmt: skip
    """Compute the gradients with respect to the log decay, ``value`` [B, H, NSEG + 1], and θ's increment, ``angle`` [B, H,
    NSEG + 1, A], at each segment boundary, ends included, from the state there and its gradient. Programs (H, NSEG + 1,
    B)."""
    at = (tl.program_id(2) * H + tl.program_id(0)).to(tl.int64) * BOUNDARIES + tl.program_id(1)
    n, p, i = tl.arange(0, N), tl.arange(0, P), tl.arange(0, N // 2)
    tile = at * (P * N) + p[:, None] * N + n[None, :]
    first, second = tl.split(tl.reshape(tl.load(state_ptr + tile).to(tl.float32), (P, N // 2, 2)))
    d_first, d_second = tl.split(tl.reshape(tl.load(dstate_ptr + tile).to(tl.float32), (P, N // 2, 2)))
    tl.store(value_ptr + at, tl.sum(tl.sum(d_first * first + d_second * second, 1), 0))
    tl.store(angle_ptr + at * A + i, tl.sum(d_first * second - d_second * first, 0), mask=i < A)


@triton.jit
def rotate_bwd(bn_ptr, cn_ptr, bias_ptr, dk_ptr, dq_ptr, cos_sin_ptr, dnormed_ptr, dbias_ptr, value_ptr, drotation_ptr, SP, B,
               H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, A: tl.constexpr, L: tl.constexpr,
               COLUMNS: tl.constexpr, SHARES: tl.constexpr):  # fmt: skip
    """Turn the gradients of keys, then of queries, into those of normed B and C, summed over a program's share of a group's
    heads [SHARES, 2, B, G, R, SP, N], of the biases (one partial sum per chunk, [2, B, SP / L, H, R, N]) and of θ [2, B, H,
    SP, A]; also store each token's dot product of keys (queries) with their gradients, ``value`` [2, N / COLUMNS, B, H,
    SP], in parts by columns. Programs (SP / L, SHARES · G · N / COLUMNS, 2·B)."""
    chunk, table = tl.program_id(0), tl.program_id(2)
    PARTS: tl.constexpr = N // COLUMNS
    HEADS: tl.constexpr = H // G // SHARES
    part, place = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
    g, share = place // SHARES, place % SHARES
    M: tl.constexpr = L * R
    if table < B:
        normed_ptr, drow_ptr = bn_ptr, dk_ptr
    else:
        normed_ptr, drow_ptr = cn_ptr, dq_ptr
    b, which = table % B, (table // B).to(tl.int64)
    column = part * COLUMNS
    value_ptr += (which * PARTS + part) * (B * H * SP)
    dnormed_ptr += share.to(tl.int64) * (tl.num_programs(2) * G * R) * SP * N
    drotation_ptr += which * (B * H * SP) * A
    m, n, i = tl.arange(0, M), column + tl.arange(0, COLUMNS), column // 2 + tl.arange(0, COLUMNS // 2)
    pos, r = tl.arange(0, L), tl.arange(0, R)
    token, rank = m % L, m // L
    tile = m[:, None] * N + n[None, :]
    rows = (rank * SP + chunk * L + token)[:, None] * N + n[None, :]
    normed_ptr += (b * G + g).to(tl.int64) * (R * SP * N)
    dnormed_ptr += (table * G + g).to(tl.int64) * (R * SP * N)
    shown = tl.broadcast_to((i < A)[None, :], (L, COLUMNS // 2))
    dnormed = tl.zeros((R, L, COLUMNS), tl.float32)
    for head in range(HEADS):
        h = place * HEADS + head
        row = (b * H + h).to(tl.int64) * SP + chunk * L
        cos, sin = _cos_sin_of(cos_sin_ptr + row * (2 * A), column, COLUMNS, A, L)
        bias = (which * H + h) * (R * N) + rank[:, None] * N + n[None, :]
        first, second = _planes(tl.load(normed_ptr + rows) + tl.load(bias_ptr + bias), R, L, COLUMNS)
        rotated_first, rotated_second = _planes(tl.load(drow_ptr + row * (R * N) + tile), R, L, COLUMNS)
        d_first = rotated_first * cos + rotated_second * sin
        d_second = rotated_second * cos - rotated_first * sin
        # Rotating both leaves the dot product of a plane's key and its gradient unchanged.
        tl.store(value_ptr + row + pos, tl.sum(tl.sum(first * d_first + second * d_second, 0), 1))
        drotation = tl.sum(first * d_second - second * d_first, 0)
        tl.store(drotation_ptr + row * A + pos[:, None] * A + i[None, :], drotation, mask=shown)
        back = tl.reshape(tl.join(d_first, d_second), (R, L, COLUMNS))
        dnormed += back
        at = ((table * (SP // L) + chunk) * H + h).to(tl.int64) * (R * N) + r[:, None] * N + n[None, :]
        tl.store(dbias_ptr + at, tl.sum(back, 1))
    tl.store(dnormed_ptr + rows, tl.reshape(dnormed, (M, COLUMNS)))


# --- gradients of the tables ------------------------------------------------------------------------------------------


@triton.jit
def tables_bwd(dd_dt_ptr, dd_A_ptr, trap_ptr, angles_ptr, dt_bias_ptr, seq_ptr, w_ptr, gamma_ptr, value_ptr, dgamma_ptr,
               drotation_ptr, boundary_value_ptr, boundary_angle_ptr, dtheta_ptr, ddd_dt_ptr, ddd_A_ptr, dtrap_ptr,
               dangle_ptr, ddt_bias_ptr, dinitial_ptr, s_s, s_b, sA_s, sA_b, st_s, st_b, sa_s, sa_b, sg_s, sg_b, sgA_s,
               sgA_b, sgt_s, sgt_b, part_s, S, SP, NSEG, floor,
               H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, T: tl.constexpr, HEAVY: tl.constexpr,
               PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Turn the gradients of the scan into those of its projections, [S, B, H]; programs (H, NSEG, B).

    The gradient of a_t is E_t, summed over the token pairs that span the boundary before token t. With X_t = C_t·dC_t and
    Y_t = B_t·dB_t, E_t − E_{t+1} = X_t − Y_t, and E is known at the boundaries of segments. The same with the rotated products
    gives the gradient of θ's increment. ``dangle`` [B, H, SP, A] is a head's Δ times it, still to be summed over the heads;
    ``ddt_bias`` a partial sum [H] per segment, with stride ``part_s``; ``dtheta`` [B, H, A] (FINAL) the incoming gradient of
    the last token's θ; ``dinitial`` [B, H, A] (INITIAL) the gradient of the θ before the first token.
    """
    h, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh = (b * H + h).to(tl.int64)
    t = seg * T + tl.arange(0, T)
    inside = t < S
    i = tl.arange(0, AP)
    columns = tl.broadcast_to((i < A)[None, :], (T, AP))
    at = bh * SP + t
    w, gamma, dgamma = tl.load(w_ptr + at), tl.load(gamma_ptr + at), tl.load(dgamma_ptr + at)
    one_part = tl.num_programs(2).to(tl.int64) * H * SP
    k_value = _in_parts(value_ptr, at, t < SP, one_part, PARTS)
    value = _in_parts(value_ptr + PARTS * one_part, at, t < SP, one_part, PARTS) - k_value
    # The values at the boundaries are exact; the running sum's rounding error is spread evenly between them.
    place = bh * (NSEG + 1) + seg
    fraction = tl.arange(0, T).to(tl.float32) / T
    summed = tl.cumsum(value, 0)
    start = tl.load(boundary_value_ptr + place)
    da = start - (summed - value) + fraction * (tl.load(boundary_value_ptr + place + 1) + tl.sum(value, 0) - start)
    dw = tl.where(w > 0, (k_value - gamma * dgamma) / tl.where(w > 0, w, 1.0), 0.0)
    # The previous token's w contains this token's pending part.
    has_before = inside & (t > 0)
    if PACKED:
        has_before = has_before & (_starts(seq_ptr, b, t, S) == 0)
    before = at - 1
    w_before = tl.load(w_ptr + before, mask=has_before, other=0.0)
    dw_before = _in_parts(value_ptr, before, has_before, one_part, PARTS)
    dw_before -= tl.load(gamma_ptr + before, mask=has_before, other=0.0) * tl.load(
        dgamma_ptr + before, mask=has_before, other=0.0
    )
    dpending = tl.where(w_before > 0, dw_before / tl.where(w_before > 0, w_before, 1.0), 0.0)
    down = dgamma + dw

    planes = (bh * SP + t)[:, None] * A + i[None, :]
    drotation = tl.load(drotation_ptr + planes, mask=columns, other=0.0)
    drotation += tl.load(drotation_ptr + one_part * A + planes, mask=columns, other=0.0)
    start = tl.load(boundary_angle_ptr + place * A + i, mask=i < A, other=0.0)
    end = tl.load(boundary_angle_ptr + (place + 1) * A + i, mask=i < A, other=0.0)
    dtheta = (
        start[None, :]
        - (tl.cumsum(drotation, 0) - drotation)
        + fraction[:, None] * (end + tl.sum(drotation, 0) - start)[None, :]
    )
    if PACKED:
        # No gradient crosses the start of a document.
        begins = _starts(seq_ptr, b, t, S)
        da = tl.where(begins, 0.0, da)
        dtheta = tl.where(begins[:, None], 0.0, dtheta)
    if FINAL:
        outside = tl.broadcast_to(tl.load(dtheta_ptr + bh * A + i, mask=i < A, other=0.0)[None, :], (T, AP))
        if PACKED:
            of_last = _documents(seq_ptr, b, t, S) == _documents(seq_ptr, b, S - 1, S)
            outside = tl.where(of_last[:, None], outside, 0.0)
        dtheta += outside

    delta = _steps(dd_dt_ptr, dt_bias_ptr, s_s, s_b, t, b, h, S)
    lam = _lambdas(trap_ptr, st_s, st_b, t, b, h, S)
    u = tl.load(dd_A_ptr + t.to(tl.int64) * sA_s + b.to(tl.int64) * sA_b + h, mask=inside, other=0.0).to(tl.float32)
    rate, slope = _rate(u, HEAVY)
    angle = _tanh_angles(angles_ptr, sa_s, sa_b, t, b, S, A, AP) * PI
    floored = tl.maximum(rate, floor, propagate_nan=tl.PropagateNan.ALL)
    ddelta = lam * down + (1.0 - lam) * dpending - floored * da + tl.sum(dtheta * angle, 1)
    v = tl.load(dd_dt_ptr + t.to(tl.int64) * s_s + b.to(tl.int64) * s_b + h, mask=inside, other=0.0).to(tl.float32)
    ddd_dt = tl.where(inside, ddelta * _sigmoid(v + tl.load(dt_bias_ptr + h).to(tl.float32)), 0.0)
    t, b = t.to(tl.int64), b.to(tl.int64)
    DT: tl.constexpr = ddd_dt_ptr.dtype.element_ty
    tl.store(ddd_dt_ptr + t * sg_s + b * sg_b + h, ddd_dt.to(DT), mask=inside)
    ddd_A = tl.where(rate < floor, 0.0, -da * delta * slope)
    tl.store(ddd_A_ptr + t * sgA_s + b * sgA_b + h, ddd_A.to(DT), mask=inside)
    dtrap = delta * (down - dpending) * lam * (1.0 - lam)
    tl.store(dtrap_ptr + t * sgt_s + b * sgt_b + h, dtrap.to(DT), mask=inside)
    tl.store(ddt_bias_ptr + (b * NSEG + seg) * part_s + h, tl.sum(ddd_dt, 0))
    tl.store(dangle_ptr + planes, dtheta * delta[:, None], mask=columns)
    if INITIAL:
        first = tl.broadcast_to(i[None, :], (T, AP))
        restarts = columns & (t == 0)[:, None]
        tl.store(dinitial_ptr + bh * A + first, dtheta, mask=restarts)


@triton.jit
def angles_bwd(angles_ptr, dangle_ptr, out_ptr, sa_s, sa_b, sg_s, sg_b, S, SP,
               H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, TOKENS: tl.constexpr,
               HEADS: tl.constexpr):  # fmt: skip
    """Sum the heads' gradients of the angles [B, H, SP, A] into that of their projection [S, B, A]; programs (S / TOKENS,
    B)."""
    b = tl.program_id(1)
    t, i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, AP)
    inside = (t < S)[:, None] & (i < A)[None, :]
    total = tl.zeros((TOKENS, AP), tl.float32)
    for first in tl.range(0, H, HEADS):
        h = first + tl.arange(0, HEADS)
        part = ((b * H + h).to(tl.int64) * SP)[:, None, None] + t[None, :, None]
        total += tl.sum(tl.load(dangle_ptr + part * A + i, mask=(h < H)[:, None, None] & inside[None], other=0.0), 0)
    angle = _tanh_angles(angles_ptr, sa_s, sa_b, t, b, S, A, AP)
    out = out_ptr + t.to(tl.int64)[:, None] * sg_s + b.to(tl.int64) * sg_b + i[None, :]
    tl.store(out, (total * PI * (1.0 - angle * angle)).to(out_ptr.dtype.element_ty), mask=inside)
