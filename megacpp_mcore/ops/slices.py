"""Split a projection's output so that the parts' gradients form the whole's without a copy; strided tensors for kernels.

Legend: S sequence, B batch, W values per token over all parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError


def split(whole_SBW: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """``whole_SBW.split(sizes, dim=-1)``; backward copies nothing where the gradients lie in one storage like the parts, as
    those of :func:`empty_gradients` do: the gradient of the whole is then a view of them.

    Raises:
        ModelError: the sizes do not add up to W.
    """
    if sum(sizes) != whole_SBW.shape[-1]:
        raise ModelError(f"sizes {list(sizes)} add up to {sum(sizes)}, expected {whole_SBW.shape[-1]}")
    parts: tuple[torch.Tensor, ...] = _Split.apply(whole_SBW, tuple(sizes))
    return parts


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        parts = whole.split(sizes, dim=-1)
        ctx.set_materialize_grads(False)
        ctx.whole, ctx.parts = _layout(whole), [_layout(part) for part in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return None, None
        together = len({gradient.untyped_storage().data_ptr() for gradient in given}) == 1
        # Under create_graph a view of the first part would lose the graphs of the others.
        if together and not torch.is_grad_enabled() and [_layout(gradient) for gradient in given] == ctx.parts:
            return given[0].as_strided(*ctx.whole), None
        pieces = [
            given[0].new_zeros(shape) if gradient is None else gradient
            for gradient, (shape, _, _) in zip(gradients, ctx.parts, strict=True)
        ]
        return torch.cat(pieces, dim=-1), None


def split_rows(parts: Sequence[torch.Tensor], rows: int) -> list[tuple[torch.Tensor, ...]]:
    """Split ``parts`` [S, B, …] into blocks of ``rows``; backward copies each block's gradients once, into the layout that
    :func:`empty_gradients` gives the parts."""
    blocks = -(-len(parts[0]) // rows)
    slices = _SplitRows.apply(rows, *parts)
    return list(zip(*(slices[start : start + blocks] for start in range(0, len(slices), blocks)), strict=True))


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        ctx.save_for_backward(*parts)
        return tuple(block for part in parts for block in part.split(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        whole = empty_gradients(*ctx.saved_tensors)
        blocks = [block for part in whole for block in part.split(ctx.rows)]
        for block, gradient in zip(blocks, gradients, strict=True):
            block.zero_() if gradient is None else block.copy_(gradient)
        return None, *whole


_Layout = tuple[torch.Size, tuple[int, ...], int]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def empty_gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Allocate tensors like ``tensors`` [S, B, …]: those that together make up one [S, B, W] share a new storage in the
    same layout, the others are contiguous."""
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    places = [(storage.data_ptr(), dtype) for storage, dtype in storages]
    layouts = [_layout(tensor) for tensor in tensors]
    wholes: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for place, (storage, dtype) in dict(zip(places, storages, strict=True)).items():
        elements = storage.nbytes() // dtype.itemsize
        if _make_a_whole(elements, *(layout for layout, of in zip(layouts, places, strict=True) if of == place)):
            wholes[place] = torch.empty(elements, dtype=dtype, device=storage.device)
    return [
        wholes[place].as_strided(*layout)
        if place in wholes
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, place, layout in zip(tensors, places, layouts, strict=True)
    ]


@lru_cache(maxsize=128)
def _make_a_whole(elements: int, *layouts: _Layout) -> bool:
    """Return whether tensors [S, B, …] of one storage partition the values of each token, with nothing left over."""
    shape, strides, _ = layouts[0]
    rows, end = shape[0] * shape[1], 0
    if not rows:
        return False
    for part, steps, offset in sorted(layouts, key=lambda layout: layout[2]):
        width = math.prod(part) // rows
        extent = 1 + sum((size - 1) * step for size, step in zip(part[2:], steps[2:], strict=True))
        if (part[:2], steps[:2]) != (shape[:2], strides[:2]) or extent != width or offset != end:
            return False
        end += width
    by_sequence, by_row = (shape[1] * end, end), (end, shape[0] * end)
    return elements == rows * end and strides[:2] in (by_sequence, by_row)


def aligned(tensor: torch.Tensor, inner: int = 1) -> torch.Tensor:
    """Return the tensor itself if its last ``inner`` axes are contiguous, its other strides are positive multiples of 8
    elements and it is 16-byte aligned; else a contiguous copy."""
    outer, expected = tensor.dim() - inner, 1
    for size, stride in zip(reversed(tensor.shape[outer:]), reversed(tensor.stride()[outer:]), strict=True):
        if stride != expected:
            break
        expected *= size
    else:
        if tensor.data_ptr() % 16 == 0 and not any(stride % 8 or not stride for stride in tensor.stride()[:outer]):
            return tensor
    # Not contiguous(): it ignores the alignment of the address, and the strides of axes of size 1.
    return tensor.clone(memory_format=torch.contiguous_format)


def eighths(tensor: torch.Tensor, axes: int = 2) -> list[int]:
    """Return the strides of the first ``axes``, in units of 8 elements."""
    return [stride // 8 for stride in tensor.stride()[:axes]]
