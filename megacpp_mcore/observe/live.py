"""Live metrics of a run: a line a step on the console, and scalars for TensorBoard and W&B. No torch at import.

They come from the last rank, where Megatron has the losses and its writers, for every step that Megatron logs (every
``--log-interval`` steps, and the first of every start). Megatron's own output is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from megacpp_mcore.observe.clock import OF_A_STEP, Phase
from megacpp_mcore.observe.events import Listener, Start, Step
from megacpp_mcore.observe.goodput import PRODUCTIVE, Recorder
from megacpp_mcore.observe.receipts.assemble import utilisation
from megacpp_mcore.observe.receipts.writer import ReceiptWriter
from megacpp_mcore.observe.steps import recorded, standing
from megacpp_mcore.util import console

_CLASSES = (PRODUCTIVE, *(phase for phase in OF_A_STEP if phase is not Phase.STEP))
"""The classes of time that tokens/s cover: the same as a receipt's step times."""
TAG = "observe/"
"""Prefix of our scalars, so that none clashes with Megatron's, which are losses, gradient norm and learning rate."""


SCALARS = (
    "tokens_per_s", "mfu", "goodput", "memory_allocated_bytes", "memory_reserved_bytes", "routing_entropy",
    "routing_max_over_mean", "dropped_share", "index_overlap",
)  # fmt: skip
"""What is written to TensorBoard and W&B for a logged step, in addition to what Megatron logs.

Tokens per second are over all processes, since the last logged step, without checkpoints, evaluation and the profiler
(None for the first step of a start); MFU, the model FLOPs utilisation, is over the same steps. Goodput is of the last rank,
all starts included. Memory is of the last rank, now; the resident set on the CPU lane. The others are of the last rank, as of
the last reading (:attr:`Routing.latest <megacpp_mcore.observe.routing.Routing.latest>`, and
:meth:`IndexOverlap.latest <megacpp_mcore.observe.indices.IndexOverlap.latest>`); None before one, and where there are no
routers or indexers.
"""


def line(step: Step, steps: int, first: Step, metrics: Mapping[str, Any] | None = None, *, alone: bool = True) -> str:
    """Format the progress line of ``step`` of ``steps``, recorded if it has ``metrics``; the mean pace is since ``first``.

    Figures that Megatron prints too use its wording (``training_log`` of megatron-core 0.19.2). Unless ``alone``, they are
    left out: Megatron's own line is on the same console.
    """
    parts = [f"iteration {step.step:8d}/{steps:8d}" if alone else f"step {step.step}/{steps}"]
    if alone and step.learning_rate is not None:
        parts.append(f"learning rate: {step.learning_rate:.6E}")
    depths = sorted(name for name in step.losses if name.startswith("mtp_"))
    named = ("lm loss", *depths) if alone else ()
    parts += [f"{name}: {step.losses[name]:.6E}" for name in named if name in step.losses]
    if alone and step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if metrics is not None:
        allocated, reserved = (metrics[f"memory_{kind}_bytes"] / 1e9 for kind in ("allocated", "reserved"))
        rate, mfu = metrics["tokens_per_s"], metrics["mfu"]
        parts += [
            f"{rate:,.0f} tokens/s" if rate is not None else "first of this start",
            f"MFU {mfu:.1%}" if mfu is not None else f"no MFU ({metrics['mfu_reason'].partition(';')[0]})",
            f"goodput {metrics['goodput']:.1%}",
            f"memory {allocated:.2f} of {reserved:.2f} GB",
            *([f"SKIPPED {metrics['skipped']}"] if metrics["skipped"] else []),
        ]
    if step.step > first.step:
        mean_s = (step.time_s - first.time_s) / (step.step - first.step)
        parts += [f"{mean_s:.3g} s/step", f"{timedelta(seconds=round((steps - step.step) * mean_s))} left"]
    return " | ".join(parts) + " |"


class Live(Listener):
    """Shows a run while it trains; made on the last rank.

    ``recorder``, of this rank's goodput, must come before this listener. ``console``: ``progress`` prints a line a step,
    ``stock`` none. ``receipt`` holds the loop, the experts' tokens and the selections.
    """

    def __init__(self, recorder: Recorder, receipt: ReceiptWriter, console: str = "progress") -> None:
        self._recorder, self._receipt, self._console = recorder, receipt, console
        self._skipped = 0
        self._first: Step | None = None
        self._before: tuple[int, int] | None = None

    def on_step(self, step: Step) -> None:
        """Show the step, if Megatron logged it."""
        self._skipped += step.skipped
        options = self._receipt.loop.arguments()
        if step.step % options.log_interval and self._before is not None:
            return
        metrics = self._measure(step)
        self._recorder.log.write(metrics=metrics)
        self._first = self._first or step
        if self._console == "progress":
            console.say(line(step, options.train_iters, self._first, metrics, alone=console.is_alone()))
        scalars = {f"{TAG}{name}": metrics[name] for name in SCALARS if metrics[name] is not None}
        writer, wandb = self._receipt.loop.writers()
        for tag, value in scalars.items() if writer is not None else ():
            writer.add_scalar(tag, value, step.step)
        if wandb is not None:
            wandb.log(scalars, step.step)

    def _measure(self, step: Step) -> dict[str, Any]:
        """Measure :data:`SCALARS` since the last logged step, why there is no MFU, and the steps skipped in this start."""
        import torch

        spent = self._recorder.so_far(step.resumed_at)
        in_steps = sum(spent.nanoseconds[name] for name in _CLASSES)
        rate = None
        if self._before is not None and in_steps > self._before[1]:
            rate = (step.tokens - self._before[0]) / (in_steps - self._before[1]) * 1e9
        self._before = (step.tokens, in_steps)
        mfu, reason = None, "no earlier step to measure from"
        if (counted := self._receipt.facts.values.get("flops")) is None:
            reason = self._receipt.facts.unknown.get("flops", "the work of a step is not known")
        elif rate is not None:
            used = utilisation(self._receipt.facts.values, counted["tokens"] / rate)
            mfu, reason = used.mfu, used.reason or ""
        return {
            "step": step.step,
            "resumed_at": step.resumed_at,
            "skipped": self._skipped,
            **dict.fromkeys(SCALARS),
            "tokens_per_s": rate,
            "mfu": mfu,
            "mfu_reason": reason,
            "goodput": spent.share,
            "memory_allocated_bytes": int(torch.cuda.memory_allocated()),
            "memory_reserved_bytes": int(torch.cuda.memory_reserved()),
            **self._receipt.routes.latest,
            **self._receipt.indices.latest(),
        }


def metrics_of(ranks: Mapping[int, Sequence[Start]]) -> list[dict[str, Any]]:
    """Return what :class:`Live` wrote of each logged step, ascending, without steps that a restart rolled back."""
    starts = standing(recorded(ranks))
    return [metrics for start, kept_to in starts for metrics in start.metrics if metrics["step"] <= kept_to]
