"""Parts of optimizer-resharding and optimizer-layouts; tests/distributed/test_optimizer_state.py saves and loads."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from unittest import mock

import pytest
import torch

from megacpp_mcore.checkpoints.layout import FORMAT, FULLY, LOADED_FROM, UNSHARDED
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches import optimizer_layouts
from megacpp_mcore.patches.optimizer_layouts import _differences
from megacpp_mcore.patches.optimizer_resharding import _from_boxes, boxes


def test_boxes_are_every_number_of_the_range_once_and_in_order() -> None:
    chosen = random.Random(0)
    most = 0
    for _ in range(3000):
        shape = tuple(chosen.randint(1, 5) for _ in range(chosen.randint(0, 4)))
        start = chosen.randrange(math.prod(shape))
        end = chosen.randint(start + 1, math.prod(shape))
        numbers = torch.arange(math.prod(shape)).view(shape)
        found = list(boxes(shape, start, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        most = max(most, len(found))
        cut = [
            numbers[tuple(slice(at, at + length) for at, length in zip(corner, size, strict=True))]
            for corner, size in found
        ]
        assert [tuple(box.shape) for box in cut] == [size for _, size in found]
        assert [number for box in cut for number in box.flatten().tolist()] == list(range(start, end))
    assert most == 7


def test_an_argument_that_one_side_does_not_have_is_no_difference() -> None:
    saved = Namespace(tensor_model_parallel_size=2, expert_model_parallel_size=1)
    names = ("tensor_model_parallel_size", "expert_model_parallel_size")
    assert _differences(Namespace(tensor_model_parallel_size=2), saved, names) == ""
    said = _differences(Namespace(tensor_model_parallel_size=4), saved, names)
    assert said == "tensor_model_parallel_size was 2, and the run's is 4"


def _load(held: torch.dtype, main: torch.dtype) -> mock.Mock:
    """Load main parameters of another value than the weights' into an optimizer that keeps them as ``held``, for ``main``."""
    parameter = torch.ones(4, dtype=torch.bfloat16)
    optimizer = mock.Mock(model_param_gbuf_map={parameter: None}, config=Namespace(main_params_dtype=main))
    optimizer._get_main_param_and_optimizer_states.return_value = {"param": torch.zeros(4, dtype=held)}
    optimizer._get_model_param_range_map.return_value = {"param": Namespace(start=0, end=4)}
    optimizer._is_distopt_quantized_param.return_value = False
    saved = {"folder": "saved/iter_0000003", 0: {"param": {0: torch.full((4,), 7, dtype=held)}}}
    _from_boxes(mock.Mock(__name__="load"))(optimizer, saved)
    return optimizer


def test_main_parameters_are_compared_with_weights_only_where_they_are_fp32() -> None:
    """Others of the precision-aware optimizer are none that the weights were rounded from."""
    for held, main in ((torch.int16, torch.float32), (torch.float32, torch.float16)):
        _, tensors = _load(held, main)._set_main_param_and_optimizer_states.call_args.args
        assert tensors["param"].tolist() == [7] * 4
    with pytest.raises(CheckpointError, match="main parameters that are not those of its weights"):
        _load(torch.float32, torch.float32)


def test_metadata_of_a_checkpoint_that_no_model_of_ours_loads_stays() -> None:
    read = optimizer_layouts._with_a_format(lambda *_, preloaded_state_dict: preloaded_state_dict.get("content"))
    assert [read(preloaded_state_dict={"content": content}) for content in ({}, {"a": 3}, None)] == [{}, {"a": 3}, None]
    ours = {LOADED_FROM: "saved"}
    assert read(preloaded_state_dict={"content": ours}) == {LOADED_FROM: "saved", FORMAT: FULLY, UNSHARDED: True}


def test_arguments_of_an_earlier_version_do_not_say_whether_they_saved_an_optimizer() -> None:
    with mock.patch.object(optimizer_layouts, "loads_optimizer", return_value=True):
        assert optimizer_layouts._has_optimizer(Namespace())
        assert not optimizer_layouts._has_optimizer(Namespace(no_save_optim=True))
