"""The indexer's scores, selection, losses and gradient against loops over queries, in fp64.

Shape legend: S queries, T keys, B batch, H indexer heads, D indexer head width, N selected keys.
"""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer import reference
from megacpp_mcore.ops.indexer.chunked import dense_grad
from megacpp_mcore.ops.indexer.reference import causal_topk, indexer_grad, indexer_loss, indexer_scores, select
from megacpp_mcore.ops.testing import assert_parity
from tests.ops import indexer_case as case
from tests.ops.indexer_case import draw_documents
from tests.ops.saved_tensors import saved_bytes


def draw(S, T, B=2, H=3, D=5, dtype=torch.float64, seed=0):
    """As :func:`tests.ops.indexer_case.draw`, for fewer or more keys than queries, and with weights of size 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((S, B, H, D), (T, B, D), (S, B, H))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def draw_scores(B, S, seed=0):
    return torch.randn(B, S, S, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def draw_target(shape, seed=5):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01


def loop_scores(q, k, w):
    S, B, H, _ = q.shape
    total = torch.zeros(B, S, k.shape[0], dtype=q.dtype)
    for h in range(H):
        for b in range(B):
            total[b] = total[b] + w[:, b, h, None] * torch.clamp(q[:, b, h] @ k[:, b].T, min=0)
    return total


def loop_topk(score_BST, topk, visible_BST):
    """Python's sort on (descending score, ascending key), an order without ties; then the keys in their order."""
    B, S, T = score_BST.shape
    N = min(topk, T)
    index = torch.full((B, S, N), -1, dtype=torch.int32)
    for b in range(B):
        for i in range(S):
            keys = sorted(visible_BST[b, i].nonzero().flatten().tolist(), key=lambda j: (-float(score_BST[b, i, j]), j))
            index[b, i, : len(keys[:N])] = torch.tensor(sorted(keys[:N]), dtype=torch.int32)
    return index


def visible_in(documents, S):
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(2, S, S)
    return causal if documents is None else causal & (documents[:, :, None] == documents[:, None, :])


def blinded(index):
    """The same selection, with a query that sees nothing."""
    index = index.clone()
    index[1, 5 if index.shape[1] > 5 else 3] = -1
    return index


def loop_loss(score_BST, target, keys_of):
    """Σ p log(p / q) with only the valid keys ever read; ``keys_of(b, i)`` gives (columns of target, keys)."""
    B, S, _ = score_BST.shape
    total = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for i in range(S):
            columns, keys = keys_of(b, i)
            if not columns:
                continue
            p = target[b, i, columns] / target[b, i, columns].sum()
            q = score_BST[b, i, keys].softmax(0)
            total = total + (p * (p / q).log()).sum()
    return total / (B * S)


