"""Gradient accumulation fusion for our own layers: adds weight gradients to ``main_grad`` and informs the DDP hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.ops.main_grad import MainGrad


def main_grad_of(weight: Any, config: TransformerConfig) -> MainGrad | None:
    """The buffer that stock's fused accumulation would add the gradient of ``weight`` to; None without fusion."""
    if not config.gradient_accumulation_fusion or not hasattr(weight, "main_grad"):
        return None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP accumulates gradients itself
        return None
    return MainGrad(weight.main_grad, partial(_added, weight))


def _added(weight: Any) -> torch.Tensor | None:
    """Flag that the gradient is in ``main_grad``; return a placeholder, since the hooks fire only for a gradient."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if not (layers.HAVE_TE and weight.is_cuda):
        return torch.empty_like(weight)
    # One buffer for all weights of a shape; Transformer Engine 2.17 has matrices alone.
    placeholder: torch.Tensor = layers.get_dummy_wgrad([weight[..., 0].numel(), weight.shape[-1]], weight.dtype)
    return placeholder.view_as(weight)
