"""One model in several parallel layouts on GPUs: every step's losses against those of one GPU, from one checkpoint.

    python -m benchmarks.layouts --layouts ep2 pp2              # two GPUs
    python -m benchmarks.layouts --layouts tp2_sp_ep2_regional  # four

``nam56r_tiny`` with a schedule that every layout can hold, float32, Megatron's own layers, real text. Each layout trains what
:func:`megacpp_mcore.lowering.lower` gives and ``recipe emit`` prints, in processes that torchrun starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import Table, device_name, versions
from megacpp_mcore import config
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.observe.steps import Step, read_steps
from megacpp_mcore.recipe_command import tokenizer_words

OVERRIDES: Mapping[str, Any] = {"dsa": {"schedule": "-FF"}}
"""Every stage of two begins with a layer of its own indices."""


@dataclass(frozen=True)
class Case:
    """A layout, its processes, and further keys of the file that MEGACPP_CONFIG names."""

    layout: Layout
    processes: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "one": Case(Layout(), 1),
    "ep2": Case(Layout(expert=2), 2),
    "pp2": Case(Layout(pipeline=2), 2),
    "tp2_sp_ep2_regional": Case(Layout(tensor=2, sequence_parallel=True, expert=2), 4, {"compile": "regional"}),
}
COLUMNS = (
    "layout", "processes", "compile", "device", "steps", "first_loss", "last_loss", "worst_lm_loss", "worst_mtp_loss",
    "worst_grad_norm", "torch", "megatron-core", "commit",
)  # fmt: skip


def main() -> int:
    """Train one GPU and then every layout; 1 when a loss is further off than ``--tolerance``."""
    args = _arguments()
    table = Table(args.output, COLUMNS)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train("one", args, folder / "start", "--save", str(folder / "saved"), "--save-interval", "1", steps=1)
        load = ("--load", str(folder / "saved"), "--finetune")
        expected = _train("one", args, folder / "one", *load)
        for case in args.layouts:
            found = _train(case, args, folder / case, *load)
            rows.append(_row(case, args, expected, found))
            print("  ".join(f"{key} {rows[-1][key]}" for key in COLUMNS[:10]), flush=True)
    table.append(*rows)
    return int(any(float(row[key]) > args.tolerance for row in rows for key in ("worst_lm_loss", "worst_mtp_loss")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layouts", nargs="+", choices=[name for name in CASES if name != "one"], required=True)
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference of a step's loss")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/layouts.csv"))
    return parser.parse_args()


def _train(name: str, args: argparse.Namespace, record: Path, *extra: str, steps: int | None = None) -> list[Step]:
    """Train one layout and read its recorded steps; exits with its log when it fails."""
    case, model = CASES[name], with_overrides(preset("nam56r_tiny"), OVERRIDES)
    training = Training(
        device=args.device,
        precision="fp32",
        transformer_impl="local",
        micro_batch_size=1,
        global_batch_size=8,
        train_iters=steps or args.steps,
        learning_rate=args.lr,
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, data=args.data),
        extra=("--ckpt-format", "torch_dist", *extra),
    )
    words = lower(model, case.layout, training)
    settings = record.with_suffix(".yaml")
    settings.write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": dict(OVERRIDES), **case.settings}))
    python = [sys.executable, "-W", "ignore", "-m"]
    start = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes), "-m"]
    done = subprocess.run(
        [*start, "megacpp_mcore", "launch", "--device", args.device, "--record-steps", str(record), "--", *words],
        env=os.environ | {config.VARIABLE: str(settings), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = args.output.parent / f"layout_{record.name}.log"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    return read_steps(record)


def _row(name: str, args: argparse.Namespace, expected: list[Step], found: list[Step]) -> dict[str, Any]:
    def worst(key: str) -> str:
        pairs = zip((step.values()[key] for step in expected), (step.values()[key] for step in found), strict=True)
        return f"{max(abs(one - other) / abs(one) for one, other in pairs):.1e}"

    case = CASES[name]
    return {
        "layout": name,
        "processes": case.processes,
        "compile": case.settings.get("compile", "off"),
        "device": device_name(args.device),
        "steps": len(found),
        "first_loss": f"{found[0].losses['lm loss']:.6f}",
        "last_loss": f"{found[-1].losses['lm loss']:.6f}",
        "worst_lm_loss": worst("lm loss"),
        "worst_mtp_loss": worst("mtp_1 loss"),
        "worst_grad_norm": worst("grad norm"),
        **versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
