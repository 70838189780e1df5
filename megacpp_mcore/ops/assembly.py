"""What several ops' Triton kernels share: instructions that Triton has no name for."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter knows no assembly."""


@triton.jit
def exp2(x):
    """2^x of a float32, without the instructions that save results below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
