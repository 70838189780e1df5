"""Rows of tens of thousands of tokens on a GPU: windows, Mamba-3 in blocks of time, and what they need of its memory.

Shape legend: S queries and keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.model import preset
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.ops.indexer import reference as indexer_reference
from megacpp_mcore.ops.indexer import triton as indexer
from megacpp_mcore.ops.mamba3 import triton as fused
from megacpp_mcore.ops.mla import sdpa
from megacpp_mcore.ops.packed.documents import seq_idx_from_cu_seqlens
from megacpp_mcore.ops.testing import assert_parity
from tests import stock
from tests.gpu import runs
from tests.gpu.device import assert_same_bits, peak, replayed, without_waiting
from tests.gpu.test_mla_core_attention import draw, outcome, truth
from tests.ops import indexer_case
from tests.ops.mamba3_case import Case, make_tensors, run, with_gradients

SCALE = 128**-0.5
DOCUMENTS = (1000, 1, 346)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("S", "window", "lengths"),
    [(1347, 255, None), (1347, 255, DOCUMENTS), (1347, 5000, DOCUMENTS), (1347, 0, None), (4096, 1023, None)],
)
def test_a_window_is_the_references(S: int, window: int, lengths: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    inputs = draw(S, dtype=dtype)
    options: dict[str, object] = {"window": window}
    if lengths is not None:
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
        options["seq_idx"] = seq_idx_from_cu_seqlens(bounds, S).expand(2, S).contiguous()
    assert sdpa.fused_backend(*inputs[:3], **options) == SDPBackend.FLASH_ATTENTION  # type: ignore[arg-type]
    options["softmax_scale"] = SCALE
    outputs, expected = outcome(sdpa.sdpa_attention, inputs, **options), truth(inputs, **options)
    few = slice(16, None)  # of the first rows dq is next to nothing: see test_mla_core_attention.py
    for name, actual, want in zip(("o", "dq", "dk", "dv"), outputs, expected, strict=True):
        if window == 0 and name in ("dq", "dk"):  # a softmax over one key
            assert float(actual.abs().max()) < 1e-2
            continue
        rows = few if name == "dq" else slice(None)
        error = (actual[rows].double() - want[rows]).norm() / want[rows].norm()
        assert float(error) < 1e-2, name
        if name in ("o", "dv"):
            assert_parity(actual, want, rms=1.5e-2, name=name)


def test_a_window_makes_nobody_wait_and_is_captured() -> None:
    inputs, others = draw(512), draw(512)
    for tensor in others:
        tensor.detach().mul_(0.5)

    def both() -> list[torch.Tensor]:
        return outcome(sdpa.sdpa_attention, inputs, softmax_scale=SCALE, window=99)

    both()
    with without_waiting():
        both()
    expected = outcome(sdpa.sdpa_attention, others, softmax_scale=SCALE, window=99)
    for actual, want in zip(replayed(both, inputs, others), expected, strict=True):
        torch.testing.assert_close(actual, want)


def test_a_window_stores_no_scores() -> None:
    """NAM56R's heads at 32,768 tokens."""
    inputs = draw(32_768, B=1, H=56)
    assert peak(lambda: outcome(sdpa.sdpa_attention, inputs, softmax_scale=SCALE, window=4095)) < 6 * 2**30


@pytest.mark.parametrize(
    "case",
    [
        Case(1000, B=1),
        Case(1000, documents=(256, 400, 344), states=True),  # one begins where a block does
        Case(1000, N=128, B=1, states=True),
        Case(1000, R=1, mimo=False, documents=(256, 400, 344), states=True),
    ],
    ids=["odd", "documents", "state_128", "siso"],
)
def test_mamba_3_in_blocks_of_time_is_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(case)
    at_once = with_gradients(fused.mamba3, case, tensors)
    monkeypatch.setattr(fused.Plan, "block", 256)
    for name, blockwise in with_gradients(fused.mamba3, case, tensors).items():
        error = (blockwise.double() - at_once[name].double()).norm() / at_once[name].double().norm()
        assert float(error) < 1e-2, name
    assert_same_bits(lambda: with_gradients(fused.mamba3, case, tensors), 3)


def test_what_is_kept_changes_no_bit_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(700, B=1)
    tensors = make_tensors(case)
    monkeypatch.setattr(fused.Plan, "block", 256)
    expected = with_gradients(fused.mamba3, case, tensors)
    for op in (fused.mamba3_keep_scan, fused.mamba3_keep_all):
        for name, tensor in with_gradients(op, case, tensors).items():
            assert torch.equal(tensor, expected[name]), name


def test_the_scratch_of_mamba_3_does_not_grow_with_the_row() -> None:
    """Above the inputs and their gradient: 8 GiB at 32,768 tokens of NAM56R, where the whole row at once takes more than 10."""

    def needed(tokens: int) -> int:
        case = Case(tokens, B=1, H=112, G=8)
        tensors = make_tensors(case)
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}

        def both() -> None:
            (out,) = run(fused.mamba3, case, leaves)
            torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

        both()
        return peak(both)

    short, long = needed(8192), needed(32_768)
    assert long < 8 * 2**30, (short, long)
    assert long < 3 * short, (short, long)


@pytest.mark.parametrize("topk", [1, 64, 300])
@pytest.mark.parametrize("documents", [False, True])
def test_a_selection_by_near_scores_is_the_references(topk: int, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores without rounding, many of them equal; and few enough near the threshold that they fit at once, or late."""
    inputs = indexer_case.draw_exact(1000, H=3, device="cuda")
    seq_idx = indexer_case.draw_documents(1000, device="cuda", each=300) if documents else None
    expected = indexer_reference.select(*inputs, topk, seq_idx)
    for near in (16, 128, 4096):
        monkeypatch.setattr(indexer, "LONG_ROW", 0)
        monkeypatch.setattr(indexer, "TAKE_BEST", indexer.TAKE_BEST | {"NEAR": near})
        assert torch.equal(indexer.select(*inputs, topk, seq_idx), expected), near


@pytest.mark.parametrize("topk", [256, 2048])
def test_a_selection_of_long_rows_is_that_of_short_ones(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = indexer_case.draw(40_000, B=1, device="cuda")
    selected = indexer.select(*inputs, topk)
    monkeypatch.setattr(indexer, "LONG_ROW", 10**9)
    assert torch.equal(selected, indexer.select(*inputs, topk))


@pytest.mark.slow
def test_what_is_recomputed_trains_alike(tmp_path: Path) -> None:
    """By Transformer Engine, whose linear layers add to the gradients themselves; MTP's feed-forward part in two chunks."""
    losses = {}
    for name, families, words in (
        ("nothing", [], ()),
        ("families", ["a", "m", "r", "experts", "mtp"], ()),
        ("whole layers", ["mtp"], stock.full_recompute()),
    ):
        file, record = tmp_path / f"{name}.json", tmp_path / name
        file.write_text(json.dumps({"model": "nam56r_tiny_long", "recompute": families}))
        sizes = {"micro_batch_size": 16, "global_batch_size": 16, "train_iters": 4}
        runs.train(runs.words_of(preset("nam56r_tiny_long"), *words, **sizes), record, MEGACPP_CONFIG=str(file))
        losses[name] = [step.losses["lm loss"] for step in read_steps(record)]
    assert len(losses["nothing"]) == 4
    for name in ("families", "whole layers"):
        assert losses[name] == pytest.approx(losses["nothing"], rel=2e-3), losses
