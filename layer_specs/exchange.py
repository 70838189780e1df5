"""An all-gather or a reduce-scatter of rows that is in flight while other work is done, and so is that of its gradient.

Shape legend: R rows of this rank, S of all ranks, B batch, D and N values of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from megacpp_mcore.ops.main_grad import MainGrad, add_product_, check_main_grad

WORTH_PIECES = 8 * 2**20
"""Bytes of a rank's rows from which on products are cut in pieces, of which one runs while rows are sent; with fewer, pieces
of a product take longer by more than what they hide."""


class Exchange:
    """A collective of equal parts of every rank along the first dimension, in flight from here to :meth:`end`.

    The backward pass has the other collective in flight from :meth:`end` to here. What was computed between the two is
    differentiated meanwhile: autograd takes the nodes that are ready in the inverse order of their making.

    Args:
        rows: ``[T, …]``, of which all ranks have as many.
        group: the ranks.
        gathers: whether to all-gather, to ``[T · ranks, …]``; otherwise to reduce-scatter, to ``[T / ranks, …]``.
    """

    def __init__(self, rows: torch.Tensor, group: distributed.ProcessGroup, *, gathers: bool) -> None:
        self._flight = _Flight(group)
        self._begun = _Begin.apply(rows, self._flight, gathers)
        self._gathers = gathers
        self._made: torch.Tensor | None = None

    def end(self) -> torch.Tensor:
        """Wait, and return what the collective made; what is there already, the second time."""
        if self._made is None:
            self._made = _End.apply(self._begun, self._flight, self._gathers)
        return self._made


class _Flight:
    """The collective under way, and its tensors, which live until it is over."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group, self.ranks = group, group.size()

    def parts(self, rows: int) -> list[slice]:
        """Return this rank's part of all ranks' rows, of which each has ``rows``, then what comes before and after it."""
        start = self._group.rank() * rows
        parts = slice(start, start + rows), slice(0, start), slice(start + rows, self.ranks * rows)
        return [part for part in parts if part.start < part.stop]

    def swap(self, rows: torch.Tensor) -> None:
        """Begin to send every other rank its part of ``rows``, in their order, and to receive as much from each."""
        sizes = [len(rows) // (self.ranks - 1)] * self.ranks
        sizes[self._group.rank()] = 0
        made = torch.empty_like(rows)
        work = distributed.all_to_all_single(made, rows, sizes, sizes, self._group, async_op=True)
        self._under_way = rows, made, work

    def begin(self, rows: torch.Tensor, *, gathers: bool) -> torch.Tensor:
        rows, ranks = rows.contiguous(), self.ranks
        made = rows.new_empty(len(rows) * ranks if gathers else len(rows) // ranks, *rows.shape[1:])
        collective = distributed.all_gather_into_tensor if gathers else distributed.reduce_scatter_tensor
        self._under_way = rows, made, collective(made, rows, group=self._group, async_op=True)
        return made

    def end(self) -> torch.Tensor:
        _, made, work = self.__dict__.pop("_under_way")
        work.wait()
        return made


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: _Flight, gathers: bool) -> torch.Tensor:
        ctx.flight = flight
        return flight.begin(rows, gathers=gathers)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.flight.end(), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, flight: _Flight, gathers: bool) -> torch.Tensor:
        ctx.flight, ctx.gathers = flight, gathers
        flight.end()
        return begun.view_as(begun)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.flight.begin(gradient, gathers=not ctx.gathers)
        return gradient, None, None  # for the node before, which returns the other's


