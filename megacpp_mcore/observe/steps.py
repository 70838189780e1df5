"""One JSON line a training step, losses in full precision: written while stock Megatron trains, read back; no torch at import.

Megatron's own log prints seven digits, and its second line after every start is the average of two steps (megatron-core
0.19.2, ``megatron/training/training.py``), so that it can neither prove nor refute that a resumed run repeats.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError


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


@contextlib.contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[str]:
    """Append every step that stock Megatron logs in this process to the file at ``path``, until the context ends.

    ``megatron.training.training.training_log`` and the writer it asks for are wrapped, and nothing that they are given or
    return is changed. Only the last rank, which is where Megatron has the losses, writes. A line is one write to the
    operating system, so that a killed process leaves whole lines. Yields a line for the launcher to print.

    Raises:
        DataError: the file cannot be opened for appending, or ends in the middle of a line.
    """
    from megatron.training import training

    output = _open_for_appending(Path(path))
    stock_log, stock_writer = training.training_log, training.get_tensorboard_writer
    signature = inspect.signature(stock_log)
    resumed_at: list[int] = []

    @functools.wraps(stock_log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        collector = _Collector(stock_writer())
        training.get_tensorboard_writer = lambda: collector
        try:
            result = stock_log(*args, **kwargs)
        finally:
            training.get_tensorboard_writer = stock_writer
        if _is_last_rank():
            if not resumed_at:
                resumed_at.append(given["iteration"] - 1)
            step = _describe(given, collector.scalars, resumed_at[0])
            os.write(output, (json.dumps(asdict(step)) + "\n").encode())
        return result

    training.training_log = training_log
    try:
        yield f"steps: every step's losses go to {path}"
    finally:
        training.training_log = stock_log
        os.close(output)


class _Collector:
    """Stands where Megatron's TensorBoard writer is asked for, keeps the scalars, and hands everything on to that writer."""

    def __init__(self, stock: Any) -> None:
        self.scalars: dict[str, float] = {}
        self._stock = stock

    def add_scalar(self, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        """Keep one named value."""
        self.scalars[tag] = float(scalar_value)
        if self._stock is not None:
            self._stock.add_scalar(tag, scalar_value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _open_for_appending(path: Path) -> int:
    try:
        if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            raise DataError(f"{path} ends in the middle of a line; expected whole lines: name another file, or mend it")
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be appended to") from error


def _is_last_rank() -> bool:
    import torch

    ranks = torch.distributed
    return not ranks.is_initialized() or ranks.get_rank() == ranks.get_world_size() - 1


def _describe(given: Mapping[str, Any], scalars: Mapping[str, float], resumed_at: int) -> Step:
    """The record of one call of ``training_log``: its arguments, and the auxiliary losses that it computed itself."""
    from megatron.training import get_args

    args = get_args()
    losses = {name: float(value) for name, value in given["loss_dict"].items()}
    losses |= {name: value for name, value in scalars.items() if name.endswith("loss") and name not in losses}
    grad_norm, learning_rate = given["grad_norm"], given["learning_rate"]
    return Step(
        step=given["iteration"],
        resumed_at=resumed_at,
        time_s=time.time(),
        tokens=args.consumed_train_samples * args.seq_length,
        losses=losses,
        grad_norm=None if grad_norm is None else float(grad_norm),
        learning_rate=None if learning_rate is None else float(learning_rate),
        skipped=bool(given["skipped_iter"]),
    )


# --- Reading ----------------------------------------------------------------------------------------------------------


class StepReader:
    """Reads a file of steps as it grows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0
        self._line = 0

    def read_new(self) -> list[Step]:
        """Return the steps whose lines were completed since the last call; none while there is no file.

        Raises:
            DataError: a line is not the record of a step.
        """
        try:
            with open(self.path, "rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._parse(line) for line in whole.splitlines()]

    def _parse(self, line: bytes) -> Step:
        self._line += 1
        try:
            return Step(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self.path}, line {self._line}: not the record of a step ({error}); delete the file, or restore it"
            ) from error


def read_steps(path: str | os.PathLike[str]) -> list[Step]:
    """Return all steps in the file at ``path``, in the order they were written.

    Raises:
        DataError: there is no such file, or a line is not the record of a step.
    """
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist; expected a file of steps, as a training run records them")
    return StepReader(path).read_new()


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
