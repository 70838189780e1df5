"""Where the time of some steps went: by family and phase, what was hidden, and how long the device waited for the host.

On a device the time is that of kernels, copies and fills; on a CPU it is the self time of operators. Beside it, how much of the
experts' work is work on tokens, and all of it as text to read. No torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from megacpp_mcore.observe.profile.trace import Cover, Kernel, Trace
from megacpp_mcore.observe.routing import Load, merged

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
        communication_ns, hidden_ns: the time in which kernels of communication ran, simultaneous ones counted once, and the
            part of it in which kernels computed, too.
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
    made = _of_device(trace.kernels, found) if trace.kernels else _of_host(found)
    made.steps, made.graphs = len(found.steps), trace.graphs
    for (place, _), work in found.self_time.items():
        label = place.label or UNATTRIBUTED
        made.families[label.partition("/")[0]].host_ns += work.ns
        made.layers[label].host_ns += work.ns
    return made


def _of_host(found: Attribution) -> Table:
    made = Table(HOST_TIME)
    for (place, name), work in found.self_time.items():
        made.add(place, place.phase, name, work.ns, work.calls)
    in_steps = Cover(found.steps)
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


# --- The experts' work ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How the rows of an expert are padded.

    Attributes:
        capacity_factor: rows of an expert over its even share, where every expert is padded to them; None: not padded so.
        quantized: whether the rows of an expert are padded to a multiple that quantised kernels need.
    """

    capacity_factor: float | None = None
    quantized: bool = False

    @classmethod
    def of_run(cls, config: Any, modules: Iterable[Any]) -> Padding:
        """What a model's configuration and its experts say (megatron-core 0.19, ``TransformerConfig``, ``TEGroupedMLP``)."""
        capacity = config.moe_expert_capacity_factor if config.moe_pad_expert_input_to_capacity else None
        quantized = bool(config.moe_router_padding_for_quantization)
        quantized = quantized or any(hasattr(module, "quantization_padding") for module in modules)
        return cls(capacity_factor=capacity, quantized=quantized)


def loads(record: Mapping[str, Any]) -> dict[str, Load]:
    """The loads by layer in a record of :class:`megacpp_mcore.observe.routing.Routing`."""
    return merged([record["layers"]])


def sparse_work(
    before: Mapping[str, Load], after: Mapping[str, Load], padding: Padding, *, micro_batches: int
) -> dict[str, Any]:
    """What the routers of one rank sent to the experts between two readings.

    Args:
        before, after: the running loads by layer.
        padding: of the experts' rows.
        micro_batches: how many there were.

    Returns:
        ``tokens`` that experts got, ``rows`` that they computed (None where it is not known), ``utilisation`` (the one over
        the other), ``rows_why``, ``dormant_share`` (experts of a layer that got no token, mean of the layers),
        ``dropped_share``, ``layers`` with the same by layer; or only ``why`` there is nothing.
    """
    window = {layer: load - before[layer] if layer in before else load for layer, load in after.items()}
    window = {layer: load for layer, load in window.items() if load.asked}
    if not window:
        return {"why": "the run has no routers, or their tokens are not counted"}
    layers = {layer: _layer_work(load, padding, micro_batches) for layer, load in window.items()}
    rows = [one["rows"] for one in layers.values()]
    tokens = sum(one["tokens"] for one in layers.values())
    known = None if None in rows else sum(rows)
    return {
        "tokens": tokens,
        "rows": known,
        "utilisation": tokens / known if known else None,
        "rows_why": _why_rows(padding),
        "dormant_share": sum(one["dormant_share"] for one in layers.values()) / len(layers),
        "dropped_share": sum(load.dropped for load in window.values()) / sum(load.asked for load in window.values()),
        "layers": layers,
    }


def _layer_work(load: Load, padding: Padding, micro_batches: int) -> dict[str, Any]:
    tokens, experts = sum(load.tokens), len(load.tokens)
    rows: int | None = tokens
    if padding.capacity_factor is not None:
        capacity = math.ceil(load.asked / micro_batches / experts * padding.capacity_factor)
        rows = capacity * experts * micro_batches
    elif padding.quantized:
        rows = None
    return {"tokens": tokens, "rows": rows, "dormant_share": load.tokens.count(0) / experts}


def _why_rows(padding: Padding) -> str:
    if padding.capacity_factor is not None:
        return f"every expert is padded to a capacity of {padding.capacity_factor:g} times its even share"
    if padding.quantized:
        return "padded for quantised kernels in every micro-batch, and only sums over micro-batches are counted"
    return "rows are not padded"


# --- As text -----------------------------------------------------------------------------------------------------------

_HEADS = dict(
    zip(COLUMNS, ("forward", "recompute", "backward", "optimizer", "other", "comm exp.", "comm hid."), strict=True)
)
_WIDTH = 11
CPU = "CPU"
"""The ``device`` of a profile without a GPU, as the profiler writes it."""


