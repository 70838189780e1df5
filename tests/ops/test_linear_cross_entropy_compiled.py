"""Linear cross-entropy's kernels compiled for sm_90 without a GPU: nothing spilled, two rows on a multiprocessor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from megacpp_mcore.ops.linear_cross_entropy import triton as kernels
from tests.ops.sm90 import compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TENSORS = dict.fromkeys(("top_C", "total_C", "picked_C", "logsumexp_C", "weight_C"), "*fp32") | dict.fromkeys(
    ("label_C", "column_C"), "*i64"
)
ABSENT = {
    "losses": ("logsumexp_C", "weight_C"),
    "losses and gradients": ("logsumexp_C",),
    "gradients": ("top_C", "column_C", "total_C", "picked_C"),
}


@pytest.mark.parametrize("absent", ABSENT)
def test_softmax_rows(tmp_path: Path, absent: str) -> None:
    constants: dict[str, Any] = {"BLOCK": kernels.BLOCK, "GROUP": kernels.GROUP} | dict.fromkeys(ABSENT[absent])
    made = compiled(
        kernels.softmax_rows,
        TENSORS | {"logit_CV": "*bf16"},
        constants,
        tmp_path,
        multiples=("stride",),
        num_warps=kernels.WARPS,
    )
    assert made.registers * kernels.WARPS * 32 <= 65536 // 2, made
    assert made.instructions["LDG"] <= 12, made  # 16 bytes each, not 2


@pytest.mark.parametrize("out", ["*fp32", "*bf16"])
def test_add_scaled(tmp_path: Path, out: str) -> None:
    made = compiled(
        kernels.add_scaled,
        {"out": out, "gradient": "*bf16", "factor_1": "*fp32"},
        {"BLOCK": kernels.SCALED, "BETA": True},
        tmp_path,
        multiples=("size",),
    )
    assert made.instructions["LDG"] <= 8, made
