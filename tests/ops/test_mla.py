"""mla_attention against a loop over queries, in fp64; masks, chunks, memory, and errors.

Shape legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.mla.sdpa import fused_backend, sdpa_attention
from megacpp_mcore.ops.testing import assert_parity
from tests.errors import raises
from tests.ops.saved_tensors import saved_bytes

SCALE = 0.3


def draw(S, T, B=2, H=3, K=6, V=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((S, B, H, K), (T, B, H, K), (T, B, H, V))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def loop_truth(q, k, v, visible_BST):
    """One softmax per query over the keys it sees and nothing else: no fill value, no chunk, no broadcast mask."""
    S, B, H, _ = q.shape
    rows = []
    for i in range(S):
        for b in range(B):
            seen = visible_BST[b, i].nonzero().flatten()
            for h in range(H):
                weight = ((k[seen, b, h] @ q[i, b, h]) * SCALE).softmax(0)
                rows.append(weight @ v[seen, b, h])
    return torch.stack(rows).view(S, B, H, v.shape[-1])


def causal(B, S):
    return torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)


def gradients(output, inputs, cotangent_dtype=torch.float64):
    cotangent = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(output, inputs, cotangent.to(cotangent_dtype).to(output.dtype))


@pytest.mark.parametrize("S", [1, 2, 7, 23])
@pytest.mark.parametrize("query_chunk", [None, 1, 4])
def test_causal_matches_loop(S, query_chunk):
    inputs = draw(S, S)
    actual = mla_attention(*inputs, softmax_scale=SCALE, query_chunk=query_chunk)
    expected = loop_truth(*inputs, causal(2, S))
    assert_parity(actual, expected, rms=1e-12, name="o")
    pairs = zip(gradients(actual, inputs), gradients(expected, inputs), "qkv", strict=True)
    for grad, want, name in pairs:
        # One key has a constant softmax: dq and dk are 0 up to rounding, where a ratio says nothing.
        if S == 1 and name in "qk":
            assert grad.abs().max() < 1e-14
            continue
        # The first query sees one key, likewise; the last rows of a sequence are never degenerate.
        assert_parity(grad[1:] if name == "q" else grad, want[1:] if name == "q" else want, rms=1e-11, name=f"d{name}")


@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("query_chunk", [None, 1, 4])
@pytest.mark.parametrize("lengths", [None, (9, 14)])
def test_a_window_matches_loop(window, query_chunk, lengths):
    S = 23
    inputs, place = draw(S, S), torch.arange(S)
    visible, seq_idx = causal(2, S) & (place >= place[:, None] - window), None
    if lengths is not None:
        seq_idx = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).int().expand(2, S)
        visible = visible & (seq_idx[:, :, None] == seq_idx[:, None])
    actual = mla_attention(*inputs, softmax_scale=SCALE, window=window, seq_idx=seq_idx, query_chunk=query_chunk)
    expected = loop_truth(*inputs, visible)
    assert_parity(actual, expected, rms=1e-12, name="o")
    for grad, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)


def test_a_window_holds_no_more_than_its_keys():
    """Of a long row: no block of scores is as wide as the row."""
    inputs = draw(4096, 4096, B=1, H=1, dtype=torch.float32)
    widest = 0
    softmax = torch.Tensor.softmax

    def seen(score, *args, **kwargs):
        nonlocal widest
        widest = max(widest, score.shape[-1])
        return softmax(score, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "softmax", seen):
        mla_attention(*inputs, softmax_scale=SCALE, window=63).sum().backward()
    assert widest <= 128


@pytest.mark.parametrize("op", [mla_attention, sdpa_attention])
def test_a_window_is_of_causal_attention(op):
    with raises(ModelError, "window is 3", "causal=False"):
        op(*draw(5, 5), softmax_scale=SCALE, causal=False, window=3)
    with raises(ModelError, "window is -1"):
        op(*draw(5, 5), softmax_scale=SCALE, window=-1)


def test_kernels_without_a_window_are_no_choice():
    inputs = draw(5, 5)
    assert fused_backend(*inputs, window=3, backends=(SDPBackend.CUDNN_ATTENTION,)) is None
    with raises(BackendError, "MATH has no window"):
        sdpa_attention(*inputs, softmax_scale=SCALE, window=3, backend=SDPBackend.MATH)


# fp32: the worst of thousands of rows averages values that cancel; attention written in one line has 2.4e-6 there.
@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 4e-6), (torch.bfloat16, 5e-3)])
def test_odd_length_in_low_precision(dtype, rms):
    low = draw(777, 777, B=1, H=1, K=16, V=8, dtype=dtype)
    high = [t.detach().double().requires_grad_() for t in low]
    actual = mla_attention(*low, softmax_scale=SCALE)
    expected = mla_attention(*high, softmax_scale=SCALE)
    assert actual.dtype == dtype
    assert_parity(actual, expected, rms=rms, name="o")
    for grad, want, name in zip(gradients(actual, low, dtype), gradients(expected, high, dtype), "qkv", strict=True):
        assert grad.dtype == dtype
        # dq of the first query is exactly 0 in theory: see test_causal_matches_loop.
        assert_parity(grad[1:] if name == "q" else grad, want[1:] if name == "q" else want, rms=rms, name=f"d{name}")


@pytest.mark.parametrize("shape", [(2, 1, 7, 7), (1, 1, 7, 7), (2, 1, 1, 7), (2, 1, 7, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("query_chunk", [None, 3])
def test_every_broadcast_mask(shape, query_chunk):
    masked = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    masked[..., 0] = False
    inputs = draw(7, 7)
    actual = mla_attention(*inputs, softmax_scale=SCALE, attention_mask=masked, query_chunk=query_chunk)
    visible = causal(2, 7) & ~masked.expand(2, 1, 7, 7)[:, 0]
    assert_parity(actual, loop_truth(*inputs, visible), rms=1e-12, name="o")


@pytest.mark.parametrize(("S", "T"), [(5, 9), (9, 5), (1, 6)])
def test_not_causal_and_more_or_fewer_keys(S, T):
    inputs = draw(S, T)
    everything = torch.ones(2, S, T, dtype=torch.bool)
    actual = mla_attention(*inputs, softmax_scale=SCALE, causal=False, query_chunk=2)
    assert_parity(actual, loop_truth(*inputs, everything), rms=1e-12, name="o")
    masked = torch.rand(2, 1, S, T, generator=torch.Generator().manual_seed(3)) < 0.4
    masked[..., 0] = False
    actual = mla_attention(*inputs, softmax_scale=SCALE, causal=False, attention_mask=masked, query_chunk=2)
    assert_parity(actual, loop_truth(*inputs, ~masked[:, 0]), rms=1e-12, name="masked o")


def test_refuses_documents_that_do_not_fit():
    (q, k, v), documents = draw(7, 7), torch.zeros(2, 7, dtype=torch.int32)
    for op in (mla_attention, sdpa_attention):
        with pytest.raises(ModelError, match=r"expected torch.int32 \[B, S\] = \[2, 7\]"):
            op(q, k, v, softmax_scale=SCALE, seq_idx=documents.long())
        with raises(ModelError, "5 queries", "7 keys"):
            op(q[:5], k, v, softmax_scale=SCALE, seq_idx=documents[:, :5])
    for more in ({"causal": False}, {"attention_mask": torch.zeros(1, 1, 7, 7, dtype=torch.bool)}):
        with raises(ModelError, "seq_idx", f"causal={more.get('causal', True)}"):
            sdpa_attention(q, k, v, softmax_scale=SCALE, seq_idx=documents, **more)


def test_masked_key_and_blind_query_are_exactly_zero():
    inputs = draw(6, 6)
    masked = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    masked[0, :, :, 2] = True  # nobody in sample 0 sees key 2
    masked[1, :, 4, :] = True  # query 4 of sample 1 sees nothing
    output = mla_attention(*inputs, softmax_scale=SCALE, attention_mask=masked)
    dq, dk, dv = gradients(output, inputs)
    assert torch.equal(output[4, 1], torch.zeros_like(output[4, 1]))
    for zero in (dq[4, 1], dk[2, 0], dv[2, 0]):
        assert torch.equal(zero, torch.zeros_like(zero))
    for gradient in (dq, dk, dv):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_no_score_is_kept_for_backward():
    S, B, H = 48, 2, 4
    inputs = draw(S, S, B=B, H=H, K=6, V=4)
    kept = saved_bytes(lambda: mla_attention(*inputs, softmax_scale=SCALE, query_chunk=8))
    assert kept == sum(t.nbytes for t in inputs), "the backward pass needs the inputs, and nothing else is to be kept"
    # The measurement itself must see a kept score where there is one.
    q, k, v = inputs
    naive = saved_bytes(lambda: torch.einsum("bhst,tbhv->sbhv", torch.einsum("sbhk,tbhk->bhst", q, k).softmax(-1), v))
    assert naive >= B * H * S * S * q.itemsize > kept


Q, K, V = (t.detach() for t in draw(4, 4))
MASK = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
BAD = {
    "width of k": ((Q, K[..., :3], V), {}, "same B, H"),
    "rank of v": ((Q, K, V[0]), {}, "same B, H"),
    "integers": ((Q.long(), K, V), {}, "floating-point"),
    "no key": ((Q, K[:0], V[:0]), {"causal": False}, r"\(0, "),
    "no query": ((Q[:0], K, V), {"causal": False}, "0 queries"),
    "causal rectangle": ((Q[:3], K, V), {}, "3 queries.* 4 keys"),
    "additive mask": ((Q, K, V), {"attention_mask": MASK.float()}, "torch.bool"),
    "mask of another size": ((Q, K, V), {"attention_mask": MASK[..., :3]}, "broadcasts"),
    "mask by head": ((Q, K, V), {"attention_mask": MASK.expand(2, 3, 4, 4)}, "by head"),
    "mask of rank 2": ((Q, K, V), {"attention_mask": MASK[0, 0]}, "broadcasts"),
    "chunk": ((Q, K, V), {"query_chunk": 0}, "positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case):
    arguments, options, message = BAD[case]
    with pytest.raises(ModelError, match=message):
        mla_attention(*arguments, softmax_scale=SCALE, **options)
    if case not in ("chunk", "no query"):
        with pytest.raises(ModelError, match=message):
            sdpa_attention(*arguments, softmax_scale=SCALE, backend=SDPBackend.MATH, **options)
        with pytest.raises(ModelError, match=message):
            fused_backend(*arguments, **options)
