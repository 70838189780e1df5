"""Claims about runs' speed: what disqualifies one run, and whether two receipts may be compared. No torch.

A comparison is a checklist, and a claim if every line allows one. The first seven lines are a reviewer's questions; the others
are the denominators by which a sparse speed-up can be made to look better than it is. Differences on no line (backends,
patches, recompute, overlap) are what a claim is about: they are listed with it. A different commit, other versions or
another environment are named in the claim itself, as no receipt shows what they changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.events import Step
from megacpp_mcore.observe.receipts import fields
from megacpp_mcore.observe.receipts.fields import BESIDE, DISQUALIFIERS, FIELDS, flatten, why_unknown
from megacpp_mcore.util.text import plain

# --- Disqualifiers ----------------------------------------------------------------------------------------------------

_HIDDEN = 0.005
"""Share of the communication in a profile below which nothing of it is hidden."""


class _Unjudged(Exception):
    """A judgement needs a fact that is not known; the message says which."""


@dataclass(frozen=True)
class Case:
    """The facts to be judged: a receipt's values by path, the recorded steps, and what follows from them.

    Attributes:
        tokens: of each step where they are known, by its number.
        seconds: of each measured step, by its number.
        compiled: nanoseconds of compilation of those measured steps that compiled.
        overlap: which starts recorded at the same time, in words; empty: none.
    """

    values: Mapping[str, Any]
    steps: Sequence[Step]
    tokens: Mapping[int, int]
    seconds: Mapping[int, float]
    compiled: Mapping[int, int]
    overlap: str = ""

    def known(self, path: str) -> Any:
        """Return a value that the judgement needs; raises if it is not known."""
        if self.values.get(path) is None:
            raise _Unjudged(f"{path} is not known")
        return self.values[path]


def judge(case: Case) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the disqualifiers with their evidence, and those that could not be judged, with the reason."""
    disqualifiers, unjudged = [], []
    for name, evidence_of in zip(DISQUALIFIERS, _JUDGES, strict=True):
        try:
            if evidence := evidence_of(case):
                disqualifiers.append({"name": name, "evidence": evidence})
        except _Unjudged as missing:
            unjudged.append({"name": name, "reason": str(missing)})
    return disqualifiers, unjudged


def _dropped(case: Case) -> str:
    if not case.known("moe_enabled"):
        return ""
    dropped, capacity = (case.values.get(f"routing.{name}") for name in ("dropped_tokens", "capacity_factor"))
    if dropped is None and capacity is None and case.values.get("routing.expert_input") is not None:
        return ""  # without a capacity nothing can be dropped
    if dropped is None:
        raise _Unjudged(f"experts have capacity factor {capacity}, and dropped tokens were not counted")
    return f"{dropped} assignments of tokens to experts were dropped (capacity factor {capacity})" if dropped else ""


def _untrained(case: Case) -> str:
    case.known("model.definition")
    if case.values.get("indexer.top_k") is None:
        return ""  # no sparse attention
    if not case.known("indexer.loss_coefficient"):
        return "the indexer's loss coefficient is 0: the keys that attention reads are not learned"
    warm_up = case.values.get("indexer.warmup_steps")
    return f"attention is dense for the first {warm_up} steps (indexer warm-up)" if warm_up else ""


def _compiled(case: Case) -> str:
    if not case.seconds:
        raise _Unjudged("no step was measured")
    if not case.compiled:
        return ""
    step, spent = max(case.compiled.items(), key=lambda step_ns: step_ns[1])
    return f"{len(case.compiled)} measured steps compiled or tuned, step {step} for {spent / 1e9:.3f} s"


