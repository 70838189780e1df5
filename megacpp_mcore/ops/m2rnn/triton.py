"""The M²RNN mixer between its two projections by Triton kernels: :func:`megacpp_mcore.ops.m2rnn.reference.m2rnn` on a GPU.

Forward, three launches: convolution, SiLU and forget gate (:mod:`megacpp_mcore.ops.m2rnn.convolution`); the recurrence
(:mod:`megacpp_mcore.ops.m2rnn.recurrence`); skip, output gate and norm (:mod:`megacpp_mcore.ops.m2rnn.gate`). Backward, three
launches, and two more per piece of the sequence.
Every sum has a fixed reduction order: the same inputs give the same bits.

Legend: S sequence, P the sequence padded (:data:`~megacpp_mcore.ops.m2rnn.recurrence.PADDING`), B batch, H heads, K key dim,
V value dim, C = H·V, T taps, E saved states, R row blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import one_dtype
from megacpp_mcore.ops.m2rnn import convolution, gate, recurrence
from megacpp_mcore.ops.m2rnn.reference import M2RNNState, check_mixer, last_window, scale_rows
from megacpp_mcore.ops.triton_launch import launch
from megacpp_mcore.util.nearest import nearest_number

KEY_DIMS = (16, 32, 64)
"""Whole row blocks of the recurrence, and powers of two for the convolution. The dispatcher uses the kernels only for 64."""

ROW_LOOPS = 528
"""Programs of the gate's backward, which loop over the rows: four per multiprocessor of an H200."""


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
) -> tuple[torch.Tensor, M2RNNState | None]:
    """Compute the reference's ``m2rnn`` in bfloat16; products have 8-bit factors, 16-bit in the recurrence of states.

    ``checkpoint_every`` is rounded up to a multiple of :data:`~megacpp_mcore.ops.m2rnn.recurrence.PADDING`. Above
    :data:`~megacpp_mcore.ops.m2rnn.recurrence.PIECE` it costs memory in the backward pass, which holds a piece of that length.

    Raises:
        ModelError: another dtype, shapes that do not fit, a key dim not in :data:`KEY_DIMS`, a value dim other than 16, taps
            that differ between qk and v, or ``checkpoint_every`` below 1.
    """
    weights = {
        "qk_conv_weight": qk_conv_weight, "qk_conv_bias": qk_conv_bias, "v_conv_weight": v_conv_weight,
        "v_conv_bias": v_conv_bias, "W": W, "A_log": A_log, "dt_bias": dt_bias, "D": D, "norm_weight": norm_weight,
    }  # fmt: skip
    check_mixer(q_SBK, k_SBK, v_SBHV, g_SBHV, x_f_SBH, weights, seq_idx, initial_state)
    # Reject an unsupported dtype before anything is launched.
    recurrence.products(one_dtype("M²RNN", q=q_SBK, k=k_SBK, v=v_SBHV, g=g_SBHV, x_f=x_f_SBH))
    key_dim, (heads, value_dim) = q_SBK.shape[-1], v_SBHV.shape[-2:]
    if key_dim not in KEY_DIMS or value_dim != recurrence.COLUMNS:
        raise ModelError(
            f"M²RNN's kernels got key dim {key_dim} and value dim {value_dim}; they support key dims {KEY_DIMS} (the "
            f"dispatcher uses them only for 64) and value dim {recurrence.COLUMNS}; the nearest are "
            f"{nearest_number(key_dim, KEY_DIMS)} and {recurrence.COLUMNS}: use these, or the reference"
        )
    if qk_conv_weight.shape[1] != v_conv_weight.shape[1]:
        raise ModelError(
            f"M²RNN's convolution of q and k has {qk_conv_weight.shape[1]} taps and that of v {v_conv_weight.shape[1]}; its "
            "kernels need the same number for both: use the reference"
        )
    if checkpoint_every < 1:
        raise ModelError(f"checkpoint_every is {checkpoint_every}; expected at least 1 token between two saved states.")
    q, k, v, h0_BHKV, lead = q_SBK, k_SBK, v_SBHV, None, 0
    if initial_state is not None:
        h0_BHKV, window_TBC = initial_state.h_BHKV, initial_state.window_BTC.transpose(0, 1).to(v.dtype)
        widths = [key_dim, key_dim, heads * value_dim]
        fronts = window_TBC.split(widths, dim=-1)
        q, k, v = (torch.cat((front.reshape(-1, *x.shape[1:]), x)) for front, x in zip(fronts, (q, k, v), strict=True))
        lead = len(window_TBC)
    settings = Settings(
        eps, norm_width, reduce is None, triton.cdiv(checkpoint_every, recurrence.PADDING) * recurrence.PADDING, lead
    )
    out_SBC, squares_SB1, h_BHKV = M2RNNKernels.apply(q, k, v, g_SBHV, x_f_SBH, *weights.values(), h0_BHKV, seq_idx, settings)
    if reduce is not None:
        means_SB1 = reduce(squares_SB1) / norm_width
        out_SBC = scale_rows(out_SBC, means_SB1, norm_weight, eps).to(v_SBHV.dtype)
    if not return_final_state:
        return out_SBC, None
    rows_BSC = torch.cat((q_SBK, k_SBK, v_SBHV.flatten(2)), dim=-1).transpose(0, 1)
    before_BTC = None if initial_state is None else initial_state.window_BTC
    return out_SBC, M2RNNState(h_BHKV, last_window(rows_BSC, qk_conv_weight.shape[1] - 1, seq_idx, before_BTC))


