"""Makes a run's receipt from its folder: what its ranks wrote, and its profiles. No torch.

The same files give the same receipt, but for the time at which it was put together. It is of one start, for another may have
run with other backends: of the last one, or of the last that did a step where those after it came to nothing. Goodput and
losses are of all starts.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.model.flops.peaks import PRECISIONS, peak
from megacpp_mcore.model.flops.report import Utilisation
from megacpp_mcore.observe import events, goodput, routing
from megacpp_mcore.observe.clock import OF_A_STEP, Phase
from megacpp_mcore.observe.events import Start, Step
from megacpp_mcore.observe.receipts import schema
from megacpp_mcore.observe.receipts.claims import judge
from megacpp_mcore.observe.receipts.schema import FINISHED, NOT_PROFILED, RUNNING, SCHEMA
from megacpp_mcore.observe.steps import kept
from megacpp_mcore.util import kinds

WARM_UP_STEPS = 3
"""Steps at the beginning of a start that are not measured unless a run says otherwise."""
PROFILES = "profile"
"""Folder of the run's profiles, each a ``table.json`` of :mod:`megacpp_mcore.observe.profile.table`."""

_COMPILING = (Phase.COMPILE, Phase.JIT)
_OF_LETTER = {"A": "attention", "M": "mamba", "R": "recurrent", "E": "expert"}
_OF_GROUP = {
    "attention": ("attention_projections", "attention_core", "indexer"),
    "mamba": ("mamba_projections", "mamba_scan"),
    "recurrent": ("recurrent_projections", "convolution", "recurrence"),
    "expert": ("router", "routed_experts", "shared_experts"),
    "dense_ffn": ("dense_ffn", "mtp_projection"),
    "head": ("embedding", "head"),
}
_LANE_CLASSES = {
    "dense_attention": ("attention", "dense_ffn", "head", "mtp"),
    "expert": ("expert",),
    "mamba_recurrent": ("mamba", "recurrent"),
}
_MEASURED = ("layers", "entropy", "max_over_mean", "dropped_tokens", "router_dtypes")
"""The fields of ``routing`` that are counted."""

_FACTS = kinds.record(
    {},
    {
        "run": kinds.MAP,
        "unknown": kinds.map_of(kinds.TEXT),
        "warm_up_steps": kinds.COUNT,
        "notes": kinds.list_of(kinds.TEXT),
        "failed": kinds.list_of(kinds.TEXT),
        "noted": kinds.list_of(schema.BACKEND),
        "local": kinds.record(
            {
                "backends": kinds.list_of(schema.BACKEND),
                "parts": kinds.list_of(schema.PART),
                "buckets": kinds.nullable(kinds.list_of(schema.BUCKET)),
                "overlap_grad_reduce": kinds.nullable(kinds.FLAG),
            }
        ),
        "memory": kinds.named({"kind": "text", "allocated_peak_bytes": "count", "reserved_peak_bytes": "count"}),
        "moe": kinds.named(
            {"shared_expert_overlap": "list of flag", "dispatchers": "list of text", "top_k": "list of count"}
        ),
        "routing": kinds.record(
            {
                "layers": kinds.map_of(schema.LOAD),
                "router_dtypes": kinds.map_of(kinds.TEXT),
                "index_overlap": kinds.map_of(kinds.SHARE),
            },
            {"not_counted": kinds.map_of(kinds.TEXT), "failed": kinds.nullable(kinds.TEXT)},
            more=True,
        ),
        "cache": kinds.named({"files": "map of count", "added": "map of count"}),
    },
)
"""What a rank knows of its start; ``run`` has the fields of a receipt by path, each of which may be doubtful alone."""
_FLOPS = kinds.record(
    {
        "tokens": kinds.COUNT,
        "families": kinds.record(
            {name: kinds.record({"share": kinds.SHARE}, more=True) for names in _OF_GROUP.values() for name in names},
            more=True,
        ),
        "by_precision": kinds.map_of(
            kinds.record({"model_flops": kinds.COUNT, "hardware_flops": kinds.COUNT}, more=True),
            kinds.one_of(*PRECISIONS),
        ),
    },
    more=True,
)


def _is_span(steps: Any) -> bool:
    return kinds.list_of(kinds.SIZE).accepts(steps) and len(steps) == 2 and steps[0] <= steps[1]


