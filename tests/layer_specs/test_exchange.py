"""Collectives in flight in an E layer: what is done before their end in both passes, and that it is what it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_mcore.model import preset
from tests import stock

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.fixture
def events(process: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which collectives began and ended; the group has one rank."""
    seen: list[str] = []

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            seen.append("end")
            self.work.wait()

    for name, collective in [(name, getattr(distributed, name)) for name in (GATHER, SCATTER)]:

        def begin(*args: Any, name: str = name, collective: Any = collective, **kwargs: Any) -> Work:
            seen.append(name)
            assert kwargs["async_op"]
            return Work(collective(*args, **kwargs))

        monkeypatch.setattr(distributed, name, begin)
    return seen


@pytest.mark.parametrize(
    ("ranks", "forward", "backward"),
    [
        (
            1,
            [GATHER, "router", "end", "experts", SCATTER, "shared_experts", "end"],
            [GATHER, "shared_experts", "end", "experts", SCATTER, "router", "end"],
        ),
        (
            2,
            [GATHER, "end", "router", "experts", SCATTER, "shared_experts", "end"],
            [GATHER, "shared_experts", "end", "experts", "router", SCATTER, "end"],
        ),
    ],
    ids=["alone", "beside tensor parallelism"],
)
def test_an_e_layer_routes_and_shares_in_flight(
    events: list[str], process: Path, ranks: int, forward: list[str], backward: list[str]
) -> None:
    overrides = {"pattern": "AE", "depth": 2, "dsa": {"schedule": "-"}, "mtp": {"depth": 0}, "seq_length": 32}
    layer = stock.build(overrides, preset("nam56r_tiny"), process).train().decoder.layers[1].mlp
    hidden = torch.randn(32, 2, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, _ = layer(hidden)
    (gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
    events.clear()
    layer.gathers_tokens = True
    layer.attn_tp_group = SimpleNamespace(size=lambda: ranks)
    layer.config.sequence_parallel = True
    for name in ("router", "experts", "shared_experts"):
        module = getattr(layer, name)
        module.register_forward_hook(lambda *_, name=name: events.append(name))
        module.register_full_backward_pre_hook(lambda *_, name=name: events.append(name))
    output, _ = layer(hidden)
    assert events == forward
    events.clear()
    (hidden_grad,) = torch.autograd.grad(output.square().sum(), hidden)
    assert events == backward
    assert torch.equal(output, expected)
    torch.testing.assert_close(hidden_grad, gradient)
