"""Buffers into which weight gradients are accumulated instead of being returned: Megatron's ``main_grad``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.te import quantized


@dataclass(frozen=True)
class MainGrad:
    """A buffer into which a weight's gradient is accumulated instead of being returned.

    Attributes:
        buffer: contiguous, in the shape of the weight.
        placeholder: called after the accumulation; returns what autograd gets as the weight's gradient.
    """

    buffer: torch.Tensor
    placeholder: Callable[[], torch.Tensor | None]


def check_main_grad(weight: torch.Tensor, main_grad: MainGrad | None) -> None:
    """Raise ModelError unless the buffer, if any, fits the weight."""
    if main_grad is not None and (main_grad.buffer.shape != weight.shape or not main_grad.buffer.is_contiguous()):
        raise ModelError(
            f"main_grad has a buffer of shape {tuple(main_grad.buffer.shape)} and strides {main_grad.buffer.stride()}, "
            f"expected a contiguous one of shape {tuple(weight.shape)}, as the weight has"
        )


def linear(x: torch.Tensor, weight_ND: torch.Tensor, main_grad: MainGrad | None) -> torch.Tensor:
    """``x [..., D] @ weight.T -> [..., N]``; the weight's gradient is accumulated into the buffer, if any.

    Raises:
        ModelError: the buffer does not fit the weight, or a tensor is quantised.
    """
    quantized.refuse(x=x, weight=weight_ND)
    check_main_grad(weight_ND, main_grad)
    if main_grad is None:
        return torch.nn.functional.linear(x, weight_ND)
    output: torch.Tensor = _Linear.apply(x, weight_ND, main_grad)
    return output


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, is_first: bool = False) -> None:
    """``total += left @ right``, or ``=`` where ``is_first``; the total may have a wider dtype than its operands."""
    beta = 0.0 if is_first else 1.0
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)  # no rounding in between
    elif is_first:
        total.copy_(torch.mm(left, right))
    else:
        total += torch.mm(left, right)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_ND: torch.Tensor, main_grad: MainGrad) -> torch.Tensor:
        ctx.save_for_backward(x, weight_ND)
        ctx.main_grad = main_grad
        return torch.nn.functional.linear(x, weight_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight_ND = ctx.saved_tensors
        dx = grad @ weight_ND if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        add_product_(ctx.main_grad.buffer, grad.flatten(0, -2).t(), x.flatten(0, -2))
        return dx, ctx.main_grad.placeholder(), None


def added_to(weight: torch.Tensor, main_grad: MainGrad | None) -> torch.Tensor:
    """Return the weight; its gradient, once autograd has computed it, is added to the buffer, if any.

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
