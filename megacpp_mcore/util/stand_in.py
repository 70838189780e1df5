"""A function in the place of another, until a context ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock


def stand_in(stack: contextlib.ExitStack, holder: Any, name: str, run: Callable[..., Any]) -> None:
    """Until ``stack`` closes, let every call of the function ``name`` of ``holder`` be one of ``run``.

    Args:
        stack: what puts the function back.
        holder: a module, a class, or one object, whose class then stays as it is.
        name: of the function there.
        run: is given the function whose place it takes, and then what that would be given.

    Raises:
        AttributeError: there is no such function.
    """
    stock = getattr(holder, name)

    @functools.wraps(stock)
    def standing_in(*args: Any, **kwargs: Any) -> Any:
        return run(stock, *args, **kwargs)

    stack.enter_context(mock.patch.object(holder, name, standing_in))
