"""Gradients of our own layers: added to ``main_grad`` where accumulation is fused, summed over ranks that share a parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
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


def mark_replicated(parameter: torch.Tensor, config: TransformerConfig) -> None:
    """Have Megatron sum a parameter's gradients over tensor parallelism once a step, where it does so for norms."""
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def replicated(
    parameter: torch.Tensor, config: TransformerConfig, group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """Return ``parameter``; each rank's gradient of it is of its own heads or rows: marked, or summed in every pass."""
    return parameter if config.sequence_parallel else copy_to_tensor_model_parallel_region(parameter, group=group)
