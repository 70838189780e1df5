"""The routed experts' kernels compiled for sm_90 without a GPU: nothing spilled; and what is refused before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp import fp8, kernels
from megacpp_mcore.ops.grouped_mlp.triton import BACKWARD, EXPERTS, FORWARD, WEIGHTS, grouped_mlp, packed, routed_mlp
from tests.ops.grouped_mlp_case import Case, draw
from tests.ops.sm90 import compiled

BF16 = dict.fromkeys(("x", "y_RD", "y_TD", "h_RF", "y_RF", "dh_RF", "dw"), "*bf16")
FP32 = dict.fromkeys(("probs_TE", "prob_R", "dprob_PR", "dprobs_TE"), "*fp32")
INT32 = dict.fromkeys(("count_BE", "end_E", "row_TK", "token_R"), "*i32")
TYPES = BF16 | FP32 | INT32 | {"routing_TE": "*i1"}

D, F, E, K = 3584, 896, 16, 4
TOKENS = {"TOKENS": 64, "EXPERTS": E}
SUM = {"D": D, "K": K, "BLOCK": 4096}
NO_GRADIENT = dict.fromkeys(("routing_TE", "dprob_PR", "dprobs_TE")) | {"P": 0, "EXPERTS": 1}
ABSENT = dict.fromkeys(("dh_RF", "dprob_PR"))
SMALL: dict[str, tuple[str, dict[str, Any], int]] = {
    "count": ("count", TOKENS, 40),
    "place": ("place", TOKENS | {"K": K, "SLOTS": K, "SPAN": 64}, 128),
    "place, most experts": ("place", {"K": 8, "SLOTS": 8, "TOKENS": 16, "EXPERTS": EXPERTS, "SPAN": 16}, 255),
    "combine": ("combine", SUM | NO_GRADIENT, 64),
    "combine, backward": ("combine", SUM | {"P": 7, "EXPERTS": E}, 64),
}
"""The kernel, its constants at the sizes of NAM56R, and the most registers."""


def _tensor(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows},{columns}]>"


def _without(tile: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in tile.items() if name != "num_warps"}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "constants", "registers"), SMALL.values(), ids=SMALL.keys())
def test_what_waits_for_memory(tmp_path: Path, kernel: str, constants: dict[str, Any], registers: int) -> None:
    made = compiled(getattr(kernels, kernel), TYPES, constants, tmp_path, num_warps=4)
    assert made.registers <= registers, made


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("widths", [(D, F), (72, 40)])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_products(tmp_path: Path, backward: bool, gathered: bool, tanh: bool, widths: tuple[int, int]) -> None:
    tile = BACKWARD if backward else FORWARD
    constants: dict[str, Any] = {"INNER": widths[0], "OUTER": widths[1], "EXPERTS": E}
    constants |= _without(tile) | ({} if backward else ABSENT) | ({"x_tiles": None} if gathered else {"token_R": None})
    constants |= {
        "MODE": (kernels.BACKWARD if backward else kernels.ACTIVATE).value,
        "OUTER_FIRST": not backward,
        "TANH": tanh,
    }
    weights = (tile["BK"], tile["BN"]) if backward else (tile["BN"], tile["BK"])
    types = TYPES | {"w_tiles": _tensor(*weights), "x_tiles": _tensor(tile["BM"], tile["BK"])}
    made = compiled(kernels.product, types, constants, tmp_path, multiples=("R",), num_warps=tile["num_warps"])
    assert made.instructions["HGMMA"], made


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("widths", [(D, F), (72, 40)])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_weights(tmp_path: Path, adds: bool, left: bool, gathered: bool, widths: tuple[int, int]) -> None:
    M, N = widths if left else reversed(widths)
    constants = _without(WEIGHTS) | {"M": M, "N": N, "TOKENS_LEFT": left, "ADD": adds}
    types = TYPES | {"h_tiles": _tensor(WEIGHTS["BK"], WEIGHTS["BN" if left else "BM"])}
    made = compiled(
        kernels.weight_gradient,
        types | ({"dw": "*fp32"} if adds else {}),
        constants | ({} if gathered else {"token_R": None}),
        tmp_path,
        num_warps=WEIGHTS["num_warps"],
    )
    assert made.instructions["HGMMA"], made


ROW = {"ROWS": 1, "BLOCK": 4096}
WIDTH = {"F": F, "ROWS": 4, "BLOCK": 1024}
BACK = {"F": F, "ROWS": fp8.BACKWARD["elements"] // 1024, "BLOCK": 1024}
FP8_LAUNCHES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tokens": ("scale_rows", ROW | {"W": D, "COPIES": K}, 4),
    "rows": ("scale_rows", ROW | {"W": D, "COPIES": 1, "row_NC": None}, 4),
    "largest": ("largest_parts", _without(fp8.LARGEST_OF) | {"STEPS": 7}, fp8.LARGEST_OF["num_warps"]),
    "weights": ("scale_weights", _without(fp8.WEIGHTS) | {"PARTS": fp8.LARGEST_OF["PARTS"]}, fp8.WEIGHTS["num_warps"]),
    "added": ("add", {"BLOCK": fp8.ADDED}, 4),
    "places": ("pad", {"EXPERTS": 256, "MULTIPLE": fp8.MULTIPLE}, 1),
    **{
        f"transposed {each}": (
            "transpose_rows",
            _without(fp8.TRANSPOSED) | {"W": width, "EXPERTS": E, "PARTS": fp8.PARTS} | gathered,
            fp8.TRANSPOSED["num_warps"],
        )
        for each, width, gathered in (("tokens", D, {}), ("rows", F, {"token_R": None}))
    },
    "activate, erf": ("activate", WIDTH | {"TANH": False}, 4),
    "activate, tanh": ("activate", WIDTH | {"TANH": True}, 4),
    "backward, erf": ("activate_backward", BACK | {"TANH": False}, fp8.BACKWARD["warps"]),
    "backward, tanh": ("activate_backward", BACK | {"TANH": True}, fp8.BACKWARD["warps"]),
}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "constants", "warps"), FP8_LAUNCHES.values(), ids=FP8_LAUNCHES.keys())
def test_fp8(tmp_path: Path, kernel: str, constants: dict[str, Any], warps: int) -> None:
    types = dict.fromkeys(("x", "x_NW", "w", "w_ENW", "h_RF", "a_RF", "da_RF"), "*bf16")
    types |= dict.fromkeys(("row_NC", "end_E", "end_P", "row_P", "token_R"), "*i32")
    types |= dict.fromkeys(("values", "values_ENW", "values_EWN", "values_WP"), "*fp8e4nv")
    types |= dict.fromkeys(("scales", "scale_EN", "scale_EW", "largest", "largest_EP", "largest_2R"), "*fp32")
    types |= dict.fromkeys(("prob_R", "dprob_R", "total"), "*fp32") | {"gradient": "*bf16"}
    made = compiled(
        getattr(fp8, kernel), types, constants, tmp_path, multiples=("N", "W", "P", "SIZE"), num_warps=warps
    )
    assert made.registers <= 128, made
    if kernel == "scale_weights":  # ptxas loses bytes where both orders are of the same rounded pairs
        assert made.instructions["F2FP"] == constants["BN"] * constants["BW"] // (32 * warps), made


def test_fp8_needs_a_gpu_that_has_it() -> None:
    inputs = draw(Case())
    x, routing, probs, w1, w2 = (inputs[name] for name in ("x", "routing", "probs", "w1", "w2"))
    for call in (
        lambda: fp8.routed_mlp(x, routing, probs, w1, w2, topk=3),
        lambda: fp8.grouped_mlp(x, torch.tensor([25] * 8), w1, w2, None),
    ):
        with pytest.raises(
            ModelError, match=r"\(9, 0\) \(Hopper\), and x is on cpu: no GPU; take the experts in bfloat16"
        ):
            call()


def test_what_is_copied() -> None:
    whole = torch.arange(80.0).view(10, 8)
    assert packed(whole) is whole
    for part in (whole[:, :4], whole.T, whole.flatten()[3:67].view(8, 8)):
        copy = packed(part)
        assert torch.equal(copy, part)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


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
    with pytest.raises(ModelError, match="257 experts; they take up to 256"):
        grouped_mlp(
            x, torch.zeros(257, dtype=torch.int32), w1[:1].expand(257, -1, -1), w2[:1].expand(257, -1, -1), None
        )
    with pytest.raises(ModelError, match="sum to T = 200"):
        grouped_mlp(x, counts + 1, w1, w2, None)
    with pytest.raises(ModelError, match=r"\[T, E\]"):
        routed_mlp(x, routing.T, probs, w1, w2, topk=3)
    with pytest.raises(ModelError, match="gelu_tanh"):
        routed_mlp(x, routing, probs, w1, w2, topk=3, activation="relu")
