"""A projection's output split into parts, whose gradients become that of the whole without a copy where an op wrote them so;
and strided tensors as kernels read them.

Legend: S sequence, B batch, W values a token over all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megacpp_mcore.errors import ModelError


def split(whole_SBW: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """What ``whole_SBW.split(sizes, dim=-1)`` gives; its gradients are not put together again where they lie in one storage as
    the parts do, which is how :func:`empty_gradients` makes them: the gradient of the whole is then a view of them.

    Raises:
        ModelError: the sizes do not add up to W.
    """
    if sum(sizes) != whole_SBW.shape[-1]:
        raise ModelError(f"parts of {list(sizes)} values have {sum(sizes)} together, expected {whole_SBW.shape[-1]}")
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
        if together and [_layout(gradient) for gradient in given] == ctx.parts:
            return given[0].as_strided(*ctx.whole), None
        pieces = [
            given[0].new_zeros(shape) if gradient is None else gradient
            for gradient, (shape, _, _) in zip(gradients, ctx.parts, strict=True)
        ]
        return torch.cat(pieces, dim=-1), None


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def empty_gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Uninitialised tensors like ``tensors`` [S, B, …]: those that are one [S, B, W] together lie in one new storage as they do
    in theirs, the others are contiguous."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    wholes: dict[int, torch.Tensor] = {}
    for storage in set(storages):
        parts = [tensor for tensor, of in zip(tensors, storages, strict=True) if of == storage]
        if _make_a_whole(parts):
            elements = parts[0].untyped_storage().nbytes() // parts[0].element_size()
            wholes[storage] = torch.empty(elements, dtype=parts[0].dtype, device=parts[0].device)
    return [
        wholes[storage].as_strided(*_layout(tensor))
        if storage in wholes
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def _make_a_whole(parts: list[torch.Tensor]) -> bool:
    """Whether tensors [S, B, …] of one storage share out the values of each token among them, with nothing left."""
    first = parts[0]
    rows, end = first.shape[0] * first.shape[1], 0
    if not rows:
        return False
    for part in sorted(parts, key=torch.Tensor.storage_offset):
        width = part.numel() // rows
        extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape[2:], part.stride()[2:], strict=True))
        same = (part.dtype, part.shape[:2], part.stride()[:2]) == (first.dtype, first.shape[:2], first.stride()[:2])
        if not same or extent != width or part.storage_offset() != end:
            return False
        end += width
    by_sequence, by_row = (first.shape[1] * end, end), (end, first.shape[0] * end)
    filled = first.untyped_storage().nbytes() == rows * end * first.element_size()
    return filled and first.stride()[:2] in (by_sequence, by_row)


def aligned(tensor: torch.Tensor, inner: int = 1) -> torch.Tensor:
    """The tensor itself if its last ``inner`` axes are contiguous and all else is a multiple of 8 elements apart, else a
    contiguous copy."""
    outer, expected = tensor.dim() - inner, 1
    for size, stride in zip(reversed(tensor.shape[outer:]), reversed(tensor.stride()[outer:]), strict=True):
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    fits = tensor.data_ptr() % 16 == 0 and not any(stride % 8 for stride in tensor.stride()[:outer])
    return tensor if fits else tensor.contiguous()


def eighths(tensor: torch.Tensor, axes: int = 2) -> list[int]:
    """The strides of the first ``axes``, in units of 8 elements."""
    return [stride // 8 for stride in tensor.stride()[:axes]]
