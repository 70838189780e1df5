"""Goodput: a run's wall time split into productive steps and what else it went to, across its restarts. No torch.

Every rank appends to one file of its own in the run's folder, as it goes; a restart appends to the same. Which steps a restart
had to repeat is known only then, so that the files hold phases, and the classes are made when they are read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import alive, kinds
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.files import Appender, LineReader, make_folder
from megacpp_mcore.observe.listener import Listener, Superseded
from megacpp_mcore.observe.steps import Step

PRODUCTIVE = "productive"
RECOVERY = "recovery"
LOST = "lost_steps"
DOWN = "down"
CLASSES = (PRODUCTIVE, *(phase.value for phase in Phase if phase is not Phase.STEP), RECOVERY, LOST, DOWN)
"""What a run's wall time goes to. ``productive``: steps that were kept. ``recovery``: the start-up of a start that follows a
death, by which a start was killed or an error ended what it had begun to train. ``lost_steps``: steps that a later start did
again, and what a death interrupted. ``down``: from a death to the next start. The others are phases
(:class:`~megacpp_mcore.observe.clock.Phase`)."""

logger = logging.getLogger(__name__)
FOLDER = "goodput"
FINISHED = "finished"
_NAME = re.compile(r"rank_(\d{5,9})\.jsonl")
_APART_NS = 60 * 1_000_000_000
"""By how much the clocks of two hosts may differ before it is said."""
_BACK_NS = 1_000_000_000
"""The same of a death and the start after it, mostly on one host; a process's age is known to 10 ms."""


def rank_file(run: str | os.PathLike[str], rank: int) -> Path:
    """The file of rank ``rank`` in the run's folder."""
    return Path(run) / FOLDER / f"rank_{rank:05d}.jsonl"


def files(run: str | os.PathLike[str], world_size: float = math.inf) -> dict[int, Path]:
    """The ranks' files in the run's folder, by rank.

    Args:
        run: the run's folder.
        world_size: processes of the last start; what higher ranks of an earlier one left is not looked at.

    Raises:
        DataError: one has a name without a rank, or is no regular file.
    """
    found: dict[int, Path] = {}
    for file in sorted((Path(run) / FOLDER).glob("rank_*.jsonl")):
        said = _NAME.fullmatch(file.name)
        if said is None or file.name != rank_file(run, int(said[1])).name:
            raise DataError(
                f"{file} names no rank; expected a name such as rank_00000.jsonl: move it out of the folder"
            )
        if int(said[1]) >= world_size:
            continue
        if not file.is_file():
            raise DataError(
                f"{file} is no regular file, or leads to none; expected what rank {int(said[1])} wrote: restore it"
            )
        found[int(said[1])] = file
    return found


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


# --- Writing ----------------------------------------------------------------------------------------------------------


