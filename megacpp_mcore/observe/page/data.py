"""What the page tells of one run, read from its folder, or from its receipt alone. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, receipts
from megacpp_mcore.observe.alive import last_alive_ns
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.goodput import DOWN, LOST, PRODUCTIVE, RECOVERY, Goodput
from megacpp_mcore.observe.live import Metrics, read_metrics
from megacpp_mcore.observe.receipts.assembly import PARTS, STEPS
from megacpp_mcore.observe.receipts.schema import flatten
from megacpp_mcore.observe.receipts.window import tokens_of
from megacpp_mcore.observe.steps import Step, kept, read_steps

_ORDER = (
    Phase.STARTUP,
    Phase.LOAD,
    Phase.IDLE,
    Phase.EVALUATION,
    Phase.SAVE,
    Phase.PROFILE,
    Phase.COMPILE,
    Phase.JIT,
    Phase.DATA,
    Phase.STEP,
)
"""The order of the phases of one line, which has only their sums: what follows a step comes before the next one."""
_OF_A_STEP = (Phase.STEP, Phase.DATA, Phase.IDLE, Phase.COMPILE, Phase.JIT)


@dataclass(frozen=True)
class Span:
    """A stretch of wall time in one class of :data:`~megacpp_mcore.observe.goodput.CLASSES`, in seconds from the beginning."""

    begin_s: float
    end_s: float
    kind: str


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one step that ended at ``at_s``; ``start`` counts the starts of the run, from 0."""

    at_s: float
    tokens_per_s: float
    step: int
    start: int


@dataclass(frozen=True)
class Timeline:
    """One rank's wall time from the beginning of its first start to the end of its last.

    Attributes:
        rank: whose.
        began_ns: when the first start began, in nanoseconds since the epoch.
        wall_s: its length.
        spans: in order, without gaps but for pauses between starts that had finished.
        rates: of every step that ran, also of those that were lost.
        restarts: when each start but the first began, and the step that it went on from (None: it had not come to a step).
    """

    rank: int
    began_ns: int
    wall_s: float
    spans: tuple[Span, ...]
    rates: tuple[Rate, ...]
    restarts: tuple[tuple[float, int | None], ...]


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
        name: what the page calls it.
        receipt: its receipt.
        values: the same by path.
        steps: every step that was recorded, in the order in which it ran, repeated ones too.
        ranks: goodput by rank; empty where only a receipt is there.
        timeline: of the slowest rank; None likewise.
        metrics: the logged steps.
        missing: why a part of the page is not there, by the name of the part.
    """

    name: str
    receipt: Mapping[str, Any]
    values: Mapping[str, Any]
    steps: Sequence[Step] = ()
    ranks: Mapping[int, Goodput] = field(default_factory=dict)
    timeline: Timeline | None = None
    metrics: Sequence[Metrics] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def starts(self) -> list[list[Step]]:
        """The steps of each start."""
        found: list[list[Step]] = []
        for step in self.steps:
            again = found and (step.step <= found[-1][-1].step or step.resumed_at != found[-1][-1].resumed_at)
            if not found or again:
                found.append([])
            found[-1].append(step)
        return found

    def kept(self) -> list[Step]:
        """The steps that the run's present state rests on, ascending."""
        return kept(self.steps)


def read(path: str | os.PathLike[str]) -> RunData:
    """The run in a folder, or of a receipt.

    Raises:
        DataError: there is no receipt, or it is damaged. Of another file that is, ``missing`` says so.
    """
    place = Path(path)
    receipt = receipts.read(place)
    values = flatten(receipt)[0]
    name = place.resolve().parent.name if place.is_file() else _name(place)
    if not (place / PARTS).is_dir():
        why = "only the receipt is here, not the folder of the run"
        return RunData(name, receipt, values, missing=dict.fromkeys(("loss", "time", "goodput", "metrics"), why))
    missing: dict[str, str] = {}
    steps: Sequence[Step] = ()
    ranks: Mapping[int, Goodput] = {}
    timeline = None
    try:
        steps = read_steps(place / STEPS)
    except DataError as error:
        missing["loss"] = str(error)
    try:
        ranks = goodput.read(place)
        timeline = _timeline(place, goodput.slowest(ranks), tokens_of(list({one.step: one for one in steps}.values())))
    except DataError as error:
        missing["goodput"] = missing["time"] = str(error)
    metrics: Sequence[Metrics] = ()
    try:
        metrics = read_metrics(place)
        if not metrics:
            missing["metrics"] = "no step was logged to metrics.jsonl"
    except DataError as error:
        missing["metrics"] = str(error)
    return RunData(name, receipt, values, steps, ranks, timeline, metrics, missing)


