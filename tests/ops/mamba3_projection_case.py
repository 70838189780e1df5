"""Cases of Mamba-3's input projection: random numbers, results and gradients of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.outcomes import added, leaves, main_grads, with_gradients


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
    own = leaves({name: inputs[name] for name in ("x", "weight")}, dtype)
    buffers = main_grads({"weight": own["weight"]}, main_grad) if main_grad else {}
    wide, narrow = op(*own.values(), buffers.get("weight"), case.rows)
    return added(with_gradients({"wide": wide, "narrow": narrow}, own, [inputs["dwide"], inputs["dnarrow"]]), buffers)
