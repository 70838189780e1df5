"""What every benchmark needs: one process's groups, times, peak memory, versions, and the table of results."""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore.errors import BenchmarkError

CPU_FACTS = Path("/proc/cpuinfo")
"""Where Linux says which processor this is; :func:`platform.processor` is empty there."""

FEWEST = 3
"""Calls that are timed whatever they take: a median of less says nothing."""


@contextlib.contextmanager
def one_process(device: str) -> Iterator[None]:
    """Megatron's process groups for this process alone, on the CPU lane for ``device`` "cpu"; gone at the end."""
    lane = None
    if device == "cpu":
        from megacpp_mcore import cpu

        lane = cpu.install()
    try:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        with tempfile.TemporaryDirectory() as folder:
            store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
            backend = "gloo" if device == "cpu" else "nccl"
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
            try:
                parallel_state.initialize_model_parallel()
                model_parallel_cuda_manual_seed(1)
                yield
            finally:
                parallel_state.destroy_model_parallel()
                torch.distributed.destroy_process_group()
    finally:
        if lane is not None:
            lane.remove()


def median_ms(call: Callable[[], Any], device: str, seconds: float) -> tuple[float, int]:
    """Median milliseconds of a call, and how many calls were timed: for ``seconds``, and at least :data:`FEWEST` on a GPU.

    On a GPU by :func:`triton.testing.do_bench`, which empties the L2 cache before each; on a CPU by
    :mod:`torch.utils.benchmark`, whose figures are means of blocks where a call is short.
    """
    if device == "cpu":
        from torch.utils.benchmark import Timer

        # Its own clock would synchronise the GPU that the CPU lane stands in for.
        timer = Timer("call()", globals={"call": call}, timer=time.perf_counter, num_threads=torch.get_num_threads())
        found = timer.blocked_autorange(min_run_time=seconds)
        return found.median * 1e3, len(found.times)
    from triton.testing import do_bench

    once = statistics.median(do_bench(call, warmup=1, rep=1, return_mode="all"))
    times = do_bench(call, warmup=int(FEWEST * once), rep=int(max(FEWEST * once, seconds * 1e3)) + 1, return_mode="all")
    return statistics.median(times), len(times)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Peak bytes above what was allocated before the call, its results included; None on the CPU, which does not count."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def has_gpu() -> bool:
    """Whether there is a device for ``cuda``."""
    return torch.cuda.is_available()


def device_name(device: str) -> str:
    """The GPU's name, or the processor's: its model, or where the system does not say that, its architecture."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    facts = CPU_FACTS.read_text(encoding="utf-8") if CPU_FACTS.exists() else ""
    models = (line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of torch, Megatron-Core and ``packages`` ("absent" if not installed), and the commit measured."""
    found = {}
    for name in ("torch", "megatron-core", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return {**found, "commit": os.environ.get("MEGACPP_COMMIT") or _described_commit()}


def _described_commit() -> str:
    """The commit of the clone that this file is tracked in, marked when it has changes; for a copy, set MEGACPP_COMMIT."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        # An installed copy may lie in somebody else's repository.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        described = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Table:
    """A CSV file that rows are added to.

    Args:
        path: the file; made, with its folder, by the first rows.
        columns: its header.

    Raises:
        BenchmarkError: the file cannot be read, or is no whole table of these columns; nothing is measured then.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{path} cannot be read ({error}); name another --output") from error
        if text and not (text.endswith("\n") and text.splitlines()[0] == ",".join(columns)):
            raise BenchmarkError(
                f"{path} begins with {text.splitlines()[0][:80]!r} and ends with {text[-40:]!r}; expected whole lines below "
                f"{','.join(columns)}: mend it, or name another --output"
            )

    def append(self, *rows: dict[str, Any]) -> None:
        """Add ``rows``; each has every column.

        Raises:
            BenchmarkError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", newline="", encoding="utf-8") as sink:
                writer = csv.DictWriter(sink, fieldnames=self.columns, lineterminator="\n")
                if sink.tell() == 0:
                    writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise BenchmarkError(f"{len(rows)} rows could not be added to {self.path} ({error})") from error
