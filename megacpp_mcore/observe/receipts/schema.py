"""What a receipt holds, field by field, and the check that one does; the table in docs/receipts.md is made from it. No torch.

A receipt is JSON. What is not known is null, and ``unknown`` says why, under the field's path or that of a group that it is in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import kinds
from megacpp_mcore.observe.kinds import Kind

SCHEMA = 1
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
)
"""What makes a run's speed no speed of training, in the order in which it is judged."""

RUNNING, FINISHED = "running", "finished"
NOT_PROFILED = "the run was not profiled"
"""Why a receipt has no profile, where there was none to be had."""
COMPILE_WARMUPS = ("explicit", "skipped")
CACHE_STATES = ("warm", "cold", "unused")
LANE_CLASSES = ("dense_attention", "expert", "mamba_recurrent")


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: as :func:`megacpp_mcore.observe.kinds.named` reads it.
        meaning: what it says, with its unit.
        nullable: whether it may be unknown.
        values: the texts that it may be; any, if empty.
        items: of a list or map of records, the fields of one and their kinds.
        keys: of a map that is a record, its fields and their kinds.
    """

    path: str
    kind: str
    meaning: str
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
    "op": "text",
    "layer": "count?",
    "requested": "text",
    "observed": "text",
    "speed": "text",
    "slower_than_best": "flag",
    "reason": "text",
}
_PART = {"part": "text", "requested": "text", "observed": "text", "implementation": "text", "layers": "list of layer"}
_PATCH = {"name": "text", "state": "text", "fingerprints": "map of text"}
_OVERLAP = {"name": "text", "asked": "flag", "possible": "flag", "reason": "text"}
_BUCKET = {"group": "text", "dtype": "text", "elements": "count", "bytes": "count"}
_DISQUALIFIER = {"name": "text", "evidence": "text"}
_UNJUDGED = {"name": "text", "reason": "text"}
_DATASET = {"name": "text", "weight": "number?", "sha256": "text?"}
_LOAD = {
    "tokens_per_expert": "list of count",
    "asked": "count",
    "dropped": "count",
    "entropy": "amount?",
    "max_over_mean": "amount?",
}
_GOODPUT = {
    "rank": "count",
    "goodput": "share",
    "wall_s": "amount",
    "seconds": "map of amount",
    "starts": "count",
    "steps": "count",
    "steps_lost": "count",
}
BACKEND, PART, BUCKET, LOAD = map(kinds.named, (_BACKEND, _PART, _BUCKET, _LOAD))
"""What the parts of ranks and a receipt have in common."""

FIELDS: tuple[Field, ...] = (
    Field("schema", "count", f"version of this schema, {SCHEMA}", nullable=False),
    Field("status", "text", "`running` (or killed), `finished`, or the name of the error that ended it", nullable=False),
    Field("written_at", "text", "when it was put together, UTC", nullable=False),
    Field("ranks.expected", "size", "processes of the run"),
    Field("ranks.found", "list of count", "ranks that left their part", nullable=False),
    # the keys of the example
    Field("family", "text", "model family, such as `NAM56R`"),
    Field("pattern", "text", "the model's pattern of A, M, E and R layers as it was written"),
    Field("device", "text", "what it ran on, as CUDA names it"),
    Field("lane", "text", "device and compile mode, such as `cuda_regional_compile`"),
    Field("moe_enabled", "flag", "whether the model has experts"),
    Field("compile_warmup", "text", "whether regions were to be compiled before step 1, as the launch policy chose",
          values=COMPILE_WARMUPS),
    Field("dominant_cost", "text", "the group with the largest share, of time or of FLOPs as `shares` say"),
    Field("attention_share", "share", "the share of attention, indexer and projections included, see `shares`"),
    Field("notes", "list of text", "what a reader should know", nullable=False),
    # what was trained
    Field("model.name", "text", "name of the model's definition"),
    Field("model.layers", "text", "the letter of every layer"),
    Field("model.parameters", "count", "parameters of the whole model"),
    Field("model.definition", "map of value", "the whole definition"),
    Field("lane_class", "text", "what the lane mostly does, by `shares`", values=LANE_CLASSES),
    Field("shares.source", "text", "where the shares are from: a profile (time) or the audited count (FLOPs)"),
    Field("shares.groups", "map of share", "share of each group"),
    Field("parallelism.world_size", "size", "processes, one a device"),
    Field("parallelism.hosts", "size", "hosts"),
    Field("parallelism.tensor", "size", "tensor parallelism"),
    Field("parallelism.pipeline", "size", "pipeline stages"),
    Field("parallelism.virtual", "size", "virtual stages of each"),
    Field("parallelism.expert", "size", "expert parallelism"),
    Field("parallelism.context", "size", "context parallelism"),
    Field("parallelism.data", "size", "data-parallel replicas"),
    Field("parallelism.sequence_parallel", "flag", "sequence parallelism"),
    Field("batch.micro_batch_size", "size", "sequences of a micro-batch"),
    Field("batch.global_batch_size", "size", "sequences of a step over all replicas"),
    Field("batch.accumulation", "size", "micro-batches of a step on one replica"),
    Field("batch.sequence_length", "size", "tokens of a sequence"),
    Field("batch.documents", "text", "`together`, `masked` (rows) or `packed` (one row a micro-batch)"),
    Field("batch.rampup", "flag", "whether the batch grows during the run"),
    Field("batch.effective_tokens", "size", "tokens of one step: sequences that it consumed times their length, "
          "padding and masked tokens included; null when steps differ"),
    Field("data.kind", "text", "`real` or `mock`", values=("real", "mock")),
    Field("data.checksum", "text", "SHA-256 over the datasets' checksums and weights, those in files of blends "
          "included, and the split"),
    Field("data.datasets", "list", "name, weight and `.bin` checksum of each, blend by blend", items=_DATASET),
    Field("data.fill_in_the_middle", "flag", "whether documents are cut up for fill in the middle"),
    Field("tokenizer.kind", "text", "Megatron's name of its type"),
    Field("tokenizer.checksum", "text", "checksum of the tokenizer that made the data"),
    Field("tokenizer.vocab_size", "count", "rows of the embedding, padding included"),
    # how it was computed
    Field("precision.model_dtype", "text", "parameters and activations, as configured"),
    Field("precision.kernel_fp8", "text", "whose matrix products run in FP8, as configured: `none`, `experts`, or "
          "Megatron's own"),
    Field("precision.dispatch", "text", "what a module does that was named for FP8 and cannot, as configured: `none` "
          "or `refuse`"),
    Field("precision.checkpoint_owner", "text", "whose function recomputes activations, as configured"),
    Field("precision.fp8_layers", "list of count", "layers whose experts were built to run in FP8, as observed"),
    Field("compile.mode", "text", "`off` or `regional`, as configured", values=("off", "regional")),
    Field("compile.reason", "text", "why the warm-up was skipped; empty when it was not"),
    Field("compile.precompile", "flag", "whether static regions were to be compiled ahead all the same, as the launch "
          "policy chose"),
    Field("cache.state", "text", "`cold`: files were added to the caches; `warm`: none were, and there were some; "
          "`unused`: nothing was compiled", values=CACHE_STATES),
    Field("cache.files", "map of count", "files in each cache at the start, before the warm-up"),
    Field("cache.added", "map of count", "files that came during the run, in the warm-up included"),
    Field("recompute", "text", "what the backward pass computes again, as configured"),
    Field("experimental_taxes", "list of text", "what costs speed and is on; `report compare` says its price"),
    Field("optimizer", "map of value", "optimizer, and the dtypes of its states, as configured"),
    Field("backends", "list", "requested and observed backend of every op, by layer", items=_BACKEND),
    Field("parts", "list", "the classes that Megatron's parts really have, and the layers they are in", items=_PART),
    Field("patches", "list", "patches that are not out, with the fingerprints of what they replaced", items=_PATCH),
    Field("overlap", "list", "which communication was asked to be hidden, and whether streams and buckets allow it",
          items=_OVERLAP),
    Field("ddp.buckets", "list", "gradient buckets of rank 0 as they are in memory", items=_BUCKET),
    Field("ddp.grad_reduce_dtype", "list of text", "dtypes in which gradients are reduced"),
    Field("ddp.overlap_grad_reduce", "flag", "whether gradients are to be reduced while the backward pass goes on, as "
          "the live DDP is configured"),
    # routing
    Field("routing.experts", "count", "experts of a layer, as configured"),
    Field("routing.top_k", "count", "experts of a token, as the routers have it"),
    Field("routing.settings", "map of value", "balancing, scores and shared expert as configured"),
    Field("routing.capacity_factor", "amount", "capacity of an expert, as configured; null with `unknown` saying that "
          "there is none"),
    Field("routing.expert_input", "text", "rows of an expert, as configured: padded to its capacity, or as many as came",
          values=("padded", "jagged")),
    Field("routing.forced_balance", "flag", "whether routing was to be random instead of the router's, as configured"),
    Field("routing.layers", "map", "by layer over all ranks: tokens per expert, asked, dropped, entropy (1 is even), "
          "busiest over mean; no layer whose router is in a CUDA graph", items=_LOAD),
    Field("routing.entropy", "share", "mean over layers"),
    Field("routing.max_over_mean", "amount", "mean over layers"),
    Field("routing.dropped_tokens", "count", "assignments that capacity took away"),
    Field("routing.router_dtypes", "list of text", "dtype of the weights that routers gave out, as observed"),
    Field("routing.shared_expert_overlap", "flag", "whether the dispatchers run the shared expert, as observed"),
    Field("routing.dispatchers", "list of text", "classes of the token dispatchers, as observed"),
    Field("indexer.top_k", "count", "keys of a query in sparse attention, as configured"),
    Field("indexer.loss_coefficient", "number", "weight of the indexer's loss, as configured"),
    Field("indexer.warmup_steps", "count", "steps of dense warm-up, as configured"),
    Field("indexer.overlap", "map of share", "overlap of the keys that neighbouring Full layers select, sampled"),
    # what was measured
    Field("window.left_out", "count", "steps at the beginning of the start that are not measured"),
    Field("window.first_step", "count", "first step that is measured, of the start that facts and step times are of"),
    Field("window.last_step", "count", "last step that is measured"),
    Field("step_time.rank", "count", "the rank whose times these are: the one with the largest median"),
    Field("step_time.n", "count", "steps that are measured"),
    Field(
        "step_time.p50_s",
        "positive",
        "median, seconds, data wait and logging included, checkpoints, evaluation and the profiler not",
    ),
    Field("step_time.p90_s", "positive", "90th percentile"),
    Field("step_time.p99_s", "positive", "99th percentile"),
    Field("step_time.max_s", "positive", "the slowest step"),
    Field("throughput.tokens_per_s", "positive", "tokens of a step over the median step time"),
    Field("throughput.tokens_per_s_mean", "positive", "tokens of the window over its time"),
    Field("throughput.tokens_per_s_per_device", "positive", "`tokens_per_s` over devices"),
    Field("throughput.tflops_per_s_per_device", "positive", "audited model TFLOP/s of a device"),
    Field("throughput.mfu", "share", "audited model FLOPs over the peak of the precision that ran"),
    Field("throughput.hfu", "share", "the same with what was recomputed"),
    Field("flops", "map of value", "the audited count of a step, by family"),
    Field("memory.kind", "text", "`CUDA allocator`, or `resident set` on a CPU"),
    Field("memory.allocated_peak_bytes", "count", "of the rank with the most"),
    Field("memory.reserved_peak_bytes", "count", "of the rank with the most"),
    Field("memory.ranks", "list of count", "allocated peak of each rank that left a part"),
    Field("goodput", "map", "wall time of the rank with the least goodput, by class", keys=_GOODPUT),
    Field("loss.first", "number", "`lm loss` of the first step that was recorded"),
    Field("loss.last", "number", "of the last one"),
    Field("loss.first_step", "count", "its number"),
    Field("loss.last_step", "count", "its number"),
    Field("profiler.trigger", "text", "what opened the profiler's window"),
    Field("profiler.step_range", "list of count", "first and last step of the window"),
    Field("profiler.phase", "text", "`warm-up` or `steady`, as the profile judged"),
    Field("profiler.hidden_share", "share", "of the communication, what ran beside computation, by the streams' intervals"),
    Field("profiler.graph_recaptures", "count", "CUDA graphs that were captured again inside of it"),
    Field("disqualifiers", "list", f"names ({', '.join(DISQUALIFIERS)}) with their evidence", nullable=False,
          items=_DISQUALIFIER),
    Field("unjudged", "list", "disqualifiers that could not be judged, and why", nullable=False, items=_UNJUDGED),
    Field("versions", "map of text", "versions of what it ran with"),
    Field("commit", "text", "commit of this package, with `+changes` when files differ from it"),
    Field("environment", "map of text", "the variables of the allow-list that were set", nullable=False),
    Field("unknown", "map of text", "why a field, or a group of fields, is null", nullable=False),
)  # fmt: skip

_BY_PATH: Mapping[str, Field] = {field.path: field for field in FIELDS}
_PREFIXES = {path.rpartition(".")[0] for path in _BY_PATH} - {""}


def problems(receipt: Any) -> list[str]:
    """Everything by which ``receipt`` is not one, a sentence each; none if it is one."""
    if not isinstance(receipt, dict):
        return [kinds.wrong("the receipt", receipt, "an object")]
    if receipt.get("schema") != SCHEMA:
        return [other_schema(receipt.get("schema"))]
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
        covered = [name for name in values if name == path or name.startswith(f"{path}.")]
        if not any(values[name] is None for name in covered):
            found.append(f"unknown.{kinds.printable(path)} gives a reason for what is not null")
    for name in ("disqualifiers", "unjudged"):
        found += _names_problems(name, receipt.get(name))
    return found


def other_schema(found: Any) -> str:
    """What to say of a file whose schema is not :data:`SCHEMA`."""
    newer = kinds.COUNT.accepts(found) and found > SCHEMA
    todo = f"a newer version wrote it: update megacpp-mcore, which reads schemas up to {SCHEMA}"
    return (
        f"schema is {kinds.shown(found)}; expected {SCHEMA}: {todo if newer else 'no version of this package wrote it'}"
    )


def _names_problems(path: str, entries: Any) -> Iterator[str]:
    """Disqualifiers that are none."""
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and name not in DISQUALIFIERS:
            yield f"{path} names {name!r}; known: {', '.join(DISQUALIFIERS)}"


def validate(receipt: Any, where: str = "receipt") -> None:
    """Check that ``receipt`` is one.

    Raises:
        DataError: naming every field that is not as the schema says.
    """
    found = problems(receipt)
    if not found:
        return
    said = f"{where} is no receipt of schema {SCHEMA}: {'; '.join(found)}"
    if isinstance(receipt, dict) and receipt.get("schema") != SCHEMA:
        raise DataError(said)
    raise DataError(f"{said}. Name the folder of its run, from whose parts it is made anew, or restore the file")


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


def dominant(values: Mapping[str, Any]) -> str:
    """The dominant cost in words: what is only counted is no time, and the two may name different groups."""
    timed = str(values["shares.source"]).startswith("profile")
    return values["dominant_cost"] if timed else f"{values['dominant_cost']} (largest share of FLOPs, not timed)"


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
