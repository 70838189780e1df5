"""Tells a clock when torch.compile or Triton compiles or tunes: in a step, that is time the step would not need again."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

from megacpp_mcore.observe.clock import Clock, Phase


@contextlib.contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Until the context ends, be in ``compile`` or ``jit`` while there is a compilation.

    torch's compilation callbacks enclose tracing, Inductor and the deferred compilation of a backward pass (torch 2.11,
    ``torch/_dynamo/callback.py``). Triton's hooks enclose the compilation of a kernel (Triton 3.6, ``knobs.runtime``), and its
    autotuner's benchmark of a configuration is wrapped; hooks that are there already are called, too.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch_compile(clock))
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_triton(clock))
        yield


@contextlib.contextmanager
def _torch_compile(clock: Clock) -> Iterator[None]:
    from torch._dynamo.callback import callback_handler

    def began(_: Any) -> None:
        clock.enter(Phase.COMPILE)

    def ended(_: Any) -> None:
        clock.leave(Phase.COMPILE)

    callback_handler.register_start_callback(began)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        # torch._dynamo.reset() forgets all callbacks.
        for callbacks, mine in ((callback_handler.start_callbacks, began), (callback_handler.end_callbacks, ended)):
            if mine in callbacks:
                callbacks.remove(mine)


@contextlib.contextmanager
def _triton(clock: Clock) -> Iterator[None]:
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    hooks = knobs.runtime
    before, after, bench = hooks.jit_cache_hook, hooks.jit_post_compile_hook, Autotuner._bench

    def began(*args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs) if before is not None else None
        if not found:  # else the hook has it from a cache of its own, and nothing is compiled
            clock.enter(Phase.JIT)
        return found

    def ended(*args: Any, **kwargs: Any) -> Any:
        clock.leave(Phase.JIT)
        return after(*args, **kwargs) if after is not None else None

    @functools.wraps(bench)
    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        with clock.within(Phase.JIT):
            return bench(self, *args, **kwargs)

    hooks.jit_cache_hook, hooks.jit_post_compile_hook, Autotuner._bench = began, ended, tuned
    try:
        yield
    finally:
        hooks.jit_cache_hook, hooks.jit_post_compile_hook, Autotuner._bench = before, after, bench
