"""The raw events of torch.profiler as plain records (operators, launches, kernels), and covers of time intervals.

No trace file is read: one of five steps of 250,000 kernels is gigabytes of JSON. Written against torch 2.11
(``torch._C._autograd._KinetoEvent``). No torch at import.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PREFIX = "megacpp::"
"""Prefix of the names of our ranges."""

STEP = "step"
"""The range of a whole step, ``megacpp::step/10``."""

PARTS = ("block", "data", "embedding", "gradients", "head", "norm", "optimizer", "pipeline")
"""The ranges that have no number; the others are layers and depths, ``megacpp::A/3``."""

NODE = "autograd::engine::evaluate_function: "
"""Prefix of the engine's event for one node of the backward pass."""

_LAUNCH = re.compile(r"cu(da)?[A-Z]")


class Op(NamedTuple):
    """One event of a host thread: an operator, a node of the backward pass, one of our ranges, or a launch.

    Attributes:
        start_ns, end_ns: nanoseconds on the profiler's clock, which kernels use, too.
        name: as the profiler has it.
        thread: the operating system's number of the thread.
        torch_thread: torch's own number of it, by which nodes refer to the thread that made them.
        sequence: number of the next backward node when the event began, or of the node that it evaluates; -1: none.
        node_thread: of a node, the ``torch_thread`` that made it.
        correlation: the number by which kernels refer to the operator or the launch.
        forward: whether it is a function call rather than a node of the backward pass.
        launch: whether it is a call of the CUDA runtime.
    """

    start_ns: int
    end_ns: int
    name: str
    thread: int = 1
    torch_thread: int = 1
    sequence: int = -1
    node_thread: int = 0
    correlation: int = 0
    forward: bool = True
    launch: bool = False


class Kernel(NamedTuple):
    """Work on a device: a kernel, a copy, a fill.

    Attributes:
        operator: the correlation of the operator that launched it, 0 where none was open.
        launch: the correlation of the launch.
    """

    start_ns: int
    end_ns: int
    name: str
    operator: int
    launch: int


@dataclass
class Trace:
    """All that was recorded; operators are in no order."""

    ops: list[Op] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def read(events: Sequence[Any]) -> Trace:
    """The records of ``events``, as returned by ``torch.autograd.profiler.profile.kineto_results.events()``.

    Calls of the CUDA runtime that launched something are included: the operator around a kernel is not enough, as a
    checkpointing operator encloses ranges of ours, and launches outside of any operator of their own. Transfers between
    processes by host threads (gloo) are no operator's time, and are left out.
    """
    from torch.autograd import DeviceType

    trace, host = Trace(), DeviceType.CPU
    for event in events:
        if event.device_type() != host and not event.is_user_annotation():
            start, name = event.start_ns(), sys.intern(event.name())  # millions of events have hundreds of names
            operator, launch = event.linked_correlation_id(), event.correlation_id()
            trace.kernels.append(Kernel(start, start + event.duration_ns(), name, operator, launch))
    launches = {kernel.launch for kernel in trace.kernels}
    for event in events:
        if event.device_type() != host or event.is_async() or event.start_thread_id() != event.end_thread_id():
            continue
        name = sys.intern(event.name())
        is_launch = _LAUNCH.match(name) is not None
        if not is_launch or event.correlation_id() in launches:
            start = event.start_ns()
            trace.ops.append(
                Op(
                    start,
                    start + event.duration_ns(),
                    name,
                    event.device_resource_id(),
                    event.start_thread_id(),
                    event.sequence_nr(),
                    event.fwd_thread_id(),
                    event.correlation_id(),
                    event.scope() == 0,  # at::RecordScope::FUNCTION; the node's own call is BACKWARD_FUNCTION
                    is_launch,
                )
            )
    return trace


# --- Intervals --------------------------------------------------------------------------------------------------------

Interval = tuple[int, int]
"""Begin and end, nanoseconds."""


class Cover:
    """The union of ``intervals``: an instant that lies in several is counted once."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if end <= start:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0]
        for start, end in zip(self._starts, self._ends, strict=True):
            self._before.append(self._before[-1] + end - start)

    @property
    def total(self) -> int:
        """Nanoseconds that are covered."""
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """Nanoseconds of the interval from ``start`` to ``end`` that are covered."""
        return max(0, self._up_to(end) - self._up_to(start))

    def common(self, other: Cover) -> int:
        """Nanoseconds that ``other`` covers as well."""
        return sum(other.within(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def holds(self, instant: int) -> bool:
        """Whether ``instant`` is covered; an interval's end is not part of it."""
        place = bisect_right(self._starts, instant) - 1
        return place >= 0 and instant < self._ends[place]

    def _up_to(self, instant: int) -> int:
        place = bisect_right(self._starts, instant) - 1
        return 0 if place < 0 else self._before[place] + min(instant, self._ends[place]) - self._starts[place]
