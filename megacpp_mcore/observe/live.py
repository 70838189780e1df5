"""Live metrics of a run: a line below Megatron's own, and scalars for TensorBoard and W&B. No torch at import.

They come from the last rank, where Megatron has the losses and its writers, for every step that Megatron logs (every
``--log-interval`` steps, and the first of every start). Megatron's own line and all its other output are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from megacpp_mcore.observe.clock import OF_A_STEP, Phase
from megacpp_mcore.observe.events import Listener, Start, Step
from megacpp_mcore.observe.goodput import PRODUCTIVE, Recorder
from megacpp_mcore.observe.receipts.assemble import utilisation
from megacpp_mcore.observe.receipts.schema import Facts
from megacpp_mcore.observe.steps import recorded, standing

if TYPE_CHECKING:
    from megacpp_mcore.observe.indices import IndexOverlap
    from megacpp_mcore.observe.loop import Loop
    from megacpp_mcore.observe.routing import Routing

PROGRESS, STOCK = "progress", "stock"

_CLASSES = (PRODUCTIVE, *(phase for phase in OF_A_STEP if phase is not Phase.STEP))
"""The classes of time that tokens/s cover: the same as a receipt's step times."""
TAG = "observe/"
"""Prefix of our scalars, so that none clashes with Megatron's, which are losses, gradient norm and learning rate."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is known of a logged step besides what Megatron logs itself.

    Attributes:
        step: 1-based number.
        resumed_at: the step whose checkpoint the process started from.
        skipped: steps that the optimizer skipped since this start.
        tokens_per_s: over all processes, since the last logged step, without checkpoints, evaluation and the
            profiler; None for the first step of a start.
        mfu: model FLOPs utilisation over the same steps; None where it is not known.
        mfu_reason: why ``mfu`` is None; empty otherwise.
        goodput: of the last rank, all starts included.
        memory_allocated_bytes, memory_reserved_bytes: of the last rank, now; the resident set on the CPU lane.
        routing_entropy, routing_max_over_mean, dropped_share: of the last rank, as of the last reading
            (:class:`~megacpp_mcore.observe.routing.Routing`); None before one, and where there are no routers.
        index_overlap: likewise, from :class:`~megacpp_mcore.observe.indices.IndexOverlap`.
    """

    step: int
    resumed_at: int
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

    def line(self, step: Step, steps: int) -> str:
        """The progress line of ``step`` of a run of ``steps``."""
        allocated, reserved = (size / 1e9 for size in (self.memory_allocated_bytes, self.memory_reserved_bytes))
        depths = sorted(name for name in step.losses if name.startswith("mtp_"))
        parts = [f"step {step.step:>{len(str(steps))}}/{steps}"]
        if "lm loss" in step.losses:
            parts.append(f"loss {step.losses['lm loss']:.4f}")
        parts += [f"{name.removesuffix(' loss')} {step.losses[name]:.4f}" for name in depths]
        if step.grad_norm is not None:
            parts.append(f"grad norm {step.grad_norm:.3f}")
        if step.learning_rate is not None:
            parts.append(f"lr {step.learning_rate:.2e}")
        parts += [
            f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s is not None else "first of this start",
            f"MFU {self.mfu:.1%}" if self.mfu is not None else f"no MFU ({self.mfu_reason.partition(';')[0]})",
            f"goodput {self.goodput:.1%}",
            f"memory {allocated:.2f} of {reserved:.2f} GB",
        ]
        return "  ".join([*parts, *([f"SKIPPED {self.skipped}"] if self.skipped else [])])


SCALARS = tuple(
    field.name for field in fields(Metrics) if field.name not in ("step", "resumed_at", "skipped", "mfu_reason")
)
"""What is written to TensorBoard and W&B."""


class Live(Listener):
    """Shows a run while it trains; made on the last rank.

    Args:
        recorder: records this rank's goodput; must come before this listener.
        loop: the loop that trains.
        facts: what is known of the run, filled in as it becomes known.
        routes: counts the experts' tokens; must come before this listener, too.
        indices: samples the selections of Full layers; likewise.
        console: ``progress`` or ``stock``: whether a line is printed below Megatron's.
    """

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        *,
        facts: Facts,
        routes: Routing,
        indices: IndexOverlap,
        console: str = PROGRESS,
    ) -> None:
        self._recorder, self._loop, self._facts = recorder, loop, facts
        self._routes, self._indices, self._console = routes, indices, console
        self._skipped = 0
        self._before: tuple[int, int] | None = None

    def on_step(self, step: Step) -> None:
        """Show the step, if Megatron logged it."""
        self._skipped += step.skipped
        options = self._loop.arguments()
        if step.step % options.log_interval and self._before is not None:
            return
        metrics = self._measure(step)
        record = asdict(metrics)
        self._recorder.log.write(metrics=record)
        if self._console == PROGRESS:
            print(metrics.line(step, options.train_iters), flush=True)
        scalars = {f"{TAG}{name}": record[name] for name in SCALARS if record[name] is not None}
        writer, wandb = self._loop.writers()
        if writer is not None:
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step.step)
        if wandb is not None:
            wandb.log(scalars, step.step)

    def _measure(self, step: Step) -> Metrics:
        """Metrics of the steps since the last logged one."""
        import torch

        spent = self._recorder.so_far(step.resumed_at)
        in_steps = sum(spent.nanoseconds[name] for name in _CLASSES)
        rate = None
        if self._before is not None and in_steps > self._before[1]:
            rate = (step.tokens - self._before[0]) / (in_steps - self._before[1]) * 1e9
        self._before = (step.tokens, in_steps)
        mfu, reason = _mfu(self._facts, rate)
        return Metrics(
            step=step.step,
            resumed_at=step.resumed_at,
            skipped=self._skipped,
            tokens_per_s=rate,
            mfu=mfu,
            mfu_reason=reason,
            goodput=spent.share,
            memory_allocated_bytes=int(torch.cuda.memory_allocated()),
            memory_reserved_bytes=int(torch.cuda.memory_reserved()),
            **self._routes.latest,
            **self._indices.latest(),
        )


def _mfu(facts: Facts, tokens_per_s: float | None) -> tuple[float | None, str]:
    """The model FLOPs utilisation at a rate, or why it is not known."""
    if (counted := facts.values.get("flops")) is None:
        return None, facts.unknown.get("flops", "the work of a step is not known")
    if tokens_per_s is None:
        return None, "no step before it to measure from"
    used = utilisation(facts.values, counted["tokens"] / tokens_per_s)
    return used.mfu, used.reason or ""


def metrics_of(ranks: Mapping[int, Sequence[Start]]) -> list[Metrics]:
    """The logged steps in the starts of all ranks, ascending, without those that a restart rolled back."""
    starts = standing(recorded(ranks))
    return [Metrics(**one) for start, kept_to in starts for one in start.metrics if one["step"] <= kept_to]
