"""Times what regional compile, recompute and the experimental taxes cost and give: to the first step, per step, in memory.

    python -m benchmarks.regional --device cuda --impl transformer_engine                 # dense and quarter, off and regional
    python -m benchmarks.regional --lane quarter --compile off --recompute none a m experts r
    python -m benchmarks.regional --size tiny --device cpu --impl local --steps 4 --warmup 1

Each row is a training run of its own through ``megacpp-mcore launch``, with empty caches of compiled kernels unless
``--keep-caches`` names a folder. The lane ``dense`` has no E layer, so that the compile policy warms it before step 1;
``quarter`` has, and the policy skips that and says why. ``first_step_s`` runs from the start of the process to the logged end
of step 1, warm-up included. Tokens are mock data, which each row says. Losses of a lane's rows are compared with those of the
plain run before a figure is compared. That one runs twice: 1.5 times the largest difference of its two runs is what noise
explains (never less than ``--tolerance``), and a row that is further off is written with ``agrees`` no.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megacpp_mcore import config
from megacpp_mcore.bench.measure import Table, device_name, versions, worst_difference
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, Model, preset, with_overrides
from megacpp_mcore.observe.steps import Step, read_steps
from megacpp_mcore.recipe_command import tokenizer_words

LANES: dict[str, dict[str, Any]] = {
    "dense": {"pattern": "AMAMAMAMAMAMR", "depth": 13},
    "quarter": {"depth": 13},
}
"""What a lane changes in its preset: one without experts, and the first 13 layers of NAM56R."""

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("nam56r_quarter", {}),
    "tiny": ("nam56r_tiny", {"seq_length": 64, "dsa": {"topk": 8}}),
}

COLUMNS = (
    "lane", "pattern", "device", "impl", "precision", "compile", "recompute", "tax", "warm_up", "warm_up_s",
    "first_step_s", "median_step_ms", "tokens_per_s", "max_allocated_mib", "steps", "warmup_left_out", "tokens_per_step",
    "first_loss", "last_loss", "largest_loss_difference", "tolerance", "agrees", "data", "caches",
    "torch", "megatron-core", "transformer_engine_torch", "triton", "commit",
)  # fmt: skip

_MEMORY = re.compile(r"max allocated: (?P<mib>[\d.]+)")
_WARM_UP = re.compile(r"compile warm-up: (?P<what>[^\n]*)")
_SECONDS = re.compile(r": (?P<seconds>[\d.]+) s$")


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run: a lane, and what is done to its layers."""

    lane: str
    compile: str
    recompute: str
    tax: str
    again: bool = False
    """The plain run once more, for the noise."""

    @property
    def label(self) -> str:
        """The name of its files."""
        return "-".join((self.lane, self.compile, self.recompute, self.tax, *(("again",) if self.again else ())))

    def settings(self, size: str) -> dict[str, Any]:
        """The content of its ``MEGACPP_CONFIG``."""
        name, smaller = SIZES[size]
        found: dict[str, Any] = {"model": name, "overrides": {**smaller, **LANES[self.lane]}, "compile": self.compile}
        if self.recompute != "none":
            found["recompute"] = [self.recompute]
        if self.tax != "none":
            found["experimental_taxes"] = {self.tax: True}
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; returns 1 when a row's losses do not agree with the plain run of its lane."""
    args = arguments(argv)
    table = Table(args.output, COLUMNS)
    disagreeing = 0
    for lane in args.lane:
        reference: list[Step] | None = None
        tolerance = args.tolerance
        for case in cases(lane, args):
            row, steps = measure(args, case, reference)
            reference = reference or steps
            if case.again:
                tolerance = max(tolerance, 1.5 * row["largest_loss_difference"])
                if not math.isfinite(tolerance):
                    sys.exit(f"the plain run of lane {lane} reached a loss that is no number")
            row |= {"tolerance": tolerance, "agrees": "yes" if row["largest_loss_difference"] <= tolerance else "no"}
            table.append(row)
            disagreeing += row["agrees"] == "no"
            print("\n".join(f"{key:>24}  {value}" for key, value in row.items()), flush=True)
    return int(disagreeing > 0)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked before anything is trained."""
    families = [each.name for each in dataclasses.fields(config.Recompute)]
    taxes = [each.name for each in dataclasses.fields(config.ExperimentalTaxes)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lane", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--compile", nargs="+", choices=config.COMPILE_MODES, default=list(config.COMPILE_MODES))
    parser.add_argument("--recompute", nargs="+", choices=("none", *families), default=["none"])
    parser.add_argument("--tax", nargs="+", choices=("none", *taxes), default=["none"])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--impl", choices=("transformer_engine", "local"), default="transformer_engine")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="the difference of a loss that is taken for none, noise or not"
    )
    parser.add_argument(
        "--keep-caches", type=Path, help="folder of compiled kernels to start from, and to leave behind"
    )
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for one run")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/regional.csv"))
    args = parser.parse_args(argv)
    if not 0 < args.warmup < args.steps:
        parser.error(
            f"--warmup is {args.warmup}; expected 1 to {args.steps - 1}, to leave some of --steps {args.steps}"
        )
    return args


def cases(lane: str, args: argparse.Namespace) -> list[Case]:
    """The runs of a lane, the plain one first and twice."""
    asked = [Case(lane, *rest) for rest in itertools.product(args.compile, args.recompute, args.tax)]
    plain = Case(lane, "off", "none", "none")
    return [plain, dataclasses.replace(plain, again=True), *(case for case in asked if case != plain)]


def measure(args: argparse.Namespace, case: Case, reference: list[Step] | None) -> tuple[dict[str, Any], list[Step]]:
    """Train ``case``; the row of the table, and the steps it was made from. Exits with the log's end when it fails."""
    name, _ = SIZES[args.size]
    settings = case.settings(args.size)
    model = with_overrides(preset(name), settings["overrides"])
    folder = args.output.parent / "regional"
    folder.mkdir(parents=True, exist_ok=True)
    record, file, log = (folder / f"{case.label}{end}" for end in (".jsonl", ".yaml", ".log"))
    record.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as fresh:
        root = args.keep_caches.resolve() if args.keep_caches else Path(fresh)
        file.write_text(yaml.safe_dump({**settings, "speed_defaults": {"cache_root": str(root)}}))
        command = [sys.executable, "-m", "megacpp_mcore", "launch", "--device", args.device]
        command += ["--record-steps", str(record), "--", *words(args, model)]
        environment = os.environ | {config.VARIABLE: str(file)}
        start = time.time()
        with log.open("w") as sink:
            done = subprocess.run(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, timeout=args.timeout, check=False
            )
    text = log.read_text(errors="replace")
    if done.returncode:
        sys.exit(f"{case.label} ended with status {done.returncode}:\n{text[-6000:]}")
    steps = read_steps(record)
    if len(steps) != args.steps:
        sys.exit(f"{record} holds {len(steps)} steps, expected {args.steps}")
    return row(args, case, model, start, text, steps, reference), steps


