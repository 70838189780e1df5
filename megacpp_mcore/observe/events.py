"""What happens in a run: who hears of it, and the file of JSON lines that every rank of every start writes. No torch.

``RUN/start_2/rank_00000.jsonl`` is what rank 0 wrote in its second start. A file is created by one process, which nobody else
ever opens for writing: so there is nothing to lock, to mend or to wait for, and a killed process leaves at most its last line
torn. Every line but the first has ``at``, nanoseconds since the epoch; one with nothing else is a heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.util import files
from megacpp_mcore.util import schema as kinds

logger = logging.getLogger(__name__)

FINISHED = "finished"
"""``how`` of a process whose training came to its end; else it is the name of the error that ended it."""
OVERLAP_NS = 1_000_000_000
"""By how much two starts of a rank may overlap before it is reported: the clocks of two hosts differ by some milliseconds."""
_FILE = re.compile(r"start_([1-9]\d*)/rank_(\d{5,})\.jsonl")


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

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Step:
        """The step in a line, whatever else is in it.

        Raises:
            ValueError: a field is missing, or not what it has to be.
        """
        found = kinds.check(record, _STEP)
        return cls(**{each.name: found[each.name] for each in dataclasses.fields(cls)})

    def values(self) -> dict[str, float]:
        """All that training reached, by name: the losses, ``grad norm`` and ``learning rate``, where there is one."""
        values = {**self.losses, "grad norm": self.grad_norm, "learning rate": self.learning_rate}
        return {name: value for name, value in values.items() if value is not None}


_STEP = kinds.record({name: kinds.of(hint) for name, hint in get_type_hints(Step).items()}, more=True)


class Listener:
    """Hears of a run on every rank. Each method does nothing until it is overridden.

    A listener must not synchronise with the GPU outside of :meth:`on_step`, and there only where it says so: what it costs is
    part of the step. It must never wait for other ranks: one that raises an error hears of nothing more but the end, on its
    rank alone, and training goes on. What it has Megatron call besides, as a hook, is wrapped in :class:`HookErrors`.
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


class HookErrors:
    """Keeps the first error of a listener's hooks, which must not end a forward pass; after it, no hook is called."""

    def __init__(self) -> None:
        self._failed = False
        self._error: Exception | None = None

    def guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        """``hook`` as a function that raises nothing."""

        def run(*args: Any, **kwargs: Any) -> None:
            if not self._failed:
                try:
                    hook(*args, **kwargs)
                except Exception as error:
                    self._failed, self._error = True, error

        return run

    def raise_first(self) -> None:
        """Raise the error, once: its traceback holds what the hook was given, on the device, too."""
        error, self._error = self._error, None
        if error is not None:
            raise error


# --- Writing ----------------------------------------------------------------------------------------------------------


