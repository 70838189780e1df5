"""The fields of a receipt, and the purpose of each; the table in docs/receipts.md is generated from them. No torch.

A receipt is JSON. An unknown value is null, and ``unknown`` gives the reason under the path of the field or of its group.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.model.families import mixers_first
from megacpp_mcore.util.kinds import (
    AMOUNT,
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    SHARE,
    SIZE,
    TEXT,
    VALUE,
    Kind,
    list_of,
    map_of,
    one_of,
    or_null,
    record,
)  # fmt: skip
from megacpp_mcore.util.schema import wrong
from megacpp_mcore.util.text import plain, size

SCHEMA = 3
"""Version of the receipt's schema."""
DISQUALIFIERS = (
    "mock data", "forced balance", "capacity drop", "indexer untrained", "warm-up inside the window", "fall-back",
    "NaN skipped", "batch changed", "overlap hid nothing", "overlapping starts",
)  # fmt: skip
"""Reasons why a run's speed is not the speed of training, in the order in which they are judged."""
RUNNING = "running"
RESIDENT = "resident set"
"""The kind of memory that the CPU lane reports: that of the entire process."""
BESIDE = "beside"
"""``compare`` of a field on no line of a comparison: a difference is listed with the claim."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    **{family.group: family.works for family in mixers_first()},
    "dense_ffn": ("dense_ffn", "mtp_projection"),
    "head": ("embedding", "head"),
}
"""The groups of ``shares``, each with the families of the audited count that it sums."""


_SPANS = re.compile(r"((\d{1,5}(-\d{1,5})?|mtp|run)(, (?=.)|$))+")
LAYERS = Kind("text", lambda value: isinstance(value, str) and bool(_SPANS.fullmatch(value)))
"""Spans of layers as :func:`spans` writes them."""


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: type of its value when not null.
        meaning: what the value is, with its unit.
        label: its label on the console and the page; empty: only in the JSON and the documentation's table.
        form: how its value is formatted for people, a key of :data:`FORMS`.
        shown: whether ``report show`` prints it.
        compare: the comparison line on which two receipts must agree about it, or :data:`BESIDE`; empty: none.
        always: whether it is never null.
    """

    path: str
    kind: Kind
    meaning: str
    label: str = ""
    form: str = "plain"
    shown: bool = False
    compare: str = ""
    always: bool = False


_BACKEND = record(op=TEXT, layers=LAYERS, requested=TEXT, observed=TEXT, speed=TEXT, slower_than_best=FLAG, reason=TEXT)
_PATCH = record(name=TEXT, state=TEXT, fingerprints=map_of(TEXT))
_OVERLAP = record(name=TEXT, asked=FLAG, possible=FLAG, reason=TEXT)
_DATASET = record(name=TEXT, weight=or_null(NUMBER), sha256=or_null(TEXT))
_LOAD = record(
    tokens_per_expert=list_of(COUNT), asked=COUNT, dropped=COUNT, entropy=or_null(AMOUNT), max_over_mean=or_null(AMOUNT)
)
_GOODPUT = record(rank=COUNT, goodput=SHARE, wall_s=AMOUNT, seconds=map_of(AMOUNT), starts=COUNT, steps=COUNT, steps_lost=COUNT)
_FLOPS = record(
    is_open=True,
    families=record(True, **{name: record(True, share=SHARE) for names in FAMILIES.values() for name in names}),
    by_precision=map_of(record(True, model_flops=COUNT, hardware_flops=COUNT)),
)

