"""Events of a run: the listeners that receive them, and the JSON-lines file that every rank writes per start. No torch.

``RUN/start_2/rank_00000.jsonl`` is what rank 0 wrote in its second start. A file is created by one process, and no other
ever opens it for writing: there is nothing to lock, to repair or to wait for, and a killed process leaves at most its last
line torn. Every line but the first has ``at``, nanoseconds since the epoch; a line with nothing else is a heartbeat.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.util import files
from megacpp_mcore.util.kinds import COUNT, FLAG, NUMBER, TEXT, VALUE, Kind, map_of, or_null

logger = logging.getLogger(__name__)

FINISHED, STOPPED = "finished", "stopped"
"""``how`` of a process whose training completed, or was ended in order before its last step (by SIGTERM, ``--exit-interval``
and the like); otherwise it is the name of the error that ended it."""
IN_ORDER = (FINISHED, STOPPED)
OVERLAP_NS = 1_000_000_000
"""How long two starts of a rank may overlap before it is reported: the clocks of two hosts differ by some milliseconds."""


@dataclass(frozen=True)
class Step:
    """One training step as it was recorded.

    Attributes:
        step: 1-based number.
        resumed_at: the step whose checkpoint the process started from, 0 for a fresh start.
        time_s: seconds since the epoch when the step was logged.
        tokens: tokens trained on since step 0, over all processes.
        losses: Megatron's losses of this step only (``lm loss``, ``mtp_1 loss``, …). Sums over micro-batches are
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

    @property
    def failed(self) -> bool:
        """Whether the step was skipped, or has a loss that is not finite."""
        return self.skipped or not all(map(math.isfinite, self.losses.values()))

    def values(self) -> dict[str, float]:
        """Return the step's results by name: the losses, ``grad norm`` and ``learning rate``, those that exist."""
        values = {**self.losses, "grad norm": self.grad_norm, "learning rate": self.learning_rate}
        return {name: value for name, value in values.items() if value is not None}


class Listener:
    """Receives the events of a run on every rank. Each method does nothing unless overridden.

    A listener must not synchronise with the GPU outside of :meth:`on_step`, and there only where it says so: its cost is
    part of the step. It must never wait for other ranks: when one raises, its :meth:`on_end` is called at once, only on
    its rank, it receives no further events, and training continues. One with hooks in
    Megatron's modules is a :class:`Hooked`.
    """

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Receive the built model chunks and optimizer, loaded from a checkpoint if there is one."""

    def on_step_begin(self, number: int) -> None:
        """Handle the beginning of step ``number`` (1-based)."""

    def on_step(self, step: Step) -> None:
        """Handle ``step``, which has ended and was logged; only the last pipeline stage has its losses."""

    def on_stop(self, reason: str) -> None:
        """Handle an orderly end of the loop before its last step; ``reason`` is the line that it logs."""

    def on_failure(self, what: str) -> None:
        """Handle the failure of another listener: ``what`` says which, in which step (0: before the first), and why."""

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of training: normal, by ``error``, or for this listener only, disabled by ``error``."""


class Hooked(Listener):
    """A listener with hooks in Megatron's modules, which must not end a forward pass: after an error, none does anything.

    It reads the device every ``interval`` steps.

    Attributes:
        hooks: closed when training ends.
        failed: the error of a hook, in words; None if there was none.
    """

    def __init__(self, interval: int = 10) -> None:
        self.interval, self.hooks = interval, contextlib.ExitStack()
        self.failed: str | None = None
        self._error: Exception | None = None

    def guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``hook`` so that it never raises."""

        def run(*args: Any, **kwargs: Any) -> None:
            if self.failed is None:
                try:
                    hook(*args, **kwargs)
                except Exception as error:
                    self.failed, self._error = f"{type(error).__name__}: {error}".partition("\n")[0], error

        return run

    def raise_first(self) -> None:
        """Raise a hook's error once, then drop it: its traceback holds the hook's arguments, tensors on the device included."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def on_end(self, error: BaseException | None) -> None:
        """Remove the hooks; raise a hook's error, if there was one."""
        self.hooks.close()
        self.raise_first()


