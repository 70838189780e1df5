"""Sums of three tensors on a GPU: the bits of PyTorch's additions, and a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops import add
from tests.gpu.device import assert_replays
from tests.ops import add_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 2, 3584), (37, 3, 1001)])
def test_the_bits_are_those_of_two_additions(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    add_case.compared("cuda", dtype, shape)


def test_a_graph_replays() -> None:
    first, second = ([torch.randn(64, 2, 3584, device="cuda").bfloat16() for _ in range(3)] for _ in range(2))
    assert_replays(lambda: [add.add3(*first)], first, second)
