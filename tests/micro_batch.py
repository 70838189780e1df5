"""A micro-batch of bytes for a small model: its tokens, its document boundaries, losses and gradients.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def draw_tokens(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Bytes ``[B, S + 1]``: inputs and, one to the right, labels."""
    return torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def causal_mask(length: int) -> torch.Tensor:
    """Megatron's ``[1, 1, S, S]``: what a query does not see."""
    return ~torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def packed(lengths: Sequence[int], **fields: Any) -> Any:
    """Stock's description of a row that holds documents of these lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    common = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    return PackedSeqParams(**{**common, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths), **fields})


def losses_of(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss of each token ``[B, S]``; each row is one document unless ``options`` divide it."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    inputs = {
        "position_ids": torch.arange(length).expand(batch, length), "attention_mask": None, "labels": tokens[:, 1:],
        "loss_mask": torch.ones(batch, length), **options,
    }  # fmt: skip
    return model(tokens[:, :-1], **inputs)


def backward(loss: torch.Tensor) -> None:
    """As stock's schedules do it: inside of ``Tensor.backward`` the CPU lane's mode is off, and recompute asks for the GPU."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    custom_backward(loss, None)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """A copy of each parameter's gradient, where it has one."""
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def outcome(model: Any, tokens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses of a micro-batch (:func:`losses_of`), and the gradients of only their mean."""
    model.zero_grad()
    losses_BS = losses_of(model, tokens, **options)
    backward(losses_BS.mean())
    return losses_BS.detach(), gradients(model)
