"""The patch mtp-shared-block, and the multi-token prediction that it makes: no leak, a trained trunk, decayed weights.

Legend: B batch, S sequence; depth k (from 1) of K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import patches
from megacpp_mcore.model import preset, with_overrides
from tests import stock

NAME = "mtp-shared-block"
B, S, K = 2, 16, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": K}}


@pytest.fixture
def model(process: Path) -> Any:
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    stock.loss_scale(1.0)
    return model.train()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (B, S + 1), generator=torch.Generator().manual_seed(3))


class Recorder:
    """Takes the place of a model's ``compute_language_model_loss``: depths 1 … K first, then the main loss."""

    def __init__(self, model: Any) -> None:
        self.stock = model.compute_language_model_loss
        self.labels: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        model.compute_language_model_loss = self

    def __call__(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        losses = self.stock(labels, logits)
        if losses.requires_grad:
            losses.retain_grad()
        self.labels.append(labels.clone())
        self.losses.append(losses)
        return losses


def run(model: Any, inputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    attention_mask = ~torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    positions = torch.arange(S).expand(B, S)
    mask = torch.ones(B, S) if mask is None else mask
    return model(inputs, positions, attention_mask, labels=labels, loss_mask=mask)


def recorded(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> Recorder:
    recorder = Recorder(model)
    run(model, inputs, labels)
    model.compute_language_model_loss = recorder.stock
    assert len(recorder.losses) == K + 1
    return recorder


# --- what a depth sees and predicts ------------------------------------------------------------------------------------


def test_depth_k_predicts_the_token_at_t_plus_k_plus_1(model: Any, tokens: torch.Tensor) -> None:
    labels = recorded(model, tokens[:, :-1], tokens[:, 1:]).labels
    assert torch.equal(labels[K], tokens[:, 1:])
    for k in range(1, K + 1):
        assert torch.equal(labels[k - 1][:, : S - k], tokens[:, k + 1 :])


@pytest.mark.parametrize("changed", [5, 9, S - 1])
def test_no_depth_sees_the_token_it_predicts(model: Any, tokens: torch.Tensor, changed: int) -> None:
    """Another token at ``changed``, in the inputs alone: position t of depth k may notice from t = changed − k on."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 101) % 256
    with torch.no_grad():
        before, after = (recorded(model, either, labels).losses for either in (inputs, other))
    for index, depth in enumerate([*range(1, K + 1), 0]):  # the main loss is depth 0: it predicts t + 1
        first = changed - depth  # the position before it is the one that predicts the changed token
        difference = (before[index] - after[index]).abs()
        assert float(difference[:, :first].max()) < 1e-5
        assert float(difference[:, first].min()) > 1e-4


# --- what it trains ----------------------------------------------------------------------------------------------------


def test_the_trunk_and_the_one_block_get_gradients_from_mtp_alone(model: Any, tokens: torch.Tensor) -> None:
    assert len(model.mtp.layers) == 1
    model.config.dsa_indexer_loss_coeff = 0.0
    model.config.moe_aux_loss_coeff, model.config.moe_z_loss_coeff = 0.0, None
    found = {}
    for scale in (0.0, 1.0):
        stock.loss_scale(scale)
        model.zero_grad(set_to_none=True)
        (run(model, tokens[:, :-1], tokens[:, 1:]) * 0.0).sum().backward()
        found[scale] = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." not in name}
    for name, gradient in found[0.0].items():
        assert gradient is None or torch.count_nonzero(gradient) == 0, name
    trained = {name for name, gradient in found[1.0].items() if gradient is not None and torch.count_nonzero(gradient)}
    for name in found[1.0]:
        assert name in trained, name


@pytest.fixture
def plain() -> Iterator[Callable[[], None]]:
    """Takes the patch away for one test."""
    yield lambda: patches.revert([NAME])
    patches.apply([NAME])


def depth_gradients(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    recorder = Recorder(model)
    losses = run(model, tokens[:, :-1], tokens[:, 1:], mask)
    (losses * 0.0).sum().backward()
    model.compute_language_model_loss = recorder.stock
    return [losses.grad for losses in recorder.losses[:K]]


def test_each_depth_weighs_by_the_decay(model: Any, tokens: torch.Tensor, plain: Callable[[], None]) -> None:
    """λ·β^(k−1) / Σ β^(j−1), as gradients of the mean loss of each depth; upstream alone: λ / K for every depth."""
    weights = with_overrides(preset("nam56r_tiny"), OVERRIDES).mtp.weights
    assert weights == pytest.approx((0.3 / 1.6, 0.3 * 0.6 / 1.6))
    decayed = depth_gradients(model, tokens)
    plain()
    equal = depth_gradients(model, tokens)
    for k in range(1, K + 1):
        per_token = torch.full((B, S), 1 / (B * (S - k)))
        per_token[:, S - k :] = 0  # nothing to predict there
        assert torch.allclose(decayed[k - 1], weights[k - 1] * per_token, rtol=1e-5, atol=0)
        assert torch.allclose(equal[k - 1], 0.3 / K * per_token, rtol=1e-5, atol=0)


def test_masked_tokens_do_not_count(model: Any, tokens: torch.Tensor) -> None:
    mask = torch.ones(B, S)
    mask[0, 4:] = 0
    gradients = depth_gradients(model, tokens, mask)
    for k in range(1, K + 1):
        shifted = torch.zeros(B, S)
        shifted[:, : S - k] = mask[:, k:]
        weight = (0.3 / 1.6, 0.18 / 1.6)[k - 1]
        assert torch.allclose(gradients[k - 1], weight * shifted / shifted.sum(), rtol=1e-5, atol=0)


def test_logged_losses_are_plain_means(model: Any, tokens: torch.Tensor) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    losses = recorded(model, tokens[:, :-1], tokens[:, 1:]).losses
    logged = MTPLossLoggingHelper.tracker["loss_values"]
    expected = torch.stack([losses[k - 1][:, : S - k].mean() for k in range(1, K + 1)])
    assert torch.allclose(logged, expected.detach(), rtol=1e-5)


# --- the patch itself --------------------------------------------------------------------------------------------------


def test_specs_that_bring_no_mtp_are_left_to_stock(process: Path) -> None:
    from megacpp_mcore.patches.mtp_shared_block import _block_spec

    asked: list[Any] = []
    replacement = _block_spec(lambda config, spec, vp_stage=None: asked.append((config, spec, vp_stage)) or "stock")
    assert replacement("config", SimpleNamespace(layer_specs=[]), vp_stage=1) == "stock"
    assert len(asked) == 1
    assert asked[0][0] == "config"
    assert asked[0][2] == 1
    assert replacement("config", SimpleNamespace(mtp=None)) is None
    assert replacement("config", SimpleNamespace(mtp="ours")) == "ours"
    assert len(asked) == 1


def test_configurations_without_a_decay_are_left_to_stock() -> None:
    from megacpp_mcore.patches.mtp_shared_block import _weighted_loss

    def original(hidden: Any, compute_language_model_loss: Any, config: Any) -> Any:
        return [compute_language_model_loss(None, hidden) for _ in range(config.mtp_num_layers)]

    def gradients(**settings: Any) -> list[float]:
        x = torch.ones(K, requires_grad=True)
        losses = _weighted_loss(original)(
            x, compute_language_model_loss=lambda _, logits: logits.sum(), config=SimpleNamespace(**settings)
        )
        return [float(torch.autograd.grad(loss, x, retain_graph=True)[0][0]) for loss in losses]

    assert gradients(mtp_num_layers=2) == [1.0, 1.0]
    assert gradients(mtp_num_layers=1, mtp_loss_decay=0.6) == [1.0]
    assert gradients(mtp_num_layers=2, mtp_loss_decay=0.6) == pytest.approx([2 / 1.6, 1.2 / 1.6])
    assert gradients(mtp_num_layers=3, mtp_loss_decay=1.0) == pytest.approx([1.0] * 3)
