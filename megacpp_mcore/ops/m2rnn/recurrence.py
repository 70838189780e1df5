"""The M²RNN recurrence in Triton: the chain of states forward, its outputs, and every gradient backward.

One warp owns 16 rows of one head's state, since rows never meet. ``h·W`` of such a block is two tensor-core products whose
result lies in the registers where the next step's operand has to lie: from token to token nothing leaves the registers.
Each program writes its own rows' part of what is summed over rows or heads; nothing is added atomically, so that the same
inputs give the same bits.

Products. 16-bit inputs: each fp32 factor is cut into two bf16 parts (16 bits), and the three products that matter are summed;
fp32 inputs: fp32 products on the ordinary cores.

Backward. The forward keeps one state in ``every`` tokens. ``advance`` makes those of every :func:`block` tokens of them, all
spans side by side; ``reverse`` walks the blocks from the last to the first: eight steps forward with all states in registers,
then eight steps back (the equations stand at :class:`megacpp_mcore.ops.m2rnn.reference.M2RNNChunked`).

Legend: B batch, S tokens, padded to a multiple of :data:`PADDING`, H heads, K rows of a state, V its columns, R row blocks of
:data:`ROWS`. A padding token has k = v = q = 0 and f = 1: it changes no state and no gradient. ``f`` is negative, −f, where a
document begins and the state is set to 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError

ROWS = 16
"""Rows of a state in one program: the height of a tensor-core product."""

COLUMNS = 16
"""Columns of a state: the depth of a tensor-core product."""

PADDING = 8
"""Sequences are padded to a multiple of this many tokens."""

LOG2E_2 = tl.constexpr(2.8853900817779268)  # 2 log₂ e: exp(2x) = exp2(LOG2E_2 · x)


@triton.jit
def _split(x, PART: tl.constexpr, ASM: tl.constexpr):
    """``x`` as the sum of two numbers of 8 bits; by cutting off where ASM, else by rounding."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; .reg .f32 c, d;
            and.b32 a, $2, 0xffff0000; and.b32 b, $3, 0xffff0000;
            prmt.b32 $0, $2, $3, 0x7632;
            mov.b32 c, $2; mov.b32 d, a; sub.f32 c, c, d;
            mov.b32 d, $3; mov.b32 b, b; mov.b32 a, c; mov.b32 c, b; sub.f32 d, d, c; mov.b32 b, d;
            prmt.b32 $1, a, b, 0x7632; }""",
            "=r,=r,r,r",
            [x.to(tl.int32, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        high = x.to(PART)
        return high, (x - high.to(tl.float32)).to(PART)


@triton.jit
def _multiply(x, M, M_high, M_low, add, PART: tl.constexpr, ASM: tl.constexpr):
    """``x · M + add`` for the matrix M given whole and in parts; independent products, so that none waits for another."""
    if PART is None:
        return tl.dot(x, M, add, input_precision="ieee")
    else:
        high, low = _split(x, PART, ASM)
        zero = _opaque_zeros(add, ASM)
        return tl.dot(high, M_high, add) + (tl.dot(low, M_high, zero) + tl.dot(high, M_low, zero))


@triton.jit
def _opaque_zeros(like, ASM: tl.constexpr):
    """Zeros that Triton does not know to be zeros: it would chain the products that a sum of them is made of."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [like], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.zeros_like(like)


