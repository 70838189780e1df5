"""Documents of one row in a whole model, marked by packed sequences or Megatron's mask, and what is refused.

Shape legend: S sequence, B batch, D hidden, K MTP depths.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megacpp_mcore.errors import DataError, ModelError
from megacpp_mcore.layer_specs.documents import check_run, documents
from megacpp_mcore.model import preset
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.e2e import test_hybrid_model
from tests.errors import raises
from tests.host_reads import host_reads
from tests.micro_batch import losses_of as losses

S, D, EOD = 32, 128, 256
LENGTHS = [5, 1, 14, 12]
FAMILIES = {"A": 1, "F": 5, "M": 3, "R": 12}


@pytest.fixture(scope="module")
def make(process: Path) -> Callable[..., Any]:
    """Builds models with gradients of the language model's loss only: the others are means over a row."""

    def build(mtp_depth: int, *words: str) -> Any:
        overrides = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": mtp_depth}}
        model = stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process, *words))
        for layer in model.decoder.layers:  # every layer has a configuration of its own where its checkpoint differs
            layer.config.dsa_indexer_loss_coeff = 0.0
            layer.config.moe_aux_loss_coeff = layer.config.moe_z_loss_coeff = 0.0
        return model

    return build


@pytest.fixture(scope="module")
def plain(make: Callable[..., Any]) -> Any:
    return make(0)


@pytest.fixture
def unread(make: Callable[..., Any]) -> Any:
    """One that has been given no mask yet."""
    return make(0)


@pytest.fixture(scope="module")
def predicting(make: Callable[..., Any]) -> Any:
    """With multi-token prediction."""
    return make(2)


def draw_tokens() -> torch.Tensor:
    """``[1, S + 1]``; the documents of LENGTHS, each with an end."""
    tokens = micro_batch.draw_tokens(1, S)
    tokens[:, torch.tensor(LENGTHS).cumsum(0) - 1] = EOD
    return tokens


def masked(tokens: torch.Tensor) -> dict[str, Any]:
    mask, _, positions = _get_ltor_masks_and_position_ids(tokens[0, :-1], EOD, True, True, True, True)
    return {"attention_mask": mask[None], "position_ids": positions[None]}


def packed(tokens: torch.Tensor) -> dict[str, Any]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"position_ids": positions, "packed_seq_params": micro_batch.packed(LENGTHS, tokens_per_sample=S)}


WAYS = {"masked": masked, "packed": packed}


