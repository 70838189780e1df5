"""M²RNN in plain PyTorch: the mixer between its two projections, and its recurrence, sequential and with few saved states.

Source: M²RNN (arXiv 2603.14360). Per head, with state ``h ∈ R^{K×V}``::

    c_t = tanh(h_{t−1} W + k_t v_tᵀ)        h_t = f_t h_{t−1} + (1 − f_t) c_t        y_t = h_tᵀ q_t

W multiplies from the right, so the K rows of h do not interact: the batch × K rows of a head are independent
recurrences that share W.

Legend: B batch, S sequence, H heads, K key dim (rows of the state), V value dim, M = B·K rows, T tokens between two
saved states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, expect_shape
from megacpp_mcore.ops.packed.documents import check_seq_idx, document_starts

_expect = functools.partial(expect_shape, "M²RNN")

Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A function with the signature of :func:`m2rnn_sequential`."""


class M2RNNState(NamedTuple):
    """State carried from one token to the next: the matrix state, and the convolution's window of earlier rows.

    Attributes:
        h_BHKV: the state, float32 (float64 if an input is float64).
        window_BTC: the last T = taps − 1 rows of ``[q | k | v]`` before the convolution, C = 2K + H·V; zero before the
            document's first row.
    """

    h_BHKV: torch.Tensor
    window_BTC: torch.Tensor


def m2rnn(
    q_SBK: torch.Tensor,
    k_SBK: torch.Tensor,
    v_SBHV: torch.Tensor,
    g_SBHV: torch.Tensor,
    x_f_SBH: torch.Tensor,
    *,
    qk_conv_weight: torch.Tensor,
    qk_conv_bias: torch.Tensor,
    v_conv_weight: torch.Tensor,
    v_conv_bias: torch.Tensor,
    W: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    norm_width: int,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_state: M2RNNState | None = None,
    return_final_state: bool = False,
    checkpoint_every: int = 64,
    recurrence: Recurrence | None = None,
) -> tuple[torch.Tensor, M2RNNState | None]:
    """Run an M²RNN mixer from the input projection to the output projection, both excluded.

    ``SiLU`` of a causal depthwise convolution on q, k and v; the recurrence of :func:`m2rnn_chunked` with the gate of
    :func:`m2rnn_forget_gate`; ``(y + D ⊙ v) ⊙ SiLU(g)``; RMSNorm over all channels. All heads share one head of q and k.

    Args:
        q_SBK: queries from the projection. This and the next four may be strided views of one tensor.
        k_SBK: keys from the projection.
        v_SBHV: values from the projection.
        g_SBHV: the output gate, before SiLU.
        x_f_SBH: the projection for the forget gate.
        qk_conv_weight: [2K, taps], q's channels, then k's; the current token's tap last.
        qk_conv_bias: [2K].
        v_conv_weight: [H·V, taps].
        v_conv_bias: [H·V].
        W: [H, V, V], the transition of each head.
        A_log: [H], logarithm of the decay rate.
        dt_bias: [H].
        D: [H·V], the skip.
        norm_weight: [H·V].
        eps: of the norm.
        norm_width: channels that the norm averages over: those of all tensor-parallel ranks.
        reduce: all-reduces [S, B, 1] over the ranks that hold the other heads, forward and backward; None: no other heads.
        seq_idx: [B, S], the document number of each token (:mod:`megacpp_mcore.ops.packed.documents`): state and
            convolution are reset where it changes. None: one document.
        initial_state: final state of an earlier call, if the first row continues its last document; None: zero.
        return_final_state: whether to return the state after the last row.
        checkpoint_every: tokens between two states saved for the backward pass, ≥ 1.
        recurrence: replaces :func:`m2rnn_chunked`, for example by :func:`m2rnn_sequential`.

    Returns:
        ``(out_SBC, final_state)``: the output, C = H·V, contiguous and in the dtype of ``v_SBHV``; the state, or None.

    Raises:
        ModelError: shapes that do not fit.
    """
    weights = {
        "qk_conv_weight": qk_conv_weight, "qk_conv_bias": qk_conv_bias, "v_conv_weight": v_conv_weight,
        "v_conv_bias": v_conv_bias, "W": W, "A_log": A_log, "dt_bias": dt_bias, "D": D, "norm_weight": norm_weight,
    }  # fmt: skip
    check_mixer(q_SBK, k_SBK, v_SBHV, g_SBHV, x_f_SBH, weights, seq_idx, initial_state)
    heads, value_dim = v_SBHV.shape[-2:]
    key_dim = q_SBK.shape[-1]
    qk_BSC = torch.cat((q_SBK, k_SBK), dim=-1).transpose(0, 1)
    v_BSC = v_SBHV.flatten(2).transpose(0, 1)
    h0_BHKV, qk_window, v_window = None, None, None
    if initial_state is not None:
        h0_BHKV = initial_state.h_BHKV
        qk_window, v_window = initial_state.window_BTC.split([2 * key_dim, heads * value_dim], dim=-1)
    convolved_BSC = causal_convolution(qk_BSC, qk_conv_weight, qk_conv_bias, seq_idx, qk_window)
    q_BS1K, k_BS1K = convolved_BSC.unsqueeze(2).chunk(2, dim=-1)
    v_BSHV = causal_convolution(v_BSC, v_conv_weight, v_conv_bias, seq_idx, v_window).unflatten(-1, (heads, value_dim))
    f_BSH = m2rnn_forget_gate(x_f_SBH.transpose(0, 1), A_log, dt_bias)
    run = functools.partial(m2rnn_chunked, checkpoint_every=checkpoint_every) if recurrence is None else recurrence
    y_BSHV, h_BHKV = run(q_BS1K, k_BS1K, v_BSHV, W, f_BSH, h0_BHKV, seq_idx=seq_idx)
    gated_SBC, squares_SB1 = skip_and_gate(y_BSHV.transpose(0, 1), v_BSHV.transpose(0, 1), g_SBHV, D)
    squares_SB1 = squares_SB1 if reduce is None else reduce(squares_SB1)
    out_SBC = scale_rows(gated_SBC, squares_SB1 / norm_width, norm_weight, eps).to(v_SBHV.dtype).contiguous()
    if not return_final_state:
        return out_SBC, None
    rows_BSC = torch.cat((qk_BSC, v_BSC), dim=-1)
    before_BTC = None if initial_state is None else initial_state.window_BTC
    return out_SBC, M2RNNState(h_BHKV, last_window(rows_BSC, qk_conv_weight.shape[1] - 1, seq_idx, before_BTC))


