"""Linear cross-entropy on a GPU: parity with fp64, the peak memory promised, no wait for the device, CUDA graphs.

Shape legend: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacpp_mcore.ops.linear_cross_entropy.chunked import MainGrad, linear_cross_entropy
from megacpp_mcore.ops.testing import assert_parity
from tests.gpu.device import peak, replayed, without_waiting

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(N: int, H: int, V: int, dtype: torch.dtype) -> Inputs:
    """Hidden, weight, labels, and a weight for each token; logits have a standard deviation of about 1."""
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    label = torch.randint(V, (N,), generator=generator, device="cuda")
    hidden, weight = normal(N, H).to(dtype), (normal(V, H) * H**-0.5).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), label, normal(N)


def eager(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    logit = torch.mm(hidden, weight.t())
    logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logit, label, reduction="none")


def ours(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, label).loss


def outcome(op: Callable[..., torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    hidden, weight, label, cotangent = inputs
    loss = op(hidden, weight, label)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), cotangent.to(loss.dtype))]


def in_float64(inputs: Inputs) -> Inputs:
    hidden, weight, label, cotangent = inputs
    return (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        label,
        cotangent.double(),
    )


def assert_same(found: list[torch.Tensor], truth: list[torch.Tensor], peer: list[torch.Tensor], rms: float) -> None:
    # Where a few numbers are rounded in float32 the peer may be right by chance; in 16 bits, with many, that says something.
    factor = 2.0 if found[1].dtype != torch.float32 and len(found[0]) > 1 else None
    for name, have, want, other in zip(("loss", "hidden", "weight"), found, truth, peer, strict=True):
        rows = (tensor if tensor.dim() > 1 else tensor[:, None] for tensor in (have, want, other))
        have, want, other = rows
        assert_parity(have, want, rms=rms, dtype_peer=other, max_abs_factor=factor, name=name)


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)])
@pytest.mark.parametrize(("N", "H", "V"), [(2345, 320, 9001), (1, 64, 5000), (4096, 512, 16384)])
def test_parity(N: int, H: int, V: int, dtype: torch.dtype, rms: float) -> None:
    inputs = draw(N, H, V, dtype)
    assert_same(outcome(ours, inputs), outcome(eager, in_float64(inputs)), outcome(eager, inputs), rms)


def test_at_the_size_of_the_model() -> None:
    """8192 × 3584 × 65536 in bfloat16: a fifth of stock's peak, the gradients counted in, and less with a main_grad."""
    stock = 8192 * 65536 * (2 + 4)  # logits in bfloat16 and their copy in float32, which stock holds at once
    inputs = draw(8192, 3584, 65536, torch.bfloat16)
    hidden, weight, label, cotangent = inputs
    buffer = torch.zeros(weight.shape, device="cuda")

    def accumulate() -> None:
        loss = linear_cross_entropy(hidden, weight, label, main_grad=MainGrad(buffer, lambda: None)).loss
        torch.autograd.grad(loss, (hidden, weight), cotangent, allow_unused=True)

    outcome(ours, draw(64, 64, 64, torch.bfloat16))  # the libraries' workspaces
    of_eager, of_ours = peak(lambda: outcome(eager, inputs)), peak(lambda: outcome(ours, inputs))
    accumulated = peak(accumulate)
    assert of_eager > stock
    assert of_ours <= stock / 5
    assert accumulated <= stock / 15
    found, peer, truth = outcome(ours, inputs), outcome(eager, inputs), outcome(eager, in_float64(inputs))
    assert_same(found, truth, peer, 5e-3)
    assert_parity(buffer, truth[2], rms=5e-3, dtype_peer=peer[2], name="main_grad")


def test_nothing_waits_for_the_device() -> None:
    inputs = draw(512, 128, 3000, torch.bfloat16)
    outcome(ours, inputs)
    with without_waiting():
        outcome(ours, inputs)


def test_cuda_graph() -> None:
    inputs = draw(512, 128, 3000, torch.bfloat16)
    others = [tensor.detach().flip(0) for tensor in draw(512, 128, 3000, torch.bfloat16)]
    captured = replayed(lambda: outcome(ours, inputs), inputs, others)
    for have, want in zip(captured, outcome(ours, inputs), strict=True):
        assert_parity(have, want, rms=5e-3)
