"""Overlap of the top-k keys that neighbouring Full layers select, sampled while a run trains. No torch at import.

A Shared layer attends to the keys of the Full layer before it. Where two successive Full layers select mostly the same
keys, the second may become a Shared one (``megacpp-mcore advise index-cache`` tries that on held-out text).

Legend: B batch, S queries, R sampled queries, N selected keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from megacpp_mcore.observe.events import Hooked, Step
from megacpp_mcore.observe.routing import is_capturing
from megacpp_mcore.util.stand_in import stand_in

SAMPLED = 64
"""Queries sampled for an overlap, evenly spaced over those that see more keys than they select."""


class IndexOverlap(Hooked):
    """Samples the selections published in the index caches, in the first micro-batch of every ``interval``-th step.

    Pairs are successive Full layers of this rank, compared at its own queries, whose keys may be other ranks'. The device is
    read once, after such a step. A CUDA graph samples whenever it is replayed, into memory that it was captured with: of a
    layer in graphs the last micro-batch is read.
    """

    def __init__(self, interval: int = 10) -> None:
        super().__init__(interval)
        self.by_pair: dict[str, float] = {}
        """The last sampled share of keys that two layers have in common, keyed by their numbers: ``5-9``."""
        self._rows: dict[int, Any] = {}
        self._captured: dict[int, Any] = {}  # samples that graphs write
        self._sampling = False

    def latest(self) -> dict[str, float]:
        """Return the mean over pairs as ``index_overlap``; empty before the first sample."""
        return {"index_overlap": fmean(self.by_pair.values())} if self.by_pair else {}

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Watch the index caches of the model."""
        modules = (module for chunk in chunks for module in chunk.modules())
        caches = {id(cache): cache for module in modules if (cache := getattr(module, "index_cache", None)) is not None}
        for cache in caches.values():
            self.watch(cache)

    def watch(self, cache: Any) -> None:
        """Sample what is published in ``cache``, until the end; an error here must not end a forward pass."""
        sample = self.guard(self._sample)

        def publish(stock: Callable[..., None], layer: int, selection: Any) -> None:
            if self._sampling or is_capturing():
                sample(layer, selection.index)
            stock(layer, selection)

        self.hooks.enter_context(stand_in(cache, "publish", publish))

    def on_step_begin(self, number: int) -> None:
        """Decide whether this step is sampled."""
        self._sampling = number % self.interval == 0

    def on_step(self, step: Step) -> None:
        """Compare the samples; raise an error of a hook."""
        rows, self._rows = self._rows | (self._captured if self._sampling else {}), {}
        self._sampling = False
        self.raise_first()
        for layer, next_layer in itertools.pairwise(sorted(rows)):
            self.by_pair[f"{layer}-{next_layer}"] = overlap(rows[layer], rows[next_layer])

    def on_end(self, error: BaseException | None) -> None:
        """Release the graphs' memory, then remove the hooks."""
        self._captured.clear()
        super().on_end(error)

    def _sample(self, layer: int, index_BSN: Any) -> None:
        """Store sampled rows of queries that had a choice: the first N queries select every key that they may see."""
        import torch

        _, queries, selected = index_BSN.shape
        rows = self._captured if is_capturing() else self._rows
        if (layer in rows and rows is self._rows) or queries <= selected:
            return
        rows_R = torch.linspace(selected, queries - 1, min(SAMPLED, queries - selected), device=index_BSN.device)
        rows[layer] = index_BSN.detach()[:, rows_R.round().long()]


def overlap(one_BRN: Any, other_BRN: Any) -> float:
    """Return the share of keys in ``other`` that are also in ``one``, both ``[B, R, N]``; entries below 0 select nothing."""
    import torch

    sorted_BRN = one_BRN.sort(-1).values
    place_BRN = torch.searchsorted(sorted_BRN, other_BRN).clamp_(max=sorted_BRN.shape[-1] - 1)
    valid = other_BRN >= 0
    both = (sorted_BRN.gather(-1, place_BRN) == other_BRN) & valid
    return float(both.sum() / valid.sum().clamp(min=1))
