"""Sparse MLA against a loop, against dense attention, and against MLA with its up-projections written out, in fp64.

Shape legend: S queries, T keys, B batch, H heads, K width of an absorbed query or key, V width of the latent value,
C width of the latent (C = V), R width of the rope part (K = C + R), P width of a head's
query without rope, N selected keys.
"""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer.reference import causal_topk
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.sparse_mla import reference
from megacpp_mcore.ops.sparse_mla.reference import dense_attention_target
from megacpp_mcore.ops.testing import assert_parity
from tests.ops.saved_tensors import saved_bytes

SCALE = 0.3


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw(S, T, B=2, H=3, K=6, dtype=torch.float64, seed=0):
    g = generator(seed)
    return [
        torch.randn(s, dtype=torch.float64, generator=g).to(dtype).requires_grad_() for s in ((S, B, H, K), (T, B, K))
    ]


def draw_index(B, S, N, seed=7):
    score = torch.randn(B, S, S, dtype=torch.float64, generator=generator(seed))
    return causal_topk(score, N)


def attend(q, kv, index, **options):
    return reference.attend(q, kv, index, softmax_scale=SCALE, value_dim=4, **options)


def probabilities(q, kv, index, **options):
    """Σ over heads of the attention probabilities, as the backward pass leaves them in a sink."""
    sink = TargetSum()
    output = attend(q, kv, index, sink=sink, **options)
    torch.autograd.grad(output, [t for t in (q, kv) if t.requires_grad], torch.ones_like(output), retain_graph=True)
    return sink.take()


def loop_truth(q, kv, index, value_dim=4):
    """One softmax per head and query over its valid keys and nothing else."""
    S, B, H, _ = q.shape
    o = torch.zeros(S, B, H, value_dim, dtype=q.dtype)
    p = torch.zeros(index.shape, dtype=q.dtype)
    for b in range(B):
        for i in range(S):
            columns = (index[b, i] >= 0).nonzero().flatten()
            if not len(columns):
                continue
            keys = kv[index[b, i, columns], b]
            weight_HN = (q[i, b] @ keys.T * SCALE).softmax(-1)
            o[i, b] = weight_HN @ keys[:, :value_dim]
            p[b, i, columns] = weight_HN.detach().sum(0)
    return o, p


def gradients(output, inputs, cotangent_dtype=torch.float64):
    cotangent = torch.randn(output.shape, dtype=torch.float64, generator=generator(1)).to(cotangent_dtype)
    return torch.autograd.grad(output, inputs, cotangent.to(output.dtype), retain_graph=True)


def assert_same_attention(actual, expected, inputs, rms=1e-11):
    assert_parity(actual, expected, rms=rms, name="o")
    for name, have, want in zip(("q", "kv"), gradients(actual, inputs), gradients(expected, inputs), strict=True):
        # A query with one key has a constant softmax: its dq is 0 up to rounding, where a ratio says nothing.
        alive = want.abs().amax(dim=-1) > 1e-12
        assert alive.any() or name == "q"
        if not alive.any():
            assert have.abs().max() < 1e-12
            continue
        assert_parity(have[alive], want[alive], rms=rms, name=f"d{name}")
        assert have[~alive].abs().sum() < 1e-12


@pytest.mark.parametrize(("S", "N"), [(1, 1), (1, 5), (9, 1), (9, 4), (23, 40)])
@pytest.mark.parametrize("query_chunk", [None, 1, 4])
def test_matches_loop(S, N, query_chunk):
    inputs = draw(S, S)
    index = draw_index(2, S, N)
    actual, p = attend(*inputs, index, query_chunk=query_chunk), probabilities(*inputs, index, query_chunk=query_chunk)
    expected, want_p = loop_truth(*inputs, index)
    assert actual.is_contiguous()
    assert_parity(p, want_p, rms=1e-12, name="p")
    assert_same_attention(actual, expected, inputs)


