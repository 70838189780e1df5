"""An all-gather or a reduce-scatter of rows that is in flight while other work is done, and so is that of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


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
        self._group = group

    def begin(self, rows: torch.Tensor, *, gathers: bool) -> torch.Tensor:
        rows, ranks = rows.contiguous(), self._group.size()
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
