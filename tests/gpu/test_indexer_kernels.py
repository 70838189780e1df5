"""The indexer's kernels on a GPU: the selection of keys against float64, the gradient's parity, no wait, CUDA graphs.

Shape legend: S queries and keys, T keys where their number differs, B batch, H indexer heads, D indexer head width, N selected
keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megacpp_mcore.ops.indexer import chunked, reference
from megacpp_mcore.ops.indexer import triton as fused
from megacpp_mcore.ops.testing import assert_parity
from tests.gpu.device import assert_replays, peak, without_waiting
from tests.ops.indexer_case import (
    as_one_projection,
    assert_gradients,
    assert_scored,
    assert_selected,
    draw,
    draw_documents,
    draw_exact,
    draw_rules,
    draw_target,
)
from tests.patches.test_dsa_indexer_memory import assert_same_selection

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that is not written first reads as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("topk", [1, 64, 256, 300])
@pytest.mark.parametrize("S", [1, 63, 333, 1000, 4096])
def test_selection(S: int, topk: int, documents: bool, dtype: torch.dtype) -> None:
    inputs = draw(S, dtype=dtype, device="cuda")
    seq_idx = draw_documents(S, device="cuda", each=400) if documents else None
    assert_selected(fused.select(*inputs, topk, seq_idx), inputs, topk, seq_idx)


@pytest.mark.parametrize("H", [1, 5, 64, 100])
def test_selection_by_other_numbers_of_heads(H: int) -> None:
    inputs = draw(777, B=3, H=H, device="cuda")
    assert_selected(fused.select(*inputs, 100), inputs, 100)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("topk", [1, 64, 300, 5000])
@pytest.mark.parametrize("H", [1, 3, 32])
def test_ties_go_to_the_lower_key(H: int, topk: int, documents: bool) -> None:
    """Scores without rounding: the selection is the reference's, bit for bit. With one head, nearly all of them are 0."""
    inputs = draw_exact(1000, H=H, device="cuda")
    seq_idx = draw_documents(1000, device="cuda", each=300) if documents else None
    assert torch.equal(fused.select(*inputs, topk, seq_idx), reference.select(*inputs, topk, seq_idx))


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_zero(sign: int) -> None:
    """ReLU leaves nothing of any head: 0, or -0 for a negative weight."""
    q, k, w = draw(700, device="cuda")
    index_BSN = fused.select(-q.abs(), k.abs(), sign * w.abs(), 64)
    expected = torch.arange(64, device="cuda", dtype=torch.int32).expand(700, 64)
    visible = expected <= torch.arange(700, device="cuda")[:, None]
    assert torch.equal(index_BSN, expected.where(visible, -1).expand(2, -1, -1))


def test_infinities_and_nan() -> None:
    q, k, w = draw_exact(500, H=3, device="cuda")
    k[[30, 31, 90], 0, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=k.dtype, device="cuda")
    for _ in range(2):
        for topk in (1, 2, 70):
            assert torch.equal(fused.select(q, k, w, topk), reference.select(q, k, w, topk))
        k[100:400:3] = float("nan")  # more keys of the highest rank than are selected


def test_huge_scores_beside_small_ones() -> None:
    """A search by value alone would need a hundred steps."""
    q, k, w = draw(1000, H=3, device="cuda")
    k[5:9] *= 1e30
    expected = reference.select(q, k, w, 64)
    same = (fused.select(q, k, w, 64) == expected).all(-1)
    assert float(same.double().mean()) > 0.98


