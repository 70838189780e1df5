"""What `bench run` measures with, on a GPU."""

from __future__ import annotations

import torch

from megacpp_mcore.bench.measure import Captured


def test_a_captured_call_is_computed_anew_from_its_inputs_at_every_replay() -> None:
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    calls = []

    def squares(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(1)
        y = x @ x
        return [y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]

    replayed = Captured(squares)
    replayed(x)
    made = len(calls)
    with torch.no_grad():
        x.mul_(2)
    for found, expected in zip(replayed(x), squares(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(calls) == made + 1
