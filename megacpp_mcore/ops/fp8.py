"""Shared parts of FP8 (E4M3) matrix products: scales, quantised weights, and accumulation of a gradient into its buffer.

An operand is scaled so that its largest value, or the largest of a row or block, maps to E4M3's largest.

Legend: E matrices (one per expert), N and W rows and columns of any matrix, P partial maxima.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import quantised_weights
from megacpp_mcore.ops.assembly import has_ptx
from megacpp_mcore.ops.triton_launch import DIRECT, launch

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""Largest value of E4M3."""
LEAST = tl.constexpr(1e-30)
"""Lower bound on a row's largest value, so that its scale has an inverse."""

CAPABILITY = (9, 0)
"""Compute capability that FP8 products need: the one for which PyTorch has a grouped product with row-wise scales."""

ADDED = 2048
"""Elements of a gradient per program."""

MULTIPLE = 16
"""Alignment of widths, and of the rows in a weight gradient: E4M3 operands begin at multiples of 16 bytes."""

LARGEST_OF = {"PARTS": 256, "BLOCK": 2048, "num_warps": 8}
WEIGHTS = {"BN": 128, "BW": 128, "num_warps": 8}
LARGEST_ROW = {"PARTS": 32, "BLOCK": 1024, "num_warps": 4}
"""Launch options of weight quantisation (partial maxima per matrix; rows and columns of a tile), and of the maxima of a few
long rows."""


class Scaled(NamedTuple):
    """A matrix, or a stack of them, in E4M3 and the float32 scale of each row."""

    values: torch.Tensor
    scale: torch.Tensor


def check_device(x: torch.Tensor, products: str = "the experts' products") -> None:
    """Raise unless the device supports FP8 products.

    Raises:
        ModelError: it is not a Hopper GPU.
    """
    arch = torch.cuda.get_device_capability(x.device) if x.is_cuda else "no GPU"
    if arch != CAPABILITY:
        raise ModelError(
            f"{products} in FP8 need a GPU of compute capability {CAPABILITY} (Hopper), but x is on {x.device}: {arch}; use "
            "the backend in bfloat16"
        )


@triton.jit
def scale_of(largest):
    """Return the scale of rows with these largest absolute values."""
    return tl.maximum(largest, LEAST) / LARGEST


@triton.jit
def largest_parts(w, largest_EP, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Partial maxima, PARTS of them, of the absolute values of an expert's SIZE elements."""
    expert = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(part * BLOCK, SIZE, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(w + expert * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    tl.store(largest_EP + expert * PARTS + part, tl.max(largest, 0))


_OPAQUE = tl.constexpr("mov.b32 $0, $1;" if DIRECT else "max.f32 $0, $1, 0f00000000;")
"""An instruction that leaves a positive number unchanged; ptxas 12.9 (Triton 3.9) sees through the first one."""


@triton.jit
def _opaque(x):
    """``x``, a positive number, opaque to the compiler."""
    if has_ptx():
        return tl.inline_asm_elementwise(_OPAQUE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def scale_weights(
    w_ENW,
    largest_EP,
    values_ENW,
    scale_EN,
    values_EWN,
    scale_EW,
    N,
    W,
    E,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
):
    """Quantise a tile of an expert's matrix in both layouts. Experts run in reverse: the last ones are still in the cache.

    Each layout converts the values separately: where one packed E4M3 pair is both stored and split, ptxas reads stale bytes.
    """
    expert = (E - 1 - tl.program_id(1)).to(tl.int64)
    across = (W + BW - 1) // BW
    n = tl.program_id(0) // across * BN + tl.arange(0, BN)
    column = tl.program_id(0) % across * BW + tl.arange(0, BW)
    scale = scale_of(tl.max(tl.load(largest_EP + expert * PARTS + tl.arange(0, PARTS)), 0))
    inside = (n < N)[:, None] & (column < W)[None, :]
    start = expert * N * W
    w = tl.load(w_ENW + start + n.to(tl.int64)[:, None] * W + column[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / scale
    value = (w * inverse).to(values_ENW.dtype.element_ty)
    tl.store(values_ENW + start + n.to(tl.int64)[:, None] * W + column[None, :], value, mask=inside)
    value = (w * _opaque(inverse)).to(values_EWN.dtype.element_ty).T
    inside = (column < W)[:, None] & (n < N)[None, :]
    tl.store(values_EWN + start + column.to(tl.int64)[:, None] * N + n[None, :], value, mask=inside)
    if tl.program_id(0) % across == 0:
        tl.store(scale_EN + expert * N + n, tl.full([BN], 1.0, tl.float32) * scale, mask=n < N)
    if tl.program_id(0) // across == 0:
        tl.store(scale_EW + expert * W + column, tl.full([BW], 1.0, tl.float32) * scale, mask=column < W)


@triton.jit
def add(total, gradient, SIZE, BLOCK: tl.constexpr):
    """``total += gradient``; PyTorch's own kernel takes 1.5 times as long when their dtypes differ."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(total + at, mask=at < SIZE).to(tl.float32) + tl.load(gradient + at, mask=at < SIZE).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=at < SIZE)


def empty(like: torch.Tensor, *shape: int) -> Scaled:
    """Return memory for a quantised tensor of ``shape``."""
    return Scaled(like.new_empty(shape, dtype=E4M3), like.new_empty(shape[:-1], dtype=torch.float32))


Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Matrices in E4M3 and their scale repeated for each row ``[E, N]``; then the same for the transposed matrices."""


def largest_of(x_EN: torch.Tensor, how: dict[str, int]) -> torch.Tensor:
    """Compute partial maxima of the absolute values of each ``x[e]``."""
    largest_EP = x_EN.new_empty(len(x_EN), how["PARTS"], dtype=torch.float32)
    launch(largest_parts, (how["PARTS"], len(x_EN)), x_EN, largest_EP, x_EN[0].numel(), **how)
    return largest_EP


@torch.no_grad()
def quantised(w_ENW: torch.Tensor, into: Quantised | None = None) -> Quantised:
    """Quantise matrices to E4M3 in both layouts, into new memory or into that of earlier ones."""
    w_ENW, (E, N, W) = w_ENW.contiguous(), w_ENW.shape
    largest_EP = largest_of(w_ENW, LARGEST_OF)
    made = (*empty(w_ENW, E, N, W), *empty(w_ENW, E, W, N)) if into is None else into
    grid = triton.cdiv(N, WEIGHTS["BN"]) * triton.cdiv(W, WEIGHTS["BW"]), E
    launch(scale_weights, grid, w_ENW, largest_EP, *made, N, W, E, PARTS=LARGEST_OF["PARTS"], **WEIGHTS)
    return made


def kept(w: torch.Tensor, rows: int | None = None) -> Quantised:
    """Quantise stacked matrices, or the first ``rows`` of one; a parameter in training only once per optimizer step.

    See :func:`megacpp_mcore.ops.quantised_weights.kept`.
    """

    def quantise(w: torch.Tensor, into: Any) -> Any:
        return quantised(w if rows is None else w[:rows].unsqueeze(0), into)

    made: Any = quantised_weights.kept(w, quantise)
    return made
