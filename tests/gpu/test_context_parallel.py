"""Sequences that GPUs share over NCCL train as on one: in fp32 by references, in bf16 by kernels, packed documents too."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.observe import receipts
from tests.distributed.comparing import differing_scalars
from tests.distributed.runs import read_scalars
from tests.gpu import runs

STEPS, TOLERANCE, BF16_TOLERANCE = 4, 1e-5, 2e-2
SCALARS = ("lm loss", "mtp_1 loss", "mtp_2 loss", "z_loss", "grad norm")
"""Of the indexer's loss, some 1e-7, less than that part is the same once a near tie in the selection of keys tips over."""
COUNTED, COUNTED_TOLERANCE = ("seq_load_balancing_loss",), 1e-4
"""It counts tokens: one that a near tie of two experts moves changes it by some 2e-5."""
SIZES = {
    **{"seq_length": 512, "mtp": {"depth": 2}, "mamba3": {"head_dim": 64, "state": 64, "mimo_rank": 4}},
    "hidden_size": 512,
    "m2rnn": {"key_dim": 64, "value_dim": 16, "heads": 8},
    "mla": {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 64},
    "dsa": {"schedule": "-FS", "indexer_head_dim": 64, "topk": 64, "loss_coeff": 0.1},
}
"""Of widths that kernels cover; four ranks share the two groups of M."""
KERNELS = dict.fromkeys(("mamba3", "m2rnn", "indexer", "indexer_grad", "sparse_mla"), "triton")
PACKED = ("--dataloader-inter-document-masking", "--eod-mask-loss", "--micro-batch-size", "1")
RANKS = [
    pytest.param(
        count,
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < count, reason=f"{count} GPUs are needed, and {torch.cuda.device_count()} seen"
        ),
    )
    for count in (2, 4)
]

Train = Callable[..., dict[str, dict[int, float]]]


@pytest.fixture(scope="module")
def train(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """What so many ranks that share sequences record of every step, by name."""

    @functools.cache
    def of(ranks: int, precision: str, *words: str) -> dict[str, dict[int, float]]:
        folder = tmp_path_factory.mktemp("shared")
        settings: dict[str, Any] = {"model": "nam56r_tiny", "overrides": SIZES}
        if precision == "bf16":
            settings["backends"] = KERNELS  # what cannot run ends the run
        file = folder / "megacpp.json"
        file.write_text(json.dumps(settings))
        arguments = runs.words_of(
            with_overrides(preset("nam56r_tiny"), SIZES), "--lr-warmup-iters", "1", *words,
            corpus=corpus, precision=precision, processes=ranks, micro_batch_size=2, global_batch_size=4,
            train_iters=STEPS, learning_rate=1e-3, layout=Layout(context=ranks),
            # Transformer Engine multiplies fp32 as TF32.
            transformer_impl="local" if precision == "fp32" else "transformer_engine",
        )  # fmt: skip
        runs.train(arguments, folder / "observe", ranks, MEGACPP_CONFIG=str(file))
        receipt = receipts.read(folder / "observe")
        assert receipt["parallelism"]["context"] == ranks
        return read_scalars(folder / "observe")

    return of


@pytest.mark.parametrize("words", [(), PACKED], ids=["whole rows", "packed"])
@pytest.mark.parametrize("ranks", RANKS)
def test_references_in_fp32(train: Train, ranks: int, words: tuple[str, ...]) -> None:
    alone, shared = train(1, "fp32", *words), train(ranks, "fp32", *words)
    assert len(shared["lm loss"]) == STEPS
    assert differing_scalars(alone, shared, TOLERANCE, SCALARS) == []
    assert differing_scalars(alone, shared, COUNTED_TOLERANCE, COUNTED) == []


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("words", [(), PACKED], ids=["whole rows", "packed"])
@pytest.mark.parametrize("ranks", RANKS)
def test_kernels_in_bf16(train: Train, ranks: int, words: tuple[str, ...]) -> None:
    alone, shared = train(1, "bf16", *words), train(ranks, "bf16", *words)
    assert len(shared["lm loss"]) == STEPS
    assert differing_scalars(alone, shared, BF16_TOLERANCE, SCALARS + COUNTED) == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_goes_from_shared_sequences_to_one_gpu_and_back(train: Train, tmp_path: Path, ranks: int) -> None:
    """The rest of a run from its checkpoint, with the optimizer's state, is the same with either number of ranks."""
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    uninterrupted = train(ranks, "fp32", *saved)
    resumed = train(1, "fp32", "--load", str(tmp_path / "saved"), "--ckpt-step", "2")
    for name in SCALARS:
        rest = {step: value for step, value in uninterrupted[name].items() if step > 2}
        assert differing_scalars({name: rest}, resumed, TOLERANCE, [name]) == []
