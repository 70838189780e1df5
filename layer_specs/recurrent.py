"""R: the M²RNN mixer and the ModuleSpec of its layer.

Shape legend: S sequence, B batch, D hidden, H heads (of this tensor-parallel rank), K key dim, V value dim, C channels.
Source: arXiv 2603.14360.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.parts import Mixer, Parts, backend_needs, inverse_softplus_of_step, ones
from megacpp_mcore.model import Model
from megacpp_mcore.ops.checks import compute_dtype
from megacpp_mcore.ops.m2rnn.reference import m2rnn_forget_gate


def _identities(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.eye(tensor.shape[-1]).expand_as(tensor))


def _log_of_uniform_rate(tensor: torch.Tensor) -> None:
    # A uniform in [1, 16], as in Mamba-2 (mamba-ssm 2.3.2.post1, ``modules/mamba2.py``, A_init_range).
    tensor.uniform_(1.0, 16.0).log_()


def _convolution(tensor: torch.Tensor) -> None:
    bound = tensor.shape[-1] ** -0.5  # torch.nn.Conv1d's own range for a depthwise kernel
    tensor.uniform_(-bound, bound)


class M2RNNMixer(Mixer):
    """M²RNN between a layer's norm and its residual.

    ``in_proj`` is cut by heads (rows of a head: v, the forget gate's f, the output gate's g). The single query/key head is
    replicated: each rank computes it whole, and its gradients are summed over ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: Model,
        column_linear: type,
        row_linear: type,
        dispatcher: Dispatcher,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config, layer_number, pg_collection)
        self.rnn, heads = model.m2rnn, model.recurrent_heads
        self.heads, self.all_values = heads // self.tp_size, heads * self.rnn.value_dim
        projection = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        self.in_proj = build_module(
            column_linear,
            config.hidden_size,
            heads * (2 * self.rnn.value_dim + 1),
            **projection,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
        )
        self.out_proj = build_module(
            row_linear,
            self.all_values,
            config.hidden_size,
            **projection,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )
        self._add_parameters(heads)
        self.backend = dispatcher.request(
            "m2rnn",
            layer=layer_number,
            key_dim=self.rnn.key_dim,
            value_dim=self.rnn.value_dim,
            **backend_needs(config),
        )

    def _add_parameters(self, heads: int) -> None:
        rnn, hidden, init = self.rnn, self.config.hidden_size, self.config.init_method
        self.add_parameter("qk_weight", (2 * rnn.key_dim, hidden), init, axis=None)
        self.add_parameter("qk_conv_weight", (2 * rnn.key_dim, rnn.conv_kernel), _convolution, axis=None)
        self.add_parameter("qk_conv_bias", (2 * rnn.key_dim,), torch.nn.init.zeros_, axis=None)
        self.add_parameter("v_conv_weight", (self.all_values, rnn.conv_kernel), _convolution, axis=0)
        self.add_parameter("v_conv_bias", (self.all_values,), torch.nn.init.zeros_, axis=0)
        self.add_parameter("norm_weight", (self.all_values,), ones, axis=0)
        self.add_parameter("W", (heads, rnn.value_dim, rnn.value_dim), _identities, axis=0, fp32=True)
        self.add_parameter("A_log", (heads,), _log_of_uniform_rate, axis=0, fp32=True)
        self.add_parameter("dt_bias", (heads,), inverse_softplus_of_step, axis=0, fp32=True)
        # One dimension, not [H, V]: Megatron exempts those, and biases, from weight decay, which has no place on a skip.
        self.add_parameter("D", (self.all_values,), ones, axis=0, fp32=True)

    def forward(
        self,
        hidden_SBD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix along the sequence: ``[S, B, D] -> ([S, B, D], bias or None)``.

        Causal by itself. State and convolution begin anew at each document's first row, which the mask or
        the packed sequences tell (:mod:`megacpp_mcore.layer_specs.documents`).

        Raises:
            ModelError: for an inference context, and for a mask that says more than causality and documents.
        """
        self.refuse_unsupported(inference_context)
        rnn = self.rnn
        heads_SBX, _ = self.in_proj(hidden_SBD)
        heads_BSHX = heads_SBX.transpose(0, 1).unflatten(-1, (self.heads, -1))
        v, x_f, g_BSHV = heads_BSHX.split([rnn.value_dim, 1, rnn.value_dim], dim=-1)
        qk_BSC = self.replicated_linear(hidden_SBD, self.qk_weight).transpose(0, 1)
        seq_idx_BS = self.documents(qk_BSC, attention_mask, packed_seq_params)
        qk_conv = (self.replicated(self.qk_conv_weight), self.replicated(self.qk_conv_bias))
        qk_BSC = self._convolve(qk_BSC, *qk_conv, seq_idx_BS)
        v_BSC = self._convolve(v.flatten(2), self.v_conv_weight, self.v_conv_bias, seq_idx_BS)
        gated_BSC, squares_BS1 = self._recur(qk_BSC, v_BSC, x_f.squeeze(-1), g_BSHV, seq_idx_BS)
        if self.tp_size > 1:
            # Summed over ranks forward (reduce) and backward (copy): every rank's output depends on every rank's squares.
            squares_BS1 = reduce_from_tensor_model_parallel_region(squares_BS1, group=self.tp_group)
            squares_BS1 = copy_to_tensor_model_parallel_region(squares_BS1, group=self.tp_group)
        means_BS1 = squares_BS1 / self.all_values
        normed_BSC = self._scale(gated_BSC, means_BS1, self.norm_weight, self.config.layernorm_epsilon)
        return self.out_proj(normed_BSC.to(hidden_SBD.dtype).transpose(0, 1).contiguous())

    def _recur(
        self,
        qk_BSC: torch.Tensor,
        v_BSC: torch.Tensor,
        x_f_BSH: torch.Tensor,
        g_BSHV: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the convolved q, k and v to the gated output ``[B, S, H·V]``, fp32, and the sum of its squares ``[B, S, 1]``."""
        v_BSHV = v_BSC.unflatten(-1, (self.heads, -1))
        q_BS1K, k_BS1K = qk_BSC.unsqueeze(2).chunk(2, dim=-1)
        f_BSH = self._forget(x_f_BSH, self.A_log, self.dt_bias)
        y_BSHV, _ = self.backend.fn(
            q_BS1K, k_BS1K, v_BSHV, self.W, f_BSH, checkpoint_every=self.rnn.checkpoint_every, seq_idx=seq_idx_BS
        )
        return self._gate(y_BSHV, v_BSHV, g_BSHV, self.D)

    # Regions: pure functions of tensors, in whose place megacpp_mcore.regional puts their compiled or recomputed selves.
    def _convolve(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        return causal_convolution(*inputs)  # type: ignore[arg-type]

    def _forget(self, *inputs: torch.Tensor) -> torch.Tensor:
        return m2rnn_forget_gate(*inputs)

    def _gate(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return skip_and_gate(*inputs)

    def _scale(self, *inputs: Any) -> torch.Tensor:
        return scale_rows(*inputs)


def skip_and_gate(
    y_BSHV: torch.Tensor, v_BSHV: torch.Tensor, g_BSHV: torch.Tensor, D_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y + D ⊙ v) ⊙ SiLU(g)`` as ``[B, S, C]`` in fp32, C = H·V, and the sum of its squares over C ``[B, S, 1]``."""
    y_BSHV = y_BSHV.float() + D_C.view(y_BSHV.shape[2:]) * v_BSHV.float()
    gated_BSC = (y_BSHV * torch.nn.functional.silu(g_BSHV.float())).flatten(2)
    return gated_BSC, gated_BSC.square().sum(-1, keepdim=True)


def scale_rows(x_BSC: torch.Tensor, means_BS1: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of ``x`` with the mean of its squares given, as it is over the channels of all tensor-parallel ranks."""
    return x_BSC * torch.rsqrt(means_BS1 + eps) * weight_C


def causal_convolution(
    x_BSC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor, seq_idx_BS: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU of a depthwise causal convolution: output t sees inputs t−K+1 … t of its document; ``[B, S, C] -> [B, S, C]``.

    Args:
        x_BSC: the input.
        weight_CK: the kernel of each channel, the tap of the present token last.
        bias_C: the bias of each channel.
        seq_idx_BS: the number of each token's document (:mod:`megacpp_mcore.ops.packed.documents`); None: one document.
    """
    channels, kernel = weight_CK.shape
    if seq_idx_BS is not None:
        return torch.nn.functional.silu(_convolve_documents(x_BSC, weight_CK, bias_C, seq_idx_BS))
    padded_BCS = torch.nn.functional.pad(x_BSC.transpose(1, 2), (kernel - 1, 0))
    y_BCS = torch.nn.functional.conv1d(padded_BCS, weight_CK.unsqueeze(1), bias_C, groups=channels)
    return torch.nn.functional.silu(y_BCS).transpose(1, 2)


def _convolve_documents(
    x_BSC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor, seq_idx_BS: torch.Tensor
) -> torch.Tensor:
    """The convolution tap by tap, without those that reach into the document before; summed in float32 or wider."""
    dtype, kernel = compute_dtype(x_BSC, weight_CK, bias_C), weight_CK.shape[1]
    x, weight = x_BSC.to(dtype), weight_CK.to(dtype)
    y_BSC = bias_C.to(dtype) + x * weight[:, -1]
    for back in range(1, min(kernel, x.shape[1])):
        same_BS1 = (seq_idx_BS[:, back:] == seq_idx_BS[:, :-back]).unsqueeze(-1)
        tap_BSC = torch.where(same_BS1, x[:, :-back] * weight[:, -1 - back], x.new_zeros(()))
        y_BSC = y_BSC + torch.nn.functional.pad(tap_BSC, (0, 0, back, 0))
    return y_BSC.to(x_BSC.dtype)


def recurrent_layer_spec(model: Model, parts: Parts, dispatcher: Dispatcher) -> ModuleSpec:
    """One R layer: norm, M²RNN mixer, residual; no feed-forward part."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=ModuleSpec(
                module=M2RNNMixer,
                params={
                    "model": model,
                    "column_linear": parts.column_linear,
                    "row_linear": parts.row_linear,
                    "dispatcher": dispatcher,
                },
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