def words(args: argparse.Namespace, model: Model) -> tuple[str, ...]:
    """Megatron's arguments of a run."""
    training = Training(
        device=args.device,
        precision=args.precision,
        transformer_impl=args.impl,
        data=("--mock-data",),
        tokenizer=tokenizer_words(model),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        train_iters=args.steps,
        extra=("--log-memory-interval", "1"),
    )
    return lower(model, Layout(), training)


def row(
    args: argparse.Namespace,
    case: Case,
    model: Model,
    start: float,
    text: str,
    steps: list[Step],
    reference: list[Step] | None,
) -> dict[str, Any]:
    """The figures of a run that has ended."""
    ends = [step.time_s for step in steps]
    steady = statistics.median(after - before for before, after in itertools.pairwise(ends[args.warmup - 1 :]))
    tokens = args.global_batch_size * model.seq_length
    losses = [step.losses["lm loss"] for step in steps]
    before = [step.losses["lm loss"] for step in reference] if reference is not None else losses
    largest = worst_difference(before, losses, relative=False)
    warmed = _WARM_UP.search(text)
    what = warmed["what"] if warmed else "none: nothing is compiled"
    seconds = _SECONDS.search(what)
    memory = _MEMORY.findall(text)
    found = versions("transformer_engine_torch", "triton")
    return {
        "lane": case.lane,
        "pattern": model.layers,
        "device": device_name(args.device),
        "impl": args.impl,
        "precision": args.precision,
        "compile": case.compile,
        "recompute": case.recompute,
        "tax": case.tax,
        "warm_up": what,
        "warm_up_s": seconds["seconds"] if seconds else "",
        "first_step_s": round(ends[0] - start, 2),
        "median_step_ms": round(steady * 1e3, 1),
        "tokens_per_s": round(tokens / steady),
        "max_allocated_mib": memory[-1] if memory else "",
        "steps": args.steps,
        "warmup_left_out": args.warmup,
        "tokens_per_step": tokens,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "largest_loss_difference": largest,
        "data": "mock",
        "caches": "kept" if args.keep_caches else "empty",
        **{column: found[column] for column in COLUMNS[-5:]},
    }


if __name__ == "__main__":
    sys.exit(main())
