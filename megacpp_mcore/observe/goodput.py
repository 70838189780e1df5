"""Goodput: a run's wall time split into productive steps and what else it went to, across its restarts. No torch.

Which steps a restart had to repeat is known only then, so that files hold phases, and the classes are made when they are read.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.events import FINISHED, Listener, Log, Start, Step

logger = logging.getLogger(__name__)
PRODUCTIVE = "productive"
RECOVERY = "recovery"
LOST = "lost_steps"
DOWN = "down"
CLASSES = (PRODUCTIVE, *(phase.value for phase in Phase if phase is not Phase.STEP), RECOVERY, LOST, DOWN)
"""What a run's wall time goes to. ``productive``: steps that were kept. ``recovery``: the start-up of a start that follows a
death, by which a start was killed or an error ended what it had begun to train. ``lost_steps``: steps that a later start did
again, and what a death interrupted. ``down``: from a death to the next start. The others are phases
(:class:`~megacpp_mcore.observe.clock.Phase`)."""


@dataclass(frozen=True)
class Goodput:
    """What the wall time of one rank went to.

    Attributes:
        nanoseconds: of every class; they sum to ``wall_ns`` exactly.
        starts: how often the run was started.
        steps: distinct steps that were kept.
        steps_lost: steps that were done again after a restart.
        notes: what is doubtful about the times, a sentence each.
    """

    nanoseconds: Mapping[str, int]
    starts: int = 0
    steps: int = 0
    steps_lost: int = 0
    notes: tuple[str, ...] = ()

    @property
    def wall_ns(self) -> int:
        """From the start of the first process to the end of the last, without pauses that follow no death."""
        return sum(self.nanoseconds.values())

    @property
    def share(self) -> float:
        """The productive part of the wall time; 0.0 before there is any."""
        return self.nanoseconds[PRODUCTIVE] / self.wall_ns if self.wall_ns else 0.0

    def __add__(self, other: Goodput) -> Goodput:
        return Goodput(
            {name: self.nanoseconds[name] + other.nanoseconds[name] for name in CLASSES},
            self.starts + other.starts,
            self.steps + other.steps,
            self.steps_lost + other.steps_lost,
            self.notes + other.notes,
        )

    def record(self) -> dict[str, Any]:
        """A JSON-ready record, in seconds."""
        return {
            "goodput": self.share,
            "wall_s": self.wall_ns / 1e9,
            "seconds": {name: self.nanoseconds[name] / 1e9 for name in CLASSES},
            "starts": self.starts,
            "steps": self.steps,
            "steps_lost": self.steps_lost,
            "notes": list(self.notes),
        }


class Recorder(Listener):
    """Writes to this process's log, after every step, the nanoseconds by phase since the line before, and how it ended.

    The last rank, on which Megatron has the losses, writes those of every step, too.
    """

    def __init__(self, log: Log, *, with_losses: bool) -> None:
        self.log = log
        self._with_losses = with_losses
        self._start = Start(log.path, log.number, log.rank, log.world_size, log.began_ns)
        self._earlier: list[Start] | None = None
        self._before: dict[int | None, Goodput] = {}
        self._note()

    def on_step(self, step: Step) -> None:
        """Write the line of ``step``."""
        self._note(**(vars(step) if self._with_losses else {"step": step.step, "resumed_at": step.resumed_at}))

    def on_end(self, error: BaseException | None) -> None:
        """Write how it ended."""
        self._note(how=FINISHED if error is None else type(error).__name__)

    def so_far(self) -> Goodput:
        """What the wall time went to up to the last line, earlier starts included; one that is damaged is left out."""
        if self._earlier is None:
            damaged: list[tuple[int, DataError]] = []
            starts = events.read(self.log.run, damaged, rank=self.log.rank).get(self.log.rank, [])
            self._earlier = [start for start in starts if start.number < self.log.number]
            for _, error in damaged:
                logger.warning("%s; the goodput that is shown is without it", error)
        repeated_from = self._start.resumed_at
        if repeated_from not in self._before:  # before the first step of this start, and since
            self._before[repeated_from] = of_rank(self._earlier, repeated_from)
        last = self._earlier[-1] if self._earlier else None
        return self._before[repeated_from] + of_start(self._start, last, _left_off_dead(self._earlier), None)

    def _note(self, **fields: Any) -> None:
        phases = self.log.clock.take()
        self._start.add(self.log.write(self.log.began_ns + self.log.clock.elapsed_ns(), phases=phases, **fields))
        self._start.spans.clear()  # the sums are enough for this process
        self._start.steps.clear()


# --- Reading ----------------------------------------------------------------------------------------------------------


def _died(start: Start) -> bool:
    """Whether a death ended a start: it was killed, or an error ended what it had begun to train."""
    return start.how is None or (start.how != FINISHED and start.done > 0)


def _left_off_dead(starts: Sequence[Start]) -> bool:
    """Whether what comes after ``starts`` goes on with what a death ended.

    A start that an error ended before its first step has nothing to go on with, and does not undo the death before it.
    """
    return next((_died(start) for start in reversed(starts) if start.how == FINISHED or _died(start)), False)


def class_of(phase: str, after_death: bool) -> str:
    """The class of a phase outside of whole steps; what is left of a step was interrupted."""
    if phase == Phase.STEP:
        return LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


def is_repeated(step: int | None, repeated_from: int | None) -> bool:
    """Whether a step was done again by a later start, the earliest of which went on from step ``repeated_from``."""
    return step is not None and repeated_from is not None and step > repeated_from


def of_start(start: Start, before: Start | None, after_death: bool, repeated_from: int | None) -> Goodput:
    """What the time of one start went to, and the time since the one before it if it goes on with what a death ended.

    Args:
        start: the start.
        before: the one before it, if any.
        after_death: whether it goes on with what a death ended.
        repeated_from: the step from which a later start went on, the earliest of them; None: there is none.
    """
    spent: Counter[str] = Counter()
    if before is not None and after_death:
        spent[DOWN] = max(0, start.began_ns - before.ended_ns)
    repeated = [span for span in start.spans if is_repeated(span.step, repeated_from)]
    repeated_ns = sum(span.phases.get(Phase.STEP, 0) for span in repeated)
    spent.update({LOST: repeated_ns, PRODUCTIVE: start.done_ns - repeated_ns})
    for phase, nanoseconds in start.spent.items():
        spent[class_of(phase, after_death)] += nanoseconds
    unknown_ns = start.ended_ns - start.began_ns - start.done_ns - sum(start.spent.values())
    spent[LOST if start.done else class_of(Phase.STARTUP, after_death)] += max(0, unknown_ns)
    return Goodput({name: spent[name] for name in CLASSES}, 1, start.done - len(repeated), len(repeated))


def in_context(
    starts: Sequence[Start], repeated_from: int | None = None
) -> list[tuple[Start, Start | None, bool, int | None]]:
    """Each start, last first, with what its classes depend on: the arguments of :func:`of_start`."""
    found = []
    for index in range(len(starts) - 1, -1, -1):
        start, before = starts[index], starts[index - 1] if index else None
        found.append((start, before, _left_off_dead(starts[:index]), repeated_from))
        if start.resumed_at is not None:
            repeated_from = start.resumed_at if repeated_from is None else min(repeated_from, start.resumed_at)
    return found


def of_rank(starts: Sequence[Start], repeated_from: int | None = None) -> Goodput:
    """The goodput of one rank's ``starts``, of which one that follows went on from step ``repeated_from``; None: none has."""
    nothing = Goodput(dict.fromkeys(CLASSES, 0))
    return sum((of_start(*one) for one in in_context(starts, repeated_from)), nothing)


def of_starts(ranks: Mapping[int, Sequence[Start]]) -> dict[int, Goodput]:
    """The goodput of every rank."""
    found = {}
    for rank, starts in ranks.items():
        names = ", ".join(start.name for start in events.overlaps(starts))
        note = f"{names} overlap: two trainings record in this folder, or their clocks differ or were set"
        found[rank] = replace(of_rank(starts), notes=(note,) if names else ())
    return found


def read(run: str | os.PathLike[str]) -> dict[int, Goodput]:
    """The goodput of every rank that left a file in the run's folder, by rank.

    Raises:
        DataError: as :func:`megacpp_mcore.observe.events.read`.
    """
    return of_starts(events.read(run))


def slowest(ranks: Mapping[int, Goodput]) -> int:
    """The rank with the least goodput: the others' steps hold the time in which they wait for it.

    One that has left no time is the slowest only where none has.
    """
    return min(ranks, key=lambda rank: (not ranks[rank].wall_ns, ranks[rank].share, rank))
