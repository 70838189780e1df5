"""The input projection of a mixer: one weight whose rows are ordered by part, each part aligned for 16-byte loads.

A mixer projects its input to several parts (z, x, B, C, … of Mamba-3; q, k, v, … of M²RNN). They are rows of one weight, so
one GEMM computes them all, and the parts are slices of its output. At every TP size each part starts at a multiple of
:data:`ALIGNMENT` values, and the total width is such a multiple, so vectorised loads and TMA descriptors can read a part in
place. The gaps are padded with rows of zeros, which get no gradient and are not in checkpoints.

Per-head and per-group parts are split over tensor parallelism; the others (of heads that all ranks share) are replicated, and
their gradients summed over the ranks. A replicated part cannot share a parameter with a split one: in the gradient norm
Megatron counts a parameter either on every rank or once overall. So there is one weight at TP 1, and two above, which read the
same gathered input. A checkpoint stores every part separately, and loads at any TP size.

Shape legend: S sequence (of this rank), B batch, D hidden, N values per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megacpp_mcore.backends import Resolution
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.exchange import gathered_products
from megacpp_mcore.layer_specs.gradients import main_grad_of, mark_replicated, replicated
from megacpp_mcore.layer_specs.initial import Initializer, filled
from megacpp_mcore.ops.main_grad import linear
from megacpp_mcore.ops.slices import split

ALIGNMENT = 8
"""In values: 16 bytes in bf16, the alignment of address and row stride required by vectorised loads and TMA descriptors."""


@dataclass(frozen=True)
class Part:
    """One part of an input projection: the rows of z, say.

    Attributes:
        name: key in the forward pass's result and in checkpoints.
        rows: over all tensor-parallel ranks.
        replicated: every rank has all rows; otherwise rank r of n has the r-th of n equal slices.
        follows: starts where the previous part ends, without padding.
        exact: stays in the weight's dtype, with all parts after it, where others are multiplied in FP8.
    """

    name: str
    rows: int
    replicated: bool = False
    follows: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Slot:
    """Position of a part in one rank's weight: ``rows`` rows from ``start``."""

    part: Part
    start: int
    rows: int


