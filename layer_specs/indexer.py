"""DSA's indexer, extending stock's: rows may start anywhere in their sequence, and one op computes q, k and weights.

Shape legend: S rows, B batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.mla import replaces_modules, rotation
from megacpp_mcore.layer_specs.parts import backend_needs


class PositionedIndexer(DSAIndexer):
    """Stock's indexer with a position offset, for rows that are not the first of their sequence, by the dispatcher's ops.

    Args are those of the stock class; ``dispatcher`` and ``layer_number`` come from the core attention.
    """

    _first_row = 0

    def __init__(
        self, config: MLATransformerConfig, *args: Any, dispatcher: Dispatcher, layer_number: int, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        needs = {"layer": layer_number, "rope_dim": self.qk_pos_emb_head_dim, **backend_needs(config)}
        self.rotation_backend = dispatcher.request("mla_projection", **needs)
        self.inputs_backend = dispatcher.request("indexer_inputs", dim=self.index_head_dim, **needs)

    @contextlib.contextmanager
    def rows_from(self, first_row: int) -> Iterator[None]:
        """Let the indexer's input start at row ``first_row`` of its sequence, within the context."""
        self._first_row = first_row
        try:
            yield
        finally:
            self._first_row = 0

    def forward_before_topk(self, x: torch.Tensor, qr: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Compute queries ``[S, B, heads, dim]``, keys ``[S, B, dim]`` and head weights ``[S, B, heads]``.

        Computed by the op ``indexer_inputs``, which returns no gradient for ``x`` and ``qr``, or by the stock method.
        """
        modules = (self.linear_wq_b, self.linear_wk, self.k_norm, self.linear_weights_proj)
        if not replaces_modules(self.inputs_backend, *modules):
            return super().forward_before_topk(x, qr, *args, **kwargs)
        if self.config.sequence_parallel:
            x, qr = (gather_from_sequence_parallel_region(rows, group=self.pg_collection.tp) for rows in (x, qr))
        return self.inputs_backend.fn(
            x,
            qr,
            self.linear_wq_b.weight,
            self.linear_wk.weight,
            self.k_norm.weight,
            self.k_norm.bias,
            self.linear_weights_proj.weight,
            rotation_SR=self._rotation(len(x)),
            eps=self.config.layernorm_epsilon,
            scale=self.index_n_heads**-0.5 * self.softmax_scale,
            interleaved=self.config.dsa_indexer_rope_interleaved,
        )

    def _rotation(self, rows: int) -> torch.Tensor:
        ranks = self.pg_collection.cp.size()
        return rotation(self.rotary_pos_emb, (self._first_row + rows) * ranks)[self._first_row :]

    def _apply_rope(self, x: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        """Apply RoPE to the leading values of ``x [S, B, heads or 1, dim]``, from the first row on; stock assumes row 0."""
        rotation_SR = self._rotation(len(x))
        rotary, plain = x.split([self.qk_pos_emb_head_dim, x.shape[-1] - self.qk_pos_emb_head_dim], dim=-1)
        rotated: torch.Tensor = self.rotation_backend.fn(
            rotary, rotation_SR=rotation_SR, interleaved=self.config.dsa_indexer_rope_interleaved
        )
        return torch.cat([rotated, plain], dim=-1) if plain.shape[-1] else rotated
