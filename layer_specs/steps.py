"""Which training step a layer is in, for what changes with the step: the dense warm-up of DSA's indexer.

Megatron's stock loop says it in its arguments (``curr_iteration``, megatron-core 0.19 ``megatron/training/training.py``); of
Megatron-Bridge our runner says it (:func:`count_from`), whose ``forward_step`` is given the run's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.training import global_vars

from megacpp_mcore.errors import ModelError

_of_bridge: int | None = None


def begun() -> int:
    """Steps that the run has ended, 0 in the first; resumed steps count.

    Raises:
        ModelError: neither loop says.
    """
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    found = _of_bridge if arguments is None else getattr(arguments, "curr_iteration", arguments.iteration)
    if found is None:
        raise ModelError(
            "dsa.warmup_steps needs to know the training step, and nothing says it; train by a stock script, or start the "
            "recipe with `python -m megacpp_mcore.nemo_recipes.run`"
        )
    return int(found)


def count_from(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-Bridge's ``forward_step(state, …)``, which first notes the step of the run's state."""

    @wraps(forward_step)
    def noted(state: Any, *args: Any, **kwargs: Any) -> Any:
        global _of_bridge
        _of_bridge = state.train_state.step
        return forward_step(state, *args, **kwargs)

    return noted