def _fallen_back(case: Case) -> str:
    """Name ops that run slower than the best available, or not on what was requested."""
    deviations = []
    for backend in filter(fields.is_off, case.known("backends")):
        op, layers, requested, observed = (backend[name] for name in ("op", "layers", "requested", "observed"))
        is_slow = requested in ("auto", observed)
        request = "" if is_slow else f"requested on {requested}, "
        slower = ", slower than the best for this device" if is_slow else ""
        where = f" in layer{'s' * (not layers.isdecimal())} {layers}" if layers != "run" else ""
        deviations.append(f"op {op}{where} {request}runs on {observed}{slower}: {backend['reason']}")
    if times := case.values.get("precision.dequantised"):
        deviations.append(f"a quantised tensor was dequantised {times} times")
    return "; ".join([*deviations[:3], *[f"and {len(deviations) - 3} more"] * (len(deviations) > 3)])


def _skipped(case: Case) -> str:
    if not case.steps:
        raise _Unjudged("no step was recorded")
    bad = [step.step for step in case.steps if step.failed]
    return f"{len(bad)} steps were skipped or had a loss that is not finite, the first is step {bad[0]}" if bad else ""


def _batch(case: Case) -> str:
    if case.known("batch.rampup"):
        return "the batch grows during the run (--rampup-batch-size)"
    if not case.tokens:
        raise _Unjudged("no two steps in a row were recorded" if case.steps else "no step was recorded")
    sizes = sorted(set(case.tokens.values()))
    return f"steps had {', '.join(map(str, sizes))} tokens" if len(sizes) > 1 else ""


def _not_hidden(case: Case) -> str:
    """Name overlap that hid nothing: by the profile, or else by what the policy says of streams and buckets."""
    requested = [overlap for overlap in case.known("overlap") if overlap["asked"]]
    if not requested or case.known("parallelism.world_size") == 1 or case.known("device").startswith("CPU"):
        return ""
    if (hidden := case.values.get("profiler.hidden_share")) is None:
        impossible = [overlap for overlap in requested if not overlap["possible"]]
        reasons = [f"{row['name']} was requested to be hidden but cannot be: {row['reason']}" for row in impossible]
        if any("not known" in reason for reason in reasons):
            raise _Unjudged(reasons[0])
        return "; ".join(reasons)
    names = ", ".join(overlap["name"] for overlap in requested)
    shown = f"{names}: requested to overlap, but the profile shows {hidden:.1%} of communication hidden"
    return shown if hidden <= _HIDDEN else ""


_MOCK = "the run trains on Megatron's mock data"
_FORCED = "tokens are routed at random (--moe-router-force-load-balancing)"
_JUDGES: tuple[Callable[[Case], str], ...] = (
    lambda case: _MOCK if case.known("data.kind") == "mock" else "",
    lambda case: _FORCED if case.known("moe_enabled") and case.known("routing.forced_balance") else "",
    _dropped, _untrained, _compiled, _fallen_back, _skipped, _batch, _not_hidden, lambda case: case.overlap,
)  # fmt: skip
"""The evidence of each of :data:`DISQUALIFIERS`, in their order; empty where there is none."""

# --- Comparison -------------------------------------------------------------------------------------------------------

BALANCE_TOLERANCE = 0.1
"""Relative difference of the busiest expert's load up to which two runs count as equally balanced: routing is learned."""
STEADY_STEPS = 30
"""Steps that each of the two runs must have measured."""
NOISE = 0.07
"""Run-to-run spread in speed, one run each: pairs of the same command on the same machine differed by 2 to 7 % in
tokens/s (``experiments/results/README.md``, ``examples/receipts/README.md``). One pair of runs cannot show a smaller one."""
NOISE_IN_GRAPHS = 0.03
"""The same in CUDA graphs: of 52 layers 0.5 % over five on one machine, 2.8 % over five machines
(``experiments/results/README.md``)."""
STANDARD_ERRORS = 2.0
"""How many standard errors apart two medians must be before the spread of the steps does not explain the difference."""
_P90_DEVIATIONS = 1.2816
"""Standard deviations from the median to the 90th percentile of a normal distribution."""

