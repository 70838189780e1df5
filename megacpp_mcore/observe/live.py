"""What a run shows while it trains: a readable line a logged step, ``metrics.jsonl``, TensorBoard, W&B. No torch at import.

The last rank does it, which is where Megatron has the losses and its writers. A step is logged when Megatron prints its
iteration line (every ``--log-interval`` steps, and the first of every start); that line then goes to ``stock.log``. All other
output, errors included, stays where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import kinds
from megacpp_mcore.observe.clock import Phase
from megacpp_mcore.observe.files import Appender, LineReader
from megacpp_mcore.observe.flops.report import Utilisation
from megacpp_mcore.observe.goodput import PRODUCTIVE
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.peaks import peak
from megacpp_mcore.observe.receipts.assembly import load, part_file
from megacpp_mcore.observe.steps import RECORD, begins, kept, numbered

if TYPE_CHECKING:
    from megacpp_mcore.observe.goodput import Goodput, Recorder
    from megacpp_mcore.observe.loop import Loop
    from megacpp_mcore.observe.routing import Routing
    from megacpp_mcore.observe.steps import Step

METRICS, STOCK_LOG = "metrics.jsonl", "stock.log"
PROGRESS, STOCK = "progress", "stock"

_OF_STEPS = (PRODUCTIVE, Phase.DATA, Phase.IDLE, Phase.COMPILE, Phase.JIT)
"""The classes of time that tokens/s are about: the same as a receipt's step times."""
SCALARS = (
    "tokens_per_s",
    "mfu",
    "goodput",
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "routing_entropy",
    "routing_max_over_mean",
    "dropped_share",
    "index_overlap",
)
"""What is written to TensorBoard and W&B."""
TAG = "observe/"
"""What our scalars' names begin with, so that none is Megatron's: that writes losses, gradient norm and learning rate."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A logged step.

    Attributes:
        step: 1-based number.
        resumed_at: the step whose checkpoint the process started from.
        time_s: seconds since the epoch.
        tokens: since step 0, over all processes.
        losses, grad_norm, learning_rate: of this step alone, as :class:`~megacpp_mcore.observe.steps.Step` has them.
        skipped: steps that the optimizer skipped since this start.
        tokens_per_s: over all processes, since the last logged step, without checkpoints, evaluation and the
            profiler; None for the first step of a start.
        mfu: model FLOPs utilisation over the same steps; None where it is not known.
        mfu_reason: why it is not; empty where it is.
        goodput: of the last rank, all starts included.
        memory_allocated_bytes, memory_reserved_bytes: of the last rank, now; the resident set on the CPU lane.
        routing_entropy, routing_max_over_mean, dropped_share, index_overlap: of the last rank, as of the last reading
            (:class:`~megacpp_mcore.observe.routing.Routing`); None before one, and where there is no such thing.
    """

    step: int
    resumed_at: int
    time_s: float
    tokens: int
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rate: float | None
    skipped: int
    tokens_per_s: float | None
    mfu: float | None
    mfu_reason: str
    goodput: float
    memory_allocated_bytes: int
    memory_reserved_bytes: int
    routing_entropy: float | None = None
    routing_max_over_mean: float | None = None
    dropped_share: float | None = None
    index_overlap: float | None = None

    def line(self, steps: int) -> str:
        """The progress line of a run of ``steps`` steps."""
        losses = self.losses
        first = [f"loss {losses['lm loss']:.4f}"] if "lm loss" in losses else []
        depths = [
            f"{name.removesuffix(' loss')} {losses[name]:.4f}" for name in sorted(losses) if name.startswith("mtp_")
        ]
        mfu = f"MFU {self.mfu:.1%}" if self.mfu is not None else f"no MFU ({_brief(self.mfu_reason)})"
        allocated, reserved = (size / 2**30 for size in (self.memory_allocated_bytes, self.memory_reserved_bytes))
        words = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            *first,
            *depths,
            *([f"grad norm {self.grad_norm:.3f}"] if self.grad_norm is not None else []),
            *([f"lr {self.learning_rate:.2e}"] if self.learning_rate is not None else []),
            f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s is not None else "first of this start",
            mfu,
            f"goodput {self.goodput:.1%}",
            f"memory {allocated:.2f} of {reserved:.2f} GiB",
            *([f"SKIPPED {self.skipped}"] if self.skipped else []),
        ]
        return "  ".join(words)


