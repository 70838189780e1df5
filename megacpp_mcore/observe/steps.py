"""The steps of a run, losses in full precision: read from its folder or from a file of steps, and compared. No torch at import.

Megatron's own log prints seven digits, and its second line after every start is the average of two steps (megatron-core
0.19.2, ``megatron/training/training.py``), so that it can neither prove nor refute that a resumed run repeats.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.events import Appender, Listener, Step, Tail
from megacpp_mcore.util import schema as kinds

__all__ = ["Comparison", "Step", "StepReader", "StepRecorder", "compare", "kept", "read_steps"]


class StepRecorder(Listener):
    """Appends every step that Megatron logs to the file at ``path``, which all starts of a run may share.

    Only the last rank, which is where Megatron has the losses, writes.

    Raises:
        DataError: the file cannot be opened for appending, or is a pipe or socket, whose reader could hold training up.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._is_mended = Path(path), False
        try:
            mode = self._path.stat().st_mode if self._path.exists() else 0
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                raise DataError(f"{path} is a pipe or socket; expected a file: name another, and read it from there")
            self._output = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a file that can be appended to") from error
        self._file = Appender(self._path, self._output)

    def on_step(self, step: Step) -> None:
        """Write its line."""
        if _is_last_rank():
            if not self._is_mended:
                self._mend()
            self._file.append(json.dumps(asdict(step)))

    def on_end(self, error: BaseException | None) -> None:
        """Close the file."""
        self._file.close()

    def _mend(self) -> None:
        """Take away what a killed start left of a line, so that the next one begins a line of its own; other text stays."""
        self._is_mended = True
        about = os.fstat(self._output)
        if not stat.S_ISREG(about.st_mode):
            return
        torn = os.pread(self._output, 2**20, max(0, about.st_size - 2**20)).rpartition(b"\n")[2]
        if torn.endswith(b"}") or not (torn[:7] == b'{"step"'[: len(torn)] or not torn.strip(b"\0")):
            self._file.append("")
        elif torn:
            os.ftruncate(self._output, about.st_size - len(torn))


def _is_last_rank() -> bool:
    import torch

    ranks = torch.distributed
    return not ranks.is_initialized() or ranks.get_rank() == ranks.get_world_size() - 1


# --- Reading ----------------------------------------------------------------------------------------------------------

_RECORD = kinds.record(events.STEP)


class StepReader:
    """Reads the steps in a run's folder, or in a file of steps, as they are recorded."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tails: dict[Path, Tail] = {}

    def read_new(self) -> list[Step]:
        """The steps whose lines were completed since the last call, start by start.

        Raises:
            DataError: a line is not the record of a step.
        """
        paths = [path for _, _, path in events.rank_files(self.path)] if self.path.is_dir() else [self.path]
        return [step for path in paths for step in self._steps(self._tails.setdefault(path, Tail(path)))]

    def _steps(self, tail: Tail) -> Iterator[Step]:
        for line in tail.read_new():
            if tail.path != self.path:
                if not isinstance(line, dict) or "losses" not in line:
                    continue
                line = {name: line[name] for name in events.STEP if name in line}
            try:
                kinds.check(line, _RECORD)
                if line["step"] <= line["resumed_at"]:
                    raise ValueError(
                        f"step is {line['step']} and resumed_at {line['resumed_at']}; expected a later step"
                    )
            except ValueError as error:
                raise tail.damaged(ValueError(f"not the record of a step ({error})")) from error
            yield Step(**line)


def read_steps(path: str | os.PathLike[str]) -> list[Step]:
    """All steps in a run's folder, or in a file of steps, in the order they were written; those that were done again, too.

    Raises:
        DataError: there is no such thing, or a line is not the record of a step.
    """
    if not Path(path).exists():
        raise DataError(f"{path} does not exist; expected the folder of a run, or a file of steps that one recorded")
    return StepReader(path).read_new()


class _Numbered(Protocol):
    """What is known of a step: its number, and where its start went on from."""

    @property
    def step(self) -> int: ...

    @property
    def resumed_at(self) -> int: ...


def starts_anew(one: _Numbered, before: _Numbered | None) -> bool:
    """Whether a recorded step is the first of a start, given the step that was recorded before it."""
    return before is None or one.resumed_at != before.resumed_at or one.step <= before.step


def kept[Recorded: _Numbered](recorded: Sequence[Recorded]) -> list[Recorded]:
    """The steps that the run's present state rests on, ascending.

    A start that goes on from the checkpoint of a step undoes all that earlier starts did beyond it, as soon as it has recorded
    a step, also what it has not done again itself yet.

    Args:
        recorded: the steps (:class:`Step`, or what has the same two numbers) in the order they were written, start by start.
    """
    found: list[Recorded] = []
    before: Recorded | None = None
    for one in recorded:
        if starts_anew(one, before):
            while found and found[-1].step > one.resumed_at:
                found.pop()
        found.append(one)
        before = one
    return found


# --- Comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What became of comparing two recordings of the same steps.

    Attributes:
        steps: numbers of the steps that both have, ascending.
        names: the values that were compared.
        first_difference: the first step with a value that is not the same double in both, and that value's name.
        largest: the largest absolute difference of the ``lm loss``, in nats; NaN when a step has none, or NaN.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    first_difference: tuple[int, str] | None
    largest: float

    @property
    def equal(self) -> bool:
        """Whether every compared value of every step is the same, bit for bit."""
        return self.first_difference is None


def compare(before: list[Step], after: list[Step]) -> Comparison:
    """Compare losses, gradient norm and learning rate of the steps that two recordings have in common.

    A value that only one of them has, and one that is not a number, is a difference.

    Raises:
        DataError: they have no step in common.
    """
    left, right = ({step.step: step.values() for step in steps} for steps in (before, after))
    common = sorted(left.keys() & right.keys())
    if not common:
        raise DataError(f"found no step in common among {_span(before)} and {_span(after)}; expected at least one")
    differences = []
    for number in common:
        for name in sorted(left[number].keys() | right[number].keys()):
            one, other = left[number].get(name), right[number].get(name)
            if one is None or other is None or one != other:
                differences.append((number, name))
    apart = [abs(left[number].get("lm loss", math.nan) - right[number].get("lm loss", math.nan)) for number in common]
    largest = math.nan if any(map(math.isnan, apart)) else max(apart)
    names = sorted(set().union(*(left[number] for number in common)))
    return Comparison(tuple(common), tuple(names), differences[0] if differences else None, largest)


def _span(steps: list[Step]) -> str:
    return f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"
