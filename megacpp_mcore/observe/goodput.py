"""Goodput: a run's wall time split into productive steps and everything else, across its restarts. No torch.

Which steps a restart had to repeat is known only afterwards. So files hold phases, and the classes are derived on reading.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megacpp_mcore.observe import events
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.events import FINISHED, IN_ORDER, STOPPED, Listener, Log, Span, Start, Step
from megacpp_mcore.observe.steps import standing

PRODUCTIVE = "productive"
RECOVERY = "recovery"
LOST = "lost_steps"
DOWN = "down"
CLASSES = (PRODUCTIVE, *(phase.value for phase in Phase if phase is not Phase.STEP), RECOVERY, LOST, DOWN)
"""Classes of a run's wall time. ``productive``: steps that were kept. ``recovery``: the start-up of a start that follows a
death (a start that was killed, or that an error ended after training had begun). ``lost_steps``: steps that a later start
repeated, and the step that a death interrupted. ``down``: from a death to the next start. The others are phases
(:class:`~megacpp_mcore.observe.clock.Phase`)."""


@dataclass(frozen=True)
class Goodput:
    """One rank's wall time by class.

    Attributes:
        nanoseconds: of every class; they sum to ``wall_ns`` exactly.
        steps: distinct steps that were kept.
        steps_lost: steps that were repeated after a restart.
    """

    nanoseconds: Mapping[str, int]
    starts: int = 0
    steps: int = 0
    steps_lost: int = 0

    @property
    def wall_ns(self) -> int:
        """From the start of the first process to the end of the last, without pauses that do not follow a death."""
        return sum(self.nanoseconds.values())

    @property
    def share(self) -> float:
        """The productive part of the wall time; 0.0 before there is any."""
        return self.nanoseconds[PRODUCTIVE] / self.wall_ns if self.wall_ns else 0.0

    def record(self) -> dict[str, Any]:
        """Return a JSON-ready record, in seconds."""
        seconds = {name: self.nanoseconds[name] / 1e9 for name in CLASSES}
        counts = {name: getattr(self, name) for name in ("starts", "steps", "steps_lost")}
        return {"goodput": self.share, "wall_s": self.wall_ns / 1e9, "seconds": seconds, **counts}


class Recorder(Listener):
    """Writes the nanoseconds by phase to this process's log after every step, and how the process ended.

    The last rank, where Megatron has the losses, also writes those of every step.
    """

    def __init__(self, log: Log, *, with_losses: bool) -> None:
        self.log = log
        self._with_losses = with_losses
        self._spent: Counter[tuple[str, bool]] = Counter()
        """Nanoseconds of this start by phase, and whether they belong to a step that ended."""
        self._before: tuple[Goodput, bool] | None = None
        self._how = FINISHED
        self._note()

    def on_step(self, step: Step) -> None:
        """Write the line of ``step``."""
        self._note(**(vars(step) if self._with_losses else {"step": step.step, "resumed_at": step.resumed_at}))

    def on_stop(self, reason: str) -> None:
        """Write the reason."""
        self._how = STOPPED
        self._note(facts={"stopped": reason})

    def on_end(self, error: BaseException | None) -> None:
        """Write how the process ended."""
        self._note(how=self._how if error is None else type(error).__name__)

    def so_far(self, resumed_at: int) -> Goodput:
        """Return goodput up to the last line, earlier starts included, of a start that resumed at step ``resumed_at``.

        Raises:
            DataError: the file of an earlier start is damaged.
        """
        if self._before is None:
            starts = events.read(self.log.run, rank=self.log.rank, may_be_empty=True).get(self.log.rank, [])
            earlier = [start for start in starts if start.number < self.log.number]
            this = Start(self.log.number, self.log.rank, self.log.world_size, self.log.began_ns, resumed_at=resumed_at)
            self._before = of_rank([*earlier, this]), _resumes_after_death(earlier)
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
"""Order in which a line's phases are laid out, as the line has only their sums: what follows a step precedes the next."""


class Stretch(NamedTuple):
    """A stretch of wall time in one of :data:`CLASSES`, in nanoseconds since the epoch."""

    begin: int
    end: int
    kind: str


def timeline(starts: Sequence[Start]) -> Iterator[Stretch]:
    """Yield one rank's wall time in order, without gaps except for pauses between starts that do not follow a death."""
    for index, (start, kept_to) in enumerate(standing(starts)):
        after_death = _resumes_after_death(starts[:index])
        if after_death and start.began_ns > starts[index - 1].ended_ns:
            yield Stretch(starts[index - 1].ended_ns, start.began_ns, DOWN)
        at = start.began_ns
        for span in start.spans:
            is_kept = span.step is not None and span.step <= kept_to
            for phase in _ORDER:
                if spent := span.phases.get(phase, 0):
                    yield Stretch(at, at + spent, class_of(phase, is_kept=is_kept, after_death=after_death))
                    at += spent
        if start.ended_ns > at:  # killed, in an unknown phase
            rest = Phase.STEP if start.done else Phase.STARTUP
            yield Stretch(at, start.ended_ns, class_of(rest, is_kept=False, after_death=after_death))


def class_of(phase: str, *, is_kept: bool, after_death: bool) -> str:
    """Return the class of time in a phase.

    ``is_kept``: it belongs to a step that ended and that no later start repeated; ``after_death``: the start continues what a
    death interrupted.
    """
    if phase == Phase.STEP:
        return PRODUCTIVE if is_kept else LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


def _resumes_after_death(starts: Sequence[Start]) -> bool:
    """Return whether the start after ``starts`` continues what a death interrupted: a kill, or an error once it had trained.

    A start that an error ended before its first step is skipped: it does not undo the death before it.
    """
    return next(
        (start.how not in IN_ORDER for start in reversed(starts) if start.how in (*IN_ORDER, None) or start.done), False
    )


def of_rank(starts: Sequence[Start]) -> Goodput:
    """Return the goodput of one rank's ``starts``."""
    condensed, kept, lost = [], 0, 0
    for start, kept_to in standing(starts):
        spans = {is_kept: Span(0, {}, None) for is_kept in (True, False)}  # the sums of all
        for at, phases, step in start.spans:
            is_kept = step is not None and step <= kept_to
            sums = spans[is_kept].phases
            for phase, ns in phases.items():
                sums[phase] = sums.get(phase, 0) + ns
            if step is not None:
                spans[is_kept] = Span(at, sums, step)
                kept, lost = kept + is_kept, lost + (not is_kept)
        condensed.append(dataclasses.replace(start, spans=list(spans.values())))
    spent: Counter[str] = Counter()
    for stretch in timeline(condensed):
        spent[stretch.kind] += stretch.end - stretch.begin
    return Goodput({name: spent[name] for name in CLASSES}, len(starts), kept, lost)


def slowest_first(ranks: Mapping[int, Goodput]) -> list[int]:
    """Return the ranks by goodput, lowest first: the other ranks' steps include the time in which they wait for it.

    Ranks that recorded no time are last.
    """
    return sorted(ranks, key=lambda rank: (not ranks[rank].wall_ns, ranks[rank].share, rank))
