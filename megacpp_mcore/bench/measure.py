"""Runs benchmarks: checks every variant, times the correct ones, and makes the rows of the csv_table.

Parity is the worst row of each result against a float64 truth computed in the same run. A variant that fails is not timed, and
a speed-up is given only if parity of both sides is green.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from megacpp_mcore.bench import csv_table
from megacpp_mcore.bench.catalog import BOUND, OURS, PEER, Benchmark, Options
from megacpp_mcore.bench.problem import Floor, Problem, Result, Variant
from megacpp_mcore.util import host
from megacpp_mcore.util.stand_in import process_environment

FEWEST = 3
"""Minimum number of timed calls, however long they take: a median of fewer is meaningless."""


@contextlib.contextmanager
def one_process(device: str) -> Iterator[None]:
    """Create Megatron's process groups for a single process, on the CPU lane for ``device`` "cpu"; destroyed on exit.

    Backward passes run in the caller's thread, as in training.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if device == "cpu":
            from megacpp_mcore import cpu

            stack.callback(cpu.install().remove)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        stack.enter_context(process_environment())
        kind, store = "gloo" if device == "cpu" else "nccl", torch.distributed.HashStore()
        torch.distributed.init_process_group(kind, store=store, rank=0, world_size=1)
        stack.callback(torch.distributed.destroy_process_group)
        stack.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield


def median_ms(call: Callable[[], object], device: str, seconds: float) -> tuple[float, int]:
    """Time calls for ``seconds``, at least :data:`FEWEST` on a GPU; return their median milliseconds and their number.

    On a GPU it uses :func:`triton.testing.do_bench`, which clears the L2 cache before each call; on a CPU
    :mod:`torch.utils.benchmark`, whose figures are means over blocks of calls if a call is short.
    """
    if device == "cpu":
        from torch.utils.benchmark import Timer

        # Timer's default clock would synchronise the GPU that the CPU lane stands in for.
        timer = Timer("call()", globals={"call": call}, timer=time.perf_counter, num_threads=torch.get_num_threads())
        timing = timer.blocked_autorange(min_run_time=seconds)
        return timing.median * 1e3, len(timing.times)
    from triton.testing import do_bench

    once = statistics.median(do_bench(call, warmup=1, rep=1, return_mode="all"))
    times = do_bench(call, warmup=int(FEWEST * once), rep=int(max(FEWEST * once, seconds * 1e3)) + 1, return_mode="all")
    return statistics.median(times), len(times)


