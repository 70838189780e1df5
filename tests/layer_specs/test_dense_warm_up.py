"""The dense warm-up of DSA's indexer: what it computes and trains, when it ends, and who says the step.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Tracker
from megatron.training import global_vars

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import training_step
from megacpp_mcore.model import preset
from tests import micro_batch, stock
from tests.distributed.comparing import assert_same_bytes, differing_tensors
from tests.errors import raises

S, B = 24, 2
FULL = 5


WARMING, EVERY_KEY = {"topk": 4, "warmup_steps": 2}, {"topk": S, "distill": "own"}
"""The second selects every key in a sparse layer, whose indexer learns from that layer alone."""


@pytest.fixture(scope="module")
def make(process: Path) -> Callable[..., Any]:
    @functools.cache
    def build(*words: str, **dsa: Any) -> Any:
        overrides = {"seq_length": S, "dsa": {"loss_coeff": 0.1, **dsa}, "mtp": {"depth": 0}}
        return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process, *words), 0.1)

    return build


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many steps have ended."""
    return lambda steps: monkeypatch.setattr(training_step, "_of_bridge", steps)


def trained(model: Any, batch: int = B, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return micro_batch.outcome(model, micro_batch.draw_tokens(batch, S), **options)


def of_the_indexer(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients.items() if ".indexer." in name}


def test_it_trains_as_with_every_key_selected_until_it_ends(make: Callable[..., Any], after: Callable[[int], None]) -> None:
    """The trunk, and the indexer by the attention of its own layer over every key."""
    after(1)
    losses, gradients = trained(make(**WARMING))
    expected, others = trained(make(**EVERY_KEY))
    assert torch.allclose(losses, expected, rtol=1e-5)
    indexer = of_the_indexer(others)
    assert len(indexer) == 5
    assert all(gradient.any() for gradient in indexer.values())
    assert differing_tensors(indexer, of_the_indexer(gradients), 1e-3) == []
    of_the_trunk = ({name: grads[name] for name in grads.keys() - indexer.keys()} for grads in (others, gradients))
    assert differing_tensors(*of_the_trunk, 1e-4) == []
    after(2)
    selecting, gradients = trained(make(**WARMING))
    expected, others = trained(make(topk=4))
    assert torch.equal(selecting, expected)
    assert_same_bytes(others, gradients)
    assert not torch.allclose(selecting, losses, rtol=1e-3)


def test_recompute_changes_nothing(make: Callable[..., Any], after: Callable[[int], None]) -> None:
    after(0)
    losses, gradients = trained(make(**WARMING))
    for words in (stock.full_recompute(), stock.selective_recompute("core_attn")):
        again, others = trained(make(*words, **WARMING))
        assert torch.equal(losses, again)
        assert differing_tensors(gradients, others, 1e-6) == []


def test_documents_per_token_loss_and_the_factor_of_the_schedule(
    make: Callable[..., Any], after: Callable[[int], None]
) -> None:
    """Two documents in a packed row: the indexer's gradients, and what is logged, as with every key selected."""
    packed = micro_batch.packed([9, S - 9, 0, 0], max_seqlen_q=S, max_seqlen_kv=S)
    outcomes = []
    after(0)
    for dsa in (WARMING, EVERY_KEY):
        model = make("--calculate-per-token-loss", **dsa)
        stock.loss_scale(0.25)
        Tracker.tracker["values"].zero_()
        losses, gradients = trained(model, 1, packed_seq_params=packed)
        outcomes.append((losses, of_the_indexer(gradients), Tracker.tracker["values"].clone()))
    (losses, gradients, logged), (expected, others, shown) = outcomes
    assert torch.allclose(losses, expected, rtol=1e-5)
    assert torch.allclose(logged, shown, rtol=1e-4)
    assert float(logged[FULL - 1]) > 0
    assert len(gradients) == 5
    assert differing_tensors(others, gradients, 1e-3) == []


def test_the_step_is_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def args(**given: int) -> None:
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(**given))

    args(iteration=7)  # a script that only loads
    assert training_step.ended(True) == training_step.ended(False) == 7
    args(iteration=7, curr_iteration=9)
    assert (training_step.ended(True), training_step.ended(False)) == (9, 10)
    args(iteration=7, curr_iteration=0)  # a finished run that is evaluated once more: no step sets the number
    assert training_step.ended(False) == 7
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    monkeypatch.setattr(training_step, "_of_bridge", None)
    with raises(ModelError, "dsa.warmup_steps", "megacpp_mcore.nemo_recipes.run"):
        training_step.ended(True)
    forward_step = training_step.count_from(lambda state, *given: given)
    assert forward_step(SimpleNamespace(train_state=SimpleNamespace(step=11)), 1, 2) == (1, 2)
    assert training_step.ended(True) == 11
