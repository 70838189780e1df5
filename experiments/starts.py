"""Seconds from the start of a training process to the end of its first and second step, by cache contents.

    python -m experiments.starts nam56r_pretrain_1gpu_h200_bf16 --data CORPUS/stdlib_train

All starts are recorded in one folder, so that from the second on, kernels of the earlier ones are compiled alongside
(docs/compile.md). Python's own compiled files are left where they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.bench.csv_table import Table
from megacpp_mcore.bench.measure import device_name, versions
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.observe import events, receipts
from megacpp_mcore.observe.steps import recorded
from megacpp_mcore.settings import VARIABLE

STARTS = ("first, cold", "second, cold", "kernels built, cold", "warm")
"""New caches; new caches; new caches, with kernels by ``kernels build``; the same caches again."""
STEPS = 4
MARKS = {
    "initialized_s": "after megatron is initialized",
    "built_s": "after model, optimizer, and learning rate scheduler are built",
}
"""Columns of the seconds to points of Megatron's log, by its words."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")
COLUMNS = (
    "recipe", "start", "device", "cores", *MARKS, "startup_s", "compile_s", "first_s", "second_s", "added", *PACKAGES, "commit",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Train a few steps from every start, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--folder", type=Path, default=Path("build/starts"), help="new folder of the record and the caches")
    parser.add_argument("--output", type=Path, default=Path("build/starts.csv"))
    args = parser.parse_args(argv)
    chosen, table, run = RECIPES[args.recipe], Table(args.output, COLUMNS), args.folder.resolve() / "run"
    training = dataclasses.replace(
        chosen.run.training,
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(chosen.model, data=args.data),
        train_iters=STEPS,
    )
    words = lower(dataclasses.replace(chosen.run, training=training))
    machine = ["--device", training.device, "--nproc", str(training.processes)]
    launch = ["launch", *machine, "--observe", str(run), "--", *words]
    args.folder.mkdir(parents=True)
    environment = os.environ | ({VARIABLE: str(chosen.settings)} if chosen.settings else {})
    for number, start in enumerate(STARTS):
        if start != "warm":
            caches = args.folder.resolve() / f"caches_{number}"
            names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
            environment |= {name: str(caches / part) for name, part in names.items()}
        commands = [launch]
        if start.startswith("kernels built") and training.device == "cuda":
            commands.insert(0, ["kernels", "build", str(run)])
        for command in commands:
            with (args.folder / f"log_{number}").open("a") as sink:
                program = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", *command]
                process = subprocess.run(program, stdout=sink, stderr=subprocess.STDOUT, check=False, env=environment)
            if process.returncode:
                sys.exit(f"{start}: {command[0]} ended with status {process.returncode}; see {sink.name}")
        last = recorded(events.read(run))[-1]
        ends = [place for place, span in enumerate(last.spans) if span.step is not None][:2]
        spent = {
            f"{name}_s": sum(span.total(phases) for span in last.spans[: ends[1] + 1])
            for name, phases in (("startup", ["startup"]), ("compile", ["compile", "jit"]))
        }
        spent |= {f"{name}_s": last.spans[end].at - last.began_ns for name, end in zip(("first", "second"), ends, strict=True)}
        printed = (run / "megatron_rank_00000.log").read_text(errors="replace")
        for name, mark in MARKS.items():
            moment = datetime.fromisoformat(re.findall(rf"\[{mark}\] datetime: (.*\d)", printed)[-1])
            spent[name] = int(moment.timestamp() * 1e9) - last.began_ns
        row = {"recipe": args.recipe, "start": start, "device": device_name(training.device)}
        added = receipts.read(run)["cache"]["added"] or {}
        row |= {
            "cores": len(os.sched_getaffinity(0)),
            "added": " ".join(f"{name}:{count}" for name, count in added.items()),
        }
        row |= {name: f"{nanoseconds / 1e9:.2f}" for name, nanoseconds in spent.items()} | versions(*PACKAGES)
        table.append(row)
        print("  ".join(f"{name} {row[name]}" for name in COLUMNS[1:11]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
