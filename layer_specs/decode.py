"""Decoding: each layer's cache of earlier tokens in Megatron's static inference context.

Stock attention stores keys and values in ``StaticInferenceContext.key_value_memory_dict`` under its layer number; M, R and
sparse A store their own state there instead (so ``swap_key_value_dict``, which reorders a batch, does not apply). Each row of
the batch is one document: masks are not read. A sequence may be passed in pieces, with ``sequence_len_offset`` the number of
rows before this piece; the results equal those of one call on the whole sequence. Behaviour of megatron-core 0.19
``inference/contexts/static_context.py``.

Shape legend: S rows of this call, T rows so far, B batch, X values per row.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.errors import ModelError


def refuse_decoding(config: TransformerConfig, layer_number: int, packed_seq_params: PackedSeqParams | None) -> None:
    """Raise ModelError for what decoding does not support: packed rows, context and sequence parallelism."""
    if packed_seq_params is not None:
        raise ModelError(
            f"layer {layer_number} got packed sequences with an inference context, which holds one document per row; "
            "give each document a row of the batch",
            code="packed-decoding",
        )
    if config.context_parallel_size > 1:
        raise ModelError(
            f"layer {layer_number}: sequences are split over {config.context_parallel_size} context-parallel ranks; load the "
            "checkpoint at --context-parallel-size 1 to decode"
        )
    if config.sequence_parallel:
        raise ModelError(
            f"layer {layer_number}: the sequence is sharded over {config.tensor_model_parallel_size} ranks; load the "
            "checkpoint at tensor parallelism 1 to decode"
        )


class LayerCache:
    """One layer's entry in an inference context, for one call of the layer.

    Args:
        context: the ``inference_context`` that Megatron passes to a layer.
        layer_number: 1-based.
        rows: S.

    Attributes:
        state: what the previous call left; None before the first row.

    Raises:
        ModelError: the context is not static, has a nonzero ``batch_size_offset`` or is too short; or this layer's previous
            calls did not end where this one starts.
    """

    def __init__(self, context: Any, layer_number: int, rows: int) -> None:
        if not context.is_static_batching():
            raise ModelError(
                f"layer {layer_number} got a {type(context).__name__}; M, R and sparse A layers decode with a "
                "StaticInferenceContext"
            )
        if context.batch_size_offset:
            raise ModelError(
                f"layer {layer_number}: batch_size_offset is {context.batch_size_offset}, expected 0; pass the whole batch"
            )
        self.layer_number = layer_number
        self.first_row = int(context.sequence_len_offset)
        self.end = self.first_row + rows
        self.max_rows = int(context.max_sequence_length)
        if self.end > self.max_rows:
            raise ModelError(
                f"layer {layer_number}: the sequence has {self.end} rows but the context holds "
                f"{self.max_rows}; create it with a larger max_sequence_length"
            )
        self._entries = context.key_value_memory_dict
        entry: tuple[Any, int] = self._entries.get(layer_number, (None, 0)) if self.first_row else (None, 0)
        self.state, seen = entry
        if seen != self.first_row:
            raise ModelError(
                f"layer {layer_number} has seen {seen} rows of this sequence but sequence_len_offset is "
                f"{self.first_row}; advance it by the rows of each call"
            )

    def leave(self, state: Any) -> None:
        """Store ``state`` for the next call."""
        self._entries[self.layer_number] = (state, self.end)

    def extend(self, **rows_SBX: torch.Tensor) -> dict[str, torch.Tensor]:
        """Append the rows of this call to the layer's buffers and return all rows so far, ``[T, B, X]`` by name."""
        buffers: dict[str, torch.Tensor] = {} if self.state is None else self.state
        for name, rows in rows_SBX.items():
            if name not in buffers:
                buffers[name] = rows.new_empty(self.max_rows, *rows.shape[1:])
            buffers[name][self.first_row : self.end] = rows
        self.state = buffers
        self.leave(buffers)
        return {name: buffers[name][: self.end] for name in rows_SBX}
