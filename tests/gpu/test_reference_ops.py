"""What only the reference ops do on a GPU; their values are compared with the kernels' in those tests, in float64."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.indexer.reference import causal_topk, indexer_scores, select
from megacpp_mcore.ops.main_grad import MainGrad, linear
from megacpp_mcore.ops.testing import assert_parity


def test_selection_is_that_of_a_cpu_and_ties_go_to_the_lower_index() -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = (301, 2, 4, 24), (301, 2, 24), (301, 2, 4)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    index = causal_topk(indexer_scores(*inputs), 32)
    assert torch.equal(select(*(tensor.cuda() for tensor in inputs), 32).cpu(), index)
    score = torch.zeros(1, 64, 64, device="cuda")
    score[..., ::2] = -0.0
    expected = torch.arange(8, device="cuda", dtype=torch.int32).expand(56, 8)
    assert torch.equal(causal_topk(score, 8)[0, 8:], expected)


def test_a_linear_layers_gradient_is_added_in_float32() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    x, weight, grad = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((301, 2, 256), (520, 256), (301, 2, 520))
    )
    buffer = torch.randn(520, 256, generator=generator, device="cuda")
    expected = buffer.double() + torch.einsum("sbn,sbd->nd", grad.double(), x.double()).detach()
    output = linear(x, weight, MainGrad(buffer, lambda: None))
    assert torch.equal(output, torch.nn.functional.linear(x, weight))
    output.backward(grad.detach())
    assert weight.grad is None
    assert_parity(buffer, expected, rms=1e-5, name="main_grad")
    assert_parity(x.grad, grad.detach().double() @ weight.detach().double(), rms=5e-3, name="dx")
