"""Initial values of weights and of the recurrent mixers' parameters, on any torch tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Initializer = Callable[[torch.Tensor], Any]
"""Fills a float32 tensor in place."""


def by_fan_in(weight: torch.Tensor, *, gain: float = 1.0, fan_in: int | None = None) -> torch.Tensor:
    """Fill with normal values of standard deviation ``gain / √fan_in``.

    Args:
        weight: ``[rows, columns]``, filled in place.
        gain: factor.
        fan_in: number of inputs to each output; None: the columns.
    """
    return torch.nn.init.normal_(weight, std=gain / math.sqrt(fan_in or weight.shape[-1]))


def ones(tensor: torch.Tensor) -> None:
    """Fill with 1."""
    tensor.fill_(1.0)


def constant(value: float) -> Initializer:
    """Return an initializer that fills with ``value``."""
    return lambda tensor: tensor.fill_(value)


def inverse_softplus_of_step(tensor: torch.Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """Fill so that the softplus of the values is log-uniform in [low, high] (mamba-ssm 2.3.2.post1, ``dt_bias``)."""
    tensor.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
    tensor.add_(torch.log(-torch.expm1(-tensor)))


def convolution(tensor: torch.Tensor) -> None:
    """Fill the kernels of a depthwise convolution, ``[channels, taps]``, in torch.nn.Conv1d's default range."""
    bound = tensor.shape[-1] ** -0.5
    tensor.uniform_(-bound, bound)


def identities(tensor: torch.Tensor, width: int) -> None:
    """Fill a 1-D tensor with the entries of identity matrices of this width, one after the other."""
    tensor.copy_(torch.eye(width, device=tensor.device).flatten().repeat(len(tensor) // width**2))


def log_of_decay(tensor: torch.Tensor) -> None:
    """Fill with logarithms of values uniform in [1, 16], as in Mamba-2 (mamba-ssm 2.3.2.post1, ``A_init_range``)."""
    tensor.uniform_(1.0, 16.0).log_()
