"""The kernels of RMSNorm, in Triton: a program has all values of a row, in float32.

Legend: T rows, D values of a row, P programs of the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def forward(x_TD, weight_D, y_TD, scale_T, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """y: x over the root of its mean square, times the weight; scale: 1 over that root. A program has one row."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_D = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / D + eps)
    tl.store(scale_T + t, scale)
    tl.store(y_TD + t * D + d, x_D * scale * tl.load(weight_D + d, mask=d < D, other=0.0), mask=d < D)


@triton.jit(do_not_specialize=["T"])
def backward(x_TD, weight_D, scale_T, dy_TD, dresidual_TD, dx_TD, dweight_PD, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """dx, the residual's gradient added to it; and of each program, which has every P-th row, its part of the weight's."""
    p, P, d = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    weight_D = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    dweight_D = tl.zeros([BLOCK], tl.float32)
    for t in range(p, T, P):
        row = tl.cast(t, tl.int64) * D + d
        x_D = tl.load(x_TD + row, mask=d < D, other=0.0) * tl.load(scale_T + t)
        dy_D = tl.load(dy_TD + row, mask=d < D, other=0.0).to(tl.float32)
        dweight_D += dy_D * x_D
        dy_D *= weight_D
        dx_D = dy_D - x_D * (tl.sum(dy_D * x_D, 0) / D)
        dx_D *= tl.load(scale_T + t)
        if dresidual_TD is not None:
            dx_D += tl.load(dresidual_TD + row, mask=d < D, other=0.0)
        tl.store(dx_TD + row, dx_D, mask=d < D)
    tl.store(dweight_PD + p * D + d, dweight_D, mask=d < D)


@triton.jit(do_not_specialize=["P"])
def add_parts(dweight_PD, dweight_D, P, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all programs' parts, in one order."""
    d, p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)[:, None]
    parts_PD = dweight_PD + p * D + d[None, :]
    sum_PD = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, P, PARTS):
        sum_PD += tl.load(parts_PD + first * D, mask=(first + p < P) & (d < D)[None, :], other=0.0)
    tl.store(dweight_D + d, tl.sum(sum_PD, 0), mask=d < D)
