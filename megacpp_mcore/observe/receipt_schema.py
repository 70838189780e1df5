"""What a receipt holds, field by field, and the check that one does; the table in docs/receipts.md is made from it. No torch.

A receipt is JSON. What is not known is null, and ``unknown`` says why, under the field's path or that of a group that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import DataError

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
COMPILE_WARMUPS = ("explicit", "skipped")
CACHE_STATES = ("warm", "cold", "unused")
LANE_CLASSES = ("dense_attention", "expert", "mamba_recurrent")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "count": _is_count,
    "number": _is_number,
    "share": lambda value: _is_number(value) and 0 <= value <= 1,
    "list": lambda value: isinstance(value, list),
    "map": lambda value: isinstance(value, dict),
}
_WORDS = {
    "text": "a text",
    "flag": "true or false",
    "count": "a whole number, 0 or more",
    "number": "a finite number",
    "share": "a number from 0 to 1",
    "list": "a list",
    "map": "an object",
}


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: a key of :data:`_KINDS`; of a list or map of one kind, ``list of KIND`` or ``map of KIND``.
        meaning: what it says, with its unit.
        nullable: whether it may be unknown.
        values: the texts that it may be; any, if empty.
        items: of a list of records, the fields of one and their kinds (a ``?`` behind it: may be null).
    """

    path: str
    kind: str
    meaning: str
    nullable: bool = True
    values: tuple[str, ...] = ()
    items: Mapping[str, str] | None = None

    def problems(self, value: Any) -> Iterator[str]:
        """What is wrong with ``value``, which is not null."""
        outer, _, inner = self.kind.partition(" of ")
        if not _KINDS[outer](value):
            yield _wrong(self.path, value, _WORDS[outer])
        elif self.values and value not in self.values:
            yield _wrong(self.path, value, f"one of {', '.join(self.values)}")
        elif inner or self.items is not None:
            entries = value.items() if outer == "map" else enumerate(value)
            for key, entry in entries:
                yield from self._entry_problems(f"{self.path}[{key}]", entry, inner)

    def _entry_problems(self, where: str, entry: Any, inner: str) -> Iterator[str]:
        if self.items is None:
            if not _KINDS[inner](entry):
                yield _wrong(where, entry, _WORDS[inner])
            return
        if not isinstance(entry, dict) or entry.keys() != self.items.keys():
            yield _wrong(where, entry, f"a record of {', '.join(self.items)}")
            return
        for name, kind in self.items.items():
            bare = kind.removesuffix("?")
            if not (_KINDS[bare](entry[name]) or (entry[name] is None and kind.endswith("?"))):
                yield _wrong(f"{where}.{name}", entry[name], _WORDS[bare])


def _wrong(where: str, value: Any, expected: str) -> str:
    return f"{where} is {str(value)[:80]!r} ({type(value).__name__}); expected {expected}"


_BACKEND = {
    "op": "text",
    "layer": "count?",
    "requested": "text",
    "observed": "text",
    "speed": "text",
    "slower_than_best": "flag",
    "reason": "text",
}
_PART = {"part": "text", "requested": "text", "observed": "text", "implementation": "text", "layers": "list"}
_PATCH = {"name": "text", "state": "text", "fingerprints": "map"}
_OVERLAP = {"name": "text", "asked": "flag", "possible": "flag", "reason": "text"}
_BUCKET = {"group": "text", "dtype": "text", "elements": "count", "bytes": "count"}
_DISQUALIFIER = {"name": "text", "evidence": "text"}
_UNJUDGED = {"name": "text", "reason": "text"}
_DATASET = {"name": "text", "weight": "number?", "sha256": "text?"}