class Log:
    """This process's file of the run in folder ``run``, which it creates, and its heartbeat.

    Each line is one write to the operating system. One that fails, as on a full disk, ends what is recorded with a warning, and
    not the run.

    Raises:
        DataError: no file can be created there.
    """

    def __init__(
        self, run: str | os.PathLike[str], rank: int, world_size: int, clock: Clock, *, heartbeat_s: float = 1.0
    ) -> None:
        self.run, self.rank, self.world_size, self.clock = Path(run), rank, world_size, clock
        self.began_ns = time.time_ns() - clock.age_ns()
        self.number, self._file = _create(self.run, rank)
        self.path = Path(self._file.name)
        self._lock, self._ended = threading.Lock(), threading.Event()
        first = {"began": self.began_ns, "rank": rank, "world_size": world_size}
        self._append(first | {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat_s": heartbeat_s})
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: there is a line at every step all the same
            self._thread.start()

    def write(self, at: int | None = None, **fields: Any) -> dict[str, Any]:
        """Write a line of ``fields``, at a time since the epoch or now, and return it."""
        line = {"at": self.began_ns + self.clock.age_ns() if at is None else at, **fields}
        self._append(line)
        return line

    def close(self) -> None:
        """Close the file; a file system that does not answer the heartbeat is not waited for."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._close()

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line; nothing once a write has failed."""
        content = json.dumps(line).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                return
            try:
                if (written := self._file.write(content)) < len(content):
                    raise OSError(errno.ENOSPC, f"{written} of {len(content)} bytes were written")
            except OSError as error:
                why = f"{error.strerror}; this process records nothing more there, and training goes on"
                logger.warning("%s: %s", self.path, why)
                self._close()

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # a network file system says only now that it could not write
            logger.warning("%s: %s; what was recorded last may be missing", self.path, error.strerror)

    def _beat(self, heartbeat_s: float) -> None:
        while not self._ended.wait(heartbeat_s):
            self.write()


def _create(run: Path, rank: int) -> tuple[int, io.FileIO]:
    """A new file for ``rank``, after those that it has in ``run``, and the number of its start."""
    number = 1 + max((number for number, one, _ in rank_files(run) if one == rank), default=0)
    while True:
        path = run / f"start_{number}" / f"rank_{rank:05d}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return number, path.open("xb", buffering=0)
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
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no regular file; expected one, or a name that is free")
        files.replace(path, text.encode())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be written") from error


# --- Reading ----------------------------------------------------------------------------------------------------------


class Tail:
    """Reads a file of JSON lines as it grows; a last line that is not complete is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._number = 0

    def read_new[Record](self, parse: Callable[[Any], Record]) -> Iterator[Record]:
        """What ``parse`` makes of the lines that were completed since the last call; none while there is no file.

        Raises:
            DataError: a line is no JSON, or a ValueError for ``parse``; with its number.
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
                record = parse(json.loads(text))
            except (ValueError, RecursionError) as error:
                place = f"{self.path}, line {self._number}"
                raise DataError(f"{place}: {error}; restore the file, or delete it") from error
            yield record


class Span(NamedTuple):
    """One line about time: nanoseconds by phase since the one before it, and the step that they are of, if any."""

    at: int
    phases: Mapping[str, int]
    step: int | None


_PHASE = kinds.one_of(*Phase)
_FIRST = kinds.record(
    {"began": kinds.NANOSECONDS, "rank": kinds.COUNT, "world_size": kinds.SIZE, "heartbeat_s": kinds.AMOUNT}, more=True
)
_LINE = kinds.record(
    {"at": kinds.NANOSECONDS},
    {"phases": kinds.map_of(kinds.NANOSECONDS, _PHASE), "step": kinds.SIZE, "resumed_at": kinds.COUNT, "how": kinds.TEXT,
     "facts": kinds.MAP, "metrics": kinds.MAP},
    more=True,
)  # fmt: skip


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
        spans: every line about time, in order.
        steps: its steps with their losses, which the last rank writes.
        metrics: what was shown of its logged steps.
        facts: what it knows of the run, the last value of every key.
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
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ended_ns = max(self.ended_ns, self.began_ns)

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"start_{self.number}"

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line but the first."""
        if "phases" in line:
            phases, step = line["phases"], line.get("step")
            self.spans.append(Span(line["at"], phases, step))
            self.spent.update({name: spent for name, spent in phases.items() if step is None or name != Phase.STEP})
            if step is not None:
                self.resumed_at = line["resumed_at"]
                self.done, self.done_ns = self.done + 1, self.done_ns + phases.get(Phase.STEP, 0)
        if "losses" in line:
            self.steps.append(Step.from_record(line))
        if "metrics" in line:
            self.metrics.append(line["metrics"])
        self.facts |= line.get("facts", {})
        if self.how is None:  # what is written after it is of no time of the run
            self.how = line.get("how")
            self.ended_ns = line["at"] if self.how is not None else max(self.ended_ns, line["at"])


def read(
    run: str | os.PathLike[str], damaged: list[tuple[int, DataError]] | None = None, *, rank: int | None = None
) -> dict[int, list[Start]]:
    """The starts of every rank that left a file in the run's folder, by rank and in their order.

    Args:
        run: the run's folder.
        damaged: takes the rank and the damage of every file that cannot be read, which is then left out; None: it is raised.
        rank: the only one to read; None: all.

    Raises:
        DataError: there is none, or a line is not what a run writes.
    """
    written = rank_files(Path(run))
    if not written:
        raise DataError(f"{run} holds no start_*/rank_*.jsonl; expected the folder of a run that was observed")
    found: dict[int, list[Start]] = {}
    for number, one, path in written:
        if rank in (None, one):
            try:
                found.setdefault(one, []).extend(read_file(path, number, one))
            except DataError as error:
                if damaged is None:
                    raise
                damaged.append((one, error))
    return {one: starts for one, starts in sorted(found.items()) if starts}


def read_file(path: Path, number: int, rank: int) -> list[Start]:
    """The start in one file; none where not even its first line is complete.

    Raises:
        DataError: a line is not what a run writes.
    """
    starts: list[Start] = []

    def parse(line: Any) -> None:
        kinds.check(line, _LINE if starts else _FIRST)
        if not starts:
            starts.append(Start(path, number, rank, line["world_size"], line["began"], line["heartbeat_s"]))
        elif "step" in line and "resumed_at" not in line:
            raise ValueError(f"step {line['step']} has no resumed_at")
        else:
            starts[0].add(line)

    for _ in Tail(path).read_new(parse):
        pass
    return starts


def rank_files(run: Path) -> list[tuple[int, int, Path]]:
    """Number of the start, rank, and path of every file of a rank in the run's folder, in the order of the starts."""
    named = ((_FILE.fullmatch(path.relative_to(run).as_posix()), path) for path in run.glob("start_*/rank_*.jsonl"))
    return sorted((int(name[1]), int(name[2]), path) for name, path in named if name is not None)


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
