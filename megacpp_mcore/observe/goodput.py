"""Goodput: a run's wall time split into productive steps and what else it went to, across its restarts. No torch.

Which steps a restart had to repeat is known only then, so that files hold phases, and the classes are made when they are read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megacpp_mcore.observe import events
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.events import FINISHED, Listener, Log, Start, Step
from megacpp_mcore.observe.steps import standing

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
    """

    nanoseconds: Mapping[str, int]
    starts: int = 0
    steps: int = 0
    steps_lost: int = 0

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
        }


class Recorder(Listener):
    """Writes to this process's log, after every step, the nanoseconds by phase since the line before, and how it ended.

    The last rank, on which Megatron has the losses, writes those of every step, too.
    """

    def __init__(self, log: Log, *, with_losses: bool) -> None:
        self.log = log
        self._with_losses = with_losses
        self._spent: Counter[tuple[str, bool]] = Counter()
        """Nanoseconds of this start by phase, and whether they are of a step that ended."""
        self._before: tuple[Goodput, bool] | None = None
        self._note()

    def on_step(self, step: Step) -> None:
        """Write the line of ``step``."""
        self._note(**(vars(step) if self._with_losses else {"step": step.step, "resumed_at": step.resumed_at}))

    def on_end(self, error: BaseException | None) -> None:
        """Write how it ended."""
        self._note(how=FINISHED if error is None else type(error).__name__)

    def so_far(self, resumed_at: int) -> Goodput:
        """What the wall time went to up to the last line, earlier starts included, of a start that went on from a step.

        Raises:
            DataError: the file of an earlier start is damaged.
        """
        if self._before is None:
            starts = events.read_any(self.log.run, self.log.rank).get(self.log.rank, [])
            earlier = [start for start in starts if start.number < self.log.number]
            this = Start(self.log.number, self.log.rank, self.log.world_size, self.log.began_ns, resumed_at=resumed_at)
            self._before = of_rank([*earlier, this]), _goes_on(earlier)
        before, after_death = self._before
        spent = Counter(before.nanoseconds)
        for (phase, of_a_step), nanoseconds in self._spent.items():
            spent[class_of(phase, is_kept=of_a_step, after_death=after_death)] += nanoseconds
        return Goodput(spent, before.starts, before.steps, before.steps_lost)

    def _note(self, **fields: Any) -> None:
        phases = self.log.clock.take()
        self.log.write(self.log.began_ns + self.log.clock.elapsed_ns(), phases=phases, **fields)
        self._spent.update({(phase, "step" in fields): spent for phase, spent in phases.items()})


# --- Reading ----------------------------------------------------------------------------------------------------------

_ORDER = (
    Phase.STARTUP, Phase.LOAD, Phase.IDLE, Phase.EVALUATION, Phase.SAVE, Phase.PROFILE, Phase.COMPILE, Phase.JIT, Phase.DATA,
    Phase.STEP,
)  # fmt: skip
"""The order of the phases of one line, which has only their sums: what follows a step comes before the next one."""


class Stretch(NamedTuple):
    """A stretch of wall time in one of :data:`CLASSES`, in nanoseconds since the epoch."""

    begin: int
    end: int
    kind: str


def timeline(starts: Sequence[Start]) -> Iterator[Stretch]:
    """One rank's wall time in order, without gaps but for pauses between starts that follow no death."""
    for index, (start, kept_to) in enumerate(standing(starts)):
        after_death = _goes_on(starts[:index])
        if after_death and start.began_ns > starts[index - 1].ended_ns:
            yield Stretch(starts[index - 1].ended_ns, start.began_ns, DOWN)
        at = start.began_ns
        for span in start.spans:
            is_kept = span.step is not None and span.step <= kept_to
            for phase in _ORDER:
                if spent := span.phases.get(phase, 0):
                    yield Stretch(at, at + spent, class_of(phase, is_kept=is_kept, after_death=after_death))
                    at += spent
        if start.ended_ns > at:  # it was killed, and nobody knows in which phase
            rest = Phase.STEP if start.done else Phase.STARTUP
            yield Stretch(at, start.ended_ns, class_of(rest, is_kept=False, after_death=after_death))


def class_of(phase: str, *, is_kept: bool, after_death: bool) -> str:
    """The class of time in a phase.

    Args:
        phase: the phase.
        is_kept: whether it is of a step that ended and that no later start did again.
        after_death: whether the start goes on with what a death ended.
    """
    if phase == Phase.STEP:
        return PRODUCTIVE if is_kept else LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


def _goes_on(starts: Sequence[Start]) -> bool:
    """Whether what comes after ``starts`` goes on with what a death ended, by a signal or, once it trained, an error.

    A start that an error ended before its first step has nothing to go on with, and does not undo the death before it.
    """
    return next((one.how != FINISHED for one in reversed(starts) if one.how in (FINISHED, None) or one.done), False)


def of_rank(starts: Sequence[Start]) -> Goodput:
    """The goodput of one rank's ``starts``."""
    spent: Counter[str] = Counter()
    for stretch in timeline(starts):
        spent[stretch.kind] += stretch.end - stretch.begin
    are_kept = [step <= kept_to for start, kept_to in standing(starts) for step in start.done]
    kept = sum(are_kept)
    return Goodput({name: spent[name] for name in CLASSES}, len(starts), kept, len(are_kept) - kept)


def of_starts(ranks: Mapping[int, Sequence[Start]]) -> dict[int, Goodput]:
    """The goodput of every rank."""
    return {rank: of_rank(starts) for rank, starts in ranks.items()}


def read(run: str | os.PathLike[str]) -> dict[int, Goodput]:
    """The goodput of every rank that left a file in the run's folder, by rank.

    Raises:
        DataError: as :func:`megacpp_mcore.observe.events.read`.
    """
    return of_starts(events.read(run))


def slowest_first(ranks: Mapping[int, Goodput]) -> list[int]:
    """The ranks by goodput, the least first: the others' steps hold the time in which they wait for it.

    Those that have left no time are last.
    """
    return sorted(ranks, key=lambda rank: (not ranks[rank].wall_ns, ranks[rank].share, rank))
