"""A: multi-head latent attention, full or sparse, up to its core attention; and the ModuleSpecs of both.

Projections and norms are stock modules (megatron-core 0.19): full MLA extends ``MLASelfAttention``, sparse MLA extends
``AbsorbedMLASelfAttention``. The code between them is ours: RoPE, documents and latents (whose op may run instead of the
modules, on their weights) in this file, the core attention in :mod:`megacpp_mcore.layer_specs.core_attention`.

Shape legend: S rows, B batch, H heads (of this rank), D hidden, Q and L ranks of the query and key latents, R rotary head dim,
C non-rotary head dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.context import Context
from megacpp_mcore.layer_specs.core_attention import MLACoreAttention, SparseCoreAttention
from megacpp_mcore.layer_specs.decode import LayerCache, refuse_decoding
from megacpp_mcore.layer_specs.documents import documents
from megacpp_mcore.layer_specs.gradients import main_grad_of
from megacpp_mcore.layer_specs.indexer import PositionedIndexer
from megacpp_mcore.layer_specs.mla import mla_widths, replaces_modules, rotation, wait_for_parameters
from megacpp_mcore.layer_specs.parts import Parts, backend_needs
from megacpp_mcore.model import DSA
from megacpp_mcore.ops.indexer.cache import IndexCache
from megacpp_mcore.ops.main_grad import linear


def _whole_rows(linear: ColumnParallelLinear, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Forward hook, ``([S, B, C / TP], bias) -> ([S / TP, B, C], bias)``: gathers columns, scatters the sequence."""
    sharded_SBC, bias = output
    full_SBC = gather_from_tensor_model_parallel_region(sharded_SBC, group=linear.tp_group)
    return scatter_to_sequence_parallel_region(full_SBC, group=linear.tp_group), bias


