"""Documents in one row are as if each had been run by itself: outputs and every gradient, for the ops of all families.

Legend: B batch, S rows, H heads, P head dim, G groups, N state or selected keys, R MIMO rank, K key dim, V value dim.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.utils import flatten_batch_for_packed_sequences
from torch.nn.attention import SDPBackend

from megacpp_mcore.errors import DataError, ModelError
from megacpp_mcore.layer_specs.documents import packed_documents
from megacpp_mcore.ops.indexer.reference import indexer_loss, indexer_scores, select
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.m2rnn.reference import m2rnn, m2rnn_chunked, m2rnn_sequential
from megacpp_mcore.ops.mamba3.reference import mamba3
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.mla.sdpa import sdpa_attention
from megacpp_mcore.ops.packed.documents import (
    additive_mask,
    check_masked_count,
    cu_seqlens_of,
    document_starts,
    fixed_cu_seqlens,
    other_documents,
    roll_left,
    segmented_cumsum,
    seq_idx_from_cu_seqlens,
    seq_idx_from_mask,
    shared,
)
from megacpp_mcore.ops.sparse_mla.reference import attend
from tests.errors import raises
from tests.ops import m2rnn_case, mamba3_case

H, P, G, N, R, K, V = 2, 3, 1, 4, 2, 3, 4
Tensors = dict[str, torch.Tensor]
LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=5)
_PROPERTY = settings(max_examples=25)


def number(lengths: list[int]) -> torch.Tensor:
    """seq_idx ``[2, S]``: these documents in the first row, the same from the last to the first in the second."""
    rows = [torch.repeat_interleave(torch.arange(len(part)), torch.tensor(part)) for part in (lengths, lengths[::-1])]
    return torch.stack(rows).int()


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()
    }


def check_separate(
    compute: Callable[[Tensors, dict[str, Any], torch.Tensor | None], torch.Tensor],
    tokens: Tensors,
    shared: dict[str, Any],
    lengths: list[int],
) -> None:
    """``compute`` of all documents at once against one call a document; ``tokens`` are ``[B, S, …]``, as its output."""
    leaves = [*tokens.values(), *shared.values()]
    packed = compute(tokens, shared, number(lengths))
    separate = torch.empty_like(packed)
    for row, parts in enumerate((lengths, lengths[::-1])):
        start = 0
        for length in parts:
            cut = slice(start, start + length)
            alone = compute({name: t[row : row + 1, cut] for name, t in tokens.items()}, shared, None)
            separate[row : row + 1, cut] = alone
            start += length
    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-10)
    given_ = torch.randn(packed.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    gradients, truth = (torch.autograd.grad(y, leaves, given_, retain_graph=True) for y in (packed, separate))
    for name, grad, want in zip([*tokens, *shared], gradients, truth, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"d{name}: {text}")


def apart(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What an op takes, in float64, as leaves: of the tokens ``[B, S, …]``, and of the layer."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    return {"u": leaves.pop("u").detach().transpose(0, 1).requires_grad_()}, leaves


def mamba(rows: int, rank: int) -> tuple[mamba3_case.Case, Tensors, Tensors]:
    case = mamba3_case.Case(rows, H=H, P=P, G=G, N=N, A=2, R=rank, mimo=rank > 1)
    return case, *apart(mamba3_case.make_tensors(case, device="cpu"))


@_PROPERTY
@given(
    lengths=LENGTHS,
    rank=st.sampled_from([1, R]),
    method=st.sampled_from(["sequential", "chunked"]),
    chunk_size=st.integers(1, 16),
    segment_size=st.sampled_from([None, 1, 4, 7, 1024]),
)
def test_mamba3(lengths: list[int], rank: int, method: Any, chunk_size: int, segment_size: int | None) -> None:
    case, *tensors = mamba(sum(lengths), rank)

    def compute(tokens: Tensors, shared: Tensors, seq_idx: torch.Tensor | None) -> torch.Tensor:
        options: dict[str, Any] = {"chunk_size": chunk_size, "method": method, "segment_size": segment_size}
        inputs = {"u": tokens["u"].transpose(0, 1)} | shared
        return mamba3_case.run(mamba3, case, inputs, seq_idx=seq_idx, **options)[0].transpose(0, 1)

    check_separate(compute, *tensors, lengths)


def test_mamba3_of_a_document_does_not_change_with_another_one_by_a_bit() -> None:
    """In float32 too: neither the state nor the angles of the first document are added and taken off again."""
    case, tokens, shared = mamba(40, R)
    weights = {name: tensor.detach().float() for name, tensor in shared.items()}
    first, other = (tokens["u"].detach().float().transpose(0, 1).clone() for _ in range(2))
    other[:13] = 50 * torch.randn(other[:13].shape, generator=torch.Generator().manual_seed(5))
    options: Any = {"chunk_size": 8, "seq_idx": number([13, 27])[:1].expand(2, 40)}
    before, after = (mamba3_case.run(mamba3, case, {"u": u} | weights, **options)[0] for u in (first, other))
    assert torch.equal(before[13:], after[13:])
    assert not torch.equal(before[:13], after[:13])


def mixer(rows: int) -> tuple[Tensors, Tensors]:
    return apart(m2rnn_case.draw(m2rnn_case.Case(S=rows, H=H, K=K, V=V))["leaves"])


def mixed(tokens: Tensors, weights: Tensors, **options: Any) -> tuple[torch.Tensor, Any]:
    """m2rnn() on ``[B, S, …]``, to ``[B, S, H·V]``."""
    leaves = {"u": tokens["u"].transpose(0, 1)} | weights
    out_SBC, state = m2rnn_case.run(m2rnn, m2rnn_case.Case(H=H, K=K, V=V), leaves, **options)
    assert out_SBC.is_contiguous()
    return out_SBC.transpose(0, 1), state


def how_of(every: int | None) -> dict[str, Any]:
    """Token by token, or with a state saved in so many tokens."""
    return {"recurrence": m2rnn_sequential} if every is None else {"checkpoint_every": every}


@_PROPERTY
@given(lengths=LENGTHS, every=st.sampled_from([None, 1, 2, 5, 8, 64]))
def test_m2rnn(lengths: list[int], every: int | None) -> None:
    def compute(tokens: Tensors, shared: dict[str, Any], seq_idx: torch.Tensor | None) -> torch.Tensor:
        return mixed(tokens, shared, seq_idx=seq_idx, **how_of(every))[0]

    check_separate(compute, *mixer(sum(lengths)), lengths)


@pytest.mark.parametrize("every", [None, 1, 4, 64])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cut", [1, 8, 15])
def test_m2rnn_may_be_cut_anywhere(documents: bool, cut: int, every: int | None) -> None:
    """Two calls that hand the state over are one call token by token: the rows before the cut go along for the convolution."""
    tokens, weights = mixer(17)
    numbers = number([7, 2, 8])[:1].expand(2, 17)
    token_by_token = {"return_final_state": True} | how_of(None)
    uncut, last = mixed(tokens, weights, seq_idx=numbers if documents else None, **token_by_token)
    assert mixed(tokens, weights)[1] is None
    outputs, state = [], None
    for rows in (slice(0, cut), slice(cut, None)):
        part = {name: t[:, rows] for name, t in tokens.items()}
        seq_idx = numbers[:, rows] if documents else None
        how = {"return_final_state": True, "initial_state": state} | how_of(every)
        out, state = mixed(part, weights, seq_idx=seq_idx, **how)
        outputs.append(out)
    joined, leaves = torch.cat(outputs, dim=1), [*tokens.values(), *weights.values()]
    for output, truth in zip((joined, *state), (uncut, *last), strict=True):
        torch.testing.assert_close(output, truth, rtol=1e-10, atol=1e-10)
    ends = ((joined, state), (uncut, last))
    gradients = (torch.autograd.grad(y.sin().sum() + end.h_BHKV.cos().sum(), leaves) for y, end in ends)
    for grad, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, truth, rtol=1e-10, atol=1e-10)


@_PROPERTY
@given(lengths=LENGTHS, query_chunk=st.sampled_from([None, 1, 3, 8]), fused=st.booleans())
def test_full_mla(lengths: list[int], query_chunk: int | None, fused: bool) -> None:
    """By the reference, and with the mask that is made of the documents on the kernel of PyTorch's that runs anywhere."""

    def compute(tokens: Tensors, shared: dict[str, Any], seq_idx: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in tokens.values())
        if fused:
            o_SBHV = sdpa_attention(q, k, v, softmax_scale=0.3, seq_idx=seq_idx, backend=SDPBackend.MATH)
        else:
            o_SBHV = mla_attention(q, k, v, softmax_scale=0.3, seq_idx=seq_idx, query_chunk=query_chunk)
        return o_SBHV.transpose(0, 1)

    rows = sum(lengths)
    check_separate(compute, draw({"q": (2, rows, H, K), "k": (2, rows, H, K), "v": (2, rows, H, V)}, 0), {}, lengths)


