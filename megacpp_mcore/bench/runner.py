"""Runs benchmarks: checks every variant, times those that are right, and makes the rows of the table.

A variant that fails parity gets no time, and no speed-up is given unless parity of both sides is green in the same run.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench import measure, table
from megacpp_mcore.bench.problem import BOUND, OURS, PEER, Problem, Variant, Verdict
from megacpp_mcore.bench.registry import Benchmark, Options

OUT_OF_MEMORY = "out of memory"
NOT_CHECKED = Verdict(None, "not checked")
WORST = 5
"""Results whose errors a row names."""


@dataclass
class Figures:
    """Milliseconds of one piece of work, the peak of its memory in bytes, and how often it was timed."""

    ms: float
    peak: int | None
    repeats: int


@dataclass
class Measured:
    """What became of one variant: its verdict, and by piece of work its figures, or why there are none."""

    variant: Variant
    verdict: Verdict
    figures: dict[str, Figures] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The rows of one benchmark, and one line for each of ours that is wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(benchmark: Benchmark, options: Options, say: Callable[[str], None]) -> Outcome:
    """Run one benchmark within the process groups of :func:`megacpp_mcore.bench.measure.one_process`.

    Args:
        benchmark: of the registry.
        options: device, sizes, time for a figure.
        say: takes every line.
    """
    outcome = Outcome()
    for problem in problems(benchmark, options):
        say(f"\n{benchmark.name}: {table.shape_text(problem.shape)}, {problem.dtype}, {device_text(options.device)}")
        say(table.head())
        problem.judge.prepare(problem.inputs)
        measured = [_measured(problem, variant, options) for variant in problem.variants]
        rows = [row for one in measured for row in _rows(benchmark, problem, one, measured, options)]
        for row in rows:
            say(table.line(row))
        outcome.rows += rows
        outcome.failures += [
            f"{benchmark.name}: {one.variant.name} {one.verdict.text}"
            for one in measured
            if one.variant.side == OURS and one.verdict.right is False
        ]
        del measured
        _collect(options)
    return outcome


def problems(benchmark: Benchmark, options: Options) -> Iterator[Problem]:
    """The problems of a benchmark, one at a time, so that only one of them takes memory."""
    module, _, function = benchmark.problems.partition(":")
    made: Iterator[Problem] = getattr(importlib.import_module(module), function)(options)
    return made


def device_text(device: str) -> str:
    """The device as rows name it; a CPU with the number of its threads."""
    name = measure.device_name(device)
    return name if device == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def _measured(problem: Problem, variant: Variant, options: Options) -> Measured:
    found = Measured(variant, NOT_CHECKED if variant.side != BOUND else Verdict(None, table.A_BOUND))
    left_out = variant.side == PEER and any(word in variant.name for word in options.without)
    if variant.absent or left_out:
        found.notes = dict.fromkeys(problem.works, "left out" if left_out else variant.absent)
        return found
    with variant.around():
        works = [work for work in problem.works if work in variant.runs]
        while works and variant.side != BOUND:  # a peer that cannot do the last piece of work may do those before it
            why = _attempt(partial(_check, found, problem, works[-1]), options)
            if not why:
                break
            _without(found, works.pop(), why)
            works = [] if variant.side == OURS else works
        for work in works if found.verdict.right is not False else ():
            why = _attempt(partial(_time, found, problem, work, options), options)
            if why:
                _without(found, work, why)
    _collect(options)
    return found


def _attempt(step: Callable[[], None], options: Options) -> str:
    """Why ``step`` failed, whatever it raised, which belongs in a row: the others of a long run still count."""
    try:
        step()
        return ""
    except torch.cuda.OutOfMemoryError:
        why = OUT_OF_MEMORY
    except Exception as error:
        why = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    _collect(options)  # only here has the traceback let go of its tensors
    return why


def _check(found: Measured, problem: Problem, work: str) -> None:
    found.verdict = problem.judge.verdict(found.variant, work, problem.inputs)


def _time(found: Measured, problem: Problem, work: str, options: Options) -> None:
    call = partial(found.variant.runs[work], problem.inputs)
    peak = measure.peak_bytes(call, options.device)
    ms, repeats = measure.median_ms(call, options.device, options.seconds)
    found.figures[work] = Figures(ms, peak, repeats)


def _without(found: Measured, work: str, why: str) -> None:
    """Note why there is no figure. Ours has to do every piece of work: where it cannot do one, it fails and has none."""
    found.notes[work] = why
    if found.variant.side == OURS:
        found.verdict = Verdict(False, f"FAILS: {why}")
        found.notes = {other: why if other == work else f"{work}: {why}" for other in found.variant.runs}
        found.figures.clear()


def _collect(options: Options) -> None:
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def _rows(
    benchmark: Benchmark, problem: Problem, one: Measured, measured: list[Measured], options: Options
) -> Iterator[dict[str, Any]]:
    found = measure.versions(*table.PACKAGES)
    for work, floor in problem.works.items():
        if not one.variant.absent and work not in one.variant.runs and work not in one.notes:
            continue
        time = table.floor_time(floor.operations, floor.moved, floor.precision, measure.device_name(options.device))
        figures = one.figures.get(work)
        # Of work that could not be done nothing is said but what is bad about the rest.
        verdict = NOT_CHECKED if work in one.notes and one.verdict.right is not False else one.verdict
        worst = sorted(verdict.errors.items(), key=lambda item: -item[1])[:WORST]
        yield {
            "benchmark": benchmark.name,
            "kind": benchmark.kind,
            "shape": table.shape_text(problem.shape),
            "dtype": problem.dtype,
            "work": work,
            "variant": one.variant.name,
            "side": one.variant.side,
            "ms": f"{figures.ms:.4f}" if figures else "",
            "peak_bytes": "" if figures is None or figures.peak is None else figures.peak,
            "computed_bytes": problem.computed.get(one.variant.name, ""),
            "floor_operations": floor.operations,
            "floor_bytes": floor.moved,
            "floor_result_bytes": "" if floor.result is None else floor.result,
            "floor_ms": "" if time.ms is None else f"{time.ms:.4f}",
            "floor_by": time.by,
            "of_floor": f"{time.ms / figures.ms:.3f}" if figures and time.ms is not None else "",
            "parity": verdict.text,
            "worst_row": " ".join(f"{name}:{error:.1e}" for name, error in worst),
            **_comparison(problem, work, one, measured),
            "note": one.notes.get(work, ""),
            "repeats": figures.repeats if figures else "",
            "device": device_text(options.device),
            **{name: found[name] for name in table.PACKAGES},
            "cudnn": torch.backends.cudnn.version() if options.device == "cuda" else "",
            "commit": found["commit"],
        }


def _comparison(problem: Problem, work: str, one: Measured, measured: list[Measured]) -> dict[str, str]:
    """Ours beside the peer: the problem's stock, or the fastest; empty unless parity of both is green.

    A peer with a truth of its own does other work than ours, and is not compared with. Where stock ran out of memory our peak
    stands beside the bytes that were counted for it by hand.
    """
    found = {"against": "", "speed_up": "", "less_memory": ""}
    mine = one.figures.get(work)
    if one.variant.side != OURS or mine is None or one.verdict.right is False:
        return found
    named = [peer for peer in measured if peer.variant.side == PEER and problem.stock in ("", peer.variant.name)]
    right = [peer for peer in named if peer.verdict.right and peer.variant.truth is None and work in peer.figures]
    if right and one.verdict.right:
        peer = min(right, key=lambda other: other.figures[work].ms)
        theirs = peer.figures[work]
        less = f"{theirs.peak / mine.peak:.1f}x" if mine.peak and theirs.peak else ""
        return {"against": peer.variant.name, "speed_up": f"{theirs.ms / mine.ms:.3f}x", "less_memory": less}
    computed = problem.computed.get(problem.stock)
    if mine.peak and computed and any(peer.notes.get(work) == OUT_OF_MEMORY for peer in named):
        return found | {"against": f"{problem.stock}, computed", "less_memory": f"{computed / mine.peak:.0f}x"}
    return found
