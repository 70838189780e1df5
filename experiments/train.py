"""Trains the arms of an experiment in parallel, and writes one row per run from its receipt and step records.

    python -m experiments.train experiments/distill.yaml --data CORPUS/stdlib_train --gpus 4 --per-gpu 2

The file names the model, what all arms share (``overrides``, ``training``, ``words``) and the ``arms``. An arm changes the
definition (``overrides``), the rest of the settings file (``settings``), the layout (``layout``) or the training
(``training``, whose ``processes`` is its number of GPUs), or adds stock words (``words``, where ``{folder}`` is that of all
runs); ``model_class: gpt`` trains GPTModel, ``via: bridge`` its recipe (``recipe``) in Megatron-Bridge, ``via: stock`` a
model of Megatron's own, which ``words`` describe. Arms of one seed see the same data and random draws; a seed that is named
twice trains every arm twice. ``--rates`` trains every arm with each of these learning rates. ``apart`` is the largest
difference in a step's loss from the first run of the same arm and seed, or, for that run itself, from the first arm with as
many steps. Column ``probe`` has the memory that was reserved, and estimated for an H200; of profiled steps, milliseconds by
family and exposed communication by kind; and with ``probe: layers`` every layer's gradient norm and the load of its experts.
``--heldout`` is another dataset, on whose whole batches each run is evaluated at its end; ``--curves`` writes the main loss by
tokens and seconds (:mod:`experiments.curves` plots it), ``--receipts`` each run's receipt, one per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments import probe
from megacpp_mcore.arguments.lowering import lower, model_flags
from megacpp_mcore.arguments.read import read
from megacpp_mcore.bench.csv_table import Table
from megacpp_mcore.bench.measure import device_name, versions
from megacpp_mcore.commands.recipe import H200_GB
from megacpp_mcore.data.manifest import load_manifest
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, Model, memory, preset, with_overrides
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import DEFAULT_MODEL_CLASS, Training
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.events import Step
from megacpp_mcore.observe.profile import table as profiles
from megacpp_mcore.observe.receipts.fields import RESIDENT
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.settings import load as load_settings
from megacpp_mcore.util import flags
from megacpp_mcore.util.nearest import nearest

PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")
COLUMNS = (
    "experiment", "arm", "seed", "model", "device", "steps", "window", "first_loss", "losses", "grad_norm", "apart", "step_ms",
    "tokens_per_s", "mfu", "peak_bytes", "disqualified", "probe", *PACKAGES, "commit",
)  # fmt: skip

CURVE = ("experiment", "arm", "seed", "step", "tokens", "seconds", "loss", "commit")
OF_GPUS = ("--moe-permute-fusion", "--moe-grouped-gemm")
"""Stock flags of GPU-only kernels; without them a CPU computes the same."""
EACH = 10
"""Steps averaged into one point of a curve."""
HELDOUT = re.compile(r"validation loss at iteration \d+ on validation set \| lm loss value: (\S+)")

Slots = queue.SimpleQueue[str]


@dataclass
class Arm:
    """One arm: its part of the file, merged over the shared one."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[Any] = ()
    model_class: str = DEFAULT_MODEL_CLASS
    via: str = "launch"
    recipe: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Train every arm with every seed; return 1 if a run fails, after printing the path of its log."""
    args = _arguments(argv)
    content = yaml.safe_load(args.file.read_text(encoding="utf-8"))
    allowed_keys = ("model", "overrides", "training", "settings", "words", "probe", "arms")
    for key in content:
        if key not in allowed_keys:
            sys.exit(f"{args.file}: unknown key {key!r}; {nearest(key, allowed_keys)}")
    selected = args.arms or content["arms"]
    for name in selected:
        if name not in content["arms"]:
            sys.exit(f"{args.file} has no arm {name!r}; {nearest(name, content['arms'])}")
    arms = [_arm(content, name, part or {}) for name, part in content["arms"].items() if name in selected]
    for option in ("rates", "heldout"):
        if getattr(args, option) and any(arm.via == "bridge" for arm in arms):
            sys.exit(f"--{option} applies only to runs by megacpp-mcore launch; leave out --arms with via: bridge")
    if args.rates:
        arms = [_with_rate(arm, rate) for arm in arms for rate in args.rates]
    gpus_per_run = [arm.training.get("processes", args.nproc) for arm in arms] if args.device == "cuda" else [1]
    if max(gpus_per_run) > args.gpus or (max(gpus_per_run) > 1 and args.per_gpu > 1):
        sys.exit(f"an arm takes {max(gpus_per_run)} GPUs; expected as many --gpus and one --per-gpu, or other --arms")
    table, curves, slots = Table(args.output, COLUMNS), args.curves and Table(args.curves, CURVE), Slots()
    for number in range(args.per_gpu * args.gpus):
        slots.put(str(number % args.gpus))
    jobs = [(arm, seed) for seed in args.seeds for arm in arms]
    # GPUs are taken in order: later runs cannot overtake one that waits for several.
    turns = [threading.Event() for _ in range(len(jobs) + 1)]
    turns[0].set()
    failures: list[str] = []
    first: dict[tuple[str | int, int], Sequence[Step]] = {}
    with ThreadPoolExecutor(slots.qsize() // min(gpus_per_run)) as pool:
        running = {pool.submit(_on_gpus, content, job, number, args, slots, turns): job for number, job in enumerate(jobs)}
        for future in as_completed(running):
            (arm, seed), (folder, status, expected) = running[future], future.result()
            steps = read_steps(folder / "run") if (folder / "run").exists() else []
            if status or len(steps) != expected:
                after = f"ended with status {status} after {len(steps)} of {expected} steps"
                failures.append(f"{arm.name}, seed {seed}: {after}; see {folder / 'log'}")
                print(failures[-1], flush=True)
                continue
            reference = first.get((arm.name, seed)) or first.setdefault((expected, seed), steps)
            first.setdefault((arm.name, seed), steps)
            model = "stock" if arm.via == "stock" else content["model"]
            row = _row(args, model, (arm, seed), folder, steps, reference)
            table.append(row)
            for point in _curve(steps) if curves else ():
                curves.append({name: row[name] for name in (*CURVE[:3], "commit")} | point)
            if args.receipts:
                line = {"arm": arm.name, "seed": seed, "receipt": receipts.read(folder / "run")}
                with args.receipts.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
            print("  ".join(f"{name} {row[name]}" for name in COLUMNS[1:17] if row[name] != ""), flush=True)
    return int(bool(failures))


def _arm(content: Mapping[str, Any], name: str, part: Mapping[str, Any]) -> Arm:
    both = {key: {**content.get(key, {}), **part.get(key, {})} for key in ("overrides", "training", "settings")}
    words = [*content.get("words", []), *part.get("words", [])]
    fields = [f.name for f in dataclasses.fields(Arm)]
    for key in part:
        if key not in fields:
            sys.exit(f"arms.{name}: unknown key {key!r}; {nearest(key, fields)}")
    return Arm(**{**part, **both, "name": name, "words": words})


def _with_rate(arm: Arm, rate: float) -> Arm:
    training = {**arm.training, "learning_rate": rate}
    return dataclasses.replace(arm, name=f"{arm.name} at {rate:g}", training=training)


def _on_gpus(
    content: Mapping[str, Any], job: tuple[Arm, int], number: int, args: argparse.Namespace, slots: Slots,
    turns: Sequence[threading.Event],
) -> tuple[Path, int, int]:  # fmt: skip
    """Run :func:`_train` on as many GPUs as the arm needs, in the order of the jobs."""
    turns[number].wait()
    count = job[0].training.get("processes", args.nproc) if args.device == "cuda" else 1
    taken = [slots.get() for _ in range(count)]
    turns[number + 1].set()
    try:
        return _train(content, job, number, args, taken)
    finally:
        for slot in taken:
            slots.put(slot)


def _train(
    content: Mapping[str, Any], job: tuple[Arm, int], number: int, args: argparse.Namespace, gpus: Sequence[str]
) -> tuple[Path, int, int]:
    """Train one arm in its own process; return its folder, its exit status, and the expected number of steps."""
    arm, seed = job
    folder: Path = args.folder / f"{number:02}_{arm.name.replace(' ', '_')}_{seed}"
    folder.mkdir(parents=True)
    model = with_overrides(preset(content["model"]), arm.overrides)
    options: dict[str, Any] = {"device": args.device, "seed": seed, "processes": args.nproc, **arm.training}
    if args.device == "cpu":
        options |= {"precision": "fp32", "transformer_impl": "local"}
    if args.steps:
        options["train_iters"] = args.steps
    extra = tuple(str(word).format(folder=args.folder.resolve()) for word in arm.words)
    if args.device == "cpu" and arm.via == "stock":
        extra = (*(word for word in extra if word not in OF_GPUS), "--no-rope-fusion")
    extra += tuple(_evaluated(args.heldout, model, options))
    data = ("--data-path", args.data, "--split", "100,0,0")
    training = Training(
        data=("--train-data-path", args.data, "--valid-data-path", args.heldout) if args.heldout else data,
        tokenizer=tokenizer_words(model, data=args.data),
        extra=() if arm.via == "stock" else extra,
        **options,
    )
    settings = {"model": content["model"], "overrides": dict(arm.overrides), **arm.settings}
    (folder / "megacpp.json").write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-W", "ignore", "-m"]
    observe = ["--observe", str(folder / "run")]
    if arm.via == "bridge":
        changes = [f"train.train_iters={training.train_iters}", f"dataset.data_path={args.data}"]
        command += ["megacpp_mcore.nemo_recipes.run", "--recipe", arm.recipe, *observe, *changes]
    else:
        command += ["experiments.probe", str(folder)] if "probe" in content else ["megacpp_mcore"]
        command += ["launch", "--verbose", "--device", args.device, "--nproc", str(training.processes), *observe]
        words = lower(Run(model, Layout(**arm.layout), training, arm.model_class))
        command += ["--", *(of_stock(words, model, extra) if arm.via == "stock" else words)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if arm.via != "stock":
        if arm.via != "bridge":
            (folder / "arguments.json").write_text(json.dumps(words))
        environment["MEGACPP_CONFIG"] = str(folder / "megacpp.json")
    if args.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[int(gpu)] if visible else gpu for gpu in gpus)
    with (folder / "log").open("w") as sink:
        process = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False, env=environment)
    return folder, process.returncode, training.train_iters


def _evaluated(heldout: str, model: Model, options: Mapping[str, Any]) -> list[str]:
    """Return the flags that evaluate a run, once, on all full batches of ``heldout``."""
    if not heldout:
        return []
    tokens, batch = load_manifest(heldout).tokens, options["global_batch_size"] * model.seq_length
    if tokens <= batch:
        sys.exit(f"{heldout} has {tokens} tokens; expected more than a global batch, {batch}")
    # An interval of all steps would evaluate twice, on two epochs' documents mixed.
    return ["--eval-iters", str((tokens - 1) // batch), "--eval-interval", str(options["train_iters"] + 1)]


def _curve(steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Yield points of the main loss, each the mean of :data:`EACH` steps; seconds count from the end of the first step."""
    for part in itertools.batched(steps, EACH):
        loss = statistics.fmean(step.losses["lm loss"] for step in part)
        yield {
            "step": part[-1].step,
            "tokens": part[-1].tokens,
            "seconds": f"{part[-1].time_s - steps[0].time_s:.1f}",
            "loss": f"{loss:.5f}",
        }