@_PROPERTY
@given(lengths=LENGTHS, topk=st.integers(1, 12), query_chunk=st.sampled_from([None, 1, 3, 8]))
def test_sparse_mla_with_the_top_k_and_the_loss_of_its_indexer(lengths: list[int], topk: int, query_chunk: int | None) -> None:
    """The last column is the indexer's loss of each row, which no other document may enter."""

    def compute(tokens: Tensors, shared: dict[str, Any], seq_idx: torch.Tensor | None) -> torch.Tensor:
        query, kv, q, k, w = (t.transpose(0, 1) for t in tokens.values())
        index_BSN, sink = select(q, k, w, topk, seq_idx, query_chunk=query_chunk), TargetSum()
        o_SBHV = attend(query, kv, index_BSN, softmax_scale=0.3, value_dim=K, sink=sink, query_chunk=query_chunk)
        torch.autograd.grad(o_SBHV, query, torch.ones_like(o_SBHV), retain_graph=True)
        score_BST = indexer_scores(q, k, w, query_chunk=query_chunk)
        parts = (t.unflatten(0, (-1, 1)) for t in (score_BST.flatten(0, 1), index_BSN.flatten(0, 1), sink.take().flatten(0, 1)))
        each_row = [indexer_loss(*(t[None] for t in row)) for row in zip(*parts, strict=True)]
        losses = torch.stack(each_row).unflatten(0, index_BSN.shape[:2]).unsqueeze(-1)
        return torch.cat((o_SBHV.transpose(0, 1).flatten(2), losses), dim=-1)

    rows = sum(lengths)
    shapes = {"query": (2, rows, H, V), "kv": (2, rows, V), "q": (2, rows, H, P), "k": (2, rows, P), "w": (2, rows, H)}
    check_separate(compute, draw(shapes, 0), {}, lengths)


