"""The steps of a run that are measured: which they are, how long they took, and what compiled in them. No torch.

A step's time is that from the end of the step before to its own end, without checkpoints, evaluation and start-up. So it holds
the wait for data and the loop's own housekeeping, and does not depend on where in the step the host waits for the GPU.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.steps import Step

WARM_UP_STEPS = 3
"""Steps at each start that are not measured unless a run says otherwise."""

_COMPILING = (Phase.COMPILE, Phase.JIT)
_OF_A_STEP = (Phase.STEP, Phase.DATA, Phase.IDLE, *_COMPILING)


@dataclass(frozen=True)
class Window:
    """What is measured.

    Attributes:
        left_out: steps at each start that are not.
        rank: whose steps these are, the rank with the largest median.
        seconds: of each step, by number, in the order of the steps.
        compiled: nanoseconds of compilation in those steps in which any rank compiled.
        compiled_ns: nanoseconds of compilation of all ranks in all steps and before them.
    """

    left_out: int
    rank: int
    seconds: Mapping[int, float]
    compiled: Mapping[int, int]
    compiled_ns: int


@dataclass(frozen=True)
class _Line:
    step: int | None
    resumed_at: int
    phases: Mapping[str, int]

    def total(self, names: Sequence[str]) -> int:
        return sum(self.phases.get(name, 0) for name in names)


def read(run: str | os.PathLike[str], left_out: int = WARM_UP_STEPS) -> Window:
    """The window of the run in folder ``run``, from what every rank wrote of its goodput.

    Steps that were profiled are left out, and the one after, in whose time the profile is read.

    Raises:
        DataError: there is none of that, or it is damaged.
    """
    files = sorted((Path(run) / goodput.FOLDER).glob("rank_*.jsonl"))
    if not files:
        raise DataError(f"{Path(run) / goodput.FOLDER} holds no rank_*.jsonl; the times of steps are not known")
    times: dict[int, dict[int, float]] = {}
    compiled: dict[int, int] = {}
    compiled_ns = 0
    profiled = _profiled(Path(run))
    for file in files:
        starts = list(_starts(file))
        compiled_ns += sum(line.total(_COMPILING) for start in starts for line in start)
        measured = [(number, line) for number, line in _measured(starts, left_out) if number not in profiled]
        times[int(file.stem.removeprefix("rank_"))] = {
            number: line.total(_OF_A_STEP) / 1e9 for number, line in measured
        }
        for number, line in measured:
            if line.total(_COMPILING):
                compiled[number] = compiled.get(number, 0) + line.total(_COMPILING)
    rank = max(times, key=lambda one: (percentile(sorted(times[one].values()), 50) if times[one] else 0.0, -one))
    return Window(left_out, rank, times[rank], dict(sorted(compiled.items())), compiled_ns)


def _profiled(run: Path) -> set[int]:
    """Steps that a profile took part in."""
    found: set[int] = set()
    for folder in (run / "profile").glob("*-*"):
        first, _, last = folder.name.partition("-")
        if first.isdecimal() and last.isdecimal():
            found.update(range(int(first), int(last) + 2))
    return found


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of them do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def tokens_of(steps: Sequence[Step]) -> dict[int, int]:
    """Tokens of each step that follows a recorded one, and of step 1."""
    before = {step.step: step.tokens for step in steps} | {0: 0}
    return {step.step: step.tokens - before[step.step - 1] for step in steps if step.step - 1 in before}


def _starts(file: Path) -> Iterator[list[_Line]]:
    """The lines of each start of one rank."""
    start: list[_Line] | None = None
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if "began" in line:
                if start is not None:
                    yield start
                start = []
            elif start is not None:
                start.append(_Line(line.get("step"), line.get("resumed_at", 0), dict(line["phases"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}, line {number}: not what a run writes there ({error!r}); restore it") from error
    if start is not None:
        yield start


def _measured(starts: Sequence[Sequence[_Line]], left_out: int) -> Iterator[tuple[int, _Line]]:
    """The steps of one rank that were kept, but for the first ``left_out`` of each start."""
    for index, start in enumerate(starts):
        later = [line.resumed_at for after in starts[index + 1 :] for line in after if line.step is not None]
        kept_to = min(later, default=None)
        done = [(line.step, line) for line in start if line.step is not None]
        for number, line in done[left_out:]:
            if kept_to is None or number <= kept_to:
                yield number, line
