"""Sparse MLA against a loop, against dense attention, and against MLA with its up-projections written out, in fp64.

Shape legend: S queries, T keys, B batch, H heads, K width of an absorbed query or key, V width of the latent value,
C width of the latent (C = V), R width of the rope part (K = C + R), P width of a head's
query without rope, N selected keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.sparse_mla.reference import attend
from tests.errors import raises
from tests.ops.saved_tensors import saved_bytes
from tests.ops.sparse_mla_case import Case, assert_same, draw, outcome

SMALL: dict[str, Any] = {"S": 9, "H": 3, "K": 6, "V": 4, "dtype": torch.float64}
CASES = {
    "one token": Case(**SMALL | {"S": 1}, N=5),
    "one key": Case(**SMALL, N=1),
    "four keys": Case(**SMALL, N=4),
    "every key": Case(**SMALL | {"S": 23}, N=40),
    "padding in any column, blind rows, two layers": Case(**SMALL, N=4, ragged=True, layers=2),
}


def one_by_one(q, kv, index, *, softmax_scale, value_dim, sink):
    """One softmax per head and query over its valid keys and nothing else."""
    o, p = q.new_zeros(*q.shape[:3], value_dim), sink.accumulator(index, q.dtype)
    for b, i in (index >= 0).any(-1).nonzero().tolist():
        columns = (index[b, i] >= 0).nonzero().flatten()
        keys = kv[index[b, i, columns], b]
        weight_HN = (q[i, b] @ keys.T * softmax_scale).softmax(-1)
        o[i, b] = weight_HN @ keys[:, :value_dim]
        p[b, i, columns] += weight_HN.detach().sum(0)
    return o


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("query_chunk", [None, 1, 4])
def test_matches_loop(case: Case, query_chunk: int | None) -> None:
    inputs = draw(case)
    truth, outputs = outcome(one_by_one, case, inputs), outcome(partial(attend, query_chunk=query_chunk), case, inputs)
    assert outputs["o0"].is_contiguous()
    assert_same(case, inputs, outputs, truth, truth, 1e-11)
    blind_SB = (inputs["index"] < 0).all(-1).T
    assert not any(outputs[name][blind_SB].count_nonzero() for name in ("o0", "dq0"))
    assert not outputs["p"][inputs["index"] < 0].count_nonzero()


# fp32: the worst of thousands of rows averages values that cancel; attention written in one line has 2.4e-6 there.
@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 4e-6), (torch.bfloat16, 5e-3)])
def test_odd_length_in_low_precision(dtype: torch.dtype, rms: float) -> None:
    case = Case(S=777, B=1, H=2, K=16, V=12, N=17, dtype=dtype)
    inputs = draw(case)
    outputs, truth = outcome(attend, case, inputs), outcome(attend, case, inputs, torch.float64)
    assert {name: tensor.dtype for name, tensor in outputs.items()} == {
        name: torch.float32 if name == "p" else dtype for name in truth
    }
    assert_same(case, inputs, outputs, truth, {name: tensor.float() for name, tensor in outputs.items()}, rms)


def test_the_forward_pass_computes_no_target() -> None:
    inputs, sink = draw(CASES["four keys"]), TargetSum()
    output = attend(inputs["q"][0].requires_grad_(), inputs["kv"], inputs["index"], softmax_scale=1.0, value_dim=4, sink=sink)
    with raises(ModelError, "0 layers", 1, code="incomplete-sum"):
        sink.take()
    output.sum().backward()
    assert sink.take().shape == (2, 9, 4)
    with raises(ModelError, "0 layers", code="incomplete-sum"):  # the sum was the caller's
        sink.take()


def test_neither_scores_nor_gathered_keys_are_kept() -> None:
    case = Case(**SMALL | {"S": 32, "H": 12}, N=24)
    inputs = draw(case)
    q, kv, index = inputs["q"][0].requires_grad_(), inputs["kv"].requires_grad_(), inputs["index"]
    kept = saved_bytes(lambda: attend(q, kv, index, softmax_scale=0.3, value_dim=4, query_chunk=8))
    assert kept == q.nbytes + kv.nbytes + index.nbytes, "the inputs are needed, and nothing else is to be kept"
    gathered = kv.detach()[index.clamp_min(0).long(), torch.arange(2)[:, None, None]].requires_grad_()
    naive = saved_bytes(lambda: torch.einsum("sbhk,bsnk->bshn", q, gathered).softmax(-1))
    assert naive >= index.numel() * case.H * q.itemsize > kept


Q, KV, INDEX = torch.zeros(4, 2, 3, 6), torch.zeros(4, 2, 6), torch.zeros(2, 4, 2, dtype=torch.int32)
BAD: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, int], str]] = {
    "key with heads": ((Q, KV[:, :, None], INDEX), {}, "head dimension"),
    "width": ((Q, KV[..., :3], INDEX), {}, "same B and K"),
    "integers": ((Q, KV.long(), INDEX), {}, "floating-point"),
    "int64 index": ((Q, KV, INDEX.long()), {}, "int32"),
    "index of another length": ((Q, KV, INDEX[:, :3]), {}, "B, S = 2, 4"),
    "value_dim 0": ((Q, KV, INDEX), {"value_dim": 0}, r"1\.\.6"),
    "value_dim 7": ((Q, KV, INDEX), {"value_dim": 7}, r"1\.\.6"),
    "chunk": ((Q, KV, INDEX), {"query_chunk": 0}, "positive"),
}


@pytest.mark.parametrize(("arguments", "options", "message"), BAD.values(), ids=BAD.keys())
def test_refuses(arguments: tuple[torch.Tensor, ...], options: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        attend(*arguments, softmax_scale=1.0, **{"value_dim": 4} | options)


def test_the_kernels_refuse() -> None:
    attend = pytest.importorskip("megacpp_mcore.ops.sparse_mla.triton").attend
    q, kv, index = torch.zeros(4, 1, 2, 128), torch.zeros(4, 1, 128), torch.zeros(1, 4, 1, dtype=torch.int32)
    how = {"softmax_scale": 1.0, "value_dim": 64}
    with raises(ModelError, "torch.float32 and torch.float32", "torch.bfloat16"):
        attend(q, kv, index, **how)
    with pytest.raises(ModelError, match=r"torch\.bfloat16 and torch\.float16"):
        attend(q.bfloat16(), kv.half(), index, **how)
    with raises(ModelError, (128, 32), ((128, 64), (576, 512))):
        attend(q.half(), kv.half(), index, **how | {"value_dim": 32})
    with pytest.raises(ModelError, match=r"softmax_scale is -1\.0"):
        attend(q.half(), kv.half(), index, **how | {"softmax_scale": -1.0})
    with pytest.raises(ModelError, match="same B and K"):
        attend(q.half(), kv[..., :64].half(), index, **how)


@pytest.mark.parametrize("batch", [1, 8])
def test_gradients_are_the_same_bits_whatever_the_threads(batch: int) -> None:
    """One sequence of nam56r_tiny's: the gradient of a key is a sum over the queries that selected it."""
    case = Case(S=256, B=batch, H=4, K=48, V=32, N=32, dtype=torch.float32)
    inputs, threads = draw(case), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = outcome(attend, case, inputs)
        for several in (2, 3, 4):
            torch.set_num_threads(several)
            again = outcome(attend, case, inputs)
            assert {name: torch.equal(again[name], t) for name, t in expected.items()} == dict.fromkeys(again, True)
    finally:
        torch.set_num_threads(threads)
