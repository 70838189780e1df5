"""The fields of a receipt, and the purpose of each; the table in docs/receipts.md is generated from them. No torch.

A receipt is JSON. An unknown value is null, and ``unknown`` gives the reason under the path of the field or of its group.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megacpp_mcore.errors import DataError
from megacpp_mcore.util.schema import wrong

SCHEMA = 2
"""The version of the schema; another number is another schema."""
DISQUALIFIERS = (
    "mock data", "forced balance", "capacity drop", "indexer untrained", "warm-up inside the window", "fall-back",
    "NaN skipped", "batch changed", "overlap hid nothing", "overlapping starts",
)  # fmt: skip
"""Reasons why a run's speed is not the speed of training, in the order in which they are judged."""
RUNNING = "running"
RESIDENT = "resident set"
"""The kind of memory that the CPU lane reports: of the whole process, whatever it holds."""
BESIDE = "beside"
"""``compare`` of a field on no line of a comparison: a difference is named beside the claim."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention_projections", "attention_core", "indexer"),
    "mamba": ("mamba_projections", "mamba_scan"),
    "recurrent": ("recurrent_projections", "convolution", "recurrence"),
    "expert": ("router", "routed_experts", "shared_experts"),
    "dense_ffn": ("dense_ffn", "mtp_projection"),
    "head": ("embedding", "head"),
}
"""The groups of ``shares``, each with the families of the audited count that it sums."""


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        path: its keys from the top, joined by dots.
        kind: type of its value when not null: a name of :data:`KINDS`, ``list of text``, ``number?`` (may be null),
            ``warm|cold`` (one of these texts); ``[kind]`` is a list of it, ``{"*": kind}`` a map of it, and any other mapping a
            record, which a key ``...`` opens to other fields.
        meaning: what the value is, with its unit.
        label: its name for people, on the page, too; empty: it is only in the JSON and the documentation's table.
        form: how its value is written for people, a key of :data:`FORMS`.
        shown: whether ``report show`` prints it.
        compare: the comparison line on which two receipts must agree about it, or :data:`BESIDE`; empty: none.
        always: whether it is never null.
    """

    path: str
    kind: Any
    meaning: str
    label: str = ""
    form: str = "plain"
    shown: bool = False
    compare: str = ""
    always: bool = False


_BACKEND = {
    "op": "text", "layer": "count?", "requested": "text", "observed": "text", "speed": "text", "slower_than_best": "flag",
    "reason": "text",
}  # fmt: skip
_PATCH = {"name": "text", "state": "text", "fingerprints": "map of text"}
_OVERLAP = {"name": "text", "asked": "flag", "possible": "flag", "reason": "text"}
_DATASET = {"name": "text", "weight": "number?", "sha256": "text?"}
_LOAD = {
    "tokens_per_expert": "list of count", "asked": "count", "dropped": "count", "entropy": "amount?",
    "max_over_mean": "amount?",
}  # fmt: skip
_GOODPUT = {
    "rank": "count", "goodput": "share", "wall_s": "amount", "seconds": "map of amount", "starts": "count", "steps": "count",
    "steps_lost": "count",
}  # fmt: skip
_FLOPS = {
    "families": {name: {"share": "share", "...": ""} for names in FAMILIES.values() for name in names} | {"...": ""},
    "by_precision": {"*": {"model_flops": "count", "hardware_flops": "count", "...": ""}}, "...": "",
}  # fmt: skip