class Log:
    """This process's file in the run's folder ``run``, which it creates, and its heartbeat.

    Each line is one write to the operating system. If a write fails, as on a full disk, recording ends with a warning; the
    run continues.

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
        self.on_beat: Callable[[], None] = lambda: None
        """Called by the heartbeat's thread at every heartbeat."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        first = {"began": self.began_ns, "rank": rank, "world_size": world_size}
        self._append(first | {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat_s": heartbeat_s})
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True)
        self._thread.start()

    def write(self, at: int | None = None, **fields: Any) -> None:
        """Write a line of ``fields``, timed ``at`` (nanoseconds since the epoch) or now."""
        self._append({"at": self.began_ns + self.clock.age_ns() if at is None else at, **fields})

    def close(self) -> None:
        """Close the file, waiting at most a second for a heartbeat that the file system does not answer."""
        self._ended.set()
        self._thread.join(1.0)
        self._close()

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line; does nothing once a write has failed."""
        content = json.dumps(line).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                return
            try:
                if (written := self._file.write(content)) < len(content):
                    raise OSError(errno.ENOSPC, f"{written} of {len(content)} bytes were written")
            except OSError as error:
                why = f"{error.strerror}; this process records nothing more there; training continues"
                logger.warning("%s: %s", self.path, why)
                self._close()

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # a network file system may report only now that it could not write
            logger.warning("%s: %s; what was recorded last may be missing", self.path, error.strerror)

    def _beat(self, heartbeat_s: float) -> None:
        while not self._ended.wait(heartbeat_s):
            self.write()
            self.on_beat()


def _create(run: Path, rank: int) -> tuple[int, io.FileIO]:
    """Create the next file for ``rank`` in ``run``; returns the number of its start, and the file."""
    number = 1 + max((number for number, file_rank, _ in _files(run) if file_rank == rank), default=0)
    while True:
        path = run / f"start_{number}" / f"rank_{rank:05d}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return number, path.open("xb", buffering=0)
        except FileExistsError as error:
            if not run.is_dir():  # else another process was faster; readers report the overlap
                raise DataError(
                    f"{error.filename} is not a folder, or is a broken or circular link; expected a folder or an unused path: "
                    "mount the link's target, or remove it"
                ) from error
            number += 1
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a folder that can be written to") from error


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, finds either the complete old file or the complete new one.

    Where ``path`` is a link, the file it points to is replaced.

    Raises:
        DataError: the folder cannot be written to, or ``path`` is not a regular file.
    """
    try:
        files.replace(files.writable(path), text.encode())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be written") from error


_REAL = Kind("number", lambda value: type(value) in (int, float))
"""Infinity and NaN included: losses and gradients may be either."""
_METRIC = Kind("number, text or null", lambda value: value is None or type(value) in (int, float, str))
_LINE: Mapping[str, Kind] = {
    **dict.fromkeys(("at", "began", "rank", "world_size", "resumed_at", "tokens"), COUNT),
    **dict.fromkeys(("heartbeat_s", "time_s"), NUMBER), **dict.fromkeys(("grad_norm", "learning_rate"), or_null(_REAL)),
    "how": or_null(TEXT), "step": or_null(COUNT), "skipped": FLAG, "phases": map_of(COUNT), "losses": map_of(_REAL),
    "metrics": Kind("metrics of a step", lambda value: map_of(_METRIC).fits(value) and COUNT.fits(value.get("step"))),
    "facts": map_of(VALUE),
}  # fmt: skip
"""Kinds of the values in a line that a reader relies on."""


class Span(NamedTuple):
    """One timed line: nanoseconds by phase since the previous one, and the step that it ends, if any."""

    at: int
    phases: dict[str, int]
    step: int | None

    def total(self, phases: Iterable[str]) -> int:
        """Return the nanoseconds in several phases."""
        get = self.phases.get
        return sum([get(phase, 0) for phase in phases])


@dataclass
class Start:
    """What one process of a rank wrote.

    Attributes:
        number: of the start, as in the folder's name; ``rank`` and ``world_size`` are the process's.
        began_ns, ended_ns: nanoseconds since the epoch; the end is the last line's time.
        how: how it ended, as it wrote; None while it runs, or if it was killed.
        resumed_at: the step whose checkpoint it started from; None before its first step.
        spans: every timed line, in order.
        steps: its steps with their losses, which the last rank writes.
        metrics: the metrics shown for its logged steps.
        facts: what it recorded about the run, the last value of every key.
    """

    number: int
    rank: int
    world_size: int
    began_ns: int
    heartbeat_s: float = 1.0
    ended_ns: int = 0
    how: str | None = None
    resumed_at: int | None = None
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"start_{self.number}"

    @property
    def done(self) -> list[int]:
        """Numbers of the steps that it completed, in order."""
        return [span.step for span in self.spans if span.step is not None]

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line other than the first.

        Raises:
            LookupError: it is not what a run writes.
        """
        if "phases" in line:
            self.spans.append(Span(line["at"], line["phases"], line.get("step")))
        if "step" in line:
            self.resumed_at = line["resumed_at"]
        if "losses" in line:
            self.steps.append(Step(**{attribute.name: line[attribute.name] for attribute in fields(Step)}))
        if "metrics" in line:
            self.metrics.append(line["metrics"])
        if "facts" in line:
            self.facts |= line["facts"]
        if self.how is None:  # lines after that are outside the run's time
            self.how = line.get("how")
            self.ended_ns = line["at"] if self.how is not None else max(self.ended_ns, line["at"])


def read(
    run: str | os.PathLike[str],
    summarise: Callable[[int, Sequence[Start]], object] | None = None,
    *,
    rank: int | None = None,
    may_be_empty: bool = False,
) -> dict[int, list[Start]]:
    """Return the starts of every rank that left a file in the run's folder, by rank and in their order.

    Args:
        summarise: called with each rank and its starts as they are read. Then the starts that are returned have no spans, and
            share equal facts: a long run of many ranks does not fit into memory otherwise.
        rank: read only this rank; None: read all.
        may_be_empty: accept a folder in which nothing was recorded yet.

    Raises:
        DataError: there is none, or a line is not what a run writes.
    """
    ranks: dict[int, list[Start]] = {}
    shared: dict[str, Any] = {}
    for file_rank, files_of_rank in itertools.groupby(sorted(_files(Path(run)), key=itemgetter(1)), key=itemgetter(1)):
        if rank not in (None, file_rank):
            continue
        starts = [start for number, _, path in files_of_rank if (start := _read_file(path, number)) is not None]
        if starts:
            ranks[file_rank] = starts
        if starts and summarise is not None:
            summarise(file_rank, starts)
            for start in starts:
                start.spans = []
                start.facts = {key: shared.setdefault(json.dumps(fact), fact) for key, fact in start.facts.items()}
    if not ranks and not may_be_empty:
        raise DataError(
            f"{run} holds no complete line of a start_*/rank_*.jsonl; expected the folder of a run that was observed"
        )
    return ranks


def load(path: Path, expected: str, remedy: str) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``; ``expected`` and ``remedy`` word the errors.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected {expected}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON, damaged or truncated ({error}); expected {expected}: {remedy}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected {expected}: {remedy}")
    return content


def _read_file(path: Path, number: int) -> Start | None:
    """Read the start in one file, without a torn last line; None where not even its first line is complete."""
    start, place = None, 0
    try:
        with path.open("rb") as stream:
            for text in stream:
                place += 1
                if not text.endswith(b"\n"):
                    break
                line = json.loads(text.decode())
                if wrong := [key for key, value in line.items() if key in _LINE and not _LINE[key].fits(value)]:
                    raise ValueError(f"{wrong[0]} is {line[wrong[0]]!r:.80}")
                if start is not None:
                    start.add(line)
                    continue
                rank, world_size, began = line["rank"], line["world_size"], line["began"]
                if rank != int(path.stem.removeprefix("rank_")) or world_size <= rank:
                    raise ValueError(f"rank {rank} of {world_size} in the file of another")
                start = Start(number, rank, world_size, began, line["heartbeat_s"], began)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file of JSON lines") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"not a line that a run writes ({type(error).__name__}: {error})"
        raise DataError(f"{path}, line {place}: {what}; restore the file, or delete it") from error
    return start


def _files(run: Path) -> list[tuple[int, int, Path]]:
    """Return start number, rank and path of every rank's file in the run's folder, in the order of the starts."""
    paths = run.glob("start_[1-9]*/rank_[0-9]*.jsonl")
    return sorted((int(path.parent.name.removeprefix("start_")), int(path.stem.removeprefix("rank_")), path) for path in paths)


def grouped(ranks: Mapping[int, Sequence[Start]]) -> list[list[Start]]:
    """Return the run's starts, each as its processes by rank: those of one world size whose times overlap."""
    groups: list[list[Start]] = []
    for start in sorted((start for starts in ranks.values() for start in starts), key=lambda start: start.began_ns):
        for group in reversed(groups):
            fits = start.world_size == group[0].world_size and start.began_ns <= max(p.ended_ns for p in group)
            if fits and start.rank not in {process.rank for process in group}:
                group.append(start)
                break
        else:
            groups.append([start])
    return [sorted(group, key=lambda process: process.rank) for group in groups]


def overlaps(starts: Sequence[Start]) -> list[Start]:
    """Return a rank's starts that were recorded while another was, in order."""
    together: dict[int, Start] = {}
    last: Start | None = None  # the earlier start that ended last
    for start in sorted(starts, key=lambda start: start.began_ns):
        if last is not None and start.began_ns < last.ended_ns - OVERLAP_NS:
            together |= {last.number: last, start.number: start}
        last = start if last is None or start.ended_ns > last.ended_ns else last
    return [start for _, start in sorted(together.items())]


def overlap(ranks: Mapping[int, Sequence[Start]]) -> str:
    """Return which starts were recorded in the run's folder at the same time, in words; empty where none were.

    One that ended with an error before its first step, as where another run trains in the folder, has disturbed none.
    """
    overlapping = [
        f"{', '.join(s.name for s in starts)} of rank {rank}"
        for rank, of in ranks.items()
        if (starts := overlaps([s for s in of if s.resumed_at is not None or s.how in (None, *IN_ORDER)]))
    ]
    if not overlapping:
        return ""
    more = f", and of {len(overlapping) - 1} more ranks" * (len(overlapping) > 1)
    return f"{overlapping[0]}{more} were recorded at the same time: two trainings in one folder, or clocks that differ"
