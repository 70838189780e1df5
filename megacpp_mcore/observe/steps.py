"""Steps of a run with losses in full precision: read from its folder. No torch.

Megatron's own log prints seven digits, and its second line after every start is the average of two steps (megatron-core
0.19.2, ``megatron/training/training.py``): it can neither prove nor refute that a resumed run reproduces the first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.events import Start, Step


def read_steps(run: str | os.PathLike[str]) -> list[Step]:
    """Return all steps in a run's folder so far, in the order in which they were written, repeated ones included.

    Raises:
        DataError: there is no such folder, or a line is not what a run writes.
    """
    if not Path(run).is_dir():
        raise DataError(f"{run} is not a folder; expected the folder of a run that was observed")
    return [step for start in recorded(events.read(run, may_be_empty=True)) for step in start.steps]


def recorded(ranks: Mapping[int, Sequence[Start]]) -> list[Start]:
    """Return every start that recorded losses, in order."""
    starts = [start for starts in ranks.values() for start in starts if start.steps]
    return sorted(starts, key=lambda start: (start.number, start.rank))


def standing(starts: Sequence[Start]) -> list[tuple[Start, float]]:
    """Return each of a run's starts, in order, with its last step that no later start has undone (infinity if none).

    As soon as a start that resumed from a step's checkpoint has recorded a step, all steps of earlier starts beyond that
    checkpoint are undone, including those that it has not repeated yet.
    """
    bounds: list[tuple[Start, float]] = []
    kept_to = math.inf
    for start in reversed(starts):
        bounds.append((start, kept_to))
        if start.resumed_at is not None:
            kept_to = min(kept_to, start.resumed_at)
    return bounds[::-1]


def kept(starts: Sequence[Start]) -> list[Step]:
    """Return the steps that the run's present state rests on, ascending."""
    return [step for start, kept_to in standing(starts) for step in start.steps if step.step <= kept_to]
