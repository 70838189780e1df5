"""A dense feed-forward layer with GELU in the dtype of its operands, by PyTorch."""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.main_grad import MainGrad, linear

MainGrads = tuple[MainGrad | None, MainGrad | None]
"""Buffers that the gradients of both weights are accumulated into; None: returned."""


def check(x: torch.Tensor, w1_FD: torch.Tensor, w2_DF: torch.Tensor) -> None:
    """Raise ModelError unless the widths of x and both weights fit each other."""
    if w1_FD.dim() != 2 or w2_DF.shape != w1_FD.shape[::-1] or x.shape[-1:] != w1_FD.shape[1:]:
        raise ModelError(
            f"x, w1 and w2 are {tuple(x.shape)}, {tuple(w1_FD.shape)}, {tuple(w2_DF.shape)}; expected [..., D], [F, D], [D, F]"
        )


def feed_forward(
    x: torch.Tensor, w1_FD: torch.Tensor, w2_DF: torch.Tensor, main_grads: MainGrads = (None, None)
) -> torch.Tensor:
    """``gelu(x [..., D] @ w1.T) @ w2.T -> [..., D]``, with the GELU of the error function.

    Raises:
        ModelError: shapes do not fit each other, a buffer does not fit its weight, or a tensor is quantised.
    """
    check(x, w1_FD, w2_DF)
    return linear(torch.nn.functional.gelu(linear(x, w1_FD, main_grads[0])), w2_DF, main_grads[1])