def stock_mask(tokens_S: torch.Tensor, eod: int) -> torch.Tensor:
    mask, _, _ = _get_ltor_masks_and_position_ids(tokens_S, eod, True, True, True, True)
    return mask


@_PROPERTY
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_stock_masks_say_exactly_where_documents_begin(rows: list[list[int]]) -> None:
    tokens_BS = torch.tensor(rows)
    mask = torch.stack([stock_mask(tokens_S, 0) for tokens_S in tokens_BS])
    after_end = torch.nn.functional.pad((tokens_BS == 0)[:, :-1], (1, 0))
    seq_idx = seq_idx_from_mask(mask)
    assert torch.equal(seq_idx, after_end.cumsum(1, dtype=torch.int32))
    assert torch.equal(document_starts(seq_idx, batch=len(rows), rows=12), after_end)
    assert torch.equal(mask, other_documents(seq_idx) | ~torch.ones(12, 12, dtype=torch.bool).tril())


@_PROPERTY
@given(lengths=LENGTHS, padding=st.integers(0, 5))
def test_packed_lengths_say_it_too(lengths: list[int], padding: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, sum(lengths) + padding)
    assert torch.equal(seq_idx[:, : sum(lengths)], number(lengths)[:1])
    assert bool((seq_idx[:, sum(lengths) :] == len(lengths)).all())


@pytest.mark.parametrize("given", [None, [0, 2, 3, 5]])
def test_padding_between_sequences_belongs_to_the_one_before(given: list[int] | None) -> None:
    """The padded first rows say where documents begin, whatever those without padding are."""
    plain = None if given is None else torch.tensor(given)
    lengths = {"cu_seqlens_q": plain, "cu_seqlens_kv": plain}
    padded = torch.tensor([0, 4, 6, 8])
    parameters = PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded.clone(), **lengths)
    assert packed_documents(SimpleNamespace(context_parallel_size=1), parameters, 1, batch=1, rows=9).tolist() == [
        [0, 0, 0, 0, 1, 1, 2, 2, 3]
    ]


