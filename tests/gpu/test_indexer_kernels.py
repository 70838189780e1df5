"""The indexer's kernels on a GPU: the selection of keys against float64, the gradient's parity, no wait, CUDA graphs.

Shape legend: S queries and keys, T keys where their number differs, B batch, H indexer heads, D indexer head width, N selected
keys.
"""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops.indexer import chunked, reference
from megacpp_mcore.ops.indexer import triton as fused
from megacpp_mcore.ops.testing import assert_parity
from tests.gpu.device import assert_replays, peak, without_waiting
from tests.ops.indexer_case import (
    as_one_projection,
    assert_gradients,
    assert_selected,
    check_all_keys,
    check_not_finite,
    draw,
    draw_documents,
    draw_exact,
    draw_rules,
    draw_target,
)
from tests.patches.test_dsa_indexer_memory import assert_same_selection

pytestmark = pytest.mark.usefixtures("filled")

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("topk", [1, 64, 256, 300])
@pytest.mark.parametrize(("S", "H"), [(1, 32), (63, 1), (333, 5), (777, 100), (1000, 64), (4096, 32)])
def test_selection(S: int, H: int, topk: int, documents: bool, dtype: torch.dtype) -> None:
    inputs = draw(S, H=H, dtype=dtype, device="cuda")
    seq_idx = draw_documents(S, device="cuda", each=400) if documents else None
    index = fused.select(*inputs, topk, seq_idx)
    assert_selected(index, inputs, topk, seq_idx)
    assert all(torch.equal(fused.select(*inputs, topk, seq_idx), index) for _ in range(5))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("topk", [1, 64, 300, 5000])
@pytest.mark.parametrize("H", [1, 3, 32])
def test_ties_go_to_the_lower_key(H: int, topk: int, documents: bool) -> None:
    """Scores without rounding: the selection is the reference's, bit for bit. With one head, nearly all of them are 0."""
    q, k, w = inputs = draw_exact(1000, H=H, device="cuda")
    seq_idx = draw_documents(1000, device="cuda", each=300) if documents else None
    expected = reference.select(*inputs, topk, seq_idx)
    assert torch.equal(fused.select(*inputs, topk, seq_idx), expected)
    for first in (512, 700):
        assert torch.equal(fused.select(q[first:], k, w[first:], topk, seq_idx, first_row=first), expected[:, first:])


def test_strided_inputs() -> None:
    """As one projection would write them, in rows that begin anywhere; and columns, weights in float64."""
    q, k, w = draw(333, device="cuda")
    index = fused.select(q, k, w, 64)
    uneven = as_one_projection([q, k, w])
    assert torch.equal(fused.select(*uneven, 64), index)
    columns = (
        q.transpose(2, 3).contiguous().transpose(2, 3),
        k.transpose(0, 2).contiguous().transpose(0, 2),
        w.double(),
    )
    assert torch.equal(fused.select(*columns, 64), index)
    target = draw_target(index)
    dense, cut = (fused.indexer_grad(*inputs, index, target, 1.0) for inputs in ((q, k, w), uneven))
    assert all(torch.equal(dense[place], cut[place]) for place in (0, 1, 3))
    assert cut[1].shape == q.shape


def test_65536_rows() -> None:
    S = 65536
    inputs = draw(S, B=1, H=4, device="cuda")
    selected = {}
    used = peak(lambda: selected.update(index=fused.select(*inputs, 256)))
    assert used <= 5 * fused.SCRATCH + S * 256 * 4 + 2**20
    index = selected["index"]
    for rows in (slice(0, 300), slice(30000, 30064), slice(S - 64, S)):
        part = reference.score_block(inputs[0][rows].double(), inputs[1].double(), inputs[2][rows].double())
        expected = reference.causal_topk(part, 256, first_row=rows.start)
        same = (index[:, rows] == expected).all(-1)
        assert float(same.double().mean()) > 0.95