_TABLE = kinds.record(
    {
        "steps": kinds.plain("the first and the last step", _is_span),
        "phase": kinds.TEXT,
        "families": kinds.map_of(kinds.record({"share": kinds.nullable(kinds.SHARE)}, more=True)),
        "rank": kinds.COUNT,
        "dominant": kinds.nullable(kinds.TEXT),
    },
    {
        "unit": kinds.TEXT,
        "trigger": kinds.nullable(kinds.TEXT),
        "graph_recaptures": kinds.nullable(kinds.COUNT),
        "hidden_share": kinds.nullable(kinds.SHARE),
    },
    more=True,
)


def assemble(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The receipt of the run in folder ``run``, as far as it has come.

    A file that is damaged is left out and named: the other ranks' are not lost with it.

    Raises:
        DataError: there is none that can be read.
    """
    damaged: list[tuple[int, DataError]] = []
    ranks = events.read(run, damaged)
    if not ranks:
        raise next((error for _, error in damaged), _nothing(run))
    processes, later = _of_the_receipt(ranks)
    for one in tuple(processes):
        try:
            one.facts = kinds.printable(one.facts)
            kinds.check(one.facts, _FACTS, "facts")
        except (ValueError, RecursionError) as error:
            problem = DataError(f"{one.path}: {error}; restore the file, or delete it")
            damaged.append((one.rank, problem))
            processes.remove(one)
            if not processes:
                raise problem from error
    world_size = processes[0].world_size
    ranks = {rank: starts for rank, starts in ranks.items() if rank < world_size}  # an earlier start may have had more
    first = processes[0].facts
    values: dict[str, Any] = dict(first.get("run", {}))
    unknown: dict[str, str] = dict(first.get("unknown", {}))
    notes = [f"rank {rank} is left out: {error}" for rank, error in damaged if rank < world_size]
    if not kinds.map_of(kinds.TEXT).accepts(values.setdefault("environment", {})):
        notes.append(f"environment is {kinds.shown(values['environment'])}; expected the values of variables")
        values["environment"] = {}
    _drop_doubtful(values, unknown)
    steps = _steps(ranks)
    profile = _read_profile(Path(run), world_size, unknown)
    window = measure(processes, first.get("warm_up_steps", WARM_UP_STEPS), _profiled(Path(run)))
    values |= {
        "schema": SCHEMA,
        "status": _status(processes, later),
        "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ranks.expected": world_size,
        "ranks.found": [one.rank for one in processes],
    }
    for section in (
        _layers(processes, unknown),
        _memory(processes),
        _moe(processes, values, unknown),
        _cache(processes, window, unknown),
        _time(steps, window, unknown),
        _losses(steps, unknown),
        _goodput(ranks, notes),
        _profile(profile, unknown),
    ):
        values |= section
    _drop_doubtful(values, unknown)
    values |= _speed(values, unknown)
    values |= _shares(values, profile, unknown)
    _drop_doubtful(values, unknown)
    values["disqualifiers"], values["unjudged"] = judge(values, steps, window, _overlap(ranks))
    failed = [f"rank {one.rank}: {failure}" for one in processes for failure in one.facts.get("failed", ())]
    values["notes"] = [*first.get("notes", ()), *_later(later), *failed, *notes, *_amdahl(values)]
    otherwise = f"rank {processes[0].rank} does not say: the run ended before"
    return dict(kinds.printable(schema.nest(values, unknown, otherwise)))


def _nothing(run: str | os.PathLike[str]) -> DataError:
    return DataError(
        f"{run} has a file of a rank, and no whole line in it: the run was killed at once, or has only just begun"
    )


def _drop_doubtful(values: dict[str, Any], unknown: dict[str, str]) -> None:
    """Make unknown what a field of a receipt cannot hold, with that as the reason."""
    doubts = schema.doubts(values)
    if "flops" in values and "flops" not in doubts and not kinds.nullable(_FLOPS).accepts(values["flops"]):
        doubts["flops"] = kinds.joined(list(_FLOPS.problems(values["flops"], "flops")))
    for path, why in doubts.items():
        values[path] = None
        unknown[path] = why


def _of_the_receipt(ranks: Mapping[int, Sequence[Start]]) -> tuple[list[Start], list[list[Start]]]:
    """The processes of the last start that did a step, or else came to a model, or else of the last; and the starts after."""
    groups = events.grouped(ranks)
    for has_more in (lambda one: one.done > 0, lambda one: "moe_enabled" in one.facts.get("run", ()), lambda _: True):
        for index in range(len(groups) - 1, -1, -1):
            if any(map(has_more, groups[index])):
                return groups[index], groups[index + 1 :]
    raise AssertionError("unreachable: a run has a start")


def _status(processes: Sequence[Start], later: Sequence[Sequence[Start]]) -> str:
    """An error's name if there was one, ``finished`` if all processes were, else ``running``, also if a later start is."""
    states = [one.how or RUNNING for one in processes]
    unfinished = RUNNING in states or len(processes) < processes[0].world_size or (later and _how(later[-1]) is None)
    return next((state for state in states if state not in (RUNNING, FINISHED)), RUNNING if unfinished else FINISHED)


def _how(processes: Sequence[Start]) -> str | None:
    """How a start ended, by an error's name where there is one; None while it has not."""
    states = {one.how for one in processes}
    return next((how for how in states if how not in (None, FINISHED)), None if None in states else FINISHED)


def _later(later: Sequence[Sequence[Start]]) -> list[str]:
    """What became of the starts after the one that the receipt is of."""
    if not later:
        return []
    how, began_s = _how(later[-1]), min(one.began_ns for one in later[-1]) // 10**9
    began = datetime.datetime.fromtimestamp(began_s, datetime.UTC).isoformat()
    count = f" (the last of {len(later)})" if len(later) > 1 else ""
    if how is None:
        return [f"a start at {began} has not come to its first step yet, or was killed before{count}"]
    return [f"a start at {began} ended before its first step: {how}{count}"]


def _overlap(ranks: Mapping[int, Sequence[Start]]) -> str:
    """Which starts recorded in this folder at the same time; empty where none did."""
    found = [(rank, both) for rank, starts in ranks.items() if (both := events.overlaps(starts))]
    if not found:
        return ""
    rank, both = found[0]
    names = ", ".join(start.name for start in both)
    more = f", and of {len(found) - 1} more ranks" if len(found) > 1 else ""
    return f"{names} of rank {rank}{more} were recorded at the same time: two trainings in one folder, or clocks that differ"


def _steps(ranks: Mapping[int, Sequence[Start]]) -> list[Step]:
    """The steps that were kept, in order; none that a restart lost."""
    starts = sorted((start.number, rank, start) for rank, starts in ranks.items() for start in starts if start.steps)
    return kept([step for _, _, start in starts for step in start.steps])


# --- The steps that are measured --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What is measured.

    A step's time is that from the end of the step before to its own end, without checkpoints, evaluation, start-up and the
    profiler. So it holds the wait for data and the loop's own housekeeping, and does not depend on where in the step the host
    waits for the GPU.

    Attributes:
        done: steps that the start did, the most of a rank.
        left_out: of these, how many at its beginning are not measured.
        rank: whose steps these are, the rank with the largest median.
        seconds: of each step, by number, in the order of the steps.
        compiled: nanoseconds of compilation in those steps in which any rank compiled.
        compiled_ns: nanoseconds of compilation of all ranks in all steps of the start and before them.
    """

    done: int
    left_out: int
    rank: int
    seconds: Mapping[int, float]
    compiled: Mapping[int, int]
    compiled_ns: int


def measure(processes: Sequence[Start], left_out: int, profiled: Sequence[tuple[int, int]] = ()) -> Window:
    """The window of one start, without steps that were profiled, nor the one after, in which a rank may wait for others."""
    times: dict[int, dict[int, float]] = {}
    compiled: Counter[int] = Counter()
    for one in processes:
        steps = [(span.step, span.phases) for span in one.spans if span.step is not None][left_out:]
        measured = [(number, phases) for number, phases in steps if not _within(number, profiled)]
        times[one.rank] = {number: _total(phases, OF_A_STEP) / 1e9 for number, phases in measured}
        compiled.update({number: _total(phases, _COMPILING) for number, phases in measured})
    slowest = max(times, key=lambda one: (percentile(sorted(times[one].values()), 50) if times[one] else 0.0, -one))
    return Window(
        done=max(one.done for one in processes),
        left_out=left_out,
        rank=slowest,
        seconds=times[slowest],
        compiled={number: spent for number, spent in sorted(compiled.items()) if spent},
        compiled_ns=sum(_total(span.phases, _COMPILING) for one in processes for span in one.spans),
    )


def _total(phases: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(phases.get(name, 0) for name in names)


def _within(number: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _profiled(run: Path) -> list[tuple[int, int]]:
    """First and last of the steps that a profile took part in."""
    spans = [folder.name.split("-") for folder in (run / PROFILES).glob("*-*")]
    return [(int(span[0]), int(span[1]) + 1) for span in spans if len(span) == 2 and all(map(str.isdecimal, span))]


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of them do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def tokens_of(steps: Sequence[Step]) -> dict[int, int]:
    """Tokens of each step that follows a recorded one, and of step 1."""
    before = {step.step: step.tokens for step in steps} | {0: 0}
    return {step.step: step.tokens - before[step.step - 1] for step in steps if step.step - 1 in before}


def _time(steps: Sequence[Step], window: Window, unknown: dict[str, str]) -> dict[str, Any]:
    """The steps' times, and the tokens that every one of them had."""
    tokens = tokens_of(steps)
    sizes = set(tokens.values())
    found: dict[str, Any] = {"batch.effective_tokens": sizes.pop() if len(sizes) == 1 else None}
    why = "steps had different numbers of tokens" if steps else "no step was recorded"
    unknown.setdefault("batch.effective_tokens", why)
    found["window.left_out"] = window.left_out
    seconds = sorted(window.seconds.values())
    reason = ""
    if not seconds:
        nothing = (
            f"has no step after its first {window.left_out} that was not profiled"
            if window.done
            else "has done no step"
        )
        reason = f"the last start {nothing}"
    elif not seconds[0]:
        reason = "a measured step took no time by its record, which no step does"
    if reason:
        unknown |= {"step_time": reason, "window.first_step": reason, "window.last_step": reason}
        return found
    found |= {
        "window.first_step": min(window.seconds),
        "window.last_step": max(window.seconds),
        "step_time.rank": window.rank,
        "step_time.n": len(seconds),
        "step_time.max_s": seconds[-1],
        **{f"step_time.p{percent}_s": percentile(seconds, percent) for percent in (50, 90, 99)},
    }
    measured = [number for number in window.seconds if number in tokens]
    if measured:
        time_s = sum(window.seconds[number] for number in measured)
        found["throughput.tokens_per_s_mean"] = sum(tokens[number] for number in measured) / time_s
    return found


def _losses(steps: Sequence[Step], unknown: dict[str, str]) -> dict[str, Any]:
    losses = [(step.step, step.losses["lm loss"]) for step in steps if "lm loss" in step.losses]
    if not losses:
        unknown.setdefault("loss", "no step with an lm loss was recorded")
        return {}
    found: dict[str, Any] = {}
    for name, (number, loss) in (("first", losses[0]), ("last", losses[-1])):
        found[f"loss.{name}_step"] = number
        found[f"loss.{name}"] = loss if math.isfinite(loss) else None
        unknown.setdefault(f"loss.{name}", f"it is {loss}")
    return found


def _goodput(ranks: Mapping[int, Sequence[Start]], notes: list[str]) -> dict[str, Any]:
    """The goodput of the slowest rank; what is doubtful about the times of any goes to ``notes``."""
    found = goodput.of_starts(ranks)
    of_note: dict[str, list[int]] = {}
    for rank, one in found.items():
        for note in one.notes:
            of_note.setdefault(note, []).append(rank)
    notes += [f"rank {', '.join(map(str, of))}: {note}" for note, of in of_note.items()]
    slowest = goodput.slowest(found)
    record = found[slowest].record()
    del record["notes"]
    return {"goodput": {"rank": slowest, **record}}


# --- What processes know ----------------------------------------------------------------------------------------------


def _known(processes: Sequence[Start], name: str) -> list[Any]:
    """What each process that knows ``name`` knows of it."""
    return [one.facts[name] for one in processes if name in one.facts]


def _layers(processes: Sequence[Start], unknown: dict[str, str]) -> dict[str, Any]:
    """Backends and parts of all pipeline stages, each once, and rank 0's buckets."""
    known = _known(processes, "local")
    if not known:
        return {}
    records = [*_known(processes, "noted"), *(local["backends"] for local in known)]
    backends = {json.dumps(record, sort_keys=True): record for one in records for record in one}
    classes: dict[tuple[str, ...], dict[str, Any]] = {}
    for local in known:
        for one in local["parts"]:
            key = tuple(one[name] for name in ("part", "requested", "observed", "implementation"))
            merged = classes.setdefault(key, one | {"layers": []})
            numbers = {*merged["layers"], *one["layers"]}
            merged["layers"] = sorted(numbers, key=lambda layer: (isinstance(layer, str), str(layer).zfill(31)))
    buckets = known[0]["buckets"]
    if buckets is None:
        unknown["ddp"] = "something else than Megatron's DistributedDataParallel holds the gradients"
    return {
        "backends": sorted(
            backends.values(), key=lambda one: (one["layer"] is None, one["layer"] or 0, one["op"], one["observed"])
        ),
        "parts": list(classes.values()),
        "ddp.buckets": buckets,
        "ddp.grad_reduce_dtype": None if buckets is None else sorted({bucket["dtype"] for bucket in buckets}),
        "ddp.overlap_grad_reduce": known[0]["overlap_grad_reduce"],
    }


def _memory(processes: Sequence[Start]) -> dict[str, Any]:
    known = _known(processes, "memory")
    if not known:
        return {}
    return {
        "memory.kind": known[0]["kind"],
        "memory.allocated_peak_bytes": max(one["allocated_peak_bytes"] for one in known),
        "memory.reserved_peak_bytes": max(one["reserved_peak_bytes"] for one in known),
        "memory.ranks": [one["allocated_peak_bytes"] for one in known],
    }


def _moe(processes: Sequence[Start], values: Mapping[str, Any], unknown: dict[str, str]) -> dict[str, Any]:
    """The routers' loads over all ranks, and how the layers are wired."""
    if not values.get("moe_enabled"):
        return {}
    wired, records = _known(processes, "moe"), _known(processes, "routing")
    found: dict[str, Any] = {"routing.dispatchers": sorted({name for one in wired for name in one["dispatchers"]})}
    for name, why in (
        ("shared_expert_overlap", "no rank has MoE layers, or they differ"),
        ("top_k", "the routers differ"),
    ):
        seen = {value for one in wired for value in one[name]}
        if seen or name != "top_k":  # which is configured, too
            found[f"routing.{name}"] = seen.pop() if len(seen) == 1 else None
            unknown.setdefault(f"routing.{name}", why)
    measured = [f"routing.{name}" for name in _MEASURED]
    uncounted = _why_uncounted(processes)
    if uncounted is not None:
        unknown |= dict.fromkeys((*measured, "indexer.overlap"), uncounted)
        return found
    not_counted = {layer: why for record in records for layer, why in record.get("not_counted", {}).items()}
    try:
        loads = routing.merged(record["layers"] for record in records)
    except DataError as error:
        unknown |= dict.fromkeys(measured, str(error))
        return found
    loads = {layer: load for layer, load in loads.items() if layer not in not_counted}
    found["indexer.overlap"] = _mean_overlaps(records)
    unknown.setdefault(
        "indexer.overlap", "no two Full layers of one rank were sampled in a step with more tokens than top-k"
    )
    found["routing.router_dtypes"] = sorted({name for one in records for name in one["router_dtypes"].values()}) or None
    found["routing.layers"] = {layer: load.record() for layer, load in loads.items()} or None
    if not_counted:
        reason = "; ".join(f"layer {layer}: {why}" for layer, why in not_counted.items())
        unknown |= dict.fromkeys(measured, reason)
        return found
    if not any(load.asked for load in loads.values()):
        unknown |= dict.fromkeys(measured, "no router was observed up to a reading")
        return found | {"routing.layers": None, "routing.router_dtypes": None}
    entropies = [load.entropy for load in loads.values() if load.entropy is not None]
    peaks = [load.max_over_mean for load in loads.values() if load.max_over_mean is not None]
    unknown.setdefault("routing.entropy", "there is one expert")
    return found | {
        "routing.entropy": min(1.0, fmean(entropies)) if entropies else None,
        "routing.max_over_mean": fmean(peaks) if peaks else None,
        "routing.dropped_tokens": sum(load.dropped for load in loads.values()),
    }


def _why_uncounted(processes: Sequence[Start]) -> str | None:
    """Why the routing is not known: what some ranks counted would pass for all ranks'. None where it is."""
    records = {one.rank: one.facts["routing"] for one in processes if "routing" in one.facts}
    failed = [record["failed"] for record in records.values() if record.get("failed") is not None]
    if failed:
        return str(failed[0])
    missing = [rank for rank in range(processes[0].world_size) if rank not in records]
    if missing:
        shown = ", ".join(map(str, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"the counts of rank {shown} are missing, and those of the others are not the whole"
    ended = [one.how for one in processes if one.how not in (None, FINISHED)]
    if ended and not any(record["layers"] or record.get("not_counted") for record in records.values()):
        return f"an error ended the run before the first reading: {ended[0]}"
    return None


def _mean_overlaps(records: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    pairs: dict[str, list[float]] = {}
    for record in records:
        for pair, share in record["index_overlap"].items():
            pairs.setdefault(pair, []).append(share)
    return {pair: fmean(shares) for pair, shares in pairs.items()} or None


def _cache(processes: Sequence[Start], window: Window, unknown: dict[str, str]) -> dict[str, Any]:
    """Whether the caches of compiled kernels had what the run needed; those of all hosts together."""
    known = _known(processes, "cache")
    if not known:
        unknown["cache"] = "the run has not ended, or was killed: what it added to the caches was not counted"
        return {}
    files, added = Counter[str](), Counter[str]()
    for one in known:
        files.update(one["files"])
        added.update(one["added"])
    state: str | None = "warm" if sum(files.values()) else None
    if not window.compiled_ns:
        state = "unused"  # what came meanwhile is another process's
    elif sum(added.values()):
        state = "cold"
    unknown.setdefault("cache.state", "the caches are empty before and after")
    return {"cache.state": state, "cache.files": dict(files), "cache.added": dict(added)}


# --- Profiles, speed and shares ---------------------------------------------------------------------------------------


def load(path: Path, expected: str, remedy: str = "restore the file, or delete it") -> dict[str, Any]:
    """The object in the JSON file at ``path``.

    Args:
        path: the file.
        expected: what it should be, in words.
        remedy: what to do where it is damaged.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is no regular file; expected {expected}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected {expected}") from error
    except ValueError as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}{where}: no JSON, damaged or cut off; expected {expected}: {remedy}") from error
    except RecursionError:
        found = []
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}; expected {expected}")
    return found


def _read_profile(run: Path, world_size: int, unknown: dict[str, str]) -> dict[str, Any] | None:
    """The last profile of steady steps, or else the last one, of the lowest rank that has one and is still in the run."""
    found = []
    for path in sorted((run / PROFILES).rglob("table.json")):
        try:
            profile = load(path, "the table of a profile")
            kinds.check(profile, _TABLE)
        except DataError as error:
            unknown["profiler"] = str(error)
        except (ValueError, RecursionError) as error:
            unknown["profiler"] = f"{path}: not the table of a profile: {error}; delete it, or profile again"
        else:
            found.append(kinds.printable(profile))
    current = [one for one in found if one["rank"] < world_size]
    return max(current, key=lambda one: (one["phase"] == "steady", one["steps"], -one["rank"]), default=None)


def _profile(profile: Mapping[str, Any] | None, unknown: dict[str, str]) -> dict[str, Any]:
    if profile is None:
        unknown.setdefault("profiler", NOT_PROFILED)
        return {}
    for name in ("trigger", "graph_recaptures"):
        unknown.setdefault(f"profiler.{name}", "the profile does not say")
    unknown.setdefault("profiler.hidden_share", "there was no communication, or no device to see it hidden")
    values = {name: profile.get(name) for name in ("trigger", "phase", "graph_recaptures", "hidden_share")}
    return {"profiler.step_range": list(profile["steps"]), **{f"profiler.{name}": one for name, one in values.items()}}


def _speed(values: Mapping[str, Any], unknown: dict[str, str]) -> dict[str, Any]:
    """Rates at the median step time."""
    seconds, tokens = values.get("step_time.p50_s"), values.get("batch.effective_tokens")
    devices = values["ranks.expected"]
    if seconds is None:
        unknown["throughput"] = unknown["step_time"]
        return {}
    found: dict[str, Any] = {}
    if tokens is not None:
        found["throughput.tokens_per_s"] = tokens / seconds
        found["throughput.tokens_per_s_per_device"] = tokens / seconds / devices
    for name in ("tokens_per_s", "tokens_per_s_per_device", "tokens_per_s_mean"):
        unknown.setdefault(f"throughput.{name}", unknown.get("batch.effective_tokens", "no step was recorded"))
    counted = values.get("flops")
    if counted is None:
        why = unknown.get("flops", "the work of a step is not known")
        unknown |= {f"throughput.{name}": why for name in ("tflops_per_s_per_device", "mfu", "hfu")}
        return found
    by_precision = counted["by_precision"]
    used = Utilisation(
        step_time_s=seconds,
        devices=devices,
        model_flops={name: one["model_flops"] for name, one in by_precision.items()},
        hardware_flops={name: one["hardware_flops"] for name, one in by_precision.items()},
        peaks={name: peak(values.get("device") or "an unknown device", name) for name in by_precision},
    )
    for name in ("mfu", "hfu"):
        unknown.setdefault(f"throughput.{name}", used.reason or "")
    return found | {
        "throughput.tflops_per_s_per_device": used.tflops_per_device,
        "throughput.mfu": used.mfu,
        "throughput.hfu": used.hfu,
    }


def _shares(values: Mapping[str, Any], profile: Mapping[str, Any] | None, unknown: dict[str, str]) -> dict[str, Any]:
    """What a step mostly is: time by the profile, FLOPs by the count, and of which of them the shares are."""
    counted, found = values.get("flops"), {}
    shares: dict[str, float] = {}
    if counted is not None:
        families = counted["families"]
        shares = {group: sum(families[name]["share"] for name in names) for group, names in _OF_GROUP.items()}
        found["dominant_flops"] = max(shares, key=lambda group: shares[group])
        found["shares.source"] = "audited count: FLOPs of a step, not time"
    unknown.setdefault("dominant_flops", unknown.get("flops", "the work of a step is not known"))
    if profile is not None and profile["dominant"] is not None:
        rows = profile["families"]
        shares = {_OF_LETTER.get(name, name): row["share"] for name, row in rows.items() if row["share"] is not None}
        found["dominant_time"] = _OF_LETTER.get(profile["dominant"], profile["dominant"])
        found["shares.source"] = "profile: {} of steps {} to {}".format(profile.get("unit", "time"), *profile["steps"])
    unknown.setdefault("dominant_time", unknown.get("profiler", "the profile recorded nothing"))
    if not shares:
        why = f"no profile, and no count: {unknown['dominant_flops']}"
        unknown |= dict.fromkeys(("shares", "attention_share", "lane_class"), why)
        return found
    shares = {group: min(1.0, share) for group, share in shares.items()}
    classes = {name: sum(shares.get(group, 0.0) for group in groups) for name, groups in _LANE_CLASSES.items()}
    return found | {
        "shares.groups": shares,
        "attention_share": shares.get("attention", 0.0),
        "lane_class": max(classes, key=lambda name: classes[name]),
    }


def _amdahl(values: Mapping[str, Any]) -> list[str]:
    """How much a faster attention alone could bring (Amdahl's law, of what ``shares`` are about)."""
    share = values.get("attention_share")
    if share is None or share >= 1:
        return []
    what = "FLOPs" if values.get("dominant_time") is None else "profiled time"
    return [
        f"attention is {share:.0%} of the {what}: without any of it a step would be {1 / (1 - share):.2f}x as fast by that"
    ]


# --- The receipt in the folder ----------------------------------------------------------------------------------------

RECEIPT = "receipt.json"


def write(run: str | os.PathLike[str]) -> Path:
    """Assemble the receipt of the run in folder ``run``, check it, and write it there.

    Raises:
        DataError: nothing was recorded, or what is there is damaged.
    """
    receipt = assemble(run)
    schema.validate(receipt, str(run))
    path = Path(run) / RECEIPT
    events.replace(path, json.dumps(receipt, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The receipt in a file, or of a run's folder; checked.

    Of a folder in which nothing can be read it is the one that was written there last, which says so.

    Raises:
        DataError: there is none, or it is not as the schema says.
    """
    place, expected = Path(path), "a receipt, or the folder of a run that was observed"
    if not place.is_dir():
        receipt = load(place, expected, "name the folder of its run, from which it is assembled anew")
        schema.validate(receipt, str(path))
        return receipt
    try:
        receipt = assemble(place)
    except DataError as error:
        if not (place / RECEIPT).exists():
            raise
        receipt = load(place / RECEIPT, expected)
        schema.validate(receipt, str(place / RECEIPT))
        note = f"this is {RECEIPT} as it was written last, for none can be assembled: {error}"
        receipt["notes"].append(kinds.printable(note))
        return receipt
    schema.validate(receipt, str(path))
    return receipt
