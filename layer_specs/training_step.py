"""The current training step, as seen from a layer; the dense warm-up of DSA's indexer depends on it.

Megatron's stock loop keeps it in its arguments (``curr_iteration``, megatron-core 0.19 ``megatron/training/training.py``);
under Megatron-Bridge our runner records it (:func:`count_from`) from the state that ``forward_step`` gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.training import global_vars

from megacpp_mcore.errors import ModelError

_of_bridge: int | None = None


def ended(training: bool) -> int:
    """Return the number of completed steps, including those before a resume.

    Args:
        training: whether a training step is running; otherwise the run evaluates, and the stock loop still has the number of
            the last step.

    Raises:
        ModelError: neither loop provides the step.
    """
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    if arguments is not None:
        # curr_iteration is 0 until the run has loaded its checkpoint, whose step is `iteration`.
        current = getattr(arguments, "curr_iteration", None)
        return int(arguments.iteration if current is None else max(arguments.iteration, current + (not training)))
    if _of_bridge is None:
        raise ModelError(
            "dsa.warmup_steps needs the training step, but this loop provides none; train with a stock script, or start the "
            "recipe with `python -m megacpp_mcore.nemo_recipes.run`"
        )
    return _of_bridge


def count_from(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron-Bridge's ``forward_step(state, …)`` to record the step from the run's state first."""

    @wraps(forward_step)
    def noted(state: Any, *args: Any, **kwargs: Any) -> Any:
        global _of_bridge
        _of_bridge = state.train_state.step
        return forward_step(state, *args, **kwargs)

    return noted
