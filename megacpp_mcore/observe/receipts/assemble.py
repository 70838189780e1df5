"""Assembles a run's receipt from its folder: what its ranks recorded, and its profiles. No torch.

The same files give the same receipt, except for the time at which it was assembled. A receipt covers one start, as others
may have run with other backends: the last one that completed a step, or the last one if none did. Goodput and losses cover
all starts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from megacpp_mcore.model.families import mixers_first
from megacpp_mcore.model.flops.peaks import peak
from megacpp_mcore.model.flops.utilisation import Utilisation
from megacpp_mcore.observe import events, goodput, routing
from megacpp_mcore.observe.clock import OF_A_STEP
from megacpp_mcore.observe.events import FINISHED, IN_ORDER, STOPPED, Start, Step
from megacpp_mcore.observe.profile.table import FOLDER as PROFILES
from megacpp_mcore.observe.profile.table import read as read_table
from megacpp_mcore.observe.receipts import fields
from megacpp_mcore.observe.receipts.claims import Case, judge
from megacpp_mcore.observe.receipts.fields import FAMILIES, RUNNING, SCHEMA, Facts
from megacpp_mcore.observe.steps import kept, recorded
from megacpp_mcore.util import text

WARM_UP_STEPS = 3
"""Steps at the beginning of a start that are not measured."""
RECEIPT = "receipt.json"
_COMPILING, _OF_A_STEP = ("compile", "jit"), tuple(map(str, OF_A_STEP))  # strings: hashing enums is slow
_OF_LETTER = {family.letter: family.group for family in mixers_first()}


def assemble(run: str | os.PathLike[str]) -> dict[str, Any]:
    """Assemble the receipt of the run in folder ``run``, up to its last recorded step.

    Raises:
        DataError: nothing was recorded, or a file is damaged.
    """
    spent: dict[int, goodput.Goodput] = {}
    windows: dict[tuple[int, int], Window] = {}
    spans = [folder.name.split("-") for folder in (Path(run) / PROFILES).glob("*-*")]
    profiled = [(int(span[0]), int(span[1]) + 1) for span in spans if len(span) == 2 and all(map(str.isdecimal, span))]

    def summarise(rank: int, starts: Sequence[Start]) -> None:
        spent[rank] = goodput.of_rank(starts)
        for start in starts:
            windows[rank, start.number] = dataclasses.replace(measure(start, WARM_UP_STEPS, profiled), seconds={})

    ranks = events.read(run, summarise)
    groups = events.grouped(ranks)
    trained = [index for index, group in enumerate(groups) if any(process.resumed_at is not None for process in group)]
    index = trained[-1] if trained else len(groups) - 1
    processes, later = groups[index], groups[index + 1 :]
    world_size = processes[0].world_size
    ranks = {rank: starts for rank, starts in ranks.items() if rank < world_size}  # an earlier start may have had more
    facts = _merged(processes)
    steps = kept(recorded(ranks))
    tokens = tokens_of(steps)
    slowest, *_ = goodput.slowest_first({rank: spent[rank] for rank in ranks})
    window = together([windows[process.rank, process.number] for process in processes])
    number = next(process.number for process in processes if process.rank == window.rank)
    reread = next(start for start in events.read(run, rank=window.rank)[window.rank] if start.number == number)
    window = dataclasses.replace(window, seconds=measure(reread, WARM_UP_STEPS, profiled).seconds)
    how, after = _ending(processes), _ending(later[-1]) if later else FINISHED
    status = RUNNING if how is None or (how in IN_ORDER and after is None) else how
    facts.values |= {
        "schema": SCHEMA,
        "status": status,
        "written_at": text.utc(time.time_ns()),
        "ranks.expected": world_size,
        "ranks.found": [process.rank for process in processes],
        "environment": processes[0].facts.get("environment", {}),
        "goodput": {"rank": slowest, **spent[slowest].record()},
    }
    _routing(facts, processes)
    _cache(facts, window)
    _time(facts, tokens, window)
    losses = [(step.step, step.losses["lm loss"]) for step in steps if "lm loss" in step.losses]
    if not losses:
        facts.miss("no step with an lm loss was recorded", "loss")
    for name, (at, loss) in zip(("first", "last"), losses[:1] + losses[-1:], strict=False):
        facts.put(f"loss.{name}_step", at)
        facts.put(f"loss.{name}", loss if math.isfinite(loss) else None, f"it is {loss}")
    _speed(facts)
    _shares(facts, _read_profile(facts, Path(run)))
    measured = window.seconds, window.compiled
    disqualifiers, unjudged = judge(Case(facts.values, steps, tokens, *measured, events.overlap(ranks)))
    notes = [f"rank {process.rank}: {failure}" for process in processes for failure in process.facts.get("failed", ())]
    if status == STOPPED:
        notes += [f"stopped: {process.facts['stopped']}" for process in processes if "stopped" in process.facts][:1]
    if later:
        began, fate = text.utc(min(start.began_ns for start in later[-1])), f"ended before its first step: {after}"
        fate = "has not reached its first step, or was killed before it" if after is None else fate
        notes.append(f"a start at {began} {fate}" + (f" (the last of {len(later)})" if len(later) > 1 else ""))
    facts.values |= {"disqualifiers": disqualifiers, "unjudged": unjudged, "notes": notes}
    receipt = facts.receipt(f"rank {processes[0].rank} did not record it: the run ended first")
    return dict(text.printable(receipt))


def _ending(processes: Sequence[Start]) -> str | None:
    """Return how a start ended, an error's name taking precedence; None while a process is running or left nothing."""
    endings = [process.how for process in processes] + [None] * (processes[0].world_size - len(processes))
    return next((ending for ending in endings if ending not in (None, FINISHED)), None if None in endings else FINISHED)