def gathered_products(
    rows_RBD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    main_grads: Sequence[MainGrad | None],
    group: distributed.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Map ``[R, B, D] -> [S, B, N]`` by each weight ``[N, D]``: all ranks' rows times it, of which own ones come first.

    The others' rows are sent meanwhile; in the backward pass, gradients of rows while those of weights are computed, which are
    this rank's part of a sum, as are those of weights that all ranks have.

    Args:
        rows_RBD: as many on every rank; kept for the backward pass with the others'.
        weights: one or more, in the dtype of the rows.
        main_grads: of each weight, where its gradient is added instead of being returned.
        group: the ranks.

    Raises:
        ModelError: a buffer does not fit its weight.
    """
    for weight_ND, main_grad in zip(weights, main_grads, strict=True):
        check_main_grad(weight_ND, main_grad)
    return _GatheredProducts.apply(rows_RBD, group, tuple(main_grads), *weights)


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RBD: torch.Tensor,
        group: distributed.ProcessGroup,
        main_grads: tuple[MainGrad | None, ...],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        flight = _Flight(group)
        whole_SBD = flight.begin(rows_RBD, gathers=True)
        outputs = tuple(whole_SBD.new_empty(*whole_SBD.shape[:2], len(weight)) for weight in weights)
        for rows, source in _pieces(flight, rows_RBD, whole_SBD):
            for weight_ND, output_SBN in zip(weights, outputs, strict=True):
                torch.mm(source.flatten(0, -2), weight_ND.t(), out=output_SBN[rows].flatten(0, -2))
        ctx.flight, ctx.main_grads = flight, main_grads
        ctx.save_for_backward(whole_SBD, *weights)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole_SBD, *weights = ctx.saved_tensors
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        if ctx.needs_input_grad[0]:
            drows = torch.mm(flat[0], weights[0])
            for gradient, weight_ND in zip(flat[1:], weights[1:], strict=True):
                drows.addmm_(gradient, weight_ND)
            ctx.flight.begin(drows.view_as(whole_SBD), gathers=False)
        found = [
            _of_weight(gradient, whole_SBD, main_grad) if is_needed else None
            for gradient, main_grad, is_needed in zip(gradients, ctx.main_grads, ctx.needs_input_grad[3:], strict=True)
        ]
        return ctx.flight.end() if ctx.needs_input_grad[0] else None, None, None, *found


def scattered_product(
    x_SBK: torch.Tensor, weight_NK: torch.Tensor, main_grad: MainGrad | None, group: distributed.ProcessGroup
) -> torch.Tensor:
    """Map ``[S, B, K] -> [R, B, N]``: this rank's rows of the sum over ranks of each one's ``x`` times its weight.

    The others' rows are multiplied first, and are sent while own ones are; in the backward pass, gradients of rows are gathered
    while those of own ones are multiplied.

    Args:
        x_SBK: of all ranks' rows; kept for the backward pass.
        weight_NK: in the dtype of ``x``.
        main_grad: where the gradient of the weight is added instead of being returned.
        group: the ranks.

    Raises:
        ModelError: the buffer does not fit the weight.
    """
    check_main_grad(weight_NK, main_grad)
    return _ScatteredProduct.apply(x_SBK.contiguous(), weight_NK, main_grad, group)


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBK: torch.Tensor,
        weight_NK: torch.Tensor,
        main_grad: MainGrad | None,
        group: distributed.ProcessGroup,
    ) -> torch.Tensor:
        flight = _Flight(group)
        own, *others = flight.parts(len(x_SBK) // flight.ranks)
        shape = *x_SBK.shape[1:-1], len(weight_NK)
        sent = x_SBK.new_empty(len(x_SBK) - len(x_SBK[own]), *shape)
        for rows, part in zip(others, sent.split([rows.stop - rows.start for rows in others]), strict=True):
            torch.mm(x_SBK[rows].flatten(0, -2), weight_NK.t(), out=part.flatten(0, -2))
        flight.swap(sent)
        sums_RBN = torch.mm(x_SBK[own].flatten(0, -2), weight_NK.t()).view(-1, *shape)
        for received in flight.end().chunk(flight.ranks - 1):
            sums_RBN += received
        ctx.flight, ctx.main_grad = flight, main_grad
        ctx.save_for_backward(x_SBK, weight_NK)
        return sums_RBN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RBN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_SBK, weight_NK = ctx.saved_tensors
        whole_SBN = ctx.flight.begin(gradient_RBN, gathers=True)
        dx_SBK = torch.empty_like(x_SBK)
        for rows, source in _pieces(ctx.flight, gradient_RBN, whole_SBN):
            torch.mm(source.flatten(0, -2), weight_NK, out=dx_SBK[rows].flatten(0, -2))
        is_needed = ctx.needs_input_grad[1]
        return dx_SBK, _of_weight(whole_SBN, x_SBK, ctx.main_grad) if is_needed else None, None, None


def _pieces(flight: _Flight, rows: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield where pieces of the gathered rows lie, and they: own ones first, others once received; few rows in one piece."""
    if rows.nbytes < WORTH_PIECES:
        flight.end()
        yield slice(None), whole
        return
    own, *others = flight.parts(len(rows))
    yield own, rows
    flight.end()
    yield from ((part, whole[part]) for part in others)


def _of_weight(gradient: torch.Tensor, rows: torch.Tensor, main_grad: MainGrad | None) -> torch.Tensor | None:
    """Return the gradient of a weight whose product with ``rows`` has ``gradient``, or what stands for it once it is added."""
    gradient_NT, rows_TD = gradient.flatten(0, -2).t(), rows.flatten(0, -2)
    if main_grad is None:
        return gradient_NT @ rows_TD
    add_product_(main_grad.buffer, gradient_NT, rows_TD)
    return main_grad.placeholder()
