"""Which part of the model, and which phase of the step, an event of a host thread belongs to. No torch.

An operator belongs to the innermost that encloses it of two things: a range of ours (:mod:`megacpp_mcore.observe.profile`
opens them), or a node of the backward pass. A node belongs where it was made: it carries the number that its thread had
counted to, every operator that may make a node tells the count it began at, and so the last operator of that thread that
began at no higher count is the one that made the node. The engine adds a gradient to its parameter (``AccumulateGrad``, a
node with no number) right after the node that it comes from, and it belongs where that one does.

What is computed again belongs where it did the first time: either our ranges are entered again in the backward pass, or the
node of the checkpoint belongs there. It is known by the graph that is built, where the backward pass builds none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megacpp_mcore.observe.profile.trace import NODE, PREFIX, STEP, Cover, Interval, Op, Trace

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OTHER = "forward", "recompute", "backward", "optimizer", "other"

_STEP = f"{PREFIX}{STEP}/"
_PHASES = {"optimizer": OPTIMIZER, "gradients": BACKWARD}
"""Ranges whose phase is not ``forward``."""


class Place(NamedTuple):
    """Where an event belongs.

    Attributes:
        label: a range of ours without its prefix (``A/3``, ``head``), None for none.
        phase: one of the names above.
    """

    label: str | None
    phase: str


_NOWHERE = Place(None, OTHER)


class Work:
    """Time on the host: self time of operators, without what they call."""

    def __init__(self) -> None:
        self.ns = 0
        self.calls = 0


class Attribution:
    """What was found.

    Attributes:
        steps: begin and end of every step.
        self_time: by place and name of the operator; what lies outside of steps is left out.
        operators: the place of each operator in a step, by its correlation.
        launches: the place of each launch in a step, by its correlation.
        operating: of a trace without kernels, the time whose innermost event is an operator, thread by thread: what
            ``self_time`` is made of.
    """

    def __init__(self) -> None:
        self.steps: list[Interval] = []
        self.self_time: defaultdict[tuple[Place, str], Work] = defaultdict(Work)
        self.operators: dict[int, Place] = {}
        self.launches: dict[int, Place] = {}
        self.operating: list[Interval] = []


class _Frame:
    """An open event."""

    __slots__ = ("counted", "in_node", "inner_ns", "last_node", "op", "place")

    def __init__(self, op: Op, place: Place, in_node: bool, counted: bool) -> None:
        self.op = op
        self.place = place
        self.in_node = in_node
        self.counted = counted  # an operator, as opposed to a range, of a step
        self.inner_ns = 0
        self.last_node = place  # where the node belongs that was evaluated last inside of this event


class _Made:
    """Where the nodes of one thread were made: the counts that operators began at, ascending, and their labels."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._labels: list[str | None] = []

    def note(self, count: int, label: str | None) -> None:
        """An operator began at ``count``."""
        if self._counts and count <= self._counts[-1]:
            self._labels[-1] = label
        else:
            self._counts.append(count)
            self._labels.append(label)

    def label(self, number: int) -> str | None:
        """The label of the operator that made the node ``number``."""
        place = bisect_right(self._counts, number) - 1
        return self._labels[place] if place >= 0 else None


def attribute(trace: Trace, *, wanted: Iterable[int] | None = None) -> Attribution:
    """Go through the host's events once, in the order in which they began.

    Args:
        trace: sorted in place.
        wanted: correlations of the operators whose place is asked for; None: all.
    """
    trace.ops.sort(key=lambda op: (op.start_ns, -op.end_ns))
    found = Attribution()
    found.steps = [(op.start_ns, op.end_ns) for op in trace.ops if op.name.startswith(_STEP)]
    sweep = _Sweep(found, trace, None if wanted is None else set(wanted))
    for op in trace.ops:
        sweep.enter(op)
    sweep.close()
    return found


