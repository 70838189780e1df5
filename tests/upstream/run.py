"""Run Megatron's own unit tests without patches, with each patch and with all; list the tests lost and gained.

``make test-upstream`` on a host with GPUs, ``MEGATRON_LM`` naming a checkout of core_v0.19.0. An arm is one torchrun; a test
passes if it does on every rank. Stock runs three times: what passes in some only is unsteady, neither lost nor gained. What an
arm does not reach is lost. Exit status 1: a test is lost, or an arm did not end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from megacpp_mcore.patches.machinery.registry import default
from megacpp_mcore.util import host, te_imports

ROOT = Path(__file__).parents[2]
TESTS = "tests/unit_tests"
FILES = (
    "test_num_floating_point_operations.py",
    "transformer/test_multi_latent_attention.py",
    "transformer/test_multi_token_prediction.py",
    "transformer/test_spec_customization.py",
    "transformer/test_spec_utils.py",
    "transformer/experimental_attention_variant/test_absorbed_mla.py",
    "transformer/experimental_attention_variant/test_attention_variant_dsa.py",
    "models/test_experimental_attention_variant_module_specs.py",
    "pipeline_parallel/test_schedules.py",
    "test_checkpointing.py",
    "dist_checkpointing/test_optimizer.py",
)
STOCK = ("stock", "stock 2", "stock 3")
PATCHES = tuple(patch.name for patch in default().patches)
ARMS: dict[str, tuple[str, ...]] = dict.fromkeys(STOCK, ()) | {"all": PATCHES} | {name: (name,) for name in PATCHES}
PACKAGES = ("torch", "transformer_engine", "pytest", "pytest_mock")
COLUMNS = (
    *("gpus", "arm", "passed", "skipped", "failed", "unfinished", "lost", "gained", "unsteady", "ended", "seconds"),
    *("gpu", "torch", "transformer_engine", "megatron", "commit", "tests"),
)


WORST = ("passed", "skipped", "failed", "unfinished")


@dataclass
class Run:
    """One arm on a number of GPUs; of each test the worst outcome on any rank, and why."""

    arm: str
    gpus: int
    ended: str = ""
    seconds: float = 0.0
    tests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.tests.items() if outcome == "passed"}

    def carry_out(self, checkout: Path, files: Sequence[str], work: Path, device: str, timeout: float) -> Run:
        """Start torchrun, wait, and read what the ranks wrote; that and the log stay in a folder of ``work``."""
        records = work / f"{self.gpus}-{self.arm.replace(' ', '-')}"
        records.mkdir(parents=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.gpus)),
            *("--standalone", "--local-addr", "127.0.0.1", "-m", "pytest", "-p", "arm_plugin"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(checkout), "--confcutdir", str(checkout)),
            *("--outcomes", str(records), "--apply-patches", ",".join(ARMS[self.arm])),
            *(str(checkout / TESTS / file) for file in files),
        ]
        path = (checkout, Path(__file__).parent, ROOT, os.environ.get("PYTHONPATH"))
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="upstream-", ignore_cleanup_errors=True) as folder,
            (records / "log.txt").open("wb") as log,
        ):
            environment = (
                os.environ
                | te_imports.cudnn_home(os.environ)
                | {
                    "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
                    "CUDA_VISIBLE_DEVICES": device,
                    "TMPDIR": folder,  # Megatron's tests save below one fixed name in it
                    "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
                    "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in place of a process per core
                    "TRITON_CACHE_AUTOTUNING": "1",  # two thirds of an arm's time is the search for MLA's rope kernels
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                }
            )
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                self.ended = f"status {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                self.ended = f"timed out after {timeout:.0f} s"
                process.terminate()  # torchrun ends its workers, which are in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
                process.wait()
        self.seconds = round(time.monotonic() - began, 1)
        self.read(records)
        return self

    def read(self, records: Path) -> None:
        """Enter the outcomes; a test that a rank has not reached is unfinished."""
        files = [records / f"rank-{rank}.jsonl" for rank in range(self.gpus)]
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
        ranks = [[json.loads(line) for line in text.splitlines()] for text in texts]
        outcomes = [{event["test"]: event for event in events if "test" in event} for events in ranks]
        for test in {test: None for rank in outcomes for test in rank}:
            events = [rank.get(test, {"outcome": "unfinished"}) for rank in outcomes]
            event = max(events, key=lambda event: WORST.index(event["outcome"]))
            name = test.removeprefix(f"{TESTS}/")
            self.tests[name], self.reasons[name] = event["outcome"], event.get("reason", "")
        if problems := [f"{e['uncollected']}: {e['reason']}" for events in ranks for e in events if "uncollected" in e]:
            self.ended = f"not collected: {'; '.join(dict.fromkeys(problems))}"
        elif self.ended == "status 0" and all({"finished": [*ARMS[self.arm]]} in events for events in ranks):
            self.ended = "finished"


def compare(runs: Sequence[Run], arm: Run) -> dict[str, list[str]]:
    """The tests ``lost`` and ``gained`` by an arm against stock on as many GPUs, or the ``unsteady`` ones of stock itself."""
    stock = [run.passed for run in runs if run.gpus == arm.gpus and run.arm in STOCK]
    always, ever = set.intersection(*stock), set.union(*stock)
    if arm.arm in STOCK:
        return {"unsteady": sorted(ever - always)}
    return {"lost": sorted(always - arm.passed), "gained": sorted(arm.passed - ever)}


def write(output: Path, runs: Sequence[Run], facts: dict[str, str]) -> bool:
    """Write one row per run whose comparison with stock is complete; returns whether all ended and none lost a test."""
    complete = {gpus for gpus in {run.gpus for run in runs} if sum(r.gpus == gpus and r.arm in STOCK for r in runs) == 3}
    clean = True
    with output.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        for run in sorted(runs, key=lambda run: (run.gpus, list(ARMS).index(run.arm))):
            if run.gpus not in complete:
                continue
            found, outcomes = compare(runs, run), Counter(run.tests.values())
            clean &= run.ended == "finished" and not found.get("lost")
            rows.writerow(
                facts
                | {"gpus": run.gpus, "arm": run.arm, "ended": run.ended, "seconds": run.seconds}
                | {outcome: outcomes[outcome] for outcome in WORST}
                | {kind: len(tests) for kind, tests in found.items()}
                | {"tests": "; ".join(f"{kind} {test}" for kind, tests in found.items() for test in tests)}
            )
    return clean


def _most_jobs() -> int:
    """Arms for which there are cores and thread ids: NCCL keeps threads of every process group, and a rank makes 1,700.

    More than eight on two GPUs are slower: ranks take turns on a GPU while NCCL's kernels wait for each other.
    """
    thread_ids = int(Path("/proc/sys/kernel/pid_max").read_text())
    return max(1, min((os.cpu_count() or 1) // 4, thread_ids // 8000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="stock's three runs always run")
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 1], help="numbers of GPUs")
    parser.add_argument("--files", nargs="+", default=FILES, help=f"below {TESTS}")
    parser.add_argument("--jobs", type=int, default=_most_jobs(), help="arms at a time; more with a larger kernel.pid_max")
    parser.add_argument("--timeout", type=float, default=480, help="seconds for one arm")
    parser.add_argument("--work", type=Path, help="a new folder for logs and outcomes; by default in build/")
    parser.add_argument("--output", type=Path, help="the table; by default in that folder")
    options = parser.parse_args()
    checkout = Path(os.environ.get("MEGATRON_LM", "")).resolve()
    if lacking := [file for file in options.files if not (checkout / TESTS / file).is_file()]:
        parser.error(f"MEGATRON_LM names {checkout}, without {TESTS}/{lacking[0]}; expected a checkout of core_v0.19.0")
    if lacking := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        parser.error(f"install {', '.join(lacking)}: Megatron's tests import it")
    import torch

    if torch.cuda.device_count() < max(options.gpus):
        parser.error(f"{max(options.gpus)} GPUs are needed, {torch.cuda.device_count()} found; choose with --gpus")
    work = options.work or ROOT / "build" / time.strftime("upstream-%Y%m%d-%H%M%S")
    output = options.output or work / "upstream_tests.csv"
    work.mkdir(parents=True)
    commit = os.environ.get("MEGACPP_COMMIT") or host.own_git("rev-parse", "HEAD") or ""
    facts = {"commit": commit[:7], "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    facts["transformer_engine"] = host.version("transformer-engine") or ""
    facts["megatron"] = os.environ.get("MEGATRON_COMMIT") or host.git(checkout, "rev-parse", "--short=10", "HEAD") or ""
    arms = [Run(arm, gpus) for arm in ARMS if arm in {*STOCK, *options.arms} for gpus in options.gpus]
    devices = torch.cuda.device_count()
    done: list[Run] = []
    clean = False
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = []
        for index, run in enumerate(arms):
            device = ",".join(str((index // len(options.gpus) + one) % devices) for one in range(run.gpus))
            futures.append(pool.submit(run.carry_out, checkout, options.files, work, device, options.timeout))
        try:
            for future in as_completed(futures):
                run = future.result()
                done.append(run)
                clean = write(output, done, facts)
                print(f"{run.arm} on {run.gpus}: {len(run.passed)} passed, {run.ended}, {run.seconds} s", flush=True)
                if run.ended.startswith("not collected"):
                    return 1
        finally:
            pool.shutdown(cancel_futures=True)
    for run in done:
        for kind, tests in compare(done, run).items():
            for test in tests:
                outcome = f"{run.tests.get(test, 'not reached')} {run.reasons.get(test, '')}".strip()
                print(f"{run.arm} on {run.gpus}: {kind} {test}: {outcome}")
    print(f"{output}: {'nothing lost' if clean else 'NOT CLEAN'}")
    return not clean


if __name__ == "__main__":
    sys.exit(main())
