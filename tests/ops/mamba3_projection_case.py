"""Cases of Mamba-3's input projection: random numbers, results and gradients of an implementation, and their comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import assert_parity

RESULTS = ("wide", "narrow", "dx", "dweight")


@dataclass(frozen=True)
class Case:
    """Sizes: T tokens, D model width, rows in FP8, and the narrow rest."""

    T: int = 37
    D: int = 48
    rows: int = 80
    narrow: int = 24
    dtype: torch.dtype = torch.float32


def draw(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal numbers; columns of gradients differ in size, as parts of the projection do."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    sizes_W = torch.logspace(-2, 2, case.rows, device=device)
    drawn = {
        "x": normal(case.T, 1, case.D),
        "weight": normal(case.rows + case.narrow, case.D) * case.D**-0.5,
        "dwide": normal(case.T, 1, case.rows) * sizes_W,
        "dnarrow": normal(case.T, 1, case.narrow),
    }
    return {name: tensor.to(case.dtype) for name, tensor in drawn.items()}


def exact(x: torch.Tensor, weight: torch.Tensor, main_grad: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, split."""
    del main_grad
    y = x @ weight.T
    return y[..., :rows], y[..., rows:]


def outcome(
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    case: Case,
    inputs: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    main_grad: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Both outputs and both gradients; with ``main_grad`` what was added to a buffer of ones of that dtype."""
    given = {name: tensor.to(dtype or tensor.dtype) for name, tensor in inputs.items()}
    x, weight = (given[name].clone().requires_grad_() for name in ("x", "weight"))
    buffer = None if main_grad is None else torch.ones_like(weight, dtype=main_grad)
    into = None if buffer is None else MainGrad(buffer, partial(torch.full_like, weight, 7.0))
    outputs = op(x, weight, into, case.rows)
    dx, dweight = torch.autograd.grad(outputs, [x, weight], [given["dwide"], given["dnarrow"]])
    if buffer is not None:
        assert bool((dweight == 7).all())
        dweight = buffer - 1
    return dict(zip(RESULTS, (*(output.detach() for output in outputs), dx, dweight), strict=True))


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], rms: float) -> None:
    """Fail where a row of a result is off by more than ``rms`` of its norm."""
    for name, expected in truth.items():
        assert_parity(found[name].double(), expected, rms=rms, name=name)
