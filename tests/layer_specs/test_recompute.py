"""Recompute by family changes what is kept, never the losses or the gradients.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import layer_plan
from megacpp_mcore.model import preset
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.settings import PluginConfig
from tests import stock
from tests.errors import raises
from tests.micro_batch import causal_mask, draw_tokens, gradients, losses_of
from tests.ops.saved_tensors import saved_bytes

S, B = 32, 2
TINY = preset("nam56r_tiny")
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": 2}}
FAMILIES = ["a", "m", "experts", "r", "mtp"]


@pytest.fixture(scope="module")
def build(process: Path) -> Callable[..., Any]:
    """Builds equal models; ``recompute`` as in the file."""
    return lambda recompute=(): stock.stirred(stock.build(OVERRIDES, TINY, process, recompute=list(recompute)))


def losses_BS(model: Any, seed: int) -> torch.Tensor:
    return losses_of(model, draw_tokens(B, S, seed), attention_mask=causal_mask(S))


def two_micro_batches(model: Any) -> dict[str, torch.Tensor]:
    """Gradients after two micro-batches that were both in flight, as in a pipeline."""
    model.zero_grad()
    first, second = losses_BS(model, 1).mean(), losses_BS(model, 2).mean()
    first.backward()
    second.backward()
    return gradients(model)


@pytest.fixture(scope="module")
def plain(build: Callable[..., Any]) -> Any:
    """The model without recompute."""
    return build()


@pytest.fixture(scope="module")
def truth(plain: Any) -> dict[str, torch.Tensor]:
    return two_micro_batches(plain)


@pytest.mark.parametrize("words", [(), stock.full_recompute()], ids=["alone", "in whole layers"])
def test_the_mlp_of_mtp_in_chunks(
    truth: dict[str, torch.Tensor], process: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Of 5 rows each, the last of 2; one of the two depths is in a chunk's memory at a time."""
    monkeypatch.setattr(layer_plan, "MTP_MLP_TOKENS", 5 * B)
    model = stock.stirred(stock.build(OVERRIDES, TINY, process, *words, recompute=["mtp"]))
    rows: list[int] = []
    fc1 = model.mtp.layers[0].mtp_model_layer.mlp.linear_fc1
    fc1.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    check_gradients(two_micro_batches(model), truth)
    assert set(rows) == {5, 2}
    runs = 3 if words else 2  # forward and again; in layers twice
    assert len(rows) == 7 * 2 * 2 * runs  # for each micro-batch and depth


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_of_a_family_keeps_gradients_and_saves_memory(
    build: Callable[..., Any], plain: Any, truth: dict[str, torch.Tensor], family: str
) -> None:
    model = build(recompute=[family])
    assert list(model.state_dict()) == list(plain.state_dict())
    saved, without = (saved_bytes(lambda model=model: losses_BS(model, 1)) for model in (model, plain))
    assert saved < without
    check_gradients(two_micro_batches(model), truth)


def test_all_families_at_once(build: Callable[..., Any], truth: dict[str, torch.Tensor]) -> None:
    check_gradients(two_micro_batches(build(recompute=FAMILIES)), truth)


def check_gradients(actual: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == truth.keys()
    assert any(name.startswith("mtp.") for name in truth)
    for name, gradient in truth.items():
        assert_parity(actual[name], gradient, rms=1e-4, name=name)


@pytest.mark.parametrize(
    ("recompute", "granularity", "modules", "values"),
    [
        ("m", "full", [], ["full"]),
        ("mtp", "selective", ["mlp"], ["asks for mtp", "--recompute-modules mlp"]),
        ("experts", "selective", ["moe"], ["experts", "--recompute-modules moe"]),
        ("experts", "selective", ["moe_act"], ["experts", "--recompute-modules moe_act"]),
        ("a", "selective", ["mla_up_proj"], ["asks for a", "--recompute-modules mla_up_proj"]),
        ("a", "selective", ["core_attn"], ["asks for a", "--recompute-modules core_attn"]),
    ],
)
def test_what_megatron_recomputes_already_is_refused(
    recompute: str, granularity: str, modules: list[str], values: list[str]
) -> None:
    config: Any = SimpleNamespace(recompute_granularity=granularity, recompute_modules=modules, quant_recipe=None)
    settings = PluginConfig(Path("run.yaml"), "nam56r_tiny", TINY, recompute=Recompute(**{recompute: True}))
    with raises(ModelError, *values):
        layer_plan.layer_plan(settings, config)
    if granularity == "selective":
        assert layer_plan.layer_plan(dataclasses.replace(settings, recompute=Recompute(r=True)), config).recompute.r
