"""The indexer's kernels compiled for sm_90 without a GPU: nothing spilled, tensor cores where they are counted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from megacpp_mcore.ops.indexer import kernels
from megacpp_mcore.ops.indexer import triton as fused
from tests.ops.sm90 import Compiled, compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

FP32 = ("score_BRW", "target_BSN", "weight", "units", "dk_TBD", "divergence_BS")
INT32 = ("seq_BS", "index_BSN")
HALF = ("q_SBHD", "k_SBD", "k_TBD", "w_SBH", "dq_SBHD", "dw_SBH")
STRIDES = ("q_s", "q_b", "q_h", "k_s", "k_b", "w_s", "w_b", "W")
DTYPES = ["*bf16", "*fp16"]


def _compiled(kernel: Any, launch: dict[str, Any], folder: Path, dtype: str = "*bf16", **types: str) -> Compiled:
    tensors = dict.fromkeys(FP32, "*fp32") | dict.fromkeys(INT32, "*i32") | dict.fromkeys(HALF, dtype) | types
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
    return compiled(kernel, tensors, launch, folder, multiples=STRIDES, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", [False, True])
def test_score_keys(tmp_path: Path, documents: bool, dtype: str) -> None:
    launch = fused.SCORE_KEYS | {"w_h": 1} | ({} if documents else {"seq_BS": None})
    made = _compiled(kernels.score_keys, launch, tmp_path, dtype)
    assert made.instructions["HGMMA"]
    assert made.registers <= 168, made  # three programs on a multiprocessor
    assert made.shared <= 75 * 1024, made


def test_take_best(tmp_path: Path) -> None:
    made = _compiled(kernels.take_best, dict(fused.TAKE_BEST), tmp_path)
    assert made.registers <= 128, made  # 16 rows on a multiprocessor


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "selected"), [(32, 256), (32, 64), (32, 2048), (5, 300), (64, 256)])
def test_learn(tmp_path: Path, heads: int, selected: int, dtype: str, deterministic: bool) -> None:
    launch = fused.learn(heads, selected, deterministic) | {"w_h": 1} | ({} if deterministic else {"units": None})
    made = _compiled(kernels.learn, launch, tmp_path, dtype, dk_TBD="*i64" if deterministic else "*fp32")
    assert made.instructions["HGMMA"]