def page(profile: Mapping[str, Any]) -> str:
    """The profile that ``table.json`` holds, as lines of at most 120 columns but for names of kernels and operators.

    What only a GPU has (streams, tensor pipes, a device that waits for its host) is not spoken of where a CPU trained.
    """
    steps = max(1, profile["steps"][1] - profile["steps"][0] + 1)
    columns = _columns(profile)
    lines = [*_summary(profile), "", f"milliseconds a step, {profile['unit']}:", _head("family", columns)]
    lines += [_line(name, row, steps, columns) for name, row in profile["families"].items()]
    lines += _notes(profile, steps)
    lines += ["", _head("layer", columns)]
    lines += [_line(name, row, steps, columns) for name, row in profile["layers"].items()]
    for name, row in profile["families"].items():
        lines += ["", f"{name}: what takes longest (milliseconds a step, calls a step)"]
        lines += [f"  {one['ns'] / 1e6 / steps:9.3f} {one['calls'] / steps:9.1f}  {one['name']}" for one in row["top"]]
    return "\n".join(lines) + "\n"


def _summary(profile: Mapping[str, Any]) -> list[str]:
    first, last = profile["steps"]
    attributed, dominant = profile["attributed_share"], profile["dominant"]
    lines = [
        f"profile of steps {first} to {last}, rank {profile['rank']}, {profile['device']}: "
        f"{profile['phase']} ({profile['phase_why']})"
    ]
    if dominant is None:
        return [*lines, "nothing was recorded"]
    share = profile["families"][dominant]["share"]
    return [
        *lines,
        f"dominant: {dominant}, {share:.1%}; {attributed:.1%} of {_whose(profile)} time belongs to a family",
    ]


def _whose(profile: Mapping[str, Any]) -> str:
    """Of what the shares of the rows are."""
    return "the kernels'" if profile["unit"] == DEVICE_TIME else "the operators'"


def _columns(profile: Mapping[str, Any]) -> list[str]:
    """Collectives are kernels on a device; of a host's time they are no part, and have lines of their own."""
    of_kernels = () if profile["unit"] == DEVICE_TIME else (EXPOSED, HIDDEN)
    return [column for column in COLUMNS if column not in of_kernels]


def _head(what: str, columns: Sequence[str]) -> str:
    return f"{what:<14}{'total':>{_WIDTH}}{'share':>8}" + "".join(f"{_HEADS[column]:>{_WIDTH}}" for column in columns)


def _line(name: str, row: Mapping[str, Any], steps: int, columns: Sequence[str]) -> str:
    share = "" if row["share"] is None else f"{row['share']:.1%}"
    cells = "".join(f"{row[f'{column}_ns'] / 1e6 / steps:>{_WIDTH}.3f}" for column in columns)
    return f"{name:<14}{row['total_ns'] / 1e6 / steps:>{_WIDTH}.3f}{share:>8}{cells}"


def _notes(profile: Mapping[str, Any], steps: int) -> list[str]:
    notes = ["", _step(profile, steps), *_no_operator(profile, steps), *_communication(profile, steps)]
    notes.append(f"sparse work: {_sparse(profile['sparse_work'])}")
    if not _is_cpu(profile):
        notes.append(f"tensor pipes: {profile['tensor_pipes']}")
    if UNATTRIBUTED in profile["families"]:
        notes.append(f"{UNATTRIBUTED}: what lies in no range of the model, the optimizer, or the gradients' reduction")
    return notes


def _is_cpu(profile: Mapping[str, Any]) -> bool:
    return bool(profile["device"] == CPU)


def _step(profile: Mapping[str, Any], steps: int) -> str:
    step = f"step: {profile['window_ns'] / 1e6 / steps:.3f} ms"
    if _is_cpu(profile):
        return step  # the host waits for nothing but itself
    bound = profile["host_bound_share"]
    known = "not measured: no kernel was recorded" if bound is None else f"{bound:.1%} (the device had nothing to do)"
    return f"{step}; host-bound share: {known}"


def _no_operator(profile: Mapping[str, Any], steps: int) -> list[str]:
    """What the rows of a host lack of the step."""
    outside, window = profile["no_operator_ns"], profile["window_ns"]
    if outside is None or not window:
        return []
    return [
        f"not in any operator (Python, waiting): {outside / 1e6 / steps:.3f} ms, {outside / window:.1%} of the step"
    ]


def _communication(profile: Mapping[str, Any], steps: int) -> list[str]:
    if profile["unit"] != DEVICE_TIME:
        return []  # threads of the host move data beside the operators
    if not profile["communication_ns"]:
        return ["communication: none"]
    lines = [
        f"communication: {profile['communication_ns'] / 1e6 / steps:.3f} ms a step, {profile['hidden_share']:.1%} hidden "
        "behind computation (measured: intervals of streams)"
    ]
    for name, one in profile["collectives"].items():
        lines.append(
            f"  {name}: {one['calls'] / steps:.1f} calls, {one['ns'] / 1e6 / steps:.3f} ms, "
            f"{one['exposed_ns'] / 1e6 / steps:.3f} ms exposed"
        )
    return lines


def _sparse(work: Mapping[str, Any]) -> str:
    if "why" in work:
        return f"not measured: {work['why']}"
    use = "unknown" if work["utilisation"] is None else f"{work['utilisation']:.1%}"
    return (
        f"{use} of the experts' rows were tokens ({work['rows_why']}), {work['dormant_share']:.1%} of the experts of a layer "
        f"had no token, {work['dropped_share']:.1%} of the assignments were dropped (tokens of this rank)"
    )