@dataclass(frozen=True)
class Window:
    """The measured steps of a start, or of one process of it.

    A step's time runs from the end of the previous step to its own end, without checkpoints, evaluation, start-up and the
    profiler. It thus includes the wait for data and the loop's own housekeeping, and does not depend on where in the step the
    host waits for the GPU.

    Attributes:
        done: steps that the start completed, the maximum over ranks.
        rank: the rank whose steps these are, the one with the largest median.
        median_s: of its seconds; 0.0 without a step.
        seconds: of each step, by number, in the order of the steps.
        compiled: nanoseconds of compilation, over all ranks, of those measured steps in which any rank compiled.
        compiled_ns: nanoseconds of compilation of all ranks in the whole start.
        first_ns: nanoseconds from the start of a process to the end of its first step, of the rank that took longest; 0: none.
    """

    done: int
    rank: int
    median_s: float
    seconds: Mapping[int, float]
    compiled: Mapping[int, int]
    compiled_ns: int
    first_ns: int = 0


def measure(one: Start, left_out: int, profiled: Sequence[tuple[int, int]] = ()) -> Window:
    """Return the window of one process, without profiled steps and the step after each, when a rank may wait for others."""
    seconds, compiled = {}, {}
    done = compiled_ns = 0
    for span in one.spans:
        compiling = span.total(_COMPILING)
        compiled_ns += compiling
        if span.step is None:
            continue
        done += 1
        if done > left_out and not (profiled and any(begin <= span.step <= end for begin, end in profiled)):
            seconds[span.step] = span.total(_OF_A_STEP) / 1e9
            if compiling:
                compiled[span.step] = compiling
    median_s = percentile(sorted(seconds.values()), 50) if seconds else 0.0
    first_ns = next((span.at - one.began_ns for span in one.spans if span.step is not None), 0)
    return Window(done, one.rank, median_s, seconds, compiled, compiled_ns, first_ns)


def together(windows: Sequence[Window]) -> Window:
    """Return the window of a start from those of its processes: the steps are those of the slowest one."""
    compiled = sum((Counter(window.compiled) for window in windows), Counter[int]())
    return dataclasses.replace(
        max(windows, key=lambda window: (window.median_s, -window.rank)),
        done=max(window.done for window in windows),
        compiled=dict(sorted(compiled.items())),
        compiled_ns=sum(window.compiled_ns for window in windows),
        first_ns=max(window.first_ns for window in windows),
    )


