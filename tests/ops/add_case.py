"""What sums of three tensors are compared with, on a CPU and on a GPU."""

from __future__ import annotations

import torch

from megacpp_mcore.ops import add


def compared(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Fail unless sums, and gradients of three readers, have the bits of PyTorch's own additions, however many are given."""
    draw = torch.Generator(device).manual_seed(1)

    def random() -> torch.Tensor:
        return torch.randn(shape, device=device, generator=draw).to(dtype)

    a, b, c = (random().requires_grad_() for _ in range(3))
    total, gradient = add.add3(a, b.transpose(0, 1).contiguous().transpose(0, 1), c), random()
    assert torch.equal(total, (a + b) + c)
    assert all(torch.equal(reader_grad, gradient) for reader_grad in torch.autograd.grad(total, (a, b, c), gradient))
    for count in (3, 2, 1):
        incoming = [random() for _ in range(count)]
        readers = add.fork3(a)
        assert all(torch.equal(reader, a) for reader in readers)
        (grad,) = torch.autograd.grad(readers[:count], a, incoming)
        truth = incoming[-1]
        for cotangent in reversed(incoming[:-1]):
            truth = truth + cotangent
        assert torch.equal(grad, truth)
