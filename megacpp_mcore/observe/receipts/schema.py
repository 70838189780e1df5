"""What a receipt holds, field by field, and what each field is for; the table in docs/receipts.md is made from it. No torch.

A receipt is JSON. What is not known is null, and ``unknown`` says why, under the field's path or that of a group that it is in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.util import kinds
from megacpp_mcore.util.kinds import Kind

SCHEMA = 2
"""The version of the schema; another number is another schema."""

DISQUALIFIERS = (
    "mock data",
    "forced balance",
    "capacity drop",
    "indexer untrained",
    "warm-up inside the window",
    "fall-back",
    "NaN skipped",
    "batch changed",
    "overlapping starts",
)
"""What makes a run's speed no speed of training, in the order in which it is judged."""

RUNNING, FINISHED = "running", events.FINISHED
NOT_PROFILED = "the run was not profiled"
"""Why a receipt has no profile, where there was none to be had; any other reason is of one that cannot be read."""
RESIDENT = "resident set"
"""The kind of memory that the CPU lane answers with: of the whole process, whatever it holds."""


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: as :func:`megacpp_mcore.util.kinds.named` reads it.
        meaning: what it says, with its unit.
        label: what people call it; empty: only the JSON and the table of the documentation have it.
        form: how its value is written for people, a key of :data:`FORMS`.
        shown: whether ``report show`` prints it; the page shows every field with a label.
        line: the line of a comparison on which two receipts have to agree about it; empty: none.
        nullable: whether it may be unknown.
        values: the texts that it may be; any, if empty.
        items: of a list or map of records, the fields of one and their kinds.
        keys: of a map that is a record, its fields and their kinds.
    """

    path: str
    kind: str
    meaning: str
    label: str = ""
    form: str = "plain"
    shown: bool = False
    line: str = ""
    nullable: bool = True
    values: tuple[str, ...] = ()
    items: Mapping[str, str] | None = None
    keys: Mapping[str, str] | None = None

    @functools.cached_property
    def expected(self) -> Kind:
        """What its value has to be where it is not null."""
        if self.values:
            return kinds.one_of(*self.values)
        if self.keys is not None:
            return kinds.named(self.keys)
        if self.items is not None:
            one = kinds.named(self.items)
            return kinds.list_of(one) if self.kind == "list" else kinds.map_of(one)
        return kinds.named(self.kind)

    def problems(self, value: Any) -> Iterator[str]:
        """What is wrong with ``value``, which is not null."""
        yield from self.expected.problems(value, self.path)

    def describe(self) -> str:
        """Its kind, in Markdown."""
        if self.values:
            return f"one of {', '.join(f'`{value}`' for value in self.values)}"
        if self.keys is not None:
            return f"{{{', '.join(self.keys)}}}"
        return self.kind if self.items is None else f"{self.kind} of {{{', '.join(self.items)}}}"


_BACKEND = {
    "op": "text", "layer": "count?", "requested": "text", "observed": "text", "speed": "text", "slower_than_best": "flag",
    "reason": "text",
}  # fmt: skip
_PART = {"part": "text", "requested": "text", "observed": "text", "implementation": "text", "layers": "list of layer"}
_PATCH = {"name": "text", "state": "text", "fingerprints": "map of text"}
_OVERLAP = {"name": "text", "asked": "flag", "possible": "flag", "reason": "text"}
_BUCKET = {"group": "text", "dtype": "text", "elements": "count", "bytes": "count"}
_DATASET = {"name": "text", "weight": "number?", "sha256": "text?"}
_LOAD = {
    "tokens_per_expert": "list of count", "asked": "count", "dropped": "count", "entropy": "amount?",
    "max_over_mean": "amount?",
}  # fmt: skip
_GOODPUT = {
    "rank": "count", "goodput": "share", "wall_s": "amount", "seconds": "map of amount", "starts": "count", "steps": "count",
    "steps_lost": "count",
}  # fmt: skip
BACKEND, PART, BUCKET, LOAD = map(kinds.named, (_BACKEND, _PART, _BUCKET, _LOAD))
"""What the lines of ranks and a receipt have in common."""

_F = Field
FIELDS: tuple[Field, ...] = (
    _F("schema", "count", f"version of this schema, {SCHEMA}", nullable=False),
    _F("status", "text", "`running` (or killed), `finished`, or the name of the error that ended it", "status", shown=True,
       nullable=False),
    _F("written_at", "text", "when it was put together, UTC", nullable=False),
    _F("ranks.expected", "size", "processes of the run"),
    _F("ranks.found", "list of count", "ranks that left what they know", nullable=False),
    # what was trained
    _F("family", "text", "model family, such as `NAM56R`", "family", shown=True),
    _F("model.name", "text", "name of the model's definition", "model"),
    _F("pattern", "text", "the model's pattern of A, M, E and R layers as it was written", "pattern", shown=True,
       line="pattern"),
    _F("model.layers", "text", "the letter of every layer", line="pattern"),
    _F("model.parameters", "count", "parameters of the whole model", "parameters", "count"),
    _F("model.definition", "map of value", "the whole definition", line="pattern"),
    _F("moe_enabled", "flag", "whether the model has experts", line="routed_experts"),
    _F("device", "text", "what it ran on, as CUDA names it", "device", shown=True, line="topology"),
    _F("lane", "text", "device and compile mode, such as `cuda_regional_compile`", "lane", shown=True),
    _F("parallelism.world_size", "size", "processes, one a device", "devices", shown=True, line="topology"),
    _F("parallelism.hosts", "size", "hosts", line="topology"),
    _F("parallelism.tensor", "size", "tensor parallelism", "tensor parallel", line="topology"),
    _F("parallelism.pipeline", "size", "pipeline stages", "pipeline stages", line="topology"),
    _F("parallelism.virtual", "size", "virtual stages of each", line="topology"),
    _F("parallelism.expert", "size", "expert parallelism", "expert parallel", line="topology"),
    _F("parallelism.context", "size", "context parallelism", "context parallel", line="topology"),
    _F("parallelism.data", "size", "data-parallel replicas", line="topology"),
    _F("parallelism.sequence_parallel", "flag", "sequence parallelism", line="topology"),
    _F("batch.micro_batch_size", "size", "sequences of a micro-batch", line="batch_geometry"),
    _F("batch.global_batch_size", "size", "sequences of a step over all replicas", "global batch", "count",
       line="batch_geometry"),
    _F("batch.accumulation", "size", "micro-batches of a step on one replica", line="batch_geometry"),
    _F("batch.rampup", "flag", "whether the batch grows during the run", line="batch_geometry"),
    _F("batch.sequence_length", "size", "tokens of a sequence", "sequence", "count", line="sequence_length"),
    _F("batch.documents", "text", "`together`, `masked` (rows) or `packed` (one row a micro-batch)", "documents",
       line="sequence_length"),
    _F("batch.effective_tokens", "size", "tokens of one step: sequences that it consumed times their length, "
       "padding and masked tokens included; null when steps differ", "tokens a step", "count", line="effective_tokens"),
    _F("data.kind", "text", "`real` or `mock`", "data", line="real_data", values=("real", "mock")),
    _F("data.checksum", "text", "SHA-256 over the datasets' checksums and weights, those in files of blends "
       "included, and the split", "data checksum", "hash", line="real_data"),
    _F("data.datasets", "list", "name, weight and `.bin` checksum of each, blend by blend", items=_DATASET),
    _F("data.fill_in_the_middle", "flag", "whether documents are cut up for fill in the middle", line="real_data"),
    _F("tokenizer.kind", "text", "Megatron's name of its type", line="real_data"),
    _F("tokenizer.checksum", "text", "checksum of the tokenizer that made the data", line="real_data"),
    _F("tokenizer.vocab_size", "count", "rows of the embedding, padding included", line="real_data"),
    # how it was computed
    _F("precision.model_dtype", "text", "parameters and activations, as configured", "model dtype", line="precision"),
    _F("precision.kernel_fp8", "text", "whose matrix products run in FP8, as configured: `none`, `experts`, or "
       "Megatron's own", "FP8 kernels", shown=True, line="precision"),
    _F("precision.dispatch", "text", "what a module does that was named for FP8 and cannot, as configured: `none` "
       "or `refuse`", line="precision"),
    _F("precision.checkpoint_owner", "text", "whose function recomputes activations, as configured", line="precision"),
    _F("precision.fp8_layers", "list of count", "layers whose experts were built to run in FP8, as observed", line="precision"),
    _F("compile_warmup", "text", "whether regions were to be compiled before step 1, as the launch policy chose",
       "compile warm-up", shown=True, line="compile_policy", values=("explicit", "skipped")),
    _F("compile.mode", "text", "`off` or `regional`, as configured", "compile", line="compile_policy",
       values=("off", "regional")),
    _F("compile.reason", "text", "why the warm-up was skipped; empty when it was not", line="compile_policy"),
    _F("compile.precompile", "flag", "whether static regions were to be compiled ahead all the same, as the launch "
       "policy chose", line="compile_policy"),
    _F("cache.state", "text", "`cold`: something was added to the caches; `warm`: nothing was, and there was something; "
       "`unused`: nothing was compiled", "cache", shown=True, line="cache_state", values=("warm", "cold", "unused")),
    _F("cache.files", "map of count", "kernels (Triton) and graphs (Inductor) in each cache at the start, before the warm-up"),
    _F("cache.added", "map of count", "those that came during the run, in the warm-up included"),
    _F("recompute", "text", "what the backward pass computes again, as configured", "recompute"),
    _F("experimental_taxes", "list of text", "what costs speed and is on; `report compare` says its price"),
    _F("optimizer", "map of value", "optimizer, and the dtypes of its states, as configured", line="optimizer"),
    _F("ddp.grad_reduce_dtype", "list of text", "dtypes in which gradients are reduced", line="optimizer"),
    _F("ddp.buckets", "list", "gradient buckets of rank 0 as they are in memory", items=_BUCKET),
    _F("ddp.overlap_grad_reduce", "flag", "whether gradients are to be reduced while the backward pass goes on, as "
       "the live DDP is configured"),
    _F("backends", "list", "requested and observed backend of every op, by layer", "backends", "backends", shown=True,
       items=_BACKEND),
    _F("parts", "list", "the classes that Megatron's parts really have, and the layers they are in", items=_PART),
    _F("patches", "list", "patches that are not out, with the fingerprints of what they replaced", "patches", "names",
       items=_PATCH),
    _F("overlap", "list", "which communication was asked to be hidden, and whether streams and buckets allow it",
       items=_OVERLAP),
    # routing
    _F("routing.experts", "count", "experts of a layer, as configured", line="routed_experts"),
    _F("routing.settings", "map of value", "balancing, scores and shared expert as configured", line="routed_experts"),
    _F("routing.top_k", "count", "experts of a token, as the routers have it", line="top_k"),
    _F("indexer.top_k", "count", "keys of a query in sparse attention, as configured", line="top_k"),
    _F("routing.capacity_factor", "amount", "capacity of an expert, as configured; null with `unknown` saying that "
       "there is none", line="capacity"),
    _F("routing.expert_input", "text", "rows of an expert, as configured: padded to its capacity, or as many as came",
       line="expert_input", values=("padded", "jagged")),
    _F("routing.forced_balance", "flag", "whether routing was to be random instead of the router's, as configured",
       line="balance"),
    _F("routing.max_over_mean", "amount", "busiest expert over the mean, mean over layers", line="balance"),
    _F("routing.layers", "map", "by layer over all ranks: tokens per expert, asked, dropped, entropy (1 is even), "
       "busiest over mean; no layer whose router is in a CUDA graph", items=_LOAD),
    _F("routing.entropy", "share", "mean over layers", "routing entropy", "number", shown=True),
    _F("routing.dropped_tokens", "count", "assignments that capacity took away", "dropped tokens", "count", shown=True),
    _F("routing.router_dtypes", "list of text", "dtype of the weights that routers gave out, as observed"),
    _F("routing.shared_expert_overlap", "flag", "whether the dispatchers run the shared expert, as observed"),
    _F("routing.dispatchers", "list of text", "classes of the token dispatchers, as observed"),
    _F("indexer.loss_coefficient", "number", "weight of the indexer's loss, as configured"),
    _F("indexer.warmup_steps", "count", "steps of dense warm-up, as configured"),
    _F("indexer.overlap", "map of share", "overlap of the keys that neighbouring Full layers select, sampled"),
    # what was measured
    _F("window.left_out", "count", "steps at the beginning of the start that are not measured"),
    _F("window.first_step", "count", "first step that is measured, of the start that facts and step times are of"),
    _F("window.last_step", "count", "last step that is measured"),
    _F("step_time.rank", "count", "the rank whose times these are: the one with the largest median"),
    _F("step_time.n", "count", "steps that are measured", "steps measured", "count", shown=True),
    _F("step_time.p50_s", "positive", "median, seconds, data wait and logging included, checkpoints, evaluation and the "
       "profiler not", "step time, median", "seconds", shown=True),
    _F("step_time.p90_s", "positive", "90th percentile"),
    _F("step_time.p99_s", "positive", "99th percentile", "step time, p99", "seconds", shown=True),
    _F("step_time.max_s", "positive", "the slowest step"),
    _F("throughput.tokens_per_s", "positive", "tokens of a step over the median step time", "tokens/s", "count", shown=True),
    _F("throughput.tokens_per_s_mean", "positive", "tokens of the window over its time"),
    _F("throughput.tokens_per_s_per_device", "positive", "`tokens_per_s` over devices"),
    _F("throughput.tflops_per_s_per_device", "positive", "audited model TFLOP/s of a device", "TFLOP/s a device", "number",
       shown=True),
    _F("throughput.mfu", "share", "audited model FLOPs over the peak of the precision that ran", "MFU", "share", shown=True),
    _F("throughput.hfu", "share", "the same with what was recomputed"),
    _F("memory.kind", "text", f"`CUDA allocator`, or `{RESIDENT}` on a CPU", "kind of memory"),
    _F("memory.allocated_peak_bytes", "count", "of the rank with the most", "peak allocated", "bytes", shown=True),
    _F("memory.reserved_peak_bytes", "count", "of the rank with the most", "peak reserved", "bytes", shown=True),
    _F("memory.ranks", "list of count", "allocated peak of each rank that left one"),
    _F("flops", "map of value", "the audited count of a step, by family"),
    _F("dominant_flops", "text", "the group with the largest share of the audited FLOPs", "most FLOPs", shown=True),
    _F("dominant_time", "text", "the group with the largest share of profiled time", "most time", shown=True),
    _F("attention_share", "share", "the share of attention, indexer and projections included, see `shares`",
       "attention share", "share", shown=True),
    _F("lane_class", "text", "what the lane mostly does, by `shares`", values=("dense_attention", "expert", "mamba_recurrent")),
    _F("shares.source", "text", "where the shares are from: a profile (time) or the audited count (FLOPs)", "shares from",
       shown=True),
    _F("shares.groups", "map of share", "share of each group"),
    _F("goodput", "map", "wall time of the rank with the least goodput, by class", "goodput", "goodput", keys=_GOODPUT),
    _F("loss.first", "number", "`lm loss` of the first step that was recorded", "first loss", "loss", shown=True),
    _F("loss.last", "number", "of the last one", "last loss", "loss", shown=True),
    _F("loss.first_step", "count", "its number"),
    _F("loss.last_step", "count", "its number"),
    _F("profiler.trigger", "text", "what opened the profiler's window"),
    _F("profiler.step_range", "list of count", "first and last step of the window"),
    _F("profiler.phase", "text", "`warm-up` or `steady`, as the profile judged"),
    _F("profiler.hidden_share", "share", "of the communication, what ran beside computation, by the streams' intervals"),
    _F("profiler.graph_recaptures", "count", "CUDA graphs that were captured again inside of it"),
    _F("disqualifiers", "list", f"names ({', '.join(DISQUALIFIERS)}) with their evidence", "disqualifiers", "names",
       nullable=False, items={"name": "text", "evidence": "text"}),
    _F("unjudged", "list", "disqualifiers that could not be judged, and why", nullable=False,
       items={"name": "text", "reason": "text"}),
    _F("versions", "map of text", "versions of what it ran with", "versions"),
    _F("commit", "text", "commit of this package, with `+changes` when files differ from it", "commit", "hash"),
    _F("environment", "map of text", "the variables of the allow-list that were set", nullable=False),
    _F("notes", "list of text", "what a reader should know", nullable=False),
    _F("unknown", "map of text", "why a field, or a group of fields, is null", nullable=False),
)  # fmt: skip

_BY_PATH: Mapping[str, Field] = {field.path: field for field in FIELDS}
_PREFIXES = {path.rpartition(".")[0] for path in _BY_PATH} - {""}


# --- The check --------------------------------------------------------------------------------------------------------


def problems(receipt: Any) -> list[str]:
    """Everything by which ``receipt`` is not one, a sentence each; none if it is one."""
    if not isinstance(receipt, dict):
        return [kinds.wrong("the receipt", receipt, "an object")]
    if receipt.get("schema") != SCHEMA:
        return [_other_schema(receipt.get("schema"))]
    values, found = flatten(receipt)
    reasons = receipt.get("unknown")
    reasons = reasons if isinstance(reasons, dict) else {}
    for path, value in values.items():
        field = _BY_PATH.get(path)
        if field is None:
            found.append(f"{kinds.printable(path)} is not a field of a receipt")
        elif value is not None:
            found += field.problems(value)
        elif not field.nullable:
            found.append(f"{path} is null; it is always known")
        elif why_unknown(path, reasons) is None:
            found.append(f"{path} is null, and `unknown` does not say why")
    found += [f"{path} is missing" for path in _BY_PATH if path not in values]
    for path in reasons:
        if not any(values[name] is None for name in values if name == path or name.startswith(f"{path}.")):
            found.append(f"unknown.{kinds.printable(path)} gives a reason for what is not null")
    for path in ("disqualifiers", "unjudged"):
        for entry in receipt[path] if isinstance(receipt.get(path), list) else ():
            name = entry.get("name") if isinstance(entry, dict) else None
            if isinstance(name, str) and name not in DISQUALIFIERS:
                found.append(f"{path} names {name!r}; known: {', '.join(DISQUALIFIERS)}")
    return found


def _other_schema(found: Any) -> str:
    newer = kinds.COUNT.accepts(found) and found > SCHEMA
    older = kinds.COUNT.accepts(found) and 0 < found < SCHEMA
    todo = "no version of this package wrote it"
    if newer:
        todo = f"a newer version wrote it: update megacpp-mcore, which reads schema {SCHEMA}"
    elif older:
        todo = "an older version wrote it: record the run anew, or read it with that version"
    return f"schema is {kinds.shown(found)}; expected {SCHEMA}: {todo}"


def validate(receipt: Any, where: str = "receipt") -> None:
    """Check that ``receipt`` is one.

    Raises:
        DataError: naming every field that is not as the schema says.
    """
    try:
        found = problems(receipt)
    except RecursionError:
        found = ["lists or objects lie too deep in each other"]
    if not found:
        return
    message = f"{where} is no receipt of schema {SCHEMA}: {'; '.join(found)}"
    if isinstance(receipt, dict) and receipt.get("schema") != SCHEMA:
        raise DataError(message)
    raise DataError(f"{message}. Name the folder of its run, from which it is made anew, or restore the file")


def flatten(receipt: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values by path, and what is wrong with the groups that hold them."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in receipt.items():
        if name not in _PREFIXES:
            values[name] = value
        elif isinstance(value, dict):
            values |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            wrong.append(kinds.wrong(name, value, "an object"))
    return values, wrong


def nest(values: Mapping[str, Any], unknown: Mapping[str, str], otherwise: str) -> dict[str, Any]:
    """The receipt of ``values`` by path, every field of the schema in its order.

    Args:
        values: what is known, or null.
        unknown: why something is not, by field or group.
        otherwise: the reason for what neither of them mentions.
    """
    receipt: dict[str, Any] = {}
    reasons = dict(unknown)
    for path in _BY_PATH:
        value = values.get(path)
        if value is None and why_unknown(path, reasons) is None and path != "unknown":
            reasons[path] = otherwise
        group, _, name = path.rpartition(".")
        (receipt.setdefault(group, {}) if group else receipt)[name] = value
    receipt["unknown"] = {
        path: reason
        for path, reason in reasons.items()
        if any(values.get(name) is None for name in _BY_PATH if name == path or name.startswith(f"{path}."))
    }
    return receipt


def why_unknown(path: str, unknown: Mapping[str, str]) -> str | None:
    """The reason that ``unknown`` gives for the field, or for the group that it is in."""
    return unknown.get(path) or unknown.get(path.rpartition(".")[0])


def doubts(values: Mapping[str, Any]) -> dict[str, str]:
    """Of ``values`` by path, those that are not what their field has to be, and why."""
    found = {}
    for path, field in _BY_PATH.items():
        wrong = list(field.problems(values[path])) if field.nullable and values.get(path) is not None else []
        if wrong:
            found[path] = kinds.joined(wrong)
    return found


def table() -> str:
    """The table of all fields, in Markdown."""
    lines = ["| field | kind | meaning |", "|---|---|---|"]
    for field in FIELDS:
        lines.append(
            f"| `{field.path}` | {field.describe()}{', or null' if field.nullable else ''} | {field.meaning} |"
        )
    return "\n".join(lines)


# --- For people -------------------------------------------------------------------------------------------------------

_OF_THE_RUN = ("loss", "optimizer", "sdpa")
"""Ops that no layer has; MTP blocks have no layer number either."""


def plain(value: Any) -> str:
    """Any value in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items()) or "none"
    return ", ".join(map(plain, value)) or "none" if isinstance(value, list) else str(value)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def layer_of(record: Mapping[str, Any]) -> int | str:
    """Where a record about a backend belongs: a layer's number, ``run`` for what is there once, else ``mtp``."""
    if record["layer"] is not None:
        return int(record["layer"])
    return "run" if record["op"] in _OF_THE_RUN else "mtp"


