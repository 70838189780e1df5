"""Quantised copies of weights, kept from one optimizer step to the next.

A training step reads a weight in several micro-batches, and quantises it in the first. A CUDA graph that quantises it does so
in every replay, unless somebody renews the copy before a replay: then graphs read it where it lies, and it stays there.
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
"""From a weight to its quantised form, in new tensors or in those given."""


@dataclass
class _Copy:
    """The quantised form of a weight, what made it, and of which weights: their version and address; None: none of today's."""

    made: Tensors
    quantise: Quantise
    state: tuple[int, int] | None

    def renew(self, weight: torch.Tensor, into: Tensors | None) -> None:
        """Quantise the weight as it is now, unless that was done."""
        if self.state != (state := _state(weight)):
            with torch.no_grad():
                self.made = self.quantise(weight, into)
            self.state = state


_copies = WeakTensorKeyDictionary()
_renewed = WeakIdKeyDictionary()
"""Weights whose copies are renewed before every replay of the graphs that read them."""


def forget(*_: Any) -> None:
    """Let no copy be of today's weights, and free those that no graph reads; runs after every optimizer step.

    Raises:
        ModelError: the step is being captured, whose replays would not come here.
    """
    for weight, copy in list(_copies.items()):
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ModelError(
                "an optimizer's step that a CUDA graph replays leaves the FP8 copies of weights as they were: remove "
                "--optimizer-cuda-graph, or train without FP8 backends"
            )
        if weight in _renewed:
            copy.state = None
        else:
            del _copies[weight]


# Megatron's distributed optimizer updates parameters through the buffers that they are views of, which bumps no version
# counter of theirs; but it does so after a PyTorch optimizer's step and before the next forward pass.
register_optimizer_step_post_hook(forget)


def kept(weight: torch.Tensor, quantise: Quantise) -> Tensors:
    """``quantise(weight, None)``, of a parameter in training once until the next optimizer step, or until it changes.

    Not kept where gradients are off, as in evaluation, which may put other weights at the same address; nor in a CUDA graph,
    whose replay has to quantise the weights of that time, if nobody has promised to (:func:`renew_before_replays`).
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
    """Quantise, in place, those of the weights that graphs read quantised and that have changed since."""
    for weight in weights:
        copy: _Copy | None = _copies.get(weight)
        if copy is not None and weight in _renewed:
            copy.renew(weight, copy.made)


def _state(weight: torch.Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