@pytest.mark.parametrize(("S", "T"), [(1, 1), (7, 7), (5, 11), (11, 5)])
@pytest.mark.parametrize("query_chunk", [None, 1, 3])
def test_scores_match_loop(S, T, query_chunk):
    inputs = draw(S, T)
    actual, expected = indexer_scores(*inputs, query_chunk=query_chunk), loop_scores(*inputs)
    assert_parity(actual, expected, rms=1e-12, name="score")
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients, want = torch.autograd.grad(actual, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent)
    for name, a, e in zip("qkw", gradients, want, strict=True):
        assert e.abs().sum() > 0
        assert_parity(a, e, rms=1e-11, name=f"d{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_in_low_precision_are_fp32(dtype):
    low = draw(777, 777, B=1, H=2, D=8, dtype=dtype)
    actual = indexer_scores(*low)
    expected = indexer_scores(*(t.detach().double() for t in low))
    assert actual.dtype == torch.float32
    assert_parity(actual, expected, rms=1e-6, name="score")


def test_nothing_with_heads_and_keys_is_kept():
    S, B, H = 48, 2, 4
    q, k, w = inputs = draw(S, S, B=B, H=H, D=5)
    kept = saved_bytes(lambda: indexer_scores(*inputs, query_chunk=8))
    assert kept == sum(t.nbytes for t in inputs), "the backward pass needs the inputs, and nothing else is to be kept"
    naive = saved_bytes(lambda: torch.einsum("sbht,sbh->bst", torch.einsum("sbhd,tbd->sbht", q, k).relu(), w))
    assert naive >= B * H * S * S * q.itemsize > kept


@pytest.mark.parametrize("topk", [1, 4, 9, 50])
@pytest.mark.parametrize("S", [1, 2, 9])
def test_topk_matches_sort(S, topk):
    score = draw_scores(2, S).detach()
    index = causal_topk(score, topk)
    assert index.dtype == torch.int32
    assert torch.equal(index, loop_topk(score, topk, visible_in(None, S)))
    valid_S = (index >= 0).sum(-1)
    assert torch.equal(valid_S, torch.arange(1, S + 1).clamp_max(topk).expand(2, S))


def test_topk_ties_go_to_the_lower_key():
    S = 300  # long enough for a sort that is not stable to show
    score = torch.randint(0, 3, (1, S, S), generator=torch.Generator().manual_seed(0)).double()
    causal = torch.ones(1, S, S, dtype=torch.bool).tril()
    assert torch.equal(causal_topk(score, 64), loop_topk(score, 64, causal))
    # ReLU against a negative weight gives -0: it must tie with +0 and not rank below it.
    zeros = torch.zeros(1, S, S)
    zeros[..., ::2] = -0.0
    last = causal_topk(zeros, 64)[0, -1]
    assert torch.equal(last, torch.arange(64, dtype=torch.int32))


def test_topk_keeps_visible_infinities():
    score = torch.full((1, 4, 4), float("-inf"))
    documents = torch.tensor([[0, 1, 1, 1]], dtype=torch.int32)
    assert causal_topk(score, 2, documents)[0].tolist() == [[0, -1], [1, -1], [1, 2], [1, 2]]
    assert causal_topk(score, 2)[0].tolist() == [[0, -1], [0, 1], [0, 1], [0, 1]]


def test_topk_ranks_nan_highest():
    score = torch.tensor([[1.0, float("inf"), float("nan"), -float("nan"), 2.0]]).expand(1, 5, 5)
    assert causal_topk(score, 1)[0, :, 0].tolist() == [0, 1, 2, 2, 2]
    assert causal_topk(score, 3)[0, -1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("query_chunk", [None, 1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_selection_is_the_topk_of_the_scores(query_chunk, packed):
    inputs = [t.detach() for t in draw(23, 23)]
    documents = draw_documents(23, each=3) if packed else None
    index = select(*inputs, 5, documents, query_chunk=query_chunk)
    assert index.dtype == torch.int32
    assert torch.equal(index, loop_topk(loop_scores(*inputs), 5, visible_in(documents, 23)))
    q, k, w = inputs
    assert torch.equal(select(q[9:], k, w[9:], 5, documents, first_row=9, query_chunk=query_chunk), index[:, 9:])


def test_no_more_scores_at_a_time_than_the_scratch_holds(monkeypatch):
    """A chunk's scores with their heads fit the bound, and the selection is the same."""
    S, B, H = 64, 2, 3
    inputs = [t.detach() for t in draw(S, S, B=B, H=H)]
    selected, seen, score_block = select(*inputs, 7), [], reference.score_block

    def block(q, k, w):
        seen.append(len(q) * B * H * S)
        return score_block(q, k, w)

    monkeypatch.setattr(reference, "SCORE_BLOCK_ELEMENTS", 5000)
    monkeypatch.setattr(reference, "score_block", block)
    assert torch.equal(select(*inputs, 7), selected)
    assert len(seen) == 5  # 13 queries of 384 numbers each
    assert max(seen) <= 5000


@pytest.mark.parametrize("topk", [1, 3, 20])
def test_loss_matches_loop(topk):
    score = draw_scores(2, 9)
    index = blinded(causal_topk(score, topk))  # a row of only -1
    target = draw_target(index.shape)

    def keys_of(b, i):
        columns = (index[b, i] >= 0).nonzero().flatten().tolist()
        return columns, index[b, i, columns]

    actual, expected = indexer_loss(score, index, target), loop_loss(score, target, keys_of)
    assert torch.equal(indexer_loss(score, index, target.masked_fill(index < 0, float("nan"))), actual)
    assert float(indexer_loss(score, torch.full_like(index, -1), target).detach()) == 0.0
    (grad,), (want,) = torch.autograd.grad(actual, score), torch.autograd.grad(expected, score)
    if topk == 1:
        # One key has probability 1 on both sides: no loss and no gradient.
        assert actual.abs() < 1e-12
        assert grad.abs().max() < 1e-12
        return
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-14)
    assert grad.abs().sum() > 0
    assert torch.equal(grad[1, 5], torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize("coefficient", [0.7, torch.tensor(0.7)])
@pytest.mark.parametrize("query_chunk", [None, 1, 4])
def test_gradient_is_that_of_the_loss(query_chunk, coefficient):
    inputs = draw(23, 23)
    score = indexer_scores(*inputs)
    index = blinded(causal_topk(score, 5, draw_documents(23, each=3)))
    target = case.draw_target(index).double()
    expected = indexer_loss(score, index, target)
    loss, *gradients = indexer_grad(*inputs, index, target, coefficient, query_chunk=query_chunk)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, grad, want in zip("qkw", gradients, torch.autograd.grad(0.7 * expected, inputs), strict=True):
        assert not grad.requires_grad
        torch.testing.assert_close(grad, want, rtol=1e-6 if isinstance(coefficient, torch.Tensor) else 1e-10, atol=1e-14)
        assert grad.abs().sum() > 0, f"the loss does not reach {name}"
    assert torch.equal(gradients[0][7, 0], torch.zeros_like(gradients[0][7, 0]))
    assert torch.equal(gradients[0][5, 1], torch.zeros_like(gradients[0][5, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_low_precision(dtype):
    low = [t.detach() for t in draw(777, 777, B=1, H=2, D=8, dtype=dtype)]
    index = select(*low, 17)
    target = draw_target(index.shape).float()
    loss, *gradients = indexer_grad(*low, index, target, 1.0)
    want_loss, *expected = indexer_grad(*(t.double() for t in low), index, target.double(), 1.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-6, atol=0)
    for name, grad, want in zip("qkw", gradients, expected, strict=True):
        assert grad.dtype == dtype
        # Query 0 selects one key: its gradient is 0 up to rounding. In fp32 autograd over all keys has 3.6e-5 (of w, whose
        # gradient sums terms that cancel).
        assert_parity(grad[1:], want[1:], rms=4e-5 if dtype == torch.float32 else 5e-3, name=f"d{name}")


@pytest.mark.parametrize("query_chunk", [None, 5])
@pytest.mark.parametrize("lengths", [None, (9, 1, 14)])
def test_gradients_over_every_key_are_those_of_the_formula(query_chunk: int | None, lengths: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, w, query, key = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((24, 2, 3, 8), (24, 2, 8), (24, 2, 3), (24, 2, 4, 10), (24, 2, 1, 10))
    )
    seq_idx, seen_ST = None, torch.ones(24, 24, dtype=torch.bool).tril()
    if lengths is not None:
        seq_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
        seen_ST = seen_ST & (seq_idx[:, None] == seq_idx)
    trained = [tensor.clone().requires_grad_() for tensor in (q, k, w)]
    attended_BAST = 0.4 * torch.einsum("sbak,tbk->bast", query, key.squeeze(2))
    target = attended_BAST.masked_fill(~seen_ST, -torch.inf).softmax(-1).mean(1)
    score = reference.indexer_scores(*trained).masked_fill(~seen_ST, -torch.inf)
    log_ratio = (target.log() - score.log_softmax(-1)).masked_fill(~seen_ST, 0.0)
    loss = (target * log_ratio).sum(-1).mean()
    (3 * loss).backward()
    outputs = dense_grad(
        q, k, w, query, key,
        weight=torch.tensor(3 / 48, dtype=torch.float64), softmax_scale=0.4, seq_idx_S=seq_idx, query_chunk=query_chunk,
    )  # fmt: skip
    assert float(outputs[0].mean()) == pytest.approx(float(loss), rel=1e-9)
    for gradient, tensor in zip(outputs[1:], trained, strict=True):
        assert torch.allclose(gradient, tensor.grad, rtol=1e-8, atol=1e-12)


Q, K, W = torch.zeros(4, 2, 3, 5), torch.zeros(4, 2, 5), torch.zeros(4, 2, 3)
SCORE, INDEX, TARGET = torch.zeros(2, 4, 4), torch.zeros(2, 4, 2, dtype=torch.int32), torch.zeros(2, 4, 2)
MASK, DOCUMENTS = torch.zeros(2, 1, 4, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.int32)
BAD = {
    "key with heads": (indexer_scores, (Q, K[:, :, None], W), {}, r"\(4, 2, 1, 5\)"),
    "weights of another shape": (indexer_scores, (Q, K, W[:3]), {}, "same S"),
    "integer queries": (indexer_scores, (Q.long(), K, W), {}, "floating-point"),
    "no query": (indexer_scores, (Q[:0], K, W[:0]), {}, "0 queries"),
    "chunk": (indexer_scores, (Q, K, W), {"query_chunk": -1}, "positive"),
    "selection of a rectangle": (select, (Q[:3], K, W[:3], 2), {}, "3 queries.* 4 keys"),
    "selection by queries behind the keys": (select, (Q[:3], K, W[:3], 2), {"first_row": 2}, "5 queries.* 4 keys"),
    "selection of nothing": (select, (Q, K, W, 0), {}, "at least 1"),
    "documents of another length": (select, (Q, K, W, 2, DOCUMENTS[:, :3]), {}, r"\[B, S\] = \[2, 4\]"),
    "int64 documents": (select, (Q, K, W, 2, DOCUMENTS.long()), {}, "torch.int32"),
    "topk 0": (causal_topk, (SCORE, 0), {}, "at least 1"),
    "rows behind the keys": (causal_topk, (SCORE, 2), {"first_row": 1}, "row 5.* 4 keys"),
    "rank 2": (causal_topk, (SCORE[0], 2), {}, r"\[B, S, T\]"),
    "integer scores": (causal_topk, (SCORE.long(), 2), {}, "floating-point"),
    "int64 index": (indexer_loss, (SCORE, INDEX.long(), TARGET), {}, "int32"),
    "gradient of an int64 index": (indexer_grad, (Q, K, W, INDEX.long(), TARGET, 1.0), {}, "int32"),
    "gradient against another width": (indexer_grad, (Q, K, W, INDEX, TARGET[..., :1], 1.0), {}, "expected the same"),
    "gradient against integers": (indexer_grad, (Q, K, W, INDEX, INDEX, 1.0), {}, "floating-point"),
    "index of another batch": (indexer_loss, (SCORE, INDEX[:1], TARGET), {}, "B, S = 2, 4"),
    "target of another width": (indexer_loss, (SCORE, INDEX, TARGET[..., :1]), {}, "expected the same"),
    "integer target": (indexer_loss, (SCORE, INDEX, INDEX), {}, "floating-point"),
}


@pytest.mark.parametrize(("function", "arguments", "options", "message"), BAD.values(), ids=BAD.keys())
def test_refuses(function, arguments, options, message):
    with pytest.raises(ModelError, match=message):
        function(*arguments, **options)


@pytest.fixture
def fused():
    return pytest.importorskip("megacpp_mcore.ops.indexer.triton")


@pytest.mark.parametrize(("rows", "batch"), [(1, 40), (64, 7), (5000, 2), (65536, 1)])
def test_chunks_hold_every_query_once(fused, rows, batch):
    seen = torch.zeros(batch, rows, dtype=torch.int32)
    for part in fused.chunks(rows, batch):
        last = part.first + part.rows
        assert last <= part.width
        assert part.width % fused.KEYS == 0
        assert (part.batch.stop - part.batch.start) * part.rows * part.width <= fused.SCRATCH
        seen[part.batch, part.first : last] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"S": 0}, r"0 queries|\(0, "),
        ({"dtype": torch.float32}, "torch.float32 and torch.float32"),
        ({"D": 128}, "head width is 128"),
        ({"H": 65}, "65 heads"),
    ],
)
def test_the_kernels_refuse(fused, options, message):
    inputs = case.draw(**{"S": 4, "B": 1} | options)
    index_BSN = torch.zeros(1, len(inputs[0]), 1, dtype=torch.int32)
    with pytest.raises(ModelError, match=message):
        fused.indexer_grad(*inputs, index_BSN, index_BSN.float(), 1.0)
    if "H" not in options:
        with pytest.raises(ModelError, match=message):
            fused.select(*inputs, 1)
    q, k, w = case.draw(4)
    with pytest.raises(ModelError, match=r"torch.bfloat16 and torch.float16"):
        fused.select(q, k.half(), w, 1)
