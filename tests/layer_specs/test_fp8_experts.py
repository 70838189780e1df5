"""FP8 experts without a GPU: padding, the BF16 zone, refusals; how they are asked for: tests/model/test_precision.py.

Shape legend: T rows routed to this rank's experts, N experts, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import build_module

from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import experts
from megacpp_mcore.layer_specs.parts import parts_for
from megacpp_mcore.model import precision, preset
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.util import te_imports
from tests import stock
from tests.errors import raises


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

    class Provider(LocalSpecProvider):
        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            linears: Any = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)  # type: ignore[arg-type]
            return partial(TEGroupedMLP, submodules=linears)

    with (
        mock.patch.multiple(experts, Fp8Padding=Padding, Fp8Unpadding=Unpadding),
        mock.patch.object(te_imports, "entry", return_value=lambda return_reason: (True, "")),
    ):
        config = stock.model_config(stock.words(preset("nam56r_tiny"))).transformer
        recipe = load_quantization_recipe(str(precision.EXPERTS_FILE))
        parts = dataclasses.replace(parts_for(config), backend=Provider())
        groups = ProcessGroupCollection.use_mpu_process_groups()
        stock.restart_random()

        def build(number: int, quant_recipe: Any = recipe) -> Any:
            config.quant_recipe = quant_recipe
            backends = {} if quant_recipe is not None else {"experts": STOCK}
            spec = experts.expert_layer_spec(config, parts, Dispatcher(backends))
            built = build_module(spec, config=config, layer_number=number, pg_collection=groups)
            # As GPTModel and HybridModel do, by the name on the pipeline stage.
            for name, module in built.named_modules():
                if hasattr(module, "finish_init"):
                    module.finish_init(get_quant_config_or_none(f"decoder.layers.0.{name}", quant_recipe))
            return built

        yield build


def test_a_gpu_without_fp8_is_named_before_anything_is_built(layer: Callable[..., Any]) -> None:
    too_old = "Device compute capability 8.9 or higher required for FP8 execution."
    with (
        mock.patch.object(te_imports, "entry", return_value=lambda return_reason: (False, too_old)),
        raises(ModelError, too_old, "--te-precision-config-file"),
    ):
        layer(2)


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
    expected, padded = run(plain), run(ours)
    assert plain.linear_fc1.calls == [list(ROWS)]
    assert ours.linear_fc1.calls == ours.linear_fc2.calls == [[0, 32, 336, 16]]
    for exact, actual in zip(expected, padded, strict=True):
        assert_parity(actual, exact, rms=1e-5)
    assert padded[3][0].abs().max() == 0  # the expert without a row
    assert [tuple(value.shape) for value in run(ours, (0, 0, 0, 0))[:3]] == [(0, 128), (0, 128), (0,)]


@pytest.mark.parametrize(("number", "in_fp8"), [(1, False), (2, True), (11, True), (12, False)])
def test_first_and_last_layer_stay_in_bf16_whatever_their_name(layer: Callable[..., Any], number: int, in_fp8: bool) -> None:
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
    with raises(ModelError, "layer 2: linear_fc2", "BF16"):
        run(experts)


def test_the_file_is_the_reason_for_stocks_experts(layer: Callable[..., Any]) -> None:
    in_fp8, plain = layer(2).mlp, layer(2, quant_recipe=None).mlp
    assert (in_fp8.experts_backend.requested, in_fp8.experts_backend.observed) == ("auto", STOCK)
    assert "FP8 experts (--te-precision-config-file)" in in_fp8.experts_backend.reason
    assert type(in_fp8.shared_experts) is type(plain.shared_experts)
