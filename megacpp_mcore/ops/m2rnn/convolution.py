"""Triton prologue of the M²RNN recurrence: convolution, SiLU, forget gate, transpose to [B, H, S, ·]; forward and backward.

The inputs are strided views [S, B, …] of a projection, possibly with L rows before the first token: the convolution window of
an earlier call. The outputs are the inputs of :mod:`megacpp_mcore.ops.m2rnn.recurrence`, padded with tokens that change
nothing: q = k = v = 0 and f = 1. ``f`` is negative at the start of a document.

A program handles a block of tokens of one batch row and one *group*: q, k, :data:`HEADS` heads of v, or the forget gates.
Sums over tokens (weights, biases, A_log, dt_bias) are written as one partial sum per program; the caller adds these in a fixed
order.

Legend: S tokens, P padded tokens, B batch, K key dim, H heads, V value dim, T taps (the current token's last), N token blocks,
L rows before the first token, R row blocks of the recurrence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import softplus

HEADS = 4
"""Heads of v per group: 64 channels, as many as in q or k."""

TOKENS = 32
"""Tokens per program."""

TOKENS_BACKWARD = 16
"""Tokens per program of :func:`prepare_backward`: fewer, so that no registers spill."""


@triton.jit
def _same_document(seq_BS, b, t, other, S, L, valid, DOCUMENTS: tl.constexpr):
    """Return whether each row ``other`` is in token t's document; rows before the first token are in the first token's."""
    valid = valid & (other >= -L) & (other < S)
    if DOCUMENTS:
        own = tl.load(seq_BS + b * S + tl.maximum(t, 0), mask=valid, other=0)
        its = tl.load(seq_BS + b * S + tl.maximum(other, 0), mask=valid, other=0)
        valid = valid & (own == its)
    return valid


@triton.jit
def _convolve(
    x,
    t_stride,
    c_offsets,
    weight,
    bias,
    channel,
    t,
    in_S,
    in_C,
    seq_BS,
    b,
    S,
    L,
    T: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute the convolution before SiLU, fp32 [tokens, channels]."""
    u = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    u += tl.load(bias + channel, mask=in_C, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(T):
        seen = _same_document(seq_BS, b, t, t - back, S, L, in_S, DOCUMENTS)
        rows = (t - back + L).to(tl.int64) * t_stride
        tap = tl.load(x + rows[:, None] + c_offsets[None, :], mask=seen[:, None] & in_C[None, :], other=0.0).to(tl.float32)
        w = tl.load(weight + channel * T + (T - 1 - back), mask=in_C, other=0.0).to(tl.float32)
        u += tap * w[None, :]
    return u


@triton.jit(do_not_specialize=["S", "P", "L"])
def prepare(
    q_SBK,
    k_SBK,
    v_SBHV,
    x_f_SBH,
    qk_weight,
    qk_bias,
    v_weight,
    v_bias,
    A_log,
    dt_bias,
    seq_BS,
    q_BPK,
    k_BPK,
    v_BHPV,
    f_BHP,
    q_s,
    q_b,
    k_s,
    k_b,
    v_s,
    v_b,
    v_h,
    f_s,
    f_b,
    f_h,
    S,
    P,
    L,
    H: tl.constexpr,
    H_POWER: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Program (token block, batch row, group): convolve and transpose one group."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    in_S, in_P = t < S, t < P
    if group < 2:
        c = tl.arange(0, K)
        in_C = c < K
        channel = group * K + c
        if group == 0:
            u = _convolve(q_SBK + b * q_b, q_s, c, qk_weight, qk_bias, channel, t, in_S, in_C, seq_BS, b, S, L, T, DOCUMENTS)
            out = q_BPK
        else:
            u = _convolve(k_SBK + b * k_b, k_s, c, qk_weight, qk_bias, channel, t, in_S, in_C, seq_BS, b, S, L, T, DOCUMENTS)
            out = k_BPK
        a = tl.where(in_S[:, None], u * tl.sigmoid(u), 0.0)
        tl.store(out + (b * P + t[:, None]) * K + c[None, :], a.to(out.dtype.element_ty), mask=in_P[:, None])
    elif group < tl.num_programs(2) - 1:
        c = tl.arange(0, HEADS * V)
        head = (group - 2) * HEADS + c // V
        in_C = head < H
        offsets = head * v_h + c % V
        channel = (group - 2) * HEADS * V + c
        u = _convolve(v_SBHV + b * v_b, v_s, offsets, v_weight, v_bias, channel, t, in_S, in_C, seq_BS, b, S, L, T, DOCUMENTS)
        a = tl.where(in_S[:, None], u * tl.sigmoid(u), 0.0)
        rows = ((b * H + head)[None, :] * P + t[:, None]) * V + (c % V)[None, :]
        tl.store(v_BHPV + rows, a.to(v_BHPV.dtype.element_ty), mask=in_P[:, None] & in_C[None, :])
    else:
        h = tl.arange(0, H_POWER)
        in_H = h < H
        gated = in_S[:, None] & in_H[None, :]
        gates = (t.to(tl.int64) * f_s + b * f_b)[:, None] + (h * f_h)[None, :]
        x_f = tl.load(x_f_SBH + gates, mask=gated, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_log + h, mask=in_H, other=0.0).to(tl.float32))
        step = softplus(x_f + tl.load(dt_bias + h, mask=in_H, other=0.0)[None, :])
        f = tl.where(in_S[:, None], tl.exp(-rate[None, :] * step), 1.0)
        if DOCUMENTS:
            before = (t > 0) & in_S
            goes_on = tl.load(seq_BS + b * S + t, mask=before, other=0) == tl.load(seq_BS + b * S + t - 1, mask=before, other=0)
            f = tl.where(goes_on[:, None], f, -tl.maximum(f, 1.2e-38, propagate_nan=tl.PropagateNan.ALL))
        tl.store(f_BHP + (b * H + h)[None, :] * P + t[:, None], f, mask=in_P[:, None] & in_H[None, :])


@triton.jit(do_not_specialize=["S", "P", "L"])
def prepare_backward(
    q_SBK,
    k_SBK,
    v_SBHV,
    x_f_SBH,
    qk_weight,
    qk_bias,
    v_weight,
    v_bias,
    A_log,
    dt_bias,
    D,
    seq_BS,
    dq_BHPK,
    dk_BHPK,
    dv_RBHPV,
    dy_BHPV,
    df_RBHP,
    du_BSC,
    dx_f_SBH,
    dweight_NCX,
    dgate_NHX,
    q_s,
    q_b,
    k_s,
    k_b,
    v_s,
    v_b,
    v_h,
    f_s,
    f_b,
    f_h,
    S,
    P,
    L,
    H: tl.constexpr,
    H_POWER: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Program (token block, batch row, group): sum the recurrence's partial gradients; backward of SiLU and the gate.

    Writes ``du`` [B, S, 2K + HV], the gradient of the convolution before SiLU, and ``dx_f``; and, per program, partial sums of
    the gradients of the taps, of the bias (last on the axis of T + 1), and of A_log and dt_bias.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    B = tl.num_programs(1)
    in_S = t < S
    part = tl.program_id(0) * B + tl.program_id(1)
    C: tl.constexpr = 2 * K + H * V
    if group < 2:
        c = tl.arange(0, K)
        in_C = c < K
        channel = group * K + c
        da = tl.zeros([TOKENS, K], tl.float32)
        if group == 0:
            x, x_s, dqk = q_SBK + b * q_b, q_s, dq_BHPK
        else:
            x, x_s, dqk = k_SBK + b * k_b, k_s, dk_BHPK
        for head in tl.range(0, H, loop_unroll_factor=4):
            da += tl.load(dqk + ((b * H + head) * P + t[:, None]) * K + c[None, :], mask=in_S[:, None], other=0.0).to(
                tl.float32
            )
        _convolve_backward(
            x, x_s, c, qk_weight, qk_bias, channel, channel, t, in_S, in_C, seq_BS, b, S, L, da,
            du_BSC, dweight_NCX, part, C, T, DOCUMENTS,
        )  # fmt: skip
    elif group < tl.num_programs(2) - 1:
        c = tl.arange(0, HEADS * V)
        head = (group - 2) * HEADS + c // V
        in_C = head < H
        channel = (group - 2) * HEADS * V + c
        rows = ((b * H + head)[None, :] * P + t[:, None]) * V + (c % V)[None, :]
        seen = in_S[:, None] & in_C[None, :]
        da = tl.load(dy_BHPV + rows, mask=seen, other=0.0).to(tl.float32) * tl.load(D + channel, mask=in_C, other=0.0)[None, :]
        for block in tl.static_range(R):
            da += tl.load(dv_RBHPV + block * (B * H).to(tl.int64) * P * V + rows, mask=seen, other=0.0)
        _convolve_backward(
            v_SBHV + b * v_b, v_s, head * v_h + c % V, v_weight, v_bias, channel, 2 * K + channel, t, in_S, in_C, seq_BS, b, S,
            L, da, du_BSC, dweight_NCX, part, C, T, DOCUMENTS,
        )  # fmt: skip
    else:
        h = tl.arange(0, H_POWER)
        in_H = h < H
        gated = in_S[:, None] & in_H[None, :]
        gates = (t.to(tl.int64) * f_s + b * f_b)[:, None] + (h * f_h)[None, :]
        x_f = tl.load(x_f_SBH + gates, mask=gated, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_log + h, mask=in_H, other=0.0).to(tl.float32))[None, :]
        x_f += tl.load(dt_bias + h, mask=in_H, other=0.0)[None, :]
        step = softplus(x_f)
        df = tl.zeros([TOKENS, H_POWER], tl.float32)
        for block in tl.static_range(R):
            df += tl.load(df_RBHP + ((block * B + b) * H + h)[None, :] * P + t[:, None], mask=gated, other=0.0)
        dstep = -df * tl.exp(-rate * step) * rate
        dx_f = dstep * tl.sigmoid(x_f)
        tl.store(
            dx_f_SBH + (t.to(tl.int64) * B + b)[:, None] * H + h[None, :],
            dx_f.to(dx_f_SBH.dtype.element_ty),
            mask=gated,
        )
        tl.store(dgate_NHX + (part * H + h) * 2, tl.sum(dstep * step, 0), mask=in_H)
        tl.store(dgate_NHX + (part * H + h) * 2 + 1, tl.sum(dx_f, 0), mask=in_H)


@triton.jit
def _convolve_backward(
    x, x_s, offsets, weight, bias, channel, column, t, in_S, in_C, seq_BS, b, S, L, da, du_BSC, dweight_NCX, part,
    C: tl.constexpr, T: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Run backward of SiLU, and compute this program's partial sums of the gradients of the taps and the bias."""
    u = _convolve(x, x_s, offsets, weight, bias, channel, t, in_S, in_C, seq_BS, b, S, L, T, DOCUMENTS)
    s = tl.sigmoid(u)
    seen = in_S[:, None] & in_C[None, :]
    du = tl.where(seen, da * s * (1.0 + u * (1.0 - s)), 0.0)
    tl.store(du_BSC + (b * S + t[:, None]) * C + column[None, :], du, mask=seen)
    parts = dweight_NCX + (part * C + column) * (T + 1)
    tl.store(parts + T, tl.sum(du, 0), mask=in_C)
    for back in tl.static_range(T):
        same = _same_document(seq_BS, b, t, t - back, S, L, in_S, DOCUMENTS)
        rows = (t - back + L).to(tl.int64) * x_s
        tap = tl.load(x + rows[:, None] + offsets[None, :], mask=same[:, None] & in_C[None, :], other=0.0).to(tl.float32)
        tl.store(parts + (T - 1 - back), tl.sum(du * tap, 0), mask=in_C)


@triton.jit(do_not_specialize=["S", "L"])
def convolution_inputs_backward(
    du_BSC,
    qk_weight,
    v_weight,
    seq_BS,
    dq_SBK,
    dk_SBK,
    dv_SBC,
    S,
    L,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Program (row block, batch row, group): the gradient of the input rows, including those before the first token."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    t = row - L
    b, group, B = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(1)
    C: tl.constexpr = 2 * K + H * V
    there = t < S
    to = row.to(tl.int64) * B + b
    if group < 2:
        key = tl.arange(0, K)  # a name that the other branch does not use: shapes would have to agree
        dqk = _taps_backward(
            du_BSC, qk_weight, group * K + key, group * K + key, key < K, t, there, seq_BS, b, S, C, T, DOCUMENTS
        )
        if group == 0:
            out = dq_SBK
        else:
            out = dk_SBK
        tl.store(out + to[:, None] * K + key[None, :], dqk.to(out.dtype.element_ty), mask=there[:, None])
    else:
        c = tl.arange(0, HEADS * V)
        channel = (group - 2) * HEADS * V + c
        in_C = channel < H * V
        dx = _taps_backward(du_BSC, v_weight, channel, 2 * K + channel, in_C, t, there, seq_BS, b, S, C, T, DOCUMENTS)
        rows = to[:, None] * (H * V) + channel[None, :]
        tl.store(dv_SBC + rows, dx.to(dv_SBC.dtype.element_ty), mask=there[:, None] & in_C[None, :])


@triton.jit
def _taps_backward(
    du_BSC, weight, channel, column, in_C, t, there, seq_BS, b, S,
    C: tl.constexpr, T: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    dx = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for ahead in tl.static_range(T):
        seen = _same_document(seq_BS, b, t, t + ahead, S, 0, there, DOCUMENTS)
        du = tl.load(du_BSC + (b * S + t + ahead)[:, None] * C + column[None, :], mask=seen[:, None] & in_C[None, :], other=0.0)
        dx += du * tl.load(weight + channel * T + (T - 1 - ahead), mask=in_C, other=0.0).to(tl.float32)[None, :]
    return dx
