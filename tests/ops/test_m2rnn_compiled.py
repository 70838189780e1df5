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
from tests.ops.sm90 import Compiled, compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

WIDTHS = {"K": 64, "V": 16}
ADVANCE = {
    "forward": ["entering_BHXKV", "candidates_BHTKV"],
    "forward from a state": ["candidates_BHTKV"],
    "candidates": ["y_RBHSV", "last_BHKV"],
}
"""What :func:`megacpp_mcore.ops.m2rnn.recurrence.advance` is not given."""
FP32 = "W_HVV entering_BHXKV y_RBHSV saved_BHEKV last_BHKV f_BHS dv_RBHSV df_RBHS dW_RBHVV dh_BHKV"
BF16 = "q_BSK k_BSK v_BHSV dy_BHSV dq_BHSK dk_BHSK"


def _tensors(fp32: str, bf16: str) -> dict[str, str]:
    return dict.fromkeys(fp32.split(), "*fp32") | dict.fromkeys(bf16.split(), "*bf16") | {"candidates_BHTKV": "*fp16"}


def _recurrence(kernel: Any, folder: Path, constants: dict[str, Any]) -> Compiled:
    shared = {"ROWS": recurrence.ROWS} | WIDTHS | recurrence.products(torch.bfloat16)
    made = compiled(kernel, _tensors(FP32, BF16), shared | constants, folder, num_warps=1, num_stages=1)
    assert made.instructions["HMMA"]
    return made


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("use", ADVANCE)
def test_advance(tmp_path: Path, use: str, documents: bool) -> None:
    absent = dict.fromkeys(ADVANCE[use])
    made = _recurrence(recurrence.advance, tmp_path, absent | {"DOCUMENTS": documents})
    assert made.registers <= 168, made  # three programs for each scheduler


@pytest.mark.parametrize("documents", [False, True])
def test_reverse(tmp_path: Path, documents: bool) -> None:
    _recurrence(recurrence.reverse, tmp_path, {"DOCUMENTS": documents})


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [44, 11])
def test_before_and_behind(tmp_path: Path, heads: int, documents: bool) -> None:
    """The kernels around the recurrence, which wait for memory alone."""
    fp32 = (
        "A_log dt_bias D f_BHP dv_RBHPV df_RBHP du_BSC dweight_NCX dgate_NHX y_RBHPV y_SBC squares_SB "
        "dsquares_SB dD_NC dweight_NC"
    )
    bf16 = (
        "dq_BHPK dk_BHPK q_SBK k_SBK v_SBHV x_f_SBH qk_weight qk_bias v_weight v_bias q_BPK k_BPK v_BHPV dy_BHPV "
        "dx_f_SBH dq_SBK dk_SBK dv_SBC g_SBHV weight out_SBC dout_SBC dg_SBC"
    )
    tensors = _tensors(fp32, bf16) | {"seq_BS": "*i32", "eps": "fp32"}
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
        compiled(kernel, tensors, constants, tmp_path)
