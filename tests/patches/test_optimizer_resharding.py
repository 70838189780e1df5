"""Parts of optimizer-resharding and optimizer-layouts; tests/distributed/test_optimizer_state.py saves and loads."""

from __future__ import annotations

import math
import random
from argparse import Namespace

import torch

from megacpp_mcore.patches.optimizer_layouts import _differences
from megacpp_mcore.patches.optimizer_resharding import boxes


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