_QUESTIONS = {
    "pattern": "same pattern?", "routed_experts": "same routed-expert settings?", "sequence_length": "same sequence length?",
    "compile_policy": "same compile policy?", "topology": "same substrate and parallel topology?",
    "real_data": "same real-data path?", "cache_state": "same cache state?", "batch_geometry": "same batch geometry?",
    "effective_tokens": "same effective tokens a step?", "top_k": "same top-k?", "capacity": "same capacity?",
    "expert_input": "both padded, or both jagged?", "balance": "same balance?", "precision": "same precision plan?",
    "optimizer": "same optimizer, and dtypes of its states?",
}  # fmt: skip
KEYS = tuple(_QUESTIONS)
"""The keys of the checklist, the reviewer's seven first; each names the ``compare`` of its fields."""
_SOFTWARE = {"commit": "of another commit", "environment": "of another environment", "versions": "of other versions"}
"""Fields whose difference may have changed anything, and how a claim words it."""
_ABSENT: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "data.checksum": lambda receipt: receipt["data.kind"] == "mock",
    "tokenizer.checksum": lambda receipt: receipt["data.kind"] == "mock",
    "routing": lambda receipt: receipt["moe_enabled"] is False,
    "routing.capacity_factor": lambda receipt: receipt["routing.expert_input"] is not None,
    "indexer": lambda receipt: receipt["model.layers"] is not None and "indexer" in receipt["unknown"],
    "ddp": lambda receipt: "ddp" in receipt["unknown"],
}
"""When a field, or an entire group, is null because the run has no such thing: no data files, no experts, no
capacity, no sparse attention, no DistributedDataParallel of Megatron's."""
_ON_OTHER_LINES = {"moe": ("experts", "topk", "ffn_hidden_size", "shared_ffn_hidden_size"), "dsa": ("topk",)}
"""Of a model's definition, by its parts, what other lines compare."""


