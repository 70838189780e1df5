"""The routed experts' kernels under Triton's interpreter, on a CPU, against float64.

PyTorch's grouped products are its own ones for a CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megacpp_mcore.ops.grouped_mlp import fp8, reference
from megacpp_mcore.ops.grouped_mlp import triton as fused
from tests.ops.grouped_mlp_case import Case, assert_same, draw, outcome, outcome_added, outcome_of_rows

CASES = {
    "even": (Case(T=37, D=40, F=24, dtype=torch.float32), 3e-6),
    "lone": (Case(T=37, D=40, F=24, E=5, routing="lone", dtype=torch.float32, activation="gelu_tanh"), 3e-6),
    "halves": (Case(T=37, D=40, F=24, E=7, topk=1, dtype=torch.float16, prob_dtype=torch.float16), 2e-3),
    "blocks": (Case(T=70, D=8, F=16, E=6, topk=4, routing="skewed", dtype=torch.float32), 3e-6),
}


def scaled() -> None:
    """Fail unless the kernels of FP8 scale each row to E4M3's largest value, and results are right but for its rounding.

    Scaled numbers stay float32: Triton's interpreter rounds some wrongly to E4M3, and PyTorch multiplies them on a GPU alone.
    """
    case = Case(T=37, D=48, F=32, dtype=torch.float32)
    fused.DTYPES, fp8.E4M3 = (case.dtype,), torch.float32
    fp8.ELEMENTS = 32  # parts of a row
    fp8.WEIGHTS.update({"BN": 32, "BW": 16})
    fp8.TRANSPOSED.update({"BP": 32, "BW": 16, "STEPS": 2})
    fp8.LARGEST_OF.update({"PARTS": 4, "BLOCK": 64})
    fp8.PARTS = 8
    products = []

    def product(
        left: torch.Tensor,
        right: torch.Tensor,
        left_scale: torch.Tensor,
        right_scale: torch.Tensor,
        *,
        offs: Any,
        **_: Any,
    ) -> torch.Tensor:
        """``torch._scaled_grouped_mm`` of rows and of a stack of matrices; and of columns, with a scale for each expert."""
        ends, found = [0, *offs.tolist()], []
        products.append(right.dim())
        if right.dim() == 3:
            torch.testing.assert_close(left.abs().amax(-1), torch.full_like(left_scale, 448.0))
            torch.testing.assert_close(right.abs().amax((1, 2)), torch.full((len(right),), 448.0))
            for expert, (start, end) in enumerate(itertools.pairwise(ends)):
                rows = left[start:end] * left_scale[start:end, None]
                found.append(rows @ (right[expert] * right_scale[expert]))
            return torch.cat(found)
        for side in (left, right):
            torch.testing.assert_close(side.abs().max(), torch.tensor(448.0))
        scales = zip(left_scale.view(len(offs), -1), right_scale.view(len(offs), -1), strict=True)
        for (start, end), (mine, theirs) in zip(itertools.pairwise(ends), scales, strict=True):
            found.append((left[:, start:end] * mine[:, None]) @ (right[start:end] * theirs))
        return torch.stack(found)

    torch._scaled_grouped_mm, fp8.CAPABILITY = product, "no GPU"
    inputs = draw(case)
    truth = outcome(reference.routed_mlp, case, inputs, torch.float64)
    assert_same(outcome(fp8.routed_mlp, case, inputs), truth, 2e-6, inputs["routing"])
    rows = outcome_of_rows(reference.grouped_mlp, case, inputs, torch.float64)
    assert_same(outcome_of_rows(fp8.grouped_mlp, case, inputs), rows, 2e-6)
    assert sorted(products) == [2] * 4 + [3] * 8  # of tokens and of rows: four products of rows, two of columns
    assert_same(outcome_added(fp8.routed_mlp, case, inputs), truth, 2e-6, inputs["routing"])


def main(name: str) -> None:
    """Fail unless every result is right, of tokens and of rows; and unless a token of too few or many experts is NaN."""
    if name == "fp8":
        scaled()
        return
    case, rms = CASES[name]
    fused.DTYPES = (case.dtype,)
    if name == "blocks":
        for tile in (fused.FORWARD, fused.BACKWARD, fused.WEIGHTS):
            tile.update({"BM": 16, "BN": 8, "BK": 16} | ({"SPLIT": 2} if "SPLIT" in tile else {}))
    inputs = draw(case)
    truth = outcome(reference.routed_mlp, case, inputs, torch.float64)
    assert_same(outcome(fused.routed_mlp, case, inputs), truth, rms, inputs["routing"])
    rows = outcome_of_rows(reference.grouped_mlp, case, inputs, torch.float64)
    assert_same(outcome_of_rows(fused.grouped_mlp, case, inputs), rows, rms)
    for dtype in (torch.float32, case.dtype):
        assert_same(outcome_added(fused.routed_mlp, case, inputs, dtype), truth, rms, inputs["routing"])
    inputs["routing"][3], inputs["routing"][-1] = True, False
    found = outcome(fused.routed_mlp, case, inputs)
    for tensor in (found["y"], found["dx"]):
        assert tensor[[3, -1]].isnan().all()
        assert tensor.isfinite().any()
