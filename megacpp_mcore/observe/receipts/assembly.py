"""Makes a run's receipt from its folder: the parts of its ranks, its goodput, its steps, its profiles. No torch.

The same files give the same receipt, but for the time at which it was put together.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, kinds, routing
from megacpp_mcore.observe.flops.report import Utilisation
from megacpp_mcore.observe.peaks import PRECISIONS, peak
from megacpp_mcore.observe.receipts import schema as receipt_schema
from megacpp_mcore.observe.receipts import window as receipt_window
from megacpp_mcore.observe.receipts.disqualify import judge
from megacpp_mcore.observe.receipts.schema import FINISHED, NOT_PROFILED, RUNNING, SCHEMA
from megacpp_mcore.observe.receipts.window import Window
from megacpp_mcore.observe.steps import Step, kept, read_steps

PARTS, RECEIPT, STEPS = "parts", "receipt.json", "steps.jsonl"
_PART_NAME = re.compile(r"rank_(\d{5,9})\.json")
PROFILES = "profile"
"""Folder of the run's profiles, each a ``table.json`` of :mod:`megacpp_mcore.observe.profile.table`."""

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


_LOCAL = kinds.record(
    {
        "backends": kinds.list_of(receipt_schema.BACKEND),
        "parts": kinds.list_of(receipt_schema.PART),
        "buckets": kinds.nullable(kinds.list_of(receipt_schema.BUCKET)),
        "overlap_grad_reduce": kinds.nullable(kinds.FLAG),
    },
    more=True,
)
_MEMORY = kinds.record({"kind": kinds.TEXT, "allocated_peak_bytes": kinds.COUNT, "reserved_peak_bytes": kinds.COUNT})
_MOE = kinds.record(
    {
        "shared_expert_overlap": kinds.list_of(kinds.FLAG),
        "dispatchers": kinds.list_of(kinds.TEXT),
        "top_k": kinds.list_of(kinds.COUNT),
    },
    more=True,
)
_ROUTING = kinds.record(
    {
        "layers": kinds.map_of(receipt_schema.LOAD),
        "router_dtypes": kinds.map_of(kinds.TEXT),
        "index_overlap": kinds.map_of(kinds.SHARE),
    },
    {"not_counted": kinds.map_of(kinds.TEXT), "failed": kinds.nullable(kinds.TEXT)},
    more=True,
)
_WITHOUT_STEP = kinds.record({"began": kinds.TEXT, "how": kinds.TEXT, "number": kinds.SIZE})
_CACHE = kinds.record({"files": kinds.map_of(kinds.COUNT), "added": kinds.map_of(kinds.COUNT)})
_PART = kinds.record(
    {"schema": kinds.COUNT, "rank": kinds.COUNT, "status": kinds.TEXT, "warm_up_steps": kinds.COUNT,
     "notes": kinds.list_of(kinds.TEXT)},
    {
        "run": kinds.MAP,
        "unknown": kinds.map_of(kinds.TEXT),
        "failed": kinds.list_of(kinds.TEXT),
        "noted": kinds.list_of(receipt_schema.BACKEND),
        "local": _LOCAL,
        "memory": _MEMORY,
        "moe": _MOE,
        "routing": _ROUTING,
        "cache": _CACHE,
        "steps": kinds.COUNT,
        "without_step": _WITHOUT_STEP,
        "before": kinds.MAP,
    },
    more=True,
)  # fmt: skip
"""What a rank leaves of a start; ``run`` has the fields of a receipt by path, each of which may be doubtful alone. ``steps``
are those that it has done, and ``without_step`` is of the last of the starts after it that ended before their first. A start
that has done none yet keeps in ``before`` what an earlier one left."""
_FLOPS = kinds.record(
    {
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
_TABLE = kinds.record(
    {
        "steps": kinds.plain("the first and the last step", lambda steps: _is_span(steps)),
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


def _is_span(steps: Any) -> bool:
    return kinds.list_of(kinds.SIZE).accepts(steps) and len(steps) == 2 and steps[0] <= steps[1]


def part_file(run: str | os.PathLike[str], rank: int) -> Path:
    """The part of rank ``rank`` in the run's folder."""
    return Path(run) / PARTS / f"rank_{rank:05d}.json"


def now() -> str:
    """The time, UTC, in whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def assemble(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The receipt of the run in folder ``run``, as far as it has come.

    A damaged file makes unknown what it would have said, and the receipt says which: the other ranks' parts are not lost with
    the one of them that cannot be read.

    Raises:
        DataError: there is no part that can be read.
    """
    parts, damaged = _parts(Path(run))
    first = parts[0]
    values: dict[str, Any] = dict(first.get("run", {}))
    unknown: dict[str, str] = dict(first.get("unknown", {}))
    _drop_doubtful(values, unknown)
    world_size = values.get("parallelism.world_size") or math.inf
    parts = [part for part in parts if part["rank"] < world_size]  # an earlier start may have had more
    if not parts:
        raise DataError(
            f"{part_file(run, 0)} and others of the last start are missing; expected parts of ranks below {world_size}"
        )
    notes: list[str] = [why for rank, why in damaged if rank < world_size]
    steps = _steps(Path(run), unknown)
    profile = _read_profile(Path(run), world_size, unknown)
    stepped = any("without_step" in part for part in parts)
    window = _window(Path(run), first, world_size, stepped, unknown)
    if not kinds.map_of(kinds.TEXT).accepts(values.setdefault("environment", {})):
        notes.append(f"environment is {kinds.shown(values['environment'])}; expected the values of variables")
        values["environment"] = {}
    values |= {
        "schema": SCHEMA,
        "status": _status(parts, world_size),
        "written_at": now(),
        "ranks.expected": values.get("parallelism.world_size"),
        "ranks.found": [part["rank"] for part in parts],
    }
    for section in (
        _layers(parts, unknown),
        _memory(parts, unknown),
        _moe(parts, world_size, values, unknown),
        _cache(parts, window, unknown),
        _time(steps, window, unknown),
        _losses(steps, unknown),
        _goodput(Path(run), world_size, unknown, notes),
        _profile(profile, unknown),
    ):
        values |= section
    _drop_doubtful(values, unknown)
    values |= _speed(values, unknown)
    values |= _shares(values, profile, unknown)
    _drop_doubtful(values, unknown)
    values["disqualifiers"], values["unjudged"] = judge(values, steps, window, unknown.get("loss", ""))
    failed = [f"rank {part['rank']}: {one}" for part in parts for one in part.get("failed", ())]
    values["notes"] = [*first["notes"], *_without_step(parts), *failed, *notes, *_notes(values)]
    otherwise = f"the part of rank {first['rank']} does not say: the run ended before"
    return dict(kinds.printable(receipt_schema.nest(values, unknown, otherwise)))


def _drop_doubtful(values: dict[str, Any], unknown: dict[str, str]) -> None:
    """Make unknown what a field of a receipt cannot hold, with that as the reason."""
    doubts = receipt_schema.doubts(values)
    if "flops" in values and "flops" not in doubts and not kinds.nullable(_FLOPS).accepts(values["flops"]):
        doubts["flops"] = kinds.joined(list(_FLOPS.problems(values["flops"], "flops")))
    for path, why in doubts.items():
        values[path] = None
        unknown[path] = why


def _parts(run: Path) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """The parts that can be read, and of the others the rank (-1: none) and why not."""
    files = sorted((run / PARTS).glob("rank_*.json"))
    if not files:
        if any((run / goodput.FOLDER).glob("rank_*.jsonl")):
            raise DataError(
                f"{run / PARTS} holds no rank_*.json: the run was killed before it told anything of itself, or has "
                f"only just begun; `report goodput {run}` has its times"
            )
        raise DataError(f"{run / PARTS} holds no rank_*.json; expected the folder of a run that was observed")
    parts: list[dict[str, Any]] = []
    damaged: list[tuple[int, str]] = []
    for file in files:
        try:
            part = read_part(file)
        except DataError as error:
            damaged.append((_rank_of(file), f"a part is left out: {error}"))
            if len(damaged) == len(files):
                raise
        else:
            parts.append(part)
    if any("without_step" in part for part in parts):
        # A step needs every rank: those of this start that have not said so were killed, or are about to end.
        parts = [part["before"] if part["status"] == RUNNING and "before" in part else part for part in parts]
    return parts, damaged


def _rank_of(file: Path) -> int:
    """The rank that the name of a part says, or -1."""
    said = _PART_NAME.fullmatch(file.name)
    return -1 if said is None else int(said[1])


def read_part(file: Path) -> dict[str, Any]:
    """The part of a rank, checked.

    Raises:
        DataError: it is not what a rank writes; with the field, what was found, and what was expected.
    """
    part: dict[str, Any] = kinds.printable(load(file, "the part of a rank"))
    if part.get("schema") != SCHEMA:
        raise DataError(f"{file}: {receipt_schema.other_schema(part.get('schema'))}")
    try:
        for one in (part, part["before"]) if "before" in part else (part,):
            kinds.check(one, _PART)
        if part["rank"] != _rank_of(file):
            raise ValueError(f"rank is {part['rank']}; expected the one in the name of the file")
    except ValueError as error:
        raise DataError(f"{file}: not the part of a rank: {error}; delete the folder, or restore the file") from error
    return part


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
    if kinds.too_deep(found):
        raise DataError(
            f"{path} holds lists or objects more than {kinds.DEEPEST} deep in each other; expected {expected}"
        )
    return found


def _status(parts: Sequence[Mapping[str, Any]], world_size: float) -> str:
    """An error's name if there was one, ``finished`` if all ranks of the run have left their part and are, else ``running``."""
    states = [part["status"] for part in parts]
    unfinished = RUNNING in states or len(parts) < world_size
    return next((state for state in states if state not in (RUNNING, FINISHED)), RUNNING if unfinished else FINISHED)


def _without_step(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What became of the starts after the one that is told of, as the lowest rank says that met with it."""
    found: dict[str, str] = {}
    for said in (part["without_step"] for part in parts if "without_step" in part):
        before = f" (the last of {said['number']})" if said["number"] > 1 else ""
        found.setdefault(said["how"], f"a start at {said['began']} ended before its first step: {said['how']}{before}")
    return list(found.values())


def _steps(run: Path, unknown: dict[str, str]) -> list[Step]:
    """The steps that were kept, in order; none that a restart lost."""
    try:
        return kept(read_steps(run / STEPS))
    except DataError as error:
        unknown |= {"loss": str(error), "batch.effective_tokens": str(error)}
        return []


def _window(
    run: Path, first: Mapping[str, Any], world_size: float, stepped: bool, unknown: dict[str, str]
) -> Window | None:
    """The window of the start that the parts are of."""
    try:
        return receipt_window.read(run, first["warm_up_steps"], world_size, stepped=stepped)
    except DataError as error:
        unknown |= {"window": str(error), "step_time": str(error)}
        return None


# --- What ranks know --------------------------------------------------------------------------------------------------


def _layers(parts: Sequence[Mapping[str, Any]], unknown: dict[str, str]) -> dict[str, Any]:
    """Backends and parts of all pipeline stages, each once, and rank 0's buckets."""
    known = [part["local"] for part in parts if "local" in part]
    if not known:
        return {}
    backends: dict[str, Any] = {}
    classes: dict[tuple[str, ...], dict[str, Any]] = {}
    for part in parts:
        backends |= {json.dumps(record, sort_keys=True): record for record in part.get("noted", ())}
    for local in known:
        backends |= {json.dumps(record, sort_keys=True): record for record in local["backends"]}
        for one in local["parts"]:
            key = tuple(one[name] for name in ("part", "requested", "observed", "implementation"))
            merged = classes.setdefault(key, one | {"layers": []})
            merged["layers"] = _ordered({*merged["layers"], *one["layers"]})
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


def _ordered(layers: set[Any]) -> list[Any]:
    """Numbers first, then names."""
    return sorted(
        layers, key=lambda layer: (isinstance(layer, str), layer if isinstance(layer, int) else 0, str(layer))
    )


def _memory(parts: Sequence[Mapping[str, Any]], unknown: dict[str, str]) -> dict[str, Any]:
    known = [part["memory"] for part in parts if "memory" in part]
    if not known:
        return {}
    return {
        "memory.kind": known[0]["kind"],
        "memory.allocated_peak_bytes": max(one["allocated_peak_bytes"] for one in known),
        "memory.reserved_peak_bytes": max(one["reserved_peak_bytes"] for one in known),
        "memory.ranks": [one["allocated_peak_bytes"] for one in known],
    }


def _moe(
    parts: Sequence[Mapping[str, Any]], world_size: float, values: Mapping[str, Any], unknown: dict[str, str]
) -> dict[str, Any]:
    """The routers' loads over all ranks, and how the layers are wired."""
    if not values.get("moe_enabled"):
        return {}
    found: dict[str, Any] = {}
    wired = [part["moe"] for part in parts if "moe" in part]
    overlaps = {value for one in wired for value in one["shared_expert_overlap"]}
    found["routing.shared_expert_overlap"] = overlaps.pop() if len(overlaps) == 1 else None
    unknown.setdefault("routing.shared_expert_overlap", "no rank has MoE layers, or they differ")
    found["routing.dispatchers"] = sorted({name for one in wired for name in one["dispatchers"]})
    top_k = {value for one in wired for value in one["top_k"]}
    if top_k:
        found["routing.top_k"] = top_k.pop() if len(top_k) == 1 else None
        unknown.setdefault("routing.top_k", "the routers differ")
    records = [part["routing"] for part in parts if "routing" in part]
    uncounted = _why_uncounted(parts, world_size)
    if uncounted is not None:
        unknown |= dict.fromkeys((*(f"routing.{name}" for name in _MEASURED), "indexer.overlap"), uncounted)
        return found
    not_counted = {layer: why for record in records for layer, why in record.get("not_counted", {}).items()}
    try:
        loads = routing.merged(record["layers"] for record in records)
    except DataError as error:
        unknown |= {f"routing.{name}": str(error) for name in _MEASURED}
        return found
    loads = {layer: load for layer, load in loads.items() if layer not in not_counted}
    found["indexer.overlap"] = _mean_overlaps(records)
    unknown.setdefault(
        "indexer.overlap", "no two Full layers of one rank were sampled in a step with more tokens than top-k"
    )
    dtypes = sorted({name for record in records for name in record["router_dtypes"].values()})
    if not_counted:
        reason = "; ".join(f"layer {layer}: {why}" for layer, why in not_counted.items())
        unknown |= {f"routing.{name}": reason for name in _MEASURED}
        counted = {layer: load.record() for layer, load in loads.items()}
        return found | {"routing.layers": counted or None, "routing.router_dtypes": dtypes or None}
    if not loads or not any(load.asked for load in loads.values()):
        reason = "no router was observed up to a reading"
        unknown |= {f"routing.{name}": reason for name in _MEASURED}
        return found
    entropies = [load.entropy for load in loads.values() if load.entropy is not None]
    peaks = [load.max_over_mean for load in loads.values() if load.max_over_mean is not None]
    unknown.setdefault("routing.entropy", "there is one expert")
    return found | {
        "routing.layers": {layer: load.record() for layer, load in loads.items()},
        "routing.entropy": min(1.0, fmean(entropies)) if entropies else None,
        "routing.max_over_mean": fmean(peaks) if peaks else None,
        "routing.dropped_tokens": sum(load.dropped for load in loads.values()),
        "routing.router_dtypes": dtypes,
    }


def _why_uncounted(parts: Sequence[Mapping[str, Any]], world_size: float) -> str | None:
    """Why nothing can be told of the routing: what some ranks counted would pass for all ranks'. None where it can."""
    records = {part["rank"]: part["routing"] for part in parts if "routing" in part}
    failed = [record["failed"] for record in records.values() if record.get("failed") is not None]
    if failed:
        return failed[0]
    if world_size == math.inf:
        return "the run's processes are not known, and so not whether the counts of all are there"
    missing = [rank for rank in range(int(world_size)) if rank not in records]
    if missing:
        shown = ", ".join(map(str, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"the counts of rank {shown} are missing, and those of the others are not the whole"
    ended = [part["status"] for part in parts if part["status"] not in (RUNNING, FINISHED)]
    if ended and not any(record["layers"] or record.get("not_counted") for record in records.values()):
        return f"an error ended the run before the first reading: {ended[0]}"
    return None


_MEASURED = ("layers", "entropy", "max_over_mean", "dropped_tokens", "router_dtypes")


def _mean_overlaps(records: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    pairs: dict[str, list[float]] = {}
    for record in records:
        for pair, share in record["index_overlap"].items():
            pairs.setdefault(pair, []).append(share)
    return {pair: fmean(shares) for pair, shares in pairs.items()} or None


def _cache(parts: Sequence[Mapping[str, Any]], window: Window | None, unknown: dict[str, str]) -> dict[str, Any]:
    """Whether the caches of compiled kernels had what the run needed; those of all hosts together."""
    known = [part["cache"] for part in parts if "cache" in part]
    if not known:
        unknown["cache"] = "the run has not ended, or was killed: what it added to the caches was not counted"
        return {}
    files: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for one in known:
        files.update(one["files"])
        added.update(one["added"])
    state: str | None
    if sum(added.values()):
        state = "cold"
    elif window is not None and not window.compiled_ns:
        state = "unused"
    else:
        state = "warm" if sum(files.values()) else None
        unknown.setdefault("cache.state", "the caches are empty before and after")
    return {"cache.state": state, "cache.files": dict(files), "cache.added": dict(added)}


# --- What was measured ------------------------------------------------------------------------------------------------


def _time(steps: Sequence[Step], window: Window | None, unknown: dict[str, str]) -> dict[str, Any]:
    """The steps' times, and the tokens that every one of them had."""
    found: dict[str, Any] = {}
    sizes = set(receipt_window.tokens_of(steps).values())
    found["batch.effective_tokens"] = sizes.pop() if len(sizes) == 1 else None
    unknown.setdefault(
        "batch.effective_tokens", "no step was recorded" if not steps else "steps had different numbers of tokens"
    )
    if window is None:
        return found
    found["window.left_out"] = window.left_out
    if not window.seconds:
        reason = "the last start has done no step"
        if window.done:
            reason = f"the last start has no step after its first {window.left_out} that was not profiled"
        unknown |= {"step_time": reason, "window.first_step": reason, "window.last_step": reason}
        return found
    seconds = sorted(window.seconds.values())
    if not seconds[0]:
        reason = "a measured step took no time by its record, which no step does"
        unknown |= {"step_time": reason, "window.first_step": reason, "window.last_step": reason}
        return found
    found |= {
        "window.first_step": min(window.seconds),
        "window.last_step": max(window.seconds),
        "step_time.rank": window.rank,
        "step_time.n": len(seconds),
        "step_time.max_s": seconds[-1],
    }
    for percent in (50, 90, 99):
        found[f"step_time.p{percent}_s"] = receipt_window.percentile(seconds, percent)
    tokens = receipt_window.tokens_of(steps)
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


def _goodput(run: Path, world_size: float, unknown: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The goodput of the slowest rank; what is doubtful about the times of any goes to ``notes``."""
    try:
        ranks = goodput.read(run, world_size)
    except DataError as error:
        unknown["goodput"] = str(error)
        return {}
    of_note: dict[str, list[int]] = {}
    for rank, one in ranks.items():
        for note in one.notes:
            of_note.setdefault(note, []).append(rank)
    notes += [f"rank {', '.join(map(str, of))}: {note}" for note, of in of_note.items()]
    slowest = goodput.slowest(ranks)
    record = ranks[slowest].record()
    del record["notes"]
    return {"goodput": {"rank": slowest, **record}}


def _profile(profile: Mapping[str, Any] | None, unknown: dict[str, str]) -> dict[str, Any]:
    if profile is None:
        unknown.setdefault("profiler", NOT_PROFILED)
        return {}
    for name, why in (
        ("trigger", "the profile does not say"),
        ("graph_recaptures", "the profile does not say"),
        ("hidden_share", "there was no communication"),
    ):
        unknown.setdefault(f"profiler.{name}", why)
    return {
        "profiler.trigger": profile.get("trigger"),
        "profiler.step_range": list(profile["steps"]),
        "profiler.phase": profile["phase"],
        "profiler.graph_recaptures": profile.get("graph_recaptures"),
        "profiler.hidden_share": profile.get("hidden_share"),
    }


def _read_profile(run: Path, world_size: float, unknown: dict[str, str]) -> dict[str, Any] | None:
    """The last profile of steady steps, or else the last one, of the lowest rank that has one and is still in the run."""
    found = []
    for path in sorted((run / PROFILES).rglob("table.json")):
        try:
            profile = load(path, "the table of a profile")
        except DataError as error:
            unknown["profiler"] = str(error)
            continue
        try:
            kinds.check(profile, _TABLE)
        except ValueError as error:
            unknown["profiler"] = f"{path}: not the table of a profile: {error}; delete it, or profile again"
        else:
            found.append(kinds.printable(profile))
    current = [one for one in found if one["rank"] < world_size]
    return max(current, key=lambda one: (one["phase"] == "steady", one["steps"], -one["rank"]), default=None)


def _speed(values: Mapping[str, Any], unknown: dict[str, str]) -> dict[str, Any]:
    """Rates at the median step time."""
    seconds, tokens = values.get("step_time.p50_s"), values.get("batch.effective_tokens")
    devices = values.get("parallelism.world_size")
    if seconds is None or devices is None:
        unknown["throughput"] = unknown.get("step_time", "the run's processes are not known")
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
    """What the step mostly is: time by the profile, or else FLOPs by the count, and said which."""
    counted = values.get("flops")
    if profile is not None and profile["dominant"] is not None:
        families = profile["families"]
        shares = {
            _OF_LETTER.get(name, name): row["share"] for name, row in families.items() if row["share"] is not None
        }
        dominant = _OF_LETTER.get(profile["dominant"], profile["dominant"])
        source = "profile: {} of steps {} to {}".format(profile.get("unit", "time"), *profile["steps"])
    elif counted is not None:
        families = counted["families"]
        shares = {group: sum(families[name]["share"] for name in names) for group, names in _OF_GROUP.items()}
        dominant = max(shares, key=lambda group: shares[group])
        source = "audited count: FLOPs of a step, not time"
    else:
        why = f"no profile, and no count: {unknown.get('flops', 'the work of a step is not known')}"
        unknown |= dict.fromkeys(("shares", "dominant_cost", "attention_share", "lane_class"), why)
        return {}
    shares = {group: min(1.0, share) for group, share in shares.items()}
    classes = {name: sum(shares.get(group, 0.0) for group in groups) for name, groups in _LANE_CLASSES.items()}
    return {
        "shares.source": source,
        "shares.groups": shares,
        "dominant_cost": dominant,
        "attention_share": shares.get("attention", 0.0),
        "lane_class": max(classes, key=lambda name: classes[name]),
    }


def _notes(values: Mapping[str, Any]) -> list[str]:
    """How much a faster attention alone could bring (Amdahl's law, of what ``shares`` are about)."""
    share = values.get("attention_share")
    if share is None or share >= 1:
        return []
    timed = str(values["shares.source"]).startswith("profile")
    what = "profiled time" if timed else "FLOPs"
    counted = (
        []
        if timed
        else [f"{values['dominant_cost']} has the largest share of FLOPs; only a profile says what takes most time"]
    )
    return [
        *counted,
        f"attention is {share:.0%} of the {what}: without any of it a step would be {1 / (1 - share):.2f}x as fast by that",
    ]
