"""Host time per step that recording costs: the time spent in all listeners of the loop, in one run.

    python -m experiments.overhead --model nam56r_quarter --data CORPUS/stdlib_train --device cuda --steps 60

It includes waiting for the device when routing counts are read, but not the hooks that count in the forward pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.bench.csv_table import Table
from megacpp_mcore.bench.measure import device_name, versions
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.launch import launcher
from megacpp_mcore.model import preset
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe.events import Listener
from megacpp_mcore.observe.loop import Notifier

LIMIT_MS = 1.0
PACKAGES = ("torch", "megatron-core", "transformer-engine")
COLUMNS = ("model", "device", "steps", "listeners_ms", "step_ms", *PACKAGES, "commit")


def main() -> int:
    """Train, and write the row; return 1 if listeners take more than :data:`LIMIT_MS` per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nam56r_quarter")
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run", type=Path, default=Path("build/overhead"), help="folder of the record")
    parser.add_argument("--output", type=Path, default=Path("build/overhead.csv"))
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}; expected 2 or more (the second half is measured)")
    table, model, on_cpu = Table(args.output, COLUMNS), preset(args.model), args.device == "cpu"
    training = Training(
        device=args.device,
        precision="fp32" if on_cpu else "bf16",
        transformer_impl="local" if on_cpu else "transformer_engine",
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, data=args.data),
        global_batch_size=2,
        train_iters=args.steps,
    )
    spent, notify, notify_step = 0, Notifier.notify, Notifier.notify_step
    marks: list[tuple[int, int]] = []  # after each step: the time, and the total spent in listeners

    def listening(notifier: Notifier, call: Callable[[Listener], None]) -> Any:
        nonlocal spent
        start = time.perf_counter_ns()
        result = notify(notifier, call)
        spent += time.perf_counter_ns() - start
        return result

    def marking(notifier: Notifier, *step_args: Any) -> Any:
        result = notify_step(notifier, *step_args)
        marks.append((time.perf_counter_ns(), spent))
        return result

    with mock.patch.object(Notifier, "notify", listening), mock.patch.object(Notifier, "notify_step", marking):
        words = lower(Run(model, training=training))
        status = launcher.launch(words, device=args.device, recording=launcher.Recording(observe=str(args.run)))
    if status or len(marks) != args.steps:
        sys.exit(f"training ended with status {status} after {len(marks)} of {args.steps} logged steps")
    half = args.steps // 2  # the first half includes the start
    (from_ns, from_spent), (to_ns, to_spent) = marks[half - 1], marks[-1]
    listeners, step = (total_ns / (args.steps - half) / 1e6 for total_ns in (to_spent - from_spent, to_ns - from_ns))
    print(f"listeners take {listeners:.2f} ms of a step of {step:.1f} ms, {listeners / step:.2%}")
    row = {"model": args.model, "device": device_name(args.device), "steps": args.steps}
    table.append(row | {"listeners_ms": f"{listeners:.3f}", "step_ms": f"{step:.1f}"} | versions(*PACKAGES))
    return int(listeners > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
