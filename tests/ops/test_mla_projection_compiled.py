"""The kernels between MLA's projections and its core attention, compiled for sm_90 without a GPU: nothing spilled.

Every variant that an A layer calls; the kernels do not depend on lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from megacpp_mcore.ops.mla_projection import kernels, triton
from tests.ops.sm90 import compiled

FP32 = ("rotation_ptr", "dnorm_ptr")
THREE_A_PROCESSOR = 168
"""Registers of a thread, at most, so that three programs of four warps are on a multiprocessor at a time."""
ABSORBED = {"C": 64, "K": 64, "R": 64, "INTERLEAVED": True, "TRANSPOSED": False}
OUTPUTS = ABSORBED | {"R": 0, "TRANSPOSED": True, "rotation_ptr": None}
ROTATED = ABSORBED | {"w_ptr": None}
INDEXER = ROTATED | {"C": 0, "K": 0, "INTERLEAVED": False}
NO_WEIGHT = {"x_ptr": None, "dw_ptr": None, "TILES": 1}
KEYS = {"C": 64, "R": 64, "V": 64, "INTERLEAVED": True}
INDEXER_KEYS = {"R": 64, "N": 32, "HEADS": 32, "INTERLEAVED": False}
TILES = {"TILES": triton.TILES}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "absorbed queries": ("project", ABSORBED, triton.PROJECT),
    "outputs": ("project", OUTPUTS, triton.PROJECT),
    "queries": ("project", ROTATED, triton.PROJECT),
    "indexer": ("project", INDEXER, triton.PROJECT),
    "absorbed queries, backward": ("project_backward", ABSORBED | TILES, triton.BACKWARD),
    "outputs, backward": ("project_backward", OUTPUTS | TILES, triton.BACKWARD),
    "queries, backward": ("project_backward", ROTATED | NO_WEIGHT, triton.BACKWARD),
    "indexer, backward": ("project_backward", INDEXER | NO_WEIGHT, triton.BACKWARD),
    "keys": ("keys_and_values", KEYS, triton.KEYS),
    "latent keys": ("keys_and_values", KEYS | {"V": 0}, triton.KEYS),
    "keys, backward": ("keys_and_values_backward", KEYS | {"TOKENS": 4, "HEADS": 8}, triton.KEYS_BACKWARD),
    "latent keys, backward": (
        "keys_and_values_backward",
        KEYS | {"V": 0, "TOKENS": 32, "HEADS": 1},
        triton.KEYS_BACKWARD,
    ),
    "norms": ("norms", {"Q": 64, "L": 64, "R": 64}, triton.NORMS),
    "norms, backward": ("norms_backward", {"Q": 64, "L": 64, "R": 64}, triton.NORMS),
    "indexer's keys": ("indexer_keys", INDEXER_KEYS, triton.NORMS),
    "indexer's keys, backward": ("indexer_keys_backward", INDEXER_KEYS, triton.NORMS),
}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_spilled(tmp_path: Path, variant: str, dtype: str) -> None:
    name, constants, launch = VARIANTS[variant]
    kernel, options = getattr(kernels, name), dict(launch)
    warps = options.pop("num_warps")
    tensors = {each: f"*{dtype}" for each in kernel.arg_names if each.endswith("_ptr")}
    types = tensors | dict.fromkeys(FP32, "*fp32") | {"eps": "fp32", "scale": "fp32"}
    if name != "indexer_keys_backward":  # there they are of an output
        types["dw_ptr"] = "*fp32"
    made = compiled(kernel, types, constants | options, tmp_path, num_warps=warps)
    assert made.registers <= THREE_A_PROCESSOR, made
    products = made.instructions["HGMMA"] + made.instructions["HMMA"]
    assert bool(products) == ("K" in constants and "w_ptr" not in constants), made
