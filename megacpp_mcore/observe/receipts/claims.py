"""What may be said of runs' speed: what disqualifies one run, and whether two receipts may be compared. No torch.

A disqualifier is judged from a run's facts, and comes with its evidence. A comparison is a checklist line by line, and the
claim if all of them allow one. The first seven lines are the questions of a reviewer (same pattern, routed experts, sequence,
compile policy, topology, data, cache state), the others the denominators by which a sparse speed-up is made to look better than
it is. What differs and is on no line (backends, parts, patches, recompute, overlap) is what a claim is about: it is named
beside it. Another commit, other versions and another environment are named in the claim itself, for what they changed no
receipt says. A ratio that noise explains is no claim about speed: the claim then says so, and the spread of the step times is
named in any case. Memory is compared with memory of the same kind, and not where a profiler was in one run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.receipts.schema import DISQUALIFIERS, FIELDS, NOT_PROFILED, RESIDENT, flatten, why_unknown

if TYPE_CHECKING:
    from megacpp_mcore.observe.events import Step
    from megacpp_mcore.observe.receipts.assemble import Window

# --- Disqualifiers ----------------------------------------------------------------------------------------------------


class _Unjudged(Exception):
    """A fact that a judgement needs is not known; the message says which."""


@dataclass(frozen=True)
class _Case:
    """What is judged: a receipt's values by path, the steps that were recorded, what is measured, and which starts overlap."""

    values: Mapping[str, Any]
    steps: Sequence[Step]
    window: Window | None
    overlap: str

    def known(self, path: str) -> Any:
        """A value that the judgement needs."""
        value = self.values.get(path)
        if value is None:
            raise _Unjudged(f"{path} is not known")
        return value


