"""Counts, on any device, the calls that copy a result to the host: each would wait for a GPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
READING_OPERATORS = {
    _ATEN._local_scalar_dense.default,  # item(), bool() and int() of a tensor, a tensor as the bound of a slice
    _ATEN.nonzero.default,  # the shape of the result depends on the values
    _ATEN.masked_select.default,
    _ATEN.is_nonzero.default,
    _ATEN.equal.default,
    _ATEN._unique2.default,
    _ATEN.unique_consecutive.default,
    _ATEN.unique_dim.default,
    _ATEN.repeat_interleave.Tensor,
}
READING_METHODS = ("tolist", "numpy", "cpu")  # on a CPU no operator is behind these
COPYING_OPERATORS = {_ATEN.lift_fresh.default}  # what torch.tensor(number, device=…) shows of its copy
SOURCES = ("/megatron/", "/megacpp_mcore/", "/layer_specs/", "/patches/")

Counts = collections.Counter[str]


def _reader() -> str:
    """The innermost function of Megatron's or of this package on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if any(source in frame.filename for source in SOURCES) and "/megacpp_mcore/cpu/" not in frame.filename:
            return frame.name
    return "elsewhere"


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts, counted: set[Any]) -> None:
        super().__init__()
        self.counts, self.counted = counts, counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # One number put in the place of what a mask selects is masked_fill, which reads nothing.
        indexes = func is _ATEN.index.Tensor or (func is _ATEN.index_put_.default and args[2].numel() > 1)
        indexed_by_bool = indexes and any(index is not None and index.dtype == torch.bool for index in args[1])
        length_is_known = (kwargs or {}).get("output_size") is not None
        if (func in self.counted and not length_is_known) or indexed_by_bool:
            self.counts[_reader()] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads(*, copies: bool = False) -> Iterator[Counts]:
    """Count the reads within, by the name of the function that makes them; ``copies``: from the host to a device, too."""
    counts: Counts = collections.Counter()

    def counted(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[_reader()] += 1
            return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in READING_METHODS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(getattr(torch.Tensor, name))))
        stack.enter_context(_Operators(counts, READING_OPERATORS | (COPYING_OPERATORS if copies else set())))
        yield counts
