"""Judges from a run's facts what makes its speed no speed of training; each judgement comes with its evidence. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megacpp_mcore.observe.receipts.schema import DISQUALIFIERS
from megacpp_mcore.observe.receipts.window import Window, tokens_of
from megacpp_mcore.observe.steps import Step


class _Unjudged(Exception):
    """A fact that a judgement needs is not known; the message says which."""


def judge(
    values: Mapping[str, Any],
    steps: Sequence[Step],
    window: Window | None,
    no_steps: str = "no step was recorded",
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The disqualifiers with their evidence, and those that could not be judged with the reason.

    Args:
        values: a receipt's values by path.
        steps: the steps that were recorded.
        window: what is measured; None where that is not known.
        no_steps: why there are no steps, where there are none.
    """
    judges: Mapping[str, Callable[[], str]] = {
        "mock data": lambda: _mock(values),
        "forced balance": lambda: _forced(values),
        "capacity drop": lambda: _dropped(values),
        "indexer untrained": lambda: _indexer(values),
        "warm-up inside the window": lambda: _compiled(window),
        "fall-back": lambda: _fallen_back(values),
        "NaN skipped": lambda: _skipped(steps, no_steps),
        "batch changed": lambda: _batch(values, steps, no_steps),
    }
    found, unjudged = [], []
    for name in DISQUALIFIERS:
        try:
            evidence = judges[name]()
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


def _known(values: Mapping[str, Any], path: str) -> Any:
    value = values.get(path)
    if value is None:
        raise _Unjudged(f"{path} is not known")
    return value


def _mock(values: Mapping[str, Any]) -> str:
    return "the run trains on Megatron's mock data" if _known(values, "data.kind") == "mock" else ""


def _forced(values: Mapping[str, Any]) -> str:
    if not _known(values, "moe_enabled"):
        return ""
    forced = _known(values, "routing.forced_balance")
    return "tokens are routed at random (--moe-router-force-load-balancing)" if forced else ""


def _dropped(values: Mapping[str, Any]) -> str:
    if not _known(values, "moe_enabled"):
        return ""
    dropped = values.get("routing.dropped_tokens")
    capacity = values.get("routing.capacity_factor")
    if dropped is None and capacity is None and values.get("routing.expert_input") is not None:
        return ""  # without a capacity nothing can be dropped
    if dropped is None:
        raise _Unjudged(f"experts have capacity factor {capacity}, and dropped tokens were not counted")
    return f"{dropped} assignments of tokens to experts were dropped (capacity factor {capacity})" if dropped else ""


def _indexer(values: Mapping[str, Any]) -> str:
    layers = values.get("model.definition")
    if layers is None:
        raise _Unjudged("the model's definition is not known")
    if values.get("indexer.top_k") is None:
        return ""  # no sparse attention
    if not _known(values, "indexer.loss_coefficient"):
        return "the indexer's loss coefficient is 0: the keys that attention reads are not learned"
    warm_up = values.get("indexer.warmup_steps")
    return f"attention is dense for the first {warm_up} steps (indexer warm-up)" if warm_up else ""


def _compiled(window: Window | None) -> str:
    if window is None or not window.seconds:
        raise _Unjudged("no step was measured")
    if not window.compiled:
        return ""
    step, spent = max(window.compiled.items(), key=lambda one: one[1])
    return f"{len(window.compiled)} measured steps compiled or tuned, step {step} for {spent / 1e9:.3f} s"


def _fallen_back(values: Mapping[str, Any]) -> str:
    found = fallen_back(_known(values, "backends"), _known(values, "parts"))
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _skipped(steps: Sequence[Step], no_steps: str) -> str:
    if not steps:
        raise _Unjudged(no_steps)
    bad = [step.step for step in steps if step.skipped or not all(map(math.isfinite, step.losses.values()))]
    return f"{len(bad)} steps were skipped or had a loss that is no number, the first is step {bad[0]}" if bad else ""


def _batch(values: Mapping[str, Any], steps: Sequence[Step], no_steps: str) -> str:
    if _known(values, "batch.rampup"):
        return "the batch grows during the run (--rampup-batch-size)"
    sizes = tokens_of(steps)
    if not sizes:
        raise _Unjudged("no two steps in a row were recorded" if steps else no_steps)
    different = sorted(set(sizes.values()))
    return f"steps had {', '.join(map(str, different))} tokens" if len(different) > 1 else ""