def _brief(reason: str) -> str:
    """The part of a reason before its details."""
    return reason.partition(";")[0]


class Live(Listener):
    """Shows a run while it trains.

    Args:
        run: the run's folder.
        rank: this process's rank.
        recorder: what records this rank's goodput; it has to come before this one.
        loop: the loop that trains.
        last: whether this process is the last rank; the others show nothing.
        routes: what counts the experts' tokens; it has to come before this one, too. None: nothing does.
        console: ``progress`` or ``stock``, what is printed of a step.

    Raises:
        DataError: a file in the folder cannot be appended to.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        rank: int,
        recorder: Recorder,
        loop: Loop,
        *,
        last: bool,
        routes: Routing | None = None,
        console: str = PROGRESS,
    ) -> None:
        self._run, self._rank = Path(run), rank
        self._last, self._loop = last, loop
        self._recorder, self._routes, self._console = recorder, routes, console
        self._metrics: Appender | None = None
        self._stock_log: Appender | None = None
        with contextlib.ExitStack() as undone:
            if self._last:
                self._metrics = Appender(self._run / METRICS)
                undone.callback(self._metrics.close)
            if self._last and console == PROGRESS:
                self._stock_log = Appender(self._run / STOCK_LOG)
            undone.pop_all()
        self._stock_print: Callable[[str], None] | None = None
        self._said = False
        self._skipped = 0
        self._before: tuple[int, int] | None = None
        self._work: _Work | None = None

    def on_step_begin(self, number: int) -> None:
        """Stand where Megatron prints, until the step's line has come."""
        if not self._last or self._stock_print is not None:
            return
        module, name = self._loop.printing
        self._stock_print = getattr(sys.modules[module], name)
        setattr(sys.modules[module], name, self._take)

    def on_step(self, step: Step) -> None:
        """Show the step, if Megatron printed its line."""
        if not self._last:
            return
        self._step_aside()
        self._skipped += step.skipped
        if self._said or self._before is None:
            found = self._measure(step)
            if self._said:
                self._show(found)
        self._said = False

    def on_end(self, error: BaseException | None) -> None:
        """Close the files."""
        self._step_aside()
        for output in (self._metrics, self._stock_log):
            if output is not None:
                output.close()

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """Let the loop print again if it is this one that failed, or the one that it takes the times from."""
        if failed in (self, self._recorder):
            self._step_aside()
            self._last = False

    def _take(self, line: str) -> None:
        """Stands for the loop's printer between the beginning of a step and the end of its ``training_log``."""
        self._said = True
        if self._stock_log is not None:
            self._stock_log.append(line.rstrip("\n"))
        elif self._stock_print is not None:
            self._stock_print(line)

    def _step_aside(self) -> None:
        if self._stock_print is not None:
            module, name = self._loop.printing
            setattr(sys.modules[module], name, self._stock_print)
            self._stock_print = None

    def _measure(self, step: Step) -> Metrics:
        """What is known of the steps since the last logged one."""
        import torch

        spent = self._recorder.so_far()
        in_steps = _in_steps(spent)
        rate = None
        if self._before is not None and in_steps > self._before[1]:
            rate = (step.tokens - self._before[0]) / (in_steps - self._before[1]) * 1e9
        self._before = (step.tokens, in_steps)
        if self._work is None:
            self._work = _read_work(self._run, self._rank)
        mfu, reason = self._work.mfu(rate)
        return Metrics(
            step=step.step,
            resumed_at=step.resumed_at,
            time_s=step.time_s,
            tokens=step.tokens,
            losses=step.losses,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            skipped=self._skipped,
            tokens_per_s=rate,
            mfu=mfu,
            mfu_reason=reason,
            goodput=spent.share,
            memory_allocated_bytes=int(torch.cuda.memory_allocated()),
            memory_reserved_bytes=int(torch.cuda.memory_reserved()),
            **(self._routes.latest if self._routes is not None else {}),
        )

    def _show(self, found: Metrics) -> None:
        record = asdict(found)
        if self._metrics is not None:
            self._metrics.append(json.dumps(record))
        if self._console == PROGRESS:
            print(found.line(self._loop.arguments().train_iters), flush=True)
        scalars = {f"{TAG}{name}": record[name] for name in SCALARS if record[name] is not None}
        writer, wandb = self._loop.writers()
        if writer is not None:
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, found.step)
        if wandb is not None:
            wandb.log(scalars, found.step)