def test_strided_inputs() -> None:
    q, k, w = draw(333, device="cuda")
    wide = torch.cat([q.flatten(2), k, w], dim=2)  # as one projection would write them
    strided = (wide[..., :2048].unflatten(2, (32, 64)), wide[..., 2048:2112], wide[..., 2112:])
    index = fused.select(q, k, w, 64)
    assert torch.equal(fused.select(*strided, 64), index)
    uneven = torch.cat([wide, w[..., :3]], dim=2)[..., :-3]  # rows that begin anywhere
    strided = (uneven[..., :2048].unflatten(2, (32, 64)), uneven[..., 2048:2112], uneven[..., 2112:])
    assert torch.equal(fused.select(*strided, 64), index)
    columns = (
        q.transpose(2, 3).contiguous().transpose(2, 3),
        k.transpose(0, 2).contiguous().transpose(0, 2),
        w.double(),
    )
    assert torch.equal(fused.select(*columns, 64), index)
    target = draw_target(index)
    dense, cut = (fused.indexer_grad(*inputs, index, target, 1.0) for inputs in ((q, k, w), strided))
    for place in (0, 1, 3):
        assert torch.equal(dense[place], cut[place])
    assert cut[1].shape == q.shape


def test_a_small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and groups of the batch, give the same bits."""
    inputs = draw(1500, B=3, device="cuda")
    seq_idx = draw_documents(1500, B=3, device="cuda", each=500)
    expected = fused.select(*inputs, 256, seq_idx)
    monkeypatch.setattr(fused, "SCRATCH", 64 * 2000)
    assert len(list(fused.chunks(1500, 3))) > 30
    assert torch.equal(fused.select(*inputs, 256, seq_idx), expected)


def test_65536_rows() -> None:
    S = 65536
    inputs = draw(S, B=1, H=4, device="cuda")
    found = {}
    used = peak(lambda: found.update(index=fused.select(*inputs, 256)))
    assert used <= 4 * fused.SCRATCH + S * 256 * 4 + 2**20
    index = found["index"]
    for rows in (slice(0, 300), slice(30000, 30064), slice(S - 64, S)):
        part = reference.score_block(inputs[0][rows].double(), inputs[1].double(), inputs[2][rows].double())
        expected = reference.causal_topk(part, 256, first_row=rows.start)
        same = (index[:, rows] == expected).all(-1)
        assert float(same.double().mean()) > 0.95


def test_the_same_selection_each_time() -> None:
    inputs = draw(2000, device="cuda")
    first = fused.select(*inputs, 256)
    assert all(torch.equal(fused.select(*inputs, 256), first) for _ in range(50))


@pytest.fixture(params=["any order", "deterministic"])
def _order(request: pytest.FixtureRequest) -> None:
    """What queries add to a key's gradient: in float32, and in integers."""
    torch.use_deterministic_algorithms(request.param == "deterministic", warn_only=True)


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("S", "topk", "H"), [(1000, 256, 32), (333, 300, 32), (333, 64, 5), (400, 100, 64), (333, 600, 16), (50, 1, 32)]
)
def test_gradient(S: int, topk: int, H: int, dtype: torch.dtype) -> None:
    inputs = draw(S, H=H, dtype=dtype, device="cuda")
    index = reference.select(*inputs, topk, draw_documents(S, device="cuda", each=300))
    index[1, 5] = -1
    target = draw_target(index)
    found = fused.indexer_grad(*inputs, index, target, 700.0)
    if topk > 1:
        assert_gradients(found, inputs, index, target, 700.0)
    assert torch.equal(found[1][7, 0], torch.zeros_like(found[1][7, 0]))
    assert torch.equal(found[1][5, 1], torch.zeros_like(found[1][5, 1]))
    assert torch.equal(found[3][7, 0], torch.zeros_like(found[3][7, 0]))


@pytest.mark.usefixtures("_order")
def test_gradient_of_a_key_that_every_query_selects() -> None:
    inputs = draw(2000, device="cuda")
    inputs[1][0] *= 4
    index = reference.select(*inputs, 64)
    index[..., 0] = 0
    assert_gradients(
        fused.indexer_grad(*inputs, index, draw_target(index), 1.0), inputs, index, draw_target(index), 1.0
    )


def test_the_same_gradient_each_time() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    inputs = draw(2000, device="cuda")
    index = reference.select(*inputs, 256)
    first = fused.indexer_grad(*inputs, index, draw_target(index), 1.0)
    for _ in range(20):
        found = fused.indexer_grad(*inputs, index, draw_target(index), 1.0)
        assert all(torch.equal(have, want) for have, want in zip(found, first, strict=True))


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


