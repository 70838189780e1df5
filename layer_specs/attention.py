"""A: MLA core attention, sparse (DSA) core attention with shared indices, and the ModuleSpecs of their layers.

The projections and norms are stock: full MLA rides on ``MLASelfAttention``, sparse MLA on ``AbsorbedMLASelfAttention``, the
indexer's projections on ``DSAIndexer`` (megatron-core 0.19). Ours is what happens between.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query/key dim, V value dim, D hidden, N top-k, Q and L ranks
of the query's and the key's latent, R width of a rotary part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.cuda_graphs import is_graph_warmup
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAIndexerSubmodules,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megacpp_mcore.backends import Dispatcher, Resolution
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import steps
from megacpp_mcore.layer_specs.decode import LayerCache, refuse_decoding
from megacpp_mcore.layer_specs.documents import documents, max_documents
from megacpp_mcore.layer_specs.parts import Parts, backend_needs
from megacpp_mcore.model import DSA, SERVED
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from megacpp_mcore.ops.indexer.chunked import dense_grad
from megacpp_mcore.ops.indexer.reference import select_last
from megacpp_mcore.ops.indexer.training import TargetSum, training_token
from megacpp_mcore.ops.mla import reference
from megacpp_mcore.ops.mla_projection.reference import rotation_table
from megacpp_mcore.ops.packed.documents import shared


class MLACoreAttention(MegatronModule):
    """Softmax attention with different query/key and value widths, in ``MLASelfAttention``'s core-attention slot.

    Args are those the stock class passes; ``dispatcher`` comes from the spec.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float,
        dispatcher: Dispatcher,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        if k_channels is None:
            return  # the stock base class fills the slot once without widths, and its subclass fills it again
        _require_causal(attn_mask_type, layer_number)
        self.softmax_scale = softmax_scale
        self.layer_number = layer_number
        self.backend = dispatcher.request(
            "mla",
            layer=layer_number,
            qk_dim=k_channels,
            v_dim=v_channels,
            **backend_needs(config),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """``q [S, B, H, K], k [S, B, H, K], v [S, B, H, V] -> [S, B, H * V]``; causal, and inside documents.

        ``attention_mask`` is what :class:`_Documents` puts in a mask's place: the documents, int32 ``[B, S]``, or None. Query,
        key and value may be strided, with their widths innermost. With more keys than queries, as while decoding, the queries
        are the last rows, of one document; the reference attends.
        """
        tensors = (query, key, value)
        return _causal(self.backend.fn, *tensors, self.softmax_scale, attention_mask, self.config).flatten(2)


def _causal(
    attend: Callable[..., torch.Tensor],
    query_SBHK: torch.Tensor,
    key_TBHK: torch.Tensor,
    value_TBHV: torch.Tensor,
    softmax_scale: float,
    seq_idx_BS: torch.Tensor | None,
    config: TransformerConfig,
) -> torch.Tensor:
    """``[S, B, H, V]``, by ``attend``; where there are fewer queries than keys, they are the last rows, by the reference."""
    rows, keys = query_SBHK.shape[0], key_TBHK.shape[0]
    if rows == keys:
        most = {} if seq_idx_BS is None else {"max_documents": len(seq_idx_BS) * max_documents(config, rows)}
        return attend(query_SBHK, key_TBHK, value_TBHV, softmax_scale=softmax_scale, seq_idx=seq_idx_BS, **most)
    later = torch.ones(rows, keys, dtype=torch.bool, device=query_SBHK.device).triu(keys - rows + 1)[None, None]
    return reference.mla_attention(
        query_SBHK, key_TBHK, value_TBHV, softmax_scale=softmax_scale, attention_mask=later, causal=False
    )


class SparseCoreAttention(MegatronModule):
    """DeepSeek sparse attention over absorbed latents, in ``AbsorbedMLASelfAttention``'s core-attention slot.

    A Full layer runs the indexer on detached inputs, attends to its top-k keys, and publishes the selection. A Shared layer has
    no indexer and no loss; it attends to exactly the published keys. In the backward pass the indexer is trained by KL against
    the attention of the layers it serves, or of its own layer alone (``distill``), averaged over rows, times
    ``dsa_indexer_loss_coeff``; :mod:`megacpp_mcore.ops.indexer.training` says when. The loss is added to Megatron's tracker
    there, which stock's ``training_log`` reads after the step's last backward pass: it is logged in the step it belongs to.
    Source: DeepSeek-V3.2 report; index cache and multi-layer distillation arXiv 2603.12201.

    Attributes:
        consumes_absorbed_v_up_projection: read by the stock class, which leaves the up-projection of the values to its core.

    Args:
        indexer: spec of the indexer for a Full layer, None for a Shared layer.
        distill, warmup_steps: as in :class:`megacpp_mcore.model.DSA`. The others are those the stock class passes.
    """

    consumes_absorbed_v_up_projection = True

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float,
        dispatcher: Dispatcher,
        index_cache: IndexCache,
        indexer: ModuleSpec | None,
        distill: str,
        warmup_steps: int,
        pg_collection: ProcessGroupCollection,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        if k_channels is None or v_channels is None:
            return  # as in MLACoreAttention
        _require_causal(attn_mask_type, layer_number)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.value_dim = v_channels
        self.pg_collection = pg_collection
        self.index_cache = index_cache
        self.serves = distill == SERVED
        self.warmup_steps = warmup_steps
        needs = backend_needs(config)
        self.projection_backend = dispatcher.request("mla_projection", layer=layer_number, **_widths(config), **needs)
        self.backend = dispatcher.request(
            "sparse_mla", layer=layer_number, qk_dim=k_channels, v_dim=v_channels, **needs
        )
        if warmup_steps:
            self.dense_backend = dispatcher.request(
                "mla", layer=layer_number, qk_dim=k_channels, v_dim=v_channels, **needs
            )
        self.indexer = None
        self.shares = False  # whether a Full layer attends as a Shared one, which a search for a schedule tries
        if indexer is not None:
            self.indexer = build_module(
                indexer, config=config, pg_collection=pg_collection, dispatcher=dispatcher, layer_number=layer_number
            )
            needs |= {"dim": config.dsa_indexer_head_dim, "heads": config.dsa_indexer_n_heads}
            self.select_backend = dispatcher.request("indexer", layer=layer_number, **needs)
            self.grad_backend = dispatcher.request("indexer_grad", layer=layer_number, **needs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: None,
        attention_mask: torch.Tensor | None,
        *,
        x: torch.Tensor,
        qr: torch.Tensor,
        up_v_weight: torch.Tensor,
        cache: LayerCache | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend to the selected keys.

        Args:
            query: absorbed queries ``[S, B, H, K]``.
            key: latents with rotary part, one head ``[T, B, 1, K]``; the value is their first V entries.
            value: None, as the stock class passes it.
            attention_mask: what :class:`_Documents` puts in its place: the documents, int32 ``[B, S]``, or None.
            x: the layer's input ``[S, B, D]`` (a slice of S under sequence parallelism).
            qr: normed query latents ``[S, B, Q]`` (likewise).
            up_v_weight: of the values' up-projection, ``[H, v_head_dim, V]``.
            cache: of an inference context; ``key`` are the latents so far. It keeps them, and the indexer's keys.

        Returns:
            ``[S, B, H * v_head_dim]``, after the value up-projection.
        """
        o_SBHV = self._attend(query, key, attention_mask, x.detach(), qr.detach(), cache)
        output: torch.Tensor = self.projection_backend.fn(o_SBHV, weight_HCK=up_v_weight.mT)
        return output.flatten(2)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
        cache: LayerCache | None,
    ) -> torch.Tensor:
        """The latents ``[S, B, H, V]`` that the heads find; ``x`` and ``qr`` are detached."""
        if self.is_warming_up():
            return self._attend_densely(query, key, attention_mask, x, qr)
        if self.indexer is None or self.shares:
            selection = self._shared()
            sink = selection.sink if self.serves else None
        elif cache is not None:
            selection, sink = self._decode(self.indexer, cache, x, qr), None
        else:
            query, selection = self._select(self.indexer, query, attention_mask, x, qr)
            sink = selection.sink
        o_SBHV: torch.Tensor = self.backend.fn(
            query,
            key.squeeze(2),
            selection.index,
            softmax_scale=self.softmax_scale,
            value_dim=self.value_dim,
            sink=sink,
        )
        return o_SBHV

    def _shared(self) -> Selection:
        """The selection of the Full layer; in the runs that Megatron makes to warm up for a CUDA graph, one of its shape.

        Then the Full layer's graph is captured, but nothing has run it: there are no keys yet, and nobody takes targets.
        """
        if not is_graph_warmup():
            return self.index_cache.read(self.layer_number)
        coming = self.index_cache.peek(self.layer_number)
        return Selection(torch.zeros_like(coming.index), sink=None if coming.sink is None else TargetSum())

    def _select(
        self,
        indexer: PositionedIndexer,
        query_SBHK: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
    ) -> tuple[torch.Tensor, Selection]:
        """The query with the indexer's loss attached, and the selected keys: the first run's selection under recompute."""
        selection = self.index_cache.recall(self.layer_number)
        learns = self.training and bool(self.config.dsa_indexer_loss_coeff)
        if selection is not None and not learns:
            return query_SBHK, selection
        q, k, w = indexer.forward_before_topk(x, qr)
        if selection is None:
            index_BSN = self.select_backend.fn(q, k, w, indexer.index_topk, seq_idx_BS)
            layers = 1 + (self.index_cache.readers(self.layer_number) if self.serves else 0)
            selection = Selection(index_BSN, sink=TargetSum(layers) if learns else None)
            self.index_cache.publish(self.layer_number, selection)
        if learns and torch.is_grad_enabled():
            # Stock's scaler gives the token the factor of the schedule, once the gradient of the query is there.
            token = training_token(q, k, w, selection.index, partial(self._loss_gradients, selection.sink))
            query_SBHK = DSAIndexerLossAutoScaler.apply(query_SBHK, token)
        return query_SBHK, selection

    def _attend_densely(
        self,
        query_SBHK: torch.Tensor,
        key_TB1K: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to every causal key, and have the indexer of a Full layer learn this attention in the backward pass."""
        if (
            self.indexer is not None
            and self.training
            and torch.is_grad_enabled()
            and self.config.dsa_indexer_loss_coeff
        ):
            q, k, w = self.indexer.forward_before_topk(x, qr)
            learn = partial(self._dense_loss_gradients, query_SBHK.detach(), key_TB1K.detach(), seq_idx_BS)
            query_SBHK = DSAIndexerLossAutoScaler.apply(query_SBHK, training_token(q, k, w, None, learn))
        key_TBHK = key_TB1K.expand(-1, -1, query_SBHK.shape[2], -1)
        value_TBHV = key_TBHK[..., : self.value_dim]
        tensors = (query_SBHK, key_TBHK, value_TBHV)
        return _causal(self.dense_backend.fn, *tensors, self.softmax_scale, seq_idx_BS, self.config)

    def is_warming_up(self) -> bool:
        """Whether this is a step of the dense warm-up."""
        return self.warmup_steps > 0 and steps.ended(self.training) < self.warmup_steps

    def _dense_loss_gradients(
        self,
        query_SBHK: torch.Tensor,
        key_TB1K: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
        q_SBHD: torch.Tensor,
        k_SBD: torch.Tensor,
        w_SBH: torch.Tensor,
        _: None,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`_loss_gradients`, over every causal key, in chunks of queries; with documents, row by row of the batch."""
        rows, batch = q_SBHD.shape[:2]
        factor = scale * self.config.dsa_indexer_loss_coeff
        weight = factor if self.config.calculate_per_token_loss else factor / (rows * batch)
        reduce = partial(torch.distributed.all_reduce, group=self.pg_collection.tp)
        # Documents differ from one row of the batch to the next.
        slices = [slice(0, batch)] if seq_idx_BS is None else [slice(b, b + 1) for b in range(batch)]
        found = [
            dense_grad(
                *(tensor[:, here] for tensor in (q_SBHD, k_SBD, w_SBH, query_SBHK, key_TB1K)),
                weight=weight,
                softmax_scale=self.softmax_scale,
                seq_idx_S=None if seq_idx_BS is None else seq_idx_BS[here.start],
                reduce=reduce if self.pg_collection.tp.size() > 1 else None,
            )
            for here in slices
        ]
        divergences, *gradients = zip(*found, strict=True)
        loss = torch.cat(divergences).mean() * self.config.dsa_indexer_loss_coeff
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, self.layer_number, self.config.num_layers)
        dq, dk, dw = (torch.cat(parts, dim=1) for parts in gradients)
        return dq, dk, dw

    def _decode(self, indexer: PositionedIndexer, cache: LayerCache, x: torch.Tensor, qr: torch.Tensor) -> Selection:
        """The selection of the last rows among all so far: of a first piece by the backend, of later ones by the reference."""
        with indexer.rows_from(cache.first_row):
            q, k, w = indexer.forward_before_topk(x, qr)
        keys = cache.extend(indexer_key=k)["indexer_key"]
        if not cache.first_row:
            index_BSN = self.select_backend.fn(q, keys, w, indexer.index_topk, None)
        else:
            index_BSN = select_last(q, keys, w, indexer.index_topk)
        selection = Selection(index_BSN)
        self.index_cache.publish(self.layer_number, selection)
        return selection

    def _loss_gradients(
        self,
        sink: TargetSum,
        q_SBHD: torch.Tensor,
        k_SBD: torch.Tensor,
        w_SBH: torch.Tensor,
        index_BSN: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the indexer's loss by q, k and w; the target is reduced over tensor-parallel ranks."""
        target_BSN = sink.take()
        if self.pg_collection.tp.size() > 1:
            torch.distributed.all_reduce(target_BSN, group=self.pg_collection.tp)
        coefficient = self.config.dsa_indexer_loss_coeff
        factor = scale * coefficient
        if self.config.calculate_per_token_loss:
            factor = (
                factor * index_BSN.shape[0] * index_BSN.shape[1]
            )  # gradients are divided by the number of tokens later
        loss, dq, dk, dw = self.grad_backend.fn(q_SBHD, k_SBD, w_SBH, index_BSN, target_BSN, factor)
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss * coefficient, self.layer_number, self.config.num_layers)
        return dq, dk, dw


class PositionedIndexer(DSAIndexer):
    """Stock's indexer with a position offset, for its rows need not be the first of their sequence, by the dispatcher's ops.

    Args are those of the stock class; ``dispatcher`` and ``layer_number`` come from the core attention.
    """

    _first_row = 0

    def __init__(
        self, config: MLATransformerConfig, *args: Any, dispatcher: Dispatcher, layer_number: int, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        needs = {"layer": layer_number, "rope_dim": self.qk_pos_emb_head_dim, **backend_needs(config)}
        self.rotation_backend = dispatcher.request("mla_projection", **needs)
        self.inputs_backend = None
        if (
            self.index_head_dim == self.qk_pos_emb_head_dim
            and not (config.dsa_indexer_k_norm_fp32 or config.dsa_indexer_rotate_activation)
            and _takes_weights(config)
        ):
            self.inputs_backend = dispatcher.request("indexer_inputs", **needs)
        norm_eps = config.dsa_indexer_k_norm_epsilon
        self.norm_eps = config.layernorm_epsilon if norm_eps is None else norm_eps

    @contextlib.contextmanager
    def rows_from(self, first_row: int) -> Iterator[None]:
        """Context in which the indexer's input starts at row ``first_row`` of its sequence."""
        self._first_row = first_row
        try:
            yield
        finally:
            self._first_row = 0

    def forward_before_topk(
        self, x: torch.Tensor, qr: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Queries ``[S, B, heads, dim]``, keys ``[S, B, dim]`` and weights of heads ``[S, B, heads]``.

        By the op ``indexer_inputs``, which gives ``x`` and ``qr`` no gradient, or by stock's method.
        """
        modules = (self.linear_wq_b, self.linear_wk, self.k_norm, self.linear_weights_proj)
        if self.inputs_backend is None or not _replaces_modules(self.inputs_backend, *modules):
            stock: tuple[torch.Tensor, ...] = super().forward_before_topk(x, qr, *args, **kwargs)
            return stock
        if self.config.sequence_parallel:
            x, qr = (gather_from_sequence_parallel_region(rows, group=self.pg_collection.tp) for rows in (x, qr))
        made: tuple[torch.Tensor, ...] = self.inputs_backend.fn(
            x,
            qr,
            self.linear_wq_b.weight,
            self.linear_wk.weight,
            self.k_norm.weight,
            self.k_norm.bias,
            self.linear_weights_proj.weight,
            rotation_SR=self._rotation(len(x)),
            eps=self.norm_eps,
            scale=self.index_n_heads**-0.5 * self.softmax_scale,
            interleaved=self.config.dsa_indexer_rope_interleaved,
        )
        return made

    def _rotation(self, rows: int) -> torch.Tensor:
        return _rotation(self.rotary_pos_emb, self._first_row + rows)[self._first_row :]

    def _apply_rope(self, x: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        """``x [S, B, heads or 1, dim]``, its first values rotated; stock's rotates the rows as if they were the first."""
        rotation_SR = self._rotation(len(x))
        rotary, plain = x.split([self.qk_pos_emb_head_dim, x.shape[-1] - self.qk_pos_emb_head_dim], dim=-1)
        rotated: torch.Tensor = self.rotation_backend.fn(
            rotary, rotation_SR=rotation_SR, interleaved=self.config.dsa_indexer_rope_interleaved
        )
        return torch.cat([rotated, plain], dim=-1) if plain.shape[-1] else rotated


def _whole_rows(linear: ColumnParallelLinear, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Forward hook: ``([S, B, C / TP], bias) -> ([S / TP, B, C], bias)``; gathers columns, scatters the sequence."""
    cut_SBC, bias = output
    whole_SBC = gather_from_tensor_model_parallel_region(cut_SBC, group=linear.tp_group)
    return scatter_to_sequence_parallel_region(whole_SBC, group=linear.tp_group), bias


class _WholeRows:
    """Mixin for stock MLA: a column-parallel kv down-projection outputs whole rows.

    The rotary part of the key serves the heads of all tensor-parallel ranks, so its gradient has to be summed over them.
    Megatron-Core 0.19 does so when it is handed whole rows, but not when it gathers cut ones (``multi_latent_attention.py``
    and ``absorbed_mla.py``): there each rank would train its rows of the projection for its own heads alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        linear = self.linear_kv_down_proj  # type: ignore[attr-defined]
        if isinstance(linear, ColumnParallelLinear) and self.config.sequence_parallel:  # type: ignore[attr-defined]
            linear.register_forward_hook(_whole_rows)


def _rotation(rotary: torch.nn.Module, rows: int) -> torch.Tensor:
    """The rotations ``[rows, R]`` of a sequence's first rows, made once of each table of stock's module."""
    found = rotary(rows)
    angle_S11R, scale = (found, 1.0) if isinstance(found, torch.Tensor) else found

    def make() -> torch.Tensor:
        with torch.inference_mode(False):  # a run that decodes first may train later
            return rotation_table(angle_S11R[:, 0, 0], scale)

    return shared(angle_S11R, ("rotation", scale), make)


class _Projections:
    """Mixin for stock MLA: what is between the projections and the core attention, by the dispatcher's ops.

    Stock's own method rotates in some ten passes over queries and keys, and copies them twice more.

    Attributes:
        absorbs: whether attention is over latents.

    Args are those of the stock class; ``dispatcher`` comes from the spec.

    Raises:
        ModelError: the configuration asks for another rotary embedding than MLA's.
    """

    absorbs = False

    def __init__(self: Any, *args: Any, dispatcher: Dispatcher, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        if config.rotary_percent != 1 or config.rotary_interleaved or config.context_parallel_size > 1:
            raise ModelError(
                f"rotary_percent is {config.rotary_percent}, rotary_interleaved {config.rotary_interleaved}, "
                f"context_parallel_size {config.context_parallel_size}; expected 1, False and 1: A layers rotate the whole "
                "rotary part of every row"
            )
        needs = {"layer": self.layer_number, **_widths(config), **backend_needs(config)}
        self.projection_backend = dispatcher.request("mla_projection", **needs)
        self.keys_backend = dispatcher.request("mla_keys", **needs)
        self.latents_backend = None
        downs = (self.linear_q_down_proj, self.linear_kv_down_proj) if config.q_lora_rank is not None else ()
        widths = [config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim]
        if [len(down.weight) for down in downs] == widths and _takes_weights(config):
            self.latents_backend = dispatcher.request("mla_latents", query_latent_dim=config.q_lora_rank, **needs)

    def _projected(
        self: Any, hidden_SBD: torch.Tensor, inference_context: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What ``_up`` makes of latents, rotary part, rotations and ``weights``, and then the normed query latents.

        ``_up`` is run again in the backward pass with ``--recompute-modules mla_up_proj``.
        """
        length = self.rotary_pos_emb.get_rotary_seq_len(inference_context, None, hidden_SBD, self.config, None)
        query, key, rotary = self._latents(hidden_SBD)
        if self.config.sequence_parallel:  # no projection gathers what all heads share
            rotary = gather_from_sequence_parallel_region(rotary, group=self.tp_group)
            if self.absorbs:
                key = gather_from_sequence_parallel_region(key, group=self.tp_group)
        first = 0 if inference_context is None else inference_context.sequence_len_offset
        rotation_SR = _rotation(self.rotary_pos_emb, length)[first : first + len(rotary)]
        arguments = (query, key, rotary, rotation_SR, *weights)
        if not self.recompute_up_proj:
            return *self._up(*arguments), query
        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
        return *self.qkv_up_checkpoint.checkpoint(self._up, *arguments), query

    def _latents(self: Any, hidden_SBD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The normed latents of queries and keys, and the keys' rotary part, of the rows of ``hidden_SBD``."""
        config = self.config
        if self.latents_backend is not None:
            modules = (self.linear_q_down_proj, self.linear_kv_down_proj, self.q_layernorm, self.kv_layernorm)
            if _replaces_modules(self.latents_backend, *modules):
                weights = (module.weight for module in modules)
                made: tuple[torch.Tensor, ...] = self.latents_backend.fn(hidden_SBD, *weights, config.layernorm_epsilon)
                return made
        query = hidden_SBD
        if config.q_lora_rank is not None:
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

    def _queries(self: Any, query_SBQ: torch.Tensor) -> torch.Tensor:
        """``[S, B, H, K]``, before rotation."""
        up = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query, _ = up(query_SBQ)
        return query.unflatten(-1, (self.num_attention_heads_per_partition, -1))


def _takes_weights(config: MLATransformerConfig) -> bool:
    """Whether an op may take the weights of projections and norms, in place of a call of the modules.

    In FP8, or with gradients of weights that come later, Transformer Engine's modules do more than a product; the weights of
    norms can be kept less one.
    """
    other = config.fp8 or config.fp4 or config.delay_wgrad_compute or config.layernorm_zero_centered_gamma
    return config.normalization == "RMSNorm" and not other


def _replaces_modules(backend: Resolution, *modules: torch.nn.Module) -> bool:
    """Whether ``backend`` computes what ``modules`` would, with their weights, which are here then.

    On the reference the modules are called themselves, and where a file of ``--te-precision-config-file`` names one of them.
    """
    if backend.observed == "reference":
        return False
    if any(getattr(module, "te_quant_params", None) is not None for module in modules):
        return False
    for module in modules:
        _wait_for_parameters(module)
    return True


def _widths(config: MLATransformerConfig) -> dict[str, Any]:
    """What the ops between projections and core attention have to cover."""
    return {
        "content_dim": config.qk_head_dim,
        "latent_dim": config.kv_lora_rank,
        "rope_dim": config.qk_pos_emb_head_dim,
        "v_dim": config.v_head_dim,
    }


class _Documents:
    """Mixin for stock MLA: computes a packed batch as one row and passes its documents to the core attention.

    The documents take the place of the attention mask, as int32 ``[B, S]``, and the packed sequences go no further. Stock
    would rotate each sequence by itself, with lengths that the host reads: two waits for a rotation, four or eight a layer.
    Rotated by its place in the row, as it is with a mask, a query has the same product with every key of its document.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock class, whose ``attention_mask`` and ``packed_seq_params`` are those that Megatron gives a layer.

        Raises:
            DataError, ModelError: as :func:`megacpp_mcore.layer_specs.documents.documents`.
        """
        config: TransformerConfig = self.config  # type: ignore[attr-defined]
        cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if kwargs.get("inference_context") is not None:
            refuse_decoding(config, self.layer_number, packed_seq_params)  # type: ignore[attr-defined]
            return super().forward(hidden_states, None, *args, **kwargs)  # type: ignore[misc]
        seq_idx_BS = documents(
            config,
            self.layer_number,  # type: ignore[attr-defined]
            batch=hidden_states.shape[1],
            rows=hidden_states.shape[0] * cut,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        return super().forward(hidden_states, seq_idx_BS, *args, **kwargs)  # type: ignore[misc]


class FullMLASelfAttention(_Documents, _WholeRows, _Projections, MLASelfAttention):
    """Stock MLA with :class:`_Documents`, :class:`_WholeRows` and :class:`_Projections`."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """As stock's: query, key, value, and the normed latents of the query, which stock hands to DSA alone."""
        if self.cache_mla_latents:  # of dynamic batching
            stock: tuple[torch.Tensor | None, ...] = super().get_query_key_value_tensors(
                hidden_states, *args, inference_context=inference_context, **kwargs
            )
            return stock
        query, key, value, query_latents = self._projected(hidden_states, inference_context)
        return query, key, value, query_latents, None

    def _up(
        self, query_SBQ: torch.Tensor, key_SBL: torch.Tensor, rotary_SBR: torch.Tensor, rotation_SR: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        query = self.projection_backend.fn(self._queries(query_SBQ), rotation_SR=rotation_SR)
        kv, _ = self.linear_kv_up_proj(key_SBL)
        kv_SBHX = kv.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        return query, *self.keys_backend.fn(
            kv_SBHX, rotary_SBR, rotation_SR=rotation_SR, value_dim=self.config.v_head_dim
        )


class SparseMLASelfAttention(_Documents, _WholeRows, _Projections, AbsorbedMLASelfAttention):
    """As :class:`FullMLASelfAttention`, with decoding; waits for the up-projection's weight if its gather is overlapped."""

    absorbs = True
    _v_up_HVL: Any = None

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """As stock's: absorbed queries, latent keys with rotary part, and the normed latents of the query."""
        k_up_HCL, self._v_up_HVL = self._get_kv_up_weights()
        return self._projected(hidden_states, inference_context, k_up_HCL)

    def _up(
        self,
        query_SBQ: torch.Tensor,
        key_SBL: torch.Tensor,
        rotary_SBR: torch.Tensor,
        rotation_SR: torch.Tensor,
        k_up_HCL: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        query = self.projection_backend.fn(self._queries(query_SBQ), weight_HCK=k_up_HCL, rotation_SR=rotation_SR)
        key, _ = self.keys_backend.fn(key_SBL.unsqueeze(2), rotary_SBR, rotation_SR=rotation_SR, value_dim=0)
        return query, key

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As stock's, but accepts an inference context and caches the latents in it.

        Raises:
            ModelError: as :class:`megacpp_mcore.layer_specs.decode.LayerCache`.
        """
        if inference_context is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        refuse_decoding(self.config, self.layer_number, kwargs.get("packed_seq_params"))
        cache = LayerCache(inference_context, self.layer_number, hidden_states.shape[0])
        query, latents, query_latents = self.get_query_key_value_tensors(
            hidden_states, inference_context=inference_context
        )
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
        self.qkv_up_checkpoint = None  # of --recompute-modules mla_up_proj; nothing is computed again
        return self.linear_proj(output)

    def _get_kv_up_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As stock's, which reads the weight of a module that it never calls: ``[H, C, L]`` and ``[H, V, L]``, parts of one."""
        _wait_for_parameters(self.linear_kv_up_proj)
        by_head = self.linear_kv_up_proj.weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        k_up_HCL, v_up_HVL = by_head.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)
        return k_up_HCL, v_up_HVL

    def _get_v_up_weight(self) -> torch.Tensor:
        """As stock's, which calls it once for each :meth:`get_query_key_value_tensors`: the other part of the same tensor."""
        v_up_HVL: torch.Tensor = self._v_up_HVL
        self._v_up_HVL = None  # a module that holds a part of a graph cannot be copied
        return v_up_HVL


_DDP = "megatron.core.distributed.distributed_data_parallel"


def _wait_for_parameters(module: torch.nn.Module) -> None:
    """Wait for the parameter gather (``--overlap-param-gather``) of a module whose weight is read without a forward call.

    Megatron-Core 0.19 waits in a hook before a module's forward. Without it a weight that lies in another bucket than its
    neighbours is that of the step before, and the next step's gather meets one that nobody has waited for.
    """
    for hook in list(module._forward_pre_hooks.values()):
        if hook.__module__ == _DDP:
            hook(module)


def _require_causal(attn_mask_type: AttnMaskType, layer_number: int) -> None:
    if attn_mask_type != AttnMaskType.causal:
        raise ModelError(f"layer {layer_number}: attention mask type is {attn_mask_type}; expected causal")


def full_attention(parts: Parts, dispatcher: Dispatcher) -> ModuleSpec:
    """Full MLA: the stock class with our core attention."""
    return ModuleSpec(
        module=FullMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "dispatcher": dispatcher},
        submodules=MLASelfAttentionSubmodules(
            linear_q_down_proj=parts.down_linear,
            linear_q_up_proj=parts.column_linear,
            linear_kv_down_proj=parts.down_linear,
            linear_kv_up_proj=parts.column_linear,
            core_attention=ModuleSpec(module=MLACoreAttention, params={"dispatcher": dispatcher}),
            linear_proj=parts.row_linear,
            q_layernorm=parts.norm,
            kv_layernorm=parts.norm,
        ),
    )


def sparse_attention(
    parts: Parts, dispatcher: Dispatcher, index_cache: IndexCache, dsa: DSA, *, full: bool
) -> ModuleSpec:
    """Sparse MLA: the stock absorbed class with our core attention; ``full`` layers own an indexer."""
    indexer = ModuleSpec(
        module=PositionedIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=parts.duplicated_linear,
            linear_wk=parts.duplicated_linear,
            k_norm=parts.norm,
            linear_weights_proj=parts.duplicated_linear,
        ),
    )
    return ModuleSpec(
        module=SparseMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "dispatcher": dispatcher},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_down_proj=parts.down_linear,
            linear_q_up_proj=parts.column_linear,
            linear_kv_down_proj=parts.down_linear,
            linear_kv_up_proj=parts.column_linear,
            core_attention=ModuleSpec(
                module=SparseCoreAttention,
                params={
                    "dispatcher": dispatcher,
                    "index_cache": index_cache,
                    "indexer": indexer if full else None,
                    "distill": dsa.distill,
                    "warmup_steps": dsa.warmup_steps,
                },
            ),
            linear_proj=parts.row_linear,
            q_layernorm=parts.norm,
            kv_layernorm=parts.norm,
        ),
    )
