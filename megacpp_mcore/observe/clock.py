"""Clock of a process's phases: nanoseconds spent in each, and when torch.compile or Triton compiles.

There is one stack of phases. At every instant the process is in exactly one, the innermost entered, so that the parts
always sum to the whole. Does not import torch when imported.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import psutil

from megacpp_mcore.util.stand_in import stand_in


class Phase(enum.StrEnum):
    """What a training process spends its time on."""

    STARTUP = "startup"
    """From the start of the process to the training loop: imports, groups, model, data sets."""
    LOAD = "checkpoint_load"
    COMPILE = "compile"
    """torch.compile with its autotuning."""
    JIT = "jit"
    """Compilation and autotuning of Triton kernels outside of torch.compile."""
    STEP = "step"
    """Forward, backward, communication and optimizer."""
    DATA = "data"
    """The loop waits for the next batch. The GPU may still be running the previous step."""
    SAVE = "checkpoint_save"
    EVALUATION = "evaluation"
    PROFILE = "profile"
    """The profiler's work outside of steps: starting it, and making its tables after the window."""
    IDLE = "idle"
    """The rest of the loop, between steps, and the process after it: logging, garbage collection, clean-up."""


OF_A_STEP = (Phase.STEP, Phase.DATA, Phase.IDLE, Phase.COMPILE, Phase.JIT)
"""Phases counted in a step's time: from the end of the previous step to its own, without checkpoints, evaluation, profiler."""


class Clock:
    """The phases of this process.

    Autotuning and lazy compilation may happen in the thread that runs the backward pass while the main thread waits for it.
    So all threads share one stack, and time is charged to the innermost phase, whichever thread entered it.

    ``now`` returns monotonic nanoseconds; ``age_ns``, the process's age at that point, counts as start-up.
    """

    def __init__(self, *, now: Callable[[], int] = time.monotonic_ns, age_ns: int = 0) -> None:
        self._now = now
        self._last = now()
        self._born = self._last - age_ns
        self._untaken: dict[Phase, int] = {Phase.STARTUP: age_ns} if age_ns else {}
        self._stack = [Phase.STARTUP]
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        """The phase that the process is in."""
        return self._stack[-1]

    def elapsed_ns(self) -> int:
        """Return the nanoseconds since the start of the process, as of the last change of phase or :meth:`take`."""
        return self._last - self._born

    def age_ns(self) -> int:
        """Return the nanoseconds since the start of the process, as of now."""
        return self._now() - self._born

    def become(self, phase: Phase) -> None:
        """Replace the outermost phase permanently with ``phase``."""
        with self._lock:
            self._attribute()
            self._stack[0] = phase

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Stay in ``phase`` until the context ends."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def enter(self, phase: Phase) -> None:
        """Enter ``phase``, until :meth:`leave`."""
        with self._lock:
            self._attribute()
            self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """Return to the phase outside of ``phase``; phases entered inside it and not left (because of an error) also end."""
        with self._lock:
            self._attribute()
            for index in range(len(self._stack) - 1, 0, -1):
                if self._stack[index] is phase:
                    del self._stack[index:]
                    return

    def take(self) -> dict[Phase, int]:
        """Return the nanoseconds by phase since the last call; they sum exactly to the time since then."""
        with self._lock:
            self._attribute()
            taken, self._untaken = self._untaken, {}
            return taken

    def _attribute(self) -> None:
        now = self._now()
        if now > self._last:
            phase = self._stack[-1]
            self._untaken[phase] = self._untaken.get(phase, 0) + now - self._last
            self._last = now


def process_age_ns() -> int:
    """Return the nanoseconds since the kernel started this process, to its tick (10 ms)."""
    since_boot_s = psutil.Process().create_time() - psutil.boot_time()  # each may be off by half a second
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - round(since_boot_s * 1e9))


@contextlib.contextmanager
def compilation_timed(clock: Clock) -> Iterator[None]:
    """Until the context ends, charge compilations, which a repeated step would not need, to ``compile`` or ``jit``.

    torch's compilation callbacks enclose tracing, Inductor and the deferred compilation of a backward pass (torch 2.11,
    ``torch/_dynamo/callback.py``). Triton's hooks enclose the compilation of a kernel (Triton 3.6, ``knobs.runtime``), and its
    autotuner's benchmark of a configuration is wrapped. Hooks that are already installed are called, too.
    """
    from torch._dynamo.callback import callback_handler

    def on_start(_: Any) -> None:
        clock.enter(Phase.COMPILE)

    def on_end(_: Any) -> None:
        clock.leave(Phase.COMPILE)

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        with contextlib.ExitStack() as stack:
            if importlib.util.find_spec("triton") is not None:
                _time_triton(clock, stack)
            yield
    finally:
        for callbacks, ours in ((callback_handler.start_callbacks, on_start), (callback_handler.end_callbacks, on_end)):
            if ours in callbacks:  # torch._dynamo.reset() removes all
                callbacks.remove(ours)


def _time_triton(clock: Clock, stack: contextlib.ExitStack) -> None:
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def on_start(*args: Any, **kwargs: Any) -> Any:
        cached = before(*args, **kwargs) if before is not None else None
        if not cached:  # otherwise the existing hook has it in its own cache, and nothing is compiled
            clock.enter(Phase.JIT)
        return cached

    def on_end(*args: Any, **kwargs: Any) -> Any:
        clock.leave(Phase.JIT)
        return after(*args, **kwargs) if after is not None else None

    def tune(bench: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with clock.within(Phase.JIT):
            return bench(*args, **kwargs)

    stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", on_start))
    stack.enter_context(mock.patch.object(knobs.runtime, "jit_post_compile_hook", on_end))
    stack.enter_context(stand_in(Autotuner, "_bench", tune))
