"""Gradient accumulation fusion for our own layers: adds weight gradients to ``main_grad`` and informs the DDP hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.patches.linear_cross_entropy import placeholder


def main_grad_of(weight: Any, config: TransformerConfig) -> MainGrad | None:
    """Compute the buffer that stock's fused accumulation would add the gradient of ``weight`` to; None without fusion."""
    if not config.gradient_accumulation_fusion or not hasattr(weight, "main_grad"):
        return None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP accumulates gradients itself
        return None
    return MainGrad(weight.main_grad, partial(placeholder, weight))