class Settings(NamedTuple):
    """Arguments that are not tensors.

    Attributes:
        eps: of the norm.
        norm_width: channels that it averages over.
        norm: whether the norm is applied here; else the caller applies it, given the gated output in float32 and Σ u².
        every: tokens between two saved states.
        lead: rows of q, k and v before the first token.
    """

    eps: float
    norm_width: int
    norm: bool
    every: int
    lead: int


class M2RNNKernels(torch.autograd.Function):
    """The mixer as one autograd node. Outputs [S, B, C], the sums of squares [S, B, 1], the last state [B, H, K, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        x_f: torch.Tensor,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Save the inputs, the recurrence's inputs, y, and one state per ``every`` tokens."""
        *weights, h0, seq_idx, settings = others
        q, k, v, g = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, g))
        weights = [weight.contiguous() for weight in weights]
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        h0 = None if h0 is None else h0.contiguous()
        problem = _Problem._make((q, k, v, g, x_f, *weights, seq_idx, settings))
        read = problem.prepare()
        y_RBHPV, states_BHEKV, last_BHKV = recurrence.forward(*read, problem.W, h0, settings.every, seq_idx is not None)
        out, y_SBC, squares_SB = problem.skip_gate_norm(y_RBHPV, read.v)
        ctx.save_for_backward(q, k, v, g, x_f, *weights, seq_idx, *read, states_BHEKV, y_SBC, squares_SB)
        ctx.settings, ctx.h0_dtype = settings, None if h0 is None else h0.dtype
        ctx.set_materialize_grads(False)
        squares_SB1 = squares_SB.unsqueeze(-1)
        if settings.norm:
            ctx.mark_non_differentiable(squares_SB1)
        return out, squares_SB1, last_BHKV

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dsquares: torch.Tensor | None, dlast: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients, in the dtypes of their inputs."""
        *inputs, q_BPK, k_BPK, v_BHPV, f_BHP, states_BHEKV, y_SBC, squares_SB = ctx.saved_tensors
        problem = _Problem._make((*inputs, ctx.settings))
        read = recurrence.Read(q_BPK, k_BPK, v_BHPV, f_BHP)
        dout = torch.zeros_like(y_SBC) if dout is None else dout.contiguous()
        dsquares = torch.zeros_like(squares_SB) if dsquares is None else dsquares.contiguous()
        dy_BHPV, dg, dD, dnorm = problem.skip_gate_norm_backward(dout, dsquares, y_SBC, squares_SB, v_BHPV)
        grads = recurrence.backward(
            read, problem.W, dy_BHPV, dlast, states_BHEKV, ctx.settings.every, problem.seq_idx is not None
        )
        dq, dk, dv, dx_f, *dconvolution, dA_log, dt_bias = problem.prepare_backward(grads, dy_BHPV)
        dW = grads.dW_RBHVV.sum((0, 1)).to(problem.W.dtype)
        dh0 = None if ctx.h0_dtype is None else grads.dh0_BHKV.to(ctx.h0_dtype)
        return dq, dk, dv, dg, dx_f, *dconvolution, dW, dA_log, dt_bias, dD, dnorm, dh0, None, None


class _Problem(NamedTuple):
    """Inputs, weights and settings of one call, and the launches around the recurrence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    x_f: torch.Tensor
    qk_weight: torch.Tensor
    qk_bias: torch.Tensor
    v_weight: torch.Tensor
    v_bias: torch.Tensor
    W: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    D: torch.Tensor
    norm_weight: torch.Tensor
    seq_idx: torch.Tensor | None
    settings: Settings

    def prepare(self) -> recurrence.Read:
        """Convolution, SiLU, forget gate and transpose."""
        S, P, B, H, K, V = self._sizes()
        read = recurrence.Read(
            self.q.new_empty(B, P, K),
            self.q.new_empty(B, P, K),
            self.q.new_empty(B, H, P, V),
            self.q.new_empty(B, H, P, dtype=torch.float32),
        )
        grid = (triton.cdiv(P, convolution.TOKENS), B, 3 + triton.cdiv(H, convolution.HEADS))
        launch(
            convolution.prepare, grid, *self._convolved(), self.seq_idx, *read, *self._strides(), S, P, self.settings.lead,
            **self._constants(),
        )  # fmt: skip
        return read

    def prepare_backward(self, grads: recurrence.Gradients, dy_BHPV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of q, k, v and x_f, of the four weights of the convolution, and of A_log and dt_bias."""
        S, P, B, H, K, V = self._sizes()
        C, T, lead = 2 * K + H * V, self.qk_weight.shape[1], self.settings.lead
        blocks, groups = triton.cdiv(S, convolution.TOKENS_BACKWARD), 3 + triton.cdiv(H, convolution.HEADS)
        du_BSC = self.q.new_empty(B, S, C, dtype=torch.float32)
        dx_f = self.x_f.new_empty(S, B, H)
        dweight = self.q.new_empty(blocks * B, C, T + 1, dtype=torch.float32)
        dgate = self.q.new_empty(blocks * B, H, 2, dtype=torch.float32)
        launch(
            convolution.prepare_backward, (blocks, B, groups), *self._convolved(), self.D, self.seq_idx, grads.dq_BHPK,
            grads.dk_BHPK, grads.dv_RBHPV, dy_BHPV, grads.df_RBHP, du_BSC, dx_f, dweight, dgate, *self._strides(), S, P, lead,
            R=K // recurrence.ROWS, **(self._constants() | {"TOKENS": convolution.TOKENS_BACKWARD}),
            enable_fp_fusion=False,  # so that threads storing the same sum of products get the same bits
        )  # fmt: skip
        dq, dk = (x.new_empty(x.shape) for x in (self.q, self.k))
        dv = self.v.new_empty(self.v.shape)
        constants = self._constants()
        constants.pop("H_POWER")
        launch(
            convolution.convolution_inputs_backward, (triton.cdiv(S + lead, convolution.TOKENS), B, groups - 1), du_BSC,
            self.qk_weight, self.v_weight, self.seq_idx, dq, dk, dv, S, lead, **constants,
        )  # fmt: skip
        dweight_CX, dgate_HX = dweight.sum(0), dgate.sum(0)
        of_weights = [
            part.to(weight.dtype).contiguous()
            for part, weight in zip(
                (dweight_CX[: 2 * K, :T], dweight_CX[: 2 * K, T], dweight_CX[2 * K :, :T], dweight_CX[2 * K :, T]),
                (self.qk_weight, self.qk_bias, self.v_weight, self.v_bias),
                strict=True,
            )
        ]
        of_gate = (dgate_HX[:, 0].to(self.A_log.dtype), dgate_HX[:, 1].to(self.dt_bias.dtype))
        return dq, dk, dv, dx_f, *of_weights, *of_gate

    def skip_gate_norm(self, y_RBHPV: torch.Tensor, v_BHPV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the output, y summed over its row blocks, and the sums of squares [S, B]."""
        S, P, B, H, _, V = self._sizes()
        out = self.v.new_empty(S, B, H * V, dtype=self.v.dtype if self.settings.norm else torch.float32)
        y_SBC, squares_SB = y_RBHPV.new_empty(S, B, H * V), y_RBHPV.new_empty(S, B)
        launch(
            gate.skip_gate_norm, (triton.cdiv(S, gate.TOKENS), B), y_RBHPV, v_BHPV, self.g, self.D, self.norm_weight, out,
            y_SBC, squares_SB, *self.g.stride()[:3], S, P, self.settings.norm_width, self.settings.eps, R=len(y_RBHPV),
            TOKENS=gate.TOKENS, **self._channels(),
        )  # fmt: skip
        return out, y_SBC, squares_SB

    def skip_gate_norm_backward(
        self,
        dout: torch.Tensor,
        dsquares: torch.Tensor,
        y_SBC: torch.Tensor,
        squares_SB: torch.Tensor,
        v_BHPV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Compute the gradients of y, g, D and the norm's weight."""
        S, P, B, H, _, V = self._sizes()
        programs = min(ROW_LOOPS, B * P)
        dy_BHPV, dg = torch.empty_like(v_BHPV), self.g.new_empty(S, B, H, V)
        dD, dnorm = (y_SBC.new_empty(programs, H * V) for _ in range(2))
        launch(
            gate.skip_gate_norm_backward, (programs,), dout, dsquares, y_SBC, v_BHPV, self.g, self.D, self.norm_weight,
            squares_SB, dy_BHPV, dg, dD, dnorm, *self.g.stride()[:3], S, P, B, self.settings.norm_width, self.settings.eps,
            **self._channels(),
        )  # fmt: skip
        dweight = dnorm.sum(0).to(self.norm_weight.dtype) if self.settings.norm else None
        return dy_BHPV, dg, dD.sum(0).to(self.D.dtype), dweight

    def _sizes(self) -> tuple[int, int, int, int, int, int]:
        S, B, H, V = self.g.shape
        return S, triton.cdiv(S, recurrence.PADDING) * recurrence.PADDING, B, H, self.q.shape[-1], V

    def _convolved(self) -> tuple[torch.Tensor, ...]:
        weights = (self.qk_weight, self.qk_bias, self.v_weight, self.v_bias, self.A_log, self.dt_bias)
        return self.q, self.k, self.v, self.x_f, *weights

    def _strides(self) -> tuple[int, ...]:
        return *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:3], *self.x_f.stride()

    def _constants(self) -> dict[str, Any]:
        _, _, _, H, K, V = self._sizes()
        sizes = {"H": H, "H_POWER": triton.next_power_of_2(H), "K": K, "V": V, "T": self.qk_weight.shape[1]}
        blocks = {"TOKENS": convolution.TOKENS, "HEADS": convolution.HEADS}
        return {"DOCUMENTS": self.seq_idx is not None} | sizes | blocks

    def _channels(self) -> dict[str, Any]:
        _, _, _, H, _, V = self._sizes()
        return {"H": H, "V": V, "C_POWER": triton.next_power_of_2(H * V), "NORM": self.settings.norm}
