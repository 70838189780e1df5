"""Steps of a run with losses in full precision: read from its folder, and compared. No torch.

Megatron's own log prints seven digits, and its second line after every start is the average of two steps (megatron-core
0.19.2, ``megatron/training/training.py``): it can neither prove nor refute that a resumed run reproduces the first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.events import Start, Step

__all__ = ["Comparison", "Step", "compare", "kept", "read_steps", "recorded", "standing"]


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_steps(run: str | os.PathLike[str]) -> list[Step]:
    """All steps in a run's folder so far, in the order in which they were written, repeated ones included.

    Raises:
        DataError: there is no such folder, or a line is not what a run writes.
    """
    if not Path(run).is_dir():
        raise DataError(f"{run} is no folder; expected that of a run that was observed")
    return [step for start in recorded(events.read_any(run)) for step in start.steps]


def recorded(ranks: Mapping[int, Sequence[Start]]) -> list[Start]:
    """Every start that recorded losses, in order."""
    starts = [start for starts in ranks.values() for start in starts if start.steps]
    return sorted(starts, key=lambda one: (one.number, one.rank))


def standing(starts: Sequence[Start]) -> list[tuple[Start, float]]:
    """Each of a run's starts, in order, with its last step that no later start has undone (infinity if none).

    As soon as a start that resumed from a step's checkpoint has recorded a step, all steps of earlier starts beyond that
    checkpoint are undone, including those that it has not repeated yet.
    """
    found: list[tuple[Start, float]] = []
    kept_to = math.inf
    for start in reversed(starts):
        found.append((start, kept_to))
        if start.resumed_at is not None:
            kept_to = min(kept_to, start.resumed_at)
    return found[::-1]


def kept(starts: Sequence[Start]) -> list[Step]:
    """The steps that the run's present state rests on, ascending."""
    return [step for start, kept_to in standing(starts) for step in start.steps if step.step <= kept_to]


# --- Comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two recordings of the same steps.

    Attributes:
        steps: numbers of the steps that both have, ascending.
        names: the values that were compared.
        first_difference: the first step with a value that is not the same double in both, and that value's name.
        largest: the largest absolute difference of the ``lm loss``, in nats; NaN when a step lacks it, or it is NaN.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    first_difference: tuple[int, str] | None
    largest: float

    @property
    def equal(self) -> bool:
        """Whether every compared value of every step is the same, bit for bit."""
        return self.first_difference is None


def compare(before: list[Step], after: list[Step]) -> Comparison:
    """Compare losses, gradient norm and learning rate of the steps that two recordings have in common.

    A value that only one of them has, and one that is not a number, is a difference.

    Raises:
        DataError: they have no step in common.
    """
    left, right = ({step.step: step.values() for step in steps} for steps in (before, after))
    common = sorted(left.keys() & right.keys())
    if not common:
        spans = [f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps" for steps in (before, after)]
        raise DataError(f"found no step in common among {spans[0]} and {spans[1]}; expected at least one")
    names = sorted(set().union(*(left[number].keys() | right[number].keys() for number in common)))
    differences = (
        (number, name) for number in common for name in names if left[number].get(name) != right[number].get(name)
    )
    apart = [abs(left[number].get("lm loss", math.nan) - right[number].get("lm loss", math.nan)) for number in common]
    largest = math.nan if any(map(math.isnan, apart)) else max(apart)
    return Comparison(tuple(common), tuple(names), next(differences, None), largest)