def of_stock(words: Sequence[str], model: Model, own: Sequence[str]) -> list[str]:
    """Return ``words`` with the model's flags replaced by ``own``; samples keep their length."""
    of_model = model_flags(model) - {"--seq-length", "--max-position-embeddings"}
    groups = ((flag, *values) for flag, values in flags.read(words).items() if flag not in of_model)
    return [word for group in groups for word in group] + list(own)


def _row(
    args: argparse.Namespace,
    model: str,
    job: tuple[Arm, int],
    folder: Path,
    steps: Sequence[Step],
    first: Sequence[Step],
) -> dict[str, Any]:
    arm, seed = job
    receipt = receipts.read(folder / "run")
    last = steps[-args.window :]
    losses = {name: statistics.fmean(step.losses[name] for step in last) for name in steps[-1].losses}
    if args.heldout:
        losses["heldout"] = float(HELDOUT.findall((folder / "log").read_text(errors="replace"))[-1])
    apart = max(abs(a.losses["lm loss"] - b.losses["lm loss"]) for a, b in zip(first, steps, strict=True))
    throughput, milliseconds = receipt["throughput"] or {}, (receipt["step_time"] or {}).get("p50_s")
    return {
        "experiment": args.file.stem,
        "arm": arm.name,
        "seed": seed,
        "model": model,
        "device": device_name(args.device),
        "steps": len(steps),
        "window": args.window,
        "first_loss": f"{steps[0].losses['lm loss']:.6f}",
        "losses": " ".join(f"{name.replace(' ', '_')}:{value:.6g}" for name, value in losses.items()),
        "grad_norm": f"{statistics.fmean(step.grad_norm or 0.0 for step in last):.4g}",
        "apart": f"{apart:.3g}",
        "step_ms": "" if milliseconds is None else f"{milliseconds * 1e3:.1f}",
        "tokens_per_s": round(throughput.get("tokens_per_s") or 0) or "",
        "mfu": "" if throughput.get("mfu") is None else f"{throughput['mfu']:.4f}",
        "peak_bytes": (receipt["memory"] or {}).get("allocated_peak_bytes") or "",
        "disqualified": " ".join(disqualifier["name"] for disqualifier in receipt["disqualifiers"]),
        "probe": " ".join(filter(None, (probe.summary(folder), _memory(folder, receipt), _profiled(folder)))),
        **versions(*PACKAGES[2:]),
        # A checkout's, if the run had one.
        **{name: version for name, version in receipt["versions"].items() if name in PACKAGES},
    }