# --- scores of all keys ------------------------------------------------------------------------------------------------


def scored(inputs: list[torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    """The kernel's scores of some queries, in the middle of a buffer that is otherwise left as it is."""
    (S, B), T = inputs[0].shape[:2], len(inputs[1])
    first, end, _ = rows.indices(S)
    buffer = torch.full((B, end - first + 2, T), float("nan"), device="cuda")
    fused.score_all(buffer[:, 1:-1], *inputs, first)
    assert bool(buffer[:, [0, -1]].isnan().all())
    return buffer[:, 1:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", fused.SCORE_ALL)
@pytest.mark.parametrize("H", [1, 32, 64])
@pytest.mark.parametrize(("S", "T"), [(1, 1), (333, 1000), (1000, 333), (640, 1024)])
def test_scores_of_all_keys(S: int, T: int, H: int, D: int, dtype: torch.dtype) -> None:
    rows = slice(S // 3, S - S // 4)
    for exact in (False, True):
        q, k, w = inputs = draw(S, H=H, D=D, T=T, dtype=dtype, device="cuda", exact=exact)
        part = [q[rows], k, w[rows]]
        for given in (inputs, as_one_projection(inputs), [q, k, w.float()]):
            found = scored(given, rows)
            assert_scored(found, part)
            if exact:
                assert torch.equal(found, reference.score_block(q[rows], k.float(), w[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", fused.SCORE_ALL)
def test_scores_of_all_keys_keep_nan_and_infinities(D: int, dtype: torch.dtype) -> None:
    q, k, w = draw(300, H=3, D=D, T=450, dtype=dtype, device="cuda")
    nan, inf = float("nan"), float("inf")
    k[[30, 31, 449], 0, 0] = torch.tensor([nan, inf, -inf], dtype=dtype, device="cuda")
    q[9, 1, 2, 5], q[11, 0, 1], w[13, 0, 2], w[20, 1, 1], w[40] = -inf, 0.0, nan, inf, 0.0
    assert_scored(scored([q, k, w]), [q, k, w])


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
        found = []
        for kernel in (True, False):
            with monkeypatch.context() as patch:
                if not kernel:
                    patch.setattr(chunked, "_runs_kernels", lambda device: False)
                assert indexer.by_kernel == kernel
                found.append((*chunked.select(indexer, topk, hides), chunked.indexer_scores(indexer, hides)))
        (ours_best, ours, ours_score), (best, index, score) = found
        assert_same_selection(ours, index, score)
        for have, want in ((ours_best, best), (ours_score, score)):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=0 if exact else 1e-5)


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
    found = []
    for kernel in (True, False):
        with monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(chunked, "_runs_kernels", lambda device: False)
            assert attention.by_kernel(keys) == kernel == indexer.learns_by_kernel
            loss_BS = chunked.sparse_divergence(attention, best_BSN, index_BSN, keys)
            found.append((loss_BS, *chunked.sparse_backward(indexer, attention, index_BSN, keys, weight, rows_BS)))
    for name, ours, plain in zip(("loss", "dq", "dw", "dk"), *found, strict=True):
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
    found = run()
    with without_waiting():
        again = run()
    bytes_of_pairs = 2 * S * S * 4
    assert peak(run) < 8 * bytes_of_pairs
    monkeypatch.setattr(chunked, "_runs_kernels", lambda device: False)
    for name, ours, same, plain in zip(("loss", "loss again", "dq", "dw", "dk"), found, again, run(), strict=True):
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


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="takes two GPUs: the kernel runs on one that is not the current one"
)
def test_scores_of_all_keys_on_another_device() -> None:
    q, k, w = draw(100, T=150, device="cuda")
    found = torch.full((2, 100, 150), float("nan"), device="cuda:1")
    fused.score_all(found, *(tensor.to("cuda:1") for tensor in (q, k, w)))
    assert torch.equal(found.to("cuda:0"), scored([q, k, w]))