def memory(call: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that a call adds on the GPU: at its peak, and at its end, with results and saved tensors."""
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
    """Return the GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if device == "cuda" else host.processor()


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of torch, Megatron-Core and ``packages`` ("absent" if not installed), and the commit.

    A commit with local changes is marked. For a copy outside of a clone, set MEGACPP_COMMIT.
    """
    installed = {name: host.version(name) or "absent" for name in ("torch", "megatron-core", *packages)}
    commit = os.environ.get("MEGACPP_COMMIT") or host.own_git("describe", "--always", "--dirty", "--exclude=*")
    return {**installed, "commit": commit or "unknown"}


OUT_OF_MEMORY = "out of memory"
NOT_CHECKED = "not checked"
WORST = 5
"""Number of results whose errors a row lists."""


@dataclass
class Outcome:
    """The rows of one benchmark, and one line for each of our variants that is wrong."""

    rows: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(benchmark: Benchmark, options: Options, say: Callable[[str], None]) -> Outcome:
    """Run one benchmark in the process groups of :func:`one_process`; ``say`` receives every line of output."""
    problem = load(benchmark, options)
    on_cpu = options.device == "cpu"
    shape = csv_table.shape_text(problem.shape or options.shape)
    device = device_name(options.device)
    threads = f", {torch.get_num_threads()} threads" if on_cpu else ""
    say(f"\n{benchmark.name}: {shape}, {options.dtype}, {device}{threads}")
    say(csv_table.head())
    results = {variant.name: measured(problem, variant, options) for variant in problem.variants}
    everywhere = dict.fromkeys(csv_table.COLUMNS, "") | {
        "benchmark": benchmark.name,
        "kind": benchmark.kind,
        "shape": shape,
        "dtype": options.dtype,
        "device": f"{device}{threads}",
        **versions(*csv_table.PACKAGES),
        "cudnn": "" if on_cpu else str(torch.backends.cudnn.version()),
    }
    outcome = Outcome()
    for variant in problem.variants:
        for work, result in results[variant.name].items():
            cells = _cells(result, problem.works[work], device) | _gain(problem, variant, work, results)
            outcome.rows.append(everywhere | {"work": work, "variant": variant.name, "side": variant.side} | cells)
            say(csv_table.line(outcome.rows[-1]))
        if variant.side == OURS:
            wrong = [result.parity for result in results[variant.name].values() if result.right is False]
            outcome.failures += [f"{benchmark.name}: {variant.name} {text}" for text in wrong[:1]]
    return outcome


def load(benchmark: Benchmark, options: Options) -> Problem:
    """Make the problem of a benchmark."""
    return pkgutil.resolve_name(f"megacpp_mcore.bench.cases.{benchmark.problem}")(options)


def measured(problem: Problem, variant: Variant, options: Options) -> dict[str, Result]:
    """Check and time each piece of work. Our variants must do all of them: one that fails any of them gets no figures."""
    left_out = variant.side == PEER and any(word in variant.name for word in options.without)
    if variant.absent or left_out:
        note = "left out" if left_out else variant.absent
        return dict.fromkeys(problem.works, Result(None, NOT_CHECKED, note=note))
    with variant.around():
        results = {work: _attempt(problem, variant, work, options) for work in problem.works if work in variant.runs}
    _collect(options)
    failed = next((work for work, result in results.items() if result.ms is None), None)
    if variant.side != OURS or failed is None:
        return results
    cause = results[failed]
    elsewhere = replace(cause, note=cause.note and f"{failed}: {cause.note}")
    return {work: cause if work == failed else elsewhere for work in results}


def _attempt(problem: Problem, variant: Variant, work: str, options: Options) -> Result:
    """Check and time; any exception goes into the row, since the other results of a long run still count."""
    result = Result(None, csv_table.A_BOUND)
    try:
        if variant.side != BOUND:
            result = problem.check(variant, work)
        if result.right is False:
            return result
        call = partial(variant.runs[work], problem.inputs)
        peak, kept = (None, None) if variant.is_captured or options.device == "cpu" else memory(call)
        ms, repeats = median_ms(call, options.device, options.seconds)
        return replace(result, ms=ms, peak=peak, kept=kept, repeats=repeats)
    except torch.cuda.OutOfMemoryError:
        why = OUT_OF_MEMORY
    except Exception as error:
        why = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    _collect(options)  # only here has the traceback released its tensors
    if variant.side == OURS:
        return Result(False, f"FAILS: {why}", note=why)
    return Result(None, NOT_CHECKED, note=why)


def _collect(options: Options) -> None:
    if options.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _cells(result: Result, floor: Floor, device: str) -> dict[str, str]:
    floor_ms, floor_by = floor.time(device)
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:WORST]
    cells = {
        "ms": result.ms and f"{result.ms:.4f}",
        "peak_bytes": result.peak,
        "kept_bytes": result.kept,
        "floor_operations": floor.operations,
        "floor_bytes": floor.moved,
        "floor_ms": floor_ms and f"{floor_ms:.4f}",
        "floor_by": floor_by,
        "of_floor": result.ms and floor_ms and f"{floor_ms / result.ms:.3f}",
        "parity": result.parity,
        "worst_row": " ".join(f"{name}:{error:.1e}" for name, error in worst),
        "note": result.note,
        "repeats": result.ms and result.repeats,
    }
    return {name: "" if value is None else str(value) for name, value in cells.items()}


def _gain(problem: Problem, variant: Variant, work: str, results: Mapping[str, Mapping[str, Result]]) -> dict[str, str]:
    """Compare ours with the peer: the problem's stock, or the fastest; empty unless parity of both is green.

    A variant with its own truth does other work, so it is compared with nothing, whether it is a peer's or ours.
    """
    own = results[variant.name][work]
    peers = [
        (other.ms, peer.name, other.peak)
        for peer in problem.variants
        if peer.side == PEER and peer.truth is None and peer.is_captured == variant.is_captured
        if problem.stock in ("", peer.name)
        if (other := results[peer.name].get(work)) is not None and other.ms is not None and other.right
    ]
    if variant.side != OURS or variant.truth is not None or own.ms is None or not own.right or not peers:
        return {}
    ms, name, peak = min(peers, key=lambda peer: peer[0])
    less = f"{peak / own.peak:.1f}x" if peak and own.peak else ""
    return {"against": name, "speed_up": f"{ms / own.ms:.3f}x", "less_memory": less}