def check_mixer(
    q_SBK: torch.Tensor,
    k_SBK: torch.Tensor,
    v_SBHV: torch.Tensor,
    g_SBHV: torch.Tensor,
    x_f_SBH: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    seq_idx_BS: torch.Tensor | None,
    state: M2RNNState | None,
) -> None:
    """Check that the inputs of a mixer fit together; ``weights`` are named as in :func:`m2rnn`.

    Raises:
        ModelError: shapes do not fit.
    """
    if q_SBK.dim() != 3 or v_SBHV.dim() != 4:
        raise ModelError(f"q has shape {tuple(q_SBK.shape)} and v {tuple(v_SBHV.shape)}; expected [S, B, K] and [S, B, H, V].")
    (S, B, K), (H, V) = q_SBK.shape, v_SBHV.shape[2:]
    if not q_SBK.numel() or not v_SBHV.numel():
        raise ModelError(
            f"q has shape {tuple(q_SBK.shape)} and v {tuple(v_SBHV.shape)}; expected at least one token, key, head and value: "
            "do not call the op for an empty sequence."
        )
    C, taps = H * V, weights["qk_conv_weight"].shape[-1]
    _expect("k", k_SBK, "SBK", (S, B, K))
    _expect("v", v_SBHV, "SBHV", (S, B, H, V))
    _expect("g", g_SBHV, "SBHV", (S, B, H, V))
    _expect("x_f", x_f_SBH, "SBH", (S, B, H))
    shapes = {
        "qk_conv_weight": ("CT", (2 * K, taps)),
        "qk_conv_bias": ("C", (2 * K,)),
        "v_conv_weight": ("CT", (C, weights["v_conv_weight"].shape[-1])),
        "v_conv_bias": ("C", (C,)),
        "W": ("HVV", (H, V, V)),
        "A_log": ("H", (H,)),
        "dt_bias": ("H", (H,)),
        "D": ("C", (C,)),
        "norm_weight": ("C", (C,)),
    }
    for name, weight in weights.items():
        _expect(name, weight, *shapes[name])
    if seq_idx_BS is not None:
        check_seq_idx(seq_idx_BS, batch=B, rows=S)
    if state is not None:
        _expect("initial_state.h", state.h_BHKV, "BHKV", (B, H, K, V))
        _expect("initial_state.window", state.window_BTC, "BTC", (B, taps - 1, 2 * K + C))


