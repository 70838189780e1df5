"""When torch.compile or Triton compiles in this process."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from megacpp_mcore.util.stand_in import stand_in

COMPILE, JIT = "compile", "jit"
"""Kinds of compilation: by torch.compile, and of Triton's kernels."""

_Note = Callable[[str], None]


@contextlib.contextmanager
def watched(begin: _Note, end: _Note) -> Iterator[None]:
    """Until the context ends, call ``begin`` and ``end``, with the kind, around every compilation.

    torch's compilation callbacks enclose tracing, Inductor and the deferred compilation of a backward pass (torch 2.11,
    ``torch/_dynamo/callback.py``). Triton's hooks enclose the compilation of a kernel (Triton 3.6, ``knobs.runtime``), and its
    autotuner's benchmark of a configuration is wrapped. Hooks that are already installed are called, too.
    """
    from torch._dynamo.callback import callback_handler

    def on_start(_: Any) -> None:
        begin(COMPILE)

    def on_end(_: Any) -> None:
        end(COMPILE)

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        with contextlib.ExitStack() as stack:
            if importlib.util.find_spec("triton") is not None:
                _watch_triton(begin, end, stack)
            yield
    finally:
        for callbacks, ours in ((callback_handler.start_callbacks, on_start), (callback_handler.end_callbacks, on_end)):
            if ours in callbacks:  # torch._dynamo.reset() removes all
                callbacks.remove(ours)


def _watch_triton(begin: _Note, end: _Note, stack: contextlib.ExitStack) -> None:
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def on_start(*args: Any, **kwargs: Any) -> Any:
        cached = before(*args, **kwargs) if before is not None else None
        if not cached:  # otherwise the existing hook has it in its own cache, and nothing is compiled
            begin(JIT)
        return cached

    def on_end(*args: Any, **kwargs: Any) -> Any:
        end(JIT)
        return after(*args, **kwargs) if after is not None else None

    def tune(bench: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin(JIT)
        try:
            return bench(*args, **kwargs)
        finally:
            end(JIT)

    stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", on_start))
    stack.enter_context(mock.patch.object(knobs.runtime, "jit_post_compile_hook", on_end))
    stack.enter_context(stand_in(Autotuner, "_bench", tune))
