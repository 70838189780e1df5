"""Quantised tensors: recognised by type, refused where they would be dequantised silently, and counted where they are.

A quantised tensor of Transformer Engine reports bfloat16 as its dtype, and dequantises itself for any operation that it has no
kernel for. So they are recognised by class, and every dequantisation is counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.util import te_imports

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
_TORCHAO, _METHOD = "torchao", "dequantize"

_counted = {"calls": 0, "watched": 0}
_inside = threading.local()


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` means nothing without its scales: Transformer Engine's, torchao's, or torch's FP8."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.dtype in _FP8
    kinds = {kind.__name__ for kind in type(tensor).__mro__}
    of_torchao = type(tensor).__module__.partition(".")[0] == _TORCHAO and any("Float8" in kind for kind in kinds)
    return "QuantizedTensorStorage" in kinds or of_torchao


def refuse(**named: torch.Tensor | None) -> None:
    """Raise ModelError if one of the tensors is quantised: for ops that do not support it, and would dequantise it.

    Raises:
        ModelError: one of them is; the message names it and its class.
    """
    for name, tensor in named.items():
        if tensor is not None and is_quantized(tensor):
            raise ModelError(
                f"{name} is a {type(tensor).__name__} of {tensor.dtype}, a quantised tensor, and would be dequantised here; "
                "pass the tensor that it was made of, or a backend that takes both payload and scales"
            )


def watch() -> None:
    """Count from now on, in this process, every time that a quantised tensor of Transformer Engine is dequantised."""
    if not te_imports.available().ok:
        return
    _counted["watched"] = 1
    for kind in _classes(te_imports.entry("QuantizedTensorStorage")):
        own = vars(kind).get(_METHOD)
        if own is not None and not hasattr(own, "__wrapped__"):
            setattr(kind, _METHOD, counting(own))


def counting(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method ``dequantize`` to count its calls; nested calls count once."""

    @functools.wraps(dequantize)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(_inside, "depth", 0)
        _counted["calls"] += depth == 0
        _inside.depth = depth + 1
        try:
            return dequantize(self, *args, **kwargs)
        finally:
            _inside.depth = depth

    return counted


def count() -> int | None:
    """Return how often a quantised tensor was dequantised since :func:`watch`; None without it: nothing is quantised."""
    return _counted["calls"] if _counted["watched"] else None


def _classes(root: Any) -> Iterator[Any]:
    yield root
    for kind in root.__subclasses__():
        yield from _classes(kind)
