"""Every kernel compiled for sm_90 without a GPU: it fits, nothing is spilled, and products are on tensor cores.

Every variant that ships at the sizes of the presets, or that a candidate's request can ask for, except Mamba-3's of rank 2,
some of which spill; no kernel depends on lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.backends.compiler import GPUTarget

from megacpp_mcore.backends.probes import triton_release
from megacpp_mcore.ops import adam, add, embedding, fp8
from megacpp_mcore.ops.feed_forward import triton as feed_forward
from megacpp_mcore.ops.grouped_mlp import fp8 as experts_fp8
from megacpp_mcore.ops.grouped_mlp import kernels as experts
from megacpp_mcore.ops.grouped_mlp.triton import BACKWARD, EXPERTS, FORWARD, WEIGHTS
from megacpp_mcore.ops.indexer import dense
from megacpp_mcore.ops.indexer import kernels as indexer
from megacpp_mcore.ops.indexer import triton as indexer_launch
from megacpp_mcore.ops.linear_cross_entropy import triton as cross_entropy
from megacpp_mcore.ops.m2rnn import convolution, gate, recurrence
from megacpp_mcore.ops.mamba3 import kernels as mamba3
from megacpp_mcore.ops.mamba3.triton import ROWS, SEGMENT, Plan
from megacpp_mcore.ops.mamba3_projection import triton as mamba3_projection
from megacpp_mcore.ops.mla import kernels as mla
from megacpp_mcore.ops.mla import triton as mla_launch
from megacpp_mcore.ops.mla_projection import kernels as mla_projection
from megacpp_mcore.ops.mla_projection import triton as projection_launch
from megacpp_mcore.ops.rms_norm import kernels as norm
from megacpp_mcore.ops.rms_norm import triton as norm_launch
from megacpp_mcore.ops.router import kernels as router
from megacpp_mcore.ops.router import triton as router_launch
from megacpp_mcore.ops.sparse_mla import kernels as sparse_mla
from megacpp_mcore.ops.sparse_mla import triton as sparse_launch
from megacpp_mcore.ops.sparse_mla import wide as wide_sparse_mla
from megacpp_mcore.ops.triton_launch import options
from megacpp_mcore.versions import TRITON
from tests.ops.sm90 import build, compiled, instructions, products, types

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

Variant = tuple[str, Any, dict[str, str], dict[str, Any]]
"""A name, the kernel, the types of its tensors (all others are i32), and its constants; those that are None are not given."""

D, F, E, K = 3584, 896, 16, 4
"""Sizes of NAM56R's experts."""
MULTIPLES = (
    "stride", "stride_b", "stride_s", "size", "R", "N", "W", "P", "SIZE", "score_b", "q_s", "q_b", "q_h", "k_s", "k_b", "w_s",
    "w_b",
)  # fmt: skip
"""Integers that are multiples of 16 at those sizes, where Triton looks at that."""