def slots(parts: tuple[Part, ...], tp_size: int) -> tuple[tuple[Slot, ...], int]:
    """Return the slot of each of ``parts`` in the weight of one of ``tp_size`` ranks, and that weight's rows with padding.

    Raises:
        ModelError: the rows of a part are not divisible by ``tp_size``.
    """
    placed, end = [], 0
    for part in parts:
        if not part.replicated and part.rows % tp_size:
            raise ModelError(
                f"the projection of {part.name} has {part.rows} rows, not a multiple of tensor parallelism {tp_size}; "
                "choose a size that divides it"
            )
        start = end if part.follows else _aligned(end)
        end = start + (part.rows if part.replicated else part.rows // tp_size)
        placed.append(Slot(part, start, end - start))
    return tuple(placed), _aligned(end)


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def inexact_rows(parts: tuple[Part, ...], tp_size: int) -> int:
    """Return how many rows of one rank's weight come before the first part that is exact."""
    cut = parts if tp_size == 1 else tuple(part for part in parts if not part.replicated)
    placed, rows = slots(cut, tp_size)
    return next((slot.start for slot in placed if slot.part.exact), rows)


class InProjection(MegatronModule):
    """``[S, B, D] -> {part: [S, B, rows of this rank]}`` of the whole sequence, bias-free.

    Args:
        config: of the run; sets dtype, init device, and sequence parallelism.
        parts: in the order of their rows.
        init_method: of all rows.
        tp_group: the tensor-parallel ranks.
        backend: multiplies the rows before the first exact part in lower precision, if given; its function is like
            :func:`megacpp_mcore.ops.mamba3_projection.reference.project`.

    Raises:
        ModelError: the rows of a part cannot be split.
    """

    follows_transformer_impl = False
    """Keeps receipts from reporting it as a fall-back from Transformer Engine, which has no such layer."""

    def __init__(
        self,
        config: TransformerConfig,
        parts: tuple[Part, ...],
        init_method: Initializer,
        tp_group: torch.distributed.ProcessGroup,
        backend: Resolution | None = None,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.backend = tp_group, backend  # read for receipts
        self.tp_size, self.tp_rank = tp_group.size(), tp_group.rank()
        # The initial values of each part are the same at every tensor parallelism.
        full = {part.name: filled((part.rows, config.hidden_size), config, init_method) for part in parts}
        together = self.tp_size == 1
        cut = parts if together else tuple(part for part in parts if not part.replicated)
        self.slots, rows = slots(cut, self.tp_size)
        self.inexact_rows = inexact_rows(parts, self.tp_size)
        self.weight = self._parameter(self.slots, rows, full, is_cut=not together)
        self.replicated_slots: tuple[Slot, ...] = ()
        if not together and len(cut) < len(parts):
            self.replicated_slots, rows = slots(tuple(part for part in parts if part.replicated), self.tp_size)
            self.replicated_weight = self._parameter(self.replicated_slots, rows, full, is_cut=False)
            mark_replicated(self.replicated_weight, config)

    def _parameter(
        self, placed: tuple[Slot, ...], rows: int, full: dict[str, torch.Tensor], *, is_cut: bool
    ) -> torch.nn.Parameter:
        weight_ND = next(iter(full.values())).new_zeros(rows, self.config.hidden_size)
        for slot in placed:
            values = full[slot.part.name]
            if not slot.part.replicated:
                values = values.chunk(self.tp_size)[self.tp_rank]
            weight_ND[slot.start : slot.start + slot.rows] = values
        parameter = torch.nn.Parameter(weight_ND.to(self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_cut, 0 if is_cut else -1, 1)
        return parameter

    def forward(self, hidden_SBD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Project once, or twice if parts are replicated over ranks; both share one gather of the sequence."""
        if self.tp_size == 1:
            return self._product(hidden_SBD)
        if self.config.sequence_parallel and self.backend is None:
            weights = list(self.parameters())
            main_grads = [main_grad_of(weight, self.config) for weight in weights]
            outputs = gathered_products(hidden_SBD, weights, main_grads, self.tp_group)
            split_outputs = [_split(*pair) for pair in zip(outputs, (self.slots, self.replicated_slots), strict=False)]
            return {name: part for parts in split_outputs for name, part in parts.items()}
        if self.config.sequence_parallel:
            hidden_SBD = gather_from_sequence_parallel_region(hidden_SBD, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden_SBD = copy_to_tensor_model_parallel_region(hidden_SBD, group=self.tp_group)
        parts = self._product(hidden_SBD)
        if self.replicated_slots:
            weight = replicated(self.replicated_weight, self.config, self.tp_group)
            parts |= _split(torch.nn.functional.linear(hidden_SBD, weight), self.replicated_slots)
        return parts

    def _product(self, hidden_SBD: torch.Tensor) -> dict[str, torch.Tensor]:
        main_grad = main_grad_of(self.weight, self.config)
        if self.backend is None:
            return _split(linear(hidden_SBD, self.weight, main_grad), self.slots)
        parts: dict[str, torch.Tensor] = {}
        start = 0
        for output_SBN in self.backend.fn(hidden_SBD, self.weight, main_grad, self.inexact_rows):
            end = start + output_SBN.shape[-1]
            parts |= _split(output_SBN, [slot for slot in self.slots if start <= slot.start < end], start)
            start = end
        return parts

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return each part under ``{prefix}weight.{part}``, with its global shape, without padding."""
        dp_rank = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"].rank()
        state: ShardedStateDict = {}
        for name, placed in (("weight", self.slots), ("replicated_weight", self.replicated_slots)):
            if placed:
                # The parameter object, not its data: the optimizer looks up its states by it.
                parameter = getattr(self, name)
                is_cut = name == "weight" and self.tp_size > 1
                replica_id = (0, 0 if is_cut else self.tp_rank, dp_rank)
                state[f"{prefix}{name}"] = self._factory(f"{prefix}weight", parameter, placed, sharded_offsets, replica_id)
        return state

    def _factory(
        self,
        key: str,
        parameter: torch.Tensor,
        placed: tuple[Slot, ...],
        sharded_offsets: tuple[tuple[int, int, int], ...],
        replica_id: tuple[int, int, int],
    ) -> ShardedTensorFactory:
        """Return a factory that splits a weight, or an optimizer state of its shape, into parts, and merges them at load."""
        shape = parameter.shape

        def build(key: str, rows: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
            if flattened_range is not None:
                raise ModelError(
                    f"{key} is requested as a flattened range {flattened_range}, but its parts are rows; save the optimizer "
                    "with --dist-ckpt-optim-fully-reshardable or in Megatron's default format"
                )
            shards = []
            for slot in placed:
                offsets = list(sharded_offsets)
                if not slot.part.replicated and self.tp_size > 1:
                    offsets.append((len(sharded_offsets), self.tp_rank, self.tp_size))
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        f"{key}.{slot.part.name}",
                        rows[slot.start : slot.start + slot.rows],
                        *offsets,
                        replica_id=replica_id,
                        prepend_axis_num=len(sharded_offsets),
                    )
                )
            return shards

        def merge(parts: list[torch.Tensor]) -> torch.Tensor:
            weight = parts[0].new_zeros(shape)
            for slot, rows in zip(placed, parts, strict=True):
                weight[slot.start : slot.start + slot.rows] = rows
            return weight

        return ShardedTensorFactory(key, parameter, build, merge, replica_id)


def _split(output_SBN: torch.Tensor, placed: Sequence[Slot], start: int = 0) -> dict[str, torch.Tensor]:
    """Split ``output_SBN``, of the rows from ``start``, into views of its parts in one call, so that their gradients are
    concatenated in at most one copy."""
    pieces, end = [], start
    for slot in placed:
        pieces += [("", slot.start - end), (slot.part.name, slot.rows)]
        end = slot.start + slot.rows
    pieces.append(("", start + output_SBN.shape[-1] - end))
    names, sizes = zip(*(piece for piece in pieces if any(piece)), strict=True)
    return {name: part for name, part in zip(names, split(output_SBN, sizes), strict=True) if name}