@pytest.fixture(params=["any order", "deterministic"])
def _order(request: pytest.FixtureRequest, filled: None) -> None:  # after it, which turns deterministic mode on
    """What queries add to a key's gradient: in float32, and in integers."""
    torch.use_deterministic_algorithms(request.param == "deterministic", warn_only=True)


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("S", "topk", "H"), [(2000, 256, 32), (333, 300, 32), (333, 64, 5), (400, 100, 64), (333, 600, 16), (50, 1, 32)]
)
def test_gradient(S: int, topk: int, H: int, dtype: torch.dtype) -> None:
    """Every query of the longest selects key 0; its integer sums are the same bits each time."""
    inputs = draw(S, H=H, dtype=dtype, device="cuda")
    index = reference.select(*inputs, topk, draw_documents(S, device="cuda", each=300))
    if S == 2000:
        index[..., 0] = 0
    index[1, 5] = -1
    target = draw_target(index)
    outputs = fused.indexer_grad(*inputs, index, target, 700.0)
    if topk > 1:
        assert_gradients(outputs, inputs, index, target, 700.0)
    if torch.are_deterministic_algorithms_enabled():
        for _ in range(10):
            assert all(map(torch.equal, fused.indexer_grad(*inputs, index, target, 700.0), outputs))
    assert torch.equal(outputs[1][7, 0], torch.zeros_like(outputs[1][7, 0]))
    assert torch.equal(outputs[1][5, 1], torch.zeros_like(outputs[1][5, 1]))
    assert torch.equal(outputs[3][7, 0], torch.zeros_like(outputs[3][7, 0]))


@pytest.mark.usefixtures("_order")
def test_gradient_of_nan_is_nan() -> None:
    q, k, w = draw(300, device="cuda")
    index = reference.select(q, k, w, 64)
    q[100, 0, 3] = float("nan")
    loss, dq, dk, dw = fused.indexer_grad(q, k, w, index, draw_target(index), 1.0)
    assert bool(loss.isnan())
    assert bool(dq[100, 0, 4].isnan().all())
    assert bool(dw[100, 0].isnan().all())
    assert bool(dk[index[0, 100][index[0, 100] >= 0].long(), 0].isnan().all())
    assert bool(dq[:100].isfinite().all())


