"""A collective in flight: what it makes, and what is done before its end, in both passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_mcore.layer_specs.exchange import Exchange


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        events.append("work")
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("work")
        return 3 * gradient, None


@pytest.mark.parametrize(("gathers", "inverse"), [(True, "reduce_scatter_tensor"), (False, "all_gather_into_tensor")])
def test_work_between_is_done_in_flight_in_both_passes(
    process: Path, monkeypatch: pytest.MonkeyPatch, gathers: bool, inverse: str
) -> None:
    events: list[str] = []

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("end")
            self.work.wait()

    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    for name, collective in [(name, getattr(distributed, name)) for name in names]:

        def begin(*args: Any, name: str = name, collective: Any = collective, **kwargs: Any) -> Work:
            events.append(name)
            assert kwargs["async_op"]
            return Work(collective(*args, **kwargs))

        monkeypatch.setattr(distributed, name, begin)
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    exchange = Exchange(2 * x, distributed.group.WORLD, gathers=gathers)
    work = _Between.apply(x, events)
    made = exchange.end()
    forward = next(name for name in names if name != inverse)
    assert events == [forward, "work", "end"]
    assert torch.equal(made, 2 * x)
    events.clear()
    (made * work).sum().backward()
    assert events == [inverse, "work", "end"]
    assert torch.equal(x.grad, 12 * x)
