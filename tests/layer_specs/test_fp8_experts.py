"""FP8 experts without a GPU: recipes and their words, the precision file as stock reads it, refusals, padding, the BF16 zone.

Shape legend: T rows routed to this rank's experts, N experts, D hidden.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from megacpp_mcore.arguments.lowering import check_arguments, mismatches
from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.errors import ArgumentMismatchError, ModelError
from megacpp_mcore.model import Model, precision, preset, with_overrides
from megacpp_mcore.model.training import GPT
from megacpp_mcore.ops.testing import assert_parity
from tests import stock

FILE = ("--te-precision-config-file", str(precision.EXPERTS_FILE))
EXPERT_NAMES = [f"decoder.layers.{index}.mlp.experts.linear_fc{half}" for index in (1, 3, 17, 51) for half in (1, 2)]


def words_of(model: Model, precision_name: str, host: str = GPT) -> list[str]:
    return stock.words(model, device="cuda", precision=precision_name, host=host)


def config_of(words: list[str]) -> Any:
    """The GPTModelConfig that stock makes of a GPU run's words, read on a machine without a GPU."""
    with stock.gpu_host():
        return stock.model_config(words)


# --- The file ---------------------------------------------------------------------------------------------------------


def test_stock_reads_block_scaling_from_the_file() -> None:
    from megatron.core.enums import Fp8Recipe
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

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
    from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

    recipe = load_quantization_recipe(str(precision.EXPERTS_FILE))
    model = stock.build({"seq_length": 32, "dsa": {"topk": 8}}, preset("nam56r_tiny"), tmp_path)
    names = [name for name, _ in model.named_modules()]
    assert {"output_layer", "decoder.layers.1.mlp.shared_experts.linear_fc1", "decoder.layers.1.mlp.router"} <= set(
        names
    )
    assert any(name.startswith("mtp.") and name.endswith("mlp.linear_fc1") for name in names)
    assert [name for name in names if get_quant_config_or_none(name, recipe) is not None] == []


# --- What is refused in a run -----------------------------------------------------------------------------------------


def test_a_run_of_the_recipe_is_what_the_model_wants(process: Path, tmp_path: Path) -> None:
    model = preset("nam56r_quarter")
    copied = tmp_path / "mine.yaml"
    copied.write_text("# the same, written differently\n" + yaml.safe_dump(_content(), sort_keys=True))
    for file in (precision.EXPERTS_FILE, copied):
        words = [str(file) if word == FILE[1] else word for word in words_of(model, "bf16_fp8_experts")]
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
def test_a_file_that_says_something_else(
    process: Path, tmp_path: Path, place: tuple[str, ...], change: dict[str, Any]
) -> None:
    content, file = _content(), tmp_path / "other.yaml"
    found = reduce(getitem, place, content)
    found |= change
    for name in [name for name, value in found.items() if value is None]:
        del found[name]
    file.write_text(yaml.safe_dump(content))
    model = preset("nam56r_quarter")
    words = [str(file) if word == FILE[1] else word for word in words_of(model, "bf16_fp8_experts")]
    config = config_of(words)
    expected = f"expected what {re.escape(str(precision.EXPERTS_FILE))} says, FP8 in the experts alone"
    with pytest.raises(ArgumentMismatchError, match=f"in 1 place:\n  quant_recipe: found .*{expected}"):
        check_arguments(model, [config.transformer, config])


def test_the_file_where_it_would_be_ignored(process: Path) -> None:
    model = preset("nam56r_tiny")
    config = stock.model_config([*stock.words(model), *FILE])
    found = mismatches(model, [config.transformer, config])
    assert [line.partition(":")[0] for line in found] == ["transformer_impl", "bf16", "moe_grouped_gemm"]
    assert found[0].endswith("expected 'transformer_engine' with FP8 experts (--transformer-impl transformer_engine)")


def test_a_model_without_experts_between_first_and_last_has_nothing_to_put_into_fp8(process: Path) -> None:
    model = with_overrides(preset("nam56r_tiny"), {"pattern": "AAME", "depth": 4, "dsa": {"schedule": "-"}})
    config = config_of([*words_of(model, "bf16"), *FILE])
    (found,) = mismatches(model, [config.transformer, config])
    assert found.startswith("quant_recipe: nam56r_tiny has no E layer between its first and last")


# --- The experts' module ----------------------------------------------------------------------------------------------


