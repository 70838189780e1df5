"""A sequence in pieces, with an inference context, gives what it gives at once; what a context cannot be is refused.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import training_step
from megacpp_mcore.layer_specs.decode import LayerCache
from megacpp_mcore.model import preset
from tests import stock
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.micro_batch import draw_tokens, packed

S, B = 24, 2


@pytest.fixture(scope="module")
def model(process: Path) -> Any:
    """nam56r_tiny away from its initial values; a query sees a third of the keys before it."""
    overrides = {"seq_length": S, "dsa": {"topk": 8}}
    return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process)).eval()


def logits(model: Any, tokens: torch.Tensor, context: Any = None) -> torch.Tensor:
    """Of every row given, ``[B, S, V]``."""
    first = 0 if context is None else context.sequence_len_offset
    positions = torch.arange(first, first + tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad(), InferenceMode.active():
        return model(tokens, positions, None, inference_context=context, runtime_gather_output=True)


def in_pieces(model: Any, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    context, pieces = StaticInferenceContext(*tokens.shape), []
    context.config.materialize_only_last_token_logits = False
    for piece in tokens.split(list(lengths), dim=1):
        pieces.append(logits(model, piece, context))
        context.sequence_len_offset += piece.shape[1]
    return torch.cat(pieces, dim=1)


LENGTHS = [[S], [1] * S, [9, 1, 1, 1, 12], [1, 10, 5, 8]]


@pytest.mark.parametrize("lengths", exhaustive_but(LENGTHS, *LENGTHS[2:]))
def test_pieces_give_what_the_whole_gives(model: Any, lengths: list[int]) -> None:
    tokens = draw_tokens(B, S - 1)
    at_once, in_parts = logits(model, tokens), in_pieces(model, tokens, lengths)
    assert in_parts.shape == at_once.shape
    error = (in_parts - at_once).square().mean(-1).sqrt() / at_once.square().mean(-1).sqrt()
    assert float(error.max()) < 2e-5


def test_a_context_is_begun_anew(model: Any) -> None:
    """A reset context carries nothing over to the next sequence."""
    first, second = torch.randint(0, 256, (2, B, S), generator=torch.Generator().manual_seed(4))
    context = StaticInferenceContext(B, S)
    logits(model, first, context)
    context.reset()
    assert torch.equal(logits(model, second, context), logits(model, second, StaticInferenceContext(B, S)))


def context(**changes: Any) -> SimpleNamespace:
    common = {"sequence_len_offset": 0, "batch_size_offset": 0, "max_sequence_length": 8, "key_value_memory_dict": {}}
    return SimpleNamespace(is_static_batching=lambda: True, **common | changes)


@pytest.mark.parametrize(
    ("given", "rows", "values"),
    [
        (context(batch_size_offset=2), 1, ["batch_size_offset is 2"]),
        (context(), 9, ["9 rows", 8]),
        (context(sequence_len_offset=4), 1, ["0 rows", "sequence_len_offset is 4"]),
        (SimpleNamespace(is_static_batching=lambda: False), 1, ["SimpleNamespace"]),
    ],
)
def test_what_a_context_cannot_be(given: Any, rows: int, values: list[object]) -> None:
    with raises(ModelError, "layer 3", *values):
        LayerCache(given, 3, rows)


def test_pieces_of_a_model_that_attends_densely_still(process: Path) -> None:
    dense = stock.build({"seq_length": S, "dsa": {"topk": 4, "warmup_steps": 5}}, preset("nam56r_tiny"), process).eval()
    tokens = draw_tokens(B, S - 1)
    with mock.patch.object(training_step, "_of_bridge", 2):
        at_once, in_parts = logits(dense, tokens), in_pieces(dense, tokens, [7, 1, 16])
    assert torch.allclose(in_parts, at_once, rtol=1e-4, atol=1e-5)
    with mock.patch.object(training_step, "_of_bridge", 5):
        assert not torch.allclose(logits(dense, tokens), at_once, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("number", [1, 3, 5, 12])
def test_packed_and_shared_sequences_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    layer, held = model.decoder.layers[number - 1].self_attention, StaticInferenceContext(B, S)
    with raises(ModelError, f"layer {number}", code="packed-decoding"):
        layer(
            torch.randn(4, 1, 128),
            None,
            inference_context=StaticInferenceContext(1, S),
            packed_seq_params=packed([2, 2]),
        )
    monkeypatch.setattr(layer.config, "context_parallel_size", 2)
    with raises(ModelError, f"layer {number}", "--context-parallel-size 1"):
        layer(torch.randn(4, B, 128), None, inference_context=held)


@pytest.mark.parametrize("number", [3, 5, 12])
def test_a_step_that_was_left_out_is_refused(model: Any, number: int) -> None:
    layer, held = model.decoder.layers[number - 1].self_attention, StaticInferenceContext(B, S)
    layer(torch.randn(4, B, 128), None, inference_context=held)
    held.sequence_len_offset = 5
    with raises(ModelError, f"layer {number}", "4 rows", "sequence_len_offset is 5"):
        layer(torch.randn(1, B, 128), None, inference_context=held)
