"""What the modules of an A layer share: widths, rotations, and weights that an op multiplies without a call of their module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megacpp_mcore.backends import Resolution
from megacpp_mcore.ops.mla_projection.reference import rotation_table
from megacpp_mcore.ops.packed.documents import shared


def mla_widths(config: MLATransformerConfig) -> dict[str, Any]:
    """What the ops between projections and core attention have to cover."""
    return {
        "content_dim": config.qk_head_dim,
        "latent_dim": config.kv_lora_rank,
        "rope_dim": config.qk_pos_emb_head_dim,
        "v_dim": config.v_head_dim,
    }


def rotation(rotary: torch.nn.Module, rows: int) -> torch.Tensor:
    """The rotations ``[rows, R]`` of a sequence's first rows, made once of each table of stock's module."""
    found = rotary(rows)
    angle_S11R, scale = (found, 1.0) if isinstance(found, torch.Tensor) else found

    def make() -> torch.Tensor:
        with torch.inference_mode(False):  # a run that decodes first may train later
            return rotation_table(angle_S11R[:, 0, 0], scale)

    return shared(angle_S11R, ("rotation", scale), make)


def takes_weights(config: MLATransformerConfig) -> bool:
    """Whether an op may take the weights of projections and norms, in place of a call of the modules.

    In FP8, or with gradients of weights that come later, Transformer Engine's modules do more than a product; the weights of
    norms can be kept less one.
    """
    other = config.fp8 or config.fp4 or config.delay_wgrad_compute or config.layernorm_zero_centered_gamma
    return config.normalization == "RMSNorm" and not other


def replaces_modules(backend: Resolution, *modules: torch.nn.Module) -> bool:
    """Whether ``backend`` computes what ``modules`` would, with their weights, which are here then.

    On the reference the modules are called themselves, and where a file of ``--te-precision-config-file`` names one of them.
    """
    if backend.observed == "reference":
        return False
    if any(getattr(module, "te_quant_params", None) is not None for module in modules):
        return False
    for module in modules:
        wait_for_parameters(module)
    return True


_DDP = "megatron.core.distributed.distributed_data_parallel"


def wait_for_parameters(module: torch.nn.Module) -> None:
    """Wait for the parameter gather (``--overlap-param-gather``) of a module whose weight is read without a forward call.

    Megatron-Core 0.19 waits in a hook before a module's forward. Without it a weight that lies in another bucket than its
    neighbours is that of the step before, and the next step's gather meets one that nobody has waited for.
    """
    for hook in list(module._forward_pre_hooks.values()):
        if hook.__module__ == _DDP:
            hook(module)