class Recorder(Listener):
    """Appends to this rank's file, after every step, the nanoseconds by phase since the line before.

    While the process lives, the time is written to a file beside it every ``heartbeat_s``: that is how the next start knows
    when a killed one died. As long the file is its own (:class:`~megacpp_mcore.observe.alive.Claim`). Files that cannot be
    written to any more do not end training, and a damaged one does not prevent it: it is put aside.

    Args:
        run: the run's folder.
        rank: this process's rank.
        clock: the process's clock.
        heartbeat_s: seconds between two signs of life.

    Raises:
        DataError: the file cannot be appended to, or another process records there.
    """

    def __init__(self, run: str | os.PathLike[str], rank: int, clock: Clock, *, heartbeat_s: float = 1.0) -> None:
        self.path = rank_file(run, rank)
        make_folder(self.path.parent)
        self._claim = alive.Claim(self.path, heartbeat_s)
        with contextlib.ExitStack() as undone:
            undone.callback(self._claim.release)
            earlier, damage = _attempt(self.path)
            if self._claim.settle(earlier[-1].writer() if earlier else alive.Writer(ended=damage is None)):
                earlier, damage = _attempt(self.path)
            self._begin(clock, heartbeat_s, earlier, None if damage is None else _put_aside(self.path, damage))
            undone.callback(self._output.close)
            self._heart = alive.Heart(self._claim, heartbeat_s)
            undone.pop_all()

    def _begin(self, clock: Clock, heartbeat_s: float, earlier: list[_Start], damaged: str | None) -> None:
        self._before = earlier[-1] if earlier else None
        self._after_death = _left_off_dead(earlier)
        self._earlier = earlier
        self._settled = _Sum()
        self._clock = clock
        phases = clock.take()
        began_ns = time.time_ns() - clock.elapsed_ns()
        self._start = _Start(began_ns, began_ns, damaged=damaged)
        self._output = Appender(self.path)
        died: dict[str, Any] = {}
        if self._before is not None and self._before.how is None:
            died["died"] = self._before.ended_ns
        if damaged is not None:
            died["damaged"] = damaged
        self._write({"began": self._start.began_ns, **alive.identity(), "heartbeat_s": heartbeat_s, **died})
        self._note(phases)

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Nobody writes of a model where another process records.

        Raises:
            Superseded: as :meth:`on_step`.
        """
        self._refuse_lost()

    def on_step(self, step: Step) -> None:
        """Write the line of ``step``.

        Raises:
            Superseded: another process took this one for dead, and records there now.
        """
        self._refuse_lost()
        self._note(self._clock.take(), step)

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """Let go of what is another's."""
        if isinstance(error, Superseded):
            self.on_over()

    def on_end(self, error: BaseException | None) -> None:
        """Write the last line; the folder is this process's until the others have written theirs.

        Raises:
            Superseded: as :meth:`on_step`.
        """
        self._refuse_lost()
        self._note(self._clock.take(), how=FINISHED if error is None else type(error).__name__)

    def on_over(self) -> None:
        """Close the file, and let another process record there."""
        self._heart.stop()
        self._output.close()
        self._claim.release()

    def _refuse_lost(self) -> None:
        if not self._heart.owns():
            raise Superseded(
                f"{self.path}: another process records there, which took this one for dead while it stood still"
            )

    def so_far(self) -> Goodput:
        """What the wall time went to up to the last line, earlier starts included."""
        if self._earlier:
            self._settled = _sum(self._earlier, self._start.resumed_at)
            if self._start.resumed_at is not None:
                self._earlier = []  # what they lost is known for good
        total = self._settled.copy()
        total.add(self._start, self._before, self._after_death, None)
        return total.goodput()

    def _note(self, phases: Mapping[Phase, int], step: Step | None = None, how: str | None = None) -> None:
        line: dict[str, Any] = {
            "start": self._start.began_ns,
            "at": self._start.began_ns + self._clock.elapsed_ns(),
            "phases": phases,
        }
        if step is not None:
            line |= {"step": step.step, "resumed_at": step.resumed_at}
        if how is not None:
            line["how"] = how
        self._start.add(line)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._output.append(json.dumps(line))


# --- Reading ----------------------------------------------------------------------------------------------------------


_PHASES = frozenset(phase.value for phase in Phase)
_PHASE = kinds.plain(f"one of {', '.join(sorted(_PHASES))}", lambda value: value in _PHASES)
_BEGAN = kinds.record(
    {"began": kinds.NANOSECONDS},
    {
        "host": kinds.TEXT,
        "pid": kinds.COUNT,
        "heartbeat_s": kinds.AMOUNT,
        "kernel": kinds.TEXT,
        "born": kinds.COUNT,
        "died": kinds.NANOSECONDS,
        "damaged": kinds.TEXT,
    },
    more=True,
)
_LINE = kinds.record(
    {"at": kinds.NANOSECONDS, "phases": kinds.map_of(kinds.NANOSECONDS, _PHASE)},
    {"how": kinds.TEXT, "start": kinds.NANOSECONDS},
    more=True,
)
_OF_A_STEP = kinds.record({"step": kinds.SIZE, "resumed_at": kinds.COUNT}, more=True)


class _Check:
    """Checks the lines of a file one after another: each alone, and that the steps of a start ascend."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._begun: int | None = None

    def __call__(self, found: Any) -> dict[str, Any]:
        if isinstance(found, dict) and "began" in found:
            kinds.check(found, _BEGAN)
            self._step, self._begun = None, found["began"]
            return found
        kinds.check(found, _LINE)
        if self._begun is None:
            raise ValueError("no line with `began` is before it; expected one at the beginning of a start")
        if "step" in found:
            kinds.check(found, _OF_A_STEP)
        if "step" in found and found.get("start", self._begun) == self._begun:
            least = found["resumed_at"] if self._step is None else self._step
            if found["step"] <= least:
                raise ValueError(f"step is {found['step']} after {least} in one start; expected steps that ascend")
            self._step = found["step"]
        return dict(found)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a rank's file, each checked: what has ``began`` is the first of a start.

    What a process still wrote that another one had taken for dead, and gone on after, is left out.

    Raises:
        DataError: a line is not what a run writes, or the file cannot be read.
    """
    reader = LineReader[dict[str, Any]](file, _Check(), lambda line, _: "began" in line, "what a run writes there")
    start = None
    try:
        for line in reader.read_all():
            start = line.get("began", start)
            if line.get("start", start) == start:
                yield line
    except (OSError, RecursionError) as error:
        raise DataError(f"{file}: {error}; expected what a rank wrote") from error