def without(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def experts_variants() -> Iterator[Variant]:
    sig = types(
        bf16="x y_RD y_TD h_RF y_RF dh_RF dw", fp32="probs_TE prob_R dprob_PR dprobs_TE",
        i32="count_BE end_E row_TK token_R", i1="routing_TE",
    )  # fmt: skip
    place = {"num_warps": 4, "TOKENS": 64, "EXPERTS": E}
    slots = options("place", place) | {"K": K, "SLOTS": K, "SPAN": 64, "EXACT": True}
    summed = {"D": D, "K": K, "BLOCK": 4096, "num_warps": 4, "P": 7, "EXPERTS": E, "EXACT": True}
    most = {"K": 8, "SLOTS": 8, "TOKENS": 16, "EXPERTS": EXPERTS, "SPAN": 16}
    yield "count", experts.count, sig, place
    yield "place", experts.place, sig, slots
    yield "place, one of four ranks", experts.place, sig, slots | {"EXPERTS": K, "EXACT": False}
    yield "place, most experts", experts.place, sig, slots | most
    no_gradient = without("routing_TE", "dprob_PR", "dprobs_TE") | {"P": 0, "EXPERTS": 1}
    yield "combine", experts.combine, sig, summed | no_gradient
    yield "combine, backward", experts.combine, sig, summed
    yield "combine, one of four ranks", experts.combine, sig, summed | {"EXPERTS": K, "EXACT": False}

    def tiles(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows},{columns}]>"

    for widths, gathered, flag in itertools.product(((D, F), (72, 40)), (True, False), (False, True)):
        for tile, mode in ((FORWARD, experts.ACTIVATE), (BACKWARD, experts.BACKWARD)):
            back = tile is BACKWARD
            weights = (tile["BK"], tile["BN"]) if back else (tile["BN"], tile["BK"])
            made = sig | {"w_tiles": tiles(*weights), "x_tiles": tiles(tile["BM"], tile["BK"])}
            sizes = {"INNER": widths[0], "OUTER": widths[1], "EXPERTS": E, "OUTER_FIRST": not back, "TANH": flag}
            absent = without(*([] if back else ["dh_RF", "dprob_PR"]), "x_tiles" if gathered else "token_R")
            name = f"product, {widths}, gathered {gathered}, tanh {flag}, backward {back}"
            yield name, experts.product, made, tile | sizes | absent | {"MODE": mode.value}
        for adds in (False, True):
            M, N = widths if flag else reversed(widths)
            made = sig | {"h_tiles": tiles(WEIGHTS["BK"], WEIGHTS["BN" if flag else "BM"])}
            sizes = WEIGHTS | {"M": M, "N": N, "TOKENS_LEFT": flag, "ADD": adds} | ({} if gathered else without("token_R"))
            name = f"weights, {widths}, gathered {gathered}, left {flag}, adds {adds}"
            yield name, experts.weight_gradient, made | types(fp32="dw" if adds else ""), sizes


