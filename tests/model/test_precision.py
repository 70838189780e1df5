"""FP8 experts as they are asked for: recipes and their words, models and machines that cannot, which layers they are in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Layout, precision, preset, with_overrides
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.training import GPT, HYBRID, Training

FILE = ("--te-precision-config-file", str(precision.EXPERTS_FILE))


@pytest.mark.parametrize("stem", ["nam56r_pretrain_8gpu_h200", "nam56r_quarter_pretrain_1gpu_h200"])
@pytest.mark.parametrize("host", [GPT, HYBRID])
def test_a_recipe_differs_from_its_bf16_twin_by_the_file_alone(stem: str, host: str) -> None:
    ours, twin = RECIPES[f"{stem}_fp8_experts"], RECIPES[f"{stem}_bf16"]
    assert ours == dataclasses.replace(
        twin, name=ours.name, training=dataclasses.replace(twin.training, precision="bf16_fp8_experts")
    )
    found, plain = (lower(one.model, one.layout, one.training, host) for one in (ours, twin))
    at = found.index(FILE[0])
    assert found[at : at + 2] == FILE
    assert (*found[:at], *found[at + 2 :]) == plain
    assert "--fp8-format" not in found
    assert {"--bf16", "--moe-grouped-gemm"} <= set(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_there_is_no_transformer_engine(device: str) -> None:
    says = "and the CPU lane has none" if device == "cpu" else "and transformer_impl local has none; use bf16"
    with pytest.raises(ModelError, match=f"by Transformer Engine's grouped GEMM, {says}"):
        Training(precision="bf16_fp8_experts", transformer_impl="local", device=device)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"pattern": "AAMA", "depth": 4}, "has no E layer between its first and last"),
        ({"pattern": "AAME", "depth": 4}, "has no E layer between its first and last"),
        (
            {"moe": {"ffn_hidden_size": 120}},
            "moe.ffn_hidden_size of nam56r_tiny is 120, and an FP8 GEMM needs a multiple of 16",
        ),
    ],
)
def test_models_that_cannot(overrides: dict[str, Any], says: str) -> None:
    schedule = {"dsa": {"schedule": "-"}} if "pattern" in overrides else {}
    model = with_overrides(preset("nam56r_tiny"), {**overrides, **schedule})
    with pytest.raises(ModelError, match=says):
        lower(model, Layout(), Training(precision="bf16_fp8_experts"))
    assert "--te-precision-config-file" not in lower(model, Layout(), Training())


@pytest.mark.parametrize(
    ("name", "first_and_last", "how_many"), [("nam56r", "AE", 21), ("nam56r_quarter", "AA", 5), ("nam52", "AE", 25)]
)
def test_the_last_layer_stays_in_bf16(name: str, first_and_last: str, how_many: int) -> None:
    model = preset(name)
    assert model.layers[0] + model.layers[-1] == first_and_last
    layers = precision.expert_layers(model)
    assert len(layers) == how_many
    assert {model.layers[number - 1] for number in layers} == {"E"}
    assert model.depth not in layers