def _sizes(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's definition without its name and the values that other lines compare."""
    sizes = {name: value for name, value in definition.items() if name not in ("name", "pattern", "seq_length")}
    for part, names in _ON_OTHER_LINES.items():
        if isinstance(sizes.get(part), Mapping):
            sizes[part] = {name: value for name, value in sizes[part].items() if name not in names}
    return sizes


_COMPARED: Mapping[str, Callable[[Any], Any]] = {
    "model.definition": _sizes,
    "backends": lambda rows: {
        op: sorted({row["observed"] for row in rows if row["op"] == op}) for op in sorted({row["op"] for row in rows})
    },
    "patches": lambda patches: sorted(patch["name"] for patch in patches),
    "overlap": lambda overlaps: sorted(overlap["name"] for overlap in overlaps if overlap["possible"]),
}
"""The part of a field's value to compare; all other fields are compared entirely."""


@dataclass(frozen=True)
class Line:
    """One line of the checklist, or a difference that is not on it.

    Attributes:
        key: the name for ``--varies``; off the checklist, the field.
        question: the line in words; empty off the checklist.
        values: those of the two receipts.
        same: whether they are the same; None where one of them is not known.
        reason: why it is not known; empty otherwise.
    """

    key: str
    question: str
    values: tuple[Any, Any]
    same: bool | None
    reason: str = ""

    def describe(self) -> str:
        """Describe the line, with both values where they differ."""
        if self.same:
            return f"{self.key}: the same"
        if self.same is None:
            return f"{self.key}: not known ({self.reason})"
        first, second = _differing(*self.values)
        return f"{self.key}: A has {plain(first)}, B has {plain(second)}"


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two receipts, the first of which is the baseline.

    Attributes:
        lines: the checklist.
        refusals: why there is no claim; empty when there is one.
        claim: the claim in words; None when it is refused.
        tokens_per_s_ratio: the second over the first; None where one is not known.
        allocated_memory_ratio: likewise of the peaks; also None where they are not comparable.
        noise_floor: the relative difference in speed that noise alone may explain.
        told_from_noise: whether the difference exceeds the noise floor.
        step_times: both medians, their spread, and the origin of the floor, in words.
        dominant: what takes most of a step of each, with its share, and what the card does by itself, in words.
        differences: the differences on no line.
        varies: the key of the one declared difference.
        declared: the disqualifiers that both were declared to carry.
    """

    lines: tuple[Line, ...]
    refusals: tuple[str, ...]
    claim: str | None
    tokens_per_s_ratio: float | None
    allocated_memory_ratio: float | None
    noise_floor: float
    told_from_noise: bool | None
    step_times: str
    dominant: tuple[str, ...]
    differences: tuple[Line, ...]
    varies: str | None = None
    declared: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe the checklist, the other differences, and the verdict last, a claim with its step times."""
        marks = {True: "=", False: "≠", None: "?"}
        text = [f"  {marks[line.same]} {line.describe()}" for line in self.lines]
        text += [f"  · {line.describe()}" for line in self.differences]
        verdict = ["no claim:", *(f"  {refusal}" for refusal in self.refusals)]
        if self.claim is not None:
            verdict = [f"claim: {self.claim}", f"  {self.step_times}", *(f"  {words}" for words in self.dominant)]
        return "\n".join([*text, *verdict])


_Both = tuple[Mapping[str, Any], Mapping[str, Any]]


def compare(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    varies: Sequence[str] = (),
    declared: Sequence[str] = (),
    noise: float | None = None,
) -> Comparison:
    """Compare the receipt ``second`` with the baseline ``first``.

    Args:
        first, second: valid receipts.
        varies: at most one key of :data:`KEYS` that is meant to differ; the claim then says so. Between two topologies,
            batch is compared per replica and speed per device. An unknown line refuses the claim anyway.
        declared: disqualifiers that both are known to carry; the claim then says so.
        noise: the share by which equal runs differ, by default :data:`NOISE`, or :data:`NOISE_IN_GRAPHS`.

    Raises:
        DataError: ``varies`` or ``declared`` name something unknown or that does not differ; ``noise`` is not a share.
    """
    varies, declared = tuple(dict.fromkeys(varies)), tuple(dict.fromkeys(declared))
    if len(varies) > 1:
        raise DataError(f"--varies was given {' and '.join(varies)}; a claim has one declared difference at most")
    for option, words, choices in (("--varies", varies, KEYS), ("--declare", declared, DISQUALIFIERS)):
        for word in words:
            if word not in choices:
                raise DataError(f"{option} {word!r} is not known; expected one of {', '.join(choices)}")
    if noise is not None and not 0 <= noise < math.inf:
        raise DataError(f"--noise is {100 * noise:g} %; expected 0 or more (run-to-run spread in %)")
    both = flatten(first), flatten(second)
    rate, path = "tokens/s", "throughput.tokens_per_s"
    if "topology" in varies:
        both = _of_a_replica(both[0]), _of_a_replica(both[1])
        rate, path = "tokens/s a device", "throughput.tokens_per_s_per_device"
    lines = tuple(_line(key, both) for key in KEYS)
    for line in lines:
        if line.key in varies and line.same:
            raise DataError(f"--varies {line.key}: nothing varies, {line.describe()}; leave it out")
    carried = [{row["name"]: row["evidence"] for row in values["disqualifiers"]} for values in both]
    for word in declared:
        if not all(word in names for names in carried):
            raise DataError(f"--declare {word!r}: not both receipts carry it; leave it out")
    wrong = [line for line in lines if not line.same and (line.same is None or line.key not in varies)]
    refusals = [f"{line.question} {line.describe()}" for line in wrong]
    for name, values, names in zip("AB", both, carried, strict=True):
        refusals += [f"{name} is disqualified by {word}: {names[word]}" for word in names if word not in declared]
        refusals += _own_refusals(name, values)
    differences = _differences(both)
    speed, (memory, of_memory), (floor, steps) = _ratio(both, path), _memory(both), _noise(both, noise)
    differs = None if speed is None else max(speed, 1 / speed) - 1 > floor
    of_speed = f"{rate} not known" if speed is None else f"{speed:.2f}x {rate}"
    if differs is False:
        of_speed = f"no difference in {rate} beyond noise ({speed:.2f}x; floor {_percent(floor)})"
    if not refusals and not varies and all(difference.same is None for difference in differences):
        refusals.append(f"nothing known in both receipts differs: {of_speed}, {of_memory}")
    clauses = [of_speed, of_memory, *(f"varying {key}" for key in varies), *_clauses(differences, both)]
    clauses += [f"both with {name}" for name in declared]
    return Comparison(
        lines=lines,
        refusals=tuple(refusals),
        claim=None if refusals else ", ".join(filter(None, clauses)),
        tokens_per_s_ratio=speed,
        allocated_memory_ratio=memory,
        noise_floor=floor,
        told_from_noise=differs,
        step_times=steps,
        dominant=tuple(f"{name}: {_dominant(values)}" for name, values in zip("AB", both, strict=True)),
        differences=differences,
        varies=varies[0] if varies else None,
        declared=declared,
    )


def _of_a_replica(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the batch of one replica, and without whether replicas divide the optimizer's states."""
    replicas = values["parallelism.data"] or 1
    names = ("batch.global_batch_size", "batch.effective_tokens")
    batch = {name: values[name] // replicas for name in names if values[name] is not None}
    optimizer = {key: value for key, value in (values["optimizer"] or {}).items() if key != "distributed"}
    return {**values, **batch, "optimizer": optimizer or None}


def _line(key: str, both: _Both) -> Line:
    """Compare all fields of a line, each by the last part of its path, or by the full path if two share that."""
    paths = [field.path for field in FIELDS if field.compare == key]
    lasts = [path.rpartition(".")[2] for path in paths]
    values: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    missing = []
    for name, receipt, compared in zip("AB", both, values, strict=True):
        for path, last in zip(paths, lasts, strict=True):
            compared[last if lasts.count(last) == 1 else path] = _compared(receipt, path)
            groups = (path, path.rpartition(".")[0])
            if receipt[path] is None and not any(group in _ABSENT and _ABSENT[group](receipt) for group in groups):
                missing.append(f"{name} does not know {path}: {why_unknown(path, receipt['unknown'])}")
    same = values[0] == values[1]
    if key == "balance" and values[0]["forced_balance"] == values[1]["forced_balance"]:
        first, second = (of["max_over_mean"] for of in values)
        same = same or bool(first and second and abs(first - second) <= BALANCE_TOLERANCE * max(first, second))
    return Line(key, _QUESTIONS[key], values, None if missing else same, "; ".join(missing))


def _compared(receipt: Mapping[str, Any], path: str) -> Any:
    return None if receipt[path] is None else _COMPARED.get(path, lambda value: value)(receipt[path])


def _differences(both: _Both) -> tuple[Line, ...]:
    """Return the differences on no line: what was changed on purpose, and what changed with it."""
    beside = [field.path for field in FIELDS if field.compare == BESIDE]
    pairs = {path: [_compared(values, path) for values in both] for path in beside}
    steps = [values["profiler.step_range"] for values in both]
    if None in steps:  # if both were profiled, it does not matter which steps: those are not measured
        pairs["profile"] = ["none" if span is None else "steps {} to {}".format(*span) for span in steps]
    return tuple(
        Line(name, "", (a, b), None if None in (a, b) else False, f"to {'A' if a is None else 'B'}")
        for name, (a, b) in pairs.items()
        if a != b
    )


def _clauses(differences: Sequence[Line], both: _Both) -> Iterator[str]:
    """Word a claim's clauses about other software, and about costly options that only one run had on."""
    for line in differences:
        if line.key in _SOFTWARE:
            yield f"of {line.key} not known to be the same" if line.same is None else _SOFTWARE[line.key]
        elif line.key == "experimental_taxes" and line.same is False:
            losses = ["not known" if values["loss.last"] is None else f"{values['loss.last']:.4f}" for values in both]
            yield f"the price of {line.describe()}, last loss {losses[0]} in A, {losses[1]} in B"


def _own_refusals(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Say why one receipt by itself supports no claim, apart from its disqualifiers."""
    for entry in values["unjudged"]:
        yield f"{name} could not be judged for {entry['name']}: {entry['reason']}"
    if values["status"] != "finished":
        yield f"{name} has not finished: its status is {values['status']}"
    recorded, expected = len(values["ranks.found"]), values["ranks.expected"]
    if recorded != expected:
        yield f"{name} has facts of {recorded} ranks; expected {expected}"
    if (steps := values["step_time.n"] or 0) < STEADY_STEPS:
        yield f"{name} has {steps} measured steps; expected {STEADY_STEPS} or more"
    if values["throughput.tokens_per_s"] is None:
        yield f"{name} has no tokens/s: {why_unknown('throughput.tokens_per_s', values['unknown'])}"


def _ratio(both: _Both, path: str) -> float | None:
    return both[1][path] / both[0][path] if both[0][path] and both[1][path] else None


def _memory(both: _Both) -> tuple[float | None, str]:
    """Return the ratio of the peaks, and the claim's clause about it, or about why there is none.

    A profiler's records count towards the memory of its run, most of all where that is the resident set.
    """
    ratio = _ratio(both, "memory.allocated_peak_bytes")
    if ratio is None:
        return None, ""
    profiled = [values["profiler.step_range"] is not None for values in both]
    kinds = [values["memory.kind"] for values in both]
    if kinds[0] != kinds[1]:
        return None, f"memory not compared: {plain(kinds[0])} in A, {plain(kinds[1])} in B"
    if profiled[0] is not profiled[1]:
        return None, f"memory not compared: only {'AB'[profiled.index(True)]} was profiled"
    return ratio, f"{ratio:.2f}x {'peak resident set' if kinds[0] == fields.RESIDENT else 'peak allocated memory'}"


def _noise(both: _Both, noise: float | None) -> tuple[float, str]:
    """Return the floor that a difference in speed must exceed; and the step times, their spread and the floor's origin.

    The standard error of a median is derived from the 90th percentile. Steps are assumed normal and independent:
    √(π/2) standard deviations over the root of their number.
    """
    floor, reason = noise, "as given"
    if floor is None:
        impls = [{row["observed"] for row in values["backends"] or () if row["op"] == "cuda_graph"} for values in both]
        graphs = impls == [{"local"}] * 2  # of every layer
        floor, reason = (NOISE_IN_GRAPHS if graphs else NOISE), f"the run-to-run spread{' in CUDA graphs' * graphs}"
    errors, words = [], []
    for values in both:
        steps, median, slow = (values[f"step_time.{name}"] for name in ("n", "p50_s", "p90_s"))
        if not steps or not median or slow is None:
            words.append("not known")
            continue
        errors.append(math.sqrt(math.pi / 2 / steps) * (slow / median - 1) / _P90_DEVIATIONS)
        words.append(f"median {median:.4g} s, 90th percentile {_percent(slow / median - 1)} above")
    of_steps = STANDARD_ERRORS * math.hypot(*errors)
    if of_steps > floor:
        floor, reason = of_steps, f"{STANDARD_ERRORS:g} standard errors of these medians"
    return floor, f"step times: A {words[0]}; B {words[1]}; floor {_percent(floor)}, {reason}"


def _dominant(values: Mapping[str, Any]) -> str:
    """Describe the group with the largest share of a step, and the card's own rates."""
    group, what = values["dominant_time"] or values["dominant_flops"], "time" if values["dominant_time"] else "FLOPs"
    share = (values["shares.groups"] or {}).get(group)
    words = "dominant share not known" if share is None else f"{group} is {_percent(share)} of the {what}"
    if (card := values["card.matmul_tflops_per_s"]) is not None:
        words += f"; card by itself {card:.0f} TFLOP/s, copies {values['card.copy_bytes_per_s'] / 1e12:.2f} TB/s"
    return words


def _percent(share: float) -> str:
    return f"{round(100 * share, 1):g} %"


def _differing(first: Any, second: Any) -> tuple[Any, Any]:
    """Return the entries in which two mappings differ; other values unchanged."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return first, second
    differ = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    pairs = {key: _differing(first.get(key), second.get(key)) for key in differ}
    return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}
