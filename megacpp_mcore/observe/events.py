"""What happens in a run: who hears of it, and the file of JSON lines that every rank of every start writes. No torch.

``RUN/start_2/rank_00000.jsonl`` is what rank 0 wrote in its second start. A file is created by one process, which nobody else
ever opens for writing: so there is nothing to lock, to mend or to wait for, and a killed process leaves at most its last line
torn. Every line but the first has ``at``, nanoseconds since the epoch; one with nothing else is a heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.util import files
from megacpp_mcore.util import schema as kinds

logger = logging.getLogger(__name__)

FINISHED = "finished"
"""``how`` of a process whose training came to its end; else it is the name of the error that ended it."""
OVERLAP_NS = 1_000_000_000
"""By how much two starts of a rank may overlap before it is reported: the clocks of two hosts differ by some milliseconds."""
_AHEAD_NS = 60 * 1_000_000_000
"""By how much a start may be ahead of the reader's clock before it is reported."""
_FILE = re.compile(r"rank_(\d{5,9})\.jsonl")
_FOLDER = re.compile(r"start_([1-9]\d{0,8})")


@dataclass(frozen=True)
class Step:
    """One training step as it was recorded.

    Attributes:
        step: 1-based number.
        resumed_at: the step whose checkpoint the process started from, 0 for a fresh start.
        time_s: seconds since the epoch when the step was logged.
        tokens: tokens trained on since step 0, over all processes.
        losses: Megatron's losses of this step alone (``lm loss``, ``mtp_1 loss``, …). Sums over micro-batches are
            fp32 in Megatron, and every fp32 value is exact here.
        grad_norm: norm of the gradient before clipping, None where Megatron computes none.
        learning_rate: None where this rank has no trainable parameter.
        skipped: whether the optimizer skipped the step.
    """

    step: int
    resumed_at: int
    time_s: float
    tokens: int
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rate: float | None
    skipped: bool

    def values(self) -> dict[str, float]:
        """All that training reached, by name: the losses, ``grad norm`` and ``learning rate``, where there is one."""
        values = {**self.losses, "grad norm": self.grad_norm, "learning rate": self.learning_rate}
        return {name: value for name, value in values.items() if value is not None}


class Listener:
    """Hears of a run on every rank. Each method does nothing until it is overridden.

    A listener must not synchronise with the GPU outside of :meth:`on_step`, and there only where it says so: what it costs is
    part of the step. It must never wait for other ranks: one that raises an error hears of nothing more but the end, on its
    rank alone, and training goes on. What it has Megatron call besides, as a hook, must raise none.
    """

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """The model's chunks and its optimizer are there, a checkpoint loaded."""

    def on_step_begin(self, number: int) -> None:
        """Step ``number`` (1-based) begins."""

    def on_step(self, step: Step) -> None:
        """``step`` has ended and was logged; its losses are only known on the last pipeline stage."""

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """``failed``, perhaps this one, has raised ``error`` in step ``step``, before the first (0), or at the end."""

    def on_end(self, error: BaseException | None) -> None:
        """Training has ended, or ``error`` ended it."""


# --- Writing ----------------------------------------------------------------------------------------------------------


class Appender:
    """Appends lines to an open file, each in one write to the operating system.

    A write that fails, as on a full disk, ends what is recorded there with a warning, and not the run.
    """

    def __init__(self, path: Path, output: int) -> None:
        self.path = path
        self._output: int | None = output

    def append(self, line: str) -> None:
        """Write ``line``, and what ends one; nothing once a write has failed."""
        if self._output is None:
            return
        content = (line + "\n").encode()
        try:
            written = os.write(self._output, content)
            why = f"{written} of {len(content)} bytes were written" if written < len(content) else ""
        except OSError as error:
            why = error.strerror or repr(error)
        if why:
            logger.warning("%s: %s; this process records nothing more there, and training goes on", self.path, why)
            self.close()

    def close(self) -> None:
        """Close the file, if it is open."""
        output, self._output = self._output, None
        if output is not None:
            try:
                os.close(output)
            except OSError as error:  # a network file system says only now that it could not write
                logger.warning("%s: %s; what was recorded last may be missing there", self.path, error.strerror)


