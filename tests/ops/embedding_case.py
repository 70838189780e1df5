"""What the embedding's gradient by rows is compared with, on a CPU and on a GPU."""

from __future__ import annotations

from functools import partial

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import embedding
from megacpp_mcore.ops.main_grad import MainGrad
from tests.errors import raises


def compared(device: str, *, B: int, S: int, V: int, D: int, dtype: torch.dtype, total: torch.dtype, transposed: bool) -> None:
    """Fail unless rows are the table's, their gradients are added to what the buffer holds, and bits are equal again."""
    draw = torch.Generator(device).manual_seed(3)
    weight = torch.randn(V, D, device=device, generator=draw).to(dtype).requires_grad_()
    token = torch.randint(0, V, (B, S), device=device, generator=draw)
    token[:, ::2] = 1  # an entry of many tokens: its sum takes several tiles
    shape = (S, B, D) if transposed else (B, S, D)
    gradient = torch.randn(shape, device=device, generator=draw).to(dtype)
    gradient = gradient.transpose(0, 1) if transposed else gradient
    held = torch.randn(V, D, device=device, generator=draw).to(total)
    buffers = []
    for _ in range(2):
        buffer, requests = held.clone(), []
        main_grad = MainGrad(buffer, partial(requests.append, None))
        rows = embedding.embedding(token, weight, main_grad)
        assert torch.equal(rows, weight[token])
        rows.backward(gradient)
        assert (weight.grad, requests) == (None, [None])
        buffers.append(buffer)
    truth = held.double().index_put((token,), gradient.double(), accumulate=True)
    tolerance = 2e-6 if total == torch.float32 else 1e-2
    torch.testing.assert_close(buffers[0].double(), truth, rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(buffers[0], buffers[1])
    with raises(ModelError, "24", "16"):
        embedding.embedding(token, weight[:, :24], MainGrad(held[:, :24].contiguous(), lambda: None))
    absent = torch.ones(V, dtype=torch.bool, device=device).index_fill(0, token.flatten(), False)
    assert absent.any()
    assert torch.equal(buffers[0][absent], held[absent])
