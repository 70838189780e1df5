"""Goodput: a run's wall time split into productive steps and what else it went to, across its restarts. No torch.

Every rank appends to one file of its own in the run's folder, as it goes; a restart appends to the same. Which steps a restart
had to repeat is known only then, so that the files hold phases, and the classes are made when they are read.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.files import open_for_appending
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.steps import Step

PRODUCTIVE = "productive"
RECOVERY = "recovery"
LOST = "lost_steps"
DOWN = "down"
CLASSES = (PRODUCTIVE, *(phase.value for phase in Phase if phase is not Phase.STEP), RECOVERY, LOST, DOWN)
"""What a run's wall time goes to. ``productive``: steps that were kept. ``recovery``: the start-up of a start that follows a
death. ``lost_steps``: steps that a later start did again, and what a death interrupted. ``down``: from a death to the next
start. The others are phases (:class:`~megacpp_mcore.observe.clock.Phase`)."""

FOLDER = "goodput"
FINISHED = "finished"


def rank_file(run: str | os.PathLike[str], rank: int) -> Path:
    """The file of rank ``rank`` in the run's folder."""
    return Path(run) / FOLDER / f"rank_{rank:05d}.jsonl"


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
    starts: int
    steps: int
    steps_lost: int

    @property
    def wall_ns(self) -> int:
        """From the start of the first process to the end of the last, without pauses between finished starts."""
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


# --- Writing ----------------------------------------------------------------------------------------------------------


class Recorder(Listener):
    """Appends to this rank's file, after every step, the nanoseconds by phase since the line before.

    While the process lives, the file's modification time is set every ``heartbeat_s``: that is how the next start knows when
    a killed one died.

    Args:
        run: the run's folder.
        rank: this process's rank.
        clock: the process's clock.
        heartbeat_s: seconds between two signs of life.

    Raises:
        DataError: the file cannot be appended to, or does not hold what this module writes.
    """

    def __init__(self, run: str | os.PathLike[str], rank: int, clock: Clock, *, heartbeat_s: float = 1.0) -> None:
        self.path = rank_file(run, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._earlier = _read(self.path)
        self._clock = clock
        phases = clock.take()
        began_ns = time.time_ns() - clock.elapsed_ns()
        self._start = _Start(began_ns, began_ns)
        self._output = open_for_appending(self.path)
        died = {"died": self._earlier[-1].ended_ns} if self._earlier and self._earlier[-1].how is None else {}
        self._write({"began": self._start.began_ns, "host": socket.gethostname(), "pid": os.getpid(), **died})
        self._note(phases)
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(heartbeat_s,), name="goodput heartbeat", daemon=True).start()

    def on_step(self, step: Step) -> None:
        """Write the line of ``step``."""
        self._note(self._clock.take(), step)

    def on_end(self, error: BaseException | None) -> None:
        """Write the last line and close the file."""
        self._over.set()
        self._note(self._clock.take(), how=FINISHED if error is None else type(error).__name__)
        os.close(self._output)

    def so_far(self) -> Goodput:
        """What the wall time went to up to the last line, earlier starts included."""
        return _classified([*self._earlier, self._start])

    def _note(self, phases: Mapping[Phase, int], step: Step | None = None, how: str | None = None) -> None:
        line: dict[str, Any] = {"at": self._start.began_ns + self._clock.elapsed_ns(), "phases": phases}
        if step is not None:
            line |= {"step": step.step, "resumed_at": step.resumed_at}
        if how is not None:
            line["how"] = how
        self._start.add(line)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._output, (json.dumps(line) + "\n").encode())

    def _beat(self, seconds: float) -> None:
        while not self._over.wait(seconds):
            os.utime(self.path)


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass
class _Start:
    """One process of a rank.

    Attributes:
        began_ns, ended_ns: seconds since the epoch, in nanoseconds.
        how: how it said that it ended; None while it has not.
        resumed_at: the step whose checkpoint it started from; None before its first step.
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
        self.ended_ns = line["at"]
        self.how = line.get("how")

    def lost(self, repeated_from: int | None) -> tuple[int, int]:
        """How many of its steps a later start did again, going on from step ``repeated_from``, and their nanoseconds."""
        again = [spent for step, spent in self.steps or () if repeated_from is not None and step > repeated_from]
        return len(again), sum(again)

    @property
    def unsaid_ns(self) -> int:
        """From its last line to its death."""
        return max(0, self.ended_ns - self.began_ns - self.done_ns - sum(self.phases.values()))


def _read(path: Path) -> list[_Start]:
    """The starts in the file at ``path``; the last ends with the file's modification time if it did not say how it ended."""
    starts: list[_Start] = []
    if not path.is_file():
        return starts
    alive_ns = path.stat().st_mtime_ns
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if "began" in line:
                if starts and "died" in line:
                    starts[-1].ended_ns = line["died"]
                starts.append(_Start(line["began"], line["began"], steps=[]))
            else:
                starts[-1].add(line)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(
                f"{path}, line {number}: not what a run writes there ({error!r}); delete the folder, or restore it"
            ) from error
    if starts and starts[-1].how is None:
        starts[-1].ended_ns = max(starts[-1].ended_ns, alive_ns)
    return starts


def _classified(starts: Sequence[_Start]) -> Goodput:
    """Put every nanosecond of ``starts`` into its class."""
    spent: Counter[str] = Counter()
    kept = lost = 0
    for index, start in enumerate(starts):
        after_death = index > 0 and starts[index - 1].how != FINISHED
        if after_death:
            spent[DOWN] += max(0, start.began_ns - starts[index - 1].ended_ns)
        again, again_ns = start.lost(
            min((one.resumed_at for one in starts[index + 1 :] if one.resumed_at is not None), default=None)
        )
        spent.update({LOST: again_ns, PRODUCTIVE: start.done_ns - again_ns})
        lost += again
        kept += start.done - again
        for name, nanoseconds in start.phases.items():
            spent[_class(name, after_death)] += nanoseconds
        spent[LOST if start.done else _class(Phase.STARTUP, after_death)] += start.unsaid_ns
    return Goodput({name: spent[name] for name in CLASSES}, len(starts), kept, lost)


def _class(phase: str, after_death: bool) -> str:
    """The class of a phase outside of finished steps; what is left of a step was interrupted."""
    if phase == Phase.STEP:
        return LOST
    return RECOVERY if phase == Phase.STARTUP and after_death else phase


def read(run: str | os.PathLike[str]) -> dict[int, Goodput]:
    """The goodput of every rank that left a file in the run's folder, by rank.

    Raises:
        DataError: there is none, or a line is not what a run writes.
    """
    files = sorted((Path(run) / FOLDER).glob("rank_*.jsonl"))
    if not files:
        raise DataError(f"{Path(run) / FOLDER} holds no rank_*.jsonl; expected the folder of a run that was observed")
    return {int(file.stem.removeprefix("rank_")): _classified(_read(file)) for file in files}


def slowest(ranks: Mapping[int, Goodput]) -> int:
    """The rank with the least goodput: the others' steps hold the time in which they wait for it."""
    return min(ranks, key=lambda rank: (ranks[rank].share, rank))
