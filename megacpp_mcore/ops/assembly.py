"""Functions of one number that several ops' Triton kernels share: inline PTX where Triton has none, and softplus."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which cannot run PTX."""


LOG2E = tl.constexpr(1.4426950408889634)
"""log₂ e: exp(x) = exp2(x · LOG2E)."""


@triton.jit
def exp2(x):
    """2^x of a float32, without the extra instructions that preserve results below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def reciprocal(x):
    """1 / x of a float32, by the approximate instruction: off by one in the last place at most."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def softplus(u):
    """log(1 + e^u) with log1p(x) = log(y)·x / (y − 1), y = 1 + x, which keeps the digits of small steps."""
    x = tl.exp2(tl.abs(u) * -LOG2E)
    y = 1.0 + x
    return tl.maximum(u, 0.0) + tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))
