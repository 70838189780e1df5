"""The kernels between MLA's projections and its core attention under Triton's interpreter, against float64.

Float16 stands for bfloat16, whose products the interpreter gets wrong.
"""

from __future__ import annotations

import torch

from megacpp_mcore.ops.mla_projection import reference
from megacpp_mcore.ops.mla_projection import triton as fused
from tests.ops.mla_projection_case import assert_same, cases, outcome

WIDTH = 16
DTYPES = {"whole": (torch.float32, 3e-6), "halves": (torch.float16, 2e-3)}


def main(name: str) -> None:
    """Fail unless every result is right, with rows that fill no tile and heads that fill none."""
    dtype, rms = DTYPES[name]
    fused.WIDTHS, fused.DTYPES, fused.TILES = (WIDTH,), (dtype,), 2
    for launch in (fused.PROJECT, fused.BACKWARD, fused.KEYS):
        launch["TOKENS"] = 16
    fused.NORMS["ROWS"], fused.ROWS = 16, 16
    for case in cases(S=37, B=2, H=11, width=WIDTH, hidden=24, indexer_heads=3, dtype=dtype):
        truth = outcome(getattr(reference, case.op), case, torch.float64)
        plain = outcome(getattr(reference, case.op), case)
        assert_same(case, outcome(getattr(fused, case.op), case), truth, plain, rms)
