"""Checks of one Megatron with one torch, on the CPU: a row for each part, with the command that it ran.

    PYTHON -m experiments.megatrons NAME [--checkout DIR] [--parts compat steps demo tests] [--output build/megatrons.csv]

PYTHON is the one of an environment with the Megatron to check, which NAME names in the rows: ``make venv`` prints that of the
wheel, ``python requirements/environment.py megatron DIR`` that of a checkout. ``compat`` compares sources; ``steps`` trains
nam56r_tiny on Megatron's mock data, of each class (the digest is that of every loss and gradient norm, in all digits of fp32);
``demo`` trains, kills, resumes and scores; ``tests`` is the CPU suite.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megacpp_mcore.bench.csv_table import Table
from megacpp_mcore.bench.measure import versions
from megacpp_mcore.commands import trial
from megacpp_mcore.model.training import GPT, HYBRID

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
PARTS = {
    "compat": "-m megacpp_mcore compat --json --checkout DIR",
    "steps": "-m experiments.megatrons NAME --parts steps",
    "demo": "examples/demo.py --device cpu --output FOLDER",
    "tests": "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m LANE tests --ignore=tests/gpu",
}
LANE = "not gpu and not exhaustive and not kernels"
COLUMNS = ("megatron", "megatron-core", "torch", "part", "command", "status", "found", "seconds", "commit")


def main() -> int:
    """Run the parts and write their rows; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="of the Megatron, in the rows")
    parser.add_argument("--checkout", type=Path, help="the checkout that PYTHON has; also runs the tests that need one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("build/megatrons.csv"))
    args = parser.parse_args()
    table, failed = Table(args.output, COLUMNS), 0
    spec = importlib.util.find_spec("megatron")
    installed = next((path for path in (spec and spec.submodule_search_locations) or () if Path(path, "core").is_dir()), None)
    if installed is None:
        parser.error("this Python has no megatron-core; expected an environment with the Megatron to check")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.checkout:
        os.environ["MEGATRON_LM"] = str(args.checkout.resolve())
    for part in args.parts:
        start = time.monotonic()
        results = trained() if part == "steps" else [ran(part, args.checkout or Path(installed).parent)]
        seconds = round((time.monotonic() - start) / len(results), 1)
        for status, summary in results:
            row = {"megatron": args.name, "part": part, "command": f"PYTHON {PARTS[part]}"} | versions()
            table.append(row | {"status": status, "found": summary, "seconds": seconds})
            print(f"{part}: status {status}, {summary} ({seconds} s)", flush=True)
            failed |= status != 0
    return int(failed)


def ran(part: str, megatron: Path) -> tuple[int, str]:
    """Run a part's command; return its exit status and a summary of its output."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"DIR": str(megatron), "FOLDER": folder, "LANE": LANE}
        words = [sys.executable, *(values.get(word, word) for word in PARTS[part].split())]
        proc = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    print(proc.stdout if part != "compat" else "", end="", flush=True)
    if part == "compat" and proc.stdout:
        report = json.loads(proc.stdout)
        states = [target["state"] for patch in report["patches"] for target in patch["targets"]]
        return proc.returncode, f"{report['verdict']}: {states.count('equal')} of {len(states)} targets equal"
    lines = [line for line in proc.stdout.splitlines() if part == "tests" or "bits" in line]
    return proc.returncode, lines[-1].strip("= ") if lines else "no output"


def trained() -> list[tuple[int, str]]:
    """Train each model class; return its status, with its last loss and a digest of all steps."""

    def of(model_class: str) -> tuple[int, str]:
        steps, problems = trial.train(STEPS, timeout_s=1200, model_class=model_class)
        if problems:
            return 1, f"{model_class}: {'; '.join(problems)}"
        figures = [{name: step[name] for name in sorted(step) if "loss" in name or name == "grad norm"} for step in steps]
        digest = hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:12]
        return 0, f"{model_class}: lm loss {steps[-1]['lm loss']} at step {len(steps)}, digest {digest}"

    return [of(model_class) for model_class in (GPT, HYBRID)]


if __name__ == "__main__":
    sys.exit(main())
