"""Inline PTX shared by several ops' Triton kernels: instructions that Triton has no function for."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which cannot run PTX."""


@triton.jit
def exp2(x):
    """2^x of a float32, without the extra instructions that preserve results below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
