"""One model through every door: losses, parameters and speed of the stock command, the hybrid host and the Bridge recipe.

    python -m benchmarks.doors --recipe nam56r_quarter_pretrain_1gpu_h200_bf16 --data CORPUS/stdlib_train --steps 20

Each door trains the same recipe on the same data in a process of its own, one after the other. The first door is what the
others are compared with: parameters have to be equal, and the losses of every step within the tolerance. That is measured, too:
the first door runs twice, and 1.5 times the largest difference of its two runs is what noise explains (never less than 1e-5).
Tokens/s come from the median of Megatron's own step times after ``--warmup`` steps. ``--precision fp32`` trains without BF16.
``--deterministic`` trains in Megatron's deterministic mode: every loss has to be equal bit for bit (and attention is unfused).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.measure import Table, device_name, versions, worst_difference
from megacpp_mcore.lowering import GPT, HYBRID, lower
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.precision import PLANS
from megacpp_mcore.recipe_command import tokenizer_words
from megacpp_mcore.recipes import Recipe, recipe

DOORS = ("cli", "hybrid", "bridge")
COLUMNS = (
    "door", "recipe", "precision", "deterministic", "device", "steps", "warmup_left_out", "parameters", "first_loss",
    "last_loss", "worst_difference", "tolerance", "median_step_ms", "tokens_per_s", "of_first", "torch", "megatron-core",
    "transformer-engine", "megatron-bridge", "commit",
)  # fmt: skip

DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What NCCL, cuBLAS and Transformer Engine have to be told in the environment."""

_STEP = re.compile(r"iteration +\d+/.*?elapsed time per iteration \(ms\): ([\d.]+)")
_PARAMETERS = re.compile(r"number of parameters on \([a-z_, ]+\) model parallel rank \([0, ]+\): *([\d,]+)")


@dataclass(frozen=True)
class Trained:
    """What one door did: parameters, and of every step the loss and the milliseconds."""

    parameters: int
    losses: list[float]
    milliseconds: list[float]


def main() -> int:
    """Run the doors and print the table; 1 when one trains something else than the first."""
    args = _arguments()
    table = Table(args.output, COLUMNS)
    chosen = recipe(args.recipe)
    training = dataclasses.replace(
        chosen.training,
        precision=args.precision or chosen.training.precision,
        train_iters=args.steps,
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(chosen.model, data=args.data),
        extra=(*chosen.training.extra, *(["--deterministic-mode"] if args.deterministic else [])),
    )
    chosen = dataclasses.replace(chosen, training=training)
    rows: list[dict[str, Any]] = []
    first, *others = (_train(door, number, chosen, args) for number, door in enumerate(args.doors))
    differences = [worst_difference(first.losses, found.losses, relative=True) for found in (first, *others)]
    same_door = [worst for door, worst in zip(args.doors, differences, strict=True) if door == args.doors[0]]
    tolerance = 0.0 if args.deterministic else max(1e-5, 1.5 * max(same_door))
    if not math.isfinite(tolerance):
        sys.exit(f"door {args.doors[0]} reached a loss that is no number; see its log beside {args.output}")
    for door, found, worst in zip(args.doors, (first, *others), differences, strict=True):
        rows.append(_row(door, chosen, args, found, worst) | {"tolerance": f"{tolerance:.1e}"})
        rows[-1]["of_first"] = f"{rows[-1]['tokens_per_s'] / rows[0]['tokens_per_s']:.3f}"
        print("  ".join(f"{name} {rows[-1][name]}" for name in COLUMNS[7:15]), f" <- {door}", flush=True)
    table.append(*rows)
    return int(any(found.parameters != first.parameters for found in others) or max(differences) > tolerance)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="nam56r_quarter_pretrain_1gpu_h200_bf16")
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=[DOORS[0], *DOORS])
    parser.add_argument("--precision", choices=tuple(PLANS), help="default: the recipe's")
    parser.add_argument("--deterministic", action="store_true", help="train in Megatron's deterministic mode")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/doors.csv"))
    args = parser.parse_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(
            f"--warmup is {args.warmup}; expected 0 to {args.steps - 1}, to leave some of --steps {args.steps}"
        )
    own = recipe(args.recipe).training.precision
    told = {None, own} | ({"fp32"} if own == "bf16" else set())
    if "bridge" in args.doors and args.precision not in told:
        parser.error(
            f"--precision is {args.precision}, which the Bridge recipe {args.recipe} is not told; expected {own}: name a "
            "recipe of that precision, or leave the door out"
        )
    if args.doors.count(args.doors[0]) < 2:
        parser.error(f"--doors is {' '.join(args.doors)}; expected {args.doors[0]} twice, to know what noise explains")
    return args


def _train(door: str, number: int, chosen: Recipe, args: argparse.Namespace) -> Trained:
    """Train in a process of its own and read its log; exits when it fails or its log lacks something."""
    log, record = (args.output.parent / f"{args.recipe}_{number}_{door}.{kind}" for kind in ("log", "steps"))
    log.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    environment = os.environ | (DETERMINISTIC if args.deterministic else {})
    command = _command(door, chosen, args, record)
    with log.open("w") as sink:
        done = subprocess.run(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(errors="replace")
    milliseconds, counts = [float(one) for one in _STEP.findall(text)], _PARAMETERS.findall(text)
    if done.returncode or len(milliseconds) != args.steps or not counts:
        print(text[-6000:])
        sys.exit(
            f"door {door} ended with status {done.returncode}, after {len(milliseconds)} of {args.steps} steps; see {log}"
        )
    losses = [step.losses["lm loss"] for step in read_steps(record)]  # unrounded, which those of the log are not
    return Trained(int(counts[0].replace(",", "")), losses, milliseconds)


def _command(door: str, chosen: Recipe, args: argparse.Namespace, record: Path) -> list[str]:
    python, training = [sys.executable, "-W", "ignore", "-m"], chosen.training
    if door == "bridge":
        overrides = [f"train.train_iters={args.steps}", f"dataset.data_path={args.data}"]
        if training.precision == "fp32":
            overrides += ["mixed_precision=null", "optimizer.bf16=false", "ddp.grad_reduce_in_fp32=false"]
        if args.deterministic:
            overrides += ["model.deterministic_mode=true"]
        runner = [*python, "megacpp_mcore.nemo_recipes.run", "--recipe", chosen.name]
        return [*runner, "--record-steps", str(record), *overrides]
    words = lower(chosen.model, chosen.layout, training, HYBRID if door == "hybrid" else GPT)
    return [
        *python,
        "megacpp_mcore",
        "launch",
        "--device",
        training.device,
        "--record-steps",
        str(record),
        "--",
        *words,
    ]


def _row(door: str, chosen: Recipe, args: argparse.Namespace, found: Trained, worst: float) -> dict[str, Any]:
    median = statistics.median(found.milliseconds[args.warmup :])
    return {
        "door": door,
        "recipe": chosen.name,
        "precision": chosen.training.precision,
        "deterministic": "yes" if args.deterministic else "no",
        "device": device_name(chosen.training.device),
        "steps": args.steps,
        "warmup_left_out": args.warmup,
        "parameters": found.parameters,
        "first_loss": f"{found.losses[0]:.6f}",
        "last_loss": f"{found.losses[-1]:.6f}",
        "worst_difference": f"{worst:.1e}",
        "median_step_ms": f"{median:.1f}",
        "tokens_per_s": round(chosen.training.global_batch_size * chosen.model.seq_length / median * 1000),
        **versions("transformer-engine", "megatron-bridge"),
    }


if __name__ == "__main__":
    sys.exit(main())
