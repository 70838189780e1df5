"""What every benchmark here needs: one process's groups, times, peak memory, versions, and the table of results."""

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

BYTES_PER_SECOND = 4.2e12
"""What an H200 moves in practice, for floors."""


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


def median_ms(run: Callable[[Any], Any], sets: Sequence[Any], device: str, *, warmup: int, repeats: int) -> float:
    """Median milliseconds of ``repeats`` calls that go round the input ``sets``, after ``warmup`` calls that do not count."""
    for number in range(warmup):
        run(sets[number % len(sets)])
    return statistics.median(_milliseconds(run, sets[number % len(sets)], device) for number in range(repeats))


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


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


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
    """The commit of the working tree, marked when it has changes; for a copy without git, set MEGACPP_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Table:
    """A CSV file that rows are added to.

    Args:
        path: the file; made, with its folder, by the first rows.
        columns: its header.

    Raises:
        ValueError: when the file is there with other columns; nothing is measured then.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        if path.exists() and (header := path.read_text().splitlines()[:1]) != [",".join(columns)]:
            raise ValueError(f"{path} has the columns {header}; expected {','.join(columns)}: name another --output")

    def append(self, *rows: dict[str, Any]) -> None:
        """Add ``rows``; each has every column."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as sink:
            writer = csv.DictWriter(sink, fieldnames=self.columns, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
