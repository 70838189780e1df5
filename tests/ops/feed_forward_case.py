"""Cases of the dense feed-forward layer: random numbers, results and gradients of an implementation, and their comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import assert_parity

RESULTS = ("y", "dx", "dw1", "dw2")


@dataclass(frozen=True)
class Case:
    """Sizes: T tokens, D model width, F inner width."""

    T: int = 37
    D: int = 48
    F: int = 80
    dtype: torch.dtype = torch.float32


def draw(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal numbers; rows of a gradient differ in size, as those of tokens do, and one is zero."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    sizes_T = torch.logspace(2, -2, case.T, device=device)[:, None, None]
    sizes_T[case.T // 2] *= case.T == 1
    drawn = {
        "x": normal(case.T, 1, case.D),
        "w1": normal(case.F, case.D) * 2 * case.D**-0.5,
        "w2": normal(case.D, case.F) * case.F**-0.5,
        "dy": normal(case.T, 1, case.D) * sizes_T,
    }
    return {name: tensor.to(case.dtype) for name, tensor in drawn.items()}


def outcome(
    op: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    main_grad: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The output and all gradients; with ``main_grad`` what was added to buffers of ones of that dtype."""
    given = {name: tensor.to(dtype or tensor.dtype) for name, tensor in inputs.items()}
    x, w1, w2 = (given[name].clone().requires_grad_() for name in ("x", "w1", "w2"))
    buffers = [torch.ones_like(weight, dtype=main_grad or torch.float32) for weight in (w1, w2)]
    into = [
        MainGrad(buffer, partial(torch.full_like, weight, 7.0))
        for buffer, weight in zip(buffers, (w1, w2), strict=True)
    ]
    y = op(x, w1, w2, *([tuple(into)] if main_grad else []))
    dx, *dweights = torch.autograd.grad(y, [x, w1, w2], given["dy"])
    if main_grad:
        assert all(bool((dweight == 7).all()) for dweight in dweights)
        dweights = [buffer - 1 for buffer in buffers]
    return dict(zip(RESULTS, (y.detach(), dx, *dweights), strict=True))


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], rms: float) -> None:
    """Fail where a row of a result is off by more than ``rms`` of its norm."""
    for name, expected in truth.items():
        assert_parity(found[name].double(), expected, rms=rms, name=name)
