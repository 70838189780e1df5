"""The kernels of RMSNorm on a GPU: parity with fp64 both ways, equal bits again; a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops.rms_norm import triton
from tests.gpu.device import assert_replays
from tests.ops.rms_norm_case import CASES, Case, compared

WIDE = (Case((2345, 1, 3584)), Case((4096, 2, 3584), gradients=(True, False)), Case((3, 1, triton.LARGEST)))


@pytest.mark.parametrize(("dtype", "rms"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-6)])
@pytest.mark.parametrize("case", [*CASES, *WIDE])
def test_parity_with_fp64(case: Case, dtype: torch.dtype, rms: float) -> None:
    compared(triton.rms_norm, case, dtype, rms, "cuda")


def test_equal_bits_again_and_a_graph_replays() -> None:
    def made(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        y, residual = triton.rms_norm(x, weight, 1e-5)
        grads = torch.autograd.grad((y, residual), (x, weight), (x.detach().sin(), x.detach().cos()))
        return [y.detach(), *grads]

    first, second = (
        [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((1000, 2, 3584), (3584,))]
        for _ in range(2)
    )
    assert all(map(torch.equal, made(*second), made(*second)))
    assert_replays(lambda: made(*first), first, second)


def test_offsets_beyond_31_bits() -> None:
    x = torch.empty(2**31 // 3584 + 200, 3584, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.randn(3584, device="cuda").bfloat16()
    assert x.numel() > 2**31
    made, _ = triton.rms_norm(x, weight, 1e-5)
    last, _ = triton.rms_norm(x[-3:].clone(), weight, 1e-5)
    assert torch.equal(made[-3:], last)
