"""M: the Mamba-3 mixer (SISO or MIMO) and the ModuleSpec of its layer.

Shape legend: S sequence, B batch, D hidden, H heads and G groups (of this tensor-parallel rank), P head dim, R MIMO rank,
N state, A rotation angles. Source: arXiv 2603.15569; behaviour of mamba-ssm 2.3.2.post1 ``modules/mamba3.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.parts import Mixer, Parts, backend_needs, constant, inverse_softplus_of_step, ones
from megacpp_mcore.model import Model


class Mamba3Mixer(Mixer):
    """Mamba-3 between a layer's norm and its residual.

    The input projection is kept in three parts, so that tensor parallelism cuts each one contiguously and a checkpoint
    moves between layouts as it is: ``in_proj`` by heads (rows of a head: z, x, dd_dt, dd_A, trap), ``bc_proj`` by groups
    (rows of a group: B then C, each rank-major ``[R, N]``), and the rotation angles, shared by all heads, replicated.
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
        ssm, heads = model.mamba3, model.mamba_heads
        self.ssm = ssm
        self.heads, self.groups = heads // self.tp_size, ssm.groups // self.tp_size
        projection = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        self.in_proj = build_module(
            column_linear,
            config.hidden_size,
            heads * (2 * ssm.head_dim + 3),
            **projection,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
        )
        self.bc_proj = build_module(
            column_linear,
            config.hidden_size,
            ssm.groups * 2 * ssm.mimo_rank * ssm.state,
            **projection,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
        )
        self.out_proj = build_module(
            row_linear,
            model.mamba_inner,
            config.hidden_size,
            **projection,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )
        self._add_parameters(heads)
        self.backend = dispatcher.request(
            "mamba3",
            layer=layer_number,
            head_dim=ssm.head_dim,
            mimo_rank=ssm.mimo_rank,
            state=ssm.state,
            **backend_needs(config),
        )

    def _add_parameters(self, heads: int) -> None:
        ssm, rank = self.ssm, self.ssm.mimo_rank
        self.add_parameter("angle_weight", (ssm.angles, self.config.hidden_size), self.config.init_method, axis=None)
        self.add_parameter("b_norm_weight", (ssm.state,), ones, axis=None)
        self.add_parameter("c_norm_weight", (ssm.state,), ones, axis=None)
        self.add_parameter("dt_bias", (heads,), inverse_softplus_of_step, axis=0, fp32=True)
        self.add_parameter("D", (heads,), ones, axis=0, fp32=True)
        self.add_parameter("b_bias", (heads, rank, ssm.state), ones, axis=0, fp32=True)
        self.add_parameter("c_bias", (heads, rank, ssm.state), ones, axis=0, fp32=True)
        if rank > 1:
            shape = (heads, rank, ssm.head_dim)
            self.add_parameter("mimo_x", shape, constant(1 / rank), axis=0, fp32=True)
            self.add_parameter("mimo_z", shape, ones, axis=0, fp32=True)
            self.add_parameter("mimo_o", shape, constant(1 / rank), axis=0, fp32=True)

    def forward(
        self,
        hidden_SBD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix along the sequence: ``[S, B, D] -> ([S, B, D], bias or None)``.

        Causal by itself. The state begins anew at each document's first row, which the mask or
        the packed sequences tell (:mod:`megacpp_mcore.layer_specs.documents`).

        Raises:
            ModelError: for an inference context, and for a mask that says more than causality and documents.
        """
        self.refuse_unsupported(inference_context)
        ssm = self.ssm
        heads_SBX, _ = self.in_proj(hidden_SBD)
        groups_SBX, _ = self.bc_proj(hidden_SBD)
        angles_BSA = self.replicated_linear(hidden_SBD, self.angle_weight).transpose(0, 1)
        seq_idx_BS = self.documents(angles_BSA, attention_mask, packed_seq_params)
        heads_BSHX = heads_SBX.transpose(0, 1).unflatten(-1, (self.heads, -1))
        z, x, dd_dt, dd_A, trap = heads_BSHX.split([ssm.head_dim, ssm.head_dim, 1, 1, 1], dim=-1)
        bc = groups_SBX.transpose(0, 1).unflatten(-1, (self.groups, 2, ssm.mimo_rank, ssm.state))
        b_BSRGN, c_BSRGN = (part.transpose(2, 3) for part in bc.unbind(dim=3))
        y_BSHP = self.backend.fn(
            x,
            z,
            b_BSRGN,
            c_BSRGN,
            dd_dt.squeeze(-1),
            dd_A.squeeze(-1),
            trap.squeeze(-1),
            angles_BSA,
            dt_bias=self.dt_bias,
            b_bias=self.b_bias,
            c_bias=self.c_bias,
            b_norm_weight=self.replicated(self.b_norm_weight),
            c_norm_weight=self.replicated(self.c_norm_weight),
            D=self.D,
            mimo_x=self.mimo_x if ssm.mimo_rank > 1 else None,
            mimo_z=self.mimo_z if ssm.mimo_rank > 1 else None,
            mimo_o=self.mimo_o if ssm.mimo_rank > 1 else None,
            chunk_size=ssm.chunk,
            A_floor=ssm.a_floor,
            eps=self.config.layernorm_epsilon,
            activation=ssm.decay_activation,
            seq_idx=seq_idx_BS,
        )
        return self.out_proj(y_BSHP.flatten(2).transpose(0, 1).contiguous())


def mamba_layer_spec(model: Model, parts: Parts, dispatcher: Dispatcher) -> ModuleSpec:
    """One M layer: norm, Mamba-3 mixer, residual; no feed-forward part."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=ModuleSpec(
                module=Mamba3Mixer,
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
