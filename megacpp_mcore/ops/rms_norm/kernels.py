"""Triton kernels of RMSNorm: a program holds all values of a row, in float32.

Legend: T rows, D values of a row, P programs of the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def forward(x_TD, weight_D, y_TD, scale_T, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y: x over its root mean square, times the weight; scale: 1 / RMS. One program per row."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_D = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / D + eps)
    tl.store(scale_T + t, scale)
    tl.store(y_TD + t * D + d, x_D * scale * tl.load(weight_D + d, mask=d < D, other=0.0), mask=d < D)


@triton.jit(do_not_specialize=["T"])
def backward(x_TD, weight_D, scale_T, dy_TD, dresidual_TD, dx_TD, dweight_PD, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dx plus the residual's gradient, and a partial sum of the weight's gradient per program, over every P-th row.

    The next row is prefetched while the current one is reduced.
    """
    p, P, d = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    here_D = d < D
    weight_D = tl.load(weight_D + d, mask=here_D, other=0.0).to(tl.float32)
    dweight_D = tl.zeros([BLOCK], tl.float32)
    row = tl.cast(p, tl.int64) * D + d
    x_D = tl.load(x_TD + row, mask=here_D, other=0.0)
    dy_D = tl.load(dy_TD + row, mask=here_D, other=0.0)
    dresidual_D = 0.0 if dresidual_TD is None else tl.load(dresidual_TD + row, mask=here_D, other=0.0)
    scale = tl.load(scale_T + p)
    for t in range(p, T, P):
        row = tl.cast(t, tl.int64) * D + d
        ahead, more = row + tl.cast(P, tl.int64) * D, t + P < T
        next_x_D = tl.load(x_TD + ahead, mask=here_D & more, other=0.0)
        next_dy_D = tl.load(dy_TD + ahead, mask=here_D & more, other=0.0)
        next_dresidual_D = 0.0 if dresidual_TD is None else tl.load(dresidual_TD + ahead, mask=here_D & more, other=0.0)
        next_scale = tl.load(scale_T + t + P, mask=more, other=0.0)
        normed_D = x_D * scale
        dweight_D += dy_D * normed_D
        dnormed_D = dy_D * weight_D
        dx_D = scale * (dnormed_D - normed_D * (tl.sum(dnormed_D * normed_D, 0) / D))
        tl.store(dx_TD + row, dx_D + dresidual_D, mask=here_D)
        x_D, dy_D, dresidual_D, scale = next_x_D, next_dy_D, next_dresidual_D, next_scale
    tl.store(dweight_PD + p * D + d, dweight_D, mask=here_D)


@triton.jit(do_not_specialize=["P"])
def add_parts(dweight_PD, dweight_D, P, D: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add all programs' partial sums, in a fixed order."""
    d, p = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PARTS)[:, None]
    parts_PD = dweight_PD + p * D + d[None, :]
    sum_PD = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, P, PARTS):
        sum_PD += tl.load(parts_PD + first * D, mask=(first + p < P) & (d < D)[None, :], other=0.0)
    tl.store(dweight_D + d, tl.sum(sum_PD, 0), mask=d < D)