def _name(folder: Path) -> str:
    """The folder's name; where it is called ``observe``, with that of the folder it lies in."""
    found = folder.resolve()
    return f"{found.parent.name}/{found.name}" if found.name == "observe" else found.name


# --- The timeline -----------------------------------------------------------------------------------------------------


def _timeline(run: Path, rank: int, tokens: Mapping[int, int]) -> Timeline:
    path = goodput.rank_file(run, rank)
    starts = list(_starts(path))
    if not starts:
        raise DataError(f"{path} holds no start of rank {rank}; expected the lines of a run")
    began = starts[0][0]["began"]
    spans: list[Span] = []
    rates: list[Rate] = []
    restarts: list[tuple[float, int | None]] = []
    for number, (first, *lines) in enumerate(starts):
        at = (first["began"] - began) / 1e9
        resumed = next((line["resumed_at"] for line in lines if "step" in line), None)
        died = number > 0 and "died" in first
        if number:
            restarts.append((at, resumed))
            if died:
                _end(spans, (first["died"] - began) / 1e9, LOST if _had_steps(starts[number - 1]) else Phase.STARTUP)
                _end(spans, at, DOWN)
        later = [line["resumed_at"] for after in starts[number + 1 :] for line in after[1:] if "step" in line]
        again_from = min(later, default=None)
        for line in lines:
            end = (line["at"] - began) / 1e9
            lost = "step" in line and again_from is not None and line["step"] > again_from
            at = _fill(spans, at, end, line, lost, died)
            rate = _rate(line, tokens, end, number)
            if rate is not None:
                rates.append(rate)
    ended = starts[-1][-1].get("how") is not None
    if not ended:
        _end(spans, (last_alive_ns(path) - began) / 1e9, LOST if _had_steps(starts[-1]) else Phase.STARTUP)
    wall_s = spans[-1].end_s if spans else 0.0
    return Timeline(rank, began, wall_s, tuple(_merged(spans)), tuple(rates), tuple(restarts))


def _starts(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The lines of each start."""
    start: list[dict[str, Any]] = []
    for line in goodput.read_lines(path):
        if "began" in line and start:
            yield start
            start = []
        start.append(line)
    if start:
        yield start


def _had_steps(start: Sequence[Mapping[str, Any]]) -> bool:
    return any("step" in line for line in start)


def _end(spans: list[Span], end_s: float, kind: str) -> None:
    """A span from the end of the last one to ``end_s``."""
    begin = spans[-1].end_s if spans else 0.0
    if end_s > begin:
        spans.append(Span(begin, end_s, kind))


def _fill(spans: list[Span], begin: float, end: float, line: Mapping[str, Any], lost: bool, after_death: bool) -> float:
    """The spans of one line, one a phase, from ``begin`` on; returns ``end``."""
    in_step = "step" in line
    for phase in _ORDER:
        seconds = line["phases"].get(phase, 0) / 1e9
        if not seconds:
            continue
        kind: str = phase
        if phase is Phase.STEP:
            kind = PRODUCTIVE if in_step and not lost else LOST
        elif phase is Phase.STARTUP and after_death:
            kind = RECOVERY
        spans.append(Span(begin, begin + seconds, kind))
        begin += seconds
    return end


def _rate(line: Mapping[str, Any], tokens: Mapping[int, int], end: float, start: int) -> Rate | None:
    """The rate of the step that a line is about, over the same phases as a receipt's step times."""
    seconds = sum(line["phases"].get(phase, 0) for phase in _OF_A_STEP) / 1e9
    if "step" not in line or line["step"] not in tokens or not seconds:
        return None
    return Rate(end, tokens[line["step"]] / seconds, line["step"], start)


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Neighbours of one class as one."""
    held: Span | None = None
    for span in spans:
        if held is not None and held.kind == span.kind and span.begin_s - held.end_s < 1e-6:
            held = Span(held.begin_s, span.end_s, held.kind)
        else:
            if held is not None:
                yield held
            held = span
    if held is not None:
        yield held