FIELDS: tuple[Field, ...] = (
    Field("schema", "count", f"version of this schema, {SCHEMA}", nullable=False),
    Field("status", "text", "`running` (or killed), `finished`, or the name of the error that ended it", nullable=False),
    Field("written_at", "text", "when it was put together, UTC", nullable=False),
    Field("ranks.expected", "count", "processes of the run"),
    Field("ranks.found", "list of count", "ranks that left their part", nullable=False),
    # the keys of the example
    Field("family", "text", "model family, such as `NAM56R`"),
    Field("pattern", "text", "the model's pattern of A, M, E and R layers as it was written"),
    Field("device", "text", "what it ran on, as CUDA names it"),
    Field("lane", "text", "device and compile mode, such as `cuda_regional_compile`"),
    Field("moe_enabled", "flag", "whether the model has experts"),
    Field("compile_warmup", "text", "whether regions were to be compiled before step 1, as the launch policy chose",
          values=COMPILE_WARMUPS),
    Field("dominant_cost", "text", "the group with the largest share, see `shares`"),
    Field("attention_share", "share", "the share of attention, indexer and projections included, see `shares`"),
    Field("notes", "list of text", "what a reader should know", nullable=False),
    # what was trained
    Field("model.name", "text", "name of the model's definition"),
    Field("model.layers", "text", "the letter of every layer"),
    Field("model.parameters", "count", "parameters of the whole model"),
    Field("model.definition", "map", "the whole definition"),
    Field("lane_class", "text", "what the lane mostly does, by `shares`", values=LANE_CLASSES),
    Field("shares.source", "text", "where the shares are from: a profile (time) or the audited count (FLOPs)"),
    Field("shares.groups", "map of share", "share of each group"),
    Field("parallelism.world_size", "count", "processes, one a device"),
    Field("parallelism.hosts", "count", "hosts"),
    Field("parallelism.tensor", "count", "tensor parallelism"),
    Field("parallelism.pipeline", "count", "pipeline stages"),
    Field("parallelism.virtual", "count", "virtual stages of each"),
    Field("parallelism.expert", "count", "expert parallelism"),
    Field("parallelism.context", "count", "context parallelism"),
    Field("parallelism.data", "count", "data-parallel replicas"),
    Field("parallelism.sequence_parallel", "flag", "sequence parallelism"),
    Field("batch.micro_batch_size", "count", "sequences of a micro-batch"),
    Field("batch.global_batch_size", "count", "sequences of a step over all replicas"),
    Field("batch.accumulation", "count", "micro-batches of a step on one replica"),
    Field("batch.sequence_length", "count", "tokens of a sequence"),
    Field("batch.documents", "text", "`together`, `masked` (rows) or `packed` (one row a micro-batch)"),
    Field("batch.rampup", "flag", "whether the batch grows during the run"),
    Field("batch.effective_tokens", "count", "tokens of one step: sequences that it consumed times their length, "
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
    Field("optimizer", "map", "optimizer, and the dtypes of its states, as configured"),
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
    Field("routing.settings", "map", "balancing, scores and shared expert as configured"),
    Field("routing.capacity_factor", "number", "capacity of an expert, as configured; null with `unknown` saying that "
          "there is none"),
    Field("routing.expert_input", "text", "rows of an expert, as configured: padded to its capacity, or as many as came",
          values=("padded", "jagged")),
    Field("routing.forced_balance", "flag", "whether routing was to be random instead of the router's, as configured"),
    Field("routing.layers", "map", "by layer over all ranks: tokens per expert, asked, dropped, entropy (1 is even), "
          "busiest over mean; no layer whose router is in a CUDA graph"),
    Field("routing.entropy", "share", "mean over layers"),
    Field("routing.max_over_mean", "number", "mean over layers"),
    Field("routing.dropped_tokens", "count", "assignments that capacity took away"),
    Field("routing.router_dtypes", "list of text", "dtype of the weights that routers gave out, as observed"),
    Field("routing.shared_expert_overlap", "flag", "whether the dispatchers run the shared expert, as observed"),
    Field("routing.dispatchers", "list of text", "classes of the token dispatchers, as observed"),
    Field("indexer.top_k", "count", "keys of a query in sparse attention, as configured"),
    Field("indexer.loss_coefficient", "number", "weight of the indexer's loss, as configured"),
    Field("indexer.warmup_steps", "count", "steps of dense warm-up, as configured"),
    Field("indexer.overlap", "map of share", "overlap of the keys that neighbouring Full layers select, sampled"),
    # what was measured
    Field("window.left_out", "count", "steps at the beginning of the last start that are not measured"),
    Field("window.first_step", "count", "first step that is measured, of the last start"),
    Field("window.last_step", "count", "last step that is measured"),
    Field("step_time.rank", "count", "the rank whose times these are: the one with the largest median"),
    Field("step_time.n", "count", "steps that are measured"),
    Field("step_time.p50_s", "number", "median, seconds, data wait and logging included, checkpoints and evaluation not"),
    Field("step_time.p90_s", "number", "90th percentile"),
    Field("step_time.p99_s", "number", "99th percentile"),
    Field("step_time.max_s", "number", "the slowest step"),
    Field("throughput.tokens_per_s", "number", "tokens of a step over the median step time"),
    Field("throughput.tokens_per_s_mean", "number", "tokens of the window over its time"),
    Field("throughput.tokens_per_s_per_device", "number", "`tokens_per_s` over devices"),
    Field("throughput.tflops_per_s_per_device", "number", "audited model TFLOP/s of a device"),
    Field("throughput.mfu", "share", "audited model FLOPs over the peak of the precision that ran"),
    Field("throughput.hfu", "share", "the same with what was recomputed"),
    Field("flops", "map", "the audited count of a step, by family"),
    Field("memory.kind", "text", "`CUDA allocator`, or `resident set` on a CPU"),
    Field("memory.allocated_peak_bytes", "count", "of the rank with the most"),
    Field("memory.reserved_peak_bytes", "count", "of the rank with the most"),
    Field("memory.ranks", "list of count", "allocated peak of each rank that left a part"),
    Field("goodput", "map", "wall time of the rank with the least goodput, by class"),
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
    Field("versions", "map", "versions of what it ran with"),
    Field("commit", "text", "commit of this package, with `+changes` when files differ from it"),
    Field("environment", "map of text", "the variables of the allow-list that were set", nullable=False),
    Field("unknown", "map of text", "why a field, or a group of fields, is null", nullable=False),
)  # fmt: skip

_BY_PATH: Mapping[str, Field] = {field.path: field for field in FIELDS}
_PREFIXES = {path.rpartition(".")[0] for path in _BY_PATH} - {""}


def problems(receipt: Any) -> list[str]:
    """Everything by which ``receipt`` is not one, a sentence each; none if it is one."""
    if not isinstance(receipt, dict):
        return [_wrong("the receipt", receipt, "an object")]
    if receipt.get("schema") != SCHEMA:
        return [f"schema is {receipt.get('schema')!r}; expected {SCHEMA}: it was written by another version"]
    values, found = flatten(receipt)
    reasons = receipt.get("unknown")
    reasons = reasons if isinstance(reasons, dict) else {}
    for path, value in values.items():
        field = _BY_PATH.get(path)
        if field is None:
            found.append(f"{path} is not a field of a receipt")
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
            found.append(f"unknown.{path} gives a reason for what is not null")
    for entry in receipt.get("disqualifiers") or ():
        if isinstance(entry, dict) and entry.get("name") not in DISQUALIFIERS:
            found.append(f"disqualifiers names {entry.get('name')!r}; known: {', '.join(DISQUALIFIERS)}")
    return found


def validate(receipt: Any, where: str = "receipt") -> None:
    """Check that ``receipt`` is one.

    Raises:
        DataError: naming every field that is not as the schema says.
    """
    found = problems(receipt)
    if found:
        raise DataError(
            f"{where} is no receipt of schema {SCHEMA}: {'; '.join(found)}. Write it anew with `megacpp-mcore report show RUN`"
        )


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
            wrong.append(_wrong(name, value, "an object"))
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


def table() -> str:
    """The table of all fields, in Markdown."""
    lines = ["| field | kind | meaning |", "|---|---|---|"]
    for field in FIELDS:
        kind = f"one of {', '.join(f'`{value}`' for value in field.values)}" if field.values else field.kind
        if field.items is not None:
            kind = f"list of {{{', '.join(field.items)}}}"
        lines.append(f"| `{field.path}` | {kind}{', or null' if field.nullable else ''} | {field.meaning} |")
    return "\n".join(lines)