def spans(layers: Sequence[Any]) -> str:
    """Layers as ranges: ``1–3, 5, mtp``."""
    found: list[list[int]] = []
    for number in sorted({layer for layer in layers if isinstance(layer, int)}):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = [f"{first}–{last}" if last > first else str(first) for first, last in found]
    return ", ".join([*words, *sorted({str(layer) for layer in layers if not isinstance(layer, int)})])


def _backends(records: Sequence[Mapping[str, Any]]) -> str:
    chosen: dict[tuple[str, str, str], list[Any]] = {}
    for one in records:
        chosen.setdefault((one["op"], one["requested"], one["observed"]), []).append(layer_of(one))
    words = [f"{op} {asked} → {got} ({spans(layers)})" for (op, asked, got), layers in sorted(chosen.items())]
    return ", ".join(words) or "none of this package"


FORMS = {
    "plain": plain,
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.3g}",
    "share": lambda value: f"{value:.1%}",
    "seconds": lambda value: f"{value:.4f} s",
    "bytes": size,
    "loss": lambda value: f"{value:.4f}",
    "hash": lambda text: text[:12] + text[40:48] if "+" in text else text[:12],
    "goodput": lambda record: f"{record['goodput']:.1%}",
    "names": lambda records: ", ".join(one["name"] for one in records) or "none",
    "backends": _backends,
}
"""How a value is written for people, by name."""


def in_words(values: Mapping[str, Any], field: Field) -> str | None:
    """The value of ``field`` among ``values`` by path, for people; None where it is not known."""
    value = values[field.path]
    return None if value is None else FORMS[field.form](value)


def labelled(values: Mapping[str, Any], *, shown: bool = False) -> list[tuple[str, Field]]:
    """Label and field of what people read, or of what is ``shown`` by a command; a resident set is one figure, not two."""
    resident = values["memory.kind"] == RESIDENT
    found = []
    for field in FIELDS:
        if not field.label or (shown and not field.shown) or (resident and field.path == "memory.reserved_peak_bytes"):
            continue
        is_set = resident and field.path == "memory.allocated_peak_bytes"
        found.append(("peak resident set" if is_set else field.label, field))
    return found
