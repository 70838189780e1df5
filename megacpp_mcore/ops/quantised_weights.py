"""Quantised copies of weights, kept from one optimizer step to the next.

A training step reads a weight in several micro-batches, and quantises it in the first. A CUDA graph that quantises it does so
in every replay, unless the copy is renewed before replays: then graphs read the copy, at an address that does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from megacpp_mcore.errors import ModelError

Tensors = tuple[torch.Tensor, ...]
Quantise = Callable[[torch.Tensor, Tensors | None], Tensors]
"""Quantises a weight, into new tensors or into those passed."""


@dataclass
class _Copy:
    """A quantised weight, the function that made it, and the version and address of its source weight; None: stale."""

    made: Tensors
    quantise: Quantise
    state: tuple[int, int] | None

    def renew(self, weight: torch.Tensor, into: Tensors | None) -> None:
        """Quantise the current weight, unless the copy is up to date."""
        if self.state != (state := _state(weight)):
            with torch.no_grad():
                self.made = self.quantise(weight, into)
            self.state = state


_copies = WeakTensorKeyDictionary()
_renewed = WeakIdKeyDictionary()
"""Weights with copies that are renewed before every replay of the graphs that read them."""


def forget(*_: Any) -> None:
    """Mark all copies stale, and free those that no graph reads; runs after every optimizer step.

    Raises:
        ModelError: the step is being captured: its replays would not run this.
    """
    for weight, copy in list(_copies.items()):
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ModelError(
                "an optimizer step replayed by a CUDA graph does not renew the FP8 copies of weights: remove "
                "--optimizer-cuda-graph, or train without FP8 backends"
            )
        if weight in _renewed:
            copy.state = None
        else:
            del _copies[weight]


# Megatron's distributed optimizer updates parameters through the buffers that they are views of, without bumping their
# version counters; but it does so after a PyTorch optimizer's step and before the next forward pass.
register_optimizer_step_post_hook(forget)


def kept(weight: torch.Tensor, quantise: Quantise) -> Tensors:
    """Return ``quantise(weight, None)``, cached for a parameter in training until the next optimizer step or change.

    Not cached where gradients are off, as in evaluation, which may put other weights at the same address; nor in a CUDA graph,
    which must quantise the current weights in every replay, unless :func:`renew_before_replays` promises to do so.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return quantise(weight, None)
    copy: _Copy | None = _copies.get(weight)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return copy.made if copy is not None and weight in _renewed else quantise(weight, None)
    if copy is None:
        copy = _copies[weight] = _Copy((), quantise, None)
    copy.renew(weight, copy.made if copy.made and weight in _renewed else None)
    return copy.made


def renew_before_replays(weights: Iterable[torch.Tensor]) -> None:
    """Promise to call :func:`renew` with these weights before every replay of a graph that reads their copies."""
    for weight in weights:
        _renewed[weight] = True


def renew(weights: Iterable[torch.Tensor]) -> None:
    """Quantise again, in place, the changed weights with copies that graphs read."""
    for weight in weights:
        copy: _Copy | None = _copies.get(weight)
        if copy is not None and weight in _renewed:
            copy.renew(weight, copy.made)


def _state(weight: torch.Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
