"""The M²RNN recurrence in Triton: the chain of states forward, its outputs, and every gradient backward.

One warp owns 16 rows of one head's state, since rows are independent. ``h·W`` of such a block is two tensor-core products, and
their accumulator layout is the operand layout of the next step: from token to token nothing leaves the registers. Each program
writes its own partial sums over rows or heads, without atomics, so that the same inputs give the same bits.

Products. In the recurrences of states and of their gradients, each fp32 factor is split into two bf16 parts (16 bits), and the
three significant products are summed; elsewhere, where errors do not accumulate, factors are rounded once. Backward reads
candidates with 11 bits.

Backward (equations in :class:`megacpp_mcore.ops.m2rnn.reference.M2RNNChunked`). The forward pass saves one state per ``every``
tokens. Pieces of the sequence are processed from the last to the first: ``advance`` runs a piece's spans in parallel and
writes every token's candidate c and every fourth state; ``reverse`` then recomputes four tokens' states without tanh or
products, and has one product per token in its recurrence.

Legend: B batch, S tokens, padded to a multiple of :data:`PADDING` (P on the host), H heads, K rows of a state, V its columns,
R row blocks of :data:`ROWS`, X spans, T tokens of a piece, E saved states. A padding token has k = v = q = 0 and f = 1: it
changes no state and no gradient. ``f`` is negated where a document begins and the state is reset to 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.assembly import has_ptx
from megacpp_mcore.ops.triton_launch import launch

ROWS = 16
"""Rows of a state per program: the height of a tensor-core product."""

COLUMNS = 16
"""Columns of a state: the depth of a tensor-core product."""

PADDING = 8
"""Sequences are padded to a multiple of this many tokens."""

PIECE = 512
"""Tokens of a piece, rounded up to whole spans: the backward pass holds the candidates of one piece at a time."""

CANDIDATES = torch.float16
"""Dtype of the candidates, which lie in [−1, 1], between the two kernels of the backward pass."""

LOG2E_2 = tl.constexpr(2.8853900817779268)  # 2 log₂ e: exp(2x) = exp2(LOG2E_2 · x)


@triton.jit
def _split(x, PART: tl.constexpr):
    """Split ``x`` into the sum of two numbers of 8 bits; by truncation in PTX, else by rounding."""
    if has_ptx():
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
def _multiply(x, M_high, M_low, add, PART: tl.constexpr):
    """Compute ``x · M + add`` for M in two parts; separate accumulators, so that no product waits for another."""
    high, low = _split(x, PART)
    zero = _opaque_zeros(add)
    return _dot(high, M_high, PART, add) + (_dot(low, M_high, PART, zero) + _dot(high, M_low, PART, zero))


@triton.jit
def _dot(a, b, PART: tl.constexpr, add=None):
    """Multiply factors rounded to PART; exact for the parts of a split."""
    return tl.dot(a.to(PART), b.to(PART), add, input_precision="ieee")


@triton.jit
def _opaque_zeros(like):
    """Return zeros that are opaque to Triton, which would otherwise fold a sum of products into a chain of accumulations."""
    if has_ptx():
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [like], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.zeros_like(like)


@triton.jit
def _step(h, pre, f):
    """Compute the state after ``h``, and c = tanh, for the argument ``pre`` (in PTX: times :data:`LOG2E_2`).

    In PTX, c = 1 − 2r with r = 1/(1 + exp(2x)), two elements per reciprocal: 1/a and 1/b are b/(ab) and a/(ab). exp is
    clamped to 2^60, far beyond where tanh rounds to 1; NaN stays NaN.
    """
    if has_ptx():
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
    """Load W [V, V] times SCALE, or its transpose, in two parts."""
    if TRANSPOSED:
        M = tl.load(W + c[None, :] * c.shape[0] + c[:, None])
    else:
        M = tl.load(W + c[:, None] * c.shape[0] + c[None, :])
    M = M.to(tl.float32) * SCALE
    high = M.to(PART)
    return high, (M - high.to(tl.float32)).to(PART)


@triton.jit(do_not_specialize=["S", "H", "start", "stop", "span", "every", "starts_stride"])
def advance(
    q_BSK,
    k_BSK,
    v_BHSV,
    f_BHS,
    W_HVV,
    starts_BHXKV,
    y_RBHSV,
    saved_BHEKV,
    candidates_BHTKV,
    last_BHKV,
    S,
    H,
    start,
    stop,
    span,
    every,
    starts_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Advance one row block by ``span`` tokens from ``start`` on, program (batch · head, row block, span).

    ``starts`` holds the state before each span (None: 0), with stride ``starts_stride`` between heads. Writes the state
    before every ``every``-th token; and either every token's candidate or, if that is None, the last state and y, one partial
    sum per row block. All token counts are multiples of 4; T and E are counted from ``start``.
    """
    bh, block, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    r, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    batch, head = bh // H, bh % H
    SCALE: tl.constexpr = LOG2E_2 if has_ptx() else 1.0
    W_high, W_low = _load_transition(W_HVV + head * V * V, c, PART, SCALE, False)
    tile = r[:, None] * V + c[None, :]
    if starts_BHXKV is not None:
        h = tl.load(starts_BHXKV + bh * starts_stride + part * K * V + tile).to(tl.float32)
    else:
        h = tl.zeros([ROWS, V], tl.float32)
    first = start + part * span
    end = tl.minimum(first + span, stop)
    k_t = k_BSK + batch * S * K + r
    v_t = v_BHSV + bh * S * V + c
    f_t = f_BHS + bh * S
    saved = saved_BHEKV + bh * tl.cdiv(stop - start, every) * K * V + tile
    four = tl.arange(0, 4)[:, None]
    q_t = q_BSK + batch * S * K + four * K + r[None, :]
    if candidates_BHTKV is None:
        out_t = y_RBHSV + ((block * tl.num_programs(0) + bh) * S + four) * V + c[None, :]
    else:
        out_t = candidates_BHTKV + (bh * (stop - start) * K + block * ROWS) * V
    # Prefetched by hand, as Triton does not pipeline loads this small: 16 two-byte elements a warp, and single scalars.
    k0, k1, k2, k3 = _load_four(k_t, first, K)
    f0, f1, f2, f3 = _load_four(f_t, first, 1)
    for t in tl.range(first, end, 4, num_stages=3):
        if (t - start) % every == 0:
            tl.store(saved + ((t - start) // every) * K * V, h)
        v0, v1, v2, v3 = _load_four(v_t, t, V)
        n = tl.minimum(t + 4, end - 4)  # the last iteration reloads its own tokens
        ka, kb, kc, kd = _load_four(k_t, n, K)
        fa, fb, fc, fd = _load_four(f_t, n, 1)
        h0, c0 = _next_state(h, k0, v0, f0, W_high, W_low, PART, DOCUMENTS)
        h1, c1 = _next_state(h0, k1, v1, f1, W_high, W_low, PART, DOCUMENTS)
        h2, c2 = _next_state(h1, k2, v2, f2, W_high, W_low, PART, DOCUMENTS)
        h, c3 = _next_state(h2, k3, v3, f3, W_high, W_low, PART, DOCUMENTS)
        if candidates_BHTKV is None:
            q = tl.load(q_t + t * K)
            y = _pick(four, _dot(q, h0, PART), _dot(q, h1, PART), _dot(q, h2, PART), _dot(q, h, PART))
            tl.store(out_t + t * V, y)
        else:
            out = out_t + (t - start) * K * V
            _store_tile(out, c0)
            _store_tile(out + K * V, c1)
            _store_tile(out + 2 * K * V, c2)
            _store_tile(out + 3 * K * V, c3)
        k0, k1, k2, k3 = ka, kb, kc, kd
        f0, f1, f2, f3 = fa, fb, fc, fd
    if candidates_BHTKV is None:
        tl.store(last_BHKV + bh * K * V + tile, h)


@triton.jit
def _load_four(x, t, STEP: tl.constexpr):
    at = x + t * STEP
    return tl.load(at), tl.load(at + STEP), tl.load(at + 2 * STEP), tl.load(at + 3 * STEP)


@triton.jit
def _store_tile(at, x):
    """Store a state's row block in the register layout of a tensor-core accumulator."""
    x = tl.permute(tl.reshape(x.to(at.dtype.element_ty), (2, 8, 2, 4, 2)), (1, 3, 2, 0, 4))
    tl.store(at + tl.arange(0, 256), tl.reshape(x, (256,)))


@triton.jit
def _load_tile(at):
    """Load what :func:`_store_tile` wrote."""
    x = tl.permute(tl.reshape(tl.load(at + tl.arange(0, 256)), (8, 4, 2, 2, 2)), (3, 0, 2, 1, 4))
    return tl.reshape(x, (16, 16))


@triton.jit
def _stack(x0, x1, x2, x3, PART: tl.constexpr):
    """Stack four tiles vertically, as the operand of a product."""
    x = tl.join(tl.join(x0.to(PART), x2.to(PART)), tl.join(x1.to(PART), x3.to(PART)))
    x = tl.permute(x, (2, 3, 0, 1))
    return tl.reshape(x, (4 * x0.shape[0], x0.shape[1]))


@triton.jit
def _pick(token, x0, x1, x2, x3):
    """Pick each token's own row or column from four products, one per token."""
    return tl.where(token < 2, tl.where(token == 0, x0, x1), tl.where(token == 2, x2, x3))


@triton.jit
def _next_state(h, k, v, f, W_high, W_low, PART: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Advance one token: return the state after it, and its candidate c."""
    h, f = _previous_state(h, f, DOCUMENTS)
    k = k.to(tl.float32)
    if has_ptx():
        k = k * LOG2E_2
    pre = _multiply(h, W_high, W_low, k[:, None] * v.to(tl.float32)[None, :], PART)
    after, c = _step(h, pre, f)
    return after, c


@triton.jit
def _previous_state(h, f, DOCUMENTS: tl.constexpr):
    """Return the previous state (0 for a document's first token) and the gate without its sign."""
    if DOCUMENTS:
        return tl.where(f < 0, 0.0, h), tl.abs(f)
    else:
        return h, f


@triton.jit(do_not_specialize=["S", "H", "start", "stop"])
def reverse(
    q_BSK,
    k_BSK,
    v_BHSV,
    f_BHS,
    W_HVV,
    dy_BHSV,
    saved_BHEKV,
    candidates_BHTKV,
    dq_BHSK,
    dk_BHSK,
    dv_RBHSV,
    df_RBHS,
    dW_RBHVV,
    dh_BHKV,
    S,
    H,
    start,
    stop,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Compute all gradients of one row block, from token ``stop`` back to ``start``; program (batch · head, row block).

    Reads the states before every fourth token and all candidates; T and E are counted from ``start``. Writes each head's dq and
    dk for its rows, and partial sums per row block of dv and df. Accumulates into dW, and replaces ``dh``, the gradient of the
    state after ``stop``, by that of the state before ``start``.
    """
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    batch, head = bh // H, bh % H
    WT_high, WT_low = _load_transition(W_HVV + head * V * V, c, PART, 1.0, True)
    tile = r[:, None] * V + c[None, :]
    dW_at = dW_RBHVV + (block * tl.num_programs(0) + bh) * V * V + c[:, None] * V + c[None, :]
    dh, dW = tl.load(dh_BHKV + bh * K * V + tile), tl.load(dW_at)
    f_t = f_BHS + bh * S
    q_t = q_BSK + batch * S * K + r
    dy_t = dy_BHSV + bh * S * V + c
    c_t = candidates_BHTKV + ((bh * (stop - start) - start) * K + block * ROWS) * V
    saved = saved_BHEKV + bh * ((stop - start) // 4) * K * V + tile
    four = tl.arange(0, 4)
    rows = tl.arange(0, 4 * ROWS)[None, :]
    k_4 = k_BSK + batch * S * K + four[:, None] * K + block * ROWS + rows % ROWS
    v_4 = bh * S * V + four[None, :] * V + c[:, None]
    first = (block * tl.num_programs(0) + bh) * S
    df_4 = df_RBHS + first + four
    dv_4 = dv_RBHSV + (first + four[:, None]) * V + c[None, :]
    dqk_4 = bh * S * K + four[None, :] * K + r[:, None]
    # Prefetched by hand, as Triton does not pipeline loads this small: 16 two-byte elements a warp, and single scalars.
    q0, q1, q2, q3 = _load_four(q_t, stop - 4, K)
    f0, f1, f2, f3 = _load_four(f_t, stop - 4, 1)
    for done in tl.range(0, stop - start, 4, num_stages=3):
        t = stop - 4 - done
        h = tl.load(saved + (t - start) // 4 * K * V)
        c0, c1, c2, c3 = _load_tiles(c_t, t, K * V)
        k = tl.load(k_4 + t * K, mask=four[:, None] == rows // ROWS, other=0.0)
        v, dy = tl.load(v_BHSV + v_4 + t * V), tl.load(dy_BHSV + v_4 + t * V)
        dy0, dy1, dy2, dy3 = _load_four(dy_t, t, V)
        n = tl.maximum(t - 4, start)  # the last iteration reloads its own tokens
        qa, qb, qc, qd = _load_four(q_t, n, K)
        fa, fb, fc, fd = _load_four(f_t, n, 1)
        before0, h1, slope0, change0 = _mix(h, c0, f0, DOCUMENTS)
        before1, h2, slope1, change1 = _mix(h1, c1, f1, DOCUMENTS)
        before2, h3, slope2, change2 = _mix(h2, c2, f2, DOCUMENTS)
        before3, h4, slope3, change3 = _mix(h3, c3, f3, DOCUMENTS)
        befores = tl.trans(_stack(before0, before1, before2, before3, PART))
        dh, dpre3, df3 = _token_bwd(dh, change3, slope3, q3, f3, dy3, WT_high, WT_low, PART, DOCUMENTS)
        dh, dpre2, df2 = _token_bwd(dh, change2, slope2, q2, f2, dy2, WT_high, WT_low, PART, DOCUMENTS)
        dh, dpre1, df1 = _token_bwd(dh, change1, slope1, q1, f1, dy1, WT_high, WT_low, PART, DOCUMENTS)
        dh, dpre0, df0 = _token_bwd(dh, change0, slope0, q0, f0, dy0, WT_high, WT_low, PART, DOCUMENTS)
        dq = _pick(four[None, :], _dot(h1, dy, PART), _dot(h2, dy, PART), _dot(h3, dy, PART), _dot(h4, dy, PART))
        tl.store(dq_BHSK + dqk_4 + t * K, dq.to(dq_BHSK.dtype.element_ty))
        dk = _pick(
            four[None, :], _dot(dpre0, v, PART), _dot(dpre1, v, PART), _dot(dpre2, v, PART), _dot(dpre3, v, PART)
        )  # fmt: skip
        tl.store(dk_BHSK + dqk_4 + t * K, dk.to(dk_BHSK.dtype.element_ty))
        dpre = _stack(dpre0, dpre1, dpre2, dpre3, PART)
        tl.store(dv_4 + t * V, _dot(k, dpre, PART))
        dW += _dot(befores, dpre, PART)
        tl.store(df_4 + t, _pick(four, df0, df1, df2, df3))
        q0, q1, q2, q3 = qa, qb, qc, qd
        f0, f1, f2, f3 = fa, fb, fc, fd
    tl.store(dh_BHKV + bh * K * V + tile, dh)
    tl.store(dW_at, dW)


@triton.jit
def _load_tiles(tiles, t, SIZE: tl.constexpr):
    at = tiles + t * SIZE
    return _load_tile(at), _load_tile(at + SIZE), _load_tile(at + 2 * SIZE), _load_tile(at + 3 * SIZE)


@triton.jit
def _mix(h, c, f, DOCUMENTS: tl.constexpr):
    """From a saved candidate, compute the state before a token (0 at a document's start) and after it, and the derivatives
    of the latter with respect to tanh's argument and to f."""
    h, f = _previous_state(h, f, DOCUMENTS)
    c = c.to(tl.float32)
    new = (1.0 - f) * c
    return h, f * h + new, (1.0 - f) - new * c, h - c


@triton.jit
def _token_bwd(
    dh, change, slope, q, f, dy, WT_high, WT_low, PART: tl.constexpr, DOCUMENTS: tl.constexpr
):  # fmt: skip
    """Run backward of one token: the gradients of the state before it, of tanh's argument, and of f."""
    dh += q.to(tl.float32)[:, None] * dy.to(tl.float32)[None, :]
    dpre, df = dh * slope, tl.sum(dh * change)
    if DOCUMENTS:
        return tl.where(f < 0, 0.0, _multiply(dpre, WT_high, WT_low, tl.abs(f) * dh, PART)), dpre, df
    else:
        return _multiply(dpre, WT_high, WT_low, f * dh, PART), dpre, df


class Read(NamedTuple):
    """Inputs of the recurrence, padded to P tokens."""

    q: torch.Tensor
    """[B, P, K]"""
    k: torch.Tensor
    """[B, P, K]"""
    v: torch.Tensor
    """[B, H, P, V]"""
    f: torch.Tensor
    """[B, H, P], float32; negative at the start of a document."""


class Gradients(NamedTuple):
    """Gradients of the recurrence: dq and dk per head, in their dtype; in float32, dv, df and dW per row block, and dh0."""

    dq_BHPK: torch.Tensor
    dk_BHPK: torch.Tensor
    dv_RBHPV: torch.Tensor
    df_RBHP: torch.Tensor
    dW_RBHVV: torch.Tensor
    dh0_BHKV: torch.Tensor


def products(dtype: torch.dtype) -> dict[str, Any]:
    """Return the precision of the products for inputs of this dtype: the dtype of a split's parts.

    Raises:
        ModelError: the kernels do not support this dtype.
    """
    if dtype != torch.bfloat16:
        raise ModelError(f"inputs are {dtype}, but the Triton kernels take only bfloat16; use the reference.")
    return {"PART": tl.bfloat16}


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
    """Run all tokens: y as R partial sums [R, B, H, P, V], states before every ``every``-th token [B, H, E, K, V], last state.

    Args:
        q: see :class:`Read`.
        k: see :class:`Read`.
        v: see :class:`Read`.
        f: see :class:`Read`.
        W_HVV: the transition of each head, contiguous.
        h0_BHKV: the state before the first token, contiguous; None: 0.
        every: a multiple of :data:`PADDING`.
        documents: whether ``f`` marks document starts.
    """
    (B, H, P, V), K = v.shape, q.shape[-1]
    y = f.new_empty(K // ROWS, B, H, P, V)
    saved, last = f.new_empty(B, H, triton.cdiv(P, every), K, V), f.new_empty(B, H, K, V)
    launch(
        advance, (B * H, K // ROWS, 1), q, k, v, f, W_HVV, h0_BHKV, y, saved, None, last, P, H, 0, P, P, every, K * V,
        **_constants(v, K, documents),
    )  # fmt: skip
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
    """Compute all gradients from the inputs of :func:`forward` and the states that it saved."""
    (B, H, P, V), K = read.v.shape, read.q.shape[-1]
    R, new = K // ROWS, saved_BHEKV.new_empty
    dh = saved_BHEKV.new_zeros(B, H, K, V)
    if dlast_BHKV is not None:
        dh.copy_(dlast_BHKV)
    grads = Gradients(
        read.q.new_empty(B, H, P, K),
        read.q.new_empty(B, H, P, K),
        new(R, B, H, P, V),
        new(R, B, H, P),
        saved_BHEKV.new_zeros(R, B, H, V, V),
        dh,
    )
    length = triton.cdiv(PIECE, every) * every
    longest = min(length, P)
    candidates, states = new(B, H, longest, K, V, dtype=CANDIDATES), new(B, H, longest // 4, K, V)
    constants = _constants(read.v, K, documents)
    for start in reversed(range(0, P, length)):
        stop = min(start + length, P)
        starts = saved_BHEKV[:, :, start // every :]
        launch(
            advance, (B * H, R, triton.cdiv(stop - start, every)), *read, W_HVV, starts, None, states, candidates, None, P, H,
            start, stop, every, 4, starts.stride(1), **constants,
        )  # fmt: skip
        launch(reverse, (B * H, R), *read, W_HVV, dy_BHPV, states, candidates, *grads, P, H, start, stop, **constants)
    return grads


def _constants(v: torch.Tensor, K: int, documents: bool) -> dict[str, Any]:
    shapes = {"K": K, "V": v.shape[-1], "ROWS": ROWS, "DOCUMENTS": documents}
    return shapes | products(v.dtype) | {"num_warps": 1, "num_stages": 1}
