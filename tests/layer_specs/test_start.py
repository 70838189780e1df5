"""How a model starts: what the families add to the residual; of each matrix: test_layer_specs.py."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.layer_specs.initial import filled
from megacpp_mcore.model import preset
from tests import stock


@pytest.mark.exhaustive
def test_families_start_alike_at_full_width(process: Path) -> None:
    """One layer of each family of nam56r_quarter on real text: a wide model shows what nam56r_tiny hides."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    from megacpp_mcore.layer_specs.nam56r import nam56r

    quarter = preset("nam56r_quarter")
    config = stock.model_config(stock.words(quarter))
    specs, groups = nam56r(config).layer_specs, ProcessGroupCollection.use_mpu_process_groups()
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()[:192]), dtype=torch.uint8).long()
    table = torch.empty(256, quarter.hidden_size)
    config.transformer.embedding_init_method(table)
    hidden, branches = table[text].unsqueeze(1), {}
    with torch.no_grad():
        for number in (1, 2, 3, 12):
            layer = build_module(
                specs[number - 1], config=config.transformer, layer_number=number, pg_collection=groups
            )
            out = layer(hidden_states=hidden, attention_mask=None)[0]
            letter = quarter.layers[number - 1]
            branches[letter] = rms(out - hidden)
            assert branches[letter] < 2 * rms(hidden), f"{letter} drowns what comes before it"
            hidden = out
    assert set(branches) == set("AMER")
    assert max(branches.values()) < 10 * min(branches.values()), branches


def rms(values: torch.Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


def test_a_parameter_is_drawn_in_float32_and_then_cast() -> None:
    config: Any = SimpleNamespace(use_cpu_initialization=True, perform_initialization=True)
    drawn: list[torch.dtype] = []

    def init(tensor: torch.Tensor) -> None:
        drawn.append(tensor.dtype)
        tensor.fill_(1 + 2**-12)

    assert filled((2,), config, init, torch.bfloat16).tolist() == [1.0, 1.0]
    whole, cast = filled((2,), config, init), filled((2,), config, init, torch.bfloat16)
    assert (whole.dtype, cast.dtype, set(drawn)) == (torch.float32, torch.bfloat16, {torch.float32})
    assert whole.tolist() == [1 + 2**-12] * 2
