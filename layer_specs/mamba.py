"""M: the Mamba-3 mixer (SISO or MIMO) and its ModuleSpec.

Shape legend: S sequence, B batch, D hidden, H heads and G groups (of this tensor- and context-parallel rank), P head dim,
R MIMO rank, N state. Source: arXiv 2603.15569; behaviour of mamba-ssm 2.3.2.post1 ``modules/mamba3.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars

from megacpp_mcore import policy
from megacpp_mcore.arguments.read import RUN
from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.parts import Mixer, backend_needs
from megacpp_mcore.layer_specs.projection import InProjection, Part, inexact_rows
from megacpp_mcore.model import Model
from megacpp_mcore.ops.initializers import constant, inverse_softplus_of_step, ones


def projection_parts(model: Model) -> tuple[Part, ...]:
    """List the parts of Mamba-3's input projection: z, x by head, B, C by group, then rank, three scalars per head, angles."""
    ssm, heads = model.mamba3, model.mamba_heads
    columns = ssm.groups * ssm.mimo_rank * ssm.state
    return (
        Part("z", model.mamba_inner),
        Part("x", model.mamba_inner),
        Part("B", columns),
        Part("C", columns),
        Part("dt", heads, exact=True),  # these steer the recurrence
        Part("A", heads, follows=True, exact=True),
        Part("trap", heads, follows=True, exact=True),
        Part("angles", ssm.angles, replicated=True, exact=True),
    )


class Mamba3Mixer(Mixer):
    """Mamba-3 between a layer's norm and its residual.

    Per-head parameters are split by heads over tensor parallelism. They are stored as 1-D tensors, head by head: Megatron
    exempts 1-D parameters from weight decay, which should not act on a bias or a multiplicative scale.
    """

    family: ClassVar[str] = "M"

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
        ssm, heads = model.mamba3, model.mamba_heads
        self.ssm = ssm
        ranks = self.context.size
        self.heads, self.groups = heads // self.tp_size // ranks, max(1, ssm.groups // self.tp_size // ranks)
        self.ranks_of_group = max(1, ranks // (ssm.groups // self.tp_size))
        parts, needs = projection_parts(model), backend_needs(config)
        projection = dispatcher.request(
            "mamba3_projection",
            layer=layer_number,
            hidden=config.hidden_size,
            outputs=inexact_rows(parts, self.tp_size),
            **needs,
        )
        self.in_proj = InProjection(config, parts, config.init_method, self.tp_group, projection)
        self.out_proj = self.output_projection(row_linear, model.mamba_inner)
        self._add_parameters(heads)
        has_arguments = global_vars._GLOBAL_ARGS is not None  # without a stock script the micro-batch size is unknown
        to_keep = policy.mamba_keeps(getattr(config, RUN, None) if has_arguments else None)
        self.backend = dispatcher.request_in_place(
            "mamba3",
            "triton",
            to_keep and f"triton_keep_{to_keep}",
            "the GPU's memory is estimated to suffice for it",
            layer=layer_number,
            head_dim=ssm.head_dim,
            mimo_rank=ssm.mimo_rank,
            state=ssm.state,
            **needs,
        )

    def _add_parameters(self, heads: int) -> None:
        ssm, rank = self.ssm, self.ssm.mimo_rank
        self.add_parameter("b_norm_weight", (ssm.state,), ones, axis=None)
        self.add_parameter("c_norm_weight", (ssm.state,), ones, axis=None)
        if ssm.out_norm:
            self.add_parameter("out_norm_weight", (heads * ssm.head_dim,), ones, axis=0)
        self.add_parameter("dt_bias", (heads,), inverse_softplus_of_step, axis=0, fp32=True)
        self.add_parameter("D", (heads,), ones, axis=0, fp32=True)
        self.add_parameter("b_bias", (heads * rank * ssm.state,), ones, axis=0, fp32=True)
        self.add_parameter("c_bias", (heads * rank * ssm.state,), ones, axis=0, fp32=True)
        if rank > 1:
            values = heads * rank * ssm.head_dim
            self.add_parameter("mimo_x", (values,), constant(1 / rank), axis=0, fp32=True)
            self.add_parameter("mimo_z", (values,), ones, axis=0, fp32=True)
            self.add_parameter("mimo_o", (values,), constant(1 / rank), axis=0, fp32=True)

    def forward(
        self,
        hidden_SBD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix along the sequence: ``[S, B, D] -> ([S, B, D], bias or None)``.

        Inherently causal. The state is reset at the first row of each document, read from the mask or the packed sequences
        (:mod:`megacpp_mcore.layer_specs.documents`). An inference context stores the state.

        Raises:
            ModelError: for a mask that expresses more than causality and documents, and as
                :class:`megacpp_mcore.layer_specs.decode.LayerCache`.
        """
        cache = self.cache(inference_context, hidden_SBD, packed_seq_params)
        ssm = self.ssm
        parts = self.in_proj(hidden_SBD)
        if self.context:
            parts = self._of_own_heads(parts)
        z_SBHP, x_SBHP = (parts[name].unflatten(-1, (self.heads, ssm.head_dim)) for name in "zx")
        by_group = (self.groups, ssm.mimo_rank, ssm.state)
        b_SBGRN, c_SBGRN = (parts[name].unflatten(-1, by_group) for name in "BC")
        y_SBHP, state = self.backend.fn(
            x_SBHP,
            z_SBHP,
            b_SBGRN,
            c_SBGRN,
            parts["dt"],
            parts["A"],
            parts["trap"],
            parts["angles"],
            dt_bias=self.context.own(self.dt_bias),
            D=self.context.own(self.D),
            b_bias=self._by_head("b_bias", ssm.state),
            c_bias=self._by_head("c_bias", ssm.state),
            b_norm_weight=self.replicated(self.b_norm_weight),
            c_norm_weight=self.replicated(self.c_norm_weight),
            mimo_x=self._by_head("mimo_x", ssm.head_dim),
            mimo_z=self._by_head("mimo_z", ssm.head_dim),
            mimo_o=self._by_head("mimo_o", ssm.head_dim),
            out_norm_weight=self.context.own(self.out_norm_weight) if ssm.out_norm else None,
            chunk_size=ssm.chunk,
            A_floor=ssm.a_floor,
            eps=self.config.layernorm_epsilon,
            activation=ssm.decay_activation,
            seq_idx=self.documents(x_SBHP, attention_mask, packed_seq_params, cache),
            initial_state=None if cache is None else cache.state,
            return_final_state=cache is not None,
        )
        if cache is not None:
            cache.leave(state)
        y_SBX = y_SBHP.flatten(2)
        return self.out_proj(self.context.to_rows(y_SBX) if self.context else y_SBX)

    def _of_own_heads(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange the parts of this context-parallel rank's rows for those of its heads in all rows."""
        if self.ranks_of_group > 1:  # each of them gets the group
            for name in "BC":
                by_group = parts[name].unflatten(-1, (-1, self.ssm.mimo_rank * self.ssm.state))
                parts[name] = by_group.repeat_interleave(self.ranks_of_group, dim=2).flatten(2)
        return self.context.parts_to_heads(parts, shared=("angles",))

    def _by_head(self, name: str, width: int) -> torch.Tensor | None:
        """Return a parameter as ``[H, R, width]``; None if the model lacks it (SISO and ``mimo_*``)."""
        parameter = getattr(self, name, None)
        return None if parameter is None else self.context.own(parameter).view(self.heads, self.ssm.mimo_rank, width)
