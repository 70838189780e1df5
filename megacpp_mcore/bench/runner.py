"""Runs benchmarks: checks every variant, times the correct ones, and makes the rows of the table.

A variant that fails parity is not timed, and a speed-up is given only if parity of both sides is green in the same run.
"""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench import measure, table
from megacpp_mcore.bench.problem import Problem, Result, Variant
from megacpp_mcore.bench.registry import BOUND, OURS, PEER, Benchmark, Options

OUT_OF_MEMORY = "out of memory"
NOT_CHECKED = "not checked"
WORST = 5
"""Number of results whose errors a row lists."""


Results = Mapping[str, Mapping[str, Result]]
"""By variant and work."""


@dataclass
class Outcome:
    """The rows of one benchmark, and one line for each of our variants that is wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(benchmark: Benchmark, options: Options, say: Callable[[str], None]) -> Outcome:
    """Run one benchmark within the process groups of :func:`megacpp_mcore.bench.measure.one_process`.

    Args:
        benchmark: from the registry.
        options: device, sizes, time for a figure.
        say: receives every line of output.
    """
    problem = load(benchmark, options)
    shape = table.shape_text(problem.shape or options.shape)
    device = measure.device_name(options.device)
    threads = "" if options.device == "cuda" else f", {torch.get_num_threads()} threads"
    say(f"\n{benchmark.name}: {shape}, {options.dtype}, {device}{threads}")
    say(table.head())
    results = {variant.name: _measure(problem, variant, options) for variant in problem.variants}
    everywhere = {
        "benchmark": benchmark.name,
        "kind": benchmark.kind,
        "shape": shape,
        "dtype": options.dtype,
        "device": f"{device}{threads}",
        **measure.versions(*table.PACKAGES),
        "cudnn": torch.backends.cudnn.version() if options.device == "cuda" else "",
    }
    outcome = Outcome()
    for variant in problem.variants:
        for work in results[variant.name]:
            cells = everywhere | _cells(problem, variant, work, results, device)
            outcome.rows.append({name: cells[name] for name in table.COLUMNS})
            say(table.line(outcome.rows[-1]))
        if variant.side == OURS:
            wrong = [result.parity for result in results[variant.name].values() if result.right is False]
            outcome.failures += [f"{benchmark.name}: {variant.name} {text}" for text in wrong[:1]]
    return outcome


def load(benchmark: Benchmark, options: Options) -> Problem:
    """The problem of a benchmark."""
    made: Problem = pkgutil.resolve_name(f"megacpp_mcore.bench.cases.{benchmark.problem}")(options)
    return made


def _measure(problem: Problem, variant: Variant, options: Options) -> dict[str, Result]:
    """Check and time each piece of work. Our variants must do all of them: one that cannot do one gets no figures."""
    left_out = variant.side == PEER and any(word in variant.name for word in options.without)
    if variant.absent or left_out:
        note = "left out" if left_out else variant.absent
        return dict.fromkeys(problem.works, Result(None, NOT_CHECKED, note=note))
    with variant.around():
        found = {work: _attempt(problem, variant, work, options) for work in problem.works if work in variant.runs}
    _collect(options)
    failed = next((work for work, result in found.items() if result.ms is None), None)
    if variant.side != OURS or failed is None:
        return found
    cause = found[failed]
    elsewhere = replace(cause, note=cause.note and f"{failed}: {cause.note}")
    return {work: cause if work == failed else elsewhere for work in found}


def _attempt(problem: Problem, variant: Variant, work: str, options: Options) -> Result:
    """Check and time; any exception goes into the row, as the other results of a long run still count."""
    result = Result(None, table.A_BOUND)
    try:
        if variant.side != BOUND:
            result = problem.check(variant, work, problem.inputs)
        if result.right is False:
            return result
        call = partial(variant.runs[work], problem.inputs)
        peak, kept = (None, None) if variant.is_captured else measure.memory(call, options.device)
        ms, repeats = measure.median_ms(call, options.device, options.seconds)
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


def _cells(problem: Problem, variant: Variant, work: str, results: Results, device: str) -> dict[str, Any]:
    """The cells of the row for one variant and piece of work."""
    result, floor = results[variant.name][work], problem.works[work]
    floor_ms, floor_by = table.floor_time(floor.operations, floor.moved, floor.precision, device)
    is_timed = result.ms is not None
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:WORST]
    return {
        "work": work,
        "variant": variant.name,
        "side": variant.side,
        "ms": f"{result.ms:.4f}" if is_timed else "",
        "peak_bytes": "" if result.peak is None else result.peak,
        "kept_bytes": "" if result.kept is None else result.kept,
        "computed_bytes": problem.computed.get((variant.name, work), ""),
        "floor_operations": floor.operations,
        "floor_bytes": floor.moved,
        "floor_result_bytes": "" if floor.result is None else floor.result,
        "floor_ms": "" if floor_ms is None else f"{floor_ms:.4f}",
        "floor_by": floor_by,
        "of_floor": f"{floor_ms / result.ms:.3f}" if result.ms is not None and floor_ms is not None else "",
        "parity": result.parity,
        "worst_row": " ".join(f"{name}:{error:.1e}" for name, error in worst),
        **_comparison(problem, variant, work, results),
        "note": result.note,
        "repeats": result.repeats if is_timed else "",
    }


def _comparison(problem: Problem, variant: Variant, work: str, results: Results) -> dict[str, str]:
    """Ours compared with the peer: the problem's stock, or the fastest; empty unless parity of both is green.

    A variant with a truth of its own does other work: a peer is then not compared with, and ours is compared with no peer.
    Where stock ran out of memory, our peak is compared with the bytes counted for it by hand.
    """
    nothing = {"against": "", "speed_up": "", "less_memory": ""}
    mine = results[variant.name][work]
    if variant.side != OURS or mine.ms is None or variant.truth is not None:
        return nothing
    theirs = {
        peer.name: results[peer.name][work]
        for peer in problem.variants
        if peer.side == PEER
        and peer.truth is None
        and peer.is_captured == variant.is_captured
        and problem.stock in ("", peer.name)
        and work in results[peer.name]
    }
    times = {name: peer.ms for name, peer in theirs.items() if peer.ms is not None and peer.right}
    if times and mine.right:
        name = min(times, key=times.__getitem__)
        peak = theirs[name].peak
        less = f"{peak / mine.peak:.1f}x" if peak and mine.peak else ""
        return {"against": name, "speed_up": f"{times[name] / mine.ms:.3f}x", "less_memory": less}
    computed = problem.computed.get((problem.stock, work))
    if mine.peak and computed and any(peer.note == OUT_OF_MEMORY for peer in theirs.values()):
        return nothing | {"against": f"{problem.stock}, computed", "less_memory": f"{computed / mine.peak:.0f}x"}
    return nothing