@_PROPERTY
@given(lengths=LENGTHS, spare=st.integers(0, 4))
def test_cu_seqlens_of_a_fixed_length(lengths: list[int], spare: int) -> None:
    """Of a batch of several rows, one behind the other; and back, empty documents at the end or not."""
    seq_idx, most = number(lengths), 2 * len(lengths) + spare
    rows = [0, *itertools.accumulate([*lengths, *lengths[::-1]])]
    cu_seqlens = cu_seqlens_of(seq_idx, most)
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == rows + [rows[-1]] * spare
    assert cu_seqlens_of(seq_idx, most) is cu_seqlens
    flat = seq_idx_from_cu_seqlens(cu_seqlens, rows[-1]).view(seq_idx.shape)
    assert torch.equal(*(document_starts(numbers, batch=2, rows=sum(lengths)) for numbers in (flat, seq_idx)))
    with raises(ModelError, f"{2 * len(lengths)} documents", f"2 rows of {sum(lengths)}"):
        cu_seqlens_of(seq_idx, 2 * len(lengths) - 1)


@_PROPERTY
@given(samples=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3))
def test_the_documents_of_a_mask_are_counted_row_by_row(samples: list[list[int]]) -> None:
    """The last document of a row takes what the others leave."""
    rows, most = max(map(sum, samples)), max(map(len, samples))
    starts = torch.zeros(len(samples), rows, dtype=torch.int32)
    for row, lengths in zip(starts, samples, strict=True):
        row[list(itertools.accumulate(lengths[:-1]))] = 1
    future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    mask = other_documents(starts.cumsum(1, dtype=torch.int32)) | future
    check_masked_count(mask, most)
    if most > 1:
        with raises(DataError, f"{most} documents", f"{rows} tokens", f"at most {most - 1}"):
            check_masked_count(mask, most - 1)


@_PROPERTY
@given(
    samples=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3),
    spare=st.integers(0, 9),
)
def test_samples_are_packed_as_megatron_packs_them(samples: list[list[int]], spare: int) -> None:
    """Up to the empty documents that fill up the vector."""
    rows = max(map(sum, samples))
    parts = [[*lengths, rows - sum(lengths)] if sum(lengths) < rows else lengths for lengths in samples]
    given_ = torch.full((len(samples), rows + 1), rows, dtype=torch.int32)
    for cu_seqlens, lengths in zip(given_, parts, strict=True):
        cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *itertools.accumulate(lengths)])
    batch = flatten_batch_for_packed_sequences({"cu_seqlens": given_, "tokens": torch.zeros(len(samples), rows)})
    (expected,) = batch["cu_seqlens"].tolist()
    count = len(expected) - 1
    fixed = fixed_cu_seqlens(given_, rows=rows, max_documents=count + spare)
    assert (fixed.dtype, fixed.tolist()) == (torch.int32, expected + expected[-1:] * spare)
    with raises(DataError, f"{count} documents", f"{rows * len(samples)} tokens", f"at most {count - 1}"):
        fixed_cu_seqlens(given_, rows=rows, max_documents=count - 1)


