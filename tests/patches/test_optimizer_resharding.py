"""Parts of optimizer-resharding; tests/distributed/test_optimizer_state.py saves and loads."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megacpp_mcore.checkpoints import layout
from megacpp_mcore.checkpoints.layout import FLAT, FORMAT, LOADED_FROM
from megacpp_mcore.errors import CheckpointError
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


RUN = {"finetune": False, "no_load_optim": False, "load": "saved", "use_distributed_optimizer": True, "ckpt_step": None}


def _refuse(state: object, **run: object) -> None:
    with mock.patch.object(layout, "_arguments", return_value=Namespace(**RUN | run)):
        layout.refuse_other_layout(state)


@pytest.mark.parametrize("fmt", ["torch", "torch_dist"])
def test_an_argument_that_one_side_does_not_have_is_no_difference(fmt: str) -> None:
    saved = Namespace(tensor_model_parallel_size=2, expert_model_parallel_size=1, ckpt_format=fmt)
    state = {"args": saved, "content_metadata": {LOADED_FROM: "saved", FORMAT: FLAT}}
    _refuse(state, tensor_model_parallel_size=2)
    with pytest.raises(
        CheckpointError, match=r"load: tensor_model_parallel_size was 2, and the run's is 4; load it once"
    ):
        _refuse(state, tensor_model_parallel_size=4)
    _refuse(state, tensor_model_parallel_size=4, finetune=True)


def test_what_stock_loads_is_left_to_it() -> None:
    """A checkpoint without an optimizer, none at all, and one of a model that is not ours."""
    without = Namespace(tensor_model_parallel_size=2, no_save_optim=True)
    others = {"args": Namespace(tensor_model_parallel_size=2), "content_metadata": {FORMAT: FLAT}}
    ours = {"args": without, "content_metadata": {LOADED_FROM: "saved", FORMAT: FLAT}}
    for state in (None, {}, {"args": None}, ours, others):
        _refuse(state, tensor_model_parallel_size=4)


def test_a_step_whose_optimizer_megatron_would_not_load(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    saved = {"args": Namespace(ckpt_format="torch")}
    with pytest.raises(CheckpointError, match=r"--ckpt-step is 3, .* of the last step, 6; write 3 in its latest_check"):
        _refuse(saved, load=str(tmp_path), ckpt_step=3)
    _refuse(saved, load=str(tmp_path), ckpt_step=6)
    _refuse(saved, load=str(tmp_path), ckpt_step=3, use_distributed_optimizer=False)


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
