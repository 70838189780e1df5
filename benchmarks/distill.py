"""Whose attention a DSA indexer should learn from: final losses of a small model by arm and seed, trained side by side.

    python -m benchmarks.distill --data CORPUS/stdlib_train --gpus 2 --per-gpu 4

``nam56r_tiny`` at depth 36, which has six sparse layers. Arms: ``own`` and ``served`` (``dsa.distill``, three Full layers with
a Shared layer each), and ``unshared``, where all six layers run an indexer of their own. A row a run: the mean over the last
``--window`` steps of the trunk's loss (``lm loss``) and of the indexer's (mean over Full layers, times its coefficient, against
the target of the arm: that of ``served`` is another one than that of ``own``). Then a table of the arms, mean and spread over
seeds.

Each run is the text that ``megacpp-mcore recipe emit --as cli`` prints, in fp32, with Megatron's own layers:
``pretrain_gpt.py`` of the checkout that MEGATRON_LM names, or without one the loop of the installed wheel. A seed sets initial
weights and the order of the data.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.measure import Table, device_name, versions
from megacpp_mcore.launcher import CHECKOUT_VARIABLE
from megacpp_mcore.observe.steps import Step, read_steps

ARMS = {
    "own": ("dsa.schedule=-FS", "dsa.distill=own"),
    "served": ("dsa.schedule=-FS", "dsa.distill=served"),
    "unshared": ("dsa.schedule=-FF",),
}
DEPTH = 36
TRUNK, INDEXER = "lm loss", "indexer loss"
COLUMNS = (
    "arm", "seed", "steps", "window", "device", "lr", "global_batch", "first_lm_loss", "lm_loss", "indexer_loss", "grad_norm",
    "torch", "megatron-core", "commit",
)  # fmt: skip


def main() -> int:
    """Train every arm with every seed; 1 when a run fails, whose log is named."""
    args = _arguments()
    table, slots = Table(args.output, COLUMNS), _slots(args)
    runs = [(arm, seed) for seed in args.seeds for arm in args.arms]
    with ThreadPoolExecutor(slots.qsize()) as pool:
        done = list(pool.map(lambda run: _train(run[0], run[1], args, slots), runs))
    rows = [
        _row(arm, seed, args, steps)
        for (arm, seed), steps in zip(runs, done, strict=True)
        if not isinstance(steps, str)
    ]
    table.append(*rows)
    print(summary(rows))
    failures = [steps for steps in done if isinstance(steps, str)]
    print("\n".join(failures))
    return int(bool(failures))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line an arm: mean of the final losses over its seeds, and their standard deviation."""
    lines = [f"{'arm':<10}{'seeds':>6}{'trunk loss':>22}{'indexer loss':>24}"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        trunk, indexer = (_spread([float(row[name]) for row in of_arm]) for name in ("lm_loss", "indexer_loss"))
        lines.append(f"{arm:<10}{len(of_arm):>6}{trunk:>22}{indexer:>24}")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.5g}{deviation}"


def _slots(args: argparse.Namespace) -> queue.SimpleQueue[dict[str, str]]:
    """The environments of runs that go side by side: ``--per-gpu`` for each GPU, or so many on the CPU."""
    slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for _ in range(args.per_gpu):
        for gpu in range(args.gpus if args.device == "cuda" else 1):
            slots.put({"CUDA_VISIBLE_DEVICES": str(gpu)} if args.device == "cuda" else {})
    return slots


def _train(arm: str, seed: int, args: argparse.Namespace, slots: queue.SimpleQueue[dict[str, str]]) -> list[Step] | str:
    """The steps of one run, or why there are none."""
    record = args.folder / f"{arm}_{seed}"
    environment = slots.get()
    try:
        record.unlink(missing_ok=True)
        script = _emitted(arm, seed, args, record.with_suffix(".yaml"))
        script = script.replace(" launch ", f" launch --record-steps {shlex.quote(str(record))} ", 1)
        script = script.replace("\nmegacpp-mcore launch", f"\n{shlex.quote(sys.executable)} -m megacpp_mcore launch", 1)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        record.with_suffix(".log").write_text(script + done.stdout + done.stderr)
    finally:
        slots.put(environment)
    steps = read_steps(record) if record.exists() else []
    if done.returncode or len(steps) != args.steps:
        return f"{arm}, seed {seed}: status {done.returncode}, {len(steps)} steps; see {record.with_suffix('.log')}"
    print(f"{arm} {seed}: {TRUNK} {steps[-1].losses[TRUNK]:.4f}, {INDEXER} {steps[-1].losses[INDEXER]:.3e}", flush=True)
    return steps


def _emitted(arm: str, seed: int, args: argparse.Namespace, settings: Path) -> str:
    """What ``recipe emit`` prints for ``arm``; it writes the changed model to ``settings``."""
    run = [
        f"seed={seed}",
        f"precision={args.precision}",
        f"global_batch_size={args.global_batch_size}",
        f"micro_batch_size={args.global_batch_size}",
        f"train_iters={args.steps}",
        f"learning_rate={args.lr}",
    ]
    way = "launch" if os.environ.get(CHECKOUT_VARIABLE) else "wheel"
    words = ["--as", "cli", "--via", way, "--device", args.device, "--impl", "local", "--data", args.data]
    command = [
        "recipe",
        "emit",
        "nam56r_tiny",
        *words,
        "--set",
        f"depth={DEPTH}",
        *ARMS[arm],
        *run,
        "--settings",
        settings,
    ]
    emit = [sys.executable, "-m", "megacpp_mcore", *map(str, command)]
    return subprocess.run(emit, stdout=subprocess.PIPE, text=True, check=True).stdout


def _row(arm: str, seed: int, args: argparse.Namespace, steps: Sequence[Step]) -> dict[str, Any]:
    last = steps[-args.window :]
    return {
        "arm": arm,
        "seed": seed,
        "steps": len(steps),
        "window": args.window,
        "device": device_name(args.device),
        "lr": args.lr,
        "global_batch": args.global_batch_size,
        "first_lm_loss": f"{steps[0].losses[TRUNK]:.6f}",
        "lm_loss": f"{statistics.fmean(step.losses[TRUNK] for step in last):.6f}",
        "indexer_loss": f"{statistics.fmean(step.losses[INDEXER] for step in last):.6e}",
        "grad_norm": f"{statistics.fmean(step.grad_norm or 0.0 for step in last):.4f}",
        **versions(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--window", type=int, default=20, help="last steps that a final loss is the mean of")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--per-gpu", type=int, default=1, help="runs side by side on a GPU, or on the CPU")
    parser.add_argument("--folder", type=Path, default=Path("build/distill"), help="for records, settings and logs")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/distill.csv"))
    args = parser.parse_args()
    for name in ("gpus", "per_gpu", "window"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected 1 or more")
    if args.window > args.steps:
        parser.error(f"--window is {args.window}; expected at most --steps {args.steps}")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
