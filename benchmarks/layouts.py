"""One model in several parallel layouts on GPUs: every step's losses against those of one GPU, from one checkpoint.

    python -m benchmarks.layouts --layouts ep2 pp2              # two GPUs
    python -m benchmarks.layouts --layouts tp2_sp_ep2_regional  # four

``nam56r_tiny`` with a schedule that every layout can hold, float32, Megatron's own layers, real text. Each layout runs the text
that ``megacpp-mcore recipe emit --as cli`` prints for it, with the words for recording and loading added: ``pretrain_gpt.py``
of the checkout that MEGATRON_LM names, or without one the loop of the installed wheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.measure import Table, device_name, versions, worst_difference
from megacpp_mcore.launcher import CHECKOUT_VARIABLE
from megacpp_mcore.model import Layout
from megacpp_mcore.observe.steps import Step, read_steps

SCHEDULE = "dsa.schedule=-FF"
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
    "layout", "processes", "compile", "script", "device", "steps", "first_loss", "last_loss", "worst_lm_loss", "worst_mtp_loss",
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
            print("  ".join(f"{key} {rows[-1][key]}" for key in COLUMNS[:11]), flush=True)
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
    settings = record.with_suffix(".yaml")
    script = _emitted(CASES[name].layout, args, settings, steps or args.steps)
    settings.write_text(
        settings.read_text() + "".join(f"{key}: {value}\n" for key, value in CASES[name].settings.items())
    )
    script = script.replace(" launch ", f" launch --record-steps {shlex.quote(str(record))} ", 1).rstrip()
    script = f"{script} {shlex.join(('--ckpt-format', 'torch_dist', *extra))}\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = args.output.parent / f"layout_{record.name}.log"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(script + done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    return read_steps(record)


def _emitted(layout: Layout, args: argparse.Namespace, settings: Path, steps: int) -> str:
    """What ``recipe emit`` prints for ``layout``; it writes the changed model to ``settings``."""
    cut = ["--tensor", layout.tensor, "--pipeline", layout.pipeline, "--expert", layout.expert]
    cut += ["--sequence-parallel"] if layout.sequence_parallel else []
    run = ["precision=fp32", "global_batch_size=8", f"train_iters={steps}", f"learning_rate={args.lr}"]
    words = ["--as", "cli", "--via", _way(), "--device", args.device, "--impl", "local", "--data", args.data, *cut]
    command = ["recipe", "emit", "nam56r_tiny", *words, "--set", SCHEDULE, *run, "--settings", settings]
    emit = [sys.executable, "-m", "megacpp_mcore", *map(str, command)]
    return subprocess.run(emit, stdout=subprocess.PIPE, text=True, check=True).stdout


def _way() -> str:
    return "launch" if os.environ.get(CHECKOUT_VARIABLE) else "wheel"


def _row(name: str, args: argparse.Namespace, expected: list[Step], found: list[Step]) -> dict[str, Any]:
    def worst(key: str) -> str:
        one, other = ([step.values()[key] for step in steps] for steps in (expected, found))
        return f"{worst_difference(one, other, relative=True):.1e}"

    case = CASES[name]
    return {
        "layout": name,
        "processes": case.processes,
        "compile": case.settings.get("compile", "off"),
        "script": "pretrain_gpt.py" if _way() == "launch" else "the wheel's loop",
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
