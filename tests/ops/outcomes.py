"""What the cases of ops share: inputs as leaves, outputs and gradients by name, gradients that are added to a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import assert_parity

Tensors = dict[str, torch.Tensor]


def leaves(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Tensors:
    """The tensors, cast if there is a ``dtype``, as leaves."""
    return {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}


def with_gradients(outputs: Mapping[str, torch.Tensor], own: Tensors, given: Sequence[torch.Tensor]) -> Tensors:
    """The outputs, and each leaf's gradient under ``d`` and its name; ``given``: gradients of the outputs, in any dtype."""
    cotangents = [cotangent.to(output.dtype) for cotangent, output in zip(given, outputs.values(), strict=True)]
    gradients = torch.autograd.grad(list(outputs.values()), list(own.values()), cotangents)
    detached = {name: output.detach() for name, output in outputs.items()}
    return detached | {f"d{name}": gradient for name, gradient in zip(own, gradients, strict=True)}


def main_grads(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, MainGrad]:
    """Buffers of ones, and sevens for autograd instead of gradients."""
    return {
        name: MainGrad(torch.ones_like(weight, dtype=dtype), partial(torch.full_like, weight, 7.0))
        for name, weight in weights.items()
    }


def added(found: Tensors, buffers: Mapping[str, MainGrad]) -> Tensors:
    """``found``, where gradients of weights are what the buffers of :func:`main_grads` got; autograd got the sevens."""
    assert all(bool((found[f"d{name}"] == 7).all()) for name in buffers)
    return found | {f"d{name}": main_grad.buffer - 1 for name, main_grad in buffers.items()}


def assert_same(found: Tensors, truth: Tensors, rms: float) -> None:
    """Fail where a row of a result is off by more than ``rms`` of its norm."""
    for name, expected in truth.items():
        assert_parity(found[name].double(), expected, rms=rms, name=name)
