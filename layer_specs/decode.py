"""Decoding: each layer's cache of earlier tokens in Megatron's static inference context.

Stock attention keeps keys and values in ``StaticInferenceContext.key_value_memory_dict`` under its layer's number; M, R and
sparse A keep there what they need instead. A sequence is given to the model in pieces, ``sequence_len_offset`` says how many
rows came before, and the results are those of the whole sequence at once. Behaviour of megatron-core 0.19
``inference/contexts/static_context.py``.

Shape legend: S rows of this call, T rows so far, B batch, X a row's values.
"""

from __future__ import annotations

from typing import Any

import torch

from megacpp_mcore.errors import ModelError


class LayerCache:
    """One layer's entry in an inference context, for one call of the layer.

    Args:
        context: the ``inference_context`` that Megatron hands to a layer.
        layer_number: 1-based.
        rows: S.

    Raises:
        ModelError: the context is not static, begins inside of its batch or is too short; or the layer has not seen the rows
            before these.
    """

    def __init__(self, context: Any, layer_number: int, rows: int) -> None:
        if not context.is_static_batching():
            raise ModelError(
                f"layer {layer_number} was given a {type(context).__name__}; M, R and sparse A layers decode with a "
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
                f"layer {layer_number}: the sequence has {self.end} rows and the context holds "
                f"{self.max_rows}; make it with a larger max_sequence_length"
            )
        self._entries = context.key_value_memory_dict
        entry: tuple[Any, int] = self._entries.get(layer_number, (None, 0)) if self.first_row else (None, 0)
        self._state, seen = entry
        if seen != self.first_row:
            raise ModelError(
                f"layer {layer_number} has seen {seen} rows of this sequence and sequence_len_offset is "
                f"{self.first_row}; advance it by the rows of each call"
            )

    @property
    def state(self) -> Any:
        """The state after the previous call; None before the first row."""
        return self._state

    def leave(self, state: Any) -> None:
        """Store ``state`` for the next call."""
        self._entries[self.layer_number] = (state, self.end)

    def extend(self, **rows_SBX: torch.Tensor) -> dict[str, torch.Tensor]:
        """Append the rows of this call to the layer's buffers, and return all rows so far, ``[T, B, X]`` by name."""
        buffers: dict[str, torch.Tensor] = {} if self._state is None else self._state
        for name, rows in rows_SBX.items():
            if name not in buffers:
                buffers[name] = rows.new_empty(self.max_rows, *rows.shape[1:])
            buffers[name][self.first_row : self.end] = rows
        self._state = buffers
        self.leave(buffers)
        return {name: buffers[name][: self.end] for name in rows_SBX}
