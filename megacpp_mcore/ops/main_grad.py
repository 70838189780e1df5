"""Buffers that the gradients of weights are added to, in place of being returned: Megatron's ``main_grad``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError


@dataclass(frozen=True)
class MainGrad:
    """A buffer that the gradient of a weight is added to, in place of being returned.

    Attributes:
        buffer: contiguous, in the shape of the weight.
        placeholder: called once it was added to; what it returns is given to autograd as the weight's gradient.
    """

    buffer: torch.Tensor
    placeholder: Callable[[], torch.Tensor | None]


def check_main_grad(weight: torch.Tensor, main_grad: MainGrad | None) -> None:
    """Raise ModelError unless the buffer, if there is one, fits the weight."""
    if main_grad is not None and (main_grad.buffer.shape != weight.shape or not main_grad.buffer.is_contiguous()):
        raise ModelError(
            f"main_grad has a buffer of shape {tuple(main_grad.buffer.shape)} and strides {main_grad.buffer.stride()}, "
            f"expected a contiguous one of shape {tuple(weight.shape)}, as the weight has"
        )


def added_to(weight: torch.Tensor, main_grad: MainGrad | None) -> torch.Tensor:
    """The weight, the gradient of which is added to the buffer, if there is one, once autograd has it.

    Raises:
        ModelError: the buffer does not fit the weight.
    """
    check_main_grad(weight, main_grad)
    same: torch.Tensor = weight if main_grad is None else _AddedTo.apply(weight, main_grad)
    return same


class _AddedTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        ctx.main_grad.buffer.add_(gradient)
        return ctx.main_grad.placeholder(), None