def test_nothing_waits_and_a_graph_replays() -> None:
    inputs, others = draw(601, device="cuda"), draw(601, device="cuda", seed=1)
    seq_idx, factor = draw_documents(601, device="cuda", each=200), torch.tensor(3.0, device="cuda")

    def both() -> list[torch.Tensor]:
        index = fused.select(*inputs, 64, seq_idx)
        target = torch.where(index < 0, 0.0, index.sin().abs())
        return [index, *fused.indexer_grad(*inputs, index, target, factor)]

    assert_replays(both, inputs, others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", fused.SCORE_ALL)
@pytest.mark.parametrize("H", [1, 32, 64])
@pytest.mark.parametrize(("S", "T"), [(1, 1), (333, 1000), (1000, 333), (640, 1024)])
def test_scores_of_all_keys(S: int, T: int, H: int, D: int, dtype: torch.dtype) -> None:
    check_all_keys(fused.score_all, S, T, H, D, dtype, "cuda")
    check_not_finite(fused.score_all, D, dtype, "cuda")


@pytest.mark.parametrize("topk", [1, 64, 2000])
@pytest.mark.parametrize("rule", ["none", "within", "additive"])
@pytest.mark.parametrize("D", fused.SCORE_ALL)
@pytest.mark.parametrize(("S", "T"), [(1000, 777), (777, 1024)])
def test_chunks_select_what_pytorch_scores_select(
    S: int, T: int, D: int, rule: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 2 * T * 300)  # several chunks
    hides = draw_rules(S, T, device="cuda")[rule]
    for exact in (False, True):
        indexer = chunked.Indexer(*draw(S, D=D, T=T, device="cuda", exact=exact))
        selections = []
        for kernel in (True, False):
            with monkeypatch.context() as patch:
                if not kernel:
                    patch.setattr(chunked, "_runs_kernels", lambda device: False)
                assert indexer.by_kernel == kernel
                selections.append((*chunked.select(indexer, topk, hides), chunked.indexer_scores(indexer, hides)))
        (ours_best, ours, ours_score), (best, index, score) = selections
        assert_same_selection(ours, index, score)
        for selected, expected in ((ours_best, best), (ours_score, score)):
            torch.testing.assert_close(selected, expected, rtol=1e-5, atol=0 if exact else 1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rule", ["causal", "within"])
@pytest.mark.parametrize(("width", "heads"), [(128, 56), (128, 14), (576, 128)])
def test_the_sparse_loss_and_its_gradients_are_pytorchs(
    width: int, heads: int, rule: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    S = 700
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    q, k, w = draw_exact(S, device="cuda")  # no logit rounds to the other side of ReLU's step
    indexer = chunked.Indexer(q, k, w / 16)
    query, key, _ = draw(S, H=heads, D=width, device="cuda", seed=1)
    attention = chunked.Attention(query, key[:, :, None], width**-0.5)
    keys = chunked.KeyRule.causal(S, S, query.device) if rule == "causal" else draw_rules(S, S, device="cuda")["within"]
    assert keys is not None
    best_BSN, index_BSN = chunked.select(indexer, 100, keys)
    weight, rows_BS = (
        torch.tensor(700.0, device="cuda"),
        (torch.arange(2 * S, device="cuda") % 7 > 0).view(2, S).float(),
    )
    outputs = []
    for kernel in (True, False):
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(chunked, "_runs_kernels", lambda device: False)
            assert attention.by_kernel(keys) == kernel == indexer.learns_by_kernel
            loss_BS = chunked.sparse_divergence(attention, best_BSN, index_BSN, keys)
            outputs.append((loss_BS, *chunked.sparse_backward(indexer, attention, index_BSN, keys, weight, rows_BS)))
    for name, ours, plain in zip(("loss", "dq", "dw", "dk"), *outputs, strict=True):
        assert ours.dtype == plain.dtype
        assert_parity(ours, plain.double(), rms=1e-4 if name == "loss" else 1e-2, name=name)


@pytest.mark.parametrize("rule", ["causal", "within"])
@pytest.mark.parametrize("D", fused.SCORE_ALL)
@pytest.mark.parametrize(("width", "heads"), [(128, 56), (576, 16)])
def test_the_dense_loss_and_its_gradients_are_pytorchs(
    width: int, heads: int, D: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks of queries; the same bits each time, nothing waits, and no tensor has both heads and all pairs."""
    S = 700
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 2 * S * 300)
    q, k, w = draw_exact(S, D=D, device="cuda")  # no logit rounds to the other side of ReLU's step
    indexer = chunked.Indexer(q, k, w / 16)
    query, key, _ = draw(S, H=heads, D=width, device="cuda", seed=1)
    attention = chunked.Attention(query, key[:, :, None], width**-0.5)
    keys = chunked.KeyRule.causal(S, S, query.device) if rule == "causal" else draw_rules(S, S, device="cuda")["within"]
    assert keys is not None
    weight_BS = 100.0 * (torch.arange(2 * S, device="cuda") % 7).view(2, S)

    def run() -> list[torch.Tensor]:
        divergence_BS = chunked.dense_divergence(indexer, attention, (None, keys))
        return [divergence_BS, *chunked.dense_backward(indexer, attention, keys, weight_BS)]

    assert attention.by_kernel(keys)
    assert indexer.by_kernel
    outputs = run()
    with without_waiting():
        again = run()
    bytes_of_pairs = 2 * S * S * 4
    assert peak(run) < 8 * bytes_of_pairs
    monkeypatch.setattr(chunked, "_runs_kernels", lambda device: False)
    for name, ours, same, plain in zip(("loss", "loss again", "dq", "dw", "dk"), outputs, again, run(), strict=True):
        assert ours.dtype == plain.dtype
        assert torch.equal(ours, same), name
        assert_parity(ours, plain.double(), rms=1e-4 if name.startswith("loss") else 1e-2, name=name)


def test_scores_of_all_keys_wait_for_nothing_and_a_graph_replays() -> None:
    inputs, others = (draw(601, D=128, T=900, device="cuda", seed=seed) for seed in (0, 1))
    indexer, rules = chunked.Indexer(*inputs), draw_rules(601, 900, device="cuda")
    assert indexer.by_kernel

    def run() -> list[torch.Tensor]:
        return [
            tensor
            for rule in rules.values()
            for tensor in (*chunked.select(indexer, 64, rule), chunked.indexer_scores(indexer, rule))
        ]

    assert_replays(run, inputs, others)