_F = Field
FIELDS: tuple[Field, ...] = (
    _F("schema", "count", f"version of this schema, {SCHEMA}", always=True),
    _F("status", "text", "`running` (or killed), `finished`, `stopped` (in order, before its last step), or the name of the "
       "error that ended it", "status", shown=True, always=True),
    _F("written_at", "text", "when it was put together, UTC", always=True),
    _F("ranks.expected", "size", "processes of the run"),
    _F("ranks.found", "list of count", "ranks that left what they know", always=True),
    # what was trained
    _F("family", "text", "model family, such as `NAM56R`", "family", shown=True),
    _F("model.name", "text", "name of the model's definition", "model"),
    _F("pattern", "text", "the model's pattern of A, M, E and R layers as it was written", "pattern", shown=True,
       compare="pattern"),
    _F("model.layers", "text", "the letter of every layer", compare="pattern"),
    _F("model.parameters", "count", "parameters of the whole model", "parameters", "count"),
    _F("model.definition", "map of value", "the whole definition", compare="pattern"),
    _F("moe_enabled", "flag", "whether the model has experts", compare="routed_experts"),
    _F("device", "text", "what it ran on, as CUDA names it", "device", shown=True, compare="topology"),
    _F("parallelism.world_size", "size", "processes, one a device", "devices", shown=True, compare="topology"),
    _F("parallelism.hosts", "size", "hosts", compare="topology"),
    _F("parallelism.tensor", "size", "tensor parallelism", "tensor parallel", compare="topology"),
    _F("parallelism.pipeline", "size", "pipeline stages", "pipeline stages", compare="topology"),
    _F("parallelism.virtual", "size", "virtual stages of each", compare="topology"),
    _F("parallelism.expert", "size", "expert parallelism", "expert parallel", compare="topology"),
    _F("parallelism.context", "size", "context parallelism", "context parallel", compare="topology"),
    _F("parallelism.data", "size", "data-parallel replicas", compare="topology"),
    _F("parallelism.sequence_parallel", "flag", "sequence parallelism", compare="topology"),
    _F("batch.micro_batch_size", "size", "sequences of a micro-batch", compare="batch_geometry"),
    _F("batch.global_batch_size", "size", "sequences of a step over all replicas", "global batch", "count",
       compare="batch_geometry"),
    _F("batch.accumulation", "size", "micro-batches of a step on one replica", compare="batch_geometry"),
    _F("batch.rampup", "flag", "whether the batch grows during the run", compare="batch_geometry"),
    _F("batch.sequence_length", "size", "tokens of a sequence", "sequence", "count", compare="sequence_length"),
    _F("batch.documents", "text", "`together`, `masked` (rows) or `packed` (one row a micro-batch)", "documents",
       compare="sequence_length"),
    _F("batch.effective_tokens", "size", "tokens of one step: sequences that it consumed times their length, "
       "padding and masked tokens included; null when steps differ", "tokens a step", "count", compare="effective_tokens"),
    _F("data.kind", "real|mock", "`real` or `mock`", "data", compare="real_data"),
    _F("data.checksum", "text", "SHA-256 over the datasets' checksums and weights, those in files of blends "
       "included, and the split", "data checksum", "hash", compare="real_data"),
    _F("data.datasets", [_DATASET], "name, weight and `.bin` checksum of each, blend by blend"),
    _F("data.fill_in_the_middle", "flag", "whether documents are cut up for fill in the middle", compare="real_data"),
    _F("tokenizer.kind", "text", "Megatron's name of its type", compare="real_data"),
    _F("tokenizer.checksum", "text", "checksum of the tokenizer that made the data", compare="real_data"),
    _F("tokenizer.vocab_size", "count", "rows of the embedding, padding included", compare="real_data"),
    # how it was computed
    _F("precision.model_dtype", "text", "parameters and activations, as configured", "model dtype", compare="precision"),
    _F("precision.kernel_fp8", "text", "whose matrix products run in FP8, as configured: `none`, `experts`, a recipe "
       "with its families of layers (`blanket`: all that can), or Megatron's own", "FP8 kernels", shown=True,
       compare="precision"),
    _F("precision.dispatch", "text", "what a module does that was named for FP8 and cannot, as configured: `none` "
       "or `refuse`", compare="precision"),
    _F("precision.checkpoint_owner", "text", "whose function recomputes activations, as configured", compare="precision"),
    _F("precision.fp8_layers", "list of count", "layers whose experts were built to run in FP8, as observed",
       compare="precision"),
    _F("precision.fp8_scopes", "map of count", "FP8 scopes that all ranks entered, those that stayed in BF16, and those "
       "entered while a CUDA graph was captured"),
    _F("precision.dequantised", "count", "times that a quantised tensor was dequantised, over all ranks: 0, or FP8 is not what "
       "it says"),
    _F("compile_warmup", "explicit|skipped", "whether regions were to be compiled before step 1, as the launch policy chose",
       "compile warm-up", shown=True, compare="compile_policy"),
    _F("compile.mode", "off|regional", "`off` or `regional`, as configured", "compile", compare="compile_policy"),
    _F("compile.reason", "text", "why the warm-up was skipped; empty when it was not", compare="compile_policy"),
    _F("compile.precompile", "flag", "whether static regions were to be compiled ahead all the same, as the launch "
       "policy chose", compare="compile_policy"),
    _F("cache.state", "warm|cold|unused", "`cold`: something was added to the caches; `warm`: nothing was, and there was "
       "something; `unused`: nothing was compiled", "cache", shown=True, compare="cache_state"),
    _F("cache.files", "map of count", "kernels (Triton) and graphs (Inductor) in each cache at the start, before the warm-up"),
    _F("cache.added", "map of count", "those that came during the run, in the warm-up included"),
    _F("recompute", "text", "what the backward pass computes again, as configured", "recompute", compare=BESIDE),
    _F("experimental_taxes", "list of text", "what costs speed and is on; `report compare` says its price", compare=BESIDE),
    _F("optimizer", "map of value", "optimizer, and the dtypes of its states, as configured", compare="optimizer"),
    _F("ddp.grad_reduce_dtype", "list of text", "dtypes in which gradients are reduced", compare="optimizer"),
    _F("ddp.bucket_elements", "list of count", "elements of each gradient bucket of rank 0: how many reductions may be hidden"),
    _F("backends", [_BACKEND], "requested and observed backend of every op, by layer", "backends", "backends", shown=True,
       compare=BESIDE),
    _F("patches", [_PATCH], "patches that are not out, with the fingerprints of what they replaced", "patches", "names",
       compare=BESIDE),
    _F("overlap", [_OVERLAP], "which communication was asked to be hidden, and whether streams and buckets allow it",
       compare=BESIDE),
    # routing
    _F("routing.experts", "count", "experts of a layer, as configured", compare="routed_experts"),
    _F("routing.settings", "map of value", "balancing, scores and shared expert as configured", compare="routed_experts"),
    _F("routing.top_k", "count", "experts of a token, as configured", compare="top_k"),
    _F("indexer.top_k", "count", "keys of a query in sparse attention, as configured", compare="top_k"),
    _F("routing.capacity_factor", "amount", "capacity of an expert, as configured; null with `unknown` saying that "
       "there is none", compare="capacity"),
    _F("routing.expert_input", "padded|jagged", "rows of an expert, as configured: padded to its capacity, or as many as came",
       compare="expert_input"),
    _F("routing.forced_balance", "flag", "whether routing was to be random instead of the router's, as configured",
       compare="balance"),
    _F("routing.max_over_mean", "amount", "busiest expert over the mean, mean over layers", compare="balance"),
    _F("routing.layers", {"*": _LOAD}, "by layer over all ranks: tokens per expert, asked, dropped, entropy (1 is even), "
       "busiest over mean; no layer whose router is in a CUDA graph"),
    _F("routing.entropy", "share", "mean over layers", "routing entropy", "number", shown=True),
    _F("routing.dropped_tokens", "count", "assignments that capacity took away", "dropped tokens", "count", shown=True),
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
    _F("throughput.mfu", "amount", "audited model FLOPs over the peak of the precision that ran", "MFU", "share", shown=True),
    _F("throughput.hfu", "amount", "the same with what was recomputed"),
    _F("time_to_first_step_s", "positive", "from the start of the process to the end of its first step, the slowest rank",
       "first step after", "seconds", shown=True),
    _F("card.matmul_tflops_per_s", "positive", "the GPU's own rate before the first step: bf16 products of 8192³ for a second, "
       "the slowest rank", "card, TFLOP/s", "number", shown=True),
    _F("card.copy_bytes_per_s", "positive", "likewise of copies, bytes read and written", "card, copy a second", "bytes",
       shown=True),
    _F("card.sm_clock_mhz", "positive", "median of the samples, one a heartbeat after the steps that are left out, the slowest "
       "rank", "SM clock, MHz", "number", shown=True),
    _F("card.power_w", "positive", "likewise, rank 0", "power, W", "number", shown=True),
    _F("card.throttled", "map of share", "share of rank 0's samples in which the clock was held down, by NVML's reason"),
    _F("memory.kind", "text", f"`CUDA allocator`, or `{RESIDENT}` on a CPU", "kind of memory"),
    _F("memory.allocated_peak_bytes", "count", "of the rank with the most", "peak allocated", "bytes", shown=True),
    _F("memory.reserved_peak_bytes", "count", "of the rank with the most", "peak reserved", "bytes", shown=True),
    _F("memory.ranks", "list of count", "allocated peak of each rank that left one"),
    _F("flops", _FLOPS, "the audited count of a step, by family"),
    _F("dominant_flops", "text", "the group with the largest share of the audited FLOPs", "most FLOPs", shown=True),
    _F("dominant_time", "text", "the group with the largest share of profiled time", "most time", shown=True),
    _F("attention_share", "share", "the share of attention, indexer and projections included, see `shares`",
       "attention share", "share", shown=True),
    _F("shares.source", "text", "where the shares are from: a profile (time) or the audited count (FLOPs)", "shares from",
       shown=True),
    _F("shares.groups", "map of share", "share of each group"),
    _F("goodput", _GOODPUT, "wall time of the rank with the least goodput, by class", "goodput", "goodput"),
    _F("loss.first", "number", "`lm loss` of the first step that was recorded", "first loss", "loss", shown=True),
    _F("loss.last", "number", "of the last one", "last loss", "loss", shown=True),
    _F("loss.first_step", "count", "its number"),
    _F("loss.last_step", "count", "its number"),
    _F("profiler.step_range", "list of count", "first and last step of the window"),
    _F("profiler.phase", "text", "`warm-up` or `steady`, as the profile judged"),
    _F("profiler.hidden_share", "share", "of the communication, what ran beside computation, by the streams' intervals"),
    _F("disqualifiers", [{"name": "|".join(DISQUALIFIERS), "evidence": "text"}],
       f"names ({', '.join(DISQUALIFIERS)}) with their evidence", "disqualifiers", "names", always=True),
    _F("unjudged", [{"name": "|".join(DISQUALIFIERS), "reason": "text"}], "disqualifiers that could not be judged, and why",
       always=True),
    _F("versions", "map of text", "versions of what it ran with", "versions", compare=BESIDE),
    _F("commit", "text", "commit of this package, with `+changes` when files differ from it", "commit", "hash",
       shown=True, compare=BESIDE),
    _F("environment", "map of text", "the variables of the allow-list that were set", always=True, compare=BESIDE),
    _F("notes", "list of text", "what a reader should know", always=True),
    _F("unknown", "map of text", "why a field, or a group of fields, is null", always=True),
)  # fmt: skip