class Log:
    """This process's file of the run in folder ``run``, which it creates, and its heartbeat.

    Args:
        run: the run's folder, made where it is missing.
        rank, world_size: of this process.
        clock: the process's clock.
        heartbeat_s: seconds without another line after which a thread writes one with the time, for readers to know when a
            killed process died.

    Raises:
        DataError: no file can be created there.
    """

    def __init__(
        self, run: str | os.PathLike[str], rank: int, world_size: int, clock: Clock, *, heartbeat_s: float = 1.0
    ) -> None:
        self.run, self.rank, self.world_size, self.heartbeat_s = Path(run), rank, world_size, heartbeat_s
        self.clock = clock
        self.began_ns = time.time_ns() - clock.age_ns()
        self.path, output = _create(self.run, rank)
        self._file = Appender(self.path, output)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._written_at = time.monotonic()
        self._append(
            {
                "began": self.began_ns,
                "rank": rank,
                "world_size": world_size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "heartbeat_s": heartbeat_s,
            }
        )
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: there is a sign of life at every step all the same
            self._thread.start()

    def write(self, at: int | None = None, **fields: Any) -> dict[str, Any]:
        """Write a line of ``fields``, at a time since the epoch or now, and return it."""
        line = {"at": self.began_ns + self.clock.age_ns() if at is None else at, **fields}
        self._append(line)
        return line

    def close(self) -> None:
        """Close the file; a file system that does not answer the thread is not waited for."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line)
        with self._lock:
            self._written_at = time.monotonic()
            self._file.append(text)

    def _beat(self) -> None:
        wait_s = self.heartbeat_s
        while not self._ended.wait(wait_s):
            wait_s = self._written_at + self.heartbeat_s - time.monotonic()
            if wait_s <= 0:
                self.write()
                wait_s = self.heartbeat_s


def _create(run: Path, rank: int) -> tuple[Path, int]:
    """A new file for ``rank``, after those that it has in ``run``: path and descriptor."""
    number = 1 + max((number for number, one, _ in rank_files(run) if one == rank), default=0)
    while True:
        path = run / f"start_{number}" / f"rank_{rank:05d}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # another process was faster, which is reported to whoever reads
            number += 1
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a folder that can be written to") from error


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, meets the whole old file or the whole new one.

    Where ``path`` is a link, that is the file it leads to.

    Raises:
        DataError: the folder cannot be written to, or there is something else than a file.
    """
    if path.name in ("", ".."):
        raise DataError(f"{str(path)!r} names no file; expected the path of one that can be written")
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no regular file; expected one, or a name that is free")
        files.replace(path, text.encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: {why}; expected a file that can be written") from error


# --- Reading ----------------------------------------------------------------------------------------------------------


class Tail:
    """Reads a file of JSON lines as it grows; a last line that is not complete is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._number = 0

    def read_new(self) -> Iterator[Any]:
        """What the lines that were completed since the last call say; none while there is no file.

        Raises:
            DataError: one is no JSON.
        """
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; expected a file of JSON lines") from error
        for text in content.split(b"\n")[:-1]:
            self._offset += len(text) + 1
            self._number += 1
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise self.damaged(error) from error
            yield found

    def damaged(self, why: Exception) -> DataError:
        """What is wrong with the line that was read last."""
        return DataError(f"{self.path}, line {self._number}: {why}; restore the file, or delete it")


class Span(NamedTuple):
    """One line about time: nanoseconds by phase since the one before it, and the step that they are of, if any."""

    at: int
    phases: Mapping[str, int]
    step: int | None


_PHASES = frozenset(phase.value for phase in Phase)
_PHASE = kinds.plain(f"one of {', '.join(sorted(_PHASES))}", lambda value: value in _PHASES)
_FIRST = kinds.record(
    {"began": kinds.NANOSECONDS, "rank": kinds.COUNT, "world_size": kinds.SIZE, "heartbeat_s": kinds.AMOUNT},
    {"host": kinds.TEXT, "pid": kinds.COUNT},
    more=True,
)
STEP = {
    "step": kinds.SIZE,
    "resumed_at": kinds.COUNT,
    "time_s": kinds.AMOUNT,
    "tokens": kinds.COUNT,
    "losses": kinds.map_of(kinds.RESULT),
    "grad_norm": kinds.nullable(kinds.RESULT),
    "learning_rate": kinds.nullable(kinds.AMOUNT),
    "skipped": kinds.FLAG,
}
"""The fields of a recorded step, by name."""
_LINE = kinds.record(
    {"at": kinds.NANOSECONDS},
    {"phases": kinds.map_of(kinds.NANOSECONDS, _PHASE), "how": kinds.TEXT, "facts": kinds.MAP, "metrics": kinds.MAP,
     "first_step": kinds.MAP, **{name: STEP[name] for name in ("step", "resumed_at", "losses")}},
    more=True,
)  # fmt: skip
_OF_A_STEP = kinds.record({name: STEP[name] for name in ("step", "resumed_at")} | {"phases": kinds.MAP}, more=True)
_WITH_LOSSES = kinds.record(STEP, more=True)
_STEP_NAMES = tuple(each.name for each in dataclasses.fields(Step))


@dataclass
class Start:
    """What one process of a rank wrote.

    Attributes:
        path: its file.
        number: of the start, as the file's folder has it; ``rank`` and ``world_size`` of the process.
        began_ns, ended_ns: nanoseconds since the epoch; the end is the last line's time.
        heartbeat_s: seconds between two signs of life.
        how: how it ended, by itself; None while it has not, or was killed.
        resumed_at: the step whose checkpoint it started from; None before its first step.
        spent: nanoseconds by phase, but for :attr:`Phase.STEP` of whole steps.
        done, done_ns: its whole steps, and the nanoseconds of :attr:`Phase.STEP` in them.
        last_step: the number of the last of them.
        spans: every line about time, in order.
        steps: its steps with their losses, which the last rank writes.
        metrics: what was shown of its logged steps.
        facts: what it knows of the run, the last value of every key.
        first_step: sums of step 1; None where it did not do it.
    """

    path: Path
    number: int
    rank: int
    world_size: int
    began_ns: int
    heartbeat_s: float = 1.0
    ended_ns: int = 0
    how: str | None = None
    resumed_at: int | None = None
    spent: Counter[str] = field(default_factory=Counter)
    done: int = 0
    done_ns: int = 0
    last_step: int | None = None
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    first_step: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.ended_ns = max(self.ended_ns, self.began_ns)

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"start_{self.number}"

    def check(self, line: Any) -> None:
        """Check a line that was read.

        Raises:
            ValueError: it is none, or its step does not come after the one before it; with the field and its value.
        """
        kinds.check(line, _LINE)
        if "step" in line:
            kinds.check(line, _OF_A_STEP)
            before = line["resumed_at"] if self.last_step is None else self.last_step
            if line["step"] <= before:
                raise ValueError(f"step is {line['step']} after {before} in one start; expected steps that ascend")
        if "losses" in line:
            kinds.check(line, _WITH_LOSSES)

    def add(self, line: Mapping[str, Any], *, keep: bool = True) -> None:
        """Take in a line but the first; of its time, only the sums unless it is to be kept."""
        if "phases" in line:
            self._add_time(line, keep)
        if "losses" in line:
            self.steps += [Step(**{name: line[name] for name in _STEP_NAMES})] * keep
        if "metrics" in line:
            self.metrics.append(line["metrics"])
        self.facts |= line.get("facts", {})
        self.first_step = line.get("first_step", self.first_step)
        if self.how is None:  # what is written after it is of no time of the run
            self.how = line.get("how")
            self.ended_ns = line["at"] if self.how is not None else max(self.ended_ns, line["at"])

    def _add_time(self, line: Mapping[str, Any], keep: bool) -> None:
        phases, step = dict(line["phases"]), line.get("step")
        if keep:
            self.spans.append(Span(line["at"], line["phases"], step))
        if step is not None:
            self.resumed_at = line["resumed_at"] if self.resumed_at is None else self.resumed_at
            self.done, self.last_step = self.done + 1, step
            self.done_ns += phases.pop(Phase.STEP, 0)
        self.spent.update(phases)


def read(run: str | os.PathLike[str], damaged: list[tuple[int, DataError]] | None = None) -> dict[int, list[Start]]:
    """The starts of every rank that left a file in the run's folder, by rank and in their order.

    Args:
        run: the run's folder.
        damaged: takes the rank and the damage of every file that cannot be read, which is then left out; None: it is raised.

    Raises:
        DataError: there is none, one is no regular file or has a name without a rank, or a line is not what a run writes.
    """
    written = rank_files(Path(run))
    if not written:
        older = (Path(run) / "goodput").is_dir()
        hint = ": an older version recorded it, whose receipt.json can be named" if older else ""
        raise DataError(f"{run} holds no start_*/rank_*.jsonl; expected the folder of a run that was observed{hint}")
    found: dict[int, list[Start]] = {}
    for number, rank, path in written:
        try:
            found.setdefault(rank, []).extend(read_file(path, number, rank))
        except DataError as error:
            if damaged is None:
                raise
            damaged.append((rank, error))
    return {rank: starts for rank, starts in sorted(found.items()) if starts}


def read_file(path: Path, number: int, rank: int) -> list[Start]:
    """The start in one file; none where not even its first line is complete.

    Raises:
        DataError: a line is not what a run writes.
    """
    tail = Tail(path)
    starts: list[Start] = []
    for line in tail.read_new():
        try:
            if starts:
                starts[0].check(line)
                starts[0].add(line)
                continue
            kinds.check(line, _FIRST)
            if line["rank"] != rank:
                raise ValueError(f"rank is {line['rank']}; expected the one in the name of the file")
            starts = [Start(path, number, rank, line["world_size"], line["began"], line["heartbeat_s"])]
        except (ValueError, RecursionError) as error:
            raise tail.damaged(error) from error
    return starts


def rank_files(run: Path) -> list[tuple[int, int, Path]]:
    """Number of the start, rank, and path of every file in the run's folder, in the order of the starts.

    Raises:
        DataError: as :func:`read`.
    """
    found = []
    for file in run.glob("start_*/rank_*.jsonl"):
        folder, name = _FOLDER.fullmatch(file.parent.name), _FILE.fullmatch(file.name)
        if folder is None or name is None or file.name != f"rank_{int(name[1]):05d}.jsonl":
            raise DataError(
                f"{file} names no start and rank; expected a name such as start_1/rank_00000.jsonl: move it out of the folder"
            )
        if not file.is_file():
            raise DataError(
                f"{file} is no regular file, or leads to none; expected what rank {int(name[1])} wrote: restore it"
            )
        found.append((int(folder[1]), int(name[1]), file))
    return sorted(found)


def grouped(ranks: Mapping[int, Sequence[Start]]) -> list[list[Start]]:
    """The starts of the run, each as its processes by rank: those of one world size that were there at the same time."""
    groups: list[list[Start]] = []
    for start in sorted((one for starts in ranks.values() for one in starts), key=lambda one: one.began_ns):
        for group in reversed(groups):
            there = start.world_size == group[0].world_size and start.began_ns <= max(one.ended_ns for one in group)
            if there and start.rank not in {one.rank for one in group}:
                group.append(start)
                break
        else:
            groups.append([start])
    return [sorted(group, key=lambda one: one.rank) for group in groups]


def overlaps(starts: Sequence[Start]) -> list[Start]:
    """Those of a rank's starts that were recorded while another one was, in their order."""
    together: dict[int, Start] = {}
    last: Start | None = None  # of those before, the one that ended last
    for start in sorted(starts, key=lambda one: one.began_ns):
        if last is not None and start.began_ns < last.ended_ns - OVERLAP_NS:
            together |= {last.number: last, start.number: start}
        last = start if last is None or start.ended_ns > last.ended_ns else last
    return [start for _, start in sorted(together.items())]


def doubts(starts: Sequence[Start], now_ns: int) -> list[str]:
    """What is doubtful about the times of a rank's starts, a sentence each."""
    found = []
    if both := overlaps(starts):
        names = ", ".join(start.name for start in both)
        found.append(f"{names} overlap: two trainings record in this folder, or their clocks differ or were set")
    for start in starts:
        if start.ended_ns > now_ns + _AHEAD_NS:
            apart = (start.ended_ns - now_ns) / 1e9
            found.append(f"{start.name} ends {apart:.1f} s ahead of the clock of this machine: its times are doubtful")
    return found
