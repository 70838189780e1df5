"""The grouped FP8 product, forward: DeepGEMM and plain PyTorch on the same operands, and PyTorch's bf16 product of them.

Legend: T rows (at least 128 an expert), E experts, D hidden, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch

from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.measure import AgainstTruth
from megacpp_mcore.bench.problem import FORWARD, Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import product
from megacpp_mcore.ops.grouped_fp8.reference import BLOCK, dequantized, grouped_product, quantize_blocks, quantize_rows

LIMIT = 2e-2
"""The operands are the same; only the sums, and the output in bf16, are rounded differently."""


def problem(options: Options) -> Problem:
    """Compare every implementation on one set of operands, which are E4M3 whatever dtype is requested."""
    options = Options(device=options.device, shape=options.shape)
    E, D, width = options.sizes("experts", "hidden", "expert_width")
    rows = -(-options.shape["B"] * options.shape["S"] * options.shape["routed"] // (E * BLOCK)) * BLOCK
    T, draw = E * rows, Draw(options)
    D, width = (-(-size // BLOCK) * BLOCK for size in (D, width))
    x, w = draw.normal(T, D, dtype=torch.float32), draw.normal(E, width, D, dtype=torch.float32)
    operands = (*quantize_rows(x), *quantize_blocks(w), torch.full((E,), rows))
    inputs = Inputs(leaves={}, fixed={"operands": operands})

    def call(fn: Any, inputs: Inputs) -> torch.Tensor:
        output: torch.Tensor = fn(*inputs.fixed["operands"])
        return output

    x_bf16, w_bf16 = (one.bfloat16() for one in dequantized(*operands[:4]))
    ends = torch.arange(rows, T + 1, rows, device=options.device, dtype=torch.int32)

    def in_bf16(_: Inputs) -> torch.Tensor:
        return torch._grouped_mm(x_bf16, w_bf16.transpose(1, 2), offs=ends)

    work = product(T * D * width)
    return Problem(
        shape={**options.shape, "T": T},
        inputs=inputs,
        variants=[
            Variant.of("torch._grouped_mm in bf16", PEER, in_bf16),
            *Variant.candidates("grouped_fp8", options, call, dtype=operands[0].dtype),
        ],
        works={FORWARD: Floor(operations=work.forward, moved=T * D + E * D * width + 2 * T * width, precision="fp8")},
        check=AgainstTruth({"y": grouped_product(*operands).double()}, LIMIT),
    )
