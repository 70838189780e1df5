"""The routed experts' kernels compiled for sm_90 without a GPU: nothing spilled; and what is refused before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp import kernels
from megacpp_mcore.ops.grouped_mlp.triton import WARPS, grouped_mlp, routed_mlp
from tests.ops.grouped_mlp_case import Case, draw
from tests.ops.sm90 import compiled

BF16 = dict.fromkeys(("x_TD", "x_RD", "y_RD", "y_TD", "h_RF", "a_RF", "da_RF", "dh_RF"), "*bf16")
FP32 = dict.fromkeys(("probs_TE", "prob_R", "dprob_R", "dprobs_TE"), "*fp32")
TYPES = BF16 | FP32 | {"routing_TE": "*i1"} | dict.fromkeys(("count_BE", "end_E", "row_TK"), "*i32")

TOKENS = {"TOKENS": 64, "EXPERTS": 16}
ROW = {"D": 3584, "K": 4, "BLOCK": 4096}
WIDTH = {"F": 896, "ROWS": 4, "BLOCK": 1024}
NO_GRADIENT = dict.fromkeys(("routing_TE", "dprob_R", "dprobs_TE"))
LAUNCHES: dict[str, tuple[str, dict[str, Any], int]] = {
    "count": ("count", TOKENS, 40),
    "place": ("place", TOKENS | {"K": 4, "SLOTS": 4, "SPAN": 64}, 128),
    "spread": ("spread", ROW, 40),
    "combine": ("combine", ROW | NO_GRADIENT | {"EXPERTS": 1}, 64),
    "combine, backward": ("combine", ROW | {"EXPERTS": 16}, 64),
    "activate, erf": ("activate", WIDTH | {"TANH": False}, 64),
    "activate, tanh": ("activate", WIDTH | {"TANH": True}, 64),
    "activate, no probabilities": ("activate", WIDTH | {"TANH": False, "prob_R": None}, 64),
    "backward, erf": ("activate_backward", WIDTH | {"TANH": False}, 128),
    "backward, tanh": ("activate_backward", WIDTH | {"TANH": True}, 128),
    "backward, no probabilities": ("activate_backward", WIDTH | {"TANH": False, "prob_R": None, "dprob_R": None}, 128),
}
"""The kernel, its constants at the sizes of NAM56R, and the most registers: as few as let enough programs keep the memory busy."""


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "constants", "registers"), LAUNCHES.values(), ids=LAUNCHES.keys())
def test_nothing_is_spilled(tmp_path: Path, kernel: str, constants: dict[str, Any], registers: int) -> None:
    made = compiled(getattr(kernels, kernel), TYPES, constants, tmp_path, multiples=("stride", "R"), num_warps=WARPS)
    assert made.spills == 0, made
    assert made.registers <= registers, made


def test_refusals() -> None:
    inputs = draw(Case())
    x, routing, probs, w1, w2 = (inputs[name] for name in ("x", "routing", "probs", "w1", "w2"))
    counts = torch.tensor([25] * 8)
    with pytest.raises(ModelError, match=r"torch\.float32, .* they take one of \(torch\.bfloat16,\)"):
        routed_mlp(x.float(), routing, probs, w1.float(), w2.float(), topk=3)
    with pytest.raises(ModelError, match=r"torch\.bfloat16, torch\.float16"):
        grouped_mlp(x, counts, w1.half(), w2, None)
    with pytest.raises(ModelError, match=r"F, D = \[90, 64\]; they take multiples of 8"):
        routed_mlp(x, routing, probs, w1[:, :90], w2[..., :90], topk=3)
    with pytest.raises(ModelError, match="sum to T = 200"):
        grouped_mlp(x, counts + 1, w1, w2, None)
    with pytest.raises(ModelError, match=r"\[T, E\]"):
        routed_mlp(x, routing.T, probs, w1, w2, topk=3)
    with pytest.raises(ModelError, match="gelu_tanh"):
        routed_mlp(x, routing, probs, w1, w2, topk=3, activation="relu")
