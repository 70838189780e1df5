"""The patch output-layer-fusion: gradient accumulation fusion without Apex, in every layer but Megatron's own linear one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches.output_layer_fusion import PATCH
from tests import stock
from tests.dsa_layer import dsa_config

LAYERS = "megatron.core.tensor_parallel.layers"


def output_layer(config: Any, init_method: Any = torch.nn.init.normal_) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(48, 64, config=config, init_method=init_method, bias=False)


def test_without_apex_the_output_layer_alone_does_not_fuse(process: Path) -> None:
    config = dsa_config(gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        output_layer(config)
    with stock.patched(PATCH):
        layer = output_layer(config)
        assert layer.config is config
        assert (layer.gradient_accumulation_fusion, config.gradient_accumulation_fusion) == (False, True)
        layer(torch.ones(3, 48))[0].sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((64, 48), 3.0))


def test_a_row_parallel_layer_trains_without_apex(process: Path) -> None:
    from megatron.core.tensor_parallel import RowParallelLinear

    def backward() -> torch.Tensor:
        layer = RowParallelLinear(
            48, 64, config=dsa_config(gradient_accumulation_fusion=True), init_method=torch.nn.init.normal_, bias=False,
            input_is_parallel=True, skip_bias_add=False,
        )  # fmt: skip
        layer.weight.main_grad = torch.zeros(64, 48)  # as DistributedDataParallel leaves it
        layer(torch.ones(3, 48))[0].sum().backward()
        return layer.weight.grad

    with pytest.raises(NameError, match="fused_weight_gradient_mlp_cuda"):
        backward()
    with stock.patched(PATCH):
        assert torch.equal(backward(), torch.full((64, 48), 3.0))


def test_with_apex_or_without_the_flag_nothing_is_changed(process: Path) -> None:
    with stock.patched(PATCH):
        assert output_layer(dsa_config(gradient_accumulation_fusion=False)).gradient_accumulation_fusion is False
        with mock.patch(f"{LAYERS}._grad_accum_fusion_available", True):
            assert output_layer(dsa_config(gradient_accumulation_fusion=True)).gradient_accumulation_fusion is True