def _in_steps(spent: Goodput) -> int:
    return sum(spent.nanoseconds[name] for name in _OF_STEPS)


# --- MFU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """The FLOPs of a step of ``tokens`` tokens by precision, and what it runs on; or why that is not known."""

    flops: Mapping[str, int]
    tokens: int
    devices: int
    device: str
    why_not: str = ""

    def mfu(self, tokens_per_s: float | None) -> tuple[float | None, str]:
        """The utilisation at a rate, or why there is none."""
        if self.why_not:
            return None, self.why_not
        if tokens_per_s is None:
            return None, "no step before it to measure from"
        used = Utilisation(
            step_time_s=self.tokens / tokens_per_s,
            devices=self.devices,
            model_flops=self.flops,
            hardware_flops=self.flops,
            peaks={name: peak(self.device, name) for name in self.flops},
        )
        return used.mfu, used.reason or ""


def _read_work(run: Path, rank: int) -> _Work:
    """The work of a step as this rank's part of the receipt has it, which is written once the model is there."""
    try:
        part = load(part_file(run, rank), "the part of this rank")
    except DataError:
        return _Work({}, 0, 1, "", "the run writes no receipt")
    known, unknown = part.get("run", {}), part.get("unknown", {})
    counted = known.get("flops")
    if counted is None:
        return _Work({}, 0, 1, "", unknown.get("flops", "the work of a step is not known"))
    return _Work(
        flops={name: one["model_flops"] for name, one in counted["by_precision"].items()},
        tokens=counted["tokens"],
        devices=known["parallelism.world_size"],
        device=known["device"],
    )


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_metrics(run: str | os.PathLike[str]) -> list[Metrics]:
    """The logged steps of the run in folder ``run``, ascending, without those that a restart rolled back.

    Raises:
        DataError: a line is not what a run writes, and not one that a start could not complete at its end.
    """
    path = Path(run) / METRICS
    if (path.is_symlink() or path.exists()) and not path.is_file():
        raise DataError(f"{path} is no regular file; expected the logged steps of a run: move it out of the folder")
    try:
        return kept(list(LineReader(path, _parse, begins, "a logged step").read_all()))
    except (OSError, RecursionError) as error:
        raise DataError(f"{path}: {error}; expected the logged steps of a run") from error


_OPTIONAL = ("routing_entropy", "routing_max_over_mean", "dropped_share", "index_overlap")
_METRICS = kinds.record(
    RECORD
    | {
        "skipped": kinds.COUNT,
        "tokens_per_s": kinds.nullable(kinds.AMOUNT),
        "mfu": kinds.nullable(kinds.AMOUNT),
        "mfu_reason": kinds.TEXT,
        "goodput": kinds.SHARE,
        "memory_allocated_bytes": kinds.COUNT,
        "memory_reserved_bytes": kinds.COUNT,
    },
    dict.fromkeys(_OPTIONAL, kinds.nullable(kinds.AMOUNT)),
)


def _parse(found: Any) -> Metrics:
    kinds.check(found, _METRICS)
    numbered(found)
    return Metrics(**found)
