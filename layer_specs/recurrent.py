"""R: the M²RNN mixer and its ModuleSpec.

Shape legend: S sequence, B batch, D hidden, H heads (of this tensor- and context-parallel rank), K key dim, V
value dim. Source: arXiv 2603.14360.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.parts import Mixer, backend_needs
from megacpp_mcore.layer_specs.projection import InProjection, Part
from megacpp_mcore.model import Model
from megacpp_mcore.ops.initializers import convolution, identities, inverse_softplus_of_step, log_of_decay, ones


def projection_parts(model: Model) -> tuple[Part, ...]:
    """List the parts of M²RNN's input projection: one shared head of q and k; v and output gate by head; forget scalars."""
    rnn, heads = model.m2rnn, model.recurrent_heads
    return (
        Part("q", rnn.key_dim, replicated=True),
        Part("k", rnn.key_dim, replicated=True),
        Part("v", heads * rnn.value_dim),
        Part("g", heads * rnn.value_dim),
        Part("f", heads),
    )


class M2RNNMixer(Mixer):
    """M²RNN between a layer's norm and its residual.

    Heads are split over tensor parallelism. The single query/key head is replicated: each rank computes all of it, and its
    gradients are summed over ranks. W and D are stored as 1-D tensors, head by head: Megatron exempts these from weight decay,
    which should not act on a transition that starts as the identity, nor on a skip connection.
    """

    family: ClassVar[str] = "R"

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: Model,
        row_linear: type,
        dispatcher: Dispatcher,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config, layer_number, pg_collection)
        self.rnn, heads = model.m2rnn, model.recurrent_heads
        self.heads, self.all_values = heads // self.tp_size // self.context.size, heads * self.rnn.value_dim
        self.in_proj = InProjection(config, projection_parts(model), config.init_method, self.tp_group)
        self.out_proj = self.output_projection(row_linear, self.all_values)
        self._add_parameters(heads)
        self.backend = dispatcher.request(
            "m2rnn",
            layer=layer_number,
            key_dim=self.rnn.key_dim,
            value_dim=self.rnn.value_dim,
            **backend_needs(config),
        )

    def _add_parameters(self, heads: int) -> None:
        rnn = self.rnn
        self.add_parameter("qk_conv_weight", (2 * rnn.key_dim, rnn.conv_kernel), convolution, axis=None)
        self.add_parameter("qk_conv_bias", (2 * rnn.key_dim,), torch.nn.init.zeros_, axis=None)
        self.add_parameter("v_conv_weight", (self.all_values, rnn.conv_kernel), convolution, axis=0)
        self.add_parameter("v_conv_bias", (self.all_values,), torch.nn.init.zeros_, axis=0)
        self.add_parameter("norm_weight", (self.all_values,), ones, axis=0)
        transition = partial(identities, width=rnn.value_dim)
        self.add_parameter("W", (heads * rnn.value_dim**2,), transition, axis=0, fp32=True)
        self.add_parameter("A_log", (heads,), log_of_decay, axis=0, fp32=True)
        self.add_parameter("dt_bias", (heads,), inverse_softplus_of_step, axis=0, fp32=True)
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

        Inherently causal. State and convolution are reset at the first row of each document, read from the mask or the packed
        sequences (:mod:`megacpp_mcore.layer_specs.documents`). An inference context stores both.

        Raises:
            ModelError: for a mask that expresses more than causality and documents, and as
                :class:`megacpp_mcore.layer_specs.decode.LayerCache`.
        """
        cache = self.cache(inference_context, hidden_SBD, packed_seq_params)
        parts = self.in_proj(hidden_SBD)
        if self.context:
            parts = self.context.parts_to_heads(parts, shared=("q", "k"))
        own = self.context.own
        v_SBHV, g_SBHV = (parts[name].unflatten(-1, (self.heads, self.rnn.value_dim)) for name in "vg")
        out_SBC, state = self.backend.fn(
            parts["q"],
            parts["k"],
            v_SBHV,
            g_SBHV,
            parts["f"],
            qk_conv_weight=self.replicated(self.qk_conv_weight),
            qk_conv_bias=self.replicated(self.qk_conv_bias),
            v_conv_weight=own(self.v_conv_weight),
            v_conv_bias=own(self.v_conv_bias),
            W=own(self.W).view(self.heads, self.rnn.value_dim, self.rnn.value_dim),
            A_log=own(self.A_log),
            dt_bias=own(self.dt_bias),
            D=own(self.D),
            norm_weight=own(self.norm_weight),
            eps=self.config.layernorm_epsilon,
            norm_width=self.all_values,
            reduce=self._sum_over_ranks if self.tp_size * self.context.size > 1 else None,
            seq_idx=self.documents(v_SBHV, attention_mask, packed_seq_params, cache),
            initial_state=None if cache is None else cache.state,
            return_final_state=cache is not None,
            checkpoint_every=self.rnn.checkpoint_every,
        )
        if cache is not None:
            cache.leave(state)
        return self.out_proj(self.context.to_rows(out_SBC) if self.context else out_SBC)

    def _sum_over_ranks(self, squares_SB1: torch.Tensor) -> torch.Tensor:
        """All-reduce in forward and in backward: every rank's output depends on every rank's squares."""
        for group, size in ((self.tp_group, self.tp_size), (self.context.group, self.context.size)):
            if size > 1:
                squares_SB1 = reduce_from_tensor_model_parallel_region(squares_SB1, group=group)
                squares_SB1 = copy_to_tensor_model_parallel_region(squares_SB1, group=group)
        return squares_SB1
