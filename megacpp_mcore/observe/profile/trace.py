"""The raw events of torch.profiler as plain records, and the part of the model and the phase of the step that each belongs to.

No trace file is read: five steps of 250,000 kernels are gigabytes of JSON. Written against torch 2.11
(``torch._C._autograd._KinetoEvent``). No torch at import.

An operator belongs to the innermost thing that encloses it: one of our ranges (opened by :mod:`megacpp_mcore.observe.profile`)
or a node of the backward pass. A node belongs to the operator that made it. Each thread counts its nodes, a node carries its
number, and every operator that may make nodes records the count at which it began; so the maker is the last operator of that
thread that began at no higher count. The engine adds a gradient to its parameter (``AccumulateGrad``, a node without a
number) right after the node that produced it; it belongs to the same part as that node.

Recomputed work belongs where it did the first time: either our ranges are entered again in the backward pass, or the
checkpoint's own node belongs there. It is recognised by the graph it builds, as the backward pass proper builds none.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megacpp_mcore.util.intervals import Cover

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
        start_ns, end_ns: nanoseconds on the profiler's clock, which kernels also use.
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
    """Work on a device (a kernel, a copy, a fill), with the correlations of its operator (0: none was open) and its launch."""

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
    """Return the records of ``events``, as returned by ``torch.autograd.profiler.profile.kineto_results.events()``.

    Calls of the CUDA runtime that launched something are included: the operator around a kernel is not enough, as a
    checkpointing operator encloses ranges of ours, and launches outside of any operator of their own. Transfers between
    processes by host threads (gloo) belong to no operator and are left out.
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
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            threads = event.device_resource_id(), event.start_thread_id()
            node, correlation = (event.sequence_nr(), event.fwd_thread_id()), event.correlation_id()
            is_forward = event.scope() == 0  # at::RecordScope::FUNCTION; the node's own call is BACKWARD_FUNCTION
            trace.ops.append(Op(start, end, name, *threads, *node, correlation, is_forward, is_launch))
    return trace


# --- Attribution ------------------------------------------------------------------------------------------------------

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OTHER = "forward", "recompute", "backward", "optimizer", "other"

_PHASES = {"optimizer": OPTIMIZER, "gradients": BACKWARD}
"""Ranges whose phase is not ``forward``."""


class Place(NamedTuple):
    """Where an event belongs: one of our ranges without its prefix (``A/3``, ``head``; None: none), and a phase."""

    label: str | None
    phase: str


_NOWHERE = Place(None, OTHER)


@dataclass(slots=True)
class _Frame:
    """An open event, or the bottom of a thread's stack."""

    place: Place
    last_node: Place
    """The place of the last node that was evaluated inside this event."""
    op: Op | None = None
    in_node: bool = False
    counted: bool = False
    """Whether this is an operator in a step, as opposed to a range."""
    inner_ns: int = 0


class Attribution:
    """Where the events of a trace belong, computed in one pass by start time; sorts them in place.

    Attributes:
        steps: begin and end of every step.
        self_time: nanoseconds without callees, and calls, by place and name of each operator in a step.
        operators: the place of each operator in a step, by its correlation.
        launches: the place of each launch in a step, by its correlation.
    """

    def __init__(self, trace: Trace) -> None:
        trace.ops.sort(key=lambda op: (op.start_ns, -op.end_ns))
        self.steps = [(op.start_ns, op.end_ns) for op in trace.ops if op.name.startswith(f"{PREFIX}{STEP}/")]
        self.self_time: defaultdict[tuple[Place, str], list[int]] = defaultdict(lambda: [0, 0])
        self.operators: dict[int, Place] = {}
        self.launches: dict[int, Place] = {}
        self._in_steps = Cover(self.steps)
        self._open: defaultdict[int, list[_Frame]] = defaultdict(lambda: [_Frame(_NOWHERE, _NOWHERE)])
        self._makers: defaultdict[int, list[tuple[int, str | None]]] = defaultdict(list)
        """Of each thread, the counts at which operators began, ascending, with the label under which they made nodes."""
        self._wanted = {kernel.operator for kernel in trace.kernels}
        for op in trace.ops:
            self._enter(op)
        for stack in self._open.values():
            while stack[-1].op is not None:
                self._leave(stack, stack[-1].op)

    def _enter(self, op: Op) -> None:
        """Begin an event; close those of its thread that have already ended."""
        stack = self._open[op.thread]
        while (above := stack[-1]).op is not None and above.op.end_ns <= op.start_ns:
            self._leave(stack, above.op)
        in_step = self._in_steps.holds(op.start_ns)
        if op.launch:
            if in_step:
                self.launches[op.correlation] = above.place
            return
        is_range, is_node = op.name.startswith(PREFIX), op.name.startswith(NODE)
        if is_range:
            label = op.name[len(PREFIX) :]
            phase = _PHASES.get(label.partition("/")[0]) or (RECOMPUTE if above.in_node else FORWARD)
            place = _NOWHERE if label.startswith(f"{STEP}/") else Place(label, phase)
        elif is_node:
            of_node = above.last_node.label
            if op.sequence >= 0:
                makers = self._makers[op.node_thread]
                maker = bisect_left(makers, (op.sequence + 1,)) - 1  # the last that began at no higher count
                of_node = (makers[maker][1] if maker >= 0 else None) or above.place.label
            place = above.last_node = Place(of_node, BACKWARD)
        elif above.in_node and op.sequence >= 0 and op.forward and above.place.phase == BACKWARD:
            place = Place(above.place.label, RECOMPUTE)
        else:
            place = above.place
        counted = in_step and not is_range
        stack.append(_Frame(place, place, op, above.in_node or is_node, counted))
        if counted and (op.correlation in self._wanted or not self._wanted):
            self.operators[op.correlation] = place
        if op.sequence >= 0 and op.forward and not is_node:
            makers = self._makers[op.torch_thread]
            if makers and op.sequence <= makers[-1][0]:
                makers[-1] = (makers[-1][0], place.label)
            else:
                makers.append((op.sequence, place.label))

    def _leave(self, stack: list[_Frame], op: Op) -> None:
        frame = stack.pop()
        if frame.counted:
            time = self.self_time[frame.place, op.name]
            time[0] += max(0, op.end_ns - op.start_ns - frame.inner_ns)
            time[1] += 1
        stack[-1].inner_ns += op.end_ns - op.start_ns  # ranges included: Python's time in them belongs to no operator