class GroupedLinear(torch.nn.Module):
    """What FP8Experts asks of Megatron's grouped linear layer, in plain PyTorch, with the rows of every call."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.te_quant_params: Any = None
        self.calls: list[list[int]] = []
        generator = torch.Generator().manual_seed(input_size)
        shape = (num_gemms, output_size, input_size)
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator) / input_size**0.5)

    def finish_init(self, quantization_config: Any) -> None:
        self.te_quant_params = quantization_config

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        return self.te_quant_params is not None

    def forward(self, rows_TD: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, None]:
        self.calls.append(splits)
        parts = zip(rows_TD.split(splits), self.weight, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


class Padding(torch.nn.Module):
    """Transformer Engine's Fp8Padding, in plain PyTorch: zeros after each expert's rows."""

    def __init__(self, num_gemms: int, align_size: int) -> None:
        super().__init__()
        self.align_size = align_size

    def padded(self, splits: list[int]) -> list[int]:
        return [-(-rows // self.align_size) * self.align_size for rows in splits]

    def forward(self, rows_TD: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        padded = self.padded(splits)
        parts = zip(rows_TD.split(splits), splits, padded, strict=True)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, 0, 0, after - before)) for part, before, after in parts]), padded


class Unpadding(Padding):
    def forward(self, rows_TD: torch.Tensor, splits: list[int]) -> torch.Tensor:  # type: ignore[override]
        parts = zip(rows_TD.split(self.padded(splits)), splits, strict=True)
        return torch.cat([part[:rows] for part, rows in parts])


@pytest.fixture
def layer(process: Path) -> Iterator[Callable[[int], Any]]:
    """Builds E layer ``number`` of nam56r_tiny as our spec has it, with the grouped linear layers above for TE's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from megatron.core.transformer.spec_utils import build_module

    from megacpp_mcore.layer_specs import experts
    from megacpp_mcore.layer_specs.parts import parts_for

    class Provider(LocalSpecProvider):
        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            linears: Any = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)  # type: ignore[arg-type]
            return partial(TEGroupedMLP, submodules=linears)

    with mock.patch.multiple(experts, Fp8Padding=Padding, Fp8Unpadding=Unpadding):
        config = stock.model_config(stock.words(preset("nam56r_tiny"))).transformer
        recipe = load_quantization_recipe(str(precision.EXPERTS_FILE))
        parts = dataclasses.replace(parts_for(config), backend=Provider())
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)

        def build(number: int, quant_recipe: Any = recipe) -> Any:
            config.quant_recipe = quant_recipe
            asked = {} if quant_recipe is not None else {"experts": STOCK}
            spec = experts.expert_layer_spec(config, parts, Dispatcher(asked))
            built = build_module(spec, config=config, layer_number=number, pg_collection=groups)
            # As GPTModel and HybridModel do, by the name on the pipeline stage.
            for name, module in built.named_modules():
                if hasattr(module, "finish_init"):
                    module.finish_init(get_quant_config_or_none(f"decoder.layers.0.{name}", quant_recipe))
            return built

        yield build


ROWS = (0, 17, 333, 16)
"""Rows of the four experts of nam56r_tiny: none, one too many, odd, and a full tile."""


def run(experts: Any, rows: tuple[int, ...] = ROWS) -> list[torch.Tensor]:
    """Output and gradients of input, probabilities and weights."""
    generator = torch.Generator().manual_seed(3)
    hidden_TD = torch.randn(sum(rows), experts.input_size, generator=generator).requires_grad_()
    probs_T = torch.rand(sum(rows), generator=generator).requires_grad_()
    weights = [experts.linear_fc1.weight, experts.linear_fc2.weight]
    output_TD, bias = experts(hidden_TD, torch.tensor(rows), probs_T)
    assert bias is None
    assert output_TD.shape == hidden_TD.shape
    gradient = torch.randn(output_TD.shape, generator=generator)
    return [output_TD, *torch.autograd.grad(output_TD, [hidden_TD, probs_T, *weights], gradient)]


def test_every_experts_rows_are_padded_and_come_back_as_they_were(layer: Callable[..., Any]) -> None:
    plain, ours = layer(2, quant_recipe=None).mlp.experts, layer(2).mlp.experts
    assert (type(plain).__name__, type(ours).__name__) == ("TEGroupedMLP", "FP8Experts")
    expected, found = run(plain), run(ours)
    assert plain.linear_fc1.calls == [list(ROWS)]
    assert ours.linear_fc1.calls == ours.linear_fc2.calls == [[0, 32, 336, 16]]
    for one, other in zip(expected, found, strict=True):
        assert_parity(other, one, rms=1e-5)
    assert found[3][0].abs().max() == 0  # the expert without a row
    assert [tuple(value.shape) for value in run(ours, (0, 0, 0, 0))[:3]] == [(0, 128), (0, 128), (0,)]


@pytest.mark.parametrize(("number", "in_fp8"), [(1, False), (2, True), (11, True), (12, False)])
def test_first_and_last_layer_stay_in_bf16_whatever_their_name(
    layer: Callable[..., Any], number: int, in_fp8: bool
) -> None:
    experts = layer(number).mlp.experts
    assert experts.layer_number == number
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert (linear.te_quant_params is not None) is in_fp8
    run(experts)
    assert (experts.linear_fc1.calls == [list(ROWS)]) is not in_fp8
    assert list(experts.state_dict()) == list(layer(number, quant_recipe=None).mlp.experts.state_dict())


def test_experts_that_were_given_no_fp8_do_not_run_in_bf16(layer: Callable[..., Any]) -> None:
    experts = layer(2).mlp.experts
    experts.linear_fc2.finish_init(None)
    with pytest.raises(ModelError, match="layer 2: linear_fc2 of the experts was given no FP8"):
        run(experts)


def test_the_file_is_the_reason_for_stocks_experts(layer: Callable[..., Any]) -> None:
    found, plain = layer(2).mlp, layer(2, quant_recipe=None).mlp
    assert (found.experts_backend.requested, found.experts_backend.observed) == ("auto", STOCK)
    assert "FP8 experts (--te-precision-config-file)" in found.experts_backend.reason
    assert type(found.shared_experts) is type(plain.shared_experts)


# --- The page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_files_own_words() -> None:
    page = (stock.ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert yaml.safe_load(block[1]) == _content()
