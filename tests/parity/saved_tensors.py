"""What a computation keeps for its backward pass, seen through autograd's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def saved_bytes(compute: Callable[[], Any]) -> int:
    """Run ``compute`` and return the size of everything that autograd saved meanwhile, inputs included.

    Memory that several saved tensors share (views of one input, say) counts once.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # kept here, so that no later tensor can be given the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(storages.values())
