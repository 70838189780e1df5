"""MTP's feed-forward layer by the op ``feed_forward``: the model matches stock's, and what only stock supports stays with it.

And its projection, which may be in an FP8 scope.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from megacpp_mcore.backends import AUTO, STOCK, Dispatcher
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.layer_specs import layer_plan, mtp
from megacpp_mcore.layer_specs.mtp import FeedForward
from megacpp_mcore.model import preset
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.ops.feed_forward.reference import feed_forward
from megacpp_mcore.te import quantized
from megacpp_mcore.te.fp8_scopes import FP8, Scopes
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.errors import raises

S, B = 32, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": 2}}


def built(folder: Path, backend: str, model_class: str = GPT) -> Any:
    stock.loss_scale(1.0)
    settings = {"backends": {"feed_forward": backend}, "model_class": model_class}
    return stock.build(OVERRIDES, preset("nam56r_tiny"), folder, **settings).train()


@pytest.fixture(scope="module")
def ours(process: Path) -> Any:
    return built(process, "reference")


def layer_of(model: Any) -> Any:
    return model.mtp.layers[0].mtp_model_layer.mlp


def test_the_model_is_stocks_to_rounding_and_so_are_its_checkpoints(process: Path, ours: Any) -> None:
    stock_model, tokens = built(process, AUTO), micro_batch.draw_tokens(B, S)
    assert (type(layer_of(stock_model)), layer_of(stock_model).backend.observed) == (MLP, STOCK)
    losses_BS, gradients = micro_batch.outcome(stock_model, tokens)
    assert (type(layer_of(ours)), layer_of(ours).backend.observed) == (FeedForward, "reference")
    our_losses_BS, our_gradients = micro_batch.outcome(ours, tokens)
    torch.testing.assert_close(our_losses_BS, losses_BS, rtol=1e-6, atol=0)
    assert differing_tensors(gradients, our_gradients, 1e-5) == []
    keys = [{tensor.key for tensor in layer_of(model).sharded_state_dict().values()} for model in (ours, stock_model)]
    assert keys[0] == keys[1] >= {"linear_fc1.weight", "linear_fc2.weight"}


def test_the_op_runs_in_place_of_the_modules_and_adds_to_main_grad(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, op = layer_of(ours), mock.Mock(wraps=feed_forward)
    monkeypatch.setattr(layer.config, "gradient_accumulation_fusion", True)
    for module in (layer.linear_fc1, layer.linear_fc2):
        monkeypatch.setattr(module, "forward", None)
        monkeypatch.setattr(module.weight, "main_grad", torch.ones_like(module.weight), raising=False)
        monkeypatch.setattr(module.weight, "grad_added_to_main_grad", False, raising=False)
    monkeypatch.setattr(layer, "backend", SimpleNamespace(fn=op, observed="triton_fp8"))
    hidden_SBD = torch.randn(5, 2, 128)
    output_SBD, bias = layer(hidden_SBD)
    output_SBD.sin().sum().backward()
    weights = [module.weight.detach().clone().requires_grad_() for module in (layer.linear_fc1, layer.linear_fc2)]
    expected_SBD = torch.nn.functional.gelu(hidden_SBD @ weights[0].T) @ weights[1].T
    expected_SBD.sin().sum().backward()
    assert bias is None
    torch.testing.assert_close(output_SBD, expected_SBD)
    ((_, *parameters, main_grads),) = (call.args for call in op.call_args_list)
    for parameter, weight, main_grad in zip(parameters, weights, main_grads, strict=True):
        assert main_grad.buffer is parameter.main_grad
        assert parameter.grad_added_to_main_grad
        assert weight.grad is not None
        torch.testing.assert_close(parameter.main_grad - 1, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model_class", "is_fp8"), [(GPT, False), (HYBRID, True)])
def test_the_projection_is_given_to_the_scopes_once_for_all_depths(
    process: Path, monkeypatch: pytest.MonkeyPatch, model_class: str, is_fp8: bool
) -> None:
    """If it is asked for; attention layers and shared experts are in any case."""
    scopes = Scopes(FP8(recipe="current", mtp=is_fp8), depth=2)  # all in the zone
    monkeypatch.setattr(layer_plan, "scopes_of", lambda *_, **__: scopes)
    monkeypatch.setattr(quantized, "watch", lambda: None)
    with mock.patch.object(scopes, "install") as install:
        model = built(process, AUTO, model_class)
    projection = mock.call(model.mtp.layers[0].eh_proj, calls=2, name="eh_proj")
    assert install.call_args_list.count(projection) == is_fp8
    assert install.call_count == sum(preset("nam56r_tiny").layers.count(letter) for letter in "AE") + is_fp8


@pytest.mark.parametrize(
    ("fused", "tensor", "flag", "named"),
    [
        (True, 1, "", "transformer_engine: {mtp: true}"),
        (False, 2, "", "--tensor-model-parallel-size"),
        (False, 1, "use_torch_fsdp2", "--use-torch-fsdp2"),
        (False, 1, "use_megatron_fsdp", "--use-megatron-fsdp"),
    ],
)
def test_what_stock_alone_can_do_is_refused_by_name(
    config: Any, fused: bool, tensor: int, flag: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.tensor_model_parallel_size = tensor
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", SimpleNamespace(**{flag: True} if flag else {}))
    build = mtp.feed_forward(MLP, Dispatcher({"feed_forward": "triton_fp8"}), fused)
    with raises(BackendError, named, "feed_forward: triton_fp8", code="stock-only"):
        build(config)


@pytest.mark.parametrize("shapes", [((3, 16), (32, 24), (16, 32)), ((3, 16), (32, 16), (32, 16)), ((3, 16), (32,), (32,))])
def test_widths_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with raises(ModelError, str(shapes[1]), "[F, D]"):
        feed_forward(*(torch.zeros(shape) for shape in shapes))
