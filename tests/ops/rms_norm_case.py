"""What the kernels of RMSNorm are compared with, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megacpp_mcore.ops.rms_norm.reference import rms_norm
from megacpp_mcore.ops.testing import assert_parity


class Case(NamedTuple):
    """The shape of the rows, which gradients are given, whether rows lie apart in memory, or are of one sample, transposed."""

    shape: tuple[int, ...]
    gradients: tuple[bool, bool] = (True, True)
    strided: bool = False
    transposed: bool = False


CASES = (
    Case((37, 2, 40)),
    Case((3, 1, 200), strided=True),
    Case((37, 1, 40), transposed=True),
    Case((1, 64)),
    Case((5, 33), gradients=(True, False)),
    Case((5, 33), gradients=(False, True)),
    Case((0, 2, 16)),
)


def compared(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], case: Case, dtype: torch.dtype, rms: float, device: str
) -> None:
    """Fail unless outputs and gradients are float64's, and the residual is the rows themselves."""
    generator = torch.Generator(device).manual_seed(5)
    made = torch.randn(*case.shape, 2, device=device, generator=generator)
    x = made[..., 0]
    weight_D = 1 + 0.3 * torch.randn(case.shape[-1], device=device, generator=generator)
    cotangents = torch.randn(2, *case.shape, device=device, generator=generator)
    inputs = [tensor.to(dtype) for tensor in (x, weight_D, *cotangents)]
    if not case.strided:
        inputs[0] = inputs[0].contiguous()
    if case.transposed:
        inputs[0] = inputs[0].transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        assert inputs[0].is_contiguous()
        assert inputs[0].stride() != torch.empty(case.shape).stride()

    def outcome(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> list[torch.Tensor]:
        rows, weight, *incoming = (tensor.detach().to(dtype) for tensor in inputs)
        pair = function(rows.requires_grad_(), weight.requires_grad_(), 1e-3)
        used = [(output, by) for output, by, is_given in zip(pair, incoming, case.gradients, strict=True) if is_given]
        outputs, by = zip(*used, strict=True)
        grads = torch.autograd.grad(outputs, (rows, weight), by, allow_unused=True, materialize_grads=True)
        assert torch.equal(pair[1], rows)
        # What strides say of the axis of a lone sample decides by which product PyTorch multiplies.
        assert dtype == torch.float64 or all(
            tensor.stride() == torch.empty(case.shape).stride() for tensor in (pair[0], grads[0])
        )
        return [pair[0].detach(), *grads]

    for name, actual, truth in zip(
        ("y", "dx", "dweight"), outcome(function, dtype), outcome(rms_norm, torch.float64), strict=True
    ):
        assert (actual.dtype, actual.shape) == (dtype, truth.shape)
        if truth.numel():
            assert_parity(actual, truth, rms=rms, name=f"{name} of {case}")