class _WholeRows:
    """Mixin for stock MLA: a column-parallel kv down-projection outputs all columns of each row.

    The rotary part of the key is shared by the heads of all tensor-parallel ranks, so its gradient has to be summed over them.
    Megatron-Core 0.19 does so for an output with all columns, but not for a sharded one that it gathers itself
    (``multi_latent_attention.py``, ``absorbed_mla.py``): each rank would train its rows of the weight for only its own heads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        linear = self.linear_kv_down_proj  # type: ignore[attr-defined]
        if isinstance(linear, ColumnParallelLinear) and self.config.sequence_parallel:  # type: ignore[attr-defined]
            linear.register_forward_hook(_whole_rows)


class _Projections:
    """Mixin for stock MLA: everything between the projections and the core attention, by the dispatcher's ops.

    The stock method applies RoPE in about ten passes over queries and keys, and copies them twice more.

    Attributes:
        absorbs: whether attention is over latents.

    Args are those of the stock class; ``dispatcher`` comes from the spec.
    """

    absorbs = False

    def __init__(self: Any, *args: Any, dispatcher: Dispatcher, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.context = Context(self.pg_collection)
        needs = {"layer": self.layer_number, **mla_widths(config), **backend_needs(config)}
        self.projection_backend = dispatcher.request("mla_projection", **needs)
        self.keys_backend = dispatcher.request("mla_keys", **needs)
        self.latents_backend = None
        if len(self.linear_q_down_proj.weight) == config.q_lora_rank:  # not sharded, and neither is that of the keys
            self.latents_backend = dispatcher.request("mla_latents", query_latent_dim=config.q_lora_rank, **needs)

    def _projected(
        self: Any, hidden_SBD: torch.Tensor, inference_context: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of ``_up`` on latents, rotary part, rotations and ``weights``, and the normed query latents.

        ``--recompute-modules mla_up_proj`` recomputes ``_up`` in the backward pass.
        """
        length = self.rotary_pos_emb.get_rotary_seq_len(inference_context, None, hidden_SBD, self.config, None)
        own_latents = query, key, rotary = self._latents(hidden_SBD)
        if self.config.sequence_parallel:
            # One gather for all: a gather this narrow takes as long as one of all three.
            widths = [latents.shape[-1] for latents in own_latents]
            gathered = gather_from_sequence_parallel_region(torch.cat(own_latents, dim=-1), group=self.tp_group)
            query, key, rotary = gathered.split(widths, dim=-1)
        first = 0 if inference_context is None else inference_context.sequence_len_offset
        rotations = (rotation(self.rotary_pos_emb, length)[first : first + len(rotary)],) * 2
        if self.context:
            rotations = rotations[0], rotation(self.rotary_pos_emb, length, whole=True)
            latents_TBX = self.context.whole(torch.cat([key, rotary], dim=-1))
            key, rotary = latents_TBX.split([key.shape[-1], rotary.shape[-1]], dim=-1)
        arguments = (query, key, rotary, *rotations, *weights)
        if not self.recompute_up_proj:
            return *self._up(*arguments), own_latents[0]
        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8)  # its default, False, counts as FP8
        return *self.qkv_up_checkpoint.checkpoint(self._up, *arguments), own_latents[0]

    def _latents(self: Any, hidden_SBD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the normed latents of queries and keys, and the rotary part of the keys, for the rows of ``hidden_SBD``."""
        config = self.config
        modules = (self.linear_q_down_proj, self.linear_kv_down_proj, self.q_layernorm, self.kv_layernorm)
        if replaces_modules(self.latents_backend, *modules):
            weights = (module.weight for module in modules)
            return self.latents_backend.fn(hidden_SBD, *weights, config.layernorm_epsilon)
        query, _ = self.linear_q_down_proj(hidden_SBD)
        if query.shape[-1] != config.q_lora_rank:
            query = gather_from_tensor_model_parallel_region(query, group=self.tp_group)
            if config.sequence_parallel:
                query = scatter_to_sequence_parallel_region(query, group=self.tp_group)
        query = self.q_layernorm(query)
        key, _ = self.linear_kv_down_proj(hidden_SBD)
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if key.shape[-1] != sum(widths):  # without sequence parallelism: see _WholeRows
            key = gather_from_tensor_model_parallel_region(key, group=self.tp_group)
        key, rotary = key.split(widths, dim=-1)
        return query, self.kv_layernorm(key), rotary

    def _heads(self: Any, projection: Any, latents_SBX: torch.Tensor) -> torch.Tensor:
        """Map ``[S, B, X] -> [S, B, H, N]`` by an up-projection, whose module would gather rows a second time."""
        if self.config.sequence_parallel:
            wait_for_parameters(projection)
            projected = linear(latents_SBX, projection.weight, main_grad_of(projection.weight, self.config))
        else:
            projected, _ = projection(latents_SBX)
        return projected.unflatten(-1, (self.num_attention_heads_per_partition, -1))


class _Documents:
    """Mixin for stock MLA: computes a packed batch as one row and passes its documents to the core attention.

    The documents replace the attention mask, as int32 ``[B, S]``, and ``packed_seq_params`` is dropped. Stock would apply RoPE
    to each sequence separately, with lengths read on the host: two device syncs per rotation, four or eight per layer. RoPE by
    position in the row, as with a mask, gives a query the same dot product with every key of its document.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock method, with the ``attention_mask`` and ``packed_seq_params`` that Megatron passes to a layer.

        Raises:
            DataError, ModelError: as :func:`megacpp_mcore.layer_specs.documents.documents`.
        """
        config: TransformerConfig = self.config  # type: ignore[attr-defined]
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if kwargs.get("inference_context") is not None:
            refuse_decoding(config, self.layer_number, packed_seq_params)  # type: ignore[attr-defined]
            return super().forward(hidden_states, None, *args, **kwargs)  # type: ignore[misc]
        seq_idx_BS = documents(
            config,
            self.layer_number,  # type: ignore[attr-defined]
            batch=hidden_states.shape[1],
            rows=hidden_states.shape[0] * shards * self.context.size,  # type: ignore[attr-defined]
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        return super().forward(hidden_states, seq_idx_BS, *args, **kwargs)  # type: ignore[misc]


class FullMLASelfAttention(_Documents, _WholeRows, _Projections, MLASelfAttention):
    """Stock MLA with :class:`_Documents`, :class:`_WholeRows` and :class:`_Projections`."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """As the stock method: query, key, value, and the normed query latents, which stock passes only to DSA."""
        if self.cache_mla_latents:  # dynamic batching only
            return super().get_query_key_value_tensors(hidden_states, *args, inference_context=inference_context, **kwargs)
        query, key, value, query_latents = self._projected(hidden_states, inference_context)
        return query, key, value, query_latents, None

    def _up(
        self,
        query_SBQ: torch.Tensor,
        key_TBL: torch.Tensor,
        rotary_TBR: torch.Tensor,
        rotation_SR: torch.Tensor,
        rotation_TR: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        query = self.projection_backend.fn(self._heads(self.linear_q_up_proj, query_SBQ), rotation_SR=rotation_SR)
        if self.context:
            query = self.context.to_heads(query.flatten(2)).unflatten(-1, (-1, query.shape[-1]))
        kv_TBHX = self.context.own(self._heads(self.linear_kv_up_proj, key_TBL), dim=2)
        return query, *self.keys_backend.fn(kv_TBHX, rotary_TBR, rotation_SR=rotation_TR, value_dim=self.config.v_head_dim)


class SparseMLASelfAttention(_Documents, _WholeRows, _Projections, AbsorbedMLASelfAttention):
    """:class:`FullMLASelfAttention` over latents, with decoding; waits for an overlapped gather of the up-projection weight."""

    absorbs = True
    _v_up_HVL: Any = None

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """As the stock method: absorbed queries, latent keys with their rotary part, and the normed query latents."""
        k_up_HCL, self._v_up_HVL = self._get_kv_up_weights()
        return self._projected(hidden_states, inference_context, k_up_HCL)

    def _up(
        self,
        query_SBQ: torch.Tensor,
        key_TBL: torch.Tensor,
        rotary_TBR: torch.Tensor,
        rotation_SR: torch.Tensor,
        rotation_TR: torch.Tensor,
        k_up_HCL: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        query_SBHC = self._heads(self.linear_q_up_proj, query_SBQ)
        query = self.projection_backend.fn(query_SBHC, weight_HCK=k_up_HCL, rotation_SR=rotation_SR)
        key, _ = self.keys_backend.fn(key_TBL.unsqueeze(2), rotary_TBR, rotation_SR=rotation_TR, value_dim=0)
        return query, key

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock method, but accepts an inference context and caches the latents in it.

        Raises:
            ModelError: as :class:`megacpp_mcore.layer_specs.decode.LayerCache`.
        """
        if inference_context is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        refuse_decoding(self.config, self.layer_number, kwargs.get("packed_seq_params"))
        cache = LayerCache(inference_context, self.layer_number, hidden_states.shape[0])
        query, latents, query_latents = self.get_query_key_value_tensors(hidden_states, inference_context=inference_context)
        output = self.core_attention(
            query,
            cache.extend(latents=latents)["latents"],
            None,
            None,
            x=hidden_states,
            qr=query_latents,
            up_v_weight=self._get_v_up_weight(),
            cache=cache,
        )
        self.qkv_up_checkpoint = None  # from --recompute-modules mla_up_proj; decoding recomputes nothing
        return self.linear_proj(output)

    def _get_kv_up_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value up-projections ``[H, C, L]``, ``[H, V, L]``: views of a weight whose module is never called."""
        wait_for_parameters(self.linear_kv_up_proj)
        by_head = self.linear_kv_up_proj.weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        k_up_HCL, v_up_HVL = by_head.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)
        return k_up_HCL, v_up_HVL

    def _get_v_up_weight(self) -> torch.Tensor:
        """Return the value up-projection; stock calls this once after each :meth:`get_query_key_value_tensors`."""
        v_up_HVL: torch.Tensor = self._v_up_HVL
        self._v_up_HVL = None  # a module that references an autograd graph cannot be deep-copied
        return v_up_HVL


def _mla(module: type, submodules: type, core: ModuleSpec, parts: Parts, dispatcher: Dispatcher) -> ModuleSpec:
    """Return the spec of an MLA class with ``core`` as its core attention."""
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal, "dispatcher": dispatcher},
        submodules=submodules(
            linear_q_down_proj=parts.down_linear,
            linear_q_up_proj=parts.column_linear,
            linear_kv_down_proj=parts.down_linear,
            linear_kv_up_proj=parts.column_linear,
            core_attention=core,
            linear_proj=parts.row_linear,
            q_layernorm=parts.norm,
            kv_layernorm=parts.norm,
        ),
    )


def full_attention(parts: Parts, dispatcher: Dispatcher, window: int | None) -> ModuleSpec:
    """Return the spec of full MLA, over every key or a window: the stock class with our core attention."""
    core = ModuleSpec(module=MLACoreAttention, params={"dispatcher": dispatcher, "window": window})
    return _mla(FullMLASelfAttention, MLASelfAttentionSubmodules, core, parts, dispatcher)


def sparse_attention(parts: Parts, dispatcher: Dispatcher, index_cache: IndexCache, dsa: DSA, *, full: bool) -> ModuleSpec:
    """Return the spec of sparse MLA: the stock absorbed class with our core attention; ``full`` layers own an indexer."""
    indexer = ModuleSpec(
        module=PositionedIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=parts.duplicated_linear,
            linear_wk=parts.duplicated_linear,
            k_norm=parts.norm,
            linear_weights_proj=parts.duplicated_linear,
        ),
    )
    core = ModuleSpec(
        module=SparseCoreAttention,
        params={
            "dispatcher": dispatcher,
            "index_cache": index_cache,
            "indexer": indexer if full else None,
            "distill": dsa.distill,
            "warmup_steps": dsa.warmup_steps,
        },
    )
    return _mla(SparseMLASelfAttention, AbsorbedMLASelfAttentionSubmodules, core, parts, dispatcher)
