"""Sparse MLA's kernels under Triton's interpreter, on a CPU, against float64.

Float16 stands for bfloat16, whose products the interpreter gets wrong.
"""

from __future__ import annotations

import torch
import triton.language as tl

from megacpp_mcore.ops.sparse_mla import triton as fused
from megacpp_mcore.ops.sparse_mla.reference import attend as reference
from tests.ops.sparse_mla_case import Case, assert_same, draw, eager, outcome

SMALL = {"S": 37, "H": 3, "K": 32, "V": 16, "N": 20}
CASES = {
    "whole": (Case(**SMALL, dtype=torch.float32, ragged=True, popular=True, strided=True, layers=2), 4e-6),
    "halves": (Case(**SMALL, dtype=torch.float16, ragged=True), 2e-3),
    "many_heads": (Case(**SMALL | {"S": 9, "H": 70}, dtype=torch.float32), 4e-6),
}


def main(name: str) -> None:
    """Fail unless every result is right, by sums of floats and by sums of integers."""
    case, rms = CASES[name]
    fused.WIDTHS, fused.DTYPES = ((case.K, case.V),), (case.dtype,)
    fused.kernels.KEYS = fused.FORWARD["KEYS"] = fused.MEANS["KEYS"] = fused.BACKWARD["KEYS"] = 16
    fused.kernels.FEW = tl.constexpr(12)  # of 20 keys
    inputs = draw(case)
    truth, plain = outcome(reference, case, inputs, torch.float64), outcome(eager, case, inputs)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        assert_same(case, inputs, outcome(fused.attend, case, inputs), truth, plain, rms)
