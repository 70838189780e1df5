"""Core attention of A layers: full MLA, and DeepSeek sparse attention (DSA) over indices that layers share.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query/key dim, V value dim, D hidden, N top-k, Q and L ranks
of the query and key latents, R rotary head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import is_graph_warmup
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs import training_step
from megacpp_mcore.layer_specs.context import Context
from megacpp_mcore.layer_specs.decode import LayerCache
from megacpp_mcore.layer_specs.documents import max_documents
from megacpp_mcore.layer_specs.indexer import PositionedIndexer
from megacpp_mcore.layer_specs.mla import mla_widths
from megacpp_mcore.layer_specs.parts import backend_needs
from megacpp_mcore.model import SERVED
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from megacpp_mcore.ops.indexer.chunked import dense_grad
from megacpp_mcore.ops.indexer.reference import select_last
from megacpp_mcore.ops.indexer.training import TargetSum, training_token
from megacpp_mcore.ops.mla import reference


class MLACoreAttention(MegatronModule):
    """Softmax attention with different query/key and value widths, in ``MLASelfAttention``'s core-attention slot.

    Args are those the stock class passes; ``dispatcher`` comes from the spec, and so does ``window``, the number of keys before
    its own that a query sees, or None for all.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        softmax_scale: float,
        dispatcher: Dispatcher,
        window: int | None,
        pg_collection: ProcessGroupCollection,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        if k_channels is None:
            return  # the stock base class builds the slot once without widths, then its subclass rebuilds it
        self.context = Context(pg_collection)
        self.softmax_scale = softmax_scale
        self.layer_number, self.window = layer_number, window
        self.backend = dispatcher.request(
            "mla",
            layer=layer_number,
            qk_dim=k_channels,
            v_dim=v_channels,
            **backend_needs(config) | ({} if window is None else {"window": window}),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend: ``q [S, B, H, K], k [S, B, H, K], v [S, B, H, V] -> [S, B, H * V]``; causal, within documents.

        ``attention_mask`` is what ``_Documents`` of :mod:`megacpp_mcore.layer_specs.attention` passes instead of a mask: the
        documents, int32 ``[B, S]``, or None. Query, key and value may be strided, except along their last dim. With more keys
        than queries, as in decoding, the queries are the last rows of one document, and the reference runs. Under context
        parallelism the heads are those of this rank, and the result has all heads of its rows.
        """
        how = (self.softmax_scale, attention_mask, self.config, self.window)
        out_SBX = _causal(self.backend.fn, query, key, value, *how).flatten(2)
        return self.context.to_rows(out_SBX) if self.context else out_SBX


def _causal(
    attend: Callable[..., torch.Tensor],
    query_SBHK: torch.Tensor,
    key_TBHK: torch.Tensor,
    value_TBHV: torch.Tensor,
    softmax_scale: float,
    seq_idx_BS: torch.Tensor | None,
    config: TransformerConfig,
    window: int | None = None,
) -> torch.Tensor:
    """Return ``[S, B, H, V]`` by ``attend``; by the reference if queries are fewer than keys, and so the last rows."""
    rows, keys = query_SBHK.shape[0], key_TBHK.shape[0]
    if rows == keys:
        options = {} if seq_idx_BS is None else {"max_documents": len(seq_idx_BS) * max_documents(config, rows)}
        options |= {} if window is None else {"window": window}
        return attend(query_SBHK, key_TBHK, value_TBHV, softmax_scale=softmax_scale, seq_idx=seq_idx_BS, **options)
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=query_SBHK.device)
    later = hidden.triu(keys - rows + 1) | (hidden.tril(keys - rows - window - 1) if window is not None else False)
    return reference.mla_attention(
        query_SBHK, key_TBHK, value_TBHV, softmax_scale=softmax_scale, attention_mask=later[None, None], causal=False
    )


class SparseCoreAttention(MegatronModule):
    """DeepSeek sparse attention over absorbed latents, in ``AbsorbedMLASelfAttention``'s core-attention slot.

    A Full layer runs the indexer on detached inputs, attends to its top-k keys, and publishes the selection. A Shared layer has
    no indexer and no loss; it attends to exactly the published keys. The indexer is trained in the backward pass (when exactly:
    :mod:`megacpp_mcore.ops.indexer.training`) by KL divergence from the attention of the layers it serves, or only of its own
    layer (``distill``), averaged over rows, times ``dsa_indexer_loss_coeff``. The loss is then added to Megatron's tracker,
    which stock's ``training_log`` reads after the last backward pass of the step: it is logged in the step it belongs to.
    Source: DeepSeek-V3.2 report; index cache and multi-layer distillation arXiv 2603.12201.

    Attributes:
        consumes_absorbed_v_up_projection: read by the stock class, which leaves the value up-projection to its core.

    Args:
        indexer: spec of the indexer for a Full layer, None for a Shared layer.
        distill, warmup_steps: as in :class:`megacpp_mcore.model.DSA`. The other arguments are those the stock class passes.
    """

    consumes_absorbed_v_up_projection = True

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
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
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.value_dim = v_channels
        self.pg_collection, self.context = pg_collection, Context(pg_collection)
        self.index_cache = index_cache
        self.serves = distill == SERVED
        self.warmup_steps = warmup_steps
        request = partial(dispatcher.request, layer=layer_number)
        needs = backend_needs(config)
        widths: dict[str, Any] = {"qk_dim": k_channels, "v_dim": v_channels}
        self.projection_backend = request("mla_projection", **mla_widths(config), **needs)
        self.backend = request("sparse_mla", **widths, **needs)
        if warmup_steps:
            self.dense_backend = request("mla", **widths, **needs)
        self.indexer = None
        self.shares = False  # makes a Full layer attend as a Shared one, to evaluate another schedule
        if indexer is not None:
            self.indexer = build_module(
                indexer, config=config, pg_collection=pg_collection, dispatcher=dispatcher, layer_number=layer_number
            )
            needs |= {"dim": config.dsa_indexer_head_dim, "heads": config.dsa_indexer_n_heads}
            self.select_backend = request("indexer", **needs)
            self.grad_backend = request("indexer_grad", **needs)

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
            key: latents with rotary part, one head ``[T, B, 1, K]``; the value is their first V entries. Under context
                parallelism T are all rows of the sequence, and S those of this rank.
            value: None, as the stock class passes it.
            attention_mask: the documents, int32 ``[B, S]``, or None, as in :class:`MLACoreAttention`.
            x: the layer's input ``[S, B, D]`` (a slice of S under sequence parallelism).
            qr: normed query latents ``[S, B, Q]`` (likewise).
            up_v_weight: weight of the value up-projection, ``[H, v_head_dim, V]``.
            cache: entry of an inference context, which stores the latents so far (``key``) and the indexer's keys.

        Returns:
            ``[S, B, H * v_head_dim]``, after the value up-projection.
        """
        x, qr = x.detach(), qr.detach()
        if self.is_warming_up():
            o_SBHV = self._attend_densely(query, key, attention_mask, x, qr)
        else:
            if self.indexer is None or self.shares:
                selection = self._shared()
                sink = selection.sink if self.serves else None
            elif cache is not None:
                selection, sink = self._decode(self.indexer, cache, x, qr), None
            else:
                query, selection = self._select(self.indexer, query, attention_mask, x, qr)
                sink = selection.sink
            o_SBHV = self.backend.fn(
                query,
                key.squeeze(2),
                selection.index,
                softmax_scale=self.softmax_scale,
                value_dim=self.value_dim,
                sink=sink,
            )
        return self.projection_backend.fn(o_SBHV, weight_HCK=up_v_weight.mT).flatten(2)

    def _shared(self) -> Selection:
        """Return the Full layer's selection; in the warm-up runs before graph capture, a placeholder of its shape.

        At that point the Full layer's graph has been captured but never replayed: no keys exist, and no target sum is consumed.
        """
        if not is_graph_warmup():
            return self.index_cache.read(self.layer_number)
        pending = self.index_cache.peek(self.layer_number)
        return Selection(torch.zeros_like(pending.index), sink=None if pending.sink is None else TargetSum())

    def _select(
        self,
        indexer: PositionedIndexer,
        query_SBHK: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
    ) -> tuple[torch.Tensor, Selection]:
        """Attach the indexer's loss to the query and select its keys; recompute reuses the first run's selection."""
        selection = self.index_cache.recall(self.layer_number)
        learns = self.training and bool(self.config.dsa_indexer_loss_coeff)
        if selection is not None and not learns:
            return query_SBHK, selection
        q, k, w = indexer.forward_before_topk(x, qr)
        k = self.context.whole(k)
        if selection is None:
            index_BSN = self._selected(q, k, w, indexer.index_topk, seq_idx_BS)
            layers = 1 + (self.index_cache.readers(self.layer_number) if self.serves else 0)
            selection = Selection(index_BSN, sink=TargetSum(layers) if learns else None)
            self.index_cache.publish(self.layer_number, selection)
        if learns and torch.is_grad_enabled():
            # In the query's backward pass, stock's scaler passes the token the schedule's loss scale.
            token = training_token(q, k, w, selection.index, partial(self._loss_gradients, selection.sink))
            query_SBHK = DSAIndexerLossAutoScaler.apply(query_SBHK, token)
        return query_SBHK, selection

    def _selected(
        self,
        q_SBHD: torch.Tensor,
        k_TBD: torch.Tensor,
        w_SBH: torch.Tensor,
        topk: int,
        seq_idx_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """Select keys by the backend; under context parallelism for each of this rank's chunks of the sequence."""
        if not self.context:
            return self.select_backend.fn(q_SBHD, k_TBD, w_SBH, topk, seq_idx_BS)
        rows, width = len(q_SBHD) // 2, min(topk, len(k_TBD))
        index_chunks = []
        for q, w, chunk in zip(q_SBHD.chunk(2), w_SBH.chunk(2), self.context.chunks(), strict=True):
            first, end = chunk * rows, (chunk + 1) * rows
            seq_idx = None if seq_idx_BS is None else seq_idx_BS[:, :end]
            index_BRN = self.select_backend.fn(q, k_TBD[:end], w, topk, seq_idx, first_row=first)
            index_chunks.append(torch.nn.functional.pad(index_BRN, (0, width - index_BRN.shape[2]), value=-1))
        return torch.cat(index_chunks, dim=1)

    def _attend_densely(
        self,
        query_SBHK: torch.Tensor,
        key_TB1K: torch.Tensor,
        seq_idx_BS: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to every causal key; the backward pass trains the indexer of a Full layer on this attention."""
        learns = self.training and torch.is_grad_enabled() and self.config.dsa_indexer_loss_coeff
        if self.indexer is not None and learns:
            q, k, w = self.indexer.forward_before_topk(x, qr)
            k = self.context.whole(k)
            learn = partial(self._dense_loss_gradients, query_SBHK.detach(), key_TB1K.detach(), seq_idx_BS)
            query_SBHK = DSAIndexerLossAutoScaler.apply(query_SBHK, training_token(q, k, w, None, learn))
        heads = query_SBHK.shape[2]
        if self.context:
            query_SBHK = self.context.to_heads(query_SBHK.flatten(2)).unflatten(-1, (-1, query_SBHK.shape[3]))
        key_TBHK = key_TB1K.expand(-1, -1, query_SBHK.shape[2], -1)
        value_TBHV = key_TBHK[..., : self.value_dim]
        tensors = (query_SBHK, key_TBHK, value_TBHV)
        o_SBHV = _causal(self.dense_backend.fn, *tensors, self.softmax_scale, seq_idx_BS, self.config)
        return self.context.to_rows(o_SBHV.flatten(2)).unflatten(-1, (heads, -1)) if self.context else o_SBHV

    def is_warming_up(self) -> bool:
        """Return whether the current step belongs to the dense warm-up."""
        return self.warmup_steps > 0 and training_step.ended(self.training) < self.warmup_steps

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
        """Like :meth:`_loss_gradients`, over every causal key, in query chunks; with documents, one batch row at a time."""
        rows, batch = q_SBHD.shape[:2]
        factor = self._factor(scale)
        weight = factor if self.config.calculate_per_token_loss else factor / (rows * batch)
        reduce = partial(torch.distributed.all_reduce, group=self.pg_collection.tp)
        # Documents differ from one row of the batch to the next.
        slices = [slice(0, batch)] if seq_idx_BS is None else [slice(b, b + 1) for b in range(batch)]
        chunk_grads = [
            dense_grad(
                *(tensor[:, batch_slice] for tensor in (q_SBHD, k_SBD, w_SBH, query_SBHK, key_TB1K)),
                weight=weight,
                softmax_scale=self.softmax_scale,
                seq_idx_S=None if seq_idx_BS is None else seq_idx_BS[batch_slice.start],
                positions_S=self.context.positions(rows, q_SBHD.device),
                reduce=reduce if self.pg_collection.tp.size() > 1 else None,
                kernel=self.grad_backend.requested != "reference",
            )
            for batch_slice in slices
        ]
        divergences, *gradients = zip(*chunk_grads, strict=True)
        self._log(torch.cat(divergences).mean())
        dq, dk, dw = (torch.cat(parts, dim=1) for parts in gradients)
        return dq, dk, dw

    def _factor(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the factor on the gradients of a mean over this rank's rows; ``scale`` is the schedule's.

        Except with a per-token loss, the schedule multiplies by the number of context-parallel ranks, over which Megatron then
        averages: its own loss is each rank's part of a mean over all rows.
        """
        ranks = 1 if self.config.calculate_per_token_loss else self.context.size
        return scale * (self.config.dsa_indexer_loss_coeff / ranks)

    def _log(self, divergence: torch.Tensor) -> None:
        loss = divergence * self.config.dsa_indexer_loss_coeff
        averaged = {"avg_group": self.context.group} if self.context else {}
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, self.layer_number, self.config.num_layers, **averaged)

    def _decode(self, indexer: PositionedIndexer, cache: LayerCache, x: torch.Tensor, qr: torch.Tensor) -> Selection:
        """Select keys for this call's rows among all rows so far: by the backend in the first call, by the reference later."""
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
        """Return gradients of the indexer's loss w.r.t. q, k and w; the target is reduced over tensor-parallel ranks."""
        target_BSN = sink.take()
        if self.pg_collection.tp.size() > 1:
            torch.distributed.all_reduce(target_BSN, group=self.pg_collection.tp)
        factor = self._factor(scale)
        if self.config.calculate_per_token_loss:  # gradients are divided by the number of tokens later
            factor = factor * index_BSN.shape[0] * index_BSN.shape[1]
        loss, dq, dk, dw = self.grad_backend.fn(q_SBHD, k_SBD, w_SBH, index_BSN, target_BSN, factor)
        self._log(loss)
        return dq, dk, dw
