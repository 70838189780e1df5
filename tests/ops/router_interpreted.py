"""The router's kernels under Triton's interpreter, on a CPU, against float64."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.router import triton as fused
from tests.ops.router_case import CASES, compared


def main(_: str) -> None:
    """Fail unless every result is right."""
    for case in CASES:
        compared(fused.route, case, torch.device("cpu"))