class _Sweep:
    def __init__(self, found: Attribution, trace: Trace, wanted: set[int] | None) -> None:
        self._found = found
        self._on_host = not trace.kernels  # else the time is the kernels', and that of operators is not asked for
        self._operating: defaultdict[int, list[Interval]] = defaultdict(list)
        self._since: dict[int, int] = {}
        self._wanted = wanted
        self._in_steps = Cover(found.steps)
        self._open: defaultdict[int, list[_Frame]] = defaultdict(list)
        self._made: defaultdict[int, _Made] = defaultdict(_Made)
        self._last_node: dict[int, Place] = {}

    def enter(self, op: Op) -> None:
        """An event begins; those of its thread that have ended before are closed."""
        stack = self._open[op.thread]
        while stack and stack[-1].op.end_ns <= op.start_ns:
            self._leave(stack)
        above = stack[-1] if stack else None
        in_step = self._in_steps.holds(op.start_ns)
        if op.launch:
            if in_step:
                self._found.launches[op.correlation] = above.place if above else _NOWHERE
            return
        is_range = op.name.startswith(PREFIX)
        is_node = not is_range and op.name.startswith(NODE)
        place = self._place(op, above, is_range, is_node)
        in_node = is_node or (above is not None and above.in_node)
        self._pass(stack, op.thread, op.start_ns)
        stack.append(_Frame(op, place, in_node, in_step and not is_range))
        if in_step and not is_range and (self._wanted is None or op.correlation in self._wanted):
            self._found.operators[op.correlation] = place
        if op.sequence >= 0 and op.forward and not is_node:
            self._made[op.torch_thread].note(op.sequence, place.label)

    def close(self) -> None:
        """All events have begun: close those that are open."""
        for stack in self._open.values():
            while stack:
                self._leave(stack)
        for intervals in self._operating.values():
            self._found.operating += intervals

    def _place(self, op: Op, above: _Frame | None, is_range: bool, is_node: bool) -> Place:
        outer = above.place if above else _NOWHERE
        if is_node:
            return self._node(op, above, outer)
        in_node = above is not None and above.in_node
        if is_range:
            label = op.name[len(PREFIX) :]
            if label.startswith(f"{STEP}/"):
                return _NOWHERE
            phase = _PHASES.get(label.partition("/")[0])
            return Place(label, phase or (RECOMPUTE if in_node else FORWARD))
        if in_node and op.sequence >= 0 and op.forward and outer.phase == BACKWARD:
            return Place(outer.label, RECOMPUTE)
        return outer

    def _node(self, op: Op, above: _Frame | None, outer: Place) -> Place:
        if op.sequence >= 0:
            label = self._made[op.node_thread].label(op.sequence)
            place = Place(label or outer.label, BACKWARD)
        else:
            before = above.last_node if above else self._last_node.get(op.thread, outer)
            place = Place(before.label, BACKWARD)
        if above is not None:
            above.last_node = place
        else:
            self._last_node[op.thread] = place
        return place

    def _pass(self, stack: list[_Frame], thread: int, until: int) -> None:
        """Until an instant, the thread was in what is innermost on its stack."""
        if not self._on_host:
            return
        since = self._since.get(thread, until)
        self._since[thread] = max(since, until)
        if not stack or not stack[-1].counted or until <= since:
            return
        operating = self._operating[thread]
        if operating and operating[-1][1] == since:
            operating[-1] = (operating[-1][0], until)
        else:
            operating.append((since, until))

    def _leave(self, stack: list[_Frame]) -> None:
        self._pass(stack, stack[-1].op.thread, stack[-1].op.end_ns)
        frame = stack.pop()
        op = frame.op
        if frame.counted:
            work = self._found.self_time[frame.place, op.name]
            work.ns += max(0, op.end_ns - op.start_ns - frame.inner_ns)
            work.calls += 1
        if stack:  # of a range, too: what Python does in it is no operator's time
            stack[-1].inner_ns += op.end_ns - op.start_ns
