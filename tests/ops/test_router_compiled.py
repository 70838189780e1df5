"""The router's kernels compiled for sm_90 without a GPU: nothing spilled."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from megacpp_mcore.ops.router import kernels, triton
from tests.ops.sm90 import compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

FP32 = "logits_TE score_TE bias_E probs_TE sums_PBC dprobs_TE dscore_BE dsquared dlogits_TE"
TENSORS = dict.fromkeys(FP32.split(), "*fp32") | {"routing_TE": "*i1"}


@pytest.mark.parametrize(("experts", "topk"), [(16, 4), (4, 2), (256, 8)])
def test_both_ways(tmp_path: Path, experts: int, topk: int) -> None:
    _, shape = triton._launch(8192, experts, 2)
    options = {"num_warps": shape.pop("num_warps")}
    compiled(kernels.route, TENSORS, shape | {"K": topk}, tmp_path, **options)
    compiled(kernels.route_backward, TENSORS, shape, tmp_path, **options)
