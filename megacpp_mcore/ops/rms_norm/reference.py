"""Plain-PyTorch truth of an RMSNorm at the head of a residual branch.

Shape legend: D hidden. Source: RMSNorm, arXiv 1910.07467, equation 4.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, expect_shape


def check(x: torch.Tensor, weight_D: torch.Tensor) -> None:
    """Raise ModelError unless the arguments of :func:`rms_norm` fit each other."""
    if not x.dim():
        raise ModelError("x has no axis, expected [..., D]")
    expect_shape("rms_norm", "weight", weight_D, "D", (x.shape[-1],))


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x / sqrt(mean(x²) + eps) · weight, x)``, both ``[..., D]`` in the dtype of ``x``.

    Using the returned ``x`` as the residual, instead of ``x`` itself, lets one kernel add both gradients of ``x``.

    Raises:
        ModelError: a shape or dtype is not as described.
    """
    check(x, weight_D)
    dtype = compute_dtype(x, weight_D)
    normed = torch.nn.functional.rms_norm(x.to(dtype), weight_D.shape, weight_D.to(dtype), eps)
    return normed.to(x.dtype), x
