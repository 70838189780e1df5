"""The patch hybrid-flops: what the training loop counts, for our spec, for stock hybrids and for stock GPT."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacpp_mcore import patches
from megacpp_mcore.model import MLA, flops, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.patches.hybrid_flops import PATCH, _audited_count
from tests import stock

TINY = preset("nam56r_tiny")
SEQUENCE, BATCH = 64, 3
Count = Callable[..., Any]
OfFile = Callable[..., tuple[Any, Namespace]]
Packed = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Count]:
    """``num_floating_point_operations`` as upstream has it."""
    with stock.cpu_lane():
        yield importlib.import_module("megatron.training.training").num_floating_point_operations


@pytest.fixture(scope="module")
def ours(upstream: Count) -> Iterator[Count]:
    """And as the patch has it."""
    with stock.patched(PATCH):
        yield importlib.import_module("megatron.training.training").num_floating_point_operations


WORDS = """
--hybrid-layer-pattern M+DE --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --position-embedding-type rope
--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6
--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 16 --dsa-indexer-loss-coeff 0.01
--dsa-indexer-use-sparse-loss --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24
--moe-shared-expert-intermediate-size 16 --mamba-state-dim 16 --mamba-head-dim 8 --mamba-num-groups 2
--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --distributed-backend gloo
--use-cpu-initialization
"""


@functools.cache
def parsed() -> Namespace:
    """Arguments of a stock hybrid with MLA widths, parsed and validated by Megatron."""
    return stock.parse([*WORDS.split(), "--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)])


def hybrid(pattern: str | None, **changes: Any) -> Namespace:
    """:func:`parsed` with another pattern; the vocabulary is padded, as it is once the tokenizer is there."""
    settings = {"hybrid_layer_pattern": pattern, "padded_vocab_size": 128} | changes
    return Namespace(**vars(parsed()) | settings)


def gpt(**changes: Any) -> Namespace:
    """:func:`parsed` without a pattern: a stock GPT of four layers."""
    return hybrid(None, **{"num_layers": 4, **changes})


WIDTHS = MLA(q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
TOKENS = BATCH * SEQUENCE
PROJECTIONS = flops.mla_projections(TOKENS, 32, 4, WIDTHS).training
CAUSAL, SELECTED = BATCH * flops.causal_pairs(SEQUENCE), BATCH * flops.selected_pairs(SEQUENCE, 16)
PLUS = PROJECTIONS + flops.full_core(CAUSAL, 4, WIDTHS).training
SHARED = PROJECTIONS + flops.sparse_core(SELECTED, 4, WIDTHS).training
INDEXER = flops.indexer(TOKENS, CAUSAL, SELECTED, hidden=32, q_lora_rank=12, heads=2, head_dim=8).training
EH_PROJ = flops.product(TOKENS * 2 * 32 * 32).training


@pytest.mark.parametrize(
    ("pattern", "changes", "lacking"),
    [
        # Nothing in hybrids that upstream counts, whatever the words of a spec that is not ours.
        ("M*M-ME", {}, 0),
        ("GG*-", {}, 0),
        ("M-M-|M-M*-", {}, 0),
        ("M*", {"spec": []}, 0),
        ("M*", {"spec": ["local"]}, 0),
        ("M*", {"spec": ["megatron.core.models.gpt", "gpt_layer_specs"]}, 0),
        # D and + layers, which upstream does not see.
        ("M+E", {}, PLUS),
        ("+M|+E", {}, 2 * PLUS),
        ("MDE", {}, SHARED + INDEXER),
        ("D+D", {}, 2 * (SHARED + INDEXER) + PLUS),
        # Each MTP depth's projection and layers.
        ("M*E/+-/+-", {"mtp_num_layers": 2}, 2 * (EH_PROJ + PLUS)),
        ("M*E/*-/*-", {"mtp_num_layers": 2}, 2 * EH_PROJ),
        # Layers that share indices have no indexer: 1 and 3 have one, or 1, 2 and 3.
        ("DDDD", {"dsa_indexer_topk_freq": 2}, 4 * SHARED + 2 * INDEXER),
        ("DDDD", {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 3}, 4 * SHARED + 3 * INDEXER),
    ],
)
def test_what_upstream_does_not_count_in_hybrids(
    upstream: Count, ours: Count, pattern: str, changes: dict[str, Any], lacking: int
) -> None:
    args = hybrid(pattern, **changes)
    assert ours(args, BATCH) - upstream(args, BATCH) == lacking
    assert upstream(args, BATCH) > 0


def test_the_indexers_loss_decides_on_its_backward(ours: Count) -> None:
    sizes = {"hidden": 32, "q_lora_rank": 12, "heads": 2, "head_dim": 8}
    sparse = ours(hybrid("D"), BATCH)
    dense = ours(hybrid("D", dsa_indexer_use_sparse_loss=False), BATCH)
    untrained = ours(hybrid("D", dsa_indexer_loss_coeff=None), BATCH)
    assert dense - sparse == flops.indexer(TOKENS, CAUSAL, CAUSAL, **sizes).training - INDEXER > 0
    assert sparse - untrained == flops.indexer(TOKENS, CAUSAL, SELECTED, **sizes).backward > 0


def test_packed_sequences(upstream: Count, ours: Count, caplog: pytest.LogCaptureFixture) -> None:
    """Three sequences of 40, 24 and 64 tokens: exact for ``+``; for ``D`` upstream's figure, with one warning."""
    lengths = (40, 24, 64)
    sums = {
        "seqlen_squared_sum_in_batch": float(sum(length**2 for length in lengths)),
        "total_real_tokens_in_batch": float(sum(lengths)),
    }
    args = hybrid("M+")
    pairs = sum(map(flops.causal_pairs, lengths))
    layer = flops.mla_projections(128, 32, 4, WIDTHS).training + flops.full_core(pairs, 4, WIDTHS).training
    assert ours(args, 2, **sums) - upstream(args, 2, **sums) == layer
    afresh = _audited_count(upstream)  # which has warned of nothing
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert afresh(hybrid("M+D"), 2, **sums) == upstream(hybrid("M+D"), 2, **sums)
    assert [record.message for record in caplog.records if "top-k" in record.message] == [
        "hybrid-flops: top-k of packed sequences cannot be counted; the figure is upstream's"
    ]