BY_PATH: Mapping[str, Field] = {each.path: each for each in FIELDS}
_GROUPS = {path.rpartition(".")[0] for path in BY_PATH} - {""}


def validate(receipt: Any, where: str = "receipt") -> None:
    """Check that ``receipt`` is a valid receipt.

    Raises:
        DataError: names the field that violates the schema, its value, and what was expected.
    """
    found = receipt.get("schema") if isinstance(receipt, dict) else None
    if found != SCHEMA:
        todo = "record the run anew, or read it with the version of megacpp-mcore that wrote it"
        raise DataError(f"{where} is no receipt: {wrong('schema', found, f'{SCHEMA}: {todo}')}")
    values = flatten(receipt)
    problems = [
        f"{path} is {'missing' if path in BY_PATH else 'not a field of a receipt'}"
        for path in sorted(values.keys() ^ BY_PATH.keys())
    ] or [
        wrong(path, values[path], _kind(one.kind))
        for path, one in BY_PATH.items()
        if (one.always or values[path] is not None) and not _fits(values[path], one.kind)
    ]
    if problems:
        todo = "name the folder of its run, from which it is made anew, or restore the file"
        raise DataError(f"{where} is no receipt of schema {SCHEMA}: {problems[0]}; {todo}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "count": lambda value: type(value) is int and value >= 0,
    "size": lambda value: type(value) is int and value >= 1,
    "number": _is_number,
    "amount": lambda value: _is_number(value) and value >= 0,
    "positive": lambda value: _is_number(value) and value > 0,
    "share": lambda value: _is_number(value) and value <= 1 and value >= 0,
    "value": lambda value: True,
}
"""Whether a value is of a kind, by the kind's name; ``value`` is anything."""