def test_padding_in_any_column_and_blind_rows():
    q, kv = inputs = draw(9, 9)
    index = draw_index(2, 9, 4)
    index = index[..., torch.tensor([2, 0, 3, 1])]  # -1 no longer comes last
    index[1, 6] = -1
    actual, p = attend(q, kv, index, query_chunk=4), probabilities(q, kv, index, query_chunk=4)
    expected, want_p = loop_truth(q, kv, index)
    assert_same_attention(actual, expected, inputs)
    assert_parity(p, want_p, rms=1e-12, name="p")
    assert torch.equal(p[index < 0], torch.zeros_like(p[index < 0]))
    assert torch.equal(actual[6, 1], torch.zeros_like(actual[6, 1]))
    dq, dkv = gradients(actual, inputs)
    assert torch.equal(dq[6, 1], torch.zeros_like(dq[6, 1]))
    assert dkv.isfinite().all()


def test_absorption_equals_attention_with_explicit_up_projections():
    """The algebra of MLA from outside: one side never forms a per-head key, the other never forms an absorbed query."""
    S, B, H, C, R, P, V = 13, 2, 3, 5, 2, 4, 6
    g = generator(2)
    shapes = [(S, B, H, P), (S, B, H, R), (S, B, C), (S, B, R), (H, P, C), (H, V, C)]
    leaves = [torch.randn(s, dtype=torch.float64, generator=g).requires_grad_() for s in shapes]
    q_nope, q_rope, latent, k_rope, up_k, up_v = leaves

    k = torch.cat([torch.einsum("tbc,hpc->tbhp", latent, up_k), k_rope[:, :, None].expand(-1, -1, H, -1)], dim=-1)
    v = torch.einsum("tbc,hvc->tbhv", latent, up_v)
    explicit = mla_attention(torch.cat([q_nope, q_rope], dim=-1), k, v, softmax_scale=SCALE)

    absorbed_q = torch.cat([torch.einsum("sbhp,hpc->sbhc", q_nope, up_k), q_rope], dim=-1)
    kv = torch.cat([latent, k_rope], dim=-1)
    index = draw_index(B, S, S)
    latent_o = reference.attend(absorbed_q, kv, index, softmax_scale=SCALE, value_dim=C, query_chunk=5)
    absorbed = torch.einsum("sbhc,hvc->sbhv", latent_o, up_v)

    assert_parity(absorbed, explicit, rms=1e-12, name="o")
    names = ("q_nope", "q_rope", "latent", "k_rope", "up_k", "up_v")
    for name, have, want in zip(names, gradients(absorbed, leaves), gradients(explicit, leaves), strict=True):
        # Query 0 sees one key: its gradient is 0 up to rounding.
        rows = slice(1, None) if name.startswith("q_") else slice(None)
        assert_parity(have[rows], want[rows], rms=1e-11, name=f"d{name}")


# fp32: the worst of thousands of rows averages values that cancel; attention written in one line has 2.4e-6 there.
@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 4e-6), (torch.bfloat16, 5e-3)])
def test_odd_length_in_low_precision(dtype, rms):
    low = draw(2345, 2345, B=1, H=2, K=16, dtype=dtype)
    high = [t.detach().double().requires_grad_() for t in low]
    index = draw_index(1, 2345, 17)
    sinks = (TargetSum(), TargetSum())
    actual, expected = (
        reference.attend(*inputs, index, softmax_scale=SCALE, value_dim=12, sink=sink)
        for inputs, sink in zip((low, high), sinks, strict=True)
    )
    assert actual.dtype == dtype
    assert_parity(actual, expected, rms=rms, name="o")
    dq, dkv = gradients(actual, low, dtype)
    want_dq, want_dkv = gradients(expected, high, dtype)
    p, want_p = (sink.take() for sink in sinks)
    assert p.dtype == torch.float32
    assert_parity(p, want_p, rms=1e-6, name="p")
    assert dq.dtype == dkv.dtype == dtype
    assert_parity(dq[1:], want_dq[1:], rms=rms, name="dq")
    assert_parity(dkv, want_dkv, rms=rms, name="dkv")


