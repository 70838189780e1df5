"""What a computation keeps for its backward pass, seen through autograd's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def saved_tensors(compute: Callable[[], Any]) -> list[torch.Tensor]:
    """Run ``compute`` and return every tensor that autograd saved meanwhile, inputs included."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # kept here, so that no later tensor can be given the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return saved


def saved_bytes(compute: Callable[[], Any]) -> int:
    """The size of what autograd saves while ``compute`` runs; memory that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved_tensors(compute)}
    return sum(storages.values())
