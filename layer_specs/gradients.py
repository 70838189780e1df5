"""Gradients of our own layers: added to ``main_grad`` with fused accumulation, summed over ranks that share a parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.patches.linear_cross_entropy import placeholder


def main_grad_of(weight: Any, config: TransformerConfig) -> MainGrad | None:
    """Return the buffer to which stock's fused accumulation would add the gradient of ``weight``; None without fusion."""
    if not config.gradient_accumulation_fusion or not hasattr(weight, "main_grad"):
        return None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP accumulates gradients itself
        return None
    return MainGrad(weight.main_grad, partial(placeholder, weight))


def mark_replicated(parameter: torch.Tensor, config: TransformerConfig) -> None:
    """Make Megatron sum a parameter's gradients over tensor parallelism once a step, as it does for norms."""
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def replicated(parameter: torch.Tensor, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Return ``parameter``, with each rank's gradient, of its own heads or rows, summed in every pass unless marked."""
    return parameter if config.sequence_parallel else copy_to_tensor_model_parallel_region(parameter, group=group)