def _memory(folder: Path, receipt: Mapping[str, Any]) -> str:
    """Return the memory a rank's allocator reserved, and the estimate for an H200; nothing on a CPU."""
    usage, words = receipt["memory"] or {}, folder / "arguments.json"
    if usage.get("kind") in (None, RESIDENT) or not words.exists():
        return ""
    processes, settings = receipt["parallelism"]["world_size"], load_settings(folder / "megacpp.json")
    run = read(json.loads(words.read_text()), device="cuda", processes=processes, settings=settings)
    estimated = memory.estimate(run, round(H200_GB * 1e9))
    sizes = {"reserved_gb": usage["reserved_peak_bytes"], "estimated_gb": estimated}
    return " ".join(f"{name}:{size / 1e9:.1f}" for name, size in sizes.items() if size is not None)


def _profiled(folder: Path) -> str:
    """Return milliseconds per step of a profiled run, the maximum over ranks.

    They are the device time of each family, and the exposed time of each collective.
    """
    milliseconds: dict[str, float] = {}
    for file in (folder / "run" / profiles.FOLDER).glob("**/table.json"):
        table = profiles.read(file)
        first, last = table["steps"]
        spent = {f"{name}_ms": entry["total_ns"] for name, entry in table["families"].items()}
        spent |= {f"{name}_exposed_ms": entry["exposed_ns"] for name, entry in table["collectives"].items()}
        for name, nanoseconds in spent.items():
            milliseconds[name] = max(milliseconds.get(name, 0.0), nanoseconds / 1e6 / (last - first + 1))
    return " ".join(f"{name}:{ms:.1f}" for name, ms in sorted(milliseconds.items()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="the experiment")
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--heldout", default="", help="another prefix, to evaluate on at the end")
    parser.add_argument("--curves", type=Path, help="a table of the main loss of every run")
    parser.add_argument("--receipts", type=Path, help="a file of the receipts of every run, as JSON lines")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234])
    parser.add_argument("--steps", type=int, help="instead of the file's")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates, instead of the file's")
    parser.add_argument("--window", type=flags.positive, default=20, help="last steps to average a loss over")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=flags.positive, help="GPUs of this machine to use (default: --nproc)")
    parser.add_argument("--per-gpu", type=flags.positive, default=1, help="parallel runs on each, or on the CPU")
    parser.add_argument("--nproc", type=flags.positive, default=1, help="processes of a run that does not set them")
    parser.add_argument("--folder", type=Path, default=Path("build/experiment"), help="for the runs' files")
    parser.add_argument("--output", type=Path, default=Path("build/experiment.csv"))
    args = parser.parse_args(argv)
    args.gpus = (args.nproc if args.device == "cuda" else 1) if args.gpus is None else args.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if args.device == "cuda" and visible is not None and len(visible.split(",")) < args.gpus:
        parser.error(f"--gpus is {args.gpus}; expected at most those of CUDA_VISIBLE_DEVICES={visible}")
    if args.folder.exists():
        parser.error(f"--folder {args.folder} exists; expected a new one: name another, or remove it")
    return args


if __name__ == "__main__":
    sys.exit(main())