_F, _S, _A = Field, partial(Field, shown=True), partial(Field, always=True)
FIELDS: tuple[Field, ...] = (
    _A("schema", COUNT, f"version of this schema, {SCHEMA}"),
    _A("status", TEXT, "`running` (or killed), `finished`, `stopped` (in order, before its last step), or its error's name",
       "status", shown=True),
    _A("written_at", TEXT, "when it was assembled, UTC"),
    _F("ranks.expected", SIZE, "processes of the run"),
    _A("ranks.found", list_of(COUNT), "ranks that wrote their facts"),
    # what was trained
    _S("family", TEXT, "model family, such as `NAM56R`", "family"),
    _F("model.name", TEXT, "name of the model's definition", "model"),
    _S("pattern", TEXT, "the model's pattern of A, M, E and R layers as it was written", "pattern", compare="pattern"),
    _F("model.layers", TEXT, "the letter of every layer", compare="pattern"),
    _F("model.parameters", COUNT, "parameters of the whole model", "parameters", "count"),
    _F("model.definition", map_of(VALUE), "the whole definition", compare="pattern"),
    _F("moe_enabled", FLAG, "whether the model has experts", compare="routed_experts"),
    _S("device", TEXT, "its name, by CUDA", "device", compare="topology"),
    _S("parallelism.world_size", SIZE, "processes, one a device", "devices", compare="topology"),
    _F("parallelism.hosts", SIZE, "hosts", compare="topology"),
    _F("parallelism.tensor", SIZE, "tensor parallelism", "tensor parallel", compare="topology"),
    _F("parallelism.pipeline", SIZE, "pipeline stages", "pipeline stages", compare="topology"),
    _F("parallelism.virtual", SIZE, "virtual stages of each", compare="topology"),
    _F("parallelism.expert", SIZE, "expert parallelism", "expert parallel", compare="topology"),
    _F("parallelism.context", SIZE, "context parallelism", "context parallel", compare="topology"),
    _F("parallelism.data", SIZE, "data-parallel replicas", compare="topology"),
    _F("parallelism.sequence_parallel", FLAG, "sequence parallelism", compare="topology"),
    _F("batch.micro_batch_size", SIZE, "sequences of a micro-batch", compare="batch_geometry"),
    _F("batch.global_batch_size", SIZE, "sequences of a step, all replicas", "global batch", "count", compare="batch_geometry"),
    _F("batch.accumulation", SIZE, "micro-batches of a step on one replica", compare="batch_geometry"),
    _F("batch.rampup", FLAG, "whether the batch grows during the run", compare="batch_geometry"),
    _F("batch.sequence_length", SIZE, "tokens of a sequence", "sequence", "count", compare="sequence_length"),
    _F("batch.documents", TEXT, "`together`, `masked` (rows) or `packed` (one row a micro-batch)", "documents",
       compare="sequence_length"),
    _F("batch.effective_tokens", SIZE, "tokens of one step: sequences times their length, padding and masked tokens included; "
       "null when steps differ", "tokens a step", "count", compare="effective_tokens"),
    _F("data.kind", one_of("real", "mock"), "`real` or `mock`", "data", compare="real_data"),
    _F("data.checksum", TEXT, "SHA-256 over the datasets' checksums and weights, also in files of blends, and the split",
       "data checksum", "hash", compare="real_data"),
    _F("data.datasets", list_of(_DATASET), "name, weight and `.bin` checksum of each, blend by blend"),
    _F("data.fill_in_the_middle", FLAG, "whether documents are cut up for fill in the middle", compare="real_data"),
    _F("tokenizer.kind", TEXT, "Megatron's name of its type", compare="real_data"),
    _F("tokenizer.checksum", TEXT, "checksum of the tokenizer that made the data", compare="real_data"),
    _F("tokenizer.vocab_size", COUNT, "rows of the embedding, padding included", compare="real_data"),
    # how it was computed
    _F("precision.model_dtype", TEXT, "parameters and activations, as configured", "model dtype", compare="precision"),
    _S("precision.kernel_fp8", TEXT, "matrix products in FP8, as configured: `none`, `experts`, a recipe with its families of "
       "layers (`blanket`: all that can), or Megatron's own", "FP8 kernels", compare="precision"),
    _F("precision.dispatch", TEXT, "what a module requested for FP8 does that cannot, as configured: `none` or `refuse`",
       compare="precision"),
    _F("precision.checkpoint_owner", TEXT, "whose function recomputes activations, as configured", compare="precision"),
    _F("precision.fp8_layers", list_of(COUNT), "layers whose experts were built for FP8, as observed", compare="precision"),
    _F("precision.fp8_scopes", map_of(COUNT), "FP8 scopes of all ranks: entered, left in BF16, captured in a graph"),
    _F("precision.dequantised", COUNT, "dequantised tensors, over all ranks; must be 0: otherwise FP8 storage was expanded"),
    _S("compile_warmup", one_of("explicit", "skipped"), "`skipped`: nothing is compiled before step 1 (`explicit`: by "
       "earlier commits)", "compile warm-up", compare="compile_policy"),
    _F("compile.mode", one_of("off", "regional"), "`off` (`regional`: of earlier commits)", "compile",
       compare="compile_policy"),
    _F("compile.reason", TEXT, "why nothing is compiled"),
    _F("compile.precompile", FLAG, "false (true: of earlier commits)", compare="compile_policy"),
    _S("cache.state", one_of("warm", "cold", "unused"), "`cold`: entries were added to the caches; `warm`: none was, and "
       "there were some; `unused`: nothing was compiled", "cache", compare="cache_state"),
    _F("cache.files", map_of(COUNT), "kernels (Triton) and graphs (Inductor) in each cache at the start"),
    _F("cache.added", map_of(COUNT), "those added during the run"),
    _F("recompute", TEXT, "what the backward pass recomputes, as configured", "recompute", compare=BESIDE),
    _F("experimental_taxes", list_of(TEXT), "what costs speed and is on; `report compare` gives its price", compare=BESIDE),
    _F("optimizer", map_of(VALUE), "optimizer, and the dtypes of its states, as configured", compare="optimizer"),
    _F("ddp.grad_reduce_dtype", list_of(TEXT), "dtypes in which gradients are reduced", compare="optimizer"),
    _F("ddp.bucket_elements", list_of(COUNT), "elements of each gradient bucket of rank 0: how many reductions may be hidden"),
    _S("backends", list_of(_BACKEND), "requested and observed backend of each op, and its layers (`1-3, mtp`; `run`: none)",
       "backends", "backends", compare=BESIDE),
    _F("patches", list_of(_PATCH), "applied or pending patches, with fingerprints of what they replaced", "patches", "names",
       compare=BESIDE),
    _F("overlap", list_of(_OVERLAP), "which communication is to be hidden, and whether it can be", compare=BESIDE),
    # routing
    _F("routing.experts", COUNT, "experts of a layer, as configured", compare="routed_experts"),
    _F("routing.settings", map_of(VALUE), "balancing, scores and shared expert as configured", compare="routed_experts"),
    _F("routing.top_k", COUNT, "experts of a token, as configured", compare="top_k"),
    _F("indexer.top_k", COUNT, "keys of a query in sparse attention, as configured", compare="top_k"),
    _F("routing.capacity_factor", AMOUNT, "capacity of an expert, as configured; null where there is none", compare="capacity"),
    _F("routing.expert_input", one_of("padded", "jagged"), "rows of an expert, as configured: padded to capacity, or as "
       "many as it received", compare="expert_input"),
    _F("routing.forced_balance", FLAG, "whether routing is random instead of the router's, as configured", compare="balance"),
    _F("routing.max_over_mean", AMOUNT, "busiest expert over the mean, mean over layers", compare="balance"),
    _F("routing.layers", map_of(_LOAD), "by layer over all ranks: tokens per expert, assignments requested and dropped, "
       "entropy (1 is even), busiest over mean"),
    _S("routing.entropy", SHARE, "mean over layers", "routing entropy", "number"),
    _S("routing.dropped_tokens", COUNT, "assignments dropped because of capacity", "dropped tokens", "count"),
    _F("indexer.loss_coefficient", NUMBER, "weight of the indexer's loss, as configured"),
    _F("indexer.warmup_steps", COUNT, "steps of dense warm-up, as configured"),
    _F("indexer.overlap", map_of(SHARE), "overlap of the keys that neighbouring Full layers select, sampled"),
    # what was measured
    _F("window.left_out", COUNT, "steps at the beginning of the start that are not measured"),
    _F("window.first_step", COUNT, "first measured step, of the start that facts and step times are of"),
    _F("window.last_step", COUNT, "last measured step"),
    _F("step_time.rank", COUNT, "the rank whose times these are: the one with the largest median"),
    _S("step_time.n", COUNT, "measured steps", "steps measured", "count"),
    _S("step_time.p50_s", POSITIVE, "median, seconds: with data wait and logging, without checkpoints, evaluation, profiler",
       "step time, median", "seconds"),
    _F("step_time.p90_s", POSITIVE, "90th percentile"),
    _S("step_time.p99_s", POSITIVE, "99th percentile", "step time, p99", "seconds"),
    _F("step_time.max_s", POSITIVE, "the slowest step"),
    _S("throughput.tokens_per_s", POSITIVE, "tokens of a step over the median step time", "tokens/s", "count"),
    _F("throughput.tokens_per_s_mean", POSITIVE, "tokens of the window over its time"),
    _F("throughput.tokens_per_s_per_device", POSITIVE, "`tokens_per_s` over devices"),
    _S("throughput.tflops_per_s_per_device", POSITIVE, "audited model TFLOP/s of a device", "TFLOP/s a device", "number"),
    _S("throughput.mfu", AMOUNT, "audited model FLOPs over the peak of the precision that ran", "MFU", "share"),
    _F("throughput.hfu", AMOUNT, "the same with recomputation"),
    _S("time_to_first_step_s", POSITIVE, "from the start of the process to the end of its first step, the slowest rank",
       "first step after", "seconds"),
    _S("card.matmul_tflops_per_s", POSITIVE, "the GPU's own rate before step 1: bf16 products of 8192³ for a second, "
       "the slowest rank", "card, TFLOP/s", "number"),
    _S("card.copy_bytes_per_s", POSITIVE, "likewise of copies, bytes read and written", "card, copies/s", "bytes"),
    _S("card.sm_clock_mhz", POSITIVE, "median in the window, the slowest rank", "SM clock, MHz", "number"),
    _S("card.power_w", POSITIVE, "likewise, rank 0", "power, W", "number"),
    _F("card.throttled", map_of(SHARE), "share of rank 0's samples in which the clock was held down, by NVML's reason"),
    _F("memory.kind", TEXT, f"`CUDA allocator`, or `{RESIDENT}` on a CPU", "kind of memory"),
    _S("memory.allocated_peak_bytes", COUNT, "of the rank with the most", "peak allocated", "bytes"),
    _S("memory.reserved_peak_bytes", COUNT, "of the rank with the most", "peak reserved", "bytes"),
    _F("memory.ranks", list_of(COUNT), "allocated peak of each rank that wrote one"),
    _F("flops", _FLOPS, "the audited count of a step, by family"),
    _S("dominant_flops", TEXT, "the group with the largest share of the audited FLOPs", "most FLOPs"),
    _S("dominant_time", TEXT, "the group with the largest share of profiled time", "most time"),
    _S("attention_share", SHARE, "of attention, indexer and projections included, see `shares`", "attention share", "share"),
    _S("shares.source", TEXT, "where the shares are from: a profile (time) or the audited count (FLOPs)", "shares from"),
    _F("shares.groups", map_of(SHARE), "share of each group"),
    _F("goodput", _GOODPUT, "wall time of the rank with the least goodput, by class", "goodput", "goodput"),
    _S("loss.first", NUMBER, "`lm loss` of the first recorded step", "first loss", "loss"),
    _S("loss.last", NUMBER, "of the last one", "last loss", "loss"),
    _F("loss.first_step", COUNT, "its number"),
    _F("loss.last_step", COUNT, "its number"),
    _F("profiler.step_range", list_of(COUNT, 2), "first and last step of the window"),
    _F("profiler.phase", TEXT, "`warm-up` or `steady`, as the profile judged"),
    _F("profiler.hidden_share", SHARE, "of the communication, what ran together with computation, by the streams' intervals"),
    _A("disqualifiers", list_of(record(name=one_of(*DISQUALIFIERS), evidence=TEXT)),
       f"names ({', '.join(DISQUALIFIERS)}) with their evidence", "disqualifiers", "names"),
    _A("unjudged", list_of(record(name=one_of(*DISQUALIFIERS), reason=TEXT)), "those that could not be judged, and why"),
    _F("versions", map_of(TEXT), "versions of what it ran with", "versions", compare=BESIDE),
    _S("commit", TEXT, "commit of this package, with `+changes` if files differ", "commit", "hash", compare=BESIDE),
    _A("environment", map_of(TEXT), "the variables of the allow-list that were set", compare=BESIDE),
    _A("notes", list_of(TEXT), "what a reader should know"),
    _A("unknown", map_of(TEXT), "why a field, or a group of fields, is null"),
)  # fmt: skip

