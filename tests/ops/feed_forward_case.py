"""Cases of the dense feed-forward layer: random numbers, results and gradients of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.ops.outcomes import added, leaves, main_grads, with_gradients


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
    own = leaves({name: inputs[name] for name in ("x", "w1", "w2")}, dtype)
    buffers = main_grads({name: own[name] for name in ("w1", "w2")}, main_grad) if main_grad else {}
    y = op(*own.values(), *([tuple(buffers.values())] if buffers else []))
    return added(with_gradients({"y": y}, own, [inputs["dy"]]), buffers)
