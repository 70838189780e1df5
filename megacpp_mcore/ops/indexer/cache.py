"""The index cache: passes a Full layer's top-k indices to its Shared layers, per micro-batch and under recompute.

Micro-batches are not identified by a number. The forward passes of one model chunk follow each other in every pipeline
schedule, so between a Full layer and its Shared layers there is only the micro-batch now passing through the chunk:
:class:`IndexCache` holds one entry per Full layer, dropped when each of its Shared layers has read it once. Recompute
happens during the backward pass, with other micro-batches in between. There the checkpointed function itself identifies the
layers and the micro-batch: each checkpoint call has its own function, the autograd graph keeps it until it is run again, and
:class:`Recomputed` makes it remember what its layers published and read the first time. Nothing outlives the graph.

No torch here: selections are passed on unchanged. Legend: S queries, B batch, N top-k.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore.errors import ModelError


@dataclass(frozen=True)
class Selection:
    """The keys that a Full layer selected, for its Shared layers.

    Attributes:
        index: the selected keys of each query, ``[B, S, N]``.
        length: how many of them are valid ``[B, S]``, if a kernel reports it; else None.
        sink: accumulates the target of the Full layer's indexer from the layers that attend to these keys
            (:class:`megacpp_mcore.ops.indexer.training.TargetSum`); None if the indexer is not trained.
    """

    index: Any
    length: Any = None
    sink: Any = None


_Passed = tuple["IndexCache", int, Selection]
"""A selection that a layer published or read."""


@dataclass
class _Run:
    """One run of a checkpointed function: what its layers passed on, and, if it is a recompute, what they must pass on."""

    first: Iterator[_Passed] | None
    passed: list[_Passed] = field(default_factory=list)


class _Runs(threading.local):
    """The runs in progress in this thread, outermost first; a backward pass may have a thread of its own."""

    def __init__(self) -> None:
        self.stack: list[_Run] = []


_RUNS = _Runs()


class IndexCache:
    """The indices of one model chunk's Full layers, on their way to its Shared layers.

    Args:
        sources: Shared layer number to the number of its Full layer, for the layers of this chunk.
    """

    def __init__(self, sources: Mapping[int, int]) -> None:
        self._sources = dict(sources)
        self._entries: dict[int, tuple[Selection, set[int]]] = {}

    def assign(self, sources: Mapping[int, int]) -> None:
        """Serve other Shared layers from now on; drop all entries."""
        self._sources = dict(sources)
        self._entries.clear()

    def __len__(self) -> int:
        """Count the Full layers with entries that some of their Shared layers have not read."""
        return len(self._entries)

    def readers(self, layer: int) -> int:
        """Return how many Shared layers Full layer ``layer`` serves."""
        return sum(full == layer for full in self._sources.values())

    def publish(self, layer: int, selection: Selection) -> None:
        """Pass ``selection`` of Full layer ``layer`` to the Shared layers it serves.

        Does nothing when the layer is recomputed: its Shared layers have their indices from the first run.
        """
        if self.recall(layer) is not None:
            return
        readers = {shared for shared, full in self._sources.items() if full == layer}
        if readers:
            self._entries[layer] = (selection, readers)
        self._note(layer, selection)

    def recall(self, layer: int) -> Selection | None:
        """Return what Full layer ``layer`` published in the first run, if this is a recompute; None in a first run.

        A recomputed layer either recalls its selection or publishes another one, which is dropped.

        Raises:
            ModelError: the recompute differs from the first run.
        """
        first = _repetition()
        if first is None:
            return None
        selection = self._repeat(layer, first)
        self._note(layer, selection)
        return selection

    def forget(self, layer: int) -> None:
        """Drop the entry of Full layer ``layer``, if any of its Shared layers has yet to read it."""
        self._entries.pop(layer, None)

    def read(self, layer: int) -> Selection:
        """Return the selection for Shared layer ``layer``: the object its Full layer published for this micro-batch.

        Raises:
            ModelError: the Full layer has not run in this forward pass, or a recompute differs from the first run.
        """
        first = _repetition()
        selection = self._take(layer) if first is None else self._repeat(layer, first)
        self._note(layer, selection)
        return selection

    def peek(self, layer: int) -> Selection:
        """Return what Shared layer ``layer`` is going to read, without consuming it or recording it for a recompute.

        Raises:
            ModelError: as in :meth:`read`.
        """
        return self._entry(layer)[0]

    def _note(self, layer: int, selection: Selection) -> None:
        """Record ``selection`` for the recompute of every checkpointed function in its first run."""
        for run in _RUNS.stack:
            if run.first is None:
                run.passed.append((self, layer, selection))

    def _take(self, layer: int) -> Selection:
        selection, readers = self._entry(layer)
        readers.discard(layer)
        if not readers:
            del self._entries[self._sources[layer]]
        return selection

    def _entry(self, layer: int) -> tuple[Selection, set[int]]:
        full = self._sources[layer]
        selection, readers = self._entries.get(full, (None, set()))
        if selection is None or layer not in readers:
            raise ModelError(
                f"layer {layer} shares the indices of layer {full}, which has not published any for this micro-batch: the "
                "Shared layer was run without its Full layer, twice after it, by a recompute that is not Megatron's own "
                "(tensor_parallel.checkpoint, te_checkpoint), or recomputed while the patch dsa-index-cache is not applied; "
                "run the layers of a model chunk in order, and keep that patch applied",
                code="not-published",
            )
        return selection, readers

    def _repeat(self, layer: int, first: Iterator[_Passed]) -> Selection:
        cache, recorded, selection = next(first, (None, None, None))
        if cache is not self or recorded != layer or selection is None:
            raise ModelError(
                f"recompute reached sparse layer {layer} where the first run had "
                + ("none" if recorded is None else f"layer {recorded}")
                + "; a checkpointed function must run the same layers each time"
            )
        return selection


class Recomputed:
    """A function under activation checkpointing that replays the selections of its sparse layers' first run.

    Pass it to the checkpoint instead of ``function``. Create a new one for each checkpoint call; it keeps the
    indices alive as long as the autograd graph keeps it: until the backward pass of the micro-batch is done.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._passed: tuple[_Passed, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; the first run without an exception is the one that later runs replay."""
        run = _Run(first=None if self._passed is None else iter(self._passed))
        _RUNS.stack.append(run)
        try:
            output = self._function(*args, **kwargs)
        finally:
            _RUNS.stack.pop()
        if self._passed is None:
            self._passed = tuple(run.passed)
        return output


def _repetition() -> Iterator[_Passed] | None:
    """Return what the first run of the innermost recompute in progress passed on; None outside of a recompute."""
    for run in reversed(_RUNS.stack):
        if run.first is not None:
            return run.first
    return None
