"""A layer's first norm by the op ``rms_norm``: the model matches stock's, and what only stock supports stays with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.errors import BackendError
from megacpp_mcore.layer_specs.norm import residual_norm
from megacpp_mcore.layer_specs.parts import parts_for
from megacpp_mcore.model import preset
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.errors import raises

S, B = 32, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}}


@pytest.fixture(scope="module")
def built(process: Path) -> Callable[..., Any]:
    """Builds a model with a backend of the norm, each once."""

    @functools.cache
    def build(backend: str, *words: str) -> Any:
        stock.loss_scale(1.0)
        return stock.build(OVERRIDES, preset("nam56r_tiny"), process, *words, backends={"rms_norm": backend}).train()

    return build


@pytest.mark.parametrize("words", [(), stock.full_recompute()], ids=["", "recomputed"])
def test_the_model_is_stocks_to_rounding(built: Callable[..., Any], words: tuple[str, ...]) -> None:
    tokens = micro_batch.draw_tokens(B, S)
    losses_BS, gradients = micro_batch.outcome(built(STOCK), tokens)
    model = built("reference", *words)
    our_losses_BS, our_gradients = micro_batch.outcome(model, tokens)
    for layer in (*model.decoder.layers, model.mtp.layers[0].mtp_model_layer):
        norms = [module for name, module in layer.named_children() if name.endswith("layernorm")]
        assert any(getattr(module, "backend", None) and module.backend.observed == "reference" for module in norms)
    depth = model.mtp.layers[0]
    plain = [depth.enorm, depth.hnorm, depth.final_layernorm]
    assert {norm.backend.observed for norm in plain} == {"reference"}
    assert all(type(norm(torch.randn(2, 128))) is torch.Tensor for norm in plain)
    torch.testing.assert_close(our_losses_BS, losses_BS, rtol=1e-6, atol=0)
    assert differing_tensors(gradients, our_gradients, 1e-5) == []


def test_checkpoints_are_stocks_and_a_copy_has_its_own_weight(built: Callable[..., Any]) -> None:
    ours, stock_layer = (built(backend).decoder.layers[2] for backend in ("reference", STOCK))
    keys = [{tensor.key for tensor in layer.sharded_state_dict().values()} for layer in (ours, stock_layer)]
    assert keys[0] == keys[1] >= {"input_layernorm.weight"}
    copied, x = copy.deepcopy(ours.input_layernorm), torch.randn(3, 1, 128)
    assert copied.returns_residual  # as TransformerLayer asks since NVIDIA/Megatron-LM#4497
    with torch.no_grad():
        copied.weight.mul_(2)
        (doubled, residual), (normed, _) = copied(x), ours.input_layernorm(x)
    torch.testing.assert_close(doubled, 2 * normed)
    assert torch.equal(residual, x)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "--recompute-modules layernorm"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm"]}, "offloaded mlp_norm"),
    ],
)
def test_what_stock_alone_can_do_stays_with_it(config: Any, changes: dict[str, Any], says: str) -> None:
    vars(config).update(changes)
    made = [
        residual_norm(parts_for(config), Dispatcher(requests))(config=config, hidden_size=128, eps=1e-5)
        for requests in ({}, {"rms_norm": STOCK})
    ]
    assert {module.backend.observed for module in made} == {STOCK}
    assert all(type(module).__module__.startswith("torch.nn") for module in made)
    assert says in made[0].backend.reason
    asks = residual_norm(parts_for(config), Dispatcher({"rms_norm": "reference"}))
    with raises(BackendError, "rms_norm: reference", says, code="stock-only"):
        asks(config=config, hidden_size=128, eps=1e-5)


@pytest.mark.parametrize("backend", [STOCK, "reference"])
def test_stocks_norm_is_the_one_that_fuses_its_residual(config: Any, backend: str) -> None:
    fusing = mock.Mock(wraps=parts_for(config).norm)
    parts = dataclasses.replace(parts_for(config), residual_norm=fusing)
    residual_norm(parts, Dispatcher({"rms_norm": backend}))(config=config, hidden_size=128, eps=1e-5)
    assert fusing.call_count == (backend == STOCK)
    config.recompute_granularity, config.recompute_modules = "selective", ["layernorm"]
    residual_norm(parts, Dispatcher())(config=config, hidden_size=128, eps=1e-5)
    assert fusing.call_count == (backend == STOCK)  # its residual would be freed
