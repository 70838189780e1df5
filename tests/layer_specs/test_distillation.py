"""What trains a DSA indexer: the attention of the layers it serves, against the same written out by hand.

Three sparse layers of nam56r_tiny, one Full and two Shared (layers 1, 5 and 9), two micro-batches.
Legend: S queries and keys, B batch, H heads, K absorbed width, N selected keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import OWN, SERVED, preset
from tests import micro_batch, stock
from tests.errors import raises

S, B, TOPK = 32, 2, 8
COEFFICIENT = 0.1
FULL, SHARED = 1, (5, 9)


@pytest.fixture(scope="module")
def make(process: Path) -> Callable[..., Any]:
    """Builds equal models with every weight away from its initial value."""

    def build(distill: str, *words: str, schedule: str = "FSS") -> Any:
        dsa = {"topk": TOPK, "schedule": schedule, "loss_coeff": COEFFICIENT, "distill": distill}
        overrides = {"seq_length": S, "dsa": dsa, "mtp": {"depth": 0}}
        return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process, *words), 0.1)

    return build


def core(model: Any, number: int) -> Any:
    return model.decoder.layers[number - 1].self_attention.core_attention


def watch(model: Any) -> dict[int, list[dict[str, Any]]]:
    """Record the arguments of every sparse layer's core attention from now on, in call order."""
    arguments: dict[int, list[dict[str, Any]]] = {number: [] for number in (FULL, *SHARED)}
    for number, runs in arguments.items():

        def note(_: Any, args: Any, kwargs: Any, runs: list[dict[str, Any]] = runs) -> None:
            runs.append({"query": args[0].detach(), "key": args[1].detach(), "x": kwargs["x"], "qr": kwargs["qr"]})

        core(model, number).register_forward_pre_hook(note, with_kwargs=True)
    return arguments


def watch_op(module: Any, backend: str) -> Sequence[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments that an op of ``module`` is given from now on."""
    resolution = getattr(module, backend)
    op = mock.Mock(wraps=resolution.fn)
    setattr(module, backend, dataclasses.replace(resolution, fn=op))
    return op.call_args_list


def in_flight(model: Any) -> None:
    """Forward, forward, backward, backward, as a pipeline's first stage does."""
    tokens = micro_batch.draw_tokens(B, S)
    losses = [micro_batch.losses_of(model, batch).mean() for batch in (tokens, tokens.flip(1))]
    for loss in losses:
        micro_batch.backward(loss)


def probabilities(kwargs: dict[str, Any], scale: float, index_BSN: torch.Tensor) -> torch.Tensor:
    """The L1-normalised attention of a layer over the selected keys, every other key masked; in float64."""
    score_BHST = torch.einsum("sbhk,tbk->bhst", kwargs["query"].double(), kwargs["key"].squeeze(2).double()) * scale
    chosen_BST = torch.zeros(B, S, S + 1, dtype=torch.bool)
    chosen_BST.scatter_(2, torch.where(index_BSN < 0, S, index_BSN).long(), True)
    p_BST = score_BHST.masked_fill(~chosen_BST[:, None, :, :S], -torch.inf).softmax(-1).sum(1)
    return p_BST / p_BST.sum(-1, keepdim=True)


def by_hand(
    model: Any, watched: dict[int, list[dict[str, Any]]], selected: list[torch.Tensor], layers: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of the two micro-batches and the gradients of the indexer's parameters, with all keys written out."""
    full = core(model, FULL)
    total = torch.zeros((), dtype=torch.float64)
    for number_of_batch, index_BSN in enumerate(selected):
        p_BST = sum(probabilities(watched[number][number_of_batch], full.softmax_scale, index_BSN) for number in layers)
        p_BST = p_BST / len(layers)
        of_full = watched[FULL][number_of_batch]
        with torch.enable_grad():
            q, k, w = full.indexer.forward_before_topk(of_full["x"].detach(), of_full["qr"].detach())
            score_BST = torch.einsum("sbh,sbht->bst", w, torch.einsum("sbhd,tbd->sbht", q, k).relu()).double()
            log_q = score_BST.masked_fill(p_BST == 0, -torch.inf).log_softmax(-1).masked_fill(p_BST == 0, 0.0)
            total = total + (torch.xlogy(p_BST, p_BST) - p_BST * log_q).sum(-1).mean()
    return total.detach(), list(torch.autograd.grad(COEFFICIENT * total, list(full.indexer.parameters())))


def far_apart(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference of two lists of gradients."""
    pairs = zip(actual, expected, strict=True)
    return max(float((grad.double() - other.double()).norm() / other.double().norm()) for grad, other in pairs)


@pytest.mark.parametrize(
    ("distill", "recompute"),
    [
        pytest.param(OWN, (), marks=pytest.mark.exhaustive),
        (SERVED, ()),
        (OWN, stock.full_recompute()),
        # The Full and one Shared layer.
        pytest.param(SERVED, stock.full_recompute("block", 5), marks=pytest.mark.exhaustive),
    ],
)
def test_the_indexer_learns_the_mean_attention_of_the_layers_it_serves(
    make: Callable[..., Any], distill: str, recompute: tuple[str, ...]
) -> None:
    """Gradient and logged loss, with two micro-batches in flight; and nothing is selected twice."""
    model = make(distill, *recompute)
    watched, calls = watch(model), watch_op(core(model, FULL), "select_backend")
    attended = watch_op(core(model, FULL), "backend")
    DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    in_flight(model)
    assert len(calls) == 2
    selected = [args[2] for args, _ in attended[:2]]
    layers = (FULL, *SHARED) if distill == SERVED else (FULL,)
    loss, expected = by_hand(model, watched, selected, layers)
    grads = [parameter.grad for parameter in core(model, FULL).indexer.parameters()]
    assert far_apart(grads, expected) < 2e-5
    other = (FULL,) if distill == SERVED else (FULL, *SHARED)
    assert far_apart(by_hand(model, watched, selected, other)[1], expected) > 0.05, "the two would look alike"
    logged = DSAIndexerLossLoggingHelper.tracker["values"]
    assert torch.count_nonzero(logged) == 1
    torch.testing.assert_close(logged[FULL - 1].double(), COEFFICIENT * loss, rtol=1e-5, atol=0)


def test_two_full_layers_learn_from_their_own_shared_layers(make: Callable[..., Any]) -> None:
    """F F S: the first serves only itself, under either word; the second learns from two layers under ``served``."""
    grads = {}
    for distill in (OWN, SERVED):
        model = make(distill, schedule="FFS")
        in_flight(model)
        grads[distill] = {
            number: [parameter.grad for parameter in core(model, number).indexer.parameters()] for number in (1, 5)
        }
    assert all(torch.equal(grad, other) for grad, other in zip(grads[OWN][1], grads[SERVED][1], strict=True))
    assert far_apart(grads[OWN][5], grads[SERVED][5]) > 0.05


def test_an_incomplete_sum_is_refused(make: Callable[..., Any]) -> None:
    """Rather than to train on the attention of some of the layers."""
    model = make(SERVED)
    core(model, SHARED[1]).serves = False
    with raises(ModelError, "2 layers", "expected 3", code="incomplete-sum"):
        in_flight(model)
