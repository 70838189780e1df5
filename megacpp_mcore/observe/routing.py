"""Counts where the routers send their tokens: sums on the device, read from time to time.

Each rank counts the tokens that its own routers saw. With sequence, data, context or expert parallelism no token passes the
routers of two ranks, so the sum over ranks (:func:`merged`) is the run's. A layer that is recomputed in the backward pass is
counted once: its first pass builds no graph. No torch at import.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megacpp_mcore.observe.events import Hooked, Step


@dataclass(frozen=True)
class Load:
    """The load of one layer's experts: assignments that each received, and those that routers requested, top-k a token."""

    tokens: tuple[int, ...]
    asked: int

    @property
    def dropped(self) -> int:
        """Assignments dropped because of capacity."""
        return self.asked - sum(self.tokens)

    @property
    def entropy(self) -> float:
        """Entropy of the load relative to an even one: 1 is even, 0 is one expert for all."""
        total = sum(self.tokens)
        shares = [count / total for count in self.tokens if count]
        return sum(share * math.log(1 / share) for share in shares) / (math.log(len(self.tokens)) or 1.0)

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's tokens over the mean: 1 is even."""
        return max(self.tokens) * len(self.tokens) / (sum(self.tokens) or 1)

    def plus(self, other: Load | None, sign: int = 1) -> Load:
        """Return the sum of both, or with a ``sign`` of -1 the difference; None: nothing."""
        if other is None:
            return self
        tokens = tuple(a + sign * b for a, b in zip(self.tokens, other.tokens, strict=True))
        return Load(tokens, self.asked + sign * other.asked)

    def record(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        derived = {name: getattr(self, name) for name in ("asked", "dropped", "entropy", "max_over_mean")}
        return {"tokens_per_expert": list(self.tokens), **derived}


def merged(records: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Load]:
    """Return the loads by layer over all ranks, from the ``layers`` of their :meth:`Routing.record`."""
    loads: dict[str, Load] = {}
    for layers in records:
        for layer, counts in layers.items():
            load = Load(tuple(counts["tokens_per_expert"]), counts["asked"])
            loads[layer] = load.plus(loads.get(layer))
    return loads


class _Router:
    """The running sums of one router, in buffers of its module.

    Buffers, because Megatron restores them after the passes that warm up and capture a CUDA graph
    (megatron-core 0.19, ``core/transformer/cuda_graphs.py``), whose replays then add to them.
    """

    def __init__(self, layer: str, module: Any) -> None:
        import torch

        self.layer = layer
        experts, device = module.config.num_moe_experts, next(module.parameters()).device
        for name, size in (("counted_tokens_E", experts), ("asked_assignments", 1)):
            module.register_buffer(name, torch.zeros(size, dtype=torch.int64, device=device), persistent=False)
        self.tokens_E, self.asked = module.counted_tokens_E, module.asked_assignments

    def count(self, module: Any, _: Any, output: tuple[Any, Any]) -> None:
        """Forward hook: add the assignments of one micro-batch; a slot that pads an expert to its capacity has no weight."""
        import torch
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        # Transformer Engine does not restore buffers after a pass that warms up its graph.
        warms_up = module.config.cuda_graph_impl == "transformer_engine" and is_graph_capturing() and not is_capturing()
        if not (module.training and torch.is_grad_enabled()) or warms_up:
            return
        probs_TE, map_TE = output
        padded = module.config.moe_pad_expert_input_to_capacity
        kept_TE = map_TE.bool() & (probs_TE.detach() != 0) if padded else map_TE
        self.tokens_E += kept_TE.sum(dim=0, dtype=torch.int64)
        self.asked += map_TE.shape[0] * module.topk


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured in a graph."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Routing(Hooked):
    """Counts the tokens of every expert by layer.

    Counts stay on the device; every ``interval`` steps, and when training ends, one transfer reads them.
    """

    def __init__(self, interval: int = 10) -> None:
        super().__init__(interval)
        self.latest: dict[str, float] = {}
        """Over the steps between the last two readings, on this rank: ``routing_entropy`` (mean of the layers),
        ``routing_max_over_mean`` (worst layer), ``dropped_share``; unknown ones are left out."""
        self._routers: list[_Router] = []
        self._read: dict[str, Load] = {}

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Attach hooks to the routers."""
        from megatron.core.transformer.moe.router import TopKRouter

        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter):
                    number = module.layer_number if module.layer_number is not None else name
                    layer = f"mtp {number}" if getattr(module, "is_mtp_layer", False) else str(number)
                    router = _Router(layer, module)
                    self._routers.append(router)
                    self.hooks.callback(module.register_forward_hook(self.guard(router.count)).remove)

    def on_step(self, step: Step) -> None:
        """Read the sums if due; raise the error of a hook, which could not be raised in the forward pass."""
        self.raise_first()
        if step.step % self.interval == 0:
            self.read()

    def on_end(self, error: BaseException | None) -> None:
        """Read the remaining counts, unless an error left the device in an unknown state, and remove the hooks."""
        super().on_end(error)
        if error is None:
            self.read()
        else:
            self.latest = {}

    def read(self) -> None:
        """Copy the sums to the host; the only point where this waits for the device."""
        import torch

        sums = [torch.cat([router.tokens_E, router.asked]) for router in self._routers]
        lists = torch.stack(sums).tolist() if sums else []
        now: dict[str, Load] = {}
        for router, (*tokens, requested) in zip(self._routers, lists, strict=True):
            if not requested:
                continue  # it did not run
            load = Load(tuple(tokens), requested)
            now[router.layer] = load.plus(now.get(router.layer))
        window = [load.plus(self._read.get(layer), -1) for layer, load in now.items()]
        self._read = now
        if requested := sum(load.asked for load in window):
            self.latest = {
                "dropped_share": sum(load.dropped for load in window) / requested,
                "routing_entropy": fmean(load.entropy for load in window),
                "routing_max_over_mean": max(load.max_over_mean for load in window),
            }

    def record(self) -> dict[str, Any]:
        """Return this rank's counts as of the last reading; none once a hook failed, as they would be incomplete."""
        if self.failed is not None:
            return {"layers": {}, "failed": f"counting failed on a rank: {self.failed}"}
        return {"layers": {layer: load.record() for layer, load in self._read.items()}, "failed": None}
