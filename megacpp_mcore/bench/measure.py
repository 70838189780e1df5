"""Measuring tools of every benchmark: process groups for one process, times, peak memory, devices and versions."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore.util import host

FEWEST = 3
"""Minimum number of timed calls, however long they take: a median of fewer means nothing."""


@contextlib.contextmanager
def one_process(device: str) -> Iterator[None]:
    """Megatron's process groups for this process alone, on the CPU lane for ``device`` "cpu"; destroyed at the end.

    Backward passes run in the caller's thread, as in training.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(torch.autograd.set_multithreading_enabled(False))
        if device == "cpu":
            from megacpp_mcore import cpu

            held.callback(cpu.install().remove)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        folder = held.enter_context(tempfile.TemporaryDirectory())
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        held.callback(torch.distributed.destroy_process_group)
        held.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield


def median_ms(call: Callable[[], Any], device: str, seconds: float) -> tuple[float, int]:
    """Median milliseconds of a call, and how many calls were timed: for ``seconds``, and at least :data:`FEWEST` on a GPU.

    On a GPU it uses :func:`triton.testing.do_bench`, which clears the L2 cache before each call; on a CPU
    :mod:`torch.utils.benchmark`, whose figures are means over blocks of calls if a call is short.
    """
    if device == "cpu":
        from torch.utils.benchmark import Timer

        # Timer's default clock would synchronise the GPU that the CPU lane stands in for.
        timer = Timer("call()", globals={"call": call}, timer=time.perf_counter, num_threads=torch.get_num_threads())
        found = timer.blocked_autorange(min_run_time=seconds)
        return found.median * 1e3, len(found.times)
    from triton.testing import do_bench

    once = statistics.median(do_bench(call, warmup=1, rep=1, return_mode="all"))
    times = do_bench(call, warmup=int(FEWEST * once), rep=int(max(FEWEST * once, seconds * 1e3)) + 1, return_mode="all")
    return statistics.median(times), len(times)


class Captured:
    """A piece of work as a CUDA graph: captured at its first call, after a few calls that compile and tune, then replayed.

    Its results are the graph's own tensors, which the next call overwrites.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None

    def __call__(self, *given: Any) -> Any:
        """Replay the graph; ``given`` must be the first call's arguments every time."""
        if self._graph is None:
            apart = torch.cuda.Stream()
            apart.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(apart):
                for _ in range(FEWEST):
                    self._call(*given)
            torch.cuda.current_stream().wait_stream(apart)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = self._call(*given)
        self._graph.replay()
        return self._results


def memory(call: Callable[[], Any], device: str) -> tuple[int | None, int | None]:
    """Bytes above what was allocated before the call: at its peak, and at its end, with its results and what autograd keeps
    for their backward pass. None on the CPU, which does not count.
    """
    if device == "cpu":
        return None, None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del results
    return torch.cuda.max_memory_allocated() - before, kept


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if device == "cuda" else host.processor()


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of torch, Megatron-Core and ``packages`` ("absent" if not installed), and the measured commit.

    A commit with local changes is marked. For a copy outside of a clone, set MEGACPP_COMMIT.
    """
    found = {name: host.version(name) or "absent" for name in ("torch", "megatron-core", *packages)}
    commit = os.environ.get("MEGACPP_COMMIT") or host.own_git("describe", "--always", "--dirty", "--exclude=*")
    return {**found, "commit": commit or "unknown"}
