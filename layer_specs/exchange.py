"""An all-gather or reduce-scatter of rows that overlaps other work, and so does the collective of its gradient.

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
"""Bytes of a rank's rows from which products are split into pieces, one of which overlaps the transfer; with fewer, splitting
a product costs more time than it hides."""


class Exchange:
    """A collective of equal parts of every rank along the first dimension, in flight from here to :meth:`end`.

    The backward pass has the opposite collective in flight from :meth:`end` to here, overlapping the backward of what was
    computed between the two: autograd runs ready nodes in the reverse order of their creation.

    Args:
        rows: ``[T, …]``, equally many on every rank.
        group: the ranks.
        gathers: whether to all-gather, to ``[T · ranks, …]``; otherwise to reduce-scatter, to ``[T / ranks, …]``.
    """

    def __init__(self, rows: torch.Tensor, group: distributed.ProcessGroup, *, gathers: bool) -> None:
        self._flight = _Flight(group)
        self._in_flight = _Begin.apply(rows, self._flight, gathers)
        self._gathers = gathers
        self._output: torch.Tensor | None = None

    def end(self) -> torch.Tensor:
        """Wait for the collective and return its output; a second call returns the same tensor."""
        if self._output is None:
            self._output = _End.apply(self._in_flight, self._flight, self._gathers)
        return self._output


class _Flight:
    """The collective in flight, and its tensors, kept alive until it completes."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group, self.ranks = group, group.size()

    def parts(self, rows: int) -> list[slice]:
        """Return this rank's slice of all ranks' rows (``rows`` each), then the slices before and after it."""
        start = self._group.rank() * rows
        parts = slice(start, start + rows), slice(0, start), slice(start + rows, self.ranks * rows)
        return [part for part in parts if part.start < part.stop]

    def swap(self, rows: torch.Tensor) -> None:
        """Start an all-to-all: send every other rank its part of ``rows``, in rank order, and receive as much from each."""
        sizes = [len(rows) // (self.ranks - 1)] * self.ranks
        sizes[self._group.rank()] = 0
        received = torch.empty_like(rows)
        work = distributed.all_to_all_single(received, rows, sizes, sizes, self._group, async_op=True)
        self._under_way = rows, received, work

    def begin(self, rows: torch.Tensor, *, gathers: bool) -> torch.Tensor:
        rows, ranks = rows.contiguous(), self.ranks
        output = rows.new_empty(len(rows) * ranks if gathers else len(rows) // ranks, *rows.shape[1:])
        collective = distributed.all_gather_into_tensor if gathers else distributed.reduce_scatter_tensor
        self._under_way = rows, output, collective(output, rows, group=self._group, async_op=True)
        return output

    def end(self) -> torch.Tensor:
        _, output, work = self.__dict__.pop("_under_way")
        work.wait()
        return output


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
    def forward(ctx: Any, in_flight: torch.Tensor, flight: _Flight, gathers: bool) -> torch.Tensor:
        ctx.flight, ctx.gathers = flight, gathers
        flight.end()
        return in_flight.view_as(in_flight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.flight.begin(gradient, gathers=not ctx.gathers)
        return gradient, None, None  # a placeholder for _Begin, which returns the collective's output


def gathered_products(
    rows_RBD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    main_grads: Sequence[MainGrad | None],
    group: distributed.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Map ``[R, B, D] -> [S, B, N]`` by each weight ``[N, D]``: multiply all ranks' rows by it, this rank's first.

    This overlaps the transfer of the other ranks' rows. In the backward pass the transfer of row gradients overlaps weight
    gradients, which are this rank's part of a sum, also for weights that all ranks have.

    Args:
        rows_RBD: equally many on every rank; kept for the backward pass with the other ranks'.
        weights: one or more, in the dtype of the rows.
        main_grads: for each weight, where its gradient is added instead of being returned.
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
        gathered_SBD = flight.begin(rows_RBD, gathers=True)
        outputs = tuple(gathered_SBD.new_empty(*gathered_SBD.shape[:2], len(weight)) for weight in weights)
        for rows, source in _pieces(flight, rows_RBD, gathered_SBD):
            for weight_ND, output_SBN in zip(weights, outputs, strict=True):
                torch.mm(source.flatten(0, -2), weight_ND.t(), out=output_SBN[rows].flatten(0, -2))
        ctx.flight, ctx.main_grads = flight, main_grads
        ctx.save_for_backward(gathered_SBD, *weights)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gathered_SBD, *weights = ctx.saved_tensors
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        if ctx.needs_input_grad[0]:
            drows = torch.mm(flat[0], weights[0])
            for gradient, weight_ND in zip(flat[1:], weights[1:], strict=True):
                drows.addmm_(gradient, weight_ND)
            ctx.flight.begin(drows.view_as(gathered_SBD), gathers=False)
        weight_grads = [
            _of_weight(gradient, gathered_SBD, main_grad) if is_needed else None
            for gradient, main_grad, is_needed in zip(gradients, ctx.main_grads, ctx.needs_input_grad[3:], strict=True)
        ]
        return ctx.flight.end() if ctx.needs_input_grad[0] else None, None, None, *weight_grads


def scattered_product(
    x_SBK: torch.Tensor, weight_NK: torch.Tensor, main_grad: MainGrad | None, group: distributed.ProcessGroup
) -> torch.Tensor:
    """Map ``[S, B, K] -> [R, B, N]``: this rank's rows of the sum over ranks of each rank's ``x`` times its weight.

    The other ranks' rows are multiplied first and sent while this rank's are multiplied; in the backward pass, row gradients
    are gathered while this rank's are multiplied.

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
        gathered_SBN = ctx.flight.begin(gradient_RBN, gathers=True)
        dx_SBK = torch.empty_like(x_SBK)
        for rows, source in _pieces(ctx.flight, gradient_RBN, gathered_SBN):
            torch.mm(source.flatten(0, -2), weight_NK, out=dx_SBK[rows].flatten(0, -2))
        is_needed = ctx.needs_input_grad[1]
        return dx_SBK, _of_weight(gathered_SBN, x_SBK, ctx.main_grad) if is_needed else None, None, None


def _pieces(flight: _Flight, rows: torch.Tensor, gathered: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of the gathered rows with their rows: this rank's first, others once received; few rows in one piece."""
    if rows.nbytes < WORTH_PIECES:
        flight.end()
        yield slice(None), gathered
        return
    own, *others = flight.parts(len(rows))
    yield own, rows
    flight.end()
    yield from ((part, gathered[part]) for part in others)


def _of_weight(gradient: torch.Tensor, rows: torch.Tensor, main_grad: MainGrad | None) -> torch.Tensor | None:
    """Return a weight's gradient from ``rows`` and their product's ``gradient``, or a placeholder if it was accumulated."""
    gradient_NT, rows_TD = gradient.flatten(0, -2).t(), rows.flatten(0, -2)
    if main_grad is None:
        return gradient_NT @ rows_TD
    add_product_(main_grad.buffer, gradient_NT, rows_TD)
    return main_grad.placeholder()
