"""FP8 experts as they are asked for: recipes, models and machines that cannot, the precision file as stock reads it."""

from __future__ import annotations

import dataclasses
import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

from megacpp_mcore.arguments.lowering import check_arguments, lower, mismatches
from megacpp_mcore.errors import ArgumentMismatchError, ModelError
from megacpp_mcore.model import Model, precision, preset, with_overrides
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests import stock
from tests.errors import raises

FILE = ("--te-precision-config-file", str(precision.EXPERTS_FILE))
EXPERT_NAMES = [f"decoder.layers.{index}.mlp.experts.linear_fc{half}" for index in (1, 3, 17, 51) for half in (1, 2)]


def words_of(model: Model, precision_name: str, model_class: str = GPT) -> list[str]:
    return stock.words(model, device="cuda", precision=precision_name, model_class=model_class)


def config_of(words: list[str]) -> Any:
    """The GPTModelConfig that stock makes of a GPU run's words, read on a machine without a GPU."""
    with stock.gpu_host():
        return stock.model_config(words)


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
def test_the_precision_adds_the_file_and_leaves_out_graphs(model_class: str) -> None:
    twin = RECIPES["nam56r_pretrain_8gpu_h200_bf16"]
    plain = dataclasses.replace(twin.run.training, cuda_graphs=False)
    eight_bit = dataclasses.replace(twin.run.training, precision="bf16_te_fp8_experts")
    words = lower(Run(twin.model, twin.run.layout, eight_bit, model_class))
    at = words.index(FILE[0])
    assert words[at : at + 2] == FILE
    assert (*words[:at], *words[at + 2 :]) == lower(Run(twin.model, twin.run.layout, plain, model_class))
    assert "--fp8-format" not in words
    assert {"--bf16", "--moe-grouped-gemm"} <= set(words)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_there_is_no_transformer_engine(device: str) -> None:
    with raises(ModelError, "bf16_te_fp8_experts", "CPU" if device == "cpu" else "transformer_impl local"):
        Training(precision="bf16_te_fp8_experts", transformer_impl="local", device=device)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ({"pattern": "AAMA", "depth": 4}, ("nam56r_tiny", "E layer")),
        ({"pattern": "AAME", "depth": 4}, ("nam56r_tiny", "E layer")),
        ({"moe": {"ffn_hidden_size": 120}}, ("moe.ffn_hidden_size of nam56r_tiny is 120", 16)),
    ],
)
def test_models_that_cannot(overrides: dict[str, Any], values: tuple[object, ...]) -> None:
    schedule = {"dsa": {"schedule": "-"}} if "pattern" in overrides else {}
    model = with_overrides(preset("nam56r_tiny"), {**overrides, **schedule})
    with raises(ModelError, *values):
        words_of(model, "bf16_te_fp8_experts")
    assert "--te-precision-config-file" not in words_of(model, "bf16")


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


def test_stock_reads_block_scaling_from_the_file() -> None:
    recipe = load_quantization_recipe(str(precision.EXPERTS_FILE))
    for name in EXPERT_NAMES:
        matched = get_quant_config_or_none(name, recipe)
        assert matched is not None
        params = TEQuantizationParams.parse_from_config(matched)
        assert params.evaluation_recipe is None  # evaluation is as training
        assert params.training_recipe.fp8_quantization_recipe == Fp8Recipe.blockwise
        assert params.training_recipe.override_nonquantized_autocast is True
        assert (params.training_recipe.fp8_format, params.training_recipe.fp8_param) == ("e4m3", False)
        assert params.training_recipe.fp4_quantization_recipe is None


def test_the_file_names_no_other_module_of_a_model(process: Path, tmp_path: Path) -> None:
    """Every module of all four families, MTP and heads, by the names of GPTModel and, for experts, of Transformer Engine."""
    recipe = load_quantization_recipe(str(precision.EXPERTS_FILE))
    model = stock.build({"seq_length": 32, "dsa": {"topk": 8}}, preset("nam56r_tiny"), tmp_path)
    names = [name for name, _ in model.named_modules()]
    expert_layer = {f"decoder.layers.1.mlp.{name}" for name in ("shared_experts.linear_fc1", "router")}
    assert {"output_layer", *expert_layer} <= set(names)
    assert any(name.startswith("mtp.") and name.endswith("mlp.linear_fc1") for name in names)
    assert [name for name in names if get_quant_config_or_none(name, recipe) is not None] == []


def test_a_run_of_the_recipe_is_what_the_model_wants(process: Path, tmp_path: Path) -> None:
    model = preset("nam56r_quarter")
    copied = tmp_path / "mine.yaml"
    copied.write_text("# the same, written differently\n" + yaml.safe_dump(_content(), sort_keys=True))
    for file in (precision.EXPERTS_FILE, copied):
        words = [str(file) if word == FILE[1] else word for word in words_of(model, "bf16_te_fp8_experts")]
        config = config_of(words)
        assert config.transformer.quant_recipe is not None
        assert config.transformer.fp8 is None
        assert mismatches(model, [config.transformer, config]) == []


def _content() -> dict[str, Any]:
    content = yaml.safe_load(precision.EXPERTS_FILE.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


EXPERTS, BLOCKS = ("matchers", "experts"), ("configs", "fp8_blockwise", "training_recipe")


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (EXPERTS, {"pattern": "*"}),
        (EXPERTS, {"enabled": False}),
        (BLOCKS, {"fp8_quantization_recipe": "tensorwise"}),
        (BLOCKS, {"override_nonquantized_autocast": None}),
        (("matchers",), {"shared": _content()["matchers"]["experts"] | {"pattern": "*.shared_experts.*"}}),
    ],
)
def test_a_file_that_says_something_else(process: Path, tmp_path: Path, place: tuple[str, ...], change: dict[str, Any]) -> None:
    content, file = _content(), tmp_path / "other.yaml"
    section = reduce(getitem, place, content)
    section |= change
    for name in [name for name, value in section.items() if value is None]:
        del section[name]
    file.write_text(yaml.safe_dump(content))
    model = preset("nam56r_quarter")
    words = [str(file) if word == FILE[1] else word for word in words_of(model, "bf16_te_fp8_experts")]
    config = config_of(words)
    named = "in 1 place", "quant_recipe:", precision.EXPERTS_FILE, "recipe emit nam56r_quarter"
    with raises(ArgumentMismatchError, *named):
        check_arguments(model, [config.transformer, config])


def test_the_file_where_it_would_be_ignored(process: Path) -> None:
    model = preset("nam56r_tiny")
    config = stock.model_config([*stock.words(model), *FILE])
    lines = mismatches(model, [config.transformer, config])
    assert [line.partition(":")[0] for line in lines] == ["transformer_impl", "bf16", "moe_grouped_gemm"]
    assert lines[0].endswith("expected 'transformer_engine' with FP8 experts (--transformer-impl transformer_engine)")


def test_a_model_without_experts_between_first_and_last_has_nothing_to_put_into_fp8(process: Path) -> None:
    model = with_overrides(preset("nam56r_tiny"), {"pattern": "AAME", "depth": 4, "dsa": {"schedule": "-"}})
    config = config_of([*words_of(model, "bf16"), *FILE])
    (problem,) = mismatches(model, [config.transformer, config])
    assert problem.startswith("quant_recipe: nam56r_tiny has no E layer between its first and last")


def test_the_page_has_the_files_own_words() -> None:
    page = (stock.ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert yaml.safe_load(block[1]) == _content()
