"""Goodput: a run's wall time split into productive steps and what else it went to, across its restarts. No torch.

Which steps a restart had to repeat is known only then, so that files hold phases, and the classes are made when they are read.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    starts: int
    steps: int
    steps_lost: int
    notes: tuple[str, ...] = ()

    @property
    def wall_ns(self) -> int:
        """From the start of the first process to the end of the last, without pauses that follow no death."""
        return sum(self.nanoseconds.values())

    @property
    def share(self) -> float:
        """The productive part of the wall time; 0.0 before there is any."""
        return self.nanoseconds[PRODUCTIVE] / self.wall_ns if self.wall_ns else 0.0

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

    Args:
        log: the process's log.
        with_losses: whether the steps' losses are written, too: where this is the last rank, on which Megatron has them.
    """

    def __init__(self, log: Log, *, with_losses: bool) -> None:
        self.log = log
        self._with_losses = with_losses
        self._earlier: list[Start] | None = None
        self._before: Start | None = None
        self._after_death = False
        self._settled: _Sum | None = None
        self._start = Start(
            log.path, int(log.path.parent.name.partition("_")[2]), log.rank, log.world_size, log.began_ns
        )
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
            self._earlier = _readable(self.log, self._start.number)
            self._before = self._earlier[-1] if self._earlier else None
            self._after_death = _left_off_dead(self._earlier)
        if self._settled is None or self._earlier:
            self._settled = _sum(self._earlier, self._start.resumed_at)
            if self._start.resumed_at is not None:
                self._earlier = []  # what they lost is known for good
        total = self._settled.copy()
        total.add(self._start, self._before, self._after_death, None)
        return total.goodput()

    def _note(self, **fields: Any) -> None:
        phases = self.log.clock.take()
        at = self.log.began_ns + self.log.clock.elapsed_ns()
        self._start.add(self.log.write(at, phases=phases, **fields), keep=False)


def _readable(log: Log, number: int) -> list[Start]:
    """The starts of a log's rank before start ``number``."""
    found: list[Start] = []
    for other, rank, path in events.rank_files(log.run):
        if rank == log.rank and other < number:
            try:
                found += events.read_file(path, other, rank)
            except DataError as error:
                logger.warning("%s; the goodput that is shown is without it", error)
    return found


# --- Reading ----------------------------------------------------------------------------------------------------------


def _died(start: Start) -> bool:
    """Whether a death ended a start: it was killed, or an error ended what it had begun to train."""
    return start.how is None or (start.how != FINISHED and start.done > 0)


def _left_off_dead(starts: Sequence[Start]) -> bool:
    """Whether what comes after ``starts`` goes on with what a death ended.

    A start that an error ended before its first step has nothing to go on with, and does not undo the death before it.
    """
    for start in reversed(starts):
        if start.how == FINISHED or _died(start):
            return _died(start)
    return False


def class_of(phase: str, after_death: bool) -> str:
    """The class of a phase outside of whole steps; what is left of a step was interrupted."""
    if phase == Phase.STEP:
        return LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


@dataclass
class _Sum:
    """What the time of several starts went to: nanoseconds by class; starts, and steps that were kept and lost."""

    spent: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    kept: int = 0
    lost: int = 0

    def copy(self) -> _Sum:
        """One that can be added to."""
        return _Sum(self.spent.copy(), self.starts, self.kept, self.lost)

    def add(self, start: Start, before: Start | None, after_death: bool, repeated_from: int | None) -> None:
        """Put every nanosecond of ``start`` into its class.

        Args:
            start: the start.
            before: the one before it, if any.
            after_death: whether it goes on with what a death ended.
            repeated_from: the step from which a later start went on, the earliest of them; None: there is none.
        """
        if before is not None and after_death:
            self.spent[DOWN] += max(0, start.began_ns - before.ended_ns)
        repeated = [span for span in start.spans if is_repeated(span.step, repeated_from)]
        repeated_ns = sum(span.phases.get(Phase.STEP, 0) for span in repeated)
        self.spent.update({LOST: repeated_ns, PRODUCTIVE: start.done_ns - repeated_ns})
        self.starts += 1
        self.lost += len(repeated)
        self.kept += start.done - len(repeated)
        for name, nanoseconds in start.spent.items():
            self.spent[class_of(name, after_death)] += nanoseconds
        unknown_ns = start.ended_ns - start.began_ns - start.done_ns - sum(start.spent.values())
        self.spent[LOST if start.done else class_of(Phase.STARTUP, after_death)] += max(0, unknown_ns)

    def goodput(self, notes: Sequence[str] = ()) -> Goodput:
        """The same for others."""
        return Goodput({name: self.spent[name] for name in CLASSES}, self.starts, self.kept, self.lost, tuple(notes))


def is_repeated(step: int | None, repeated_from: int | None) -> bool:
    """Whether a step was done again by a later start, the earliest of which went on from step ``repeated_from``."""
    return step is not None and repeated_from is not None and step > repeated_from


def _sum(starts: Sequence[Start], repeated_from: int | None = None) -> _Sum:
    """The sum of ``starts``, of which one that follows went on from step ``repeated_from``; None: none has done a step."""
    total = _Sum()
    for start, before, after_death, from_step in in_context(starts, repeated_from):
        total.add(start, before, after_death, from_step)
    return total


def in_context(
    starts: Sequence[Start], repeated_from: int | None = None
) -> list[tuple[Start, Start | None, bool, int | None]]:
    """Each start, last first, with what its classes depend on: the arguments of :meth:`_Sum.add`."""
    found = []
    for index in range(len(starts) - 1, -1, -1):
        start, before = starts[index], starts[index - 1] if index else None
        found.append((start, before, _left_off_dead(starts[:index]), repeated_from))
        if start.resumed_at is not None:
            repeated_from = start.resumed_at if repeated_from is None else min(repeated_from, start.resumed_at)
    return found


def of_starts(ranks: Mapping[int, Sequence[Start]], world_size: float = math.inf) -> dict[int, Goodput]:
    """The goodput of every rank below ``world_size``; what higher ranks of an earlier start left is not counted."""
    now_ns = time.time_ns()
    return {
        rank: _sum(starts).goodput(events.doubts(starts, now_ns)) for rank, starts in ranks.items() if rank < world_size
    }


def read(run: str | os.PathLike[str], world_size: float = math.inf) -> dict[int, Goodput]:
    """The goodput of every rank that left a file in the run's folder, by rank.

    Raises:
        DataError: as :func:`megacpp_mcore.observe.events.read`.
    """
    return of_starts(events.read(run), world_size)


def slowest(ranks: Mapping[int, Goodput]) -> int:
    """The rank with the least goodput: the others' steps hold the time in which they wait for it.

    One that has left no time is the slowest only where none has.
    """
    return min(ranks, key=lambda rank: (not ranks[rank].wall_ns, ranks[rank].share, rank))
