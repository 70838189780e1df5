"""What every benchmark needs: one process's groups, times, peak memory, versions, and the table of results."""

from __future__ import annotations

import contextlib
import csv
import math
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


def median_ms(
    run: Callable[[Any], Any], sets: Sequence[Any], device: str, *, warmup: int, repeats: int, seconds: float
) -> tuple[float, int]:
    """Median milliseconds of calls that go round the input ``sets``, and how many they were.

    Args:
        run: what is timed.
        sets: its inputs, larger together than the caches of the device.
        device: ``cuda``, timed with events, or ``cpu``.
        warmup: calls before, which do not count.
        repeats: calls that are timed, at most.
        seconds: time after which no more are, once there are :data:`FEWEST`.
    """
    for number in range(warmup):
        run(sets[number % len(sets)])
    times: list[float] = []
    while len(times) < repeats and (len(times) < min(FEWEST, repeats) or sum(times) < seconds * 1e3):
        times.append(_milliseconds(run, sets[len(times) % len(sets)], device))
    return statistics.median(times), len(times)


def _milliseconds(run: Callable[[Any], Any], inputs: Any, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run(inputs)
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    run(inputs)
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def peak_bytes(run: Callable[[Any], Any], inputs: Any, device: str) -> int | None:
    """Peak bytes above what was allocated before the call, its results included; None on the CPU, which does not count."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run(inputs)
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def worst_difference(values: Sequence[float], others: Sequence[float], *, relative: bool) -> float:
    """The largest difference of two series, step by step, a share of the first if ``relative``; infinite with a NaN."""
    apart = [abs(one - other) / (abs(one) if relative else 1.0) for one, other in zip(values, others, strict=True)]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


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
        BenchmarkError: when the file cannot be written, has other columns, or ends within a line; nothing is measured then.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        try:
            text = _appendable(path)
        except (OSError, UnicodeDecodeError) as error:
            raise BenchmarkError(
                f"{path} is no file that rows can be added to ({error}); name another --output"
            ) from error
        lines = text.splitlines()
        if lines[:1] not in ([], [",".join(columns)]):
            raise BenchmarkError(
                f"{path} has the columns {lines[:1]}; expected {','.join(columns)}: name another --output"
            )
        if lines and not text.endswith("\n"):
            raise BenchmarkError(
                f"{path} ends within a line, as what was stopped while it wrote leaves it: {lines[-1][-60:]!r}; "
                "delete that line (or end it, if it is whole), or name another --output"
            )

    def append(self, *rows: dict[str, Any]) -> None:
        """Add ``rows``; each has every column.

        Raises:
            BenchmarkError: when the file cannot be written.
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


def _appendable(path: Path) -> str:
    """What is in the file now, empty if there is none; leaves nothing behind.

    Raises:
        OSError: it cannot be added to, or not be made.
    """
    if path.exists():
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            return file.read()
    folder = next(parent for parent in path.parents if parent.exists())
    with tempfile.TemporaryFile(dir=folder):
        return ""
