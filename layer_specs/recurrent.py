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
from megacpp_mcore.layer_specs.parts import Mixer, Parts, inverse_softplus_of_step, ones
from megacpp_mcore.model import Model
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
            "m2rnn", layer=layer_number, key_dim=self.rnn.key_dim, value_dim=self.rnn.value_dim
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

        Causal by itself: the mask is not read, and so documents of a row are not kept apart.

        Raises:
            ModelError: for an inference context or packed sequences.
        """
        self.refuse_unsupported(inference_context, packed_seq_params)
        rnn = self.rnn
        heads_SBX, _ = self.in_proj(hidden_SBD)
        heads_BSHX = heads_SBX.transpose(0, 1).unflatten(-1, (self.heads, -1))
        v, x_f, g_BSHV = heads_BSHX.split([rnn.value_dim, 1, rnn.value_dim], dim=-1)
        qk_BSC = self.replicated_linear(hidden_SBD, self.qk_weight).transpose(0, 1)
        qk_BSC = causal_convolution(qk_BSC, self.replicated(self.qk_conv_weight), self.replicated(self.qk_conv_bias))
        v_BSHV = causal_convolution(v.flatten(2), self.v_conv_weight, self.v_conv_bias).unflatten(-1, (self.heads, -1))
        q_BS1K, k_BS1K = qk_BSC.unsqueeze(2).chunk(2, dim=-1)
        f_BSH = m2rnn_forget_gate(x_f.squeeze(-1), self.A_log, self.dt_bias)
        y_BSHV, _ = self.backend.fn(q_BS1K, k_BS1K, v_BSHV, self.W, f_BSH, checkpoint_every=rnn.checkpoint_every)
        y_BSHV = y_BSHV.float() + self.D.view(self.heads, -1) * v_BSHV.float()
        gated_BSC = (y_BSHV * torch.nn.functional.silu(g_BSHV.float())).flatten(2)
        normed_BSC = self._norm(gated_BSC).to(hidden_SBD.dtype)
        return self.out_proj(normed_BSC.transpose(0, 1).contiguous())

    def _norm(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the channels of all heads, those of the other tensor-parallel ranks included."""
        squares = x_BSC.square().sum(-1, keepdim=True)
        if self.tp_size > 1:
            # Summed over ranks forward (reduce) and backward (copy): every rank's output depends on every rank's squares.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        scale = torch.rsqrt(squares / self.all_values + self.config.layernorm_epsilon)
        return x_BSC * scale * self.norm_weight


def causal_convolution(x_BSC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """SiLU of a depthwise causal convolution: output t sees inputs t−K+1 … t; ``[B, S, C] -> [B, S, C]``."""
    channels, kernel = weight_CK.shape
    padded_BCS = torch.nn.functional.pad(x_BSC.transpose(1, 2), (kernel - 1, 0))
    y_BCS = torch.nn.functional.conv1d(padded_BCS, weight_CK.unsqueeze(1), bias_C, groups=channels)
    return torch.nn.functional.silu(y_BCS).transpose(1, 2)


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
