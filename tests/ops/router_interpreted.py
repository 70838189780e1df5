"""A program: the router's kernels under Triton's interpreter, on a CPU, against float64. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.router import triton as fused
from tests.ops.interpreter import take_scalars_of_one_element
from tests.ops.router_case import CASES, compared


def main() -> None:
    """Fail unless every result is right."""
    take_scalars_of_one_element()
    for case in CASES:
        compared(fused.route, case, torch.device("cpu"))


if __name__ == "__main__":
    main()
