"""One JSON line a training step, losses in full precision: written while stock Megatron trains, read back; no torch at import.

Megatron's own log prints seven digits, and its second line after every start is the average of two steps (megatron-core
0.19.2, ``megatron/training/training.py``), so that it can neither prove nor refute that a resumed run repeats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import kinds
from megacpp_mcore.observe.files import Appender, LineReader
from megacpp_mcore.observe.listener import Listener


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


# --- Writing ----------------------------------------------------------------------------------------------------------


class StepRecorder(Listener):
    """Appends every step that stock Megatron logs to the file at ``path``.

    Only the last rank, which is where Megatron has the losses, writes. A file that cannot be written to any more does not end
    training (:class:`~megacpp_mcore.observe.files.Appender`).

    Raises:
        DataError: the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._output = Appender(Path(path))

    def on_step(self, step: Step) -> None:
        """Write its line."""
        if _is_last_rank():
            self._output.append(json.dumps(asdict(step)))

    def on_end(self, error: BaseException | None) -> None:
        """Close the file."""
        self._output.close()


def _is_last_rank() -> bool:
    import torch

    ranks = torch.distributed
    return not ranks.is_initialized() or ranks.get_rank() == ranks.get_world_size() - 1


# --- Reading ----------------------------------------------------------------------------------------------------------


RECORD = {
    "step": kinds.SIZE,
    "resumed_at": kinds.COUNT,
    "time_s": kinds.AMOUNT,
    "tokens": kinds.COUNT,
    "losses": kinds.map_of(kinds.RESULT),
    "grad_norm": kinds.nullable(kinds.RESULT),
    "learning_rate": kinds.nullable(kinds.AMOUNT),
    "skipped": kinds.FLAG,
}
"""The fields of a line, by name."""
_STEP = kinds.record(RECORD)


def numbered(found: Mapping[str, Any]) -> None:
    """Check that a step follows the one from which its start went on.

    Raises:
        ValueError: it does not.
    """
    if found["step"] <= found["resumed_at"]:
        raise ValueError(
            f"step is {found['step']} and resumed_at {found['resumed_at']}; expected a step after the one resumed at"
        )


def _parse(found: Any) -> Step:
    kinds.check(found, _STEP)
    numbered(found)
    return Step(**found)


class StepReader:
    """Reads a file of steps as it grows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lines = LineReader(self.path, _parse, begins, "the record of a step")

    def read_new(self) -> list[Step]:
        """Return the steps whose lines were completed since the last call; none while there is no file.

        Raises:
            DataError: a line is not the record of a step, and not one that a start could not complete at its end.
        """
        return list(self._lines.read_new())

    def read_all(self) -> list[Step]:
        """The same of a file that does not grow any more: a last line that was not completed is warned of.

        Raises:
            DataError: as :meth:`read_new`.
        """
        return list(self._lines.read_all())


def read_steps(path: str | os.PathLike[str]) -> list[Step]:
    """Return all steps in the file at ``path``, in the order they were written.

    Raises:
        DataError: there is no such file, or a line is not the record of a step.
    """
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist; expected a file of steps, as a training run records them")
    try:
        return StepReader(path).read_all()
    except (OSError, RecursionError) as error:
        raise DataError(f"{path}: {error}; expected a file of steps, as a training run records them") from error


class _Numbered(Protocol):
    """What is known of a step: its number, and where its start went on from."""

    @property
    def step(self) -> int: ...

    @property
    def resumed_at(self) -> int: ...


def begins(one: _Numbered, before: _Numbered | None) -> bool:
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
        if begins(one, before):
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
