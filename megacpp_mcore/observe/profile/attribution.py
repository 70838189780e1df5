"""Attributes events of a host thread to a part of the model and a phase of the step. No torch.

An operator belongs to the innermost thing that encloses it: one of our ranges (opened by :mod:`megacpp_mcore.observe.profile`)
or a node of the backward pass. A node belongs to the operator that made it. Each thread counts its nodes, a node carries its
number, and every operator that may make nodes records the count at which it began; so the maker is the last operator of that
thread that began at no higher count. The engine adds a gradient to its parameter (``AccumulateGrad``, a node without a
number) right after the node that produced it; it belongs to the same part as that node.

Recomputed work belongs where it did the first time: either our ranges are entered again in the backward pass, or the
checkpoint's own node belongs there. It is recognised by the graph it builds, as the backward pass proper builds none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from megacpp_mcore.observe.profile.trace import NODE, PREFIX, STEP, Cover, Op, Trace

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OTHER = "forward", "recompute", "backward", "optimizer", "other"

_STEP = f"{PREFIX}{STEP}/"
_PHASES = {"optimizer": OPTIMIZER, "gradients": BACKWARD}
"""Ranges whose phase is not ``forward``."""


class Place(NamedTuple):
    """Where an event belongs.

    Attributes:
        label: one of our ranges without its prefix (``A/3``, ``head``); None for none.
        phase: one of the names above.
    """

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
    """Where the events of a trace belong, found in one pass in the order in which they began; sorts them in place.

    Attributes:
        steps: begin and end of every step.
        self_time: nanoseconds without callees, and calls, by place and name of each operator in a step.
        operators: the place of each operator in a step, by its correlation.
        launches: the place of each launch in a step, by its correlation.
    """

    def __init__(self, trace: Trace) -> None:
        trace.ops.sort(key=lambda op: (op.start_ns, -op.end_ns))
        self.steps = [(op.start_ns, op.end_ns) for op in trace.ops if op.name.startswith(_STEP)]
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
            place = _of_range(op.name[len(PREFIX) :], above)
        elif is_node:
            place = above.last_node = self._of_node(op, above)
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

    def _of_node(self, op: Op, above: _Frame) -> Place:
        if op.sequence < 0:
            return Place(above.last_node.label, BACKWARD)
        makers = self._makers[op.node_thread]
        maker = bisect_left(makers, (op.sequence + 1,)) - 1  # of those that began at no higher count, the last
        return Place((makers[maker][1] if maker >= 0 else None) or above.place.label, BACKWARD)

    def _leave(self, stack: list[_Frame], op: Op) -> None:
        frame = stack.pop()
        if frame.counted:
            time = self.self_time[frame.place, op.name]
            time[0] += max(0, op.end_ns - op.start_ns - frame.inner_ns)
            time[1] += 1
        stack[-1].inner_ns += op.end_ns - op.start_ns  # of a range, too: Python's time in it is no operator's


def _of_range(label: str, above: _Frame) -> Place:
    if label.startswith(f"{STEP}/"):
        return _NOWHERE
    return Place(label, _PHASES.get(label.partition("/")[0]) or (RECOMPUTE if above.in_node else FORWARD))
