"""Trains a preset for some steps through the stock loop and writes its step times, losses and memory as one CSV row.

    python -m benchmarks.train nam56r_quarter --data CORPUS/stdlib_train --steps 20 --device cuda --impl transformer_engine

The figures are Megatron's own: seconds and losses from its log at ``--log-interval 1``, memory (MiB, the peak of the whole
run) from its report of the last step. The first ``--warmup`` steps (allocator, autotuning, JIT) are left out of the
tokens/s and named in the row.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.measure import Table, device_name, versions
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.precision import PLANS
from megacpp_mcore.recipe_command import tokenizer_words

_STEP = re.compile(
    r"iteration +(?P<step>\d+)/.*?elapsed time per iteration \(ms\): (?P<ms>[\d.]+)"
    r".*?lm loss: (?P<loss>\S+).*?grad norm: (?P<norm>\S+)"
)
_MEMORY = re.compile(r"max allocated: (?P<allocated>[\d.]+) \| reserved: [\d.]+ \| max reserved: (?P<reserved>[\d.]+)")


def main() -> int:
    """Run the benchmark; returns the training's exit status."""
    args = arguments()
    model = preset(args.model)
    training = Training(
        device=args.device,
        precision=args.precision,
        transformer_impl=args.impl,
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, data=args.data),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        train_iters=args.steps,
        learning_rate=args.lr,
        extra=("--log-memory-interval", "1"),
    )
    words = lower(model, Layout(), training)
    command = [sys.executable, "-m", "megacpp_mcore", "launch", "--device", args.device, "--", *words]
    log = args.output.parent / f"{args.label}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as sink:
        status = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    if status:
        print(text[-6000:])
        return status
    row = {
        **figures(args, model.seq_length, text),
        **versions("transformer-engine", "transformer_engine_torch", "triton"),
    }
    Table(args.output, COLUMNS).append(row)
    print("\n".join(f"{key:>22}  {value}" for key, value in row.items()))
    return 0


COLUMNS = (
    "label", "model", "device", "impl", "precision", "tokens_per_step", "micro_batch", "steps", "warmup_left_out",
    "median_step_ms", "fastest_step_ms", "slowest_step_ms", "tokens_per_s", "max_allocated_mib", "max_reserved_mib",
    "first_loss", "last_loss", "last_grad_norm",
    "torch", "megatron-core", "transformer-engine", "transformer_engine_torch", "triton", "commit",
)  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked before anything is trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--impl", choices=("transformer_engine", "local"), default="transformer_engine")
    parser.add_argument("--precision", choices=tuple(PLANS), default="bf16")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--label", default="train")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/train.csv"))
    args = parser.parse_args(argv)
    if not 0 <= args.warmup < args.steps:
        parser.error(
            f"--warmup is {args.warmup}; expected 0 to {args.steps - 1}, to leave some of --steps {args.steps}"
        )
    try:
        Table(args.output, COLUMNS)
    except ValueError as error:
        parser.error(str(error))
    return args


def figures(args: argparse.Namespace, seq_length: int, text: str) -> dict[str, Any]:
    """The columns that a run's log gives; exits when the log lacks a step, or on a GPU the memory of the last one."""
    steps = [match.groupdict() for match in _STEP.finditer(text)]
    if len(steps) != args.steps:
        sys.exit(f"the log holds {len(steps)} steps, expected {args.steps}")
    steady = [float(step["ms"]) for step in steps[args.warmup :]]
    memory = [match.groupdict() for match in _MEMORY.finditer(text)]
    if args.device == "cuda" and len(memory) < args.steps:
        sys.exit(f"the log reports memory {len(memory)} times, expected once a step, that is {args.steps} times")
    tokens = args.global_batch_size * seq_length
    return {
        "label": args.label,
        "model": args.model,
        "device": device_name(args.device),
        "impl": args.impl,
        "precision": args.precision,
        "tokens_per_step": tokens,
        "micro_batch": args.micro_batch_size,
        "steps": args.steps,
        "warmup_left_out": args.warmup,
        "median_step_ms": round(statistics.median(steady), 1),
        "fastest_step_ms": min(steady),
        "slowest_step_ms": max(steady),
        "tokens_per_s": round(tokens / statistics.median(steady) * 1000),
        "max_allocated_mib": memory[-1]["allocated"] if memory else "",
        "max_reserved_mib": memory[-1]["reserved"] if memory else "",
        "first_loss": float(steps[0]["loss"]),
        "last_loss": float(steps[-1]["loss"]),
        "last_grad_norm": float(steps[-1]["norm"]),
    }


if __name__ == "__main__":
    sys.exit(main())
