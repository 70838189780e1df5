"""Sums in integers, which have the same bits in whatever order their parts come: how many integers make 1."""

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