def last_writer(file: Path) -> alive.Writer:
    """Who wrote to a rank's file last.

    Raises:
        DataError: a line is not what a run writes, or the file cannot be read.
    """
    starts = _read(file)
    return starts[-1].writer() if starts else alive.Writer()


@dataclass
class _Start:
    """One process of a rank.

    Attributes:
        began_ns, ended_ns: nanoseconds since the epoch.
        last_ns: the same of its last line.
        how: how it said that it ended; None while it has not.
        resumed_at: the step whose checkpoint it started from; None before its first step.
        began: its first line.
        damaged: where the file went that was there before it, which could not be read.
        phases: nanoseconds by phase, but for those of whole steps.
        done, done_ns: its whole steps, and the nanoseconds in them.
        steps: the same step by step, where that is kept.
    """

    began_ns: int
    ended_ns: int
    how: str | None = None
    resumed_at: int | None = None
    phases: Counter[str] = field(default_factory=Counter)
    done: int = 0
    done_ns: int = 0
    steps: list[tuple[int, int]] | None = None
    last_ns: int = 0
    began: Mapping[str, Any] = field(default_factory=dict)
    damaged: str | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line but the first."""
        phases = {str(name): int(spent) for name, spent in line["phases"].items()}
        if "step" in line:
            self.resumed_at = line["resumed_at"] if self.resumed_at is None else self.resumed_at
            in_step = phases.pop(Phase.STEP, 0)
            self.done += 1
            self.done_ns += in_step
            if self.steps is not None:
                self.steps.append((line["step"], in_step))
        self.phases.update(phases)
        self.ended_ns = self.last_ns = line["at"]
        self.how = line.get("how")

    def lost(self, repeated_from: int | None) -> tuple[int, int]:
        """How many of its steps a later start did again, going on from step ``repeated_from``, and their nanoseconds."""
        again = [spent for step, spent in self.steps or () if repeated_from is not None and step > repeated_from]
        return len(again), sum(again)

    @property
    def died(self) -> bool:
        """Whether a death ended it: it was killed, or an error ended what it had begun to train."""
        return self.how is None or (self.how != FINISHED and self.done > 0)

    def writer(self) -> alive.Writer:
        """It, as those see it who want to write after it."""
        known = {name: self.began.get(name) for name in ("host", "pid", "heartbeat_s", "kernel", "born")}
        return alive.Writer(ended=self.how is not None, **known)

    @property
    def unsaid_ns(self) -> int:
        """From its last line to its death."""
        return max(0, self.ended_ns - self.began_ns - self.done_ns - sum(self.phases.values()))


def _read(path: Path, *, heal: bool = False) -> list[_Start]:
    """The starts in the file at ``path``; the last ends with its last sign of life if it did not say how it ended.

    Args:
        path: the file.
        heal: do without a sign of life that is none, which this process is going to replace.

    Raises:
        DataError: something is damaged.
    """
    starts: list[_Start] = []
    if not path.is_file():
        return starts
    try:
        alive_ns = alive.last_alive_ns(path)
    except DataError as error:
        if not heal or isinstance(error.__cause__, OSError):
            raise
        logger.warning("%s", error)
        alive_ns = path.stat().st_mtime_ns

    for line in read_lines(path):
        if "began" not in line:
            starts[-1].add(line)
            continue
        if starts and "died" in line:
            starts[-1].ended_ns = line["died"]
        starts.append(_Start(line["began"], line["began"], steps=[], began=line, damaged=line.get("damaged")))
    if starts and starts[-1].how is None:
        starts[-1].ended_ns = max(starts[-1].ended_ns, alive_ns)
    return starts


def _attempt(path: Path) -> tuple[list[_Start], DataError | None]:
    """The starts in the file at ``path``, none where the file system does not give them; or what is damaged in it."""
    try:
        return _read(path, heal=True), None
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            return [], error
        logger.warning("%s; this start goes on there without a knowledge of those before it", error)
        return [], None


def _put_aside(path: Path, damage: DataError) -> str:
    """Give the damaged file at ``path``, and the sign of life beside it, another name, which is returned.

    Raises:
        DataError: the folder does not let it.
    """
    aside = next(name for number in itertools.count(1) if not (name := path.with_suffix(f".damaged-{number}")).exists())
    logger.warning("%s; it is put aside as %s, and this start begins a new one", damage, aside.name)
    try:
        path.rename(aside)
        with contextlib.suppress(FileNotFoundError):
            alive.alive_file(path).rename(aside.with_suffix(aside.suffix + ".alive"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a folder that can be written to") from error
    return aside.name


def _left_off_dead(starts: Sequence[_Start]) -> bool:
    """Whether what comes after ``starts`` goes on with what a death ended.

    A start that an error ended before its first step has nothing to go on with, and does not undo the death before it.
    """
    for start in reversed(starts):
        if start.how == FINISHED or start.died:
            return start.died
    return False


@dataclass
class _Sum:
    """What the time of several starts went to.

    Attributes:
        spent: nanoseconds by class.
        starts, kept, lost: starts, and steps that were kept and lost.
    """

    spent: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    kept: int = 0
    lost: int = 0

    def copy(self) -> _Sum:
        """One that can be added to."""
        return _Sum(self.spent.copy(), self.starts, self.kept, self.lost)

    def add(self, start: _Start, before: _Start | None, after_death: bool, repeated_from: int | None) -> None:
        """Put every nanosecond of ``start`` into its class.

        Args:
            start: the start.
            before: the one before it, if any.
            after_death: whether it goes on with what a death ended.
            repeated_from: the step from which a later start went on, the earliest of them; None: there is none.
        """
        if before is not None and after_death:
            self.spent[DOWN] += max(0, start.began_ns - before.ended_ns)
        again, again_ns = start.lost(repeated_from)
        self.spent.update({LOST: again_ns, PRODUCTIVE: start.done_ns - again_ns})
        self.starts += 1
        self.lost += again
        self.kept += start.done - again
        for name, nanoseconds in start.phases.items():
            self.spent[_class(name, after_death)] += nanoseconds
        self.spent[LOST if start.done else _class(Phase.STARTUP, after_death)] += start.unsaid_ns

    def goodput(self) -> Goodput:
        """The same for others."""
        return Goodput({name: self.spent[name] for name in CLASSES}, self.starts, self.kept, self.lost)


def _sum(starts: Sequence[_Start], repeated_from: int | None = None) -> _Sum:
    """The sum of ``starts``, of which one that follows went on from step ``repeated_from``; None: none has done a step."""
    total = _Sum()
    for index in range(len(starts) - 1, -1, -1):
        start = starts[index]
        total.add(start, starts[index - 1] if index else None, _left_off_dead(starts[:index]), repeated_from)
        if start.resumed_at is not None:
            repeated_from = start.resumed_at if repeated_from is None else min(repeated_from, start.resumed_at)
    return total


def _class(phase: str, after_death: bool) -> str:
    """The class of a phase outside of finished steps; what is left of a step was interrupted."""
    if phase == Phase.STEP:
        return LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


def _doubts(starts: Sequence[_Start], now_ns: int) -> Iterator[str]:
    """What clocks that were set, or differ between hosts, did to the times."""
    for number, start in enumerate(starts, start=1):
        before = starts[number - 2] if number > 1 else None
        if start.damaged is not None:
            yield f"what was there before start {number} could not be read, and is put aside as {start.damaged}"
        if before is not None and start.began_ns < before.ended_ns - _BACK_NS:
            apart = (before.ended_ns - start.began_ns) / 1e9
            yield (
                f"start {number} began {apart:.1f} s before start {number - 1} ended: a clock was set, or two differ, and the "
                "time between the two counts as 0 s"
            )
        if start.ended_ns < start.last_ns - _BACK_NS:
            apart = (start.last_ns - start.ended_ns) / 1e9
            yield f"start {number} died {apart:.1f} s before its last line: a clock was set while it ran"
        if start.ended_ns > now_ns + _APART_NS:
            apart = (start.ended_ns - now_ns) / 1e9
            yield f"start {number} ends {apart:.1f} s ahead of the clock of this machine: its times are doubtful"


def read(run: str | os.PathLike[str], world_size: float = math.inf) -> dict[int, Goodput]:
    """The goodput of every rank that left a file in the run's folder, by rank.

    Args:
        run: the run's folder.
        world_size: processes of the last start; what higher ranks of an earlier one left is not read.

    Raises:
        DataError: there is none, one is no regular file of a rank, or a line is not what a run writes.
    """
    found = files(run, world_size)
    if not found:
        raise DataError(f"{Path(run) / FOLDER} holds no rank_*.jsonl; expected the folder of a run that was observed")
    ranks, now_ns = {}, time.time_ns()
    for rank, file in found.items():
        starts = _read(file)
        ranks[rank] = replace(_sum(starts).goodput(), notes=tuple(_doubts(starts, now_ns)))
    return ranks


def slowest(ranks: Mapping[int, Goodput]) -> int:
    """The rank with the least goodput: the others' steps hold the time in which they wait for it.

    One that has left no time is the slowest only where none has.
    """
    return min(ranks, key=lambda rank: (not ranks[rank].wall_ns, ranks[rank].share, rank))
