"""Triton epilogue of the M²RNN recurrence: skip, output gate and norm; forward and backward.

    z = y + D ⊙ v        u = z ⊙ SiLU(g)        out = u · rsqrt(mean(u²) + eps) ⊙ weight

y is passed as one partial sum per row block of the recurrence. Without NORM the caller applies the norm, given u and Σ u².

Legend: S tokens, P padded tokens, B batch, H heads, V value dim, C = H·V channels, R row blocks, N programs of the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

TOKENS = 4
"""Tokens per program of the forward pass."""


@triton.jit(do_not_specialize=["S", "P", "width"])
def skip_gate_norm(
    y_RBHPV,
    v_BHPV,
    g_SBHV,
    D,
    weight,
    out_SBC,
    y_SBC,
    squares_SB,
    g_s,
    g_b,
    g_h,
    S,
    P,
    width,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    C_POWER: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program (token block, batch row): all channels of a few tokens. Also write the summed y and Σ u²."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    c = tl.arange(0, C_POWER)
    head, in_C = c // V, c < H * V
    seen = (t < S)[:, None] & in_C[None, :]
    rows = ((b * H + head)[None, :] * P + t[:, None]) * V + (c % V)[None, :]
    y = tl.zeros([TOKENS, C_POWER], tl.float32)
    for block in tl.static_range(R):
        y += tl.load(y_RBHPV + block * (B * H).to(tl.int64) * P * V + rows, mask=seen, other=0.0)
    to = (t.to(tl.int64) * B + b)[:, None] * (H * V) + c[None, :]
    tl.store(y_SBC + to, y, mask=seen)
    v = tl.load(v_BHPV + rows, mask=seen, other=0.0).to(tl.float32)
    z = y + tl.load(D + c, mask=in_C, other=0.0)[None, :] * v
    gates = (t.to(tl.int64) * g_s + b * g_b)[:, None] + (head * g_h + c % V)[None, :]
    g = tl.load(g_SBHV + gates, mask=seen, other=0.0).to(tl.float32)
    u = z * g * tl.sigmoid(g)
    squares = tl.sum(u * u, 1)
    tl.store(squares_SB + t * B + b, squares, mask=t < S)
    if NORM:
        w = tl.load(weight + c, mask=in_C, other=0.0).to(tl.float32)
        u = u * tl.rsqrt(squares / width + eps)[:, None] * w[None, :]
    tl.store(out_SBC + to, u.to(out_SBC.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["S", "P", "B", "width"])
def skip_gate_norm_backward(
    dout_SBC,
    dsquares_SB,
    y_SBC,
    v_BHPV,
    g_SBHV,
    D,
    weight,
    squares_SB,
    dy_BHPV,
    dg_SBC,
    dD_NC,
    dweight_NC,
    g_s,
    g_b,
    g_h,
    S,
    P,
    B,
    width,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    C_POWER: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program n of N: tokens n, n + N, … of all B · P. Writes dy (= dz), dg, and partial sums of dD and dweight.

    ``dout`` is the gradient of the normed output; without NORM that of u, and ``dsquares`` that of Σ u².
    """
    c = tl.arange(0, C_POWER)
    head, in_C = c // V, c < H * V
    skip = tl.load(D + c, mask=in_C, other=0.0)
    dD = tl.zeros([C_POWER], tl.float32)
    if NORM:
        w = tl.load(weight + c, mask=in_C, other=0.0).to(tl.float32)
        dw = tl.zeros([C_POWER], tl.float32)
    for row in range(tl.program_id(0), B * P, tl.num_programs(0)):
        b, t = (row // P).to(tl.int64), row % P
        seen = in_C & (t < S)
        rows = ((b * H + head) * P + t) * V + c % V
        at = (t.to(tl.int64) * B + b) * (H * V) + c
        v = tl.load(v_BHPV + rows, mask=seen, other=0.0).to(tl.float32)
        z = tl.load(y_SBC + at, mask=seen, other=0.0) + skip * v
        g = tl.load(g_SBHV + t.to(tl.int64) * g_s + b * g_b + head * g_h + c % V, mask=seen, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        u = z * g * s
        dout = tl.load(dout_SBC + at, mask=seen, other=0.0).to(tl.float32)
        if NORM:
            r = tl.rsqrt(tl.load(squares_SB + t * B + b, mask=t < S, other=0.0) / width + eps)
            n = u * r
            dw += dout * n
            dn = dout * w
            du = r * (dn - n * (tl.sum(dn * n, 0) / width))
        else:
            du = dout + 2.0 * u * tl.load(dsquares_SB + t * B + b, mask=t < S, other=0.0)
        dz = du * g * s
        dD += dz * v
        tl.store(dg_SBC + at, (du * z * s * (1.0 + g * (1.0 - s))).to(dg_SBC.dtype.element_ty), mask=seen)
        tl.store(dy_BHPV + rows, dz.to(dy_BHPV.dtype.element_ty), mask=in_C)
    parts = tl.program_id(0) * (H * V) + c
    tl.store(dD_NC + parts, dD, mask=in_C)
    if NORM:
        tl.store(dweight_NC + parts, dw, mask=in_C)
