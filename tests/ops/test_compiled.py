"""Every kernel compiled for sm_90 without a GPU: it fits, nothing is spilled, and products are on tensor cores.

Every variant that ships at the sizes of the presets, or that a candidate's request can ask for, except Mamba-3's of rank 2,
some of which spill; no kernel depends on lengths.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.ops.grouped_mlp import fp8
from megacpp_mcore.ops.grouped_mlp import kernels as experts
from megacpp_mcore.ops.grouped_mlp.triton import BACKWARD, EXPERTS, FORWARD, WEIGHTS
from megacpp_mcore.ops.indexer import dense
from megacpp_mcore.ops.indexer import kernels as indexer
from megacpp_mcore.ops.indexer import triton as indexer_launch
from megacpp_mcore.ops.linear_cross_entropy import triton as cross_entropy
from megacpp_mcore.ops.m2rnn import convolution, gate, recurrence
from megacpp_mcore.ops.mamba3 import kernels as mamba3
from megacpp_mcore.ops.mamba3.triton import ROWS, SEGMENT, Plan
from megacpp_mcore.ops.mla_projection import kernels as mla_projection
from megacpp_mcore.ops.mla_projection import triton as projection_launch
from megacpp_mcore.ops.rms_norm import kernels as norm
from megacpp_mcore.ops.rms_norm import triton as norm_launch
from megacpp_mcore.ops.router import kernels as router
from megacpp_mcore.ops.router import triton as router_launch
from megacpp_mcore.ops.sparse_mla import kernels as sparse_mla
from megacpp_mcore.ops.sparse_mla import triton as sparse_launch
from megacpp_mcore.ops.sparse_mla import wide as wide_sparse_mla
from tests.ops.sm90 import compiled, types

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

# --- experts ----------------------------------------------------------------------------------------------------------


ROWS_AND_TOKENS = types(
    bf16="x y_RD y_TD h_RF y_RF dh_RF dw",
    fp32="probs_TE prob_R dprob_PR dprobs_TE",
    i32="count_BE end_E row_TK token_R",
    i1="routing_TE",
)
D, F, E, K = 3584, 896, 16, 4
SUM = {"D": D, "K": K, "BLOCK": 4096, "num_warps": 4}
NO_GRADIENT = dict.fromkeys(("routing_TE", "dprob_PR", "dprobs_TE")) | {"P": 0, "EXPERTS": 1}
PLACE = {"num_warps": 4, "TOKENS": 64, "EXPERTS": E}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "count": ("count", PLACE),
    "place": ("place", PLACE | {"K": K, "SLOTS": K, "SPAN": 64, "EXACT": True}),
    "place, one of four ranks": ("place", PLACE | {"K": K, "SLOTS": K, "SPAN": 64, "EXPERTS": K, "EXACT": False}),
    "place, most experts": (
        "place",
        PLACE | {"K": 8, "SLOTS": 8, "TOKENS": 16, "EXPERTS": EXPERTS, "SPAN": 16, "EXACT": True},
    ),
    "combine": ("combine", SUM | NO_GRADIENT | {"EXACT": True}),
    "combine, backward": ("combine", SUM | {"P": 7, "EXPERTS": E, "EXACT": True}),
    "combine, one of four ranks": ("combine", SUM | {"P": 7, "EXPERTS": K, "EXACT": False}),
}
"""The kernel, and its constants at the sizes of NAM56R."""


@pytest.mark.parametrize(("kernel", "constants"), SMALL.values(), ids=SMALL.keys())
def test_experts_memory(tmp_path: Path, kernel: str, constants: dict[str, Any]) -> None:
    compiled(getattr(experts, kernel), ROWS_AND_TOKENS, constants, tmp_path)


@pytest.mark.parametrize("widths", [(D, F), (72, 40)])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_experts_products(tmp_path: Path, backward: bool, gathered: bool, tanh: bool, widths: tuple[int, int]) -> None:
    tile = BACKWARD if backward else FORWARD
    absent = [] if backward else ["dh_RF", "dprob_PR"]
    constants: dict[str, Any] = dict.fromkeys([*absent, "x_tiles" if gathered else "token_R"]) | tile
    constants |= {"INNER": widths[0], "OUTER": widths[1], "EXPERTS": E, "OUTER_FIRST": not backward, "TANH": tanh}
    constants |= {"MODE": (experts.BACKWARD if backward else experts.ACTIVATE).value}
    weights = (tile["BK"], tile["BN"]) if backward else (tile["BN"], tile["BK"])
    given = ROWS_AND_TOKENS | {"w_tiles": _tensor(*weights), "x_tiles": _tensor(tile["BM"], tile["BK"])}
    made = compiled(experts.product, given, constants, tmp_path, multiples=("R",))
    assert made["HGMMA"], made


def test_no_experts_product_reads_rows_that_none_has_written() -> None:
    assert FORWARD["BM"] % BACKWARD["BM"] == BACKWARD["BM"] % WEIGHTS["BK"] == 0


def _tensor(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows},{columns}]>"


@pytest.mark.parametrize("widths", [(D, F), (72, 40)])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_experts_weights(tmp_path: Path, adds: bool, left: bool, gathered: bool, widths: tuple[int, int]) -> None:
    M, N = widths if left else reversed(widths)
    constants: dict[str, Any] = WEIGHTS | {"M": M, "N": N, "TOKENS_LEFT": left, "ADD": adds}
    constants |= {} if gathered else {"token_R": None}
    given = ROWS_AND_TOKENS | {"h_tiles": _tensor(WEIGHTS["BK"], WEIGHTS["BN" if left else "BM"])}
    made = compiled(experts.weight_gradient, given | types(fp32="dw" if adds else ""), constants, tmp_path)
    assert made["HGMMA"], made


IN_FP8 = types(
    bf16="x x_NW w w_ENW h_RF a_RF da_RF gradient",
    i32="row_NC end_E end_P row_P token_R",
    fp8e4nv="values values_ENW values_EWN values_WP",
    fp32="scales scale_EN scale_EW largest largest_EP largest_4R x_scale_R dy_scale_R prob_R dprob_R total",
)
ROW = {"ROWS": 1, "BLOCK": 4096, "W": D, "num_warps": 4}
WIDTH = {"F": F, "ROWS": 4, "BLOCK": 1024, "num_warps": 4}
BACK = {"F": F, "ROWS": fp8.BACKWARD["elements"] // 1024, "BLOCK": 1024, "num_warps": fp8.BACKWARD["warps"]}
COLUMNS = fp8.TRANSPOSED | {"EXPERTS": E, "PARTS": fp8.LARGEST_ROW["PARTS"]}
FP8_LAUNCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("scale_rows", ROW | {"COPIES": K}),
    "rows": ("scale_rows", ROW | {"COPIES": 1, "row_NC": None}),
    "largest": ("largest_parts", fp8.LARGEST_OF),
    "largest row": ("largest_parts", fp8.LARGEST_ROW),
    "weights": ("scale_weights", fp8.WEIGHTS | {"PARTS": fp8.LARGEST_OF["PARTS"]}),
    "added": ("add", {"BLOCK": fp8.ADDED, "num_warps": 4}),
    "places": ("pad", {"EXPERTS": 256, "MULTIPLE": fp8.MULTIPLE, "num_warps": 1}),
    "transposed tokens": ("transpose_rows", COLUMNS | {"W": D, "STEPS": 28}),
    "transposed rows": ("transpose_rows", COLUMNS | {"W": F, "STEPS": 7, "token_R": None}),
    "activate, erf": ("activate", WIDTH | {"TANH": False}),
    "activate, tanh": ("activate", WIDTH | {"TANH": True}),
    "backward, erf": ("activate_backward", BACK | {"TANH": False}),
    "backward, tanh": ("activate_backward", BACK | {"TANH": True}),
    "backward, wide": ("activate_backward", BACK | {"TANH": True, "F": 4096, "BLOCK": 4096}),
}


@pytest.mark.parametrize(("kernel", "constants"), FP8_LAUNCHES.values(), ids=FP8_LAUNCHES.keys())
def test_experts_fp8(tmp_path: Path, kernel: str, constants: dict[str, Any]) -> None:
    made = compiled(getattr(fp8, kernel), IN_FP8, constants, tmp_path, multiples=("N", "W", "P", "SIZE"))
    if kernel == "scale_weights":  # ptxas loses bytes where both orders are of the same rounded pairs
        assert made["F2FP"] == constants["BN"] * constants["BW"] // (32 * constants["num_warps"]), made


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [3584, 256, norm_launch.LARGEST])
@pytest.mark.parametrize(
    ("kernel", "residual"), [("forward", True), ("backward", True), ("backward", False), ("add_parts", True)]
)
def test_rms_norm(tmp_path: Path, kernel: str, residual: bool, hidden: int) -> None:
    given = types(bf16="x_TD weight_D y_TD dy_TD dresidual_TD dx_TD dweight_D", fp32="scale_T dweight_PD") | {
        "eps": "fp32"
    }
    constants: dict[str, Any] = getattr(norm_launch, kernel.upper())
    constants = constants | ({"D": hidden} if kernel == "add_parts" else norm_launch.row(hidden))
    compiled(getattr(norm, kernel), given, constants | ({} if residual else {"dresidual_TD": None}), tmp_path)


# --- router -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "topk"), [(16, 4), (4, 2), (256, 8)])
def test_router(tmp_path: Path, experts: int, topk: int) -> None:
    given = types(
        fp32="logits_TE score_TE bias_E probs_TE sums_PBC dprobs_TE dscore_BE dsquared dlogits_TE", i1="routing_TE"
    )
    _, shape = router_launch._launch(8192, experts, 2)
    compiled(router.route, given, shape | {"K": topk}, tmp_path)
    compiled(router.route_backward, given, shape, tmp_path)


# --- linear cross-entropy ---------------------------------------------------------------------------------------------


SOFTMAX = types(bf16="logit_CV", fp32="top_C total_C picked_C logsumexp_C weight_C", i64="label_C column_C")
ABSENT = {
    "losses": ("logsumexp_C", "weight_C"),
    "losses and gradients": ("logsumexp_C",),
    "gradients": ("top_C", "column_C", "total_C", "picked_C"),
}


@pytest.mark.parametrize("absent", ABSENT)
def test_softmax_rows(tmp_path: Path, absent: str) -> None:
    constants: dict[str, Any] = {"BLOCK": cross_entropy.BLOCK, "GROUP": cross_entropy.GROUP}
    constants |= dict.fromkeys(ABSENT[absent]) | {"num_warps": cross_entropy.WARPS}
    compiled(cross_entropy.softmax_rows, SOFTMAX, constants, tmp_path, multiples=("stride",))


@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_add_scaled(tmp_path: Path, out: str) -> None:
    given = types(bf16="gradient", fp32="factor_1") | {"out": f"*{out}"}
    constants = {"BLOCK": cross_entropy.SCALED, "BETA": True}
    compiled(cross_entropy.add_scaled, given, constants, tmp_path, multiples=("size",))


# --- indexer ----------------------------------------------------------------------------------------------------------


INDEXER_TYPES = types(fp32="score_BRW target_BSN weight units dk_TBD divergence_BS", i32="seq_BS index_BSN")
HALF = "q_SBHD k_SBD k_TBD w_SBH dq_SBHD dw_SBH"
STRIDES = ("q_s", "q_b", "q_h", "k_s", "k_b", "w_s", "w_b", "W")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("documents", [False, True])
def test_score_keys(tmp_path: Path, documents: bool, dtype: str) -> None:
    launch = indexer_launch.SCORE_KEYS | {"w_h": 1, "score_b": None} | ({} if documents else {"seq_BS": None})
    made = compiled(indexer.score_keys, INDEXER_TYPES | types(**{dtype: HALF}), launch, tmp_path, multiples=STRIDES)
    assert made["HGMMA"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weights", ["as q", "fp32"])
@pytest.mark.parametrize("keys", ["multiple of 16", "any"])
@pytest.mark.parametrize("width", indexer_launch.SCORE_ALL)
def test_score_all(tmp_path: Path, width: int, keys: str, weights: str, dtype: str) -> None:
    """Of all keys, at NAM56R's width and at DeepSeek's; the number of heads is no constant, so that it is the same for 64."""
    launch = indexer_launch.SCORE_ALL[width] | {"w_h": 1, "seq_BS": None}
    given = INDEXER_TYPES | types(**{dtype: HALF}) | (types(fp32="w_SBH") if weights == "fp32" else {})
    multiples = (*STRIDES, "score_b") if keys != "any" else tuple(name for name in STRIDES if name != "W")
    made = compiled(indexer.score_keys, given, launch, tmp_path, multiples=multiples)
    assert made["HGMMA"]


def test_take_best(tmp_path: Path) -> None:
    compiled(indexer.take_best, INDEXER_TYPES, indexer_launch.TAKE_BEST, tmp_path, multiples=STRIDES)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "selected"), [(32, 256), (32, 64), (32, 2048), (5, 300), (64, 256)])
def test_learn(tmp_path: Path, heads: int, selected: int, dtype: str, deterministic: bool) -> None:
    launch: dict[str, Any] = indexer_launch.learn(heads, selected, deterministic) | {"w_h": 1}
    given = INDEXER_TYPES | types(**{dtype: HALF}) | (types(i64="dk_TBD") if deterministic else {})
    made = compiled(
        indexer.learn, given, launch | ({} if deterministic else {"units": None}), tmp_path, multiples=STRIDES
    )
    assert made["HGMMA"]


DENSE = types(
    fp32="lse_BAS sum_BRT g_BRT weight_BS dk_PBTD", i32="starts ends position", bf16="w_SBH dw_SBH",
) | {"scale": "fp32"}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("width", dense.HALVES)
@pytest.mark.parametrize("kernel", [dense.log_sums, dense.targets])
def test_dense_target(tmp_path: Path, kernel: Any, width: int, dtype: str) -> None:
    launch = (dense.SUMS if kernel is dense.log_sums else dense.TARGETS)[width]
    constants = launch | dict(zip("VW", dense.HALVES[width], strict=True))
    made = compiled(kernel, DENSE | types(**{dtype: "query key"}), constants, tmp_path)
    assert made["HGMMA"], made


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("D", indexer_launch.SCORE_ALL)
@pytest.mark.parametrize("kernel", [dense.learn_queries, dense.learn_keys])
def test_dense_gradients(tmp_path: Path, kernel: Any, D: int, dtype: str) -> None:
    constants = dense.LEARN[D] | {"D": D} | ({"PARTS": dense.PARTS} if kernel is dense.learn_keys else {})
    given = DENSE | types(**{dtype: "q_SBHD k_TBD dq_SBHD"})
    made = compiled(kernel, given, constants, tmp_path)
    assert made["HGMMA"], made


# --- sparse MLA -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["bf16", "fp16"])
def attention(request: pytest.FixtureRequest) -> dict[str, str]:
    given = types(fp32="lse_ptr mean_ptr dkv_ptr sum_ptr unit_ptr", i32="index_ptr") | {"scale": "fp32"}
    return given | types(**{request.param: "q_ptr kv_ptr o_ptr do_ptr dq_ptr d_ptr"})


NARROW = [widths for widths in sparse_launch.WIDTHS if widths not in sparse_launch.WIDE]


@pytest.mark.parametrize("widths", NARROW)
@pytest.mark.parametrize("heads", [sparse_launch.HEADS, 16])
@pytest.mark.parametrize("kernel", ["forward", "means", "sums"])
def test_heads_on_rows(
    tmp_path: Path, attention: dict[str, str], kernel: str, widths: tuple[int, int], heads: int
) -> None:
    launch = {"forward": sparse_launch.FORWARD, "means": sparse_launch.MEANS, "sums": sparse_launch.SUMS}[kernel]
    constants = launch | {"M": heads, "V": widths[1], "R": widths[0] - widths[1]}
    made = compiled(getattr(sparse_mla, kernel), attention, constants, tmp_path)
    assert made["HGMMA" if heads == sparse_launch.HEADS else "HMMA"], made


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("widths", NARROW)
@pytest.mark.parametrize("heads", [sparse_launch.HEADS, 32, 16])
def test_keys_on_rows(
    tmp_path: Path, attention: dict[str, str], widths: tuple[int, int], heads: int, deterministic: bool, sink: bool
) -> None:
    absent = ([] if sink else ["sum_ptr"]) + ([] if deterministic else ["unit_ptr"])
    constants = (
        sparse_launch.BACKWARD | {"M": heads, "V": widths[1], "R": widths[0] - widths[1]} | dict.fromkeys(absent)
    )
    given = attention | (types(i64="dkv_ptr") if deterministic else {})
    made = compiled(sparse_mla.backward, given, constants, tmp_path)
    assert made["HGMMA"], made


WIDE_SPARSE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "forward": ("forward", sparse_launch.WIDE_FORWARD, []),
    "scores": ("scores", sparse_launch.SCORES, ["sum_ptr"]),
    "scores, sum": ("scores", sparse_launch.SCORES, []),
    "queries": ("queries", sparse_launch.QUERIES, []),
    "keys": ("keys", sparse_launch.GRADIENTS, ["unit_ptr"]),
    "keys, integers": ("keys", sparse_launch.GRADIENTS, []),
    "sums": ("sums", sparse_launch.WIDE_SUMS, []),
}


@pytest.mark.parametrize("widths", sparse_launch.WIDE)
@pytest.mark.parametrize("heads", [2 * sparse_launch.HEADS, sparse_launch.HEADS, 16])
@pytest.mark.parametrize("variant", WIDE_SPARSE)
def test_wide_sparse_mla(
    tmp_path: Path, attention: dict[str, str], variant: str, widths: tuple[int, int], heads: int
) -> None:
    """Of all heads that are rounded up to: others are several launches."""
    kernel, launch, absent = WIDE_SPARSE[variant]
    function = getattr(sparse_mla if kernel == "sums" else wide_sparse_mla, kernel)
    groups = max(1, heads // sparse_launch.HEADS)
    sizes = {"M": heads // groups, "ALL": heads, "PARTS": groups, "GROUP": groups - 1}
    sizes |= {"V": widths[1], "R": widths[0] - widths[1]}
    constants = {name: size for name, size in sizes.items() if name in function.arg_names}
    constants |= launch | dict.fromkeys(absent)
    given = attention | (types(i64="dkv_ptr") if variant == "keys, integers" else {})
    made = compiled(function, given, constants, tmp_path)
    assert made["HGMMA" if heads >= sparse_launch.HEADS or kernel == "keys" else "HMMA"], made


# --- M²RNN ------------------------------------------------------------------------------------------------------------


WIDTHS = {"K": 64, "V": 16}
RECURRENCE = types(
    fp32="W_HVV starts_BHXKV y_RBHSV saved_BHEKV last_BHKV f_BHS dv_RBHSV df_RBHS dW_RBHVV dh_BHKV",
    bf16="q_BSK k_BSK v_BHSV dy_BHSV dq_BHSK dk_BHSK",
    fp16="candidates_BHTKV",
)
ADVANCE = {
    "forward": ["starts_BHXKV", "candidates_BHTKV"],
    "forward from a state": ["candidates_BHTKV"],
    "candidates": ["y_RBHSV", "last_BHKV"],
}
"""What :func:`megacpp_mcore.ops.m2rnn.recurrence.advance` is not given."""


def _recurrence(kernel: Any, folder: Path, constants: dict[str, Any]) -> None:
    shared = {"ROWS": recurrence.ROWS, "num_warps": 1, "num_stages": 1} | WIDTHS | recurrence.products(torch.bfloat16)
    made = compiled(kernel, RECURRENCE, shared | constants, folder)
    assert made["HMMA"]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("use", ADVANCE)
def test_advance(tmp_path: Path, use: str, documents: bool) -> None:
    _recurrence(recurrence.advance, tmp_path, dict.fromkeys(ADVANCE[use]) | {"DOCUMENTS": documents})


@pytest.mark.parametrize("documents", [False, True])
def test_reverse(tmp_path: Path, documents: bool) -> None:
    _recurrence(recurrence.reverse, tmp_path, {"DOCUMENTS": documents})


AROUND = types(
    fp32="A_log dt_bias D f_BHP dv_RBHPV df_RBHP du_BSC dweight_NCX dgate_NHX y_RBHPV y_SBC squares_SB dsquares_SB dD_NC "
    "dweight_NC",
    bf16="dq_BHPK dk_BHPK q_SBK k_SBK v_SBHV x_f_SBH qk_weight qk_bias v_weight v_bias q_BPK k_BPK v_BHPV dy_BHPV "
    "dx_f_SBH dq_SBK dk_SBK dv_SBC g_SBHV weight out_SBC dout_SBC dg_SBC",
    i32="seq_BS",
) | {"eps": "fp32"}


HEADS = [64, 48, 44, 22, 11]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_before_the_recurrence(tmp_path: Path, heads: int, documents: bool) -> None:
    power = 1 << (heads - 1).bit_length()
    taps = {"H": heads, "T": 4, "TOKENS": convolution.TOKENS, "HEADS": convolution.HEADS, "DOCUMENTS": documents}
    taps |= WIDTHS | ({} if documents else {"seq_BS": None})
    backward = taps | {"H_POWER": power, "R": 4, "TOKENS": convolution.TOKENS_BACKWARD}
    launches = (
        (convolution.prepare, taps | {"H_POWER": power}),
        (convolution.prepare_backward, backward),
        (convolution.convolution_inputs_backward, taps),
    )
    for kernel, constants in launches:
        compiled(kernel, AROUND, constants, tmp_path)


@pytest.mark.parametrize("norm", [True, False])  # False: of several ranks
@pytest.mark.parametrize("heads", HEADS)
def test_behind_the_recurrence(tmp_path: Path, heads: int, norm: bool) -> None:
    given = AROUND | types(fp32="" if norm else "out_SBC dout_SBC")
    channels = {"H": heads, "V": 16, "C_POWER": 16 << (heads - 1).bit_length(), "NORM": norm}
    compiled(gate.skip_gate_norm, given, channels | {"R": 4, "TOKENS": gate.TOKENS}, tmp_path)
    compiled(gate.skip_gate_norm_backward, given, channels, tmp_path)


# --- between MLA's projections and its core ---------------------------------------------------------------------------


ABSORBED = {"C": 64, "K": 64, "R": 64, "INTERLEAVED": True, "TRANSPOSED": False}
OUTPUTS = ABSORBED | {"R": 0, "TRANSPOSED": True, "rotation_ptr": None}
ROTATED = ABSORBED | {"w_ptr": None}
INDEXER = ROTATED | {"C": 0, "K": 0, "INTERLEAVED": False}
NO_WEIGHT = {"x_ptr": None, "dw_ptr": None, "TILES": 1}
KEYS = {"C": 64, "R": 64, "V": 64, "INTERLEAVED": True}
INDEXER_KEYS = {"R": 64, "N": 32, "HEADS": 32, "INTERLEAVED": False}
TILES = {"TILES": projection_launch.TILES}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "absorbed queries": ("project", ABSORBED, projection_launch.PROJECT),
    "outputs": ("project", OUTPUTS, projection_launch.PROJECT),
    "queries": ("project", ROTATED, projection_launch.PROJECT),
    "indexer": ("project", INDEXER, projection_launch.PROJECT),
    "absorbed queries, backward": ("project_backward", ABSORBED | TILES, projection_launch.BACKWARD),
    "outputs, backward": ("project_backward", OUTPUTS | TILES, projection_launch.BACKWARD),
    "queries, backward": ("project_backward", ROTATED | NO_WEIGHT, projection_launch.BACKWARD),
    "indexer, backward": ("project_backward", INDEXER | NO_WEIGHT, projection_launch.BACKWARD),
    "keys": ("keys_and_values", KEYS, projection_launch.KEYS),
    "latent keys": ("keys_and_values", KEYS | {"V": 0}, projection_launch.KEYS),
    "keys, backward": ("keys_and_values_backward", KEYS | {"TOKENS": 4, "HEADS": 8}, projection_launch.KEYS_BACKWARD),
    "latent keys, backward": (
        "keys_and_values_backward",
        KEYS | {"V": 0, "TOKENS": 32, "HEADS": 1},
        projection_launch.KEYS_BACKWARD,
    ),
    "norms": ("norms", {"Q": 64, "L": 64, "R": 64}, projection_launch.NORMS),
    "norms, backward": ("norms_backward", {"Q": 64, "L": 64, "R": 64}, projection_launch.NORMS),
    "indexer's keys": ("indexer_keys", INDEXER_KEYS, projection_launch.NORMS),
    "indexer's keys, backward": ("indexer_keys_backward", INDEXER_KEYS, projection_launch.NORMS),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mla_projection(tmp_path: Path, variant: str, dtype: str) -> None:
    name, constants, launch = VARIANTS[variant]
    kernel = getattr(mla_projection, name)
    given = {each: f"*{dtype}" for each in kernel.arg_names if each.endswith("_ptr")}
    given |= types(fp32="rotation_ptr dnorm_ptr") | {"eps": "fp32", "scale": "fp32"}
    if name != "indexer_keys_backward":  # there they are of an output
        given |= types(fp32="dw_ptr")
    made = compiled(kernel, given, constants | launch, tmp_path)
    products = made["HGMMA"] + made["HMMA"]
    assert bool(products) == ("K" in constants and "w_ptr" not in constants), made


# --- Mamba-3 ----------------------------------------------------------------------------------------------------------


INPUTS = ("x", "z", "y", "dy", "dx", "dz", "dd_dt", "dd_A", "trap", "angles", "ddd_dt", "ddd_A", "dtrap", "norm")
PER_HEAD = ("k", "q", "do", "dk", "dq", "state", "dstate")
TABLES = ("bn", "cn", "normed", "b_bias", "c_bias", "bias", "mx", "mz", "mo", "cos_sin")
TYPES = (
    {f"{name}_ptr": "*bf16" for name in INPUTS + PER_HEAD}
    | {f"{name}_ptr": "*fp16" for name in TABLES}
    | {"seq_ptr": "*i32", "restart_ptr": "*i32", "eps": "fp32", "floor": "fp32"}
)
DOTS = ("chunk_state_fwd", "chunk_state_bwd", "chunk_scan_fwd", "chunk_scan_bwd_queries", "chunk_scan_bwd_keys")
OTHERS = ("rotate_fwd", "gate_bwd", "rotate_bwd", "boundary_gradients", "norm_fwd", "norm_bwd", "tables_fwd", "tables_bwd",
          "angles_bwd", "angle_totals", "angle_carries", "state_passing")  # fmt: skip
NO_NORM = {"NORM": False, "norm_ptr": None}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "norm_fwd": [{"ROWS": 32}],
    "norm_bwd": [{"ROWS": 32}],
    "tables_fwd": [{"FINAL": True}],
    "tables_bwd": [{"FINAL": True, "INITIAL": True}],
    "angles_bwd": [{"TOKENS": 8, "HEADS": 16}],
    "gate_bwd": [{"EVEN": even} | norm for even in (False, True) for norm in ({}, NO_NORM)],
    "angle_carries": [{"BLOCK": 32, "INITIAL": True}],
    "state_passing": [{"BLOCK": 1024, "INITIAL": True, "REVERSE": reverse} for reverse in (False, True)],
}
"""Compile-time arguments that do not follow from a call's sizes."""

