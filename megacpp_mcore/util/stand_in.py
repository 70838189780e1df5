"""Temporary replacement of a function, or of environment variables, until a context ends."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock


def stand_in(holder: Any, name: str, run: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Within the context, redirect calls of function ``name`` of ``holder`` to ``run``, which gets it, then their arguments.

    ``holder`` is a module, a class, or a single object, whose class is not changed.

    Raises:
        AttributeError: there is no such function.
    """
    return mock.patch.object(holder, name, standing_in(getattr(holder, name), run))


def standing_in(stock: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks like ``stock``, and calls ``run`` with it, followed by a call's own arguments."""

    @functools.wraps(stock)
    def stands_in(*args: Any, **kwargs: Any) -> Any:
        return run(stock, *args, **kwargs)

    return stands_in


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Within the context, set these environment variables, or unset those that are None; others that are set inside it stay."""
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


def process_environment() -> contextlib.AbstractContextManager[None]:
    """For the duration, set torchrun's variables for a single process, unless torchrun has set them.

    No other process needs the port of its store, so the kernel chooses it when it is bound: a port found free earlier may be
    taken by then.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    return environment({name: value for name, value in defaults.items() if name not in os.environ})


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
