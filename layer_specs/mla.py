"""Shared by the modules of an A layer: widths, RoPE tables, and weights that ops read without calling their module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megacpp_mcore.backends import Resolution
from megacpp_mcore.ops.mla_projection.reference import rotation_table
from megacpp_mcore.ops.packed.documents import shared


def mla_widths(config: MLATransformerConfig) -> dict[str, Any]:
    """Return the widths that the ops between projections and core attention have to support."""
    return {
        "content_dim": config.qk_head_dim,
        "latent_dim": config.kv_lora_rank,
        "rope_dim": config.qk_pos_emb_head_dim,
        "v_dim": config.v_head_dim,
    }


def rotation(rotary: torch.nn.Module, rows: int, *, whole: bool = False) -> torch.Tensor:
    """Return the RoPE table of a sequence's first ``rows``, computed once per table of the stock module.

    Under context parallelism ``[rows / ranks, R]`` for this rank's rows, unless ``whole``.
    """
    table = rotary(rows, packed_seq=True) if whole else rotary(rows)
    angle_S11R, scale = (table, 1.0) if isinstance(table, torch.Tensor) else table

    def make() -> torch.Tensor:
        with torch.inference_mode(False):  # a run that decodes first may train later
            return rotation_table(angle_S11R[:, 0, 0], scale)

    return shared(angle_S11R, ("rotation", scale), make)


def replaces_modules(backend: Resolution | None, *modules: torch.nn.Module) -> bool:
    """Return whether ``backend`` runs instead of ``modules``, on their weights; if so, wait until these are gathered.

    Without a backend, or with the reference, the modules are called.
    """
    if backend is None or backend.observed == "reference":
        return False
    for module in modules:
        wait_for_parameters(module)
    return True


_DDP = "megatron.core.distributed.distributed_data_parallel"


def wait_for_parameters(module: torch.nn.Module) -> None:
    """Wait for the parameter gather (``--overlap-param-gather``) of a module whose weight is read without a forward call.

    Megatron-Core 0.19 waits in a forward pre-hook. Without it, a weight in a different bucket from its neighbours may still be
    the previous step's, and the next step would start a gather while this one is still pending.
    """
    for hook in list(module._forward_pre_hooks.values()):
        if hook.__module__ == _DDP:
            hook(module)