def _fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of ``kind``, a :attr:`Field.kind`."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, Mapping):
        if "*" in kind:
            return isinstance(value, dict) and all(_fits(each, kind["*"]) for each in value.values())
        fields = {name: each for name, each in kind.items() if name != "..."}
        complete = isinstance(value, dict) and (
            fields.keys() <= value.keys() if "..." in kind else fields.keys() == value.keys()
        )
        return complete and all(_fits(value[name], each) for name, each in fields.items())
    if kind.endswith("?"):
        return value is None or _fits(value, kind[:-1])
    outer, _, inner = kind.partition(" of ")
    if inner:
        return _fits(value, [inner] if outer == "list" else {"*": inner})
    return value in kind.split("|") if "|" in kind else KINDS[kind](value)


def flatten(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The values by path."""
    values: dict[str, Any] = {}
    for name, value in receipt.items():
        grouped = name in _GROUPS and isinstance(value, dict)
        values |= {f"{name}.{inner}": each for inner, each in value.items()} if grouped else {name: value}
    return values


def why_unknown(path: str, unknown: Mapping[str, str]) -> str | None:
    """The reason that ``unknown`` gives for the field, or for the group that it is in."""
    return unknown.get(path) or unknown.get(path.rpartition(".")[0])


# --- What is known ----------------------------------------------------------------------------------------------------


@dataclass
class Facts:
    """Values by the path of their field, and why the others are not known."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, reason: str = "") -> None:
        """Note a value, or why it is null."""
        self.values[path] = value
        if value is None and reason:
            self.miss(reason, path)

    def put_all(self, group: str, values: Mapping[str, Any], reason: str = "") -> None:
        """Note the values of a group's fields, or why those that are null are null."""
        for name, value in values.items():
            self.put(f"{group}.{name}", value, reason)

    def miss(self, reason: str, *paths: str) -> None:
        """Note why fields, or whole groups, are not known."""
        self.unknown |= dict.fromkeys(paths, reason)

    def attempt(self, path: str, learn: Callable[[Facts], None]) -> None:
        """Let ``learn`` fill ``path``; observing must not end a run, so an error becomes the reason for not knowing."""
        try:
            learn(self)
        except Exception as error:
            self.miss(f"{type(error).__name__}: {error}", path)

    def receipt(self, otherwise: str) -> dict[str, Any]:
        """The receipt of what is known, every field in its order.

        Args:
            otherwise: the reason given for fields that are neither known nor noted as unknown.
        """
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
    """The table of all fields, in Markdown."""
    rows = (
        f"| `{one.path}` | {_kind(one.kind)}{'' if one.always else ', or null'} | {one.meaning} |" for one in FIELDS
    )
    return "\n".join(["| field | kind | meaning |", "|---|---|---|", *rows])


def _kind(kind: Any) -> str:
    if isinstance(kind, list):
        return f"list of {_kind(kind[0])}"
    if isinstance(kind, dict):
        return f"map of {_kind(kind['*'])}" if "*" in kind else f"{{{', '.join(kind).replace('...', '…')}}}"
    word = str(kind)
    return "one of " + ", ".join(f"`{value}`" for value in word.split("|")) if "|" in word else word


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that may control a terminal, or that UTF-8 cannot encode."""


def printable(value: Any) -> Any:
    """``value`` with every character of :data:`_CONTROL` in its texts and keys escaped."""
    if isinstance(value, str):
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], value)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    return value


def plain(value: Any) -> str:
    """Any value in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    return "none" if value is None else str(value)


def utc(since_epoch_ns: int) -> str:
    """UTC in whole seconds."""
    return datetime.datetime.fromtimestamp(since_epoch_ns // 10**9, datetime.UTC).isoformat()


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


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


_OF_THE_RUN = ("loss", "optimizer", "sdpa")
"""Ops that belong to no layer; MTP blocks have no layer number either."""


class Backend(NamedTuple):
    """The requested and the observed backend of an op, for all layers where they are the same.

    Attributes:
        is_off: whether it is not the one requested, or slower than the best available.
        layers: for people: ``1–3, 5, mtp``; ``run`` for an op that exists once.
    """

    op: str
    requested: str
    observed: str
    reason: str
    is_off: bool
    layers: str


def backends(records: Sequence[Mapping[str, Any]]) -> list[Backend]:
    """The backends of a receipt, equal ones of several layers merged, in the receipt's order."""
    layers: dict[Backend, list[Any]] = {}
    for one in records:
        is_off = one["slower_than_best"] or one["requested"] not in ("auto", one["observed"])
        number = one["layer"] if one["layer"] is not None else "run" if one["op"] in _OF_THE_RUN else "mtp"
        row = Backend(one["op"], one["requested"], one["observed"], one["reason"], is_off, "")
        layers.setdefault(row, []).append(number)
    return [row._replace(layers=spans(of)) for row, of in layers.items()]


def _shown(records: Sequence[Mapping[str, Any]]) -> str:
    rows = sorted(backends([{**one, "reason": ""} for one in records]))
    words = [f"{one.op} {one.requested} → {one.observed} ({one.layers})" for one in rows]
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
    "names": lambda records: ", ".join(one["name"] for one in records) or "none",
    "backends": _shown,
}
"""How a value is written for people, by name."""


def in_words(values: Mapping[str, Any], one: Field) -> str | None:
    """The value of a field among ``values`` by path, in words; None where it is not known."""
    value = values[one.path]
    return None if value is None else FORMS[one.form](value)


def labelled(values: Mapping[str, Any], *, shown: bool = False) -> list[tuple[str, Field]]:
    """Label and field of everything for people, or of what a command shows; a resident set is one figure, not two."""
    labels = {each.path: each.label for each in FIELDS if each.label and (each.shown or not shown)}
    if values["memory.kind"] == RESIDENT:
        labels |= {"memory.allocated_peak_bytes": "peak resident set"}
        labels.pop("memory.reserved_peak_bytes", None)
    return [(label, BY_PATH[path]) for path, label in labels.items()]
