"""Where the time of some steps went: by family and phase, what was hidden, and how long the device waited for the host.

On a device the time is that of kernels, copies and fills; on a CPU it is the self time of operators. No torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore.observe.profile.attribution import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    RECOMPUTE,
    Attribution,
    Place,
    attribute,
)
from megacpp_mcore.observe.profile.events import Collective, Kernel, Trace
from megacpp_mcore.observe.profile.intervals import Cover

EXPOSED, HIDDEN = "communication_exposed", "communication_hidden"
COLUMNS = (FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OTHER, EXPOSED, HIDDEN)
UNATTRIBUTED = "unattributed"
DEVICE_TIME, HOST_TIME = "device time of kernels", "self CPU time of operators"
TOP = 10
"""Kernels that are named for each family."""

_COMMUNICATION = re.compile(r"nccl|nvshmem|deep_ep|Memcpy PtoP", re.IGNORECASE)
_NCCL = re.compile(r"nccl(?:Symk)?(?:Dev)?Kernel_?(?:Generic_)?([A-Za-z]+)")


def is_communication(kernel: str) -> bool:
    """Whether a kernel of this name moves data between devices (NCCL, NVSHMEM, DeepEP, copies from peer to peer)."""
    return _COMMUNICATION.search(kernel) is not None


def collective(kernel: str) -> str:
    """The collective that a kernel of communication does, as NCCL names it (``AllReduce``); else the kernel's own name."""
    found = _NCCL.search(kernel)
    return found[1] if found else kernel