def causal_convolution(
    x_BSC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor,
    seq_idx_BS: torch.Tensor | None = None,
    window_BTC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute SiLU of a depthwise causal convolution: output t sees inputs t−K+1 … t of its document; ``[B, S, C]``.

    Args:
        x_BSC: the input.
        weight_CK: the kernel of each channel, the current token's tap last.
        bias_C: the bias of each channel.
        seq_idx_BS: the document number of each token (:mod:`megacpp_mcore.ops.packed.documents`); None: one document.
        window_BTC: the T = K − 1 rows before the first one, in its document; None: zeros.
    """
    channels, kernel = weight_CK.shape
    back = kernel - 1
    if window_BTC is not None:
        x_BSC = torch.cat((window_BTC.to(x_BSC.dtype), x_BSC), dim=1)
        seq_idx_BS = None if seq_idx_BS is None else torch.cat((seq_idx_BS[:, :1].expand(-1, back), seq_idx_BS), dim=1)
    if seq_idx_BS is not None:
        y_BSC = _convolve_documents(x_BSC, weight_CK, bias_C, seq_idx_BS)
        return F.silu(y_BSC if window_BTC is None else y_BSC[:, back:])
    x_BCS = x_BSC.transpose(1, 2)
    padded_BCS = F.pad(x_BCS, (back, 0)) if window_BTC is None else x_BCS
    return F.silu(F.conv1d(padded_BCS, weight_CK.unsqueeze(1), bias_C, groups=channels)).transpose(1, 2)


def _convolve_documents(
    x_BSC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor, seq_idx_BS: torch.Tensor
) -> torch.Tensor:
    """Convolve tap by tap, skipping taps that reach into an earlier document; summed in float32 or wider."""
    dtype, kernel = compute_dtype(x_BSC, weight_CK, bias_C), weight_CK.shape[1]
    x, weight = x_BSC.to(dtype), weight_CK.to(dtype)
    y_BSC = bias_C.to(dtype) + x * weight[:, -1]
    for back in range(1, min(kernel, x.shape[1])):
        same_BS1 = (seq_idx_BS[:, back:] == seq_idx_BS[:, :-back]).unsqueeze(-1)
        tap_BSC = torch.where(same_BS1, x[:, :-back] * weight[:, -1 - back], x.new_zeros(()))
        y_BSC = y_BSC + F.pad(tap_BSC, (0, 0, back, 0))
    return y_BSC.to(x_BSC.dtype)


def last_window(
    rows_BSC: torch.Tensor, length: int, seq_idx_BS: torch.Tensor | None, before_BTC: torch.Tensor | None
) -> torch.Tensor:
    """Return the last ``length`` rows as the window of a later call's convolution, zero for rows of other documents."""
    if seq_idx_BS is not None:
        rows_BSC = rows_BSC.masked_fill((seq_idx_BS != seq_idx_BS[:, -1:]).unsqueeze(-1), 0.0)
    missing = max(length - rows_BSC.shape[1], 0)
    if not missing:
        return rows_BSC[:, rows_BSC.shape[1] - length :]
    if before_BTC is None:
        return F.pad(rows_BSC, (0, 0, missing, 0))
    before_BTC = before_BTC[:, length - missing :].to(rows_BSC.dtype)
    if seq_idx_BS is not None:
        before_BTC = before_BTC.masked_fill((seq_idx_BS[:, 0] != seq_idx_BS[:, -1])[:, None, None], 0.0)
    return torch.cat((before_BTC, rows_BSC), dim=1)


def skip_and_gate(
    y_SBHV: torch.Tensor, v_SBHV: torch.Tensor, g_SBHV: torch.Tensor, D_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``(y + D ⊙ v) ⊙ SiLU(g)``, ``[S, B, C]`` in float32 or wider, C = H·V, and its sum of squares ``[S, B, 1]``."""
    dtype = compute_dtype(y_SBHV, v_SBHV, g_SBHV, D_C)
    skipped_SBHV = y_SBHV.to(dtype) + D_C.to(dtype).view(y_SBHV.shape[2:]) * v_SBHV.to(dtype)
    gated_SBC = (skipped_SBHV * F.silu(g_SBHV.to(dtype))).flatten(2)
    return gated_SBC, gated_SBC.square().sum(-1, keepdim=True)


def scale_rows(x_SBC: torch.Tensor, means_SB1: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm to ``x`` given its mean square, which averages over the channels of all tensor-parallel ranks."""
    return x_SBC * torch.rsqrt(means_SB1 + eps) * weight_C


def m2rnn_forget_gate(x_f_BSH: torch.Tensor, A_log_H: torch.Tensor, dt_bias_H: torch.Tensor) -> torch.Tensor:
    """Compute ``f = exp(−exp(A_log) · softplus(x_f + dt_bias))``, one scalar per head.

    Args:
        x_f_BSH: the projection for the gate.
        A_log_H: logarithm of the decay rate.
        dt_bias_H: learned bias.

    Returns:
        ``f_BSH`` in (0, 1), in float32, or float64 if an input is float64.

    Raises:
        ModelError: shapes that do not fit.
    """
    _expect("A_log", A_log_H, "H", (x_f_BSH.shape[-1],))
    _expect("dt_bias", dt_bias_H, "H", (x_f_BSH.shape[-1],))
    dtype = compute_dtype(x_f_BSH, A_log_H, dt_bias_H)
    return torch.exp(-torch.exp(A_log_H.to(dtype)) * F.softplus(x_f_BSH.to(dtype) + dt_bias_H.to(dtype)))


def m2rnn_sequential(
    q_BSHK: torch.Tensor,
    k_BSHK: torch.Tensor,
    v_BSHV: torch.Tensor,
    W_HVV: torch.Tensor,
    f_BSH: torch.Tensor,
    h0_BHKV: torch.Tensor | None = None,
    *,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence token by token under autograd, which saves every state: the truth.

    Args:
        q_BSHK: queries; one head is read by all.
        k_BSHK: keys; one head is read by all.
        v_BSHV: values.
        W_HVV: the transition of each head.
        f_BSH: the forget gate, in [0, 1].
        h0_BHKV: the state before the first token; None starts from zero.
        seq_idx: [B, S], the number of each token's document (:mod:`megacpp_mcore.ops.packed.documents`): the state begins
            at 0 where it changes. None: one document.

    Returns:
        ``(y_BSHV, h_last_BHKV)``: y in the dtype of ``v_BSHV``, the state in float32, or float64 when an input is that.

    Raises:
        ModelError: shapes that do not fit.
    """
    dtype = _check(q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH, h0_BHKV)
    batch, sequence, heads, value_dim = v_BSHV.shape
    q, k, v, W, f = (t.to(dtype) for t in (q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH))
    if h0_BHKV is None:
        h = v.new_zeros(batch, heads, q.shape[-1], value_dim)
    else:
        h = h0_BHKV.to(dtype)
    starts_BS = None if seq_idx is None else document_starts(seq_idx, batch=batch, rows=sequence)
    outputs = []
    with torch.autocast(v.device.type, enabled=False):
        for t in range(sequence):
            if starts_BS is not None:
                h = h.masked_fill(starts_BS[:, t, None, None, None], 0.0)
            candidate = torch.tanh(h @ W + k[:, t, :, :, None] * v[:, t, :, None, :])
            forget = f[:, t, :, None, None]
            h = forget * h + (1 - forget) * candidate
            outputs.append((q[:, t, :, None, :] @ h).squeeze(-2))
    return torch.stack(outputs, dim=1).to(v_BSHV.dtype), h


def m2rnn_chunked(
    q_BSHK: torch.Tensor,
    k_BSHK: torch.Tensor,
    v_BSHV: torch.Tensor,
    W_HVV: torch.Tensor,
    f_BSH: torch.Tensor,
    h0_BHKV: torch.Tensor | None = None,
    *,
    checkpoint_every: int = 64,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what :func:`m2rnn_sequential` does, saving one state per ``checkpoint_every`` tokens.

    Implemented by :class:`M2RNNChunked`.

    Args:
        q_BSHK: queries; one head is read by all.
        k_BSHK: keys; one head is read by all.
        v_BSHV: values.
        W_HVV: the transition of each head.
        f_BSH: the forget gate, in [0, 1].
        h0_BHKV: the state before the first token; None starts from zero.
        checkpoint_every: tokens between two saved states, ≥ 1.
        seq_idx: [B, S], the number of each token's document (:mod:`megacpp_mcore.ops.packed.documents`): the state begins
            at 0 where it changes. None: one document.

    Returns:
        ``(y_BSHV, h_last_BHKV)``: y in the dtype of ``v_BSHV``, the state in float32, or float64 when an input is that.

    Raises:
        ModelError: shapes that do not fit, or ``checkpoint_every`` below 1.
    """
    dtype = _check(q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH, h0_BHKV)
    if checkpoint_every < 1:
        raise ModelError(f"checkpoint_every is {checkpoint_every}; expected at least 1 token between two saved states.")
    batch, sequence, heads, value_dim = v_BSHV.shape
    if h0_BHKV is None:
        h0_BHKV = v_BSHV.new_zeros(batch, heads, q_BSHK.shape[-1], value_dim, dtype=dtype)
    starts_BS = None if seq_idx is None else document_starts(seq_idx, batch=batch, rows=sequence)
    return M2RNNChunked.apply(q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH, h0_BHKV, checkpoint_every, dtype, starts_BS)


class _Chunk(NamedTuple):
    """T tokens in the compute dtype, time first, then heads, so that each head needs one product over all rows."""

    q_THBK: torch.Tensor
    k_THBK: torch.Tensor
    v_THBV: torch.Tensor
    f_THB: torch.Tensor
    starts_TM1: torch.Tensor | None = None
    """Document starts; None: no documents."""


class M2RNNChunked(torch.autograd.Function):
    """The M²RNN recurrence with one saved state per ``checkpoint_every`` tokens; backward recomputes the others.

    Backward, from the last token to the first, with ``dh`` the gradient from all later tokens::

        dh += q_t dy_tᵀ                       df_t = Σ dh ⊙ (h_{t−1} − c_t)        dq_t = h_t dy_t
        dpre = (1 − f_t) dh ⊙ (1 − c_t²)      dW += h_{t−1}ᵀ dpre
        dk_t = dpre v_t                       dv_t = dpreᵀ k_t
        dh ← f_t dh + dpre Wᵀ                 (0 where a document begins, and h_{t−1} = 0 in all of the above)

    Only the three lines that carry h or dh from token to token run one token at a time; the rest runs per chunk.
    Products have the full precision of the dtype: TF32 and autocast are off inside, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: torch.Tensor,
        k_BSHK: torch.Tensor,
        v_BSHV: torch.Tensor,
        W_HVV: torch.Tensor,
        f_BSH: torch.Tensor,
        h0_BHKV: torch.Tensor,
        checkpoint_every: int,
        dtype: torch.dtype,
        starts_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all chunks, and save the inputs and the state before each chunk."""
        batch, sequence = v_BSHV.shape[:2]
        W = W_HVV.to(dtype)
        h_HMV = h0_BHKV.to(dtype).transpose(0, 1).flatten(1, 2)
        y_BSHV = torch.empty_like(v_BSHV)
        chunk_states = []
        with _exact_products(v_BSHV.device):
            for start in range(0, sequence, checkpoint_every):
                chunk_states.append(h_HMV)
                tokens = slice(start, start + checkpoint_every)
                chunk = _load_chunk(q_BSHK, k_BSHK, v_BSHV, f_BSH, starts_BS, tokens, dtype)
                h_THMV, _, _ = _run_chunk(chunk, W, h_HMV)
                y_THBV = torch.einsum("thbk,thbkv->thbv", chunk.q_THBK, h_THMV.unflatten(2, (batch, -1)))
                y_BSHV[:, tokens] = y_THBV.permute(2, 0, 1, 3)
                # A copy, so that a saved state does not keep the whole chunk alive.
                h_HMV = h_THMV[-1].clone()
        ctx.save_for_backward(q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH, starts_BS, torch.stack(chunk_states))
        ctx.checkpoint_every, ctx.dtype, ctx.h0_dtype = checkpoint_every, dtype, h0_BHKV.dtype
        return y_BSHV, h_HMV.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSHV: torch.Tensor, dh_last_BHKV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Process the chunks from last to first; the gradients have the dtypes of their inputs."""
        q, k, v, W_HVV, f, starts_BS, chunk_states_CHMV = ctx.saved_tensors
        batch, sequence = v.shape[:2]
        W = W_HVV.to(ctx.dtype)
        dW = torch.zeros_like(W)
        dq, dk, dv, df = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, f))
        carry_HMV = dh_last_BHKV.to(ctx.dtype).transpose(0, 1).flatten(1, 2)
        with _exact_products(v.device):
            for index in reversed(range(len(chunk_states_CHMV))):
                start = index * ctx.checkpoint_every
                tokens = slice(start, min(start + ctx.checkpoint_every, sequence))
                chunk = _load_chunk(q, k, v, f, starts_BS, tokens, ctx.dtype)
                dy_THBV = dy_BSHV[:, tokens].to(ctx.dtype).permute(1, 2, 0, 3)
                grads, dW_chunk, carry_HMV = _chunk_backward(chunk, W, chunk_states_CHMV[index], dy_THBV, carry_HMV)
                dW += dW_chunk
                for whole, part in zip((dq, dk, dv), grads[:3], strict=True):
                    # The gradient of a shared head is the sum over all heads, rounded to its dtype once.
                    summed = part.sum(1, keepdim=True) if whole.shape[2] == 1 else part
                    whole[:, tokens] = summed.permute(2, 0, 1, 3)
                df[:, tokens] = grads.f_THB.permute(2, 0, 1)
        dh0 = carry_HMV.unflatten(1, (batch, -1)).transpose(0, 1).to(ctx.h0_dtype)
        return dq, dk, dv, dW.to(W_HVV.dtype), df, dh0, None, None, None


def _load_chunk(
    q_BSHK: torch.Tensor,
    k_BSHK: torch.Tensor,
    v_BSHV: torch.Tensor,
    f_BSH: torch.Tensor,
    starts_BS: torch.Tensor | None,
    tokens: slice,
    dtype: torch.dtype,
) -> _Chunk:
    """Slice a chunk of the inputs, casting only that part."""
    heads, rows = v_BSHV.shape[2], q_BSHK.shape[-1]
    q, k, v = (t[:, tokens].to(dtype).expand(-1, -1, heads, -1).permute(1, 2, 0, 3) for t in (q_BSHK, k_BSHK, v_BSHV))
    starts_TM1 = None if starts_BS is None else starts_BS[:, tokens].T.repeat_interleave(rows, dim=1).unsqueeze(-1)
    return _Chunk(q, k, v, f_BSH[:, tokens].to(dtype).permute(1, 2, 0), starts_TM1)


def _run_chunk(
    chunk: _Chunk, W_HVV: torch.Tensor, h_HMV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute all states h_t and candidates c_t of a chunk, each [T, H, M, V]: three kernels per token, four with documents.

    With documents, the third result is h_{t−1} as each token sees it; without, it is None: it is h_t shifted by one token.
    """
    candidates_THMV = (chunk.k_THBK.unsqueeze(-1) * chunk.v_THBV.unsqueeze(-2)).flatten(2, 3)
    states_THMV = torch.empty_like(candidates_THMV)
    forget_THM1 = _over_rows(chunk.f_THB, chunk.k_THBK.shape[-1])
    seen_THMV = None if chunk.starts_TM1 is None else torch.empty_like(candidates_THMV)
    zero = h_HMV.new_zeros(())
    for t, (candidate, state, forget) in enumerate(zip(candidates_THMV, states_THMV, forget_THM1, strict=True)):
        if chunk.starts_TM1 is not None and seen_THMV is not None:
            h_HMV = torch.where(chunk.starts_TM1[t], zero, h_HMV, out=seen_THMV[t])
        candidate.baddbmm_(h_HMV, W_HVV).tanh_()
        h_HMV = torch.lerp(candidate, h_HMV, forget, out=state)
    return states_THMV, candidates_THMV, seen_THMV


def _chunk_backward(
    chunk: _Chunk, W_HVV: torch.Tensor, initial_HMV: torch.Tensor, dy_THBV: torch.Tensor, carry_HMV: torch.Tensor
) -> tuple[_Chunk, torch.Tensor, torch.Tensor]:
    """Compute the gradients of one chunk: those of its inputs, of W, and of the state before it.

    ``carry_HMV`` is the gradient of the chunk's last state.
    """
    batch, rows = chunk.k_THBK.shape[2:]
    h_THMV, c_THMV, seen_THMV = _run_chunk(chunk, W_HVV, initial_HMV)
    dq_THBK = torch.einsum("thbkv,thbv->thbk", h_THMV.unflatten(2, (batch, rows)), dy_THBV)
    previous_THMV = torch.cat((initial_HMV.unsqueeze(0), h_THMV[:-1])) if seen_THMV is None else seen_THMV
    forget_THM1 = _over_rows(chunk.f_THB, rows)
    slope_THMV = (1 - forget_THM1) * (1 - c_THMV.square())
    dpre_THMV = torch.empty_like(slope_THMV)
    # Row 0 is the gradient of the initial state, row t + 1 that of h_t, initialised with its contribution from y_t.
    all_dh = slope_THMV.new_zeros(len(slope_THMV) + 1, *slope_THMV.shape[1:])
    all_dh[1:] = (chunk.q_THBK.unsqueeze(-1) * dy_THBV.unsqueeze(-2)).flatten(2, 3)
    all_dh[-1] += carry_HMV
    dh_THMV, W_transposed = all_dh[1:], W_HVV.mT
    if chunk.starts_TM1 is not None:
        forget_THM1 = forget_THM1.masked_fill(chunk.starts_TM1.unsqueeze(1), 0.0)
    steps = zip(all_dh, dh_THMV, slope_THMV, forget_THM1, dpre_THMV, strict=False)
    for t, (before, dh, slope, forget, dpre) in reversed(list(enumerate(steps))):
        torch.mul(dh, slope, out=dpre)
        handed = dpre if chunk.starts_TM1 is None else dpre.masked_fill(chunk.starts_TM1[t], 0.0)
        before.addcmul_(dh, forget).baddbmm_(handed, W_transposed)
    dpre_THBKV = dpre_THMV.unflatten(2, (batch, rows))
    dk_THBK = torch.einsum("thbkv,thbv->thbk", dpre_THBKV, chunk.v_THBV)
    dv_THBV = torch.einsum("thbkv,thbk->thbv", dpre_THBKV, chunk.k_THBK)
    df_THB = (dh_THMV * (previous_THMV - c_THMV)).unflatten(2, (batch, rows)).sum((-2, -1))
    dW_HVV = torch.einsum("thmv,thmw->hvw", previous_THMV, dpre_THMV)
    return _Chunk(dq_THBK, dk_THBK, dv_THBV, df_THB), dW_HVV, all_dh[0].clone()


def _over_rows(f_THB: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat each sequence's gate for its K rows: [T, H, M, 1]."""
    return f_THB.repeat_interleave(rows, dim=-1).unsqueeze(-1)


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Force full float32 products inside the context: TF32's errors accumulate over thousands of steps."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _check(
    q_BSHK: torch.Tensor,
    k_BSHK: torch.Tensor,
    v_BSHV: torch.Tensor,
    W_HVV: torch.Tensor,
    f_BSH: torch.Tensor,
    h0_BHKV: torch.Tensor | None,
) -> torch.dtype:
    """Check that shapes fit, and return the dtype to compute in."""
    if v_BSHV.dim() != 4 or q_BSHK.dim() != 4 or 0 in (*v_BSHV.shape, *q_BSHK.shape):
        raise ModelError(
            f"q has shape {tuple(q_BSHK.shape)} and v {tuple(v_BSHV.shape)}; "
            "expected [B, S, H or 1, K] and [B, S, H, V], no axis empty."
        )
    batch, sequence, heads, value_dim = v_BSHV.shape
    key_dim = q_BSHK.shape[-1]
    for name, tensor in (("q", q_BSHK), ("k", k_BSHK)):
        if tuple(tensor.shape) != (batch, sequence, 1, key_dim):
            _expect(name, tensor, "BSHK", (batch, sequence, heads, key_dim))
    _expect("W", W_HVV, "HVV", (heads, value_dim, value_dim))
    _expect("f", f_BSH, "BSH", (batch, sequence, heads))
    given = [q_BSHK, k_BSHK, v_BSHV, W_HVV, f_BSH]
    if h0_BHKV is not None:
        _expect("h0", h0_BHKV, "BHKV", (batch, heads, key_dim, value_dim))
        given.append(h0_BHKV)
    return compute_dtype(*given)
