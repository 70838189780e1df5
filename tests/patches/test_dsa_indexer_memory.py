"""The patch dsa-indexer-memory against the real stock functions, in float64 and float32, and what it holds in memory.

Legend: S queries, T keys, B batch, H indexer heads, D indexer width, A attention heads, K attention width, N selected keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.backends import observed, probes
from megacpp_mcore.ops.indexer import chunked, reference
from megacpp_mcore.ops.indexer.deferred import DeferredScores
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.patches.dsa_indexer_memory import PATCH
from tests import stock
from tests.dsa_layer import (
    ONE_RANK,
    Recorder,
    dsa,
    dsa_attention,
    dsa_config,
    elements,
    layer_inputs,
    run_layer,
    stock_in_double,
)
from tests.lanes import exhaustive_but

SCALE, COEFFICIENT, GRAD_LOSS = 24**-0.5, 0.7, 1.3
SELECTIONS = ("none", "bounds", "packed", "positions")
MASKS = ("mask", "mask of each row", "mask with biases")


@contextlib.contextmanager
def patched(block: int | None = None, double: bool = False) -> Iterator[None]:
    """The replacements in the place of stock's functions, with blocks of ``block`` elements, computing in float64."""
    ours = {edit.target.partition(":")[2]: edit for edit in PATCH.edits}
    with contextlib.ExitStack() as changes:
        if block is not None:
            changes.enter_context(mock.patch.object(chunked, "BLOCK_ELEMENTS", block))
        if double:
            for module in (chunked, reference):
                changes.enter_context(mock.patch.object(module, "compute_dtype", return_value=torch.float64))
        for name, edit in ours.items():
            changes.enter_context(mock.patch.object(dsa(), name, edit.make(getattr(dsa(), name))))
        yield


def case(S: int, T: int, *, B: int = 2, H: int = 4, A: int = 5, shared_key: bool = True, dtype: Any = torch.float32) -> Any:
    """Inputs of one call; ``shared_key``: one attention key head, expanded as DSAttention does for absorbed MLA."""
    generator = torch.Generator().manual_seed(S * 1000 + T)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    key = draw(T, B, 1, 24).expand(-1, -1, A, -1) if shared_key else draw(T, B, A, 24)
    return SimpleNamespace(q=draw(S, B, H, 16), k=draw(T, B, 16), weights=draw(S, B, H) / 8, query=draw(S, B, A, 24), key=key)