@dataclass
class Row:
    """The time of one family, or of one layer.

    Attributes:
        ns: by column of :data:`COLUMNS`.
        kernels: how many kernels, or calls of operators.
        by_name: time and calls by the kernel's or operator's name.
        host_ns: self time of the operators on the host.
    """

    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    kernels: int = 0
    by_name: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    host_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Of all columns."""
        return sum(self.ns.values())

    def add(self, column: str, name: str, ns: int, calls: int = 1) -> None:
        """Add the time of ``calls`` calls."""
        self.ns[column] += ns
        self.kernels += calls
        entry = self.by_name[name]
        entry[0] += ns
        entry[1] += calls

    def top(self, count: int = TOP) -> list[dict[str, Any]]:
        """The names with the most time."""
        names = sorted(self.by_name.items(), key=lambda item: (-item[1][0], item[0]))[:count]
        return [{"name": name, "ns": ns, "calls": calls} for name, (ns, calls) in names]


@dataclass
class Communication:
    """What one kind of collective cost: the time of its kernels, and the part in which nothing else ran."""

    calls: int = 0
    ns: int = 0
    exposed_ns: int = 0


@dataclass
class Table:
    """The time of the steps of a trace.

    Attributes:
        unit: :data:`DEVICE_TIME` or :data:`HOST_TIME`.
        steps: how many steps.
        graphs: CUDA graphs that were instantiated in the window.
        families, layers: rows by family (``A``) and by range (``A/3``).
        collectives: by name.
        communication_ns, hidden_ns: the time in which there was communication, simultaneous ones counted once, and the part
            of it in which kernels computed, too.
        window_ns: from the begin of each step to its end, and of the last one to the end of its last kernel.
        busy_ns: the part of it in which the device did something; None without a device.
        no_operator_ns: without a device, the part of it in which no operator ran on any thread of the host, so that it is in no
            row: Python, and waiting. None with a device, whose part without work is the host-bound share.
        streams: nanoseconds of computation and of communication on each stream of the device.
    """

    unit: str
    steps: int = 0
    graphs: int = 0
    families: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    layers: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    collectives: dict[str, Communication] = field(default_factory=lambda: defaultdict(Communication))
    communication_ns: int = 0
    hidden_ns: int = 0
    window_ns: int = 0
    busy_ns: int | None = None
    no_operator_ns: int | None = None
    streams: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    @property
    def total_ns(self) -> int:
        """Of all families, and of what belongs to none."""
        return sum(row.total_ns for row in self.families.values())

    @property
    def attributed_share(self) -> float | None:
        """The share of :attr:`total_ns` that belongs to a family; None without any."""
        lost = self.families[UNATTRIBUTED].total_ns if UNATTRIBUTED in self.families else 0
        return 1 - lost / self.total_ns if self.total_ns else None

    @property
    def dominant(self) -> str | None:
        """The family with the most time; None without any."""
        known = {family: row.total_ns for family, row in self.families.items() if family != UNATTRIBUTED}
        return max(known, key=lambda family: known[family]) if any(known.values()) else None

    @property
    def host_bound_share(self) -> float | None:
        """The share of the window in which the device did nothing, as the host had given it nothing to do."""
        return 1 - self.busy_ns / self.window_ns if self.busy_ns is not None and self.window_ns else None

    def add(self, place: Place, column: str, name: str, ns: int, calls: int = 1) -> None:
        """Add to the rows of a place."""
        label = place.label or UNATTRIBUTED
        self.families[label.partition("/")[0]].add(column, name, ns, calls)
        self.layers[label].add(column, name, ns, calls)

    def add_collective(self, name: str, ns: int, hidden_ns: int) -> None:
        """Add one call of a collective."""
        entry = self.collectives[name]
        entry.calls += 1
        entry.ns += ns
        entry.exposed_ns += ns - hidden_ns

    def record(self) -> dict[str, Any]:
        """All of it, JSON-ready; rows with the most time first."""
        return {
            "unit": self.unit,
            "total_ns": self.total_ns,
            "attributed_share": self.attributed_share,
            "dominant": self.dominant,
            "window_ns": self.window_ns,
            "busy_ns": self.busy_ns,
            "host_bound_share": self.host_bound_share,
            "no_operator_ns": self.no_operator_ns,
            "communication_ns": self.communication_ns,
            "hidden_ns": self.hidden_ns,
            "hidden_share": self.hidden_ns / self.communication_ns if self.communication_ns else None,
            "families": {name: self._row(row, top=True) for name, row in _sorted(self.families)},
            "layers": {name: self._row(row, top=False) for name, row in _sorted(self.layers)},
            "collectives": {name: vars(one) for name, one in sorted(self.collectives.items())},
            "streams": {
                str(stream): {"compute_ns": compute, "communication_ns": moved}
                for stream, (compute, moved) in sorted(self.streams.items())
            },
        }

    def _row(self, row: Row, *, top: bool) -> dict[str, Any]:
        record: dict[str, Any] = {
            "total_ns": row.total_ns,
            "share": row.total_ns / self.total_ns if self.total_ns else None,
            **{f"{column}_ns": ns for column, ns in row.ns.items()},
            "kernels": row.kernels,
            "host_ns": row.host_ns,
        }
        return record | {"top": row.top()} if top else record


def _sorted(rows: Mapping[str, Row]) -> list[tuple[str, Row]]:
    return sorted(rows.items(), key=lambda item: (-item[1].total_ns, item[0]))


def table(trace: Trace) -> Table:
    """The table of a trace."""
    wanted = {kernel.operator for kernel in trace.kernels}
    found = attribute(trace, wanted=wanted)
    made = _of_device(trace.kernels, found) if trace.kernels else _of_host(trace.collectives, found)
    made.steps, made.graphs = len(found.steps), trace.graphs
    for (place, _), work in found.self_time.items():
        label = place.label or UNATTRIBUTED
        made.families[label.partition("/")[0]].host_ns += work.ns
        made.layers[label].host_ns += work.ns
    return made


def _of_host(collectives: Iterable[Collective], found: Attribution) -> Table:
    made = Table(HOST_TIME)
    for (place, name), work in found.self_time.items():
        made.add(place, place.phase, name, work.ns, work.calls)
    in_steps, busy = Cover(found.steps), Cover(found.busy)
    counted = [one for one in collectives if in_steps.holds(one.start_ns)]
    for one in counted:
        made.add_collective(one.name, one.end_ns - one.start_ns, busy.within(one.start_ns, one.end_ns))
    together = Cover((one.start_ns, one.end_ns) for one in counted)
    made.communication_ns, made.hidden_ns = together.total, together.common(busy)
    made.window_ns = in_steps.total
    made.no_operator_ns = in_steps.total - in_steps.common(Cover(found.operating))
    return made


def _of_device(kernels: Iterable[Kernel], found: Attribution) -> Table:
    made = Table(DEVICE_TIME)
    in_steps = Cover(found.steps)
    compute: list[tuple[int, int]] = []
    moving: list[tuple[Kernel, Place]] = []
    last = 0
    for kernel in kernels:
        place = _place(kernel, found)
        if place is None:
            if not in_steps.holds(kernel.start_ns):
                continue  # of what lies between steps
            place = Place(None, OTHER)
        last = max(last, kernel.end_ns)
        moves = is_communication(kernel.name)
        made.streams[kernel.stream][moves] += kernel.end_ns - kernel.start_ns
        if moves:
            moving.append((kernel, place))
            continue
        compute.append((kernel.start_ns, kernel.end_ns))
        made.add(place, place.phase, kernel.name, kernel.end_ns - kernel.start_ns)
    _add_communication(made, moving, Cover(compute))
    steps = sorted(found.steps)
    if steps:
        steps[-1] = (steps[-1][0], max(steps[-1][1], last))
    window = Cover(steps)
    made.window_ns = window.total
    made.busy_ns = window.common(Cover((kernel.start_ns, kernel.end_ns) for kernel in kernels))
    return made


def _place(kernel: Kernel, found: Attribution) -> Place | None:
    """Where a kernel was launched, or else where its operator belongs; None for neither."""
    place = found.launches.get(kernel.launch)
    if place is None or place.label is None:
        return found.operators.get(kernel.operator, place)
    return place


def _add_communication(made: Table, moving: Iterable[tuple[Kernel, Place]], compute: Cover) -> None:
    for kernel, place in moving:
        ns = kernel.end_ns - kernel.start_ns
        hidden = compute.within(kernel.start_ns, kernel.end_ns)
        name = collective(kernel.name)
        made.add(place, EXPOSED, name, ns - hidden)
        made.add(place, HIDDEN, name, hidden, calls=0)
        made.add_collective(name, ns, hidden)
    together = Cover((kernel.start_ns, kernel.end_ns) for kernel, _ in moving)
    made.communication_ns, made.hidden_ns = together.total, together.common(compute)
