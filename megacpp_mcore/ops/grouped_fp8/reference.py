"""Plain-PyTorch truth of the grouped FP8 product: operands times their scales, expert by expert, in float32.

Shape legend: T rows (of expert 0 first, then of expert 1, …), E experts, I input and O output width, i and o their blocks.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError

BLOCK = 128
"""Values of a row of x that share a scale; rows and columns of a weight that do."""

_LARGEST = 448.0  # of E4M3


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` to E4M3 with a float32 scale per 1 × 128 values: ``([T, I], [T, i])``."""
    blocks = x_TI.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).clamp(min=1e-12) / _LARGEST
    return (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


def quantize_blocks(w_EOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``w`` to E4M3 with a float32 scale per 128 × 128 values: ``([E, O, I], [E, o, i])``."""
    blocks = w_EOI.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # E o 128 i 128
    scale = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / _LARGEST
    return (blocks / scale[..., None, :, None]).flatten(-2).flatten(-3, -2).to(torch.float8_e4m3fn), scale


def check(
    x_TI: torch.Tensor, x_scale_Ti: torch.Tensor, w_EOI: torch.Tensor, w_scale_Eoi: torch.Tensor, counts_E: torch.Tensor
) -> list[int]:
    """Check the operands, and return the number of rows of each expert.

    Raises:
        ModelError: the operands are not E4M3 with such scales, or rows or widths are not multiples of 128.
    """
    kinds = {x_TI.dtype, w_EOI.dtype}
    x, w = tuple(x_TI.shape), tuple(w_EOI.shape)
    if kinds != {torch.float8_e4m3fn} or len(x) != 2 or len(w) != 3 or x[1] != w[2]:
        raise ModelError(f"x, w are {x}, {w} of {kinds}; expected [T, I], [E, O, I] of torch.float8_e4m3fn")
    counts: list[int] = counts_E.tolist()
    if any(width % BLOCK for width in (*w[1:], *counts)) or sum(counts) != x[0] or len(counts) != w[0]:
        raise ModelError(
            f"widths {w[1:]} and rows {counts} of {w[0]} experts; expected multiples of {BLOCK}, and rows that sum to {x[0]}"
        )
    scales = tuple(x_scale_Ti.shape), tuple(w_scale_Eoi.shape)
    expected = (x[0], x[1] // BLOCK), (w[0], w[1] // BLOCK, w[2] // BLOCK)
    if scales != expected or {x_scale_Ti.dtype, w_scale_Eoi.dtype} != {torch.float32}:
        raise ModelError(f"scales have shapes {scales}; expected {expected}, in float32")
    return counts


def dequantized(
    x_TI: torch.Tensor, x_scale_Ti: torch.Tensor, w_EOI: torch.Tensor, w_scale_Eoi: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands times their scales, in float32."""
    x = (x_TI.float().unflatten(-1, (-1, BLOCK)) * x_scale_Ti[..., None]).flatten(-2)
    return x, w_EOI.float() * w_scale_Eoi.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


def grouped_product(
    x_TI: torch.Tensor, x_scale_Ti: torch.Tensor, w_EOI: torch.Tensor, w_scale_Eoi: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """``y = x wᵀ`` by expert, in bfloat16 ``[T, O]``; no gradients.

    Raises:
        ModelError: as :func:`check`.
    """
    counts = check(x_TI, x_scale_Ti, w_EOI, w_scale_Eoi, counts_E)
    x, w = dequantized(x_TI, x_scale_Ti, w_EOI, w_scale_Eoi)
    return torch.cat([rows @ expert.T for rows, expert in zip(x.split(counts), w, strict=True)]).bfloat16()
