"""Sum of three tensors of one shape on a GPU in one Triton kernel: two additions would write and reread the first sum."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.triton_launch import launch

LAUNCH: dict[str, int] = {"BLOCK": 2048, "num_warps": 4}
"""Elements per program, and the kernel's launch options."""


def add3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return ``(a + b) + c``, each sum rounded to their dtype as PyTorch's operator does; differentiable.

    Raises:
        ModelError: shapes or dtypes differ.
    """
    total: torch.Tensor = _Add.apply(a, b, c)
    return total


def fork3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``x`` three times, for three consumers; :func:`add3` sums their gradients, starting with the last one's."""
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Fork.apply(x)
    return three


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return _added(a, b, c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return gradient, gradient, gradient


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor | None:
        present = [grad for grad in reversed(gradients) if grad is not None]
        if len(present) == 3:
            return _added(*present)
        return sum(present[1:], present[0]) if present else None


def _added(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    if not (a.shape == b.shape == c.shape and a.dtype == b.dtype == c.dtype):
        raise ModelError(
            f"add3 got {', '.join(f'{grad.dtype} {tuple(grad.shape)}' for grad in (a, b, c))}; expected one dtype and shape"
        )
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    total, size = torch.empty_like(a), a.numel()
    if size:
        launch(add_three, (triton.cdiv(size, LAUNCH["BLOCK"]),), a, b, c, total, size, **LAUNCH)
    return total


@triton.jit
def add_three(a_ptr, b_ptr, c_ptr, total_ptr, size, BLOCK: tl.constexpr):
    """Add BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    DT: tl.constexpr = total_ptr.dtype.element_ty
    first = tl.load(a_ptr + at, mask=inside).to(tl.float32) + tl.load(b_ptr + at, mask=inside).to(tl.float32)
    total = first.to(DT).to(tl.float32) + tl.load(c_ptr + at, mask=inside).to(tl.float32)
    tl.store(total_ptr + at, total.to(DT), mask=inside)
