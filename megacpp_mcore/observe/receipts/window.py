"""The steps of a run that are measured: which they are, how long they took, and what compiled in them. No torch.

They are those of one start alone: what else a receipt says (backends, precision, topology) is of that one, and another may have
run with others. It is the last one; or the last that did a step, where those after it came to nothing and left its parts.

A step's time is that from the end of the step before to its own end, without checkpoints, evaluation, start-up and the
profiler. So it holds the wait for data and the loop's own housekeeping, and does not depend on where in the step the host
waits for the GPU.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.steps import Step

WARM_UP_STEPS = 3
"""Steps at the beginning of a start that are not measured unless a run says otherwise."""

_COMPILING = (Phase.COMPILE, Phase.JIT)
_OF_A_STEP = (Phase.STEP, Phase.DATA, Phase.IDLE, *_COMPILING)
_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Window:
    """What is measured.

    Attributes:
        done: steps that the start did, the most of a rank.
        left_out: of these, how many at its beginning are not measured.
        rank: whose steps these are, the rank with the largest median.
        seconds: of each step, by number, in the order of the steps.
        compiled: nanoseconds of compilation in those steps in which any rank compiled.
        compiled_ns: nanoseconds of compilation of all ranks in all steps of the start and before them.
    """

    done: int
    left_out: int
    rank: int
    seconds: Mapping[int, float]
    compiled: Mapping[int, int]
    compiled_ns: int


@dataclass(frozen=True)
class _Line:
    step: int | None
    phases: Mapping[str, int]

    def total(self, names: Sequence[str]) -> int:
        return sum(self.phases.get(name, 0) for name in names)


def read(
    run: str | os.PathLike[str],
    left_out: int = WARM_UP_STEPS,
    world_size: float = math.inf,
    *,
    stepped: bool = False,
) -> Window:
    """The window of the run in folder ``run``, from what every rank wrote of its goodput in one start.

    Steps that were profiled are left out, and the one after, in which a rank may wait for others that still read theirs.

    Args:
        run: the run's folder.
        left_out: steps at the beginning of the start that are not measured.
        world_size: processes of the start; what higher ranks of an earlier one left is not read.
        stepped: whether it is the last start that did a step, because those after it came to nothing; else it is the last.

    Raises:
        DataError: there is none of that, or it is damaged.
    """
    files = goodput.files(run, world_size)
    if not files:
        raise DataError(f"{Path(run) / goodput.FOLDER} holds no rank_*.jsonl; the times of steps are not known")
    times: dict[int, dict[int, float]] = {}
    compiled: dict[int, int] = {}
    compiled_ns = most = 0
    profiled = _profiled(Path(run))
    for rank, file in files.items():
        start = _read_start(file, stepped)
        compiled_ns += sum(line.total(_COMPILING) for line in start)
        done = [(line.step, line) for line in start if line.step is not None]
        most = max(most, len(done))
        measured = [
            (number, line)
            for number, line in done[left_out:]
            if not any(first <= number <= last for first, last in profiled)
        ]
        times[rank] = {number: line.total(_OF_A_STEP) / 1e9 for number, line in measured}
        for number, line in measured:
            if line.total(_COMPILING):
                compiled[number] = compiled.get(number, 0) + line.total(_COMPILING)
    slowest = max(times, key=lambda one: (percentile(sorted(times[one].values()), 50) if times[one] else 0.0, -one))
    return Window(most, left_out, slowest, times[slowest], dict(sorted(compiled.items())), compiled_ns)


def _profiled(run: Path) -> list[tuple[int, int]]:
    """First and last of the steps that a profile took part in."""
    found = []
    for folder in (run / "profile").glob("*-*"):
        first, _, last = folder.name.partition("-")
        if _STEP.fullmatch(first) and _STEP.fullmatch(last):
            found.append((int(first), int(last) + 1))
    return found


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of them do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def tokens_of(steps: Sequence[Step]) -> dict[int, int]:
    """Tokens of each step that follows a recorded one, and of step 1."""
    before = {step.step: step.tokens for step in steps} | {0: 0}
    return {step.step: step.tokens - before[step.step - 1] for step in steps if step.step - 1 in before}


def _read_start(file: Path, stepped: bool) -> list[_Line]:
    """The lines of the last start of one rank; or, if it is to be one that ``stepped``, of the last that did a step."""
    last: list[_Line] = []
    with_step: list[_Line] = []
    for line in goodput.read_lines(file):
        if "began" in line:
            last = []
            continue
        last.append(_Line(line.get("step"), line["phases"]))
        if "step" in line:
            with_step = last
    return with_step if stepped else last
