"""Runs benchmarks: checks every variant, times those that are right, and makes the rows of the table.

A variant that fails parity gets no time, and no speed-up is given unless parity of both sides is green in the same run.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megacpp_mcore.bench import measure, table
from megacpp_mcore.bench.problem import BOUND, OURS, PEER, Goal, Problem, Variant, Verdict
from megacpp_mcore.bench.registry import Benchmark, Options
from megacpp_mcore.errors import BenchmarkError

OUT_OF_MEMORY = "out of memory"
NOT_CHECKED = Verdict(None, "not checked")
WORST = 5
"""Results whose errors a row names."""


@dataclass
class Measured:
    """What became of one variant."""

    variant: Variant
    verdict: Verdict
    ms: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The rows of one benchmark, and one line for each thing that failed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(
    benchmark: Benchmark, options: Options, *, goal: float | None, goals: bool, say: Callable[[str], None]
) -> Outcome:
    """Run one benchmark within the process groups of :func:`megacpp_mcore.bench.measure.one_process`.

    Args:
        benchmark: of the registry, not of whole models.
        options: device, sizes, repeats.
        goal: replaces the factor of every goal; None keeps them.
        goals: whether goals count in this run; ``goal`` makes them count in any case.
        say: told every line.

    Raises:
        BenchmarkError: a memory goal on a device that does not count memory, or a goal for what has none.
    """
    if goal is not None and benchmark.memory and options.device != "cuda":
        raise BenchmarkError("--goal is about peak memory here, which is measured with --device cuda")
    outcome = Outcome()
    for problem in problems(benchmark, options):
        if goal is not None and not problem.goals:
            raise BenchmarkError(
                f"--goal is {goal:g}, and {benchmark.name} has none to reach; leave it out (docs/bench.md)"
            )
        say(f"\n{benchmark.name}: {table.shape_text(problem.shape)}, {problem.dtype}, {device_text(options.device)}")
        say(table.head())
        measured = list(_measured(problem, options))
        rows = [row for one in measured for row in _rows(benchmark, problem, one, measured, options)]
        for row in rows:
            say(table.line(row))
        outcome.rows += rows
        outcome.failures += [
            f"{benchmark.name}: {one.variant.name} {one.verdict.text}"
            for one in measured
            if one.variant.side == OURS and one.verdict.right is False
        ]
        if goals or goal is not None:
            outcome.failures += [
                missed for one in problem.goals if (missed := _missed(benchmark, one, goal, measured, problem))
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


def _measured(problem: Problem, options: Options) -> Iterator[Measured]:
    problem.judge.prepare(problem.sets[0])
    _collect(options)
    for variant in problem.variants:
        if variant.side == PEER and any(word in variant.name for word in options.without):
            yield Measured(variant, NOT_CHECKED, notes=dict.fromkeys(problem.works, "left out"))
        elif variant.absent:
            yield Measured(variant, NOT_CHECKED, notes=dict.fromkeys(problem.works, variant.absent))
        else:
            yield _one(problem, variant, options)
        _collect(options)


def _one(problem: Problem, variant: Variant, options: Options) -> Measured:
    with variant.around():
        found = Measured(variant, Verdict(None, table.A_BOUND) if variant.side == BOUND else NOT_CHECKED)
        works = [work for work in problem.works if work in variant.runs]
        if variant.side != BOUND:
            works, found = _checked(problem, variant, works, found, options)
        if found.verdict.right is False:
            return found
        for work in works:
            _time(found, work, problem, options)
            if found.verdict.right is False:
                break
        return found


def _checked(
    problem: Problem, variant: Variant, works: list[str], found: Measured, options: Options
) -> tuple[list[str], Measured]:
    """The verdict on the last work that runs at all; a peer that cannot do the last one keeps those before it."""
    while works:
        try:
            found.verdict = problem.judge.verdict(variant, works[-1], problem.sets[0])
            return works, found
        except torch.cuda.OutOfMemoryError:
            reason = OUT_OF_MEMORY
        except Exception as error:
            # Whatever a variant raises belongs in its row: the others of a long run still count.
            reason = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        _collect(options)  # only here has the traceback let go of its tensors
        if variant.side == OURS:
            _fail(found, works[-1], reason)
            return [], found
        found.notes[works[-1]] = reason
        works = works[:-1]
    return works, found


def _fail(found: Measured, work: str, reason: str) -> None:
    """Ours has to do every piece of work: where it cannot do one, it fails, has no time of any, and each row says why."""
    found.verdict = Verdict(False, f"FAILS: {reason}")
    found.notes = {other: reason if other == work else f"{work}: {reason}" for other in found.variant.runs}
    for figures in (found.ms, found.peaks, found.repeats):
        figures.clear()


def _time(found: Measured, work: str, problem: Problem, options: Options) -> None:
    call = found.variant.runs[work]
    try:
        found.peaks[work] = measure.peak_bytes(call, problem.sets[-1], options.device)
        found.ms[work], found.repeats[work] = measure.median_ms(
            call, problem.sets, options.device,
            warmup=options.warmup, repeats=options.repeats, seconds=options.seconds,
        )  # fmt: skip
    except torch.cuda.OutOfMemoryError:
        if found.variant.side == OURS:
            _fail(found, work, OUT_OF_MEMORY)
        else:
            found.notes[work] = OUT_OF_MEMORY


def _collect(options: Options) -> None:
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def _against(problem: Problem, work: str, measured: list[Measured]) -> Measured | None:
    """The peer that ``work`` is compared with: the problem's stock, or the fastest; its parity is green.

    A peer with a truth of its own does other work than ours, and is not compared with.
    """
    peers = [one for one in measured if one.variant.side == PEER and one.variant.truth is None]
    right = [one for one in peers if one.verdict.right and work in one.ms]
    if problem.stock:
        right = [one for one in right if one.variant.name == problem.stock]
    return min(right, key=lambda one: one.ms[work], default=None)


def _rows(
    benchmark: Benchmark, problem: Problem, one: Measured, measured: list[Measured], options: Options
) -> Iterator[dict[str, Any]]:
    found = measure.versions(*table.PACKAGES)
    device = measure.device_name(options.device)
    for work, floor in problem.works.items():
        if not one.variant.absent and work not in one.variant.runs and work not in one.notes:
            continue
        time = table.floor_time(floor.operations, floor.moved, floor.precision, device)
        ms, peak, verdict = one.ms.get(work), one.peaks.get(work), _verdict(one, work)
        yield {
            "benchmark": benchmark.name,
            "kind": benchmark.kind,
            "shape": table.shape_text(problem.shape),
            "dtype": problem.dtype,
            "work": work,
            "variant": one.variant.name,
            "side": one.variant.side,
            "ms": "" if ms is None else f"{ms:.4f}",
            "peak_bytes": "" if peak is None else peak,
            "computed_bytes": problem.computed.get(one.variant.name, ""),
            "floor_operations": floor.operations,
            "floor_bytes": floor.moved,
            "floor_result_bytes": "" if floor.result is None else floor.result,
            "floor_ms": "" if time.ms is None else f"{time.ms:.4f}",
            "floor_by": time.by,
            "of_floor": "" if ms is None or time.ms is None else f"{time.ms / ms:.3f}",
            "parity": verdict.text,
            "worst_row": _worst(verdict),
            **_comparison(problem, work, one, measured),
            "note": one.notes.get(work, ""),
            "repeats": one.repeats.get(work, ""),
            "device": device_text(options.device),
            **{name: found[name] for name in table.PACKAGES},
            "cudnn": torch.backends.cudnn.version() if options.device == "cuda" else "",
            "commit": found["commit"],
        }


def _verdict(one: Measured, work: str) -> Verdict:
    """What is said of one piece of work: where it could not be done, nothing but what is bad about the others."""
    return NOT_CHECKED if work in one.notes and one.verdict.right is not False else one.verdict


def _worst(verdict: Verdict) -> str:
    """The results that are furthest off: a layer has one for every parameter."""
    ordered = sorted(verdict.errors.items(), key=lambda item: -item[1])
    return " ".join(f"{name}:{error:.1e}" for name, error in ordered[:WORST])


def _comparison(problem: Problem, work: str, one: Measured, measured: list[Measured]) -> dict[str, str]:
    """Speed-up and memory of ours beside the peer; empty unless parity of both is green."""
    empty = {"against": "", "speed_up": "", "less_memory": ""}
    if one.variant.side != OURS or one.verdict.right is False or work not in one.ms:
        return empty
    peer = _against(problem, work, measured) if one.verdict.right else None
    if peer is None:
        return empty | _against_computed(problem, work, one, measured)
    ours, theirs = one.peaks[work], peer.peaks[work]
    return {
        "against": peer.variant.name,
        "speed_up": f"{peer.ms[work] / one.ms[work]:.3f}x",
        "less_memory": f"{theirs / ours:.1f}x" if ours and theirs else "",
    }


def _against_computed(problem: Problem, work: str, one: Measured, measured: list[Measured]) -> dict[str, str]:
    """Where stock ran out of memory: our peak beside the bytes that were counted for it by hand."""
    ours, computed = one.peaks.get(work), problem.computed.get(problem.stock)
    out = any(peer.variant.name == problem.stock and peer.notes.get(work) == OUT_OF_MEMORY for peer in measured)
    if not (ours and computed and out):
        return {}
    return {"against": f"{problem.stock}, computed", "less_memory": f"{computed / ours:.0f}x"}


def _missed(
    benchmark: Benchmark, goal: Goal, factor: float | None, measured: list[Measured], problem: Problem
) -> str:  # fmt: skip
    """By how much a goal is missed; empty if it is not, or if parity already failed, which is a failure of its own."""
    by_name = {one.variant.name: one for one in measured}
    ours, over = by_name[goal.variant], by_name[goal.over]
    times = goal.times if factor is None else factor
    where = f"GOAL MISSED: {benchmark.name}, {table.shape_text(problem.shape)}, {goal.work}:"
    if ours.verdict.right is False:
        return ""
    figures = (lambda one: one.ms.get(goal.work)) if goal.of == "ms" else (lambda one: one.peaks.get(goal.work))
    mine, theirs = figures(ours), figures(over)
    if theirs is None and goal.of == "peak_bytes" and over.notes.get(goal.work) == OUT_OF_MEMORY:
        theirs = problem.computed.get(goal.over)
    if mine is None or theirs is None:
        lacking = goal.variant if mine is None else goal.over
        return f"{where} {lacking} has no {goal.of} ({by_name[lacking].notes.get(goal.work) or 'not measured'})"
    gain, unit = theirs / mine, "as fast as" if goal.of == "ms" else "less memory than"
    return "" if gain >= times else f"{where} {goal.variant} {gain:.2f}x {unit} {goal.over}, expected {times:g}x"
