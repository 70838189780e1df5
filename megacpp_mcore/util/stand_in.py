"""Temporary replacement of a function, or of environment variables, until a context ends."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
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


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Within the context, set these environment variables, or unset those that are None; others that are set in it stay."""
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
