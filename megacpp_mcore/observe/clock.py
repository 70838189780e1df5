"""Which phase this process is in, and for how long it has been in each: one stack, integer nanoseconds. No torch.

At every instant the process is in exactly one phase, the innermost that was entered, so that the parts always sum to the whole.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Iterator


class Phase(enum.StrEnum):
    """What a training process spends its time on."""

    STARTUP = "startup"
    """From the start of the process to the training loop: imports, groups, model, data sets."""
    LOAD = "checkpoint_load"
    COMPILE = "compile"
    """torch.compile with its autotuning, whether warmed up explicitly or met in a step."""
    JIT = "jit"
    """Compilation and autotuning of Triton kernels outside of torch.compile."""
    STEP = "step"
    """Forward, backward, communication and optimizer."""
    DATA = "data"
    """The loop waits for the next batch. The GPU may still be busy with the step before."""
    SAVE = "checkpoint_save"
    EVALUATION = "evaluation"
    PROFILE = "profile"
    """What the profiler does outside of steps: its start, and its tables after the window."""
    IDLE = "idle"
    """The rest of the loop, between steps, and the process after it: logging, garbage collection, clean-up."""


class Clock:
    """The phases of this process.

    Autotuning and lazy compilation may be met in the thread that runs the backward pass while the main thread waits for it;
    there is one stack for all threads, and the time is the innermost phase's, whoever entered it.

    Args:
        now: monotonic nanoseconds.
        age_ns: how long the process had been running when the clock was made; it counts as start-up.
    """

    def __init__(self, *, now: Callable[[], int] = time.monotonic_ns, age_ns: int = 0) -> None:
        self._now = now
        self._last = now()
        self._began = self._last - age_ns
        self._untaken: dict[Phase, int] = {Phase.STARTUP: age_ns} if age_ns else {}
        self._stack = [Phase.STARTUP]
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        """The phase that the process is in."""
        return self._stack[-1]

    def elapsed_ns(self) -> int:
        """Nanoseconds since the start of the process, as of the last change of phase or :meth:`take`."""
        return self._last - self._began

    def become(self, phase: Phase) -> None:
        """End the outermost phase for good and be in ``phase`` instead."""
        with self._lock:
            self._attribute()
            self._stack[0] = phase

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase`` for the duration."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def enter(self, phase: Phase) -> None:
        """Be in ``phase`` until :meth:`leave`."""
        with self._lock:
            self._attribute()
            self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """Be in what was entered before ``phase`` again; what was entered since and not left (an error ended it) ends, too."""
        with self._lock:
            self._attribute()
            for index in range(len(self._stack) - 1, 0, -1):
                if self._stack[index] is phase:
                    del self._stack[index:]
                    return

    def take(self) -> dict[Phase, int]:
        """Nanoseconds by phase since the last call; they sum to the time since then exactly."""
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
    """How long ago the kernel started this process, to its tick (10 ms); 0 where there is no /proc."""
    try:
        with open("/proc/self/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()  # after the name, which may hold anything
    except OSError:
        return 0
    started = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started)