def test_the_forward_pass_computes_no_target():
    q, kv = draw(9, 9)
    sink = TargetSum()
    output = attend(q, kv, draw_index(2, 9, 4), sink=sink)
    with pytest.raises(ModelError, match="0 layers have left their attention"):
        sink.take()
    output.sum().backward()
    assert sink.take().shape == (2, 9, 4)
    with pytest.raises(ModelError, match="0 layers"):  # the sum was the caller's
        sink.take()


@pytest.mark.parametrize("query_chunk", [None, 1, 4])
def test_dense_target_matches_loop(query_chunk):
    q, kv = draw(9, 9)
    masked = torch.rand(2, 1, 9, 9, generator=generator(3)) < 0.4
    masked[1, 0, 5] = True
    for mask in (None, masked):
        visible = torch.ones(2, 9, 9, dtype=torch.bool).tril()
        if mask is not None:
            visible = visible & ~mask[:, 0]
        target = dense_attention_target(q, kv, softmax_scale=SCALE, attention_mask=mask, query_chunk=query_chunk)
        assert not target.requires_grad
        every_key = torch.arange(9, dtype=torch.int32).expand(2, 9, 9).masked_fill(~visible, -1)
        assert_parity(target, loop_truth(q, kv, every_key)[1], rms=1e-12, name="target")
        assert torch.equal(target[~visible], torch.zeros_like(target[~visible]))


def test_neither_scores_nor_gathered_keys_are_kept():
    S, B, H, K, N = 32, 2, 12, 6, 24
    q, kv = inputs = draw(S, S, B=B, H=H, K=K)
    index = draw_index(B, S, N)
    kept = saved_bytes(lambda: reference.attend(*inputs, index, softmax_scale=SCALE, value_dim=4, query_chunk=8))
    assert kept == q.nbytes + kv.nbytes + index.nbytes, "the inputs are needed, and nothing else is to be kept"
    gathered = kv.detach()[index.clamp_min(0).long(), torch.arange(B)[:, None, None]].requires_grad_()
    naive = saved_bytes(lambda: torch.einsum("sbhk,bsnk->bshn", q, gathered).softmax(-1))
    assert naive >= B * S * N * H * q.itemsize > kept


def bad_calls():
    q, kv = (t.detach() for t in draw(4, 4))
    index = draw_index(2, 4, 2)
    return {
        "key with heads": ((q, kv[:, :, None], index), {}, "head dimension"),
        "width": ((q, kv[..., :3], index), {}, "same B and K"),
        "integers": ((q, kv.long(), index), {}, "floating-point"),
        "int64 index": ((q, kv, index.long()), {}, "int32"),
        "index of another length": ((q, kv, index[:, :3]), {}, "B, S = 2, 4"),
        "value_dim 0": ((q, kv, index), {"value_dim": 0}, r"1\.\.6"),
        "value_dim 7": ((q, kv, index), {"value_dim": 7}, r"1\.\.6"),
        "chunk": ((q, kv, index), {"query_chunk": 0}, "positive"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_refuses(case):
    arguments, options, message = bad_calls()[case]
    with pytest.raises(ModelError, match=message):
        reference.attend(*arguments, softmax_scale=SCALE, **({"value_dim": 4} | options))


def test_dense_target_refuses():
    q, kv = (t.detach() for t in draw(4, 4))
    with pytest.raises(ModelError, match="3 queries and 4 keys"):
        dense_attention_target(q[:3], kv, softmax_scale=SCALE)
    with pytest.raises(ModelError, match=r"torch\.bool"):
        dense_attention_target(q, kv, softmax_scale=SCALE, attention_mask=torch.zeros(2, 1, 4, 4))
    with pytest.raises(ModelError, match="same B and K"):
        dense_attention_target(q, kv[..., :3], softmax_scale=SCALE)
