"""Bitwise reproducible sums: in a fixed order, or in integers, where the order does not matter."""

from __future__ import annotations

import torch

_BITS = 61
"""Sums stay below 2^61: two bits of an int64 are left for the rounding of the terms, and for the sign."""


def integer_unit(bound: torch.Tensor) -> torch.Tensor:
    """Return the power of two, float32, to multiply terms by before rounding; NaN or 0 where ``bound`` is not finite.

    Args:
        bound: upper bound on the sum of the terms' absolute values, a scalar tensor.
    """
    return torch.exp2(_BITS - bound.double().clamp_min(2.0**-_BITS).log2().ceil()).float()


def add_rows(total_TK: torch.Tensor, index_N: torch.Tensor, rows_NK: torch.Tensor) -> None:
    """Add row ``n`` to row ``index_N[n]`` of ``total_TK``, in a fixed order, regardless of the device and its threads.

    ``index_add_`` has no fixed order on a GPU. On a CPU ``index_put_`` has one only for a single thread, and is slower.
    """
    if total_TK.is_cuda:
        total_TK.index_put_((index_N,), rows_NK, accumulate=True)
    else:
        total_TK.scatter_add_(0, index_N[:, None].expand_as(rows_NK), rows_NK)
