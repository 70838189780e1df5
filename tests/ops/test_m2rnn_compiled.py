"""M²RNN's kernels compiled for sm_90 without a GPU: nothing spilled, tensor cores where they are counted on.

Every variant that ships at the widths of the presets; the kernels do not depend on the lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.ops.m2rnn import convolution, gate, recurrence
from tests.ops.sm90 import compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

WIDTHS = {"K": 64, "V": 16}
DTYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
COVERED = [torch.bfloat16]
"""What the candidate takes; the backward walk spills in fp32, which it leaves out."""
ADVANCE = {
    "forward": {"ENTERING": False, "READ": True, "LAST": True},
    "forward from a state": {"ENTERING": True, "READ": True, "LAST": True},
    "states": {"ENTERING": True, "READ": False, "LAST": False},
}
FP32 = "W_HVV entering_BHXKV y_RBHSV saved_BHEKV last_BHKV dlast_BHKV f_BHS dq_BHSK dk_BHSK dv_RBHSV df_RBHS dW_RBHVV dh0_BHKV"


def _tensors(dtype: torch.dtype, fp32: str, others: str) -> dict[str, str]:
    return dict.fromkeys(fp32.split(), "*fp32") | dict.fromkeys(others.split(), DTYPES[dtype])


def _recurrence(dtype: torch.dtype, documents: bool, **constants: Any) -> tuple[dict[str, str], dict[str, Any]]:
    tensors = _tensors(dtype, FP32, "q_BSK k_BSK v_BHSV dy_BHSV")
    shared = {"ROWS": recurrence.ROWS, "DOCUMENTS": documents} | recurrence.products(dtype)
    return tensors, WIDTHS | shared | constants


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("use", ADVANCE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_advance(tmp_path: Path, dtype: torch.dtype, use: str, documents: bool) -> None:
    flags = ADVANCE[use]
    absent = {"y_RBHSV": flags["READ"], "last_BHKV": flags["LAST"], "entering_BHXKV": flags["ENTERING"]}
    nothing = {name: None for name, there in absent.items() if not there}
    tensors, constants = _recurrence(dtype, documents, **flags, **nothing)
    made = compiled(recurrence.advance, tensors, constants, tmp_path, num_warps=1, num_stages=1)
    assert (made.spills, made.registers <= 192) == (0, True), made
    assert bool(made.instructions["HMMA"]) == (dtype != torch.float32)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", COVERED, ids=str)
def test_reverse(tmp_path: Path, dtype: torch.dtype, last: bool, documents: bool) -> None:
    nothing = {} if last else {"dlast_BHKV": None}
    tensors, constants = _recurrence(dtype, documents, DLAST=last, BLOCK=recurrence.block(dtype), **nothing)
    made = compiled(recurrence.reverse, tensors, constants, tmp_path, num_warps=1, num_stages=1)
    assert made.spills == 0, made
    assert made.instructions["HMMA"]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [44, 11])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_before_and_behind(tmp_path: Path, dtype: torch.dtype, heads: int, documents: bool) -> None:
    """The kernels around the recurrence, which wait for memory alone."""
    fp32 = (
        "A_log dt_bias D f_BHP dq_BHPK dk_BHPK dv_RBHPV df_RBHP du_BSC dweight_NCX dgate_NHX y_RBHPV y_SBC squares_SB "
        "dsquares_SB dD_NC dweight_NC"
    )
    others = (
        "q_SBK k_SBK v_SBHV x_f_SBH qk_weight qk_bias v_weight v_bias q_BPK k_BPK v_BHPV dy_BHPV dx_f_SBH dq_SBK dk_SBK "
        "dv_SBC g_SBHV weight out_SBC dout_SBC dg_SBC"
    )
    tensors = _tensors(dtype, fp32, others) | {"seq_BS": "*i32", "eps": "fp32"}
    power = 1 << (heads - 1).bit_length()
    taps = {
        "H": heads,
        "T": 4,
        "TOKENS": convolution.TOKENS,
        "HEADS": convolution.HEADS,
        "DOCUMENTS": documents,
    } | WIDTHS
    taps |= {} if documents else {"seq_BS": None}
    backward = taps | {"H_POWER": power, "R": 4, "TOKENS": convolution.TOKENS_BACKWARD}
    around = {"H": heads, "V": 16, "C_POWER": 16 * power, "NORM": True}
    launches = (
        (convolution.prepare, taps | {"H_POWER": power}),
        (convolution.prepare_backward, backward),
        (convolution.convolution_inputs_backward, taps),
        (gate.skip_gate_norm, around | {"R": 4, "TOKENS": gate.TOKENS}),
        (gate.skip_gate_norm_backward, around),
    )
    for kernel, constants in launches:
        made = compiled(kernel, tensors, constants, tmp_path)
        assert made.spills == 0, (kernel, made)