@triton.jit
def _step(h, pre, f, ASM: tl.constexpr):
    """The state after ``h`` for ``tanh``'s argument ``pre``, which comes times :data:`LOG2E_2` where ASM; and c, the tanh.

    Where ASM, c = 1 − 2r with r = 1/(1 + exp(2x)), two elements at a time: 1/a and 1/b are b/(ab) and a/(ab). exp is held at
    2^60, where tanh has long been 1; NaN stays NaN.
    """
    if ASM:
        r = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b, c;
            ex2.approx.ftz.f32 a, $2; ex2.approx.ftz.f32 b, $3;
            min.NaN.f32 a, a, 0f5D800000; min.NaN.f32 b, b, 0f5D800000;
            add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000;
            mul.f32 c, a, b; rcp.approx.ftz.f32 c, c;
            mul.f32 $0, c, b; mul.f32 $1, c, a; }""",
            "=f,=f,f,f",
            [pre],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
        return (f * h + (1.0 - f)) + (2.0 * f - 2.0) * r, 1.0 - 2.0 * r
    else:
        # Cephes' tanhf: an odd polynomial where 1 − exp would cancel.
        size, square = tl.abs(pre), pre * pre
        e = tl.exp(-2.0 * size)
        large = (1.0 - e) / (1.0 + e)
        p = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
        p = (p * square + 1.33314422036e-1) * square - 3.33332819422e-1
        c = tl.where(size < 0.625, pre * (p * square) + pre, tl.where(pre < 0, -large, large))
        return f * h + (1.0 - f) * c, c


@triton.jit
def _load_transition(W, c, PART: tl.constexpr, SCALE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """W [V, V] times SCALE, or its transpose; whole, and its two parts where the products are split."""
    if TRANSPOSED:
        M = tl.load(W + c[None, :] * c.shape[0] + c[:, None])
    else:
        M = tl.load(W + c[:, None] * c.shape[0] + c[None, :])
    M = M.to(tl.float32) * SCALE
    if PART is None:
        return M, M, M
    else:
        high = M.to(PART)
        return M, high, (M - high.to(tl.float32)).to(PART)


@triton.jit(do_not_specialize=["S", "H", "span", "every"])
def advance(
    q_BSK,
    k_BSK,
    v_BHSV,
    f_BHS,
    W_HVV,
    entering_BHXKV,
    y_RBHSV,
    saved_BHEKV,
    last_BHKV,
    S,
    H,
    span,
    every,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    ASM: tl.constexpr,
    ENTERING: tl.constexpr,
    READ: tl.constexpr,
    LAST: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Walk one row block through ``span`` tokens, program (batch · head, row block, span).

    ``entering`` holds the state before each span (None without ENTERING: 0). Writes y, each row block its part (READ), the
    state before every ``every``-th token (SAVE), and the last state (LAST). ``span`` and ``every`` are multiples of 4; S too.
    """
    bh, block, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    r, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    batch, head = bh // H, bh % H
    SCALE: tl.constexpr = LOG2E_2 if ASM else 1.0
    W, W_high, W_low = _load_transition(W_HVV + head * V * V, c, PART, SCALE, False)
    if ENTERING:
        entering = entering_BHXKV + (bh * tl.num_programs(2) + part) * K * V
        h = tl.load(entering + r[:, None] * V + c[None, :]).to(tl.float32)
    else:
        h = tl.zeros([ROWS, V], tl.float32)
    first = part * span
    end = tl.minimum(first + span, S)
    q_t = q_BSK + batch * S * K + r
    k_t = k_BSK + batch * S * K + r
    v_t = v_BHSV + bh * S * V + c
    f_t = f_BHS + bh * S
    y_t = v_t  # not written through
    if READ:
        y_t = y_RBHSV + ((block * tl.num_programs(0) + bh) * S) * V + c
    saved = saved_BHEKV + bh * tl.cdiv(S, every) * K * V + r[:, None] * V + c[None, :]
    # Four tokens at a time, the next four under way: a loop that Triton pipelines does not fetch scalars ahead.
    q0, k0, v0, f0 = _load_token(q_t, k_t, v_t, f_t, first, K, V, READ)
    q1, k1, v1, f1 = _load_token(q_t, k_t, v_t, f_t, first + 1, K, V, READ)
    q2, k2, v2, f2 = _load_token(q_t, k_t, v_t, f_t, first + 2, K, V, READ)
    q3, k3, v3, f3 = _load_token(q_t, k_t, v_t, f_t, first + 3, K, V, READ)
    for t in range(first, end, 4):
        if t % every == 0:
            tl.store(saved + (t // every) * K * V, h)
        n = tl.minimum(t + 4, end - 4)  # the last time, what is there already
        qa, ka, va, fa = _load_token(q_t, k_t, v_t, f_t, n, K, V, READ)
        qb, kb, vb, fb = _load_token(q_t, k_t, v_t, f_t, n + 1, K, V, READ)
        qc, kc, vc, fc = _load_token(q_t, k_t, v_t, f_t, n + 2, K, V, READ)
        qd, kd, vd, fd = _load_token(q_t, k_t, v_t, f_t, n + 3, K, V, READ)
        h = _walk(h, q0, k0, v0, f0, W, W_high, W_low, y_t + t * V, PART, ASM, READ, DOCUMENTS)
        h = _walk(h, q1, k1, v1, f1, W, W_high, W_low, y_t + t * V + V, PART, ASM, READ, DOCUMENTS)
        h = _walk(h, q2, k2, v2, f2, W, W_high, W_low, y_t + t * V + 2 * V, PART, ASM, READ, DOCUMENTS)
        h = _walk(h, q3, k3, v3, f3, W, W_high, W_low, y_t + t * V + 3 * V, PART, ASM, READ, DOCUMENTS)
        q0, k0, v0, f0 = qa, ka, va, fa
        q1, k1, v1, f1 = qb, kb, vb, fb
        q2, k2, v2, f2 = qc, kc, vc, fc
        q3, k3, v3, f3 = qd, kd, vd, fd
    if LAST:
        tl.store(last_BHKV + bh * K * V + r[:, None] * V + c[None, :], h)


@triton.jit
def _load_token(q_t, k_t, v_t, f_t, t, K: tl.constexpr, V: tl.constexpr, READ: tl.constexpr):
    k, v, f = tl.load(k_t + t * K), tl.load(v_t + t * V), tl.load(f_t + t)
    if READ:
        return tl.load(q_t + t * K), k, v, f
    else:
        return k, k, v, f


@triton.jit
def _next_state(h, k, v, f, W, W_high, W_low, PART: tl.constexpr, ASM: tl.constexpr, DOCUMENTS: tl.constexpr):
    """One token: the state after it, and its candidate c."""
    h, f = _enter(h, f, DOCUMENTS)
    k = k.to(tl.float32)
    if ASM:
        k = k * LOG2E_2
    pre = _multiply(h, W, W_high, W_low, k[:, None] * v.to(tl.float32)[None, :], PART, ASM)
    after, c = _step(h, pre, f, ASM)
    return after, c


@triton.jit
def _enter(h, f, DOCUMENTS: tl.constexpr):
    """The state and the gate as the token sees them: a document's first token sees 0."""
    if DOCUMENTS:
        return tl.where(f < 0, 0.0, h), tl.abs(f)
    else:
        return h, f


@triton.jit
def _walk(
    h, q, k, v, f, W, W_high, W_low, y_t,
    PART: tl.constexpr, ASM: tl.constexpr, READ: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    h, _ = _next_state(h, k, v, f, W, W_high, W_low, PART, ASM, DOCUMENTS)
    if READ:
        tl.store(y_t, tl.sum(q.to(tl.float32)[:, None] * h, 0))
    return h


@triton.jit(do_not_specialize=["S", "H"])
def reverse(
    q_BSK,
    k_BSK,
    v_BHSV,
    f_BHS,
    W_HVV,
    dy_BHSV,
    saved_BHEKV,
    dlast_BHKV,
    dq_BHSK,
    dk_BHSK,
    dv_RBHSV,
    df_RBHS,
    dW_RBHVV,
    dh0_BHKV,
    S,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    ASM: tl.constexpr,
    DLAST: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Every gradient of one row block, program (batch · head, row block), from the states before every BLOCK-th token.

    Writes each head's dq and dk of its rows; dv, df and dW, each row block its part; and the gradient of the first state.
    """
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    batch, head = bh // H, bh % H
    SCALE: tl.constexpr = LOG2E_2 if ASM else 1.0
    W, W_high, W_low = _load_transition(W_HVV + head * V * V, c, PART, SCALE, False)
    WT, WT_high, WT_low = _load_transition(W_HVV + head * V * V, c, PART, 1.0, True)
    tile = r[:, None] * V + c[None, :]
    if DLAST:
        dh = tl.load(dlast_BHKV + bh * K * V + tile).to(tl.float32)
    else:
        dh = tl.zeros([ROWS, V], tl.float32)
    dW = tl.zeros([V, V], tl.float32)
    q_t = q_BSK + batch * S * K + r
    k_t = k_BSK + batch * S * K + r
    v_t = v_BHSV + bh * S * V + c
    f_t = f_BHS + bh * S
    dy_t = dy_BHSV + bh * S * V + c
    saved = saved_BHEKV + bh * (S // BLOCK) * K * V + tile
    dq_t = dq_BHSK + bh * S * K + r
    dk_t = dk_BHSK + bh * S * K + r
    dv_t = dv_RBHSV + ((block * tl.num_programs(0) + bh) * S) * V + c
    df_t = df_RBHS + (block * tl.num_programs(0) + bh) * S
    for e in range(0, S // BLOCK):
        e = S // BLOCK - 1 - e
        t = e * BLOCK
        h = tl.load(saved + e * K * V)
        states, candidates = (h,), ()
        for i in tl.static_range(BLOCK):
            k, v, f = tl.load(k_t + (t + i) * K), tl.load(v_t + (t + i) * V), tl.load(f_t + t + i)
            h, candidate = _next_state(h, k, v, f, W, W_high, W_low, PART, ASM, DOCUMENTS)
            states, candidates = states + (h,), candidates + (candidate,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(BLOCK - 1, -1, -1):
            h, candidate = states[i + 1], candidates[i]
            q, dy = tl.load(q_t + (t + i) * K).to(tl.float32), tl.load(dy_t + (t + i) * V).to(tl.float32)
            k, v, f = tl.load(k_t + (t + i) * K), tl.load(v_t + (t + i) * V), tl.load(f_t + t + i)
            k, v = k.to(tl.float32), v.to(tl.float32)
            starts = f < 0
            before, f = _enter(states[i], f, DOCUMENTS)
            dh += q[:, None] * dy[None, :]
            tl.store(dq_t + (t + i) * K, tl.sum(h * dy[None, :], 1))
            tl.store(df_t + t + i, tl.sum(tl.sum(dh * (before - candidate), 1), 0))
            dpre = dh * ((1.0 - f) * (1.0 - candidate * candidate))
            tl.store(dk_t + (t + i) * K, tl.sum(dpre * v[None, :], 1))
            tl.store(dv_t + (t + i) * V, tl.sum(dpre * k[:, None], 0))
            if PART is None:
                dW = tl.dot(tl.trans(before), dpre, dW, input_precision="ieee")
            else:
                dW = tl.dot(tl.trans(before.to(PART)), dpre.to(PART), dW)
            dh = _multiply(dpre, WT, WT_high, WT_low, f * dh, PART, ASM)
            if DOCUMENTS:
                dh = tl.where(starts, 0.0, dh)
    tl.store(dh0_BHKV + bh * K * V + tile, dh)
    tl.store(dW_RBHVV + (block * tl.num_programs(0) + bh) * V * V + c[:, None] * V + c[None, :], dW)


class Read(NamedTuple):
    """What the recurrence reads, padded to P tokens."""

    q: torch.Tensor
    """[B, P, K]"""
    k: torch.Tensor
    """[B, P, K]"""
    v: torch.Tensor
    """[B, H, P, V]"""
    f: torch.Tensor
    """[B, H, P], float32; negative where a document begins."""


class Gradients(NamedTuple):
    """What the recurrence leaves, all float32: dq and dk for each head, dv, df and dW for each row block."""

    dq_BHPK: torch.Tensor
    dk_BHPK: torch.Tensor
    dv_RBHPV: torch.Tensor
    df_RBHP: torch.Tensor
    dW_RBHVV: torch.Tensor
    dh0_BHKV: torch.Tensor


def products(dtype: torch.dtype) -> dict[str, Any]:
    """How products of inputs of this dtype are taken: the dtype of their parts (None: whole, fp32), and whether by PTX."""
    if dtype == torch.float32:
        return {"PART": None, "ASM": False}
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"inputs of {dtype}: the Triton kernels take bfloat16, float16 or float32; use the reference.")
    return {"PART": tl.bfloat16, "ASM": True}


def block(dtype: torch.dtype) -> int:
    """Tokens whose states the backward pass holds in registers: as many as leave none of them to be spilled."""
    return 4 if dtype == torch.float32 else 8


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    W_HVV: torch.Tensor,
    h0_BHKV: torch.Tensor | None,
    every: int,
    documents: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run all tokens: y in R parts [R, B, H, P, V], the state before every ``every``-th token [B, H, E, K, V], and the last.

    Args:
        q: see :class:`Read`.
        k: see :class:`Read`.
        v: see :class:`Read`.
        f: see :class:`Read`.
        W_HVV: the transition of each head, contiguous.
        h0_BHKV: the state before the first token, contiguous; None: 0.
        every: a multiple of :data:`PADDING`.
        documents: whether ``f`` marks any beginning.
    """
    (B, H, P, V), K = v.shape, q.shape[-1]
    y = f.new_empty(K // ROWS, B, H, P, V)
    saved, last = f.new_empty(B, H, triton.cdiv(P, every), K, V), f.new_empty(B, H, K, V)
    _advance(Read(q, k, v, f), W_HVV, h0_BHKV, y, saved, last, P, every, documents)
    return y, saved, last


def backward(
    read: Read,
    W_HVV: torch.Tensor,
    dy_BHPV: torch.Tensor,
    dlast_BHKV: torch.Tensor | None,
    saved_BHEKV: torch.Tensor,
    every: int,
    documents: bool,
) -> Gradients:
    """Every gradient, from what :func:`forward` was given and saved."""
    (B, H, P, V), K = read.v.shape, read.q.shape[-1]
    held = block(read.v.dtype)
    if every != held:
        states = saved_BHEKV.new_empty(B, H, P // held, K, V)
        _advance(read, W_HVV, saved_BHEKV, None, states, None, every, held, documents)
        saved_BHEKV = states
    R, new = K // ROWS, saved_BHEKV.new_empty
    grads = Gradients(
        new(B, H, P, K), new(B, H, P, K), new(R, B, H, P, V), new(R, B, H, P), new(R, B, H, V, V), new(B, H, K, V)
    )
    reverse[(B * H, R)](
        *read,
        W_HVV,
        dy_BHPV,
        saved_BHEKV,
        None if dlast_BHKV is None else dlast_BHKV.contiguous(),
        *grads,
        P,
        H,
        K=K,
        V=V,
        ROWS=ROWS,
        BLOCK=held,
        DLAST=dlast_BHKV is not None,
        DOCUMENTS=documents,
        **products(read.v.dtype),
        num_warps=1,
        num_stages=1,
    )
    return grads


def _advance(
    read: Read,
    W_HVV: torch.Tensor,
    entering: torch.Tensor | None,
    y: torch.Tensor | None,
    saved: torch.Tensor,
    last: torch.Tensor | None,
    span: int,
    every: int,
    documents: bool,
) -> None:
    (B, H, P, V), K = read.v.shape, read.q.shape[-1]
    advance[(B * H, K // ROWS, triton.cdiv(P, span))](
        *read,
        W_HVV,
        entering,
        y,
        saved,
        last,
        P,
        H,
        span,
        every,
        K=K,
        V=V,
        ROWS=ROWS,
        ENTERING=entering is not None,
        READ=y is not None,
        LAST=last is not None,
        DOCUMENTS=documents,
        **products(read.v.dtype),
        num_warps=1,
        num_stages=1,
    )
