"""Which training step a layer is in, for what changes with the step: the dense warm-up of DSA's indexer.

Megatron's stock loop says it in its arguments (``curr_iteration``, megatron-core 0.19 ``megatron/training/training.py``); of
Megatron-Bridge our runner says it (:func:`count_from`), whose ``forward_step`` is given the run's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from megatron.training import global_vars

from megacpp_mcore.errors import ModelError

_of_bridge: int | None = None
_assumed: int | None = None


def ended(training: bool) -> int:
    """Steps that the run has ended; resumed ones count.

    Args:
        training: whether a step is under way; otherwise the run evaluates, and the stock loop's number is the last step's.

    Raises:
        ModelError: neither loop says.
    """
    if _assumed is not None:
        return _assumed
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    if arguments is not None:
        # Set to 0 before a run loads its checkpoint, whose step is `iteration`.
        current = getattr(arguments, "curr_iteration", None)
        return int(arguments.iteration if current is None else max(arguments.iteration, current + (not training)))
    if _of_bridge is None:
        raise ModelError(
            "dsa.warmup_steps needs to know the training step, and nothing says it; train by a stock script, or start the "
            "recipe with `python -m megacpp_mcore.nemo_recipes.run`"
        )
    return _of_bridge


@contextlib.contextmanager
def assumed(number: int) -> Iterator[None]:
    """While it lasts, :func:`ended` is ``number``: for what runs a layer outside of training."""
    global _assumed
    before, _assumed = _assumed, number
    try:
        yield
    finally:
        _assumed = before


def count_from(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-Bridge's ``forward_step(state, …)``, which first notes the step of the run's state."""

    @wraps(forward_step)
    def noted(state: Any, *args: Any, **kwargs: Any) -> Any:
        global _of_bridge
        _of_bridge = state.train_state.step
        return forward_step(state, *args, **kwargs)

    return noted
