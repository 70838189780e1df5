"""What `bench run` measures with, on a GPU."""

from __future__ import annotations

import torch

from megacpp_mcore.bench.catalog import OURS
from megacpp_mcore.bench.problem import BOTH, Captured, Inputs, Variant


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
    for actual, expected in zip(replayed(x), squares(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(calls) == made + 1


def test_what_another_variant_keeps_of_its_forward_pass_does_not_end_a_capture() -> None:
    x = torch.randn(64, device="cuda", requires_grad=True)
    inputs = Inputs(leaves={"x": x}, cotangents={"y": torch.ones(64, device="cuda")})
    kept = x.square()  # as stock's token dispatcher keeps its probabilities
    variant = Variant.of("square", OURS, lambda given: given.leaves["x"].square())
    y, dx = variant.captured().runs[BOTH](inputs)
    torch.testing.assert_close(y, kept)
    torch.testing.assert_close(dx, 2 * x)
