"""The input projection of Mamba-3 as one product in the dtype of its operands, by PyTorch."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.main_grad import MainGrad, linear


def project(x: torch.Tensor, weight_ND: torch.Tensor, main_grad: MainGrad | None, rows: int) -> tuple[torch.Tensor, ...]:
    """Compute ``x [..., D] @ weight.T``, split by consecutive rows of the weight: here one tensor, ``[..., N]``.

    Args:
        x: the input.
        weight_ND: weight of all parts; the first ``rows`` may be multiplied in lower precision.
        main_grad: buffer that the weight's gradient is accumulated into; None: it is returned.
        rows: weight rows of z, x, B and C.

    Raises:
        ModelError: the buffer does not fit the weight, or a tensor is quantised.
    """
    del rows
    return (linear(x, weight_ND, main_grad),)
