"""Sparse MLA's kernels: what they refuse; and compiled for sm_90 without a GPU, nothing spilled, tensor cores used.

Every variant that a candidate's request can ask for; the kernels do not depend on the lengths.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.sparse_mla import kernels
from megacpp_mcore.ops.sparse_mla.triton import BACKWARD, FORWARD, HEADS, MEANS, WIDTHS, attend
from tests.ops.sm90 import Compiled, compiled

INPUTS = ("q_ptr", "kv_ptr", "o_ptr", "do_ptr", "dq_ptr")
FP32 = ("lse_ptr", "mean_ptr", "dkv_ptr", "sum_ptr", "unit_ptr")
THREE_A_PROCESSOR = 168
"""Registers of a thread with which three programs of four warps are on a multiprocessor at a time."""


@pytest.fixture(params=["bf16", "fp16"])
def types(request: pytest.FixtureRequest) -> dict[str, str]:
    return (
        dict.fromkeys(INPUTS, f"*{request.param}")
        | dict.fromkeys(FP32, "*fp32")
        | {"index_ptr": "*i32", "scale": "fp32"}
    )


def _compile(
    kernel: str, types: dict[str, str], widths: tuple[int, int], M: int, absent: list[str], folder: Path
) -> Compiled:
    launch = dict({"forward": FORWARD, "means": MEANS, "backward": BACKWARD}[kernel])
    warps = launch.pop("num_warps")
    constants = launch | {"M": M, "V": widths[1], "R": widths[0] - widths[1]} | dict.fromkeys(absent)
    return compiled(getattr(kernels, kernel), types, constants, folder, num_warps=warps)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [HEADS, 16])
@pytest.mark.parametrize("kernel", ["forward", "means"])
def test_heads_on_rows(tmp_path: Path, types: dict[str, str], kernel: str, widths: tuple[int, int], heads: int) -> None:
    made = _compile(kernel, types, widths, heads, [], tmp_path)
    assert made.registers <= THREE_A_PROCESSOR, made
    assert made.instructions["HGMMA" if heads == HEADS else "HMMA"], made


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [HEADS, 32, 16])
def test_keys_on_rows(
    tmp_path: Path, types: dict[str, str], widths: tuple[int, int], heads: int, deterministic: bool, sink: bool
) -> None:
    absent = ([] if sink else ["sum_ptr"]) + ([] if deterministic else ["unit_ptr"])
    made = _compile("backward", types | ({"dkv_ptr": "*i64"} if deterministic else {}), widths, heads, absent, tmp_path)
    assert made.instructions["HGMMA"], made


def test_refusals() -> None:
    q, kv, index = torch.zeros(4, 1, 2, 128), torch.zeros(4, 1, 128), torch.zeros(1, 4, 1, dtype=torch.int32)
    how = {"softmax_scale": 1.0, "value_dim": 64}
    with pytest.raises(ModelError, match=r"torch\.float32 and torch\.float32; they take one of .*bfloat16"):
        attend(q, kv, index, **how)
    with pytest.raises(ModelError, match=r"torch\.bfloat16 and torch\.float16"):
        attend(q.bfloat16(), kv.half(), index, **how)
    with pytest.raises(ModelError, match=r"widths \(128, 32\) .* one of \(\(128, 64\),\)"):
        attend(q.half(), kv.half(), index, **how | {"value_dim": 32})
    with pytest.raises(ModelError, match=r"softmax_scale is -1\.0"):
        attend(q.half(), kv.half(), index, **how | {"softmax_scale": -1.0})
    with pytest.raises(ModelError, match="same B and K"):
        attend(q.half(), kv[..., :64].half(), index, **how)