def test_what_upstream_counts_with_fewer_arguments_it_counts_still(
    upstream: Count, ours: Count, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loop other than Megatron's, whose arguments have only what upstream reads."""
    sums = {"seqlen_squared_sum_in_batch": 4096.0, "total_real_tokens_in_batch": 128.0}
    args = hybrid("M*")
    del args.seq_length
    assert ours(args, None, **sums) == upstream(args, None, **sums) > 0
    args = hybrid("M+D")
    del args.dsa_indexer_topk_freq
    for _ in range(2):
        assert ours(args, BATCH) == upstream(args, BATCH) > 0
    lines = [line for line in caplog.messages if "cannot be counted" in line]
    assert len(lines) == 1
    assert "has no attribute 'dsa_indexer_topk_freq'); the figure is upstream's" in lines[0]


@pytest.mark.parametrize("changes", [{}, {"multi_latent_attention": False}, {"mtp_num_layers": 2}, {"q_lora_rank": None}])
def test_gpt_is_left_to_upstream(upstream: Count, ours: Count, changes: dict[str, Any]) -> None:
    args = gpt(**changes)
    assert ours(args, BATCH) == upstream(args, BATCH) > 0


@pytest.mark.parametrize(
    ("changes", "layers", "indexers"),
    [
        ({}, 4, 1),  # three of the four share
        # Two MTP depths, numbered from 1: the second shares, unless it is the first once more.
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": False}, 6, 1 + 1),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, 6, 1 + 2),
    ],
)
def test_gpt_with_sparse_attention(upstream: Count, ours: Count, changes: dict[str, Any], layers: int, indexers: int) -> None:
    """Upstream counts it as full attention without an indexer."""
    args = gpt(experimental_attention_variant="dsa", dsa_indexer_topk_freq=4, **changes)
    assert upstream(args, BATCH) == upstream(gpt(**changes), BATCH)
    without_cores = upstream(args, BATCH, seqlen_squared_sum_in_batch=0, total_real_tokens_in_batch=TOKENS)
    core = flops.sparse_core(SELECTED, 4, WIDTHS).training
    assert ours(args, BATCH) == without_cores + layers * core + indexers * INDEXER


def test_the_schedule_of_a_file_counts_as_the_same_periodic_one(
    ours: Count, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    periodic = ours(gpt(experimental_attention_variant="dsa", dsa_indexer_topk_freq=4), BATCH)
    (tmp_path / "cache.yaml").write_text("dsa_index_cache: {schedule: FSSS}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "cache.yaml"))
    args = gpt(experimental_attention_variant="dsa")
    assert ours(args, BATCH) == periodic + 3 * INDEXER  # nobody follows the file
    patches.apply(["dsa-index-cache"])
    try:
        assert ours(args, BATCH) == periodic
    finally:
        patches.revert(["dsa-index-cache"])


@pytest.fixture
def of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfFile:
    """The model of a file with overrides, and the arguments that stock parses of it."""

    def make(*spec: str, **overrides: Any) -> tuple[Any, Namespace]:
        overrides = {"seq_length": SEQUENCE, "mtp": {"depth": 2}, **overrides}
        overrides["mtp"] = {"depth": 2, **overrides["mtp"]}
        (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": TINY.name, "overrides": overrides}))
        monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "model.yaml"))
        model = with_overrides(TINY, overrides)
        args = stock.parse(stock.words(model))
        args.spec, args.padded_vocab_size = list(spec), 384
        return model, args

    return make


@pytest.mark.parametrize("words", [["megacpp_mcore", "nam56r"], ["megacpp_mcore.nam56r"]])
def test_our_model_is_counted_whole(
    upstream: Count, ours: Count, words: list[str], of_file: OfFile, caplog: pytest.LogCaptureFixture
) -> None:
    model, args = of_file(*words)
    assert ours(args, 5) == flops.step(model, 5).total.training
    args.padded_vocab_size = 512
    assert ours(args, 5) == flops.step(model, 5, vocab_size=512).total.training
    assert ours(args, 5) != upstream(args, 5)
    afresh = _audited_count(upstream)  # it does not know the documents
    for _ in range(2):
        packed = afresh(args, 5, total_real_tokens_in_batch=17.0, seqlen_squared_sum_in_batch=100.0)
        assert packed == flops.step(model, 5, vocab_size=512).total.training
    assert len([line for line in caplog.messages if "packed rows are counted as one document each" in line]) == 1


ROWS = ((48, 16), (16, 32, 16))
"""Documents of two packed rows; each a whole number of chunks of the Mamba-3 scan, which runs on over them."""
TOPK = 24
WINDOW = {"window_size": 19}


@pytest.fixture
def packed(ours: Count, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packed]:
    """Lets the loop's own functions see :data:`ROWS`, in each virtual stage, and returns what it then tells the count."""
    from megatron.core import parallel_state
    from megatron.training import global_vars, training

    def run(args: Namespace | None, virtual: int | None = None) -> dict[str, float]:
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
        monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", virtual)
        for row in ROWS * (virtual or 1):
            training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, *itertools.accumulate(row)], dtype=torch.int32))
        tokens, squares = training.consume_seqlen_stats_in_iteration()
        assert (tokens, squares) == (sum(map(sum, ROWS)), sum(length**2 for row in ROWS for length in row))
        return {"total_real_tokens_in_batch": tokens, "seqlen_squared_sum_in_batch": squares}

    yield run
    training.consume_seqlen_stats_in_iteration()  # an iteration without documents forgets those of the last


