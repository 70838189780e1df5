"""Elementwise functions that several ops' Triton kernels share, with inline PTX on NVIDIA GPUs."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log₂ e: exp(x) = exp2(x · LOG2E)."""


def has_ptx(_semantic: Any = None) -> tl.constexpr:
    """Whether a kernel is being compiled for an NVIDIA GPU: neither AMD GPUs nor Triton's interpreter can run PTX."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


has_ptx.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton passes what it compiles with


@triton.jit
def exp2(x):
    """2^x of a float32, without the extra instructions that preserve results below 2^-126."""
    if has_ptx():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x):
    """1 / x of a float32, by the approximate instruction: at most 1 ulp off."""
    if has_ptx():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / x


@triton.jit
def softplus(u):
    """log(1 + e^u) with log1p(x) = log(y)·x / (y − 1), y = 1 + x, which stays accurate for small steps."""
    x = tl.exp2(tl.abs(u) * -LOG2E)
    y = 1.0 + x
    return tl.maximum(u, 0.0) + tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))
