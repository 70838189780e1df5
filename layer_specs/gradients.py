"""Gradient accumulation fusion of our own layers: the buffer that a weight's gradient is added to, and the hooks' flag."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.ops.main_grad import MainGrad


def main_grad_of(weight: Any, config: TransformerConfig) -> MainGrad | None:
    """Where stock's fused accumulation would put the gradient of a weight that data-parallel hooks reduce, or None."""
    if not config.gradient_accumulation_fusion or not hasattr(weight, "main_grad"):
        return None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP adds it by itself
        return None
    return MainGrad(weight.main_grad, partial(_added, weight))


def _added(weight: Any) -> torch.Tensor | None:
    """Tell the hooks that the gradient is in ``main_grad``; they want a gradient to run, and read nothing of it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