BY_PATH: Mapping[str, Field] = {spec.path: spec for spec in FIELDS}
_GROUPS = {path.rpartition(".")[0] for path in BY_PATH} - {""}


def validate(receipt: Any, where: str = "receipt") -> None:
    """Check that ``receipt`` is a valid receipt.

    Raises:
        DataError: names the field that violates the schema, its value, and what was expected.
    """
    schema = receipt.get("schema") if isinstance(receipt, dict) else None
    if schema != SCHEMA:
        todo = "name the folder of its run, from which it is assembled anew, or read it with the version that wrote it"
        raise DataError(f"{where} is not a receipt: {wrong('schema', schema, f'{SCHEMA}: {todo}')}")
    values = flatten(receipt)
    problems = [
        f"{path} is {'missing' if path in BY_PATH else 'not a field of a receipt'}"
        for path in sorted(values.keys() ^ BY_PATH.keys())
    ] or [
        wrong(path, values[path], spec.kind.words)
        for path, spec in BY_PATH.items()
        if (spec.always or values[path] is not None) and not spec.kind.fits(values[path])
    ]
    if problems:
        todo = "name the folder of its run, from which it is assembled anew, or restore the file"
        raise DataError(f"{where} is not a receipt of schema {SCHEMA}: {problems[0]}; {todo}")


