"""Counts, on any device, the calls whose result the host reads: each of them makes the host wait for a GPU."""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
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
READING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}  # on a CPU no operator is behind these
SOURCES = ("/megatron/", "/megacpp_mcore/", "/layer_specs/", "/patches/")

Counts = collections.Counter[str]


def _reader() -> str:
    """The innermost function of Megatron's or of this package on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if any(source in frame.filename for source in SOURCES) and "/megacpp_mcore/cpu/" not in frame.filename:
            return frame.name
    return "elsewhere"


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed_by_bool = func is _ATEN.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in READING_OPERATORS or indexed_by_bool:
            self.counts[_reader()] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_METHODS:
            self.counts[_reader()] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads() -> Iterator[Counts]:
    """Count the reads of the forward pass within, by the name of the function that makes them."""
    counts: Counts = collections.Counter()
    with _Methods(counts), _Operators(counts):
        yield counts
