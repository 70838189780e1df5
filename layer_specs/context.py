"""Context parallelism: each rank of a group holds a part of every sequence, and layers exchange what they need from the rest.

A sequence is split into 2n chunks for n ranks; rank r holds chunks r and 2n - 1 - r, one after the other, so that all ranks
have the same causal work (Megatron's order, ``get_batch_on_this_cp_rank``). What is exchanged:

- M and R: an all-to-all turns all heads of a rank's rows into a rank's heads of all rows, in order; the op runs as without
  context parallelism, and a second all-to-all brings its output back.
- full attention, also in MTP: queries and output likewise. Key latents are gathered, and each rank computes its heads' keys.
- sparse attention: key latents and the indexer's keys are gathered; a rank's queries score, select and attend.
- E layers, norms, projections: nothing.

Parameters are on every rank; per-head ones get a gradient from the rank that computes the head, and Megatron sums gradients
over the group. Each exchange is Megatron's, with the reverse exchange as its backward pass.

Shape legend: S rows of a sequence, P rows of a rank, B batch, N values per row, n ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from torch.nn.functional import pad

from megacpp_mcore.layer_specs.projection import ALIGNMENT
from megacpp_mcore.ops.slices import split


def in_order(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Put the rows of all ranks ``[n * P, …]``, rank by rank, into the order of the sequence."""
    chunks = rows.chunk(2 * ranks)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


def by_rank(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Put the rows of a sequence ``[S, …]`` into rank order: the inverse of :func:`in_order`."""
    chunks = rows.chunk(2 * ranks)
    return torch.cat([chunks[index] for rank in range(ranks) for index in (rank, 2 * ranks - 1 - rank)])


class Context:
    """The ranks that hold a layer's sequences; false if that is one rank.

    Args:
        pg_collection: process groups of the layer; a collection without ``cp`` means one rank.
    """

    def __init__(self, pg_collection: Any) -> None:
        self.group = getattr(pg_collection, "cp", None)
        self.size: int = 1 if self.group is None else self.group.size()
        self.rank: int = 0 if self.group is None else self.group.rank()

    def __bool__(self) -> bool:
        return self.size > 1

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather ``[P, …]`` to ``[S, …]``; the backward pass sums the gradients of all ranks and scatters them."""
        if not self:
            return rows
        return in_order(gather_from_sequence_parallel_region(rows, group=self.group), self.size)

    def own(self, heads: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's slice of a tensor ordered by head along ``dim``."""
        return heads.chunk(self.size, dim)[self.rank] if self else heads

    def to_heads(self, rows_PBN: torch.Tensor) -> torch.Tensor:
        """Exchange ``[P, B, N]``, ordered by head, for this rank's heads of all rows, ``[S, B, N / n]``."""
        by_head = rows_PBN.unflatten(2, (self.size, -1)).movedim(2, 0)
        return in_order(all_to_all(self.group, by_head.flatten(0, 1)), self.size)

    def to_rows(self, heads_SBN: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's heads of all rows ``[S, B, N]`` for all heads of its rows, ``[P, B, n * N]``."""
        received = all_to_all(self.group, by_rank(heads_SBN, self.size)).unflatten(0, (self.size, -1))
        return received.movedim(0, 2).flatten(2)

    def parts_to_heads(self, parts: dict[str, torch.Tensor], shared: Collection[str]) -> dict[str, torch.Tensor]:
        """Do :meth:`to_heads` for each of ``parts`` in one exchange; ``shared`` parts are sent to every rank in full.

        As in the projection's result, parts are slices of one tensor that start at multiples of :data:`ALIGNMENT`.
        """
        columns, widths = [], []
        for name, part_PBN in parts.items():
            if name in shared:
                per_rank = part_PBN.unsqueeze(2).expand(-1, -1, self.size, -1)
            else:
                per_rank = part_PBN.unflatten(2, (self.size, -1))
            gap = -per_rank.shape[3] % ALIGNMENT
            columns.append(pad(per_rank, (0, gap)))
            widths += [(name, per_rank.shape[3])] + [("", gap)] * bool(gap)
        parts_by_rank = split(self.to_heads(torch.cat(columns, dim=3).flatten(2)), [width for _, width in widths])
        return {name: part for (name, _), part in zip(widths, parts_by_rank, strict=True) if name}

    def chunks(self) -> tuple[int, int]:
        """Return the numbers of this rank's two chunks of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, rows: int, device: torch.device) -> torch.Tensor | None:
        """Return the positions of this rank's ``rows`` in the sequence ``[P]``; None with one rank, where they are 0, 1, …"""
        if not self:
            return None
        half = torch.arange(rows // 2, device=device)
        return torch.cat([half + chunk * (rows // 2) for chunk in self.chunks()])
