"""How much of the experts' work is work on tokens: pad rows and experts without tokens counted out. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.observe.routing import Load, merged


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How the rows of an expert are padded.

    Attributes:
        capacity_factor: rows of an expert over its even share, where every expert is padded to them; None: not padded so.
        quantized: whether the rows of an expert are padded to a multiple that quantised kernels need.
    """

    capacity_factor: float | None = None
    quantized: bool = False

    @classmethod
    def of_run(cls, config: Any, modules: Iterable[Any]) -> Padding:
        """What a model's configuration and its experts say (megatron-core 0.19, ``TransformerConfig``, ``TEGroupedMLP``)."""
        capacity = config.moe_expert_capacity_factor if config.moe_pad_expert_input_to_capacity else None
        quantized = bool(config.moe_router_padding_for_quantization)
        quantized = quantized or any(hasattr(module, "quantization_padding") for module in modules)
        return cls(capacity_factor=capacity, quantized=quantized)


def loads(record: Mapping[str, Any]) -> dict[str, Load]:
    """The loads by layer in a record of :class:`megacpp_mcore.observe.routing.Routing`."""
    return merged([record["layers"]])


def sparse_work(
    before: Mapping[str, Load], after: Mapping[str, Load], padding: Padding, *, micro_batches: int
) -> dict[str, Any]:
    """What the routers of one rank sent to the experts between two readings.

    Args:
        before, after: the running loads by layer.
        padding: of the experts' rows.
        micro_batches: how many there were.

    Returns:
        ``tokens`` that experts got, ``rows`` that they computed (None where it is not known), ``utilisation`` (the one over
        the other), ``rows_why``, ``dormant_share`` (experts of a layer that got no token, mean of the layers),
        ``dropped_share``, ``layers`` with the same by layer; or only ``why`` there is nothing.
    """
    window = {layer: load - before[layer] if layer in before else load for layer, load in after.items()}
    window = {layer: load for layer, load in window.items() if load.asked}
    if not window:
        return {"why": "the run has no routers, or their tokens are not counted"}
    layers = {layer: _layer(load, padding, micro_batches) for layer, load in window.items()}
    rows = [one["rows"] for one in layers.values()]
    tokens = sum(one["tokens"] for one in layers.values())
    known = None if None in rows else sum(rows)
    return {
        "tokens": tokens,
        "rows": known,
        "utilisation": tokens / known if known else None,
        "rows_why": _why(padding),
        "dormant_share": sum(one["dormant_share"] for one in layers.values()) / len(layers),
        "dropped_share": sum(load.dropped for load in window.values()) / sum(load.asked for load in window.values()),
        "layers": layers,
    }


def _layer(load: Load, padding: Padding, micro_batches: int) -> dict[str, Any]:
    tokens, experts = sum(load.tokens), len(load.tokens)
    rows: int | None = tokens
    if padding.capacity_factor is not None:
        capacity = math.ceil(load.asked / micro_batches / experts * padding.capacity_factor)
        rows = capacity * experts * micro_batches
    elif padding.quantized:
        rows = None
    return {"tokens": tokens, "rows": rows, "dormant_share": load.tokens.count(0) / experts}


def _why(padding: Padding) -> str:
    if padding.capacity_factor is not None:
        return f"every expert is padded to a capacity of {padding.capacity_factor:g} times its even share"
    if padding.quantized:
        return "padded for quantised kernels in every micro-batch, and only sums over micro-batches are counted"
    return "rows are not padded"
