"""Counts what documents cost the host: synchronisations, kernel launches and time of a step, plain, packed and masked.

    python benchmarks/documents.py --device cuda                           # nam56r_quarter, one micro-batch a step
    python benchmarks/documents.py --model nam56r_tiny --device cpu --impl local --precision fp32 --steps 8
    PYTHONPATH=/path/to/another/commit python benchmarks/documents.py --label before    # the same of that commit

Each row is a run of its own through ``megacpp-mcore launch``. Multi-token prediction does not read a mask, so that ``masked``
trains without it; ``plain-trunk`` and ``packed-trunk`` do, too, for comparison. After ``--warmup`` steps one step runs under
``torch.cuda.set_sync_debug_mode("warn")``, whose warnings are counted and listed by the line of Python that they name; one
under ``torch.profiler``, whose launches of kernels are counted; the rest are timed, each between two synchronisations. On a
CPU there are no synchronisations or launches to count; operators are.

Rows are appended to ``--output`` as CSV; the places go to a JSON file beside it. Only public parts of the package are used,
so that the script can measure the commits before it.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKED = ("--dataloader-inter-document-masking", "--eod-mask-loss")
MASKED = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
CASES: dict[str, tuple[tuple[str, ...], bool]] = {
    "plain": ((), True),
    "packed": (PACKED, True),
    "plain-trunk": ((), False),
    "packed-trunk": (PACKED, False),
    "masked": (MASKED, False),
}
"""The words of each case, and whether it predicts several tokens."""

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")
COLUMNS = ("label", "case", "model", "device", "synchronisations", "launches", "copies", "operators", "step_ms", "steps",
           "peak_mib", "first_loss", "last_loss", "torch", "megatron-core")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; returns the status of the first that fails."""
    args = arguments(argv)
    if args.inside is not None:
        return train(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    is_new = not args.output.exists()
    with args.output.open("a", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        if is_new:
            rows.writeheader()
        for case in args.case:
            found = measure(args, case)
            if found is None:
                return 1
            (args.output.parent / f"{args.label}-{case}-syncs.json").write_text(
                json.dumps(found.pop("places"), indent=1)
            )
            rows.writerow(found)
            file.flush()
            print("\n".join(f"{key:>18}  {value}" for key, value in found.items()), flush=True)
    return 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", default="nam56r_quarter")
    parser.add_argument("--label", default="here", help="what the rows are of: a commit, say")
    parser.add_argument("--data", help="prefix of an indexed dataset; without it Megatron's mock documents")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--impl", choices=("transformer_engine", "local"), default="transformer_engine")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--output", type=Path, default=Path("documents.csv"))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not 0 < args.warmup <= args.steps - 3:
        parser.error(
            f"--warmup is {args.warmup}; expected 1 to {args.steps - 3}: three of --steps {args.steps} are measured"
        )
    return args


def measure(args: argparse.Namespace, case: str) -> dict[str, Any] | None:
    """Train ``case`` in a process of its own; its figures, or None, and its log's end on the screen, when it fails."""
    from megacpp_mcore.lowering import Training, lower
    from megacpp_mcore.model import Layout, preset, with_overrides
    from megacpp_mcore.recipe_command import tokenizer_words

    extra, predicts = CASES[case]
    overrides: dict[str, Any] = {} if predicts else {"mtp": {"depth": 0}}
    model = with_overrides(preset(args.model), overrides)
    training = Training(
        device=args.device,
        precision=args.precision,
        transformer_impl=args.impl,
        data=("--data-path", args.data, "--split", "100,0,0") if args.data else ("--mock-data",),
        tokenizer=tokenizer_words(model, **({"data": args.data} if args.data else {})),
        micro_batch_size=1,
        global_batch_size=1,
        train_iters=args.steps,
        extra=extra,
    )
    with tempfile.TemporaryDirectory() as folder:
        found, settings, log = (Path(folder, name) for name in ("found.json", "megacpp.json", "log"))
        settings.write_text(json.dumps({"model": args.model, "overrides": overrides}))  # JSON is YAML
        command = [sys.executable, __file__, "--inside", str(found), "--device", args.device]
        command += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--", *lower(model, Layout(), training)]
        environment = os.environ | {"MEGACPP_CONFIG": str(settings), "PYTHONWARNINGS": "ignore"}
        with log.open("w") as sink:
            done = subprocess.run(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, timeout=args.timeout, check=False
            )
        if done.returncode or not found.exists():
            print(f"{case} ended with status {done.returncode}:\n{log.read_text(errors='replace')[-6000:]}")
            return None
        return {"label": args.label, "case": case, "model": args.model, **json.loads(found.read_text())}


def train(args: argparse.Namespace) -> int:
    """In the process of one case: train with a probe around each step, and write what it found."""
    from megacpp_mcore import cli

    probe = Probe(args.device, args.warmup)
    sys.meta_path.insert(0, probe)
    status = cli.main(["launch", "--device", args.device, "--no-observe", "--", *args.words])
    if not status:
        args.inside.write_text(json.dumps(probe.found()))
    return int(status or 0)


class Probe:
    """Wraps Megatron's ``train_step`` when its module is imported, and measures some steps."""

    module = "megatron.training.training"

    def __init__(self, device: str, warmup: int) -> None:
        self.device, self.warmup, self.step = device, warmup, 0
        self.places: collections.Counter[str] = collections.Counter()
        self.events: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find the module, and wrap its function once it has run."""
        if name != self.module:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.train_step = self.around(module.train_step)

        spec.loader.exec_module = exec_module
        return spec

    def around(self, train_step: Any) -> Any:
        """``train_step`` as this step is to be measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.step += 1
            how = {self.warmup + 1: self.synchronisations, self.warmup + 2: self.profile}.get(self.step)
            if how is None:
                how = self.time if self.step > self.warmup + 2 else lambda call: call()
            result = how(lambda: train_step(*args, **kwargs))
            self.losses.append(float(result[0]["lm loss"]))
            return result

        return measured

    def synchronise(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def synchronisations(self, call: Any) -> Any:
        """A step whose synchronisations are counted by place."""
        import torch

        if self.device != "cuda":
            return call()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for each in found:
            if "synchroniz" in str(each.message):
                self.places[f"{each.filename.partition('site-packages/')[2] or each.filename}:{each.lineno}"] += 1
        return result

    def profile(self, call: Any) -> Any:
        """A step whose launches and operators are counted."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            result = call()
            self.synchronise()
        for event in profiler.events():
            if event.name.startswith(("cuda", "cuLaunch", "aten::")):
                self.events[event.name] += 1
        return result

    def time(self, call: Any) -> Any:
        """A step that is timed."""
        self.synchronise()
        start = time.perf_counter()
        result = call()
        self.synchronise()
        self.seconds.append(time.perf_counter() - start)
        return result

    def found(self) -> dict[str, Any]:
        """The figures of the run."""
        import megatron.core
        import torch

        is_cuda = self.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "synchronisations": sum(self.places.values()) if is_cuda else None,
            "launches": sum(self.events[name] for name in LAUNCHES) if is_cuda else None,
            "copies": self.events["cudaMemcpyAsync"] if is_cuda else None,
            "operators": sum(count for name, count in self.events.items() if name.startswith("aten::")),
            "step_ms": round(statistics.median(self.seconds) * 1e3, 1),
            "steps": len(self.seconds),
            "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if is_cuda else None,
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
            "places": dict(self.places.most_common()),
        }


if __name__ == "__main__":
    sys.exit(main())