def alone(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The same losses, one call a document."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    parts = [losses(model, tokens[:, a : b + 1]) for a, b in itertools.pairwise(ends)]
    return torch.cat(parts, dim=1)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    micro_batch.backward(loss)
    return micro_batch.gradients(model)


@pytest.mark.parametrize("way", WAYS)
def test_documents_of_a_row_are_as_if_each_were_alone(plain: Any, way: str) -> None:
    tokens = draw_tokens()
    at_once, truth = losses(plain, tokens, **WAYS[way](tokens)), alone(plain, tokens)
    torch.testing.assert_close(at_once, truth, rtol=2e-5, atol=0)
    as_one = losses(plain, tokens)
    assert float((as_one - truth)[:, LENGTHS[0] :].abs().max()) > 1e-2
    weights = torch.randn(1, S, generator=torch.Generator().manual_seed(1))
    grads, expected = (gradients(plain, (loss_BS * weights).sum()) for loss_BS in (at_once, alone(plain, tokens)))
    assert grads.keys() == expected.keys()
    for name, truth in expected.items():
        scale = float(truth.abs().max())
        torch.testing.assert_close(grads[name], truth, rtol=1e-3, atol=1e-4 * scale, msg=lambda t, n=name: f"{n}: {t}")


def test_full_recompute_without_a_loss_of_the_indexer_changes_nothing(make: Callable[..., Any], plain: Any) -> None:
    """With one, and windows: test_long.py."""
    tokens = draw_tokens()
    truth, recomputed = (
        gradients(model, losses(model, tokens, **packed(tokens)).sum()) for model in (plain, make(0, *stock.full_recompute()))
    )
    assert differing_tensors(truth, recomputed, 1e-4) == []


def test_both_hosts_tell_packed_documents_apart(process: Path) -> None:
    gpt, hybrid = test_hybrid_model.build_gpt(process), test_hybrid_model.build(process)
    stock.loss_scale(1.0)
    tokens = draw_tokens()
    with torch.no_grad():
        host_losses = [losses(model, tokens, **packed(tokens)) for model in (gpt, hybrid)]
        assert torch.equal(*host_losses)
        assert not torch.allclose(host_losses[0], losses(gpt, tokens), atol=1e-4)


def reset_by(script: bool | None) -> Any:
    """A stock script with or without ``--reset-attention-mask``; None: no stock script runs."""
    arguments = None if script is None else SimpleNamespace(reset_attention_mask=script)
    return mock.patch("megatron.training.global_vars._GLOBAL_ARGS", arguments)


def reads_of(model: Any, **boundaries: Any) -> dict[str, int]:
    with host_reads() as counts:
        losses(model, draw_tokens(), **boundaries)
    return dict(counts)


def test_packed_documents_make_nobody_wait(plain: Any, predicting: Any) -> None:
    """The forward pass reads what it reads of one document: how many tokens go to each expert."""
    for model in (plain, predicting):
        without, with_documents = reads_of(model), reads_of(model, **packed(draw_tokens()))
        assert without.keys() == {"routed_mlp", "grouped_mlp", "check_topk"}  # the plain-PyTorch backend
        assert with_documents == without


def test_masks_make_nobody_wait_but_the_first_and_are_all_checked(unread: Any) -> None:
    tokens, without = draw_tokens(), reads_of(unread)
    with reset_by(True):
        first, second = (reads_of(unread, **masked(tokens)) for _ in range(2))
        assert first == without | {"seq_idx_from_mask": 1}
        assert second == without
        wrong = masked(tokens)
        wrong["attention_mask"][0, 0, 9, 7] ^= True
        with raises(ModelError, "attention_mask[0, 0, 9, 7]"):
            losses(unread, tokens, **wrong)
    with reset_by(None):  # whether this one has documents only its entries say
        assert reads_of(unread, **masked(tokens)) == without | {"seq_idx_from_mask": 1, "_masked_documents": 1}


def test_a_mask_with_documents_of_a_run_that_has_none_is_refused(unread: Any) -> None:
    tokens = draw_tokens()
    no_end = tokens.clamp(max=255)
    with reset_by(False):
        assert torch.equal(losses(unread, no_end, **masked(no_end)), losses(unread, no_end))
        for _ in range(2):  # one that the host reads, one that it does not
            with raises(ModelError, "--reset-attention-mask"):
                losses(unread, tokens, **masked(tokens))


def test_more_documents_than_the_run_allows_are_an_error_of_the_data(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, config = draw_tokens(), plain.decoder.layers[0].config
    monkeypatch.setattr(config, "max_documents", 3, raising=False)
    with raises(DataError, "4 documents", f"{S} tokens", "at most 3", "max_documents: 4"):
        losses(plain, tokens, **packed(tokens))
    config.max_documents = 4
    losses(plain, tokens, **packed(tokens))


def hidden_of(model: Any, tokens: torch.Tensor, **boundaries: Any) -> torch.Tensor:
    """The states of trunk and depths that the losses are of: ``[1 + K, S, D]``."""
    seen: list[torch.Tensor] = []
    with model.mtp.register_forward_hook(lambda _, __, output: seen.append(output.detach())):
        losses(model, tokens, **boundaries)
    return seen[0].squeeze(1).unflatten(0, (3, -1))


def test_packed_documents_do_not_see_the_next_ones_tokens(predicting: Any) -> None:
    """Every depth embeds a later token: at a document's end none of the next document's."""
    tokens = draw_tokens()
    hidden = hidden_of(predicting, tokens, **packed(tokens))
    start = 0
    for length in LENGTHS:
        # One document, marked as packed, so that nothing follows its last token in either.
        cut = {"position_ids": torch.arange(length)[None]}
        part = hidden_of(predicting, tokens[:, start : start + length + 1], **cut)
        torch.testing.assert_close(hidden[:, start : start + length], part, rtol=1e-4, atol=1e-4)
        start += length


def test_a_mask_that_multi_token_prediction_would_not_read_is_refused(predicting: Any) -> None:
    tokens = draw_tokens()
    with raises(ModelError, "--dataloader-inter-document-masking", code="mtp"):
        losses(predicting, tokens, **masked(tokens))
    no_end = tokens.clamp(max=255)
    assert losses(predicting, no_end, **masked(no_end)).isfinite().all()  # a causal mask says nothing of documents


BAD_PACKS: list[tuple[dict[str, Any], str]] = [
    ({"qkv_format": "sbhd"}, "qkv_format 'sbhd'"),
    ({"cu_seqlens_q": None}, "no cu_seqlens_q"),
    ({"local_cp_size": 2}, "2 context-parallel ranks"),
    ({"cu_seqlens_kv": torch.tensor([0, S])}, "4 packed sequences of queries and 1 of keys"),
]


@pytest.mark.parametrize("kind", FAMILIES)
def test_packs_and_masks_of_another_kind_are_refused(plain: Any, kind: str) -> None:
    mixer = plain.decoder.layers[FAMILIES[kind] - 1].self_attention
    good = packed(draw_tokens())["packed_seq_params"]
    for change, value in BAD_PACKS:
        with raises(ModelError, f"layer {FAMILIES[kind]}", value):
            mixer(torch.zeros(S, 1, D), None, packed_seq_params=dataclasses.replace(good, **change))
    with raises(ModelError, f"layer {FAMILIES[kind]}", "batch of 2", "'thd'"):
        mixer(torch.zeros(S, 2, D), None, packed_seq_params=good)
    sliding_window = ~torch.ones(S, S, dtype=torch.bool).tril().triu(-4)[None, None]
    with raises(ModelError, "attention_mask[0, 0, 5, 0]", code="masked"):
        mixer(torch.zeros(S, 1, D), sliding_window)


# Arguments of a stock script: documents by masks, packed, packed from two samples, or none.
MASKED: dict[str, Any] = {
    **{"reset_attention_mask": True, "create_attention_mask_in_dataloader": True},
    **{"dataloader_inter_document_masking": False, "micro_batch_size": 1, "eval_micro_batch_size": 1},
}
UNMASKED = MASKED | {"reset_attention_mask": False, "create_attention_mask_in_dataloader": False}
PACKED = UNMASKED | {"dataloader_inter_document_masking": True}
TWO = PACKED | {"micro_batch_size": 2}
TWO_IN_EVALUATION = PACKED | {"eval_micro_batch_size": 2}
# Configurations: in one process and chunk, over context-parallel ranks, over two stages, with cut sequences.
ONE_CHUNK: dict[str, Any] = {
    **{"mtp_num_layers": None, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
    **{"moe_router_load_balancing_type": "seq_aux_loss", "num_moe_experts": 4, "sequence_parallel": False},
    **{"variable_seq_lengths": False, "context_parallel_size": 1, "hierarchical_context_parallel_sizes": None},
}
WITH_MTP, SHARED = ONE_CHUNK | {"mtp_num_layers": 2}, ONE_CHUNK | {"context_parallel_size": 2}
LEVELS = SHARED | {"hierarchical_context_parallel_sizes": [2]}
STAGES, CUT = ONE_CHUNK | {"pipeline_model_parallel_size": 2}, ONE_CHUNK | {"sequence_parallel": True}
THREE_STAGES = WITH_MTP | {"pipeline_model_parallel_size": 3}
BALANCED_TWICE = CUT | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}

PACK, UNPACK, SHARES = "--dataloader-inter-document-masking", "--micro-batch-size 1", "--context-parallel-size 2"
BALANCES = "--sequence-parallel balances experts"


def check(arguments: dict[str, Any] | None, configured: dict[str, Any]) -> None:
    given = None if arguments is None else SimpleNamespace(**arguments)
    configuration: Any = SimpleNamespace(**configured)
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", given):
        check_run(configuration)


@pytest.mark.parametrize(
    ("arguments", "configured", "code", "values"),
    [
        (UNMASKED | {"reset_attention_mask": True}, ONE_CHUNK, "no-mask", ["--no-create-attention-mask-in-dataloader", PACK]),
        (MASKED, WITH_MTP, "mtp", ["MTP", PACK]),
        (MASKED, ONE_CHUNK | {"pipeline_model_parallel_size": 3}, "chunks", ["3 pipeline chunks", PACK]),
        (MASKED, STAGES | {"virtual_pipeline_model_parallel_size": 2}, "chunks", ["4 pipeline chunks", PACK]),
        (MASKED, SHARED, "", [SHARES, "--reset-attention-mask"]),
        (MASKED | {"reset_attention_mask": False}, SHARED, "", [SHARES, "--no-create-attention-mask-in-dataloader"]),
        (TWO, SHARED, "", [SHARES, UNPACK]),
        (TWO_IN_EVALUATION, SHARED, "", [SHARES, UNPACK]),
        (UNMASKED, SHARED | {"hybrid_context_parallel": True}, "", [SHARES, "--hybrid-context-parallel"]),
        (UNMASKED, LEVELS, "", [SHARES, "--hierarchical-context-parallel-sizes"]),
        (TWO, STAGES, "", ["2 samples", "from stage to stage", UNPACK]),
        (TWO_IN_EVALUATION, STAGES, "", ["2 samples", "from stage to stage", UNPACK]),
        (TWO, CUT, "", ["2 samples", BALANCES, UNPACK]),
        (TWO, BALANCED_TWICE, "", ["2 samples", BALANCES, UNPACK]),
    ],
)  # fmt: skip
def test_runs_that_would_mix_documents_are_refused(
    arguments: dict[str, Any], configured: dict[str, Any], code: str, values: list[str]
) -> None:
    with raises(ModelError, *values, code=code):
        check(arguments, configured)


@pytest.mark.parametrize(
    ("arguments", "configured"),
    [
        (None, THREE_STAGES),  # no stock script, nothing to ask
        (MASKED, STAGES),
        (MASKED | {"reset_attention_mask": False}, THREE_STAGES),
        (MASKED | {"dataloader_inter_document_masking": True}, THREE_STAGES),
        (UNMASKED, SHARED | {"mtp_num_layers": 2}),
        (PACKED, SHARED | {"mtp_num_layers": 2}),
        (PACKED, STAGES),
        (PACKED, BALANCED_TWICE),
        (TWO, STAGES | {"variable_seq_lengths": True}),
        (TWO, ONE_CHUNK),
        (TWO, CUT | {"num_moe_experts": None}),
        (TWO, CUT | {"moe_router_load_balancing_type": "aux_loss"}),
    ],
)
def test_runs_that_keep_documents_apart_are_not(arguments: dict[str, Any] | None, configured: dict[str, Any]) -> None:
    check(arguments, configured)


def test_a_layer_refuses_a_part_of_a_mask_and_sequences_that_are_shared_one_by_one() -> None:
    configuration: Any = SimpleNamespace(**SHARED)
    for boundaries, code in (
        ({"attention_mask": micro_batch.causal_mask(8), "packed_seq_params": None}, "mask-under-context"),
        ({"attention_mask": None, "packed_seq_params": micro_batch.packed([4, 4])}, "packed-under-context"),
    ):
        with raises(ModelError, "layer 3", "2 context-parallel ranks", code=code):
            documents(configuration, 3, batch=1, rows=8, **boundaries)