def selection(kind: str, S: int, T: int, B: int = 2) -> dict[str, torch.Tensor]:
    """Which keys a query sees, as keyword arguments of the stock functions; some rows see none."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.arange(S)
    if kind == "none":
        return {}
    if kind in MASKS:
        shape = (S, T) if kind == "mask" else (B, S, T)
        mask = torch.zeros(shape).masked_fill(torch.rand(shape, generator=generator) < 0.4, float("-inf"))
        mask[..., S // 2, :] = float("-inf")
        if kind == "mask with biases":
            mask += torch.randn(shape, generator=generator) / 4
        return {"mask": mask}
    if kind == "packed":
        first = S // 3
        starts, ends = torch.where(rows < first, 0, first), (rows + 1).clamp(max=T)
        ends[S // 2] = starts[S // 2]
        return {"varlen_starts": starts, "varlen_ends": ends}
    bounds = {"varlen_starts": torch.zeros(S, dtype=torch.int32), "varlen_ends": (rows + 1).clamp(max=T)}
    return bounds | ({"key_positions": torch.randperm(T, generator=generator)} if kind == "positions" else {})


def topk(inputs: Any, count: int, **options: Any) -> Any:
    return dsa().fused_qk_topk_naive(inputs.q, inputs.k, inputs.weights, count, **options)


def loss_and_gradients(
    inputs: Any, count: int, sparse: bool, groups: Any = ONE_RANK, index: torch.Tensor | None = None, **options: Any
) -> Any:
    """``(index_BSN, loss, (grad_q, grad_w, grad_k))`` of the forward function, and of the backward function on ``index``."""
    mask = options.pop("mask", None)
    attention = (inputs.query, inputs.key)
    grad_loss = torch.tensor(GRAD_LOSS, device=inputs.q.device)
    with torch.no_grad():
        chosen, loss = dsa().fwd_fused_indexer_loss_naive(
            inputs.q, inputs.weights, inputs.k, *attention, count, SCALE, COEFFICIENT, mask, sparse, groups, **options
        )
        gradients = dsa().bwd_fused_indexer_loss_naive(
            inputs.q, inputs.weights, inputs.k, *attention, chosen if index is None else index, SCALE, COEFFICIENT,
            sparse, mask, grad_loss, groups, **options
        )  # fmt: skip
    return chosen, loss, gradients


def assert_same_selection(ours: torch.Tensor, stocks: torch.Tensor, score_BST: torch.Tensor) -> None:
    """Equal sets, but for keys whose scores differ from the lowest selected one by no more than rounding."""
    assert torch.equal((ours >= 0).sum(-1), (stocks >= 0).sum(-1))
    chosen = []
    for index in (ours, stocks):
        assert int(index.max()) < score_BST.shape[-1]
        # In int32, since a GPU has no such reduction of bool.
        where = torch.zeros_like(score_BST, dtype=torch.int32)
        where.scatter_reduce_(-1, index.clamp_min(0), (index >= 0).int(), reduce="amax")
        assert torch.equal(where.sum(-1), (index >= 0).sum(-1)), "a key was selected twice"
        chosen.append(where.bool())
    worst = score_BST.masked_fill(~chosen[1], float("inf")).amin(-1, keepdim=True).expand_as(score_BST)
    odd = chosen[0] != chosen[1]
    assert torch.allclose(score_BST[odd], worst[odd], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_float32(dtype: Any, relu: bool) -> None:
    inputs, options = case(61, 61, dtype=dtype), {"use_relu": relu, **selection("bounds", 61, 61)}

    def results() -> Any:
        score, index = topk(inputs, 9, **options)
        _, loss, gradients = loss_and_gradients(inputs, 9, True, **options)
        return score + 0, index, loss, gradients

    score, index, loss, gradients = results()
    with patched(700):
        ours_score, ours, ours_loss, ours_gradients = results()
    torch.testing.assert_close(ours_score, score, rtol=1e-5, atol=1e-6)
    assert_same_selection(ours, index, score)
    assert ours_loss.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(ours_loss, loss, rtol=1e-5, atol=0)
    for ours_gradient, gradient in zip(ours_gradients, gradients, strict=True):
        assert ours_gradient.dtype == gradient.dtype == dtype
        # One unit of the 16-bit rounding of the result, and no more.
        assert_parity(ours_gradient, gradient, rms=2e-3 if dtype == torch.bfloat16 else 1e-3)


LOSSES: list[dict[str, Any]] = [
    {"use_relu": False},
    {"calculate_per_token_loss": True},
    {"query_valid_rows": "half"},
    {"query_valid_rows": "half", "calculate_per_token_loss": True, "use_relu": False},
    {"query_valid_rows": "zero"},
]
SHAPES = [(1, 1, 1), (2, 2, 9), (37, 37, 37), (19, 47, 5), (47, 19, 64), (235, 235, 31)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [(kind, {}, (53, 53, 6)) for kind in (*SELECTIONS, *MASKS)]
    + [(kind, options, (53, 53, 6)) for kind in ("packed", "mask of each row") for options in LOSSES]
    + [("bounds", {}, shape) for shape in SHAPES],
    ids=str,
)
def test_selection_loss_and_gradients_are_stocks(
    kind: str, options: dict[str, Any], shape: tuple[int, int, int], sparse: bool
) -> None:
    S, T, count = shape
    options = options | selection(kind, S, T)
    if rows := options.pop("query_valid_rows", None):
        real = torch.rand(2, S, generator=torch.Generator().manual_seed(1)) < 0.5
        options["query_valid_rows"] = real if rows == "half" else real[0] & False
    for shared_key in (True, False):
        compare_with_stock(case(S, T, shared_key=shared_key), count, sparse, options)


def compare_with_stock(inputs: Any, count: int, sparse: bool, options: dict[str, Any]) -> None:
    """In float64 the same but for the rounding of the results to float32, in float32 as near to that as stock is."""
    topk_options = options.keys() & {"mask", "varlen_starts", "varlen_ends", "key_positions", "use_relu"}
    how = {name: options[name] for name in topk_options}
    score = topk(inputs, count, **how)[0]
    index, loss, gradients = loss_and_gradients(inputs, count, sparse, **options)
    truth, truth_loss, block = gradients, loss, 80 * inputs.k.shape[0]  # 8 queries a chunk
    if "mask" not in options:  # stock asserts that masks have the scores' dtype, and float64 scores have no such mask
        with stock_in_double():
            truth_index, truth_loss, truth = loss_and_gradients(inputs, count, sparse, index=index, **options)
        with patched(block, double=True):
            exact_index, exact_loss, exact = loss_and_gradients(inputs, count, sparse, index=index, **options)
        assert_same_selection(exact_index, truth_index, score.double())
        torch.testing.assert_close(exact_loss, truth_loss, rtol=1e-12, atol=1e-15)
        for name, ours, stocks in zip("qwk", exact, truth, strict=True):
            assert_parity(ours, stocks, rms=1e-6, name=f"grad {name}")
    with patched(block):
        ours_score, ours_topk = topk(inputs, count, **how)
        ours_index, ours_loss, ours_gradients = loss_and_gradients(inputs, count, sparse, index=index, **options)
    torch.testing.assert_close(ours_score + 0, score, rtol=1e-5, atol=1e-6)
    for ours in (ours_topk, ours_index):
        assert (ours.dtype, ours.shape) == (torch.int64, index.shape)
        assert_same_selection(ours, index, score)
    assert (ours_loss.dtype, ours_loss.shape) == (loss.dtype, loss.shape)
    torch.testing.assert_close(ours_loss.double(), truth_loss.double(), rtol=1e-5, atol=1e-7)
    for name, ours, stocks, peer in zip("qwk", ours_gradients, truth, gradients, strict=True):
        assert (ours.dtype, ours.shape) == (stocks.dtype, stocks.shape)
        if stocks.abs().max() < 1e-9:  # one key, or no row that counts: nothing but rounding, in stock too
            assert ours.abs().max() < 1e-8
        else:
            assert_parity(ours, stocks, rms=3e-4, name=f"grad {name}")
            if stocks is not peer:
                assert_parity(ours, stocks, rms=3e-4, max_abs_factor=4, dtype_peer=peer, name=f"grad {name}")


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_sum_their_targets() -> None:
    """Two ranks with half of the heads each: what the other one holds is added where stock calls all_reduce."""
    inputs, options = case(37, 37, A=6), selection("bounds", 37, 37)
    unsharded = loss_and_gradients(inputs, 5, True, **options)
    group = SimpleNamespace(size=lambda: 2)
    parts = [SimpleNamespace(**{**vars(inputs), "query": inputs.query[:, :, half], "key": inputs.key[:, :, half]})
             for half in (slice(0, 3), slice(3, 6))]  # fmt: skip
    targets: list[torch.Tensor] = []
    with patched(900):
        with mock.patch.object(torch.distributed, "all_reduce", lambda t, group: targets.append(t.clone())):
            loss_and_gradients(parts[1], 5, True, SimpleNamespace(tp=group), **options)
        assert len(targets) > 4
        left = iter(targets)
        with mock.patch.object(torch.distributed, "all_reduce", lambda t, group: t.add_(next(left))):
            index, loss, gradients = loss_and_gradients(parts[0], 5, True, SimpleNamespace(tp=group), **options)
    assert list(left) == []
    assert torch.equal(index, unsharded[0])
    torch.testing.assert_close(loss, unsharded[1], rtol=1e-5, atol=0)
    for ours, expected in zip(gradients, unsharded[2], strict=True):
        assert_parity(ours, expected, rms=3e-4)


BLOCK = 2**14


def recorded(run: Callable[[], Any]) -> Recorder:
    with Recorder() as recorder:
        run()
    return recorder


@pytest.mark.parametrize("sparse", exhaustive_but([True, False], True))
@pytest.mark.parametrize("shared_key", exhaustive_but([True, False], True))
def test_nothing_of_all_pairs_is_ever_made(sparse: bool, shared_key: bool) -> None:
    """Stock makes [S, B, H, T] and [B·A, S, T]; with the patch nothing is as large as even [B, S, T]."""
    S, B, H, A = 512, 1, 8, 6
    inputs, options = case(S, S, B=B, H=H, A=A, shared_key=shared_key), selection("bounds", S, S, B)

    def run() -> Any:
        return topk(inputs, 16, **options), loss_and_gradients(inputs, 16, sparse, **options)

    stocks = recorded(run)
    assert elements(stocks.largest) >= S * B * max(H, A) * S
    with patched(BLOCK):
        ours = recorded(run)
    assert elements(ours.largest) < B * S * S
    small = sum(tensor.numel() * 4 for tensor in (inputs.q, inputs.k, inputs.weights, inputs.key[:, :, :1]))
    small += S * B * 16 * 12 * 2  # indices and scores of two selections
    # Three blocks with heads, as much again without them (a handful of [B, R, T] and [B, R, N]), and what is linear in S.
    assert ours.peak_bytes <= 6 * 4 * BLOCK + 3 * small + (0 if shared_key else 2 * inputs.key.nbytes)
    assert stocks.peak_bytes > 20 * ours.peak_bytes


def test_scores_are_computed_once_and_only_if_somebody_reads_them() -> None:
    inputs = case(37, 37)
    expected = topk(inputs, 5)[0]
    with patched(), mock.patch.object(chunked, "indexer_scores", wraps=chunked.indexer_scores) as computed:
        scores, index = topk(inputs, 5)
        assert (index.shape, scores.shape, scores.dtype, scores.dim()) == ((2, 37, 5), (2, 37, 37), torch.float32, 3)
        assert isinstance(scores, torch.Tensor)
        assert not scores.requires_grad
        assert "not computed" in repr(scores)
        assert computed.call_count == 0
        torch.testing.assert_close(scores.topk(2).values, expected.topk(2).values)
        torch.testing.assert_close(torch.cat([scores, scores]), torch.cat([expected] * 2))
        assert type(scores + 0) is torch.Tensor
        once = computed.call_count
        scores += 1  # stock's compute_dsa_indexer_loss adds its mask so
        torch.testing.assert_close(scores + 0, expected + 1)
        assert computed.call_count == once > 0


def test_notes_say_which_kernels_are_not_for_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "arch", lambda: "sm_100")
    observed.forget()
    with patched():
        topk(case(11, 11), 5)
    (note,) = observed.notes()
    assert "indexer_grad: its kernels are for sm_90, and this GPU is sm_100: does not compile" in note["reason"]
    assert "indexer:" not in note["reason"]
    observed.forget()


def test_notes_say_what_computed_a_call() -> None:
    inputs = case(11, 11, dtype=torch.bfloat16)
    observed.forget()
    with patched():
        topk(inputs, 5)
        loss_and_gradients(inputs, 5, True)
        topk(SimpleNamespace(**vars(inputs) | {"q": inputs.q.double()}), 5)
    ours, stocks = observed.notes()
    assert (ours["observed"], ours["reason"]) == ("chunked", "the patch dsa-indexer-memory, all in PyTorch")
    assert (stocks["observed"], stocks["slower_than_best"]) == ("megatron", True)
    observed.forget()


def test_what_is_out_of_scope_is_left_to_stock() -> None:
    """The inputs, keys to select, whether gradients are wanted; and who answers, or stock's own error."""
    q, ones, bounds = case(11, 11).q, torch.ones(11, 11), selection("bounds", 11, 11)
    trained = {"q": q.clone().requires_grad_()}
    for change, count, grad, expected in (
        ({}, 5, False, "ours"),
        (trained, 5, False, "ours"),
        (trained, 5, True, "stock"),
        ({"q": q.double()}, 5, False, "stock"),
        ({"mask": ones[None, :1]}, 5, False, "stock"),
        ({}, 0, False, "stock"),
        (bounds | {"mask": ones}, 5, False, "ValueError: mask and varlen_starts"),
        ({"varlen_starts": bounds["varlen_starts"]}, 5, False, "ValueError: varlen_ends is required"),
        ({"mask": ones.double()}, 5, False, "AssertionError: Mask dtype"),
        ({"k": torch.zeros(11, 3, 16)}, 5, False, "RuntimeError"),
    ):
        options: dict[str, Any] = vars(case(11, 11)) | change
        inputs = SimpleNamespace(**{name: options.pop(name) for name in ("q", "k", "weights", "query", "key")})
        with patched(), torch.set_grad_enabled(grad):
            try:
                answer = "ours" if type(topk(inputs, count, **options)[0]) is DeferredScores else "stock"
            except (AssertionError, ValueError, RuntimeError) as error:
                answer = f"{type(error).__name__}: {error}"
        assert answer.startswith(expected)
    with patched(), torch.autocast("cpu", torch.bfloat16):
        assert type(topk(case(11, 11), 5)[0]) is not DeferredScores