def flatten(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by path."""
    values: dict[str, Any] = {}
    for name, value in receipt.items():
        grouped = name in _GROUPS and isinstance(value, dict)
        values |= {f"{name}.{inner}": leaf for inner, leaf in value.items()} if grouped else {name: value}
    return values


def why_unknown(path: str, unknown: Mapping[str, str]) -> str | None:
    """Return the reason that ``unknown`` gives for the field, or for its group."""
    return unknown.get(path) or unknown.get(path.rpartition(".")[0])


# --- Facts ------------------------------------------------------------------------------------------------------------


@dataclass
class Facts:
    """Values by the path of their field, and why the others are unknown."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, reason: str = "") -> None:
        """Record a value, or why it is null."""
        self.values[path] = value
        if value is None and reason:
            self.miss(reason, path)

    def put_all(self, group: str, values: Mapping[str, Any], reason: str = "") -> None:
        """Record the values of a group's fields, or why some are null."""
        for name, value in values.items():
            self.put(f"{group}.{name}", value, reason)

    def miss(self, reason: str, *paths: str) -> None:
        """Record why fields, or entire groups, are unknown."""
        self.unknown |= dict.fromkeys(paths, reason)

    def attempt(self, path: str, learn: Callable[[Facts], None]) -> None:
        """Let ``learn`` fill ``path``; observing must not end a run, so an error becomes the reason why it is unknown."""
        try:
            learn(self)
        except Exception as error:
            self.miss(f"{type(error).__name__}: {error}", path)

    def receipt(self, otherwise: str) -> dict[str, Any]:
        """Return the receipt with every field in its order; ``otherwise``: the reason for null fields that have none."""
        receipt: dict[str, Any] = {}
        null = [path for path in BY_PATH if self.values.get(path) is None and path != "unknown"]
        unexplained = [path for path in null if why_unknown(path, self.unknown) is None]
        of_null = {name for path in null for name in (path, path.rpartition(".")[0])}
        reasons = self.unknown | dict.fromkeys(unexplained, otherwise)
        for path in BY_PATH:
            group, _, name = path.rpartition(".")
            (receipt.setdefault(group, {}) if group else receipt)[name] = self.values.get(path)
        return receipt | {"unknown": {path: reason for path, reason in reasons.items() if path in of_null}}


# --- For people -------------------------------------------------------------------------------------------------------


def table() -> str:
    """Return the table of all fields, in Markdown."""
    rows = (f"| `{f.path}` | {f.kind.words}{'' if f.always else ', or null'} | {f.meaning} |" for f in FIELDS)
    return "\n".join(["| field | kind | meaning |", "|---|---|---|", *rows])


_OF_THE_RUN = ("loss", "optimizer", "sdpa")
"""Ops that belong to no layer; MTP blocks have no layer number either."""


def spans(layers: Iterable[int | str]) -> str:
    """Write layers as text: ``1-3, 5, mtp``."""
    numbers, words = sorted({layer for layer in layers if isinstance(layer, int)}), []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *more = [layer for _, layer in run]
        words.append(f"{first}-{more[-1]}" if more else str(first))
    return ", ".join([*words, *sorted({layer for layer in layers if isinstance(layer, str)})])


def layers(spanned: str) -> list[int | str]:
    """Return the layers that :func:`spans` wrote."""
    parsed: list[int | str] = []
    for word in spanned.split(", "):
        first, _, last = word.partition("-")
        parsed += range(int(first), int(last or first) + 1) if first.isdecimal() else [word]
    return parsed


def by_span(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge records of backends by ``layer`` (null: none), in the order of the layers, where those of several are equal."""
    merged: dict[str, tuple[Mapping[str, Any], list[int | str]]] = {}
    at = {None: math.inf}
    records = {id(backend): backend for backend in records}.values()  # ranks share equal ones
    for backend in sorted(records, key=lambda row: (at.get(row["layer"], row["layer"]), row["op"], row["observed"])):
        layer = ("run" if backend["op"] in _OF_THE_RUN else "mtp") if backend["layer"] is None else backend["layer"]
        merged.setdefault(json.dumps({**backend, "layer": None}), (backend, []))[1].append(layer)
    return [
        {"layers" if key == "layer" else key: value for key, value in backend.items()} | {"layers": spans(labels)}
        for backend, labels in merged.values()
    ]


def is_off(backend: Mapping[str, Any]) -> bool:
    """Return whether a backend is not the one requested, or slower than the best available."""
    return bool(backend["slower_than_best"]) or backend["requested"] not in ("auto", backend["observed"])


def _shown(records: Sequence[Mapping[str, Any]]) -> str:
    """Describe backends, without their reasons."""
    ops: dict[tuple[str, str, str], list[int | str]] = {}
    for row in records:
        ops.setdefault((row["op"], row["requested"], row["observed"]), []).extend(layers(row["layers"]))
    words = [f"{op} {requested} → {observed} ({spans(on)})" for (op, requested, observed), on in sorted(ops.items())]
    return ", ".join(words) or "none of this package"


FORMS: Mapping[str, Callable[[Any], str]] = {
    "plain": plain,
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.3g}",
    "share": lambda value: f"{value:.1%}",
    "seconds": lambda value: f"{value:.4f} s",
    "bytes": size,
    "loss": lambda value: f"{value:.4f}",
    "hash": lambda text: text[:12] + text[40:48] if "+" in text else text[:12],
    "goodput": lambda record: f"{record['goodput']:.1%}",
    "names": lambda records: ", ".join(entry["name"] for entry in records) or "none",
    "backends": _shown,
}
"""How to format a value for people, by name."""


def in_words(values: Mapping[str, Any], one: Field) -> str | None:
    """Return the value of a field among ``values`` by path, in words; None where it is not known."""
    value = values[one.path]
    return None if value is None else FORMS[one.form](value)


def labelled(values: Mapping[str, Any], *, shown: bool = False) -> list[tuple[str, Field]]:
    """Return label and field of all labelled fields, or of those ``shown``; a resident set is one figure, not two."""
    labels = {spec.path: spec.label for spec in FIELDS if spec.label and (spec.shown or not shown)}
    if values["memory.kind"] == RESIDENT:
        labels |= {"memory.allocated_peak_bytes": "peak resident set"}
        labels.pop("memory.reserved_peak_bytes", None)
    return [(label, BY_PATH[path]) for path, label in labels.items()]
