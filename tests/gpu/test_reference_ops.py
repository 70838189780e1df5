"""The reference ops on a GPU agree with themselves on the CPU in float64: forward and every gradient.

Plain PyTorch in float32 on the CPU says how far rounding alone takes them: a recurrence over hundreds of tokens has no
relative error of 1e-6 there, either.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp
from megacpp_mcore.ops.indexer.reference import causal_topk, indexer_grad, indexer_scores, select
from megacpp_mcore.ops.m2rnn.reference import m2rnn_chunked
from megacpp_mcore.ops.main_grad import MainGrad, linear
from megacpp_mcore.ops.mamba3.reference import mamba3
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.sparse_mla.reference import attend
from megacpp_mcore.ops.testing import assert_parity, worst_row

SEQUENCE = 301


def _inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _compare(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Run ``op`` in float64 and float32 on the CPU, and in float32 on the GPU: rounding may go other ways there, not further.

    Four times as far is allowed, since a tensor of four numbers has no typical error.
    """
    results = []
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.float32), ("cuda", torch.float32)):
        leaves = [tensor.detach().clone().to(device, dtype).requires_grad_() for tensor in inputs]
        out = op(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel(), device=device, dtype=dtype).view_as(out))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for number, (truth, peer, fast) in enumerate(zip(*results, strict=True)):
        assert fast.is_cuda
        name, rounding = f"tensor {number}", worst_row(peer, truth)
        print(f"{name}: worst row {worst_row(fast, truth):.1e} on the GPU, {rounding:.1e} on the CPU")
        assert_parity(fast, truth, rms=max(2e-6, 4 * rounding), name=name)


def _sparse(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return attend(q, kv, index.to(q.device), softmax_scale=24**-0.5, value_dim=16)


def _indexer() -> list[torch.Tensor]:
    return _inputs((SEQUENCE, 2, 4, 24), (SEQUENCE, 2, 24), (SEQUENCE, 2, 4))


def _recurrence(*tensors: torch.Tensor) -> torch.Tensor:
    q, k, v, w, f = tensors
    return m2rnn_chunked(q, k, v, w / 8, f.sigmoid())[0]


COUNTS = torch.tensor([5, 0, 40, 19])
OPS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "mla": (
        partial(mla_attention, softmax_scale=32**-0.5),
        _inputs((SEQUENCE, 2, 4, 32), (SEQUENCE, 2, 4, 32), (SEQUENCE, 2, 4, 16)),
    ),
    "sparse mla": (partial(_sparse, index=causal_topk(indexer_scores(*_indexer()), 32)), _indexer()[:2]),
    "indexer scores": (indexer_scores, _indexer()),
    "m2rnn": (
        _recurrence,
        _inputs((2, SEQUENCE, 1, 16), (2, SEQUENCE, 1, 16), (2, SEQUENCE, 4, 8), (4, 8, 8), (2, SEQUENCE, 4)),
    ),
    "experts, one without tokens": (
        lambda x, w1, w2, probs: grouped_mlp(x, COUNTS.to(x.device), w1, w2, probs),
        _inputs((64, 16), (4, 32, 16), (4, 16, 32), (64,)),
    ),
}


@pytest.mark.parametrize(("op", "inputs"), OPS.values(), ids=OPS.keys())
def test_an_op(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    _compare(op, inputs)


def test_selection() -> None:
    q, k, weights = _indexer()
    score = indexer_scores(q, k, weights)
    assert torch.equal(causal_topk(score, 32), causal_topk(score.cuda(), 32).cpu())
    inputs = [tensor.detach().cuda() for tensor in (q, k, weights)]  # float64, in which no two scores are near
    assert torch.equal(select(*inputs, 32), causal_topk(indexer_scores(*inputs), 32))


def test_indexer_gradient() -> None:
    inputs = _indexer()
    index = select(*inputs, 32)
    target = _inputs(tuple(index.shape))[0].exp()
    results = []
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.float32), ("cuda", torch.float32)):
        loss, *gradients = indexer_grad(
            *(t.to(device, dtype) for t in (*inputs,)), index.to(device), target.to(device, dtype), 1.0
        )
        results.append([loss[None], *gradients])
    for number, (truth, peer, fast) in enumerate(zip(*results, strict=True)):
        assert_parity(fast, truth, rms=max(1e-6, 4 * worst_row(peer, truth)), name=f"tensor {number}")


def test_ties_go_to_the_lower_index_on_the_gpu() -> None:
    score = torch.zeros(1, 64, 64, device="cuda")
    score[..., ::2] = -0.0
    index = causal_topk(score, 8)
    expected = torch.arange(8, device="cuda", dtype=torch.int32).expand(64, 8)
    assert torch.equal(index[0, 8:], expected[8:])


@pytest.mark.parametrize("rank", [1, 2])
def test_mamba3(rank: int) -> None:
    heads, head_dim, groups, state = 4, 8, 2, 16
    token = (SEQUENCE, 2)
    shapes = [(*token, heads, head_dim)] * 2 + [(*token, groups, rank, state)] * 2 + [(*token, heads)] * 3
    shapes += [(*token, state // 4), (heads,), *[(heads, rank, state)] * 2, *[(state,)] * 2, (heads,)]
    shapes += [(heads, rank, head_dim)] * (3 if rank > 1 else 0)

    def op(*tensors: torch.Tensor) -> torch.Tensor:
        names = ("dt_bias", "b_bias", "c_bias", "b_norm_weight", "c_norm_weight", "D", "mimo_x", "mimo_z", "mimo_o")
        named = dict(zip(names, tensors[8:], strict=False))
        return mamba3(*tensors[:8], **named, chunk_size=16, A_floor=1e-4, eps=1e-5)[0]

    _compare(op, _inputs(*shapes))


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
