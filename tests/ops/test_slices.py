"""A projection's output split into parts, and gradients that need no copy to become the whole's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.slices import aligned, empty_gradients, split, split_rows

SIZES = (4, 6, 2)


class _Scaled(torch.autograd.Function):
    """Each part times its place, counted from 1, with gradients where :func:`empty_gradients` puts them."""

    @staticmethod
    def forward(ctx: Any, storages: list[int], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*parts)
        ctx.storages = storages
        return tuple(part * (place + 1) for place, part in enumerate(parts))

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = empty_gradients(*ctx.saved_tensors)
        for place, gradient in enumerate(made):
            gradient.copy_(incoming[place] * (place + 1))
        ctx.storages += [gradient.untyped_storage().data_ptr() for gradient in made]
        return None, *made


@pytest.mark.parametrize("rows_first", [False, True])
def test_gradients_side_by_side_are_the_wholes(rows_first: bool) -> None:
    leaf = torch.randn(*((2, 5) if rows_first else (5, 2)), 12, requires_grad=True)
    rows = leaf.transpose(0, 1) if rows_first else leaf
    storages: list[int] = []
    a, b, c = split(rows, SIZES)
    outputs = _Scaled.apply(storages, a, b.unflatten(-1, (2, 3)).transpose(2, 3), c)
    loss = sum((output * output).sum() for output in outputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    factor = torch.repeat_interleave(torch.tensor([1.0, 4.0, 9.0]), torch.tensor(SIZES))
    torch.testing.assert_close(gradient, 2 * factor * leaf.detach())
    assert set(storages) == {gradient.untyped_storage().data_ptr()}


@pytest.mark.parametrize("used", [(0,), (0, 1), (2, 0), (0, 1, 1, 2)])
def test_any_use_of_the_parts_has_the_gradient_of_torchs_split(used: tuple[int, ...]) -> None:
    rows = torch.randn(5, 2, 12, requires_grad=True)
    gradients = []
    for parts in (split(rows, SIZES), rows.split(SIZES, dim=-1)):
        outputs = _Scaled.apply([], *(parts[place] for place in used))
        gradients += torch.autograd.grad(sum((output.sin()).sum() for output in outputs), rows)
    torch.testing.assert_close(*gradients)
    second = []
    for parts in (split(rows, SIZES), rows.split(SIZES, dim=-1)):
        (first,) = torch.autograd.grad((torch.cat(parts, -1) ** 3).sum(), rows, create_graph=True)
        second += torch.autograd.grad(first.sum(), rows)
    torch.testing.assert_close(*second)
    with pytest.raises(ModelError, match="12"):
        split(rows, (4, 6))


def test_parts_that_are_not_the_whole_are_contiguous() -> None:
    rows = torch.randn(5, 2, 12)
    a, b, _ = split(rows, SIZES)
    for tensors in ([a, b], [a, a], [a.expand(5, 2, 4), b], [torch.randn(5, 2, 4), a]):
        for tensor, made in zip(tensors, empty_gradients(*tensors), strict=True):
            assert made.shape == tensor.shape
            assert made.is_contiguous()


def test_blocks_of_rows_lead_back_to_one_whole() -> None:
    """Where not all blocks are used, too."""
    leaf, storages = torch.randn(7, 2, 12, requires_grad=True), []
    a, b, c = split(leaf, SIZES)
    blocks = split_rows((a, b.unflatten(-1, (2, 3)), c), 3)
    assert [[tuple(part.shape[:2]) for part in block] for block in blocks] == [[(rows, 2)] * 3 for rows in (3, 3, 1)]
    a.register_hook(lambda gradient: storages.append(gradient.untyped_storage().data_ptr()))
    factors = torch.randn(7, 2, 12)
    used = [*blocks[0], blocks[2][1], blocks[1][0]]
    slices = [factors[:3, :, :4], factors[:3, :, 4:10].unflatten(-1, (2, 3)), factors[:3, :, 10:]]
    slices += [factors[6:, :, 4:10].unflatten(-1, (2, 3)), factors[3:6, :, :4]]
    (gradient,) = torch.autograd.grad(sum((x * by).sum() for x, by in zip(used, slices, strict=True)), leaf)
    expected = factors.clone()
    expected[3:6, :, 4:] = expected[6:, :, :4] = expected[6:, :, 10:] = 0
    assert torch.equal(gradient, expected)
    assert storages == [gradient.untyped_storage().data_ptr()]


def test_what_kernels_read_is_aligned() -> None:
    """Also what torch takes to be contiguous already: at any address, and with any stride of an axis of one."""
    fitting = torch.arange(48.0).view(3, 2, 8)
    assert aligned(fitting) is fitting
    moved = torch.empty(49)[1:].view_as(fitting).copy_(fitting)
    of_one = torch.empty(24).as_strided((3, 1, 8), (8, 3, 1)).copy_(fitting[:, :1])
    for source in (moved, of_one, fitting[:, :, :1].expand(-1, -1, 8), fitting[:, :1].expand(-1, 2, -1), fitting.mT):
        copy = aligned(source)
        assert torch.equal(copy, source)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == torch.empty(source.shape).stride()
