"""Initial values of parameters that this package builds by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

Initializer = Callable[[torch.Tensor], Any]
"""Fills a float32 tensor in place."""


def filled(
    shape: tuple[int, ...], config: TransformerConfig, init: Initializer, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A new tensor of ``shape``, drawn in fp32 on the device Megatron initializes on, then cast (None: not cast)."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    if config.perform_initialization:
        with torch.no_grad():
            init(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def ones(tensor: torch.Tensor) -> None:
    """Fill with 1."""
    tensor.fill_(1.0)


def constant(value: float) -> Initializer:
    """An initializer that fills with ``value``."""
    return lambda tensor: tensor.fill_(value)


def inverse_softplus_of_step(tensor: torch.Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """Fill so that softplus of it is log-uniform in [low, high] (mamba-ssm 2.3.2.post1, ``dt_bias``)."""
    tensor.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
    tensor.add_(torch.log(-torch.expm1(-tensor)))