SIZES = [(4, 64), (1, 64), (4, 128), (1, 128)]
SEVERAL_RANKS = ("chunk_state_bwd", "chunk_scan_bwd_queries", "rotate_fwd")
"""What rank 1 has no use for."""


def _cases(kernels: tuple[str, ...]) -> list[tuple[str, int, int]]:
    return [(name, *size) for name in kernels for size in SIZES if size[0] > 1 or name not in SEVERAL_RANKS]


def _plan(rank: int, state: int, even: bool) -> Plan:
    tokens = 4 * SEGMENT if even else 4 * SEGMENT - 1
    return Plan(
        tokens, 2, 112, 64, 8, rank, state, state // 4, mimo=rank > 1, norm=True, packed=True, heavy=False, A_floor=1e-4,
        eps=1e-5,
    )  # fmt: skip


def _chunks(names: list[str], plan: Plan, *, raw: bool) -> dict[str, str]:
    """The types of what is read or written a chunk at a time."""
    widths = {"k_desc": plan.N, "q_desc": plan.N, "dk_desc": plan.N, "dq_desc": plan.N, "do_desc": plan.P}
    given = {name: f"tensordesc<bf16[{ROWS}, {width}]>" for name, width in widths.items() if name in names}
    return given | ({"o_desc": f"tensordesc<bf16[{ROWS}, {plan.P}]>"} if raw else {})


