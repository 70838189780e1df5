"""Sums that have the same bits every time: in one order, or in integers, whose order is of no matter."""

from __future__ import annotations

import torch

_BITS = 61
"""Sums stay below 2^61: two bits of an int64 are left for the rounding of their parts, and for the sign."""


def integer_unit(bound: torch.Tensor) -> torch.Tensor:
    """The power of two, float32, by which parts are multiplied before they are rounded; NaN or 0 where ``bound`` is not finite.

    Args:
        bound: what the absolute values of all parts of one sum add up to at most, a scalar tensor.
    """
    return torch.exp2(_BITS - bound.double().clamp_min(2.0**-_BITS).log2().ceil()).float()


def add_rows(total_TK: torch.Tensor, index_N: torch.Tensor, rows_NK: torch.Tensor) -> None:
    """Add row ``n`` to row ``index_N[n]`` of ``total_TK``, in one order whatever the device and its threads.

    On a GPU ``index_add_`` has none. On a CPU ``index_put_`` has one for a single thread alone, and is slower.
    """
    if total_TK.is_cuda:
        total_TK.index_put_((index_N,), rows_NK, accumulate=True)
    else:
        total_TK.scatter_add_(0, index_N[:, None].expand_as(rows_NK), rows_NK)