def fp8_variants() -> Iterator[Variant]:
    sig = types(
        bf16="x x_NW w w_ENW h_RF a_RF da_RF gradient", i32="row_NC end_E end_P row_P token_R",
        fp8e4nv="values values_ENW values_EWN values_WP",
        fp32="scales scale_EN scale_EW scale_1 largest largest_EP largest_4R x_scale_R dy_scale_R prob_R dprob_R total",
    )  # fmt: skip
    row = {"ROWS": 1, "BLOCK": 4096, "W": D, "num_warps": 4}
    width = {"F": F, "ROWS": 4, "BLOCK": 1024, "num_warps": 4}
    back = width | {"ROWS": experts_fp8.BACKWARD["elements"] // 1024, "num_warps": experts_fp8.BACKWARD["warps"]}
    columns = experts_fp8.TRANSPOSED | {"PARTS": fp8.LARGEST_ROW["PARTS"]}
    launches: dict[str, tuple[Any, dict[str, Any]]] = {
        "tokens": (experts_fp8.scale_rows, row | {"COPIES": K}),
        "rows": (experts_fp8.scale_rows, row | {"COPIES": 1, "row_NC": None}),
        "largest": (fp8.largest_parts, fp8.LARGEST_OF),
        "largest row": (fp8.largest_parts, fp8.LARGEST_ROW),
        "weights": (fp8.scale_weights, fp8.WEIGHTS | {"PARTS": fp8.LARGEST_OF["PARTS"]}),
        "added": (fp8.add, {"BLOCK": fp8.ADDED, "num_warps": 4}),
        "places": (experts_fp8.pad, {"EXPERTS": 256, "MULTIPLE": experts_fp8.WEIGHT_GRADIENT["BK"], "num_warps": 1}),
        "transposed tokens": (experts_fp8.transpose_rows, columns | {"W": D, "STEPS": 28}),
        "transposed rows": (experts_fp8.transpose_rows, columns | {"W": F, "STEPS": 7, "token_R": None}),
        "activate, erf": (experts_fp8.activate, width | {"TANH": False}),
        "activate, tanh": (experts_fp8.activate, width | {"TANH": True}),
        "backward, erf": (experts_fp8.activate_backward, back | {"TANH": False}),
        "backward, tanh": (experts_fp8.activate_backward, back | {"TANH": True}),
        "backward, wide": (experts_fp8.activate_backward, back | {"TANH": True, "F": 4096, "BLOCK": 4096}),
    }
    for name, (kernel, constants) in launches.items():
        yield f"FP8, {name}", kernel, sig, constants
    tile = experts_fp8.WEIGHT_GRADIENT
    for widths, dtype in itertools.product(((D, F), (F, D), (48, 32)), ("fp32", "bf16")):
        made = types(fp32="left_scale_1 right_scale_1", i32="end_P") | {"dw_EMN": f"*{dtype}"}
        for side, rows in (("left", "BM"), ("right", "BN")):
            made[f"{side}_tiles"] = f"tensordesc<fp8e4nv[{tile[rows]},{tile['BK']}]>"
        constants = tile | {"M": widths[0], "N": widths[1], "ADD": dtype == "fp32"}
        yield f"FP8, weights, {widths}, {dtype}", experts_fp8.weight_gradient, made, constants
    sig = types(bf16="x_TW", fp8e4nv="values_TW values_WP", fp32="scale_T scale_W largest_CT largest_CM")
    columns = mamba3_projection.COLUMNS | {"BLOCK": mamba3_projection.BLOCK, "MAXIMA": fp8.LARGEST_ROW["PARTS"]}
    for width in (D, 18432, 9216, 256, mamba3_projection.WIDEST):
        row = mamba3_projection.row(width)
        yield f"FP8, rows of M, {width}", mamba3_projection.scale_rows, sig, row
        yield f"FP8, rows of M alone, {width}", mamba3_projection.scale_rows, sig, row | {"largest_CT": None}
        yield f"FP8, columns of M, {width}", mamba3_projection.scale_columns, sig, columns | {"W": width}
    sig = types(bf16="x_TW h_TW", fp8e4nv="values_TW values_WP", fp32="scale_T scale")
    for width in (D, 18944, 256, 16, feed_forward.WIDEST):
        row = feed_forward.row(width)
        for name, absent in (("", "h_TW"), (", activation", "x_TW"), (", its gradient", "")):
            yield f"FP8, feed-forward, {width}{name}", feed_forward.scale_rows, sig, row | without(*absent.split())
        yield (
            f"FP8, feed-forward, transposed, {width}",
            feed_forward.transpose,
            sig,
            feed_forward.TRANSPOSED | {"W": width},
        )


def small_variants() -> Iterator[Variant]:
    """RMSNorm, the router, linear cross-entropy, Adam and the embedding."""
    sig = types(bf16="x_TD weight_D y_TD dy_TD dresidual_TD dx_TD dweight_D", fp32="scale_T dweight_PD") | {"eps": "fp32"}
    for hidden in (3584, 256, norm_launch.LARGEST):
        row = norm_launch.row(hidden)
        yield f"norm, {hidden}", norm.forward, sig, norm_launch.FORWARD | row
        yield f"norm, backward, {hidden}", norm.backward, sig, norm_launch.BACKWARD | row
        yield f"norm, no residual, {hidden}", norm.backward, sig, norm_launch.BACKWARD | row | without("dresidual_TD")
        yield f"norm, parts, {hidden}", norm.add_parts, sig, norm_launch.ADD_PARTS | {"D": hidden}
    sig = types(fp32="logits_TE score_TE bias_E probs_TE sums_PBC dprobs_TE dscore_BE dsquared dlogits_TE", i1="routing_TE")
    for number, topk in ((16, 4), (4, 2), (256, 8)):
        _, shape = router_launch._launch(8192, number, 2)
        yield f"router, {number}", router.route, sig, shape | {"K": topk}
        yield f"router, backward, {number}", router.route_backward, sig, shape
    sig = types(bf16="logit_CV", fp32="top_C total_C picked_C logsumexp_C weight_C", i64="label_C column_C")
    launch = {"BLOCK": cross_entropy.BLOCK, "GROUP": cross_entropy.GROUP, "num_warps": cross_entropy.WARPS}
    for absent in ("logsumexp_C weight_C", "logsumexp_C", "top_C column_C total_C picked_C"):
        yield f"softmax without {absent}", cross_entropy.softmax_rows, sig, launch | without(*absent.split())
    numbers = dict.fromkeys(("lr", "beta1", "beta2", "rest1", "rest2", "eps", "decay", "unbias1", "unbias2"), "fp32")
    sig = types(i64="places_ptr sizes_ptr", i32="first_ptr owner_ptr", fp32="scale_ptr") | numbers
    wide = {"HALF": False, "REMAINDER": False, "GRADIENT": tl.float32, "AVG": tl.float32, "AVG_SQ": tl.float32}
    wide |= {"ALIGN": 16, "BLOCK": adam.BLOCK, "num_warps": 4}
    narrow = {"REMAINDER": True, "AVG": tl.bfloat16, "AVG_SQ": tl.bfloat16}
    for absent in ("", "scale_ptr"):
        yield f"adam without {absent}", adam.adam, sig, wide | without(*absent.split())
    yield "adam, 16 bits", adam.adam, sig, wide | narrow
    yield "adam, 16 bits, gradients too", adam.adam, sig, wide | narrow | {"GRADIENT": tl.bfloat16, "ALIGN": 2}
    yield "add three", add.add_three, types(bf16="a_ptr b_ptr c_ptr total_ptr"), add.LAUNCH
    for out in ("fp32", "bf16"):
        sig = types(i64="entry_T order_T", i32="end_T", bf16="gradient_BSD") | {"total_VD": f"*{out}"}
        yield f"embedding to {out}", embedding.add_rows, sig, {"D": D} | embedding.LAUNCH
        sig = types(bf16="gradient", fp32="factor_1") | {"out": f"*{out}"}
        yield f"add_scaled to {out}", cross_entropy.add_scaled, sig, {"BLOCK": cross_entropy.SCALED, "BETA": True}


def indexer_variants(dtype: str) -> Iterator[Variant]:
    sig = types(fp32="score_BRW near_BRC target_BSN weight units dk_TBD divergence_BS", i32="seq_BS index_BSN")
    sig |= types(**{dtype: "q_SBHD k_SBD k_TBD w_SBH dq_SBHD dw_SBH"})
    one_document, lone = {"w_h": 1, "seq_BS": None}, {"w_h": 1, "score_b": None}
    yield "selection, documents", indexer.score_keys, sig, indexer_launch.SCORE_KEYS | lone
    yield "selection", indexer.score_keys, sig, indexer_launch.SCORE_KEYS | lone | one_document
    for width, keys in itertools.product(indexer_launch.SCORE_ALL, ("multiple of 16", "any")):
        launch = indexer_launch.SCORE_ALL[width] | one_document  # the number of heads is not constexpr
        yield f"all keys, {width}, {keys}", indexer.score_keys, sig, launch
        yield f"all keys, {width}, {keys}, fp32", indexer.score_keys, sig | types(fp32="w_SBH"), launch
    yield "take_best", indexer.take_best, sig, indexer_launch.TAKE_BEST | {"near_BRC": None}
    yield "take_best of long rows", indexer.take_best, sig, indexer_launch.TAKE_BEST
    for heads, selected in ((32, 256), (32, 64), (32, 2048), (5, 300), (64, 256)):
        for units in ({}, {"units": None}):
            launch = indexer_launch.learn(heads, selected, not units) | {"w_h": 1} | units
            yield (
                f"learn, {heads}, {selected}, {units}",
                indexer.learn,
                sig | types(i64="" if units else "dk_TBD"),
                launch,
            )
    sig = types(fp32="lse_BAS sum_BRT g_BRT weight_BS dk_PBTD", i32="starts ends position", bf16="w_SBH dw_SBH")
    sig |= types(**{dtype: "query key q_SBHD k_TBD dq_SBHD"}) | {"scale": "fp32"}
    for width, halves in dense.HALVES.items():
        sizes = dict(zip("VW", halves, strict=True))
        yield f"dense sums, {width}", dense.log_sums, sig, dense.SUMS[width] | sizes
        yield f"dense targets, {width}", dense.targets, sig, dense.TARGETS[width] | sizes
    for width in indexer_launch.SCORE_ALL:
        launch = dense.LEARN[width] | {"D": width}
        yield f"dense queries, {width}", dense.learn_queries, sig, launch
        yield f"dense keys, {width}", dense.learn_keys, sig, launch | {"PARTS": dense.PARTS}


def sparse_variants(dtype: str) -> Iterator[Variant]:
    """Of all numbers of heads that are rounded up to: others are several launches."""
    sig = types(fp32="lse_ptr mean_ptr dkv_ptr sum_ptr unit_ptr", i32="index_ptr") | {"scale": "fp32"}
    sig |= types(**{dtype: "q_ptr kv_ptr o_ptr do_ptr dq_ptr d_ptr"})
    integers = sig | types(i64="dkv_ptr")
    for widths in sparse_launch.WIDTHS:
        sizes = {"V": widths[1], "R": widths[0] - widths[1]}
        if widths not in sparse_launch.WIDE:
            for heads in (sparse_launch.HEADS, 32, 16):
                of = sizes | {"M": heads}
                if heads != 32:  # rows that only the backward pass has
                    yield f"forward, {heads}", sparse_mla.forward, sig, sparse_launch.FORWARD | of
                    yield f"means, {heads}", sparse_mla.means, sig, sparse_launch.MEANS | of
                    yield f"sums, {heads}", sparse_mla.sums, sig, sparse_launch.SUMS | of
                for sink in ({}, {"sum_ptr": None}):
                    launch = sparse_launch.BACKWARD | of | sink
                    yield f"backward, {heads}, {sink}", sparse_mla.backward, sig, launch | {"unit_ptr": None}
                    yield f"backward, {heads}, {sink}, integers", sparse_mla.backward, integers, launch
            continue
        wide: dict[str, tuple[Any, dict[str, Any]]] = {
            "forward": (wide_sparse_mla.forward, sparse_launch.WIDE_FORWARD),
            "scores": (wide_sparse_mla.scores, sparse_launch.SCORES | {"sum_ptr": None}),
            "scores, sum": (wide_sparse_mla.scores, sparse_launch.SCORES),
            "queries": (wide_sparse_mla.queries, sparse_launch.QUERIES),
            "keys": (wide_sparse_mla.keys, sparse_launch.GRADIENTS | {"unit_ptr": None}),
            "keys, integers": (wide_sparse_mla.keys, sparse_launch.GRADIENTS),
            "sums": (sparse_mla.sums, sparse_launch.WIDE_SUMS),
        }
        numbers = dict.fromkeys(map(sparse_launch._all_rows, (2 * sparse_launch.HEADS, sparse_launch.HEADS, 1)))
        if TRITON.get(triton_release(), {}).get("sparse_mla"):  # at these widths `auto` takes another backend
            del wide["scores, sum"]  # which spills
        for heads, (name, (kernel, launch)) in itertools.product(numbers, wide.items()):
            groups = max(1, heads // sparse_launch.HEADS)
            of = sizes | {"M": heads // groups, "ALL": heads, "PARTS": groups, "GROUP": groups - 1}
            of = {constant: size for constant, size in of.items() if constant in kernel.arg_names}
            yield f"wide {name}, {heads}", kernel, integers if "integers" in name else sig, of | launch


def mla_variants(dtype: str) -> Iterator[Variant]:
    sig = types(fp32="lse_ptr mean_ptr", i32="first_ptr last_ptr") | {"scale": "fp32"}
    sig |= types(**{dtype: "q_ptr k_ptr v_ptr o_ptr do_ptr dq_ptr dk_ptr dv_ptr"})
    for K, V in mla_launch.WIDTHS:
        yield f"mla forward, {K}", mla.forward, sig, mla_launch.FORWARD | {"K": K, "V": V}
        yield f"mla means, {V}", mla.means, sig, mla_launch.MEANS | {"V": V}
        yield f"mla queries, {K}", mla.backward_queries, sig, mla_launch.QUERIES | {"K": K, "V": V}
        yield f"mla keys, {K}", mla.backward_keys, sig, mla_launch.KEYS | {"K": K, "V": V}


def m2rnn_variants() -> Iterator[Variant]:
    widths = {"K": 64, "V": 16}
    sig = types(
        fp32="W_HVV starts_BHXKV y_RBHSV saved_BHEKV last_BHKV f_BHS dv_RBHSV df_RBHS dW_RBHVV dh_BHKV",
        bf16="q_BSK k_BSK v_BHSV dy_BHSV dq_BHSK dk_BHSK", fp16="candidates_BHTKV",
    )  # fmt: skip
    shared = {"ROWS": recurrence.ROWS, "num_warps": 1, "num_stages": 1} | widths | recurrence.products(torch.bfloat16)
    absent = {
        "forward": "starts_BHXKV candidates_BHTKV",
        "forward from a state": "candidates_BHTKV",
        "candidates": "y_RBHSV last_BHKV",
    }
    around = types(
        fp32="A_log dt_bias D f_BHP dv_RBHPV df_RBHP du_BSC dweight_NCX dgate_NHX y_RBHPV y_SBC squares_SB dsquares_SB dD_NC "
        "dweight_NC",
        bf16="dq_BHPK dk_BHPK q_SBK k_SBK v_SBHV x_f_SBH qk_weight qk_bias v_weight v_bias q_BPK k_BPK v_BHPV dy_BHPV "
        "dx_f_SBH dq_SBK dk_SBK dv_SBC g_SBHV weight out_SBC dout_SBC dg_SBC",
        i32="seq_BS",
    ) | {"eps": "fp32"}  # fmt: skip
    for documents in (False, True):
        for use, names in absent.items():
            constants = shared | without(*names.split()) | {"DOCUMENTS": documents}
            yield f"{use}, documents {documents}", recurrence.advance, sig, constants
        yield f"reverse, documents {documents}", recurrence.reverse, sig, shared | {"DOCUMENTS": documents}
        for heads in (64, 48, 44, 22, 11):
            power = {"H_POWER": 1 << (heads - 1).bit_length()}
            taps = {"H": heads, "T": 4, "TOKENS": convolution.TOKENS, "HEADS": convolution.HEADS}
            taps |= widths | {"DOCUMENTS": documents} | ({} if documents else {"seq_BS": None})
            back = taps | power | {"R": 4, "TOKENS": convolution.TOKENS_BACKWARD}
            name = f"{heads} heads, {documents}"
            yield f"prepare, {name}", convolution.prepare, around, taps | power
            yield f"prepare, backward, {name}", convolution.prepare_backward, around, back
            yield f"convolution, backward, {name}", convolution.convolution_inputs_backward, around, taps
            several = types(fp32="" if documents else "out_SBC dout_SBC")  # ranks
            channels = {"H": heads, "V": 16, "C_POWER": 16 * power["H_POWER"], "NORM": documents}
            yield f"gate, {name}", gate.skip_gate_norm, around | several, channels | {"R": 4, "TOKENS": gate.TOKENS}
            yield f"gate, backward, {name}", gate.skip_gate_norm_backward, around | several, channels


def projection_variants(dtype: str) -> Iterator[Variant]:
    absorbed = {"C": 64, "K": 64, "R": 64, "INTERLEAVED": True, "TRANSPOSED": False}
    outputs = absorbed | {"R": 0, "TRANSPOSED": True, "rotation_ptr": None}
    rotated = absorbed | {"w_ptr": None}
    of_indexer = rotated | {"C": 0, "K": 0, "INTERLEAVED": False}
    no_weight = {"x_ptr": None, "dw_ptr": None, "TILES": 1}
    keys = {"C": 64, "R": 64, "V": 64, "INTERLEAVED": True}
    indexer_keys = {"R": 64, "N": 32, "HEADS": 32, "INTERLEAVED": False} | projection_launch.NORMS
    norms = {"Q": 64, "L": 64, "R": 64} | projection_launch.NORMS
    tiles = {"TILES": projection_launch.TILES}
    launches: dict[str, tuple[str, dict[str, Any]]] = {
        "keys": ("keys_and_values", keys | projection_launch.KEYS),
        "latent keys": ("keys_and_values", keys | {"V": 0} | projection_launch.KEYS),
        "keys, backward": (
            "keys_and_values_backward",
            keys | {"TOKENS": 4, "HEADS": 8} | projection_launch.KEYS_BACKWARD,
        ),
        "latent keys, backward": (
            "keys_and_values_backward",
            keys | {"V": 0, "TOKENS": 32, "HEADS": 1} | projection_launch.KEYS_BACKWARD,
        ),
        "norms": ("norms", norms),
        "norms, backward": ("norms_backward", norms),
        "indexer's keys": ("indexer_keys", indexer_keys),
        "indexer's keys, backward": ("indexer_keys_backward", indexer_keys),
    }
    weighted = {"absorbed queries": absorbed, "outputs": outputs}
    for name, forward in (weighted | {"queries": rotated, "indexer": of_indexer}).items():
        more = tiles if name in weighted else no_weight
        launches[name] = "project", forward | projection_launch.PROJECT
        launches[f"{name}, backward"] = "project_backward", forward | more | projection_launch.BACKWARD
    for name, (function, constants) in launches.items():
        kernel = getattr(mla_projection, function)
        sig = {argument: f"*{dtype}" for argument in kernel.arg_names if argument.endswith("_ptr")}
        sig |= types(fp32="rotation_ptr dnorm_ptr") | {"eps": "fp32", "scale": "fp32"}
        if function != "indexer_keys_backward":  # there they are of an output
            sig |= types(fp32="dw_ptr")
        yield f"projection, {name}", kernel, sig, constants


PRODUCTS = (
    experts.product, experts.weight_gradient, experts_fp8.weight_gradient, indexer.score_keys, indexer.learn, dense.log_sums,
    dense.targets, dense.learn_queries, dense.learn_keys, mla.forward, mla.backward_queries, mla.backward_keys,
    sparse_mla.forward, sparse_mla.means, sparse_mla.sums,
    sparse_mla.backward, wide_sparse_mla.forward, wide_sparse_mla.scores, wide_sparse_mla.queries, wide_sparse_mla.keys,
)  # fmt: skip
SMALL_PRODUCTS = recurrence.advance, recurrence.reverse, mla_projection.project, mla_projection.project_backward
VARIANTS = [*experts_variants(), *fp8_variants(), *small_variants(), *m2rnn_variants()]
for made in (indexer_variants, mla_variants, sparse_variants, projection_variants):
    VARIANTS += [(f"{name}, {dtype}", *rest) for dtype in ("bf16", "fp16") for name, *rest in made(dtype)]


def multiples(variant: Variant) -> tuple[str, ...]:
    name, kernel, *_ = variant
    return tuple(
        param.name
        for param in kernel.params
        if param.name in MULTIPLES and not param.do_not_specialize and (param.name != "W" or ", any" not in name)
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=[name for name, *_ in VARIANTS])
def test_it_fits_and_nothing_is_spilled(tmp_path: Path, variant: Variant) -> None:
    """And products are on tensor cores: Hopper's, but for few rows."""
    _, kernel, sig, constants = variant
    mnemonics = products(compiled(kernel, sig, constants, tmp_path, multiples=multiples(variant)))
    few = kernel in SMALL_PRODUCTS or 16 in (constants.get("M"), constants.get("ALL"))
    assert bool(mnemonics["wgmma.mma_async"] + mnemonics["mma.sync"] * few) == (
        kernel in PRODUCTS or (kernel in SMALL_PRODUCTS and constants.get("K") != 0 and "w_ptr" not in constants)
    ), mnemonics
    if kernel is fp8.scale_weights:  # ptxas loses bytes where both orders are of the same rounded pairs
        rounded = instructions(tmp_path)["F2FP"]
        assert rounded == constants["BN"] * constants["BW"] // (32 * constants["num_warps"]), rounded


def test_no_experts_product_reads_rows_that_none_has_written() -> None:
    assert FORWARD["BM"] % BACKWARD["BM"] == BACKWARD["BM"] % WEIGHTS["BK"] == 0


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
    spilling = TRITON.get(triton_release(), {}).get("mamba3", {})  # at which `auto` takes another backend
    sizes = [size for size in SIZES if size != (spilling.get("mimo_rank"), spilling.get("state"))]
    return [(name, *size) for name in kernels for size in sizes if size[0] > 1 or name not in SEVERAL_RANKS]


def _plan(rank: int, state: int, even: bool) -> Plan:
    tokens = 4 * SEGMENT if even else 4 * SEGMENT - 1
    return Plan(
        tokens, 2, 112, 64, 8, rank, state, state // 4, mimo=rank > 1, norm=True, packed=True, heavy=False, A_floor=1e-4,
        eps=1e-5,
    )  # fmt: skip


def _chunks(names: list[str], plan: Plan, *, raw: bool) -> dict[str, str]:
    """The types of what is read or written a chunk at a time."""
    widths = {"k_desc": plan.N, "q_desc": plan.N, "dk_desc": plan.N, "dq_desc": plan.N, "do_desc": plan.P}
    sig = {name: f"tensordesc<bf16[{ROWS}, {width}]>" for name, width in widths.items() if name in names}
    if "x_desc" in names:
        sig["x_desc"] = f"tensordesc<bf16[{plan.chunk}, 1, 1, {plan.P}]>"
    return sig | ({"o_desc": f"tensordesc<bf16[{ROWS}, {plan.P}]>"} if raw else {})


def mamba3_variants(kernel: str, plan: Plan) -> Iterator[Variant]:
    function = getattr(mamba3, kernel)
    choices = CHOICES.get(kernel, [{}])
    if kernel == "chunk_scan_bwd_keys":
        choices = [part | ({} if part["QUERIES"] else {"dq_desc": None}) for part in plan.key_parts]
    elif kernel == "chunk_state_fwd":
        choices = [{"BACKWARD": back} for back in ((False, True) if plan.R == 1 else (False,))]
    elif kernel == "chunk_scan_fwd":
        choices = [{"RAW": True, "GATED": True} | norm for norm in ({}, NO_NORM)]  # at rank 1, or where the output is kept
        if plan.R > 1:
            choices += [{"RAW": False, "GATED": True, "o_desc": None} | norm for norm in ({}, NO_NORM)]
            choices.append({"RAW": True, "GATED": False, "y_ptr": None, "NORM": False})
    run_time = {"S", "B"} | ({"NSEG"} if kernel not in ("angle_carries", "state_passing") else set())
    taken = set(function.arg_names) - run_time
    for choice in choices:
        constants = {name: value for name, value in plan.sizes.items() if name in taken} | choice
        pointers = {name: TYPES.get(name, "*fp32") for name in function.arg_names if name.endswith("_ptr")}
        sig = TYPES | pointers | _chunks(function.arg_names, plan, raw=choice.get("RAW", False))
        options = replace(plan, norm=choice.get("NORM", plan.norm)).options(kernel)
        yield f"{kernel}, {choice}", function, sig, constants | options


MAMBA3 = [(even, *case) for even, kernels in ((True, DOTS), (False, DOTS + OTHERS)) for case in _cases(kernels)]


@pytest.mark.parametrize(("even", "kernel", "rank", "state"), MAMBA3)
def test_mamba3(tmp_path: Path, even: bool, kernel: str, rank: int, state: int) -> None:
    for name, function, sig, constants in mamba3_variants(kernel, _plan(rank, state, even)):
        mnemonics = products(compiled(function, sig, constants, tmp_path))
        assert bool(mnemonics["wgmma.mma_async"]) == (kernel in DOTS), (name, mnemonics)


GATE = next(mamba3_variants("gate_bwd", _plan(4, 64, False)))[1:]


@pytest.mark.parametrize("name", ["forward, documents False", "FP8, weights", "means, 16, bf16", "gate_bwd"])
def test_what_is_in_ptx_compiles_for_other_gpus_without_it(name: str) -> None:
    """Each module with PTX of its own; AMD's compiler aborts on it."""
    variants = {title: rest for title, *rest in [*VARIANTS, ("gate_bwd", *GATE)]}
    made = build(*variants[name], GPUTarget("hip", "gfx942", 64))
    assert "s_endpgm" in made.asm["amdgcn"]