@pytest.mark.parametrize(("schedule", "mtp"), [("-FS", "-"), ("WFS", "W"), ("-FS", "W")])
def test_packed_documents_of_our_model_count_by_their_lengths(
    schedule: str, mtp: str, ours: Count, packed: Packed, of_file: OfFile, caplog: pytest.LogCaptureFixture
) -> None:
    """The truth: each document a batch of its own."""
    model, args = of_file(
        "megacpp_mcore", "nam56r", dsa={"topk": TOPK, "schedule": schedule}, mla=WINDOW, mtp={"attention": mtp}
    )
    assert all(length % model.mamba3.chunk == 0 for row in ROWS for length in row)
    alone = sum(flops.step(model, seq_length=n, vocab_size=384).total.training for row in ROWS for n in row)
    unpacked = flops.step(model, len(ROWS), vocab_size=384).total.training
    for virtual in (None, 3):
        assert ours(args, len(ROWS), **packed(args, virtual)) == alone < unpacked
    assert ours(args, len(ROWS)) == unpacked
    assert [line for line in caplog.messages if "packed rows" in line] == []


def test_packed_documents_of_stock_sparse_attention_count_by_their_lengths(
    upstream: Count, ours: Count, packed: Packed
) -> None:
    args = hybrid("MD", dsa_indexer_topk=TOPK)
    lengths = [length for row in ROWS for length in row]
    causal = sum(map(flops.causal_pairs, lengths))
    selected = sum(flops.selected_pairs(length, TOPK) for length in lengths)
    layer = flops.mla_projections(sum(lengths), 32, 4, WIDTHS) + flops.sparse_core(selected, 4, WIDTHS)
    layer += flops.indexer(sum(lengths), causal, selected, hidden=32, q_lora_rank=12, heads=2, head_dim=8)
    sums = packed(args)
    assert ours(args, len(ROWS), **sums) - upstream(args, len(ROWS), **sums) == layer.training
    sums = packed(None)  # of a loop without Megatron's arguments
    assert ours(hybrid("MD"), len(ROWS), **sums) == upstream(hybrid("MD"), len(ROWS), **sums)


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
def test_without_a_file_the_arguments_name_the_preset(ours: Count, model_class: str) -> None:
    args = stock.parse(stock.words(TINY, model_class=model_class))
    args.padded_vocab_size = TINY.vocab_size_padded(1)
    assert ours(args, 2) == flops.step(TINY, 2).total.training
    sequences = {sequence: flops.step(TINY, 2, seq_length=sequence).total.training for sequence in (256, 128)}
    args.seq_length = 128
    assert ours(args, 2) == sequences[128] < sequences[256]