def percentile(ascending: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` per cent of the values do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def tokens_of(steps: Sequence[Step]) -> dict[int, int]:
    """Return the tokens of step 1 and of every step whose predecessor was recorded."""
    before = {step.step: step.tokens for step in steps} | {0: 0}
    return {step.step: step.tokens - before[step.step - 1] for step in steps if step.step - 1 in before}


def _time(facts: Facts, tokens: Mapping[int, int], window: Window) -> None:
    """Add the step times, and the number of tokens if all steps had the same."""
    sizes = set(tokens.values())
    why = "steps had different numbers of tokens" if sizes else "no step was recorded"
    facts.put("batch.effective_tokens", sizes.pop() if len(sizes) == 1 else None, why)
    facts.put("window.left_out", WARM_UP_STEPS)
    facts.put("time_to_first_step_s", window.first_ns / 1e9 or None, "no step was recorded")
    seconds = sorted(window.seconds.values())
    if not seconds:
        left = f"has no step after its first {WARM_UP_STEPS} that was not profiled"
        reason = f"the last start {left if window.done else 'has done no step'}"
        facts.miss(reason, "step_time", "window.first_step", "window.last_step")
        return
    facts.put_all("window", {"first_step": min(window.seconds), "last_step": max(window.seconds)})
    facts.put_all("step_time", {"rank": window.rank, "n": len(seconds), "max_s": seconds[-1]})
    facts.put_all("step_time", {f"p{percent}_s": percentile(seconds, percent) for percent in (50, 90, 99)})
    measured = [number for number in window.seconds if number in tokens]
    time_s = sum(window.seconds[number] for number in measured)
    mean = sum(tokens[number] for number in measured) / time_s if measured else None
    facts.put("throughput.tokens_per_s_mean", mean, "no step was recorded")


def _by_name(merge: Callable[[list[Any]], Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = sorted({*chain.from_iterable(ranks)})
    return {name: merge([values[name] for values in ranks if name in values]) for name in names}


_OF_ALL: Mapping[str, Callable[[Any], Any]] = {
    "backends": lambda ranks: fields.by_span(chain.from_iterable(ranks)),
    "memory.allocated_peak_bytes": max,
    "memory.reserved_peak_bytes": max,
    "precision.fp8_layers": lambda ranks: sorted({layer for layers in ranks for layer in layers}),
    "precision.dequantised": sum,
    "indexer.overlap": lambda ranks: _by_name(fmean, ranks) or None,
    **dict.fromkeys(("precision.fp8_scopes", "cache.files", "cache.added"), partial(_by_name, sum)),
    **dict.fromkeys(("card.matmul_tflops_per_s", "card.copy_bytes_per_s", "card.sm_clock_mhz"), min),
}
"""How to merge a field over all ranks; the other fields are rank 0's."""


def _merged(processes: Sequence[Start]) -> Facts:
    """Merge the facts of a start's processes, and the reasons why other fields are unknown."""
    first = processes[0].facts
    facts = Facts({path: first[path] for path in fields.BY_PATH if path in first}, dict(first.get("unknown", {})))
    for process in processes:
        if "backends" in process.facts:  # together with what patches noted as they ran
            process.facts["backends"] = [*process.facts.get("noted", ()), *process.facts["backends"]]
    by_rank = {path: [p.facts[path] for p in processes if p.facts.get(path) is not None] for path in _OF_ALL}
    facts.values |= {path: merge(by_rank[path]) for path, merge in _OF_ALL.items() if by_rank[path]}
    facts.put("memory.ranks", by_rank["memory.allocated_peak_bytes"] or None)
    for path, why in (
        ("precision.dequantised", "nothing of the run is quantised"),
        ("indexer.overlap", "no two Full layers of one rank were sampled in a step with more tokens than top-k"),
    ):
        facts.put(path, facts.values.get(path), why)
    return facts


def _routing(facts: Facts, processes: Sequence[Start]) -> None:
    """Add the routers' loads over all ranks; counts of only some ranks or layers must not pass for the total."""
    if not facts.values.get("moe_enabled"):
        return
    records = {process.rank: process.facts["routing"] for process in processes if "routing" in process.facts}
    reasons = [record["failed"] for record in records.values() if record["failed"] is not None]
    if missing := [rank for rank in range(processes[0].world_size) if rank not in records]:
        reasons.append(f"the counts of rank {fields.spans(missing)} are missing, so the sums would be incomplete")
    merged = routing.merged(record["layers"] for record in records.values())
    facts.put("routing.layers", {layer: load.record() for layer, load in merged.items()} or None)
    if not (loads := merged.values()):
        reasons.append("no router had run by the last reading")
    if reasons:
        counted = [f"routing.{name}" for name in ("layers", "entropy", "max_over_mean", "dropped_tokens")]
        facts.values |= dict.fromkeys(counted)
        facts.miss(reasons[0], *counted)
        return
    facts.put("routing.entropy", min(1.0, fmean(load.entropy for load in loads)))
    facts.put("routing.max_over_mean", fmean(load.max_over_mean for load in loads))
    facts.put("routing.dropped_tokens", sum(load.dropped for load in loads))


def _cache(facts: Facts, window: Window) -> None:
    """Add whether the caches of compiled kernels had what the run needed, over all hosts."""
    files, added = (facts.values.get(f"cache.{name}") for name in ("files", "added"))
    if files is None or added is None:
        facts.miss("the run has not ended, or was killed: what it added to the caches was not counted", "cache")
        return
    state = "cold" if any(added.values()) else "warm" if any(files.values()) else None
    if not window.compiled_ns:
        state = "unused"  # entries added meanwhile are another process's
    facts.put("cache.state", state, "the caches are empty before and after")


def _read_profile(facts: Facts, run: Path) -> dict[str, Any] | None:
    """Read rank 0's last profile of steady steps, or else its last one; other ranks' profiles lie in folders below."""
    profiles = [read_table(path) for path in (run / PROFILES).glob("*/table.json")]
    best = max(profiles, key=lambda profile: (profile["phase"] == "steady", profile["steps"]), default=None)
    if best is None:
        facts.miss("the run was not profiled", "profiler")
        return None
    summary = {"step_range": best["steps"], "phase": best["phase"], "hidden_share": best["hidden_share"]}
    facts.put_all("profiler", summary, "there was no communication, or no device to measure its overlap on")
    return best


def utilisation(values: Mapping[str, Any], step_time_s: float) -> Utilisation:
    """Return the share of the devices' peak that a step's counted FLOPs amount to."""
    counted = values["flops"]["by_precision"]
    return Utilisation(
        step_time_s=step_time_s,
        devices=values["parallelism.world_size"],
        model_flops={name: flops["model_flops"] for name, flops in counted.items()},
        hardware_flops={name: flops["hardware_flops"] for name, flops in counted.items()},
        peaks={name: peak(values.get("device") or "an unknown device", name) for name in counted},
    )


def _speed(facts: Facts) -> None:
    """Add the rates at the median step time."""
    values, unknown = facts.values, facts.unknown
    seconds, tokens = values.get("step_time.p50_s"), values.get("batch.effective_tokens")
    if seconds is None:
        facts.miss(unknown["step_time"], "throughput")
        return
    rate = None if tokens is None else tokens / seconds
    per_device = None if rate is None else rate / values["ranks.expected"]
    why = unknown.get("batch.effective_tokens", "no step was recorded")
    facts.put_all("throughput", {"tokens_per_s": rate, "tokens_per_s_per_device": per_device}, why)
    if values.get("flops") is None:
        rates = (f"throughput.{name}" for name in ("tflops_per_s_per_device", "mfu", "hfu"))
        facts.miss(unknown.get("flops", "the work of a step is not known"), *rates)
        return
    used = utilisation(values, seconds)
    facts.put("throughput.tflops_per_s_per_device", used.tflops_per_device)
    facts.put_all("throughput", {"mfu": used.mfu, "hfu": used.hfu}, used.reason or "")


def _shares(facts: Facts, profile: Mapping[str, Any] | None) -> None:
    """Add what dominates a step: time by the profile, FLOPs by the count; and the shares with their source."""
    counted, unknown = facts.values.get("flops"), facts.unknown
    why = unknown.get("flops", "the work of a step is not known")
    facts.miss(why, "dominant_flops")
    facts.miss(unknown.get("profiler", "the profile recorded nothing"), "dominant_time")
    facts.miss(f"no profile, and no count: {why}", "shares", "attention_share")
    shares: dict[str, float] = {}
    if counted is not None:
        shares = {group: sum(counted["families"][name]["share"] for name in of) for group, of in FAMILIES.items()}
        facts.put("dominant_flops", max(shares, key=lambda group: shares[group]))
        facts.put("shares.source", "audited count: FLOPs of a step, not time")
    if profile is not None and profile["dominant"] is not None:
        rows = profile["families"]
        shares = {_OF_LETTER.get(name, name): row["share"] for name, row in rows.items() if row["share"] is not None}
        facts.put("dominant_time", _OF_LETTER.get(profile["dominant"], profile["dominant"]))
        source = "profile of rank 0: {} of steps {} to {}, communication included"
        facts.put("shares.source", source.format(profile["unit"], *profile["steps"]))
    if shares:
        shares = {group: min(1.0, share) for group, share in shares.items()}
        facts.put("shares.groups", shares)
        facts.put("attention_share", shares.get("attention", 0.0))


def write(run: str | os.PathLike[str]) -> Path:
    """Assemble the receipt of the run in folder ``run``, and write it there.

    Raises:
        DataError: nothing was recorded, or a file is damaged.
    """
    path = Path(run) / RECEIPT
    events.replace(path, text.dumps(assemble(run)) + "\n")
    return path


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Assemble the receipt of a run's folder; read and validate a receipt file, or that of a folder with no start in it.

    Raises:
        DataError: there is none, or it does not conform to the fields.
    """
    place = Path(path)
    if any(place.glob("start_*")):
        return assemble(place)
    place = place / RECEIPT if place.is_dir() else place
    expected = "a receipt, or the folder of a run that was observed"
    receipt = events.load(place, expected, "name the folder of its run, from which it is assembled anew")
    fields.validate(receipt, str(place))
    return dict(text.printable(receipt))
