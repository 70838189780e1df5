"""Tokens of experts: what is counted, read and merged."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import router as stock

from megacpp_mcore.observe import routing
from megacpp_mcore.observe.routing import Load
from tests.observe.recorded import a_step


def test_an_even_load_and_a_collapsed_one() -> None:
    even = Load((5, 5, 5, 5), 20)
    assert (even.entropy, even.max_over_mean, even.dropped) == (pytest.approx(1), 1, 0)
    collapsed = Load((0, 6, 0), 8)
    assert (collapsed.entropy, collapsed.max_over_mean, collapsed.dropped) == (0, 3, 2)
    assert Load((3, 1), 4).entropy == pytest.approx(-(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)))
    assert (Load((0, 0), 4).entropy, Load((0, 0), 4).max_over_mean) == (0, 0)


class Router(torch.nn.Module):
    """Stands for Megatron's."""

    layer_number = 2
    topk = 2

    def __init__(self, experts: int = 3, padded: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=experts, moe_pad_expert_input_to_capacity=padded, cuda_graph_impl="none")
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, probs: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return probs, chosen


def count(module: Router, router: routing._Router, probs_TE: list[list[float]], training: bool = True) -> None:
    probs = torch.tensor(probs_TE)
    chosen = torch.ones_like(probs, dtype=torch.bool) if module.config.moe_pad_expert_input_to_capacity else probs > 0
    router.count(module.train(training), (), (probs, chosen))


def test_a_pass_that_builds_no_graph_and_one_of_evaluation_are_not_counted() -> None:
    router = routing._Router("2", module := Router())
    with torch.no_grad():
        count(module, router, [[0.5, 0.5, 0.0]])
    count(module, router, [[0.5, 0.5, 0.0]], training=False)
    assert (router.tokens_E.tolist(), router.asked.item()) == ([0, 0, 0], 0)
    count(module, router, [[0.5, 0.5, 0.0], [0.1, 0.0, 0.9]])
    count(module, router, [[0.0, 0.5, 0.5]])
    assert (router.tokens_E.tolist(), router.asked.item()) == ([2, 2, 2], 6)


def test_what_warms_up_a_graph_of_transformer_engine_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "is_graph_capturing", lambda: True)
    router = routing._Router("2", module := Router())
    for implementation in ("local", "transformer_engine"):
        module.config.cuda_graph_impl = implementation
        count(module, router, [[0.5, 0.5, 0.0]])
    assert router.asked.item() == 2  # Megatron puts buffers back after its own


def test_slots_that_pad_an_expert_are_no_tokens() -> None:
    router = routing._Router("2", module := Router(padded=True))
    count(module, router, [[0.5, 0.0, 0.0], [0.0, 0.25, 0.0]])
    assert (router.tokens_E.tolist(), router.asked.item()) == ([1, 1, 0], 4)


def test_sums_are_buffers_that_no_checkpoint_has() -> None:
    """Megatron puts buffers back after the passes that warm up and capture a CUDA graph, whose replays add to them."""
    router = routing._Router("2", module := Router())
    count(module, router, [[0.5, 0.5, 0.0]])
    assert {id(buffer) for buffer in module.buffers()} == {id(router.tokens_E), id(router.asked)}
    assert set(module.state_dict()) == {"weight"}


def test_a_hook_that_fails_ends_no_step_and_what_was_counted_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial count would look complete. The error is raised at the step's end, and keeps no tensor on the device."""
    monkeypatch.setattr(stock, "TopKRouter", Router)
    listener, module = routing.Routing(interval=1), Router()
    listener.on_model([torch.nn.ModuleList([module])], None)
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    module(probs, probs > 0)
    listener.on_step(a_step(1))
    assert listener.latest
    assert listener.record()["layers"]
    damaged = probs[:, :2] > 0
    module(probs, damaged)
    module(probs, probs > 0)  # nothing is counted after the error
    reference = weakref.ref(damaged)
    with pytest.raises(RuntimeError, match="must match") as caught:
        listener.on_step(a_step(2))
    listener.on_end(caught.value)  # of the listener, not of the run
    record = listener.record()
    assert (listener.latest, record["layers"]) == ({}, {})
    assert record["failed"].startswith("counting failed on a rank: RuntimeError: ")
    assert not module._forward_hooks
    del damaged, caught
    gc.collect()
    assert reference() is None


def test_what_is_read_last_is_of_the_steps_since() -> None:
    listener = routing.Routing()
    router = routing._Router("2", module := Router(experts=4))
    listener._routers.append(router)
    count(module, router, [[0.5, 0.5, 0.0, 0.0]] * 4)
    listener.read()
    first = dict(listener.latest)
    count(module, router, [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    listener.read()
    assert first == {"dropped_share": 0, "routing_entropy": pytest.approx(0.5), "routing_max_over_mean": 2}
    assert listener.latest == {"dropped_share": 0, "routing_entropy": pytest.approx(1), "routing_max_over_mean": 1}
    assert listener.record()["layers"]["2"]["tokens_per_expert"] == [5, 5, 1, 1]