@_PROPERTY
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    padding=st.integers(0, 3),
    kind=st.sampled_from([torch.int64, torch.float32]),
)
def test_a_shift_inside_sequences_is_megatrons(lengths: list[int], padding: int, kind: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = torch.randint(1, 99, (2, sum(lengths) + padding)).to(kind)
    expected, _ = roll_tensor(tokens, packed_seq_params=PackedSeqParams(cu_seqlens_q=cu_seqlens))
    assert torch.equal(roll_left(tokens, cu_seqlens), expected)


def test_forms_are_shared_by_copies_and_made_anew_after_a_write() -> None:
    seq_idx, made = number([3, 2]), []

    def form(of: torch.Tensor) -> int:
        return shared(of, "form", lambda: made.append(of) or len(made))

    assert [form(seq_idx), form(seq_idx.detach()), form(seq_idx[:1]), form(seq_idx)] == [1, 1, 2, 1]
    seq_idx[0, 0] = 0
    assert form(seq_idx) == 3
    storage = weakref.ref(seq_idx.untyped_storage())
    del seq_idx
    made.clear()
    assert storage() is None


def test_what_is_made_in_inference_mode_is_not_given_to_autograd() -> None:
    seq_idx = number([3, 2])
    with torch.inference_mode():
        made = additive_mask(seq_idx, torch.float32)
        assert additive_mask(seq_idx, torch.float32) is made
    assert not additive_mask(seq_idx, torch.float32).is_inference()


def test_no_nan_of_one_document_reaches_the_sums_of_the_next() -> None:
    values = torch.tensor([[1.0, float("nan"), 2.0, 3.0]])
    assert segmented_cumsum(values, torch.tensor([[False, False, True, False]]))[0, 2:].tolist() == [2.0, 5.0]


def changed(i: int, j: int) -> torch.Tensor:
    mask = stock_mask(torch.tensor([1, 0, 1, 1, 0, 1]), 0)[None]
    mask[0, 0, i, j] = ~mask[0, 0, i, j]
    return mask


BAD_MASKS = {
    "sees the future": (changed(0, 3), r"attention_mask\[0, 0, 0, 3\] is visible"),
    "sees another document": (changed(5, 0), r"attention_mask\[0, 0, 5, 0\] is visible"),
    "misses its own document": (changed(4, 2), r"attention_mask\[0, 0, 4, 2\] is masked"),
    "does not see itself": (changed(3, 3), r"attention_mask\[0, 0, 3, 3\] is masked"),
    "one row for all": (torch.zeros(1, 1, 1, 6, dtype=torch.bool), r"expected \[B, 1, S, S\]"),
    "empty": (torch.zeros(1, 1, 0, 0, dtype=torch.bool), r"expected \[B, 1, S, S\]"),
    "additive": (torch.zeros(1, 1, 6, 6), "expected torch.bool"),
    "a mask a head": (changed(0, 3).expand(1, 2, 6, 6), "by head"),
}


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(("mask", "message"), BAD_MASKS.values(), ids=BAD_MASKS.keys())
def test_a_mask_that_is_no_matter_of_documents_is_refused(mask: torch.Tensor, message: str, wait: bool) -> None:
    with pytest.raises(ModelError, match=message):
        seq_idx_from_mask(mask, wait=wait)


@pytest.mark.parametrize("numbers", [[0, 3, 9], [0, 4, 2, 5], [1, 3, 5], [0, 6], [-1, 5]])
def test_lengths_that_do_not_fit_the_rows_are_refused(numbers: list[int]) -> None:
    for none in (torch.tensor([0]), torch.tensor([[0, 3]]), torch.tensor([0.0, 3.0])):
        with pytest.raises(ModelError, match="expected integers"):
            seq_idx_from_cu_seqlens(none, 3)
    wrong, right = torch.tensor(numbers), torch.tensor([0, 3, 5])
    with raises(ModelError, f"cu_seqlens is {numbers}", "5 rows"):
        seq_idx_from_cu_seqlens(wrong, 5)
    with raises(ModelError, f"cu_seqlens is {numbers}", "5 rows"):
        seq_idx_from_cu_seqlens(right, 5, of_keys=wrong)


def test_keys_of_other_documents_are_refused() -> None:
    queries = torch.tensor([0, 3, 5])
    with raises(ModelError, [0, 3, 5], [0, 2, 5]):
        seq_idx_from_cu_seqlens(queries, 5, of_keys=torch.tensor([0, 2, 5]))
    with raises(ModelError, "2 packed sequences", 1):
        seq_idx_from_cu_seqlens(queries, 5, of_keys=torch.tensor([0, 5]))
    for keys in (queries, queries.clone()):
        assert seq_idx_from_cu_seqlens(queries, 5, of_keys=keys).tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("seq_idx", [torch.zeros(2, 5), torch.zeros(1, 6).int(), torch.zeros(1, 5).long()])
def test_numbers_that_do_not_fit_the_rows_are_refused(seq_idx: torch.Tensor) -> None:
    tensors = draw({"q": (1, 5, 1, K), "k": (1, 5, 1, K), "v": (1, 5, H, V), "W": (H, V, V), "f": (1, 5, H)}, 0)
    for recurrence in (m2rnn_sequential, m2rnn_chunked):
        with pytest.raises(ModelError, match=r"expected torch.int32 \[B, S\] = \[1, 5\]"):
            recurrence(*tensors.values(), seq_idx=seq_idx)
