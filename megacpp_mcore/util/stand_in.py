"""Temporary replacement of a function, until a context ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock


def stand_in(holder: Any, name: str, run: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Within the context, redirect every call of the function ``name`` of ``holder`` to ``run``.

    Args:
        holder: a module, a class, or a single object, whose class is not changed.
        name: of the function there.
        run: called with the replaced function, followed by the call's own arguments.

    Raises:
        AttributeError: there is no such function.
    """
    stock = getattr(holder, name)

    @functools.wraps(stock)
    def standing_in(*args: Any, **kwargs: Any) -> Any:
        return run(stock, *args, **kwargs)

    return mock.patch.object(holder, name, standing_in)