@pytest.mark.exhaustive
def test_a_loss_out_of_scope_is_left_to_stock() -> None:
    inputs = case(11, 11)
    wide = SimpleNamespace(**{**vars(inputs), "query": inputs.query.double()})
    stocks = loss_and_gradients(wide, 3, True)
    with patched(), mock.patch.object(chunked, "sparse_divergence", side_effect=AssertionError):
        ours = loss_and_gradients(wide, 3, True)
        with pytest.raises(AssertionError):
            loss_and_gradients(inputs, 3, True)
    assert torch.equal(ours[1], stocks[1])
    with patched(), pytest.raises(ValueError, match="query_valid_rows length mismatch"):
        loss_and_gradients(inputs, 3, True, query_valid_rows=torch.ones(4))


@pytest.mark.parametrize("sparse", exhaustive_but([True, False], True))
@pytest.mark.parametrize("masked", exhaustive_but([True, False], False))
def test_a_stock_layer_trains_the_same(process: Path, sparse: bool, masked: bool) -> None:
    torch.manual_seed(3)
    attention = dsa_attention(dsa_config(dsa_indexer_use_sparse_loss=sparse)).train()
    inputs = layer_inputs(45, 2)
    options: dict[str, Any] = {}
    if masked:
        hidden = torch.rand(2, 1, 45, 45, generator=torch.Generator().manual_seed(2)) < 0.3
        options = {"attn_mask_type": None, "attention_mask": hidden | ~torch.ones(45, 45, dtype=torch.bool).tril()}

    def results() -> list[torch.Tensor]:
        stock.loss_scale(1.0)
        output = run_layer(attention, inputs, **options)
        leaves = [*inputs.values(), *attention.parameters()]
        gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
        named = zip([*inputs, *(name for name, _ in attention.named_parameters())], gradients, strict=True)
        return [output, *(gradient for name, gradient in named if name not in ("x", "qr"))]

    stocks = results()
    with patched(2000):
        ours = results()
        with torch.no_grad():
            assert torch.equal(run_layer(attention.eval(), inputs, **options), stocks[0])
    assert len(ours) == 4 + 5
    for actual, expected in zip(ours, stocks, strict=True):
        assert expected.abs().sum() > 0
        assert_parity(actual, expected, rms=3e-4)
