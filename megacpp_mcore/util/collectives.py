"""Exchange of values between the processes of a run, and what they print."""

from __future__ import annotations

import os
from typing import Any

from megacpp_mcore.util import console


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; 0 and 1 while torch.distributed is not initialized."""
    from torch import distributed  # late: the command line runs without torch

    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def gathered(value: Any) -> list[Any]:
    """Gather the ``value`` of every rank, in their order; every rank has to call this."""
    from torch import distributed

    values = [value] * rank_and_size()[1]
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


def say(message: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        console.say(f"megacpp-mcore: {message}")