def judge(
    values: Mapping[str, Any], steps: Sequence[Step], window: Window | None, overlap: str = ""
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The disqualifiers with their evidence, and those that could not be judged with the reason.

    Args:
        values: a receipt's values by path.
        steps: the steps that were recorded.
        window: what is measured; None where that is not known.
        overlap: which starts recorded at the same time, in words; empty: none.
    """
    case = _Case(values, steps, window, overlap)
    found, unjudged = [], []
    for name in DISQUALIFIERS:
        try:
            evidence = _JUDGES[name](case)
        except _Unjudged as missing:
            unjudged.append({"name": name, "reason": str(missing)})
        else:
            if evidence:
                found.append({"name": name, "evidence": evidence})
    return found, unjudged


def fallen_back(backends: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What runs slower than what is there, or is not what was asked for; a sentence each."""
    layers: dict[tuple[str, str], list[int | None]] = {}
    for one in backends:
        if one["requested"] not in ("auto", one["observed"]):
            what = f"asked for {one['requested']} and runs on {one['observed']}: {one['reason']}"
        elif one["slower_than_best"]:
            what = f"runs on {one['observed']}, slower than the best for this device: {one['reason']}"
        else:
            continue
        layers.setdefault((one["op"], what), []).append(one["layer"])
    found = [f"op {op}{_where(numbers)} {what}" for (op, what), numbers in layers.items()]
    if not {"linear", "norm"} & {one["op"] for one in backends}:  # whose records say it of every layer
        for one in parts:
            engine = one["requested"] == "transformer_engine" != one["observed"]
            if engine and arithmetic(one["part"]):
                found.append(f"{one['part']} asked for transformer_engine and is {one['implementation']}")
    return found


def _where(layers: Sequence[int | None]) -> str:
    """`` in layer 3``, `` in layers 3, 6``; nothing for MTP and the ops of the whole run, which have no number."""
    numbers = sorted({layer for layer in layers if layer is not None})
    return f" in layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else ""


def arithmetic(name: str) -> bool:
    """Whether a module of this name is a linear layer or a norm, which Transformer Engine brings when it is asked for."""
    return name.startswith("linear_") or name.endswith(("_proj", "norm"))


def _mock(case: _Case) -> str:
    return "the run trains on Megatron's mock data" if case.known("data.kind") == "mock" else ""


def _forced(case: _Case) -> str:
    forced = case.known("moe_enabled") and case.known("routing.forced_balance")
    return "tokens are routed at random (--moe-router-force-load-balancing)" if forced else ""


def _dropped(case: _Case) -> str:
    if not case.known("moe_enabled"):
        return ""
    dropped, capacity = (case.values.get(f"routing.{name}") for name in ("dropped_tokens", "capacity_factor"))
    if dropped is None and capacity is None and case.values.get("routing.expert_input") is not None:
        return ""  # without a capacity nothing can be dropped
    if dropped is None:
        raise _Unjudged(f"experts have capacity factor {capacity}, and dropped tokens were not counted")
    return f"{dropped} assignments of tokens to experts were dropped (capacity factor {capacity})" if dropped else ""


def _untrained(case: _Case) -> str:
    if case.values.get("model.definition") is None:
        raise _Unjudged("the model's definition is not known")
    if case.values.get("indexer.top_k") is None:
        return ""  # no sparse attention
    if not case.known("indexer.loss_coefficient"):
        return "the indexer's loss coefficient is 0: the keys that attention reads are not learned"
    warm_up = case.values.get("indexer.warmup_steps")
    return f"attention is dense for the first {warm_up} steps (indexer warm-up)" if warm_up else ""


def _compiled(case: _Case) -> str:
    if case.window is None or not case.window.seconds:
        raise _Unjudged("no step was measured")
    compiled = case.window.compiled
    if not compiled:
        return ""
    step, spent = max(compiled.items(), key=lambda one: one[1])
    return f"{len(compiled)} measured steps compiled or tuned, step {step} for {spent / 1e9:.3f} s"


def _fallen_back(case: _Case) -> str:
    found = fallen_back(case.known("backends"), case.known("parts"))
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _skipped(case: _Case) -> str:
    if not case.steps:
        raise _Unjudged("no step was recorded")
    bad = [step.step for step in case.steps if step.skipped or not all(map(math.isfinite, step.losses.values()))]
    return f"{len(bad)} steps were skipped or had a loss that is no number, the first is step {bad[0]}" if bad else ""


def _batch(case: _Case) -> str:
    from megacpp_mcore.observe.receipts.assemble import tokens_of

    if case.known("batch.rampup"):
        return "the batch grows during the run (--rampup-batch-size)"
    sizes = tokens_of(case.steps)
    if not sizes:
        raise _Unjudged("no two steps in a row were recorded" if case.steps else "no step was recorded")
    different = sorted(set(sizes.values()))
    return f"steps had {', '.join(map(str, different))} tokens" if len(different) > 1 else ""


_JUDGES: Mapping[str, Callable[[_Case], str]] = {
    "mock data": _mock,
    "forced balance": _forced,
    "capacity drop": _dropped,
    "indexer untrained": _untrained,
    "warm-up inside the window": _compiled,
    "fall-back": _fallen_back,
    "NaN skipped": _skipped,
    "batch changed": _batch,
    "overlapping starts": lambda case: case.overlap,
}
"""The evidence of each disqualifier, empty where there is none."""


# --- Comparison -------------------------------------------------------------------------------------------------------

BALANCE_TOLERANCE = 0.1
"""Relative difference of the busiest expert's load up to which two runs are equally balanced: routing is learned."""
STEADY_STEPS = 30
"""Steps that each of the two has to have measured."""
NOISE = 0.07
"""By how much equal runs part in speed, one run each: pairs of the same command, on the same machine, parted by 2 to 7 % in
tokens/s (``experiments/results/README.md``, ``examples/receipts/README.md``). What is less, one pair of runs cannot tell."""
MEMORY_NOISE = 0.05
"""By how much the peak memory of two runs may part before it has to have a reason where nothing else is known to differ."""
STANDARD_ERRORS = 2.0
"""How many standard errors two medians have to be apart before the spread of the steps does not explain it."""
_IN_ALL = ("throughput.tokens_per_s", "tokens/s")
_A_DEVICE = ("throughput.tokens_per_s_per_device", "tokens/s a device")
_P90_DEVIATIONS = 1.2816
"""Standard deviations from the median to the 90th percentile, of the normal distribution."""


@dataclass(frozen=True)
class Line:
    """One line of the checklist.

    Attributes:
        key: what ``--varies`` names.
        question: the line in words.
        values: what each of the two receipts has; for people where they differ.
        same: whether they are the same; None where one of them does not say.
        reason: why it is not known; empty where it is.
    """

    key: str
    question: str
    values: tuple[Any, Any]
    same: bool | None
    reason: str = ""

    def describe(self, names: tuple[str, str] = ("A", "B")) -> str:
        """The line for people, with both values where they differ."""
        if self.same:
            return f"{self.key}: the same, {_brief(self.values[0])}"
        if self.same is None:
            return f"{self.key}: not known ({self.reason})"
        first, second = _differing(*self.values)
        return f"{self.key}: {names[0]} has {_brief(first)}, {names[1]} has {_brief(second)}"


@dataclass(frozen=True)
class Comparison:
    """What became of comparing two receipts, the first of which is the baseline.

    Attributes:
        lines: the checklist.
        refusals: why there is no claim; empty when there is one.
        claim: the claim in words; None when it is refused.
        speed: tokens/s of the second over the first; None where one is not known.
        memory: peak memory of the second over the first, likewise; None, too, where they are no two of a kind.
        floor: the share by which one has to be faster than the other before noise does not explain it.
        steps: the step times of both and their spread, and what the floor is from, in words.
        differences: what differs on no line, each in words.
        varies: the key of the one declared difference.
        declared: the disqualifiers that both were declared to carry.
    """

    lines: tuple[Line, ...]
    refusals: tuple[str, ...]
    claim: str | None
    speed: float | None
    memory: float | None
    floor: float
    steps: str
    differences: tuple[str, ...]
    varies: str | None = None
    declared: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {
            "claim": self.claim,
            "refusals": list(self.refusals),
            "varies": self.varies,
            "declared": list(self.declared),
            "tokens_per_s_ratio": self.speed,
            "allocated_memory_ratio": self.memory,
            "noise_floor": self.floor,
            "told_from_noise": None if self.speed is None else _told(self.speed, self.floor),
            "step_times": self.steps,
            "lines": [
                {
                    "key": line.key,
                    "question": line.question,
                    "values": list(line.values),
                    "same": line.same,
                    "reason": line.reason,
                }
                for line in self.lines
            ],
            "differences": list(self.differences),
        }

    def describe(self) -> str:
        """Some lines of text: the checklist, what else differs, and the verdict last, a claim with its step times."""
        marks = {True: "  = ", False: "  ≠ ", None: "  ? "}
        text = [marks[line.same] + line.describe() for line in self.lines]
        text += [f"  · {difference}" for difference in self.differences]
        if self.claim is not None:
            return "\n".join([*text, f"claim: {self.claim}", f"  {self.steps}"])
        return "\n".join([*text, "no claim:", *(f"  {refusal}" for refusal in self.refusals)])


@dataclass(frozen=True)
class _Question:
    """A line: what ``--varies`` names, the question in words, and how two answers are the same (equal, if None)."""

    key: str
    text: str
    same: Callable[[Any, Any], bool] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields that are looked at together."""
        return tuple(field.path for field in FIELDS if field.line == self.key)

    def name(self, path: str) -> str:
        """The last part of ``path``, or all of it where another path of the line has the same."""
        last = path.rpartition(".")[2]
        return last if [each.rpartition(".")[2] for each in self.paths].count(last) == 1 else path


def _similar(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two balances are: forced or not alike, and the busiest experts within :data:`BALANCE_TOLERANCE`."""
    first, second = one["max_over_mean"], other["max_over_mean"]
    near = (first is None and second is None) or (
        None not in (first, second) and abs(first - second) <= BALANCE_TOLERANCE * max(first, second)
    )
    return near and one["forced_balance"] == other["forced_balance"]


_QUESTIONS = (
    _Question("pattern", "same pattern?"),
    _Question("routed_experts", "same routed-expert settings?"),
    _Question("sequence_length", "same sequence length?"),
    _Question("compile_policy", "same compile policy?"),
    _Question("topology", "same substrate and parallel topology?"),
    _Question("real_data", "same real-data path?"),
    _Question("cache_state", "same cache state?"),
    _Question("batch_geometry", "same batch geometry?"),
    _Question("effective_tokens", "same effective tokens a step?"),
    _Question("top_k", "same top-k?"),
    _Question("capacity", "same capacity?"),
    _Question("expert_input", "both padded, or both jagged?"),
    _Question("balance", "same balance?", _similar),
    _Question("precision", "same precision plan?"),
    _Question("optimizer", "same optimizer, and dtypes of its states?"),
)
KEYS = tuple(question.key for question in _QUESTIONS)
"""The keys of the checklist, the seven of the reviewer first."""
SEVEN = KEYS[:7]

_ABSENT: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "data.checksum": lambda receipt: receipt.get("data.kind") == "mock",
    "tokenizer.checksum": lambda receipt: receipt.get("data.kind") == "mock",
    "routing": lambda receipt: receipt.get("moe_enabled") is False,
    "routing.capacity_factor": lambda receipt: receipt.get("routing.expert_input") is not None,
    "indexer": lambda receipt: receipt.get("model.layers") is not None and "indexer" in receipt["unknown"],
    "ddp": lambda receipt: "ddp" in receipt["unknown"],
}
"""Where a field, or all of a group, is null because there is no such thing in the run: no files of data, no experts, no
capacity, no sparse attention, no DistributedDataParallel of Megatron's."""


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
        varies: at most one key of :data:`KEYS` that is meant to differ; the claim then says so. Of two topologies, batch
            and speed are compared a replica and a device. A line that is not known refuses the claim all the same.
        declared: disqualifiers that both are known to carry; the claim then says so.
        noise: the share by which equal runs part, where that was measured; by default :data:`NOISE`.

    Raises:
        DataError: ``varies`` or ``declared`` name what is not there, or is known not to differ; ``noise`` is no share.
    """
    varies, declared = tuple(dict.fromkeys(varies)), tuple(dict.fromkeys(declared))
    _check_words(varies, declared)
    _check_noise(noise)
    one, other = flatten(first)[0], flatten(second)[0]
    if "topology" in varies:
        one, other = _of_a_replica(one), _of_a_replica(other)
    lines = tuple(_line(question, one, other) for question in _QUESTIONS)
    _check_declared(lines, varies, declared, (one, other))
    refusals = [
        f"{line.question} {line.describe()}"
        for line in lines
        if line.same is None or (line.same is False and line.key not in varies)
    ]
    refusals += [*_own_refusals("A", one, declared), *_own_refusals("B", other, declared)]
    path, rate = _A_DEVICE if "topology" in varies else _IN_ALL
    speed = _ratio(one, other, path)
    memory, of_memory = _memory(one, other)
    floor, steps = _noise(one, other, noise)
    differences = _differences(one, other)
    software = [difference for difference in differences if difference.name in _SOFTWARE]
    told = speed is not None and _told(speed, floor)
    if speed is None:
        of_speed = f"{rate} not known"
    else:
        of_speed = f"{speed:.2f}x {rate}" if told else _untold(speed, floor, rate)
    said = [of_speed, *of_memory, *_circumstances(varies, declared, software), *_price(one, other, differences)]
    if not refusals and not varies and not any(difference.known for difference in differences):
        apart = memory is not None and _told(memory, MEMORY_NOISE)
        ratios = [(f"{speed:.2f}x {rate}", told), *((words, apart) for words in of_memory if memory is not None)]
        refusals.append(_unexplained(ratios))
    return Comparison(
        lines=lines,
        refusals=tuple(refusals),
        claim=None if refusals else ", ".join(said),
        speed=speed,
        memory=memory,
        floor=floor,
        steps=steps,
        differences=tuple(difference.describe() for difference in differences),
        varies=varies[0] if varies else None,
        declared=declared,
    )


def _of_a_replica(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the batch of one data-parallel replica, which more devices leave as it is."""
    replicas = values["parallelism.data"] or 1
    names = ("batch.global_batch_size", "batch.effective_tokens")
    return {**values, **{name: values[name] // replicas for name in names if values[name] is not None}}


def _check_words(varies: Sequence[str], declared: Sequence[str]) -> None:
    if len(varies) > 1:
        raise DataError(
            f"--varies was given {' and '.join(varies)}; a claim has one declared difference at most: name one"
        )
    for name, words, known in (("--varies", varies, KEYS), ("--declare", declared, DISQUALIFIERS)):
        for word in words:
            if word not in known:
                raise DataError(f"{name} {word!r} is not known; expected one of {', '.join(known)}")


def _check_noise(noise: float | None) -> None:
    if noise is not None and not 0 <= noise < math.inf:
        raise DataError(f"the noise given is {100 * noise:g} %; expected 0 or more: by how much equal runs part")


def _check_declared(
    lines: Sequence[Line], varies: Sequence[str], declared: Sequence[str], both: Sequence[Mapping[str, Any]]
) -> None:
    for line in lines:
        if line.key in varies and line.same:
            raise DataError(f"--varies {line.key}: nothing varies, {line.describe()}; leave it out")
    for word in declared:
        if not all(word in _disqualifiers(values) for values in both):
            raise DataError(f"--declare {word!r}: not both receipts carry it; leave it out")


def _line(question: _Question, one: Mapping[str, Any], other: Mapping[str, Any]) -> Line:
    values, missing = [], []
    for name, receipt in (("A", one), ("B", other)):
        value, unknown = _value(question, receipt)
        values.append(value)
        missing += [f"{name} does not know {path}: {reason}" for path, reason in unknown.items()]
    pair = (values[0], values[1])
    if missing:
        return Line(question.key, question.text, pair, None, "; ".join(missing))
    return Line(question.key, question.text, pair, question.same(*pair) if question.same else pair[0] == pair[1])


def _value(question: _Question, receipt: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a line by name, and what is missing without a good reason."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for path in question.paths:
        value = receipt.get(path)
        if path == "model.definition" and value is not None:
            value = _sizes(value)
        if value is None:
            reason = why_unknown(path, receipt["unknown"]) or "it is null"
            holds = [_ABSENT[name] for name in (path, path.rpartition(".")[0]) if name in _ABSENT]
            if not any(is_absent(receipt) for is_absent in holds):
                missing[path] = reason
        found[question.name(path)] = value
    return found, missing


def _sizes(definition: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's definition says but its name, and what other lines ask for."""
    sizes = {name: value for name, value in definition.items() if name not in ("name", "pattern", "seq_length")}
    for group, others in (
        ("moe", ("experts", "topk", "ffn_hidden_size", "shared_ffn_hidden_size")),
        ("dsa", ("topk",)),
    ):
        if isinstance(sizes.get(group), Mapping):
            sizes[group] = {name: value for name, value in sizes[group].items() if name not in others}
    return sizes


def _disqualifiers(values: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["evidence"] for one in values["disqualifiers"]}


def _own_refusals(name: str, values: Mapping[str, Any], declared: Sequence[str]) -> list[str]:
    """Why one receipt alone carries no claim."""
    found = [
        f"{name} is disqualified by {word}: {evidence}"
        for word, evidence in _disqualifiers(values).items()
        if word not in declared
    ]
    found += [f"{name} could not be judged for {one['name']}: {one['reason']}" for one in values["unjudged"]]
    if values["status"] != "finished":
        found.append(f"{name} has not finished: its status is {values['status']}")
    there, expected = len(values["ranks.found"]), values["ranks.expected"]
    if expected is None or there < expected:
        found.append(
            f"{name} has the parts of {there} ranks; expected {'a number that is not known' if expected is None else expected}"
        )
    steps = values.get("step_time.n")
    if steps is None or steps < STEADY_STEPS:
        found.append(f"{name} has {steps or 0} measured steps; expected {STEADY_STEPS} or more")
    if values.get("throughput.tokens_per_s") is None:
        reason = why_unknown("throughput.tokens_per_s", values["unknown"])
        found.append(f"{name} has no tokens/s: {reason}")
    return found


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], path: str) -> float | None:
    first, second = one.get(path), other.get(path)
    return second / first if first and second else None


_OF_KIND = {"CUDA allocator": "peak allocated memory", RESIDENT: "peak resident set"}
"""What the peak of each kind of memory is called."""


def _memory(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """The ratio of the peaks, and what a claim says of it, or of why there is none.

    What a profiler keeps is in the memory of its run, most of all where that is the resident set.
    """
    ratio = _ratio(one, other, "memory.allocated_peak_bytes")
    profiled, kinds = (_profiled(one), _profiled(other)), (one.get("memory.kind"), other.get("memory.kind"))
    if ratio is None:
        return None, []
    if None in profiled and profiled[0] != profiled[1]:
        return None, [f"memory not compared: whether {'AB'[profiled.index(None)]} was profiled is not known"]
    if profiled[0] != profiled[1]:
        return None, [f"memory not compared: {'AB'[profiled.index(True)]} alone was profiled"]
    if kinds[0] != kinds[1]:
        return None, [f"memory not compared: {_brief(kinds[0])} in A, {_brief(kinds[1])} in B"]
    return ratio, [f"{ratio:.2f}x {_OF_KIND.get(str(kinds[0]), 'peak memory, of a kind that is not known')}"]


def _profiled(values: Mapping[str, Any]) -> bool | None:
    """Whether a profiler was in the run; None where the receipt does not say."""
    if values.get("profiler.step_range") is not None:
        return True
    return False if why_unknown("profiler.step_range", values["unknown"]) == NOT_PROFILED else None


def _profile(values: Mapping[str, Any]) -> str | None:
    """The profile of a run in words; None where it is not known whether there is one."""
    profiled = _profiled(values)
    if profiled:
        first, last = values["profiler.step_range"]
        return f"steps {first} to {last}"
    return None if profiled is None else "none"


def _unexplained(ratios: Sequence[tuple[str, bool]]) -> str:
    """Why equal receipts allow no claim: of each ratio in words, whether it is more than equal runs part by."""
    apart, alike = (", ".join(words for words, more in ratios if more is which) for which in (True, False))
    said = [f"{apart} differs by more than equal runs do, and neither receipt says why"] if apart else []
    said += [f"{alike} is what equal runs part by"] if alike else []
    return f"nothing that both receipts know differs: {'; '.join(said)}"


@dataclass(frozen=True)
class _Difference:
    """What is on no line and differs.

    Attributes:
        name: what it is.
        values: in each of the two; None where one does not say.
    """

    name: str
    values: tuple[Any, Any]

    @property
    def known(self) -> bool:
        """Whether both say what they have, and so that it differs."""
        return None not in self.values

    def describe(self) -> str:
        """Both values, of mappings what differs."""
        words = ["not known" if value is None else _brief(value) for value in _differing(*self.values)]
        return f"{self.name}: {words[0]} in A, {words[1]} in B"

    def in_a_claim(self) -> str:
        """What a claim says of the software."""
        return _SOFTWARE[self.name] if self.known else f"of {self.name} not known to be the same"


_SOFTWARE = {"commit": "of another commit", "environment": "of another environment", "versions": "of other versions"}
"""What may have changed anything, and how a claim says that it differs."""


def _told(speed: float, floor: float) -> bool:
    """Whether one is faster than the other by more than ``floor``, whichever of them is the baseline."""
    return max(speed, 1 / speed) - 1 > floor


def _untold(speed: float, floor: float, rate: str) -> str:
    """What is said of a ratio that noise explains."""
    return f"no difference in {rate} that can be told from noise ({speed:.2f}x; floor {_percent(floor)})"


def _circumstances(varies: Sequence[str], declared: Sequence[str], software: Sequence[_Difference]) -> list[str]:
    """What a claim says of that under which it holds."""
    words = [f"varying {key}" for key in varies]
    words += [difference.in_a_claim() for difference in software]
    return [*words, *(f"both with {name}" for name in declared)]


def _noise(one: Mapping[str, Any], other: Mapping[str, Any], noise: float | None) -> tuple[float, str]:
    """What a difference in speed has to exceed; and the step times, their spread, and what that is from, in words."""
    floor, reason = (NOISE, "by which equal runs part") if noise is None else (noise, "as given")
    of_steps = STANDARD_ERRORS * math.hypot(*(_error_of_median(values) or 0.0 for values in (one, other)))
    if of_steps > floor:
        floor, reason = of_steps, f"{STANDARD_ERRORS:g} standard errors of these medians"
    return floor, f"step times: A {_steps(one)}; B {_steps(other)}; floor {_percent(floor)}, {reason}"


def _error_of_median(values: Mapping[str, Any]) -> float | None:
    """Standard error of the median step time as a share of it, by the 90th percentile; None where that is not known.

    Steps are taken as normal and independent: √(π/2) standard deviations over the root of their number.
    """
    steps, median, slow = (values.get(f"step_time.{name}") for name in ("n", "p50_s", "p90_s"))
    if not steps or not median or slow is None:
        return None
    return math.sqrt(math.pi / 2 / steps) * (slow / median - 1) / _P90_DEVIATIONS


def _steps(values: Mapping[str, Any]) -> str:
    """Median and spread of a run's step times."""
    median, slow = values.get("step_time.p50_s"), values.get("step_time.p90_s")
    if not median or slow is None:
        return "not known"
    return f"median {median:.4g} s, 90th percentile {_percent(slow / median - 1)} above"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1):g} %"


def _price(one: Mapping[str, Any], other: Mapping[str, Any], differences: Sequence[_Difference]) -> list[str]:
    """What is said beside speed and memory where experimental taxes differ: which, and what they do to the loss."""
    for difference in differences:
        if difference.name == "experimental_taxes" and difference.known:
            losses = [values.get("loss.last") for values in (one, other)]
            said = ["not known" if loss is None else f"{loss:.4f}" for loss in losses]
            return [f"the price of {difference.describe()}", f"last loss {said[0]} in A, {said[1]} in B"]
    return []


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[_Difference]:
    """What is on no line and differs: the thing that was changed, and what was changed with it."""
    told: Mapping[str, Callable[[Any], Any]] = {
        "backends": lambda records: _chosen(records, ("op", "observed")),
        "parts": lambda records: _chosen(records, ("part", "implementation")),
        "patches": lambda patches: sorted(patch["name"] for patch in patches),
        "recompute": lambda words: words,
        "experimental_taxes": lambda names: names,
        "overlap": lambda overlaps: sorted(each["name"] for each in overlaps if each["possible"]),
        **dict.fromkeys(_SOFTWARE, lambda same: same),
    }
    found = []
    for name, tell in told.items():
        first, second = (None if values.get(name) is None else tell(values[name]) for values in (one, other))
        if first != second:
            found.append(_Difference(name, (first, second)))
    if _profiled(one) is not _profiled(other):  # which steps were profiled is all the same: they are not measured
        found.append(_Difference("profile", (_profile(one), _profile(other))))
    return found


def _chosen(records: Sequence[Mapping[str, Any]], keys: tuple[str, str]) -> dict[str, list[str]]:
    chosen: dict[str, set[str]] = {}
    for record in records:
        chosen.setdefault(record[keys[0]], set()).add(record[keys[1]])
    return {name: sorted(values) for name, values in sorted(chosen.items())}


def _differing(one: Any, other: Any) -> tuple[Any, Any]:
    """Of two mappings, what differs; of anything else, all of it."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one, other
    pairs = {
        key: _differing(one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)
    }
    return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} {_brief(each)}" for key, each in value.items() if not isinstance(each, Mapping) or each
        )
    if isinstance(value, list | tuple | set):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)