def _check(kernel: str, plan: Plan, folder: Path) -> None:
    function = getattr(mamba3, kernel)
    choices = CHOICES.get(kernel, [{}])
    if kernel == "chunk_scan_bwd_keys":
        choices = [part | ({} if part["QUERIES"] else {"dq_desc": None}) for part in plan.key_parts]
    elif kernel == "chunk_state_fwd":
        choices = [{"BACKWARD": back} for back in ((False, True) if plan.R == 1 else (False,))]
    elif kernel == "chunk_scan_fwd":
        gated: dict[str, Any] = {"RAW": plan.saves_tables, "GATED": True} | (
            {} if plan.saves_tables else {"o_desc": None}
        )
        choices = [gated, gated | NO_NORM]
        if not plan.saves_tables:
            choices.append({"RAW": True, "GATED": False, "y_ptr": None, "NORM": False})
    every = plan.sizes
    for choice in choices:
        constants = {name: value for name, value in every.items() if name in function.arg_names} | choice
        constants = {name: value for name, value in constants.items() if name not in ("S", "B")}
        run_time = {"NSEG"} if kernel not in ("angle_carries", "state_passing") else set()
        constants = {name: value for name, value in constants.items() if name not in run_time}
        pointers = {name: TYPES.get(name, "*fp32") for name in function.arg_names if name.endswith("_ptr")}
        given = TYPES | pointers | _chunks(function.arg_names, plan, raw=choice.get("RAW", False))
        options = replace(plan, norm=choice.get("NORM", plan.norm)).options(kernel)
        made = compiled(function, given, constants | options, folder)
        assert bool(made["HGMMA"]) == (kernel in DOTS), (kernel, choice, made)


@pytest.mark.parametrize("even", [True, False], ids=["even", "odd"])
@pytest.mark.parametrize(("kernel", "rank", "state"), _cases(DOTS))
def test_mamba3_products(tmp_path: Path, kernel: str, rank: int, state: int, even: bool) -> None:
    _check(kernel, _plan(rank, state, even), tmp_path)


@pytest.mark.parametrize(("kernel", "rank", "state"), _cases(OTHERS))
def test_mamba3_others(tmp_path: Path, kernel: str, rank: int, state: int) -> None:
    _check(kernel, _plan(rank, state, False), tmp_path)
