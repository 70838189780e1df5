"""Table of a profile: time by family and phase, communication hidden by compute, and how long the device waited for the host.

On a device the time is that of kernels, copies and fills; on a CPU it is the self time of operators. No torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.profile import trace as traces
from megacpp_mcore.observe.profile.trace import Attribution, Kernel, Place, Trace
from megacpp_mcore.util.intervals import Cover, Interval

FOLDER = "profile"
"""Folder in the run's: rank 0's table is ``profile/10-14/table.json``, another's ``profile/10-14/rank_00003/table.json``."""
EXPOSED, HIDDEN = "communication_exposed", "communication_hidden"
COLUMNS = (traces.FORWARD, traces.RECOMPUTE, traces.BACKWARD, traces.OPTIMIZER, traces.OTHER, EXPOSED, HIDDEN)
UNATTRIBUTED = "unattributed"
DEVICE_TIME, HOST_TIME = "device time of kernels", "self CPU time of operators"
TOP = 10
"""Number of kernels named for each family."""
SEND_RECEIVE, ALL_TO_ALL = "SendRecv", "AllToAll"
PIPELINE = "pipeline"
"""The range of communication between stages (:data:`megacpp_mcore.observe.profile.trace.PARTS`)."""
CPU = "CPU"
"""The ``device`` of a profile without a GPU."""

_COMMUNICATION = re.compile(r"nccl|nvshmem|deep_ep|Memcpy PtoP", re.IGNORECASE)
_NCCL = re.compile(r"nccl(?:Symk)?(?:Dev)?Kernel_?(?:Generic_)?([A-Za-z]+)")


def is_communication(kernel: str) -> bool:
    """Return whether a kernel of this name moves data between devices (NCCL, NVSHMEM, DeepEP, copies from peer to peer)."""
    return _COMMUNICATION.search(kernel) is not None


def collective(kernel: str, label: str | None = None) -> str:
    """Return the collective that a communication kernel performs, as NCCL names it (``AllReduce``), or the kernel's own name.

    NCCL's send-receive kernel also performs all-to-alls: it counts as one under any ``label`` but the pipeline's.
    """
    match = _NCCL.search(kernel)
    name = match[1] if match else kernel
    return ALL_TO_ALL if name == SEND_RECEIVE and label not in (None, PIPELINE) else name


@dataclass
class _Row:
    """The time of one layer, or of a family: nanoseconds by column, and nanoseconds and calls by kernel or operator."""

    ns: Counter[str] = field(default_factory=Counter)
    ns_by_name: Counter[str] = field(default_factory=Counter)
    calls_by_name: Counter[str] = field(default_factory=Counter)
    host_ns: int = 0

    def add(self, column: str, name: str, ns: int, calls: int = 1) -> None:
        self.ns[column] += ns
        self.ns_by_name[name] += ns
        self.calls_by_name[name] += calls

    def __iadd__(self, other: _Row) -> _Row:
        self.ns.update(other.ns)
        self.ns_by_name.update(other.ns_by_name)
        self.calls_by_name.update(other.calls_by_name)
        self.host_ns += other.host_ns
        return self

    def record(self, total_ns: int) -> dict[str, Any]:
        record = {"total_ns": self.ns.total(), "share": self.ns.total() / total_ns if total_ns else None}
        record |= {f"{column}_ns": self.ns[column] for column in COLUMNS}
        return record | {"kernels": self.calls_by_name.total(), "host_ns": self.host_ns}

    def top(self) -> list[dict[str, Any]]:
        longest = sorted(self.ns_by_name.items(), key=lambda item: (-item[1], item[0]))[:TOP]
        return [{"name": name, "ns": ns, "calls": self.calls_by_name[name]} for name, ns in longest]


_Rows = defaultdict[str, _Row]
"""A row for every label: a layer (``A/3``), or a part without a number (``head``)."""


def _record(layers: _Rows) -> dict[str, Any]:
    """Return the rows as JSON; a family's row is the sum of its layers'."""
    families, parts = _Rows(_Row), _Rows(_Row)
    for label, row in list(layers.items()):
        family, *inner = label.split("/")
        families[family] += row
        if len(inner) > 1:  # a part of a layer, which belongs to it
            parts[f"{family} {inner[1]}"] += row
            layers["/".join((family, inner[0]))] += layers.pop(label)
    total_ns = sum(row.ns.total() for row in families.values())
    by_family, by_part, by_layer = (
        sorted(rows.items(), key=lambda item: (-item[1].ns.total(), item[0])) for rows in (families, parts, layers)
    )
    ranked = [name for name, row in by_family if name != UNATTRIBUTED and row.ns.total()]
    lost_ns = families[UNATTRIBUTED].ns.total() if UNATTRIBUTED in families else 0
    return {
        "total_ns": total_ns,
        "attributed_share": 1 - lost_ns / total_ns if total_ns else None,
        "dominant": ranked[0] if ranked else None,
        "families": {name: row.record(total_ns) | {"top": row.top()} for name, row in by_family},
        "parts": {name: row.record(total_ns) for name, row in by_part},
        "layers": {name: row.record(total_ns) for name, row in by_layer},
    }


def table(trace: Trace) -> dict[str, Any]:
    """Return the table of a trace, JSON-ready; rows with the most time first.

    Returns:
        ``unit`` (:data:`DEVICE_TIME` or :data:`HOST_TIME`); ``families`` and ``layers``, each with its nanoseconds by
        column of :data:`COLUMNS`, and ``host_ns``, the self time of its operators; ``total_ns`` of all families and the
        ``attributed_share`` of it; ``dominant``, the family with the most time; ``window_ns``, the steps' time from begin to
        end, the last one extended to the end of its last kernel. For a device: ``busy_ns``, the part of the window in which
        it was busy, and ``host_bound_share``, the share in which it was not; ``communication_ns``, in which communication
        kernels ran, overlapping ones counted once, ``hidden_ns``, the part of it in which others computed, ``hidden_share``,
        ``collectives`` by name, and ``bubble_ns``, in which a pipeline stage only waited for another. For a host:
        ``no_operator_ns``, the part of the window outside of operators: Python, and waiting. Unknown values are None.
    """
    attribution, rows = Attribution(trace), _Rows(_Row)
    for (place, name), (ns, calls) in attribution.self_time.items():
        rows[place.label or UNATTRIBUTED].host_ns += ns
        if not trace.kernels:
            rows[place.label or UNATTRIBUTED].add(place.phase, name, ns, calls)
    if trace.kernels:
        times = _of_device(trace.kernels, attribution, rows)
    else:
        window_ns, in_operators_ns = Cover(attribution.steps).total, sum(ns for ns, _ in attribution.self_time.values())
        times = _times(HOST_TIME, window_ns) | {"no_operator_ns": max(0, window_ns - in_operators_ns)}
    return times | _record(rows)


def _times(unit: str, window_ns: int) -> dict[str, Any]:
    none = dict.fromkeys(("communication_ns", "hidden_ns", "bubble_ns"), 0)
    unknown = dict.fromkeys(("busy_ns", "host_bound_share", "no_operator_ns", "hidden_share"))
    return {"unit": unit, "window_ns": window_ns, **none, **unknown, "collectives": {}}


def _of_device(kernels: Sequence[Kernel], attribution: Attribution, rows: _Rows) -> dict[str, Any]:
    in_steps = Cover(attribution.steps)
    compute: list[Interval] = []
    moving: list[tuple[Kernel, Place]] = []
    for kernel in kernels:
        place = attribution.launches.get(kernel.launch)  # the place of its launch, or else of its operator
        if place is None or place.label is None:
            place = attribution.operators.get(kernel.operator, place)
        if place is None:
            if not in_steps.holds(kernel.start_ns):
                continue  # it ran between steps
            place = Place(None, traces.OTHER)
        if is_communication(kernel.name):
            moving.append((kernel, place))
        else:
            compute.append((kernel.start_ns, kernel.end_ns))
            rows[place.label or UNATTRIBUTED].add(place.phase, kernel.name, kernel.end_ns - kernel.start_ns)
    computing = Cover(compute)
    collectives: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"calls": 0, "ns": 0, "exposed_ns": 0})
    for kernel, place in moving:
        ns, name = kernel.end_ns - kernel.start_ns, collective(kernel.name, place.label)
        hidden_ns = computing.within(kernel.start_ns, kernel.end_ns)
        rows[place.label or UNATTRIBUTED].add(EXPOSED, name, ns - hidden_ns)
        rows[place.label or UNATTRIBUTED].add(HIDDEN, name, hidden_ns, calls=0)
        for figure, more in (("calls", 1), ("ns", ns), ("exposed_ns", ns - hidden_ns)):
            collectives[name][figure] += more
    together = [(kernel.start_ns, kernel.end_ns) for kernel, _ in moving]
    communication = Cover(together)
    between_stages = Cover((kernel.start_ns, kernel.end_ns) for kernel, place in moving if place.label == PIPELINE)
    steps = sorted(attribution.steps)
    if steps:
        steps[-1] = (steps[-1][0], max(end for _, end in (*compute, *together, steps[-1])))
    window = Cover(steps)
    busy_ns = window.common(Cover((kernel.start_ns, kernel.end_ns) for kernel in kernels))
    hidden_ns = communication.common(computing)
    return _times(DEVICE_TIME, window.total) | {
        "busy_ns": busy_ns,
        "host_bound_share": 1 - busy_ns / window.total if window.total else None,
        "communication_ns": communication.total,
        "hidden_ns": hidden_ns,
        "hidden_share": hidden_ns / communication.total if communication.total else None,
        "bubble_ns": between_stages.total - between_stages.common(computing),
        "collectives": dict(sorted(collectives.items())),
    }


# --- As text -----------------------------------------------------------------------------------------------------------

_HEADS = {column: column for column in COLUMNS} | {EXPOSED: "comm exp.", HIDDEN: "comm hid."}
_WIDTH = 11


def page(profile: Mapping[str, Any]) -> str:
    """Return the profile that ``table.json`` holds, as lines of at most 120 columns except for names of kernels and operators.

    What only a GPU has (streams, a device that waits for its host) is left out where a CPU trained.
    """
    first, last = profile["steps"]
    steps, on_device = last - first + 1, profile["unit"] == DEVICE_TIME
    # Collectives are kernels on a device; a host's time does not include them.
    columns = [column for column in COLUMNS if on_device or column not in (EXPOSED, HIDDEN)]

    def a_step(ns: int) -> str:
        return f"{ns / 1e6 / steps:.3f}"

    def rows(what: str) -> Iterator[str]:
        heads = "".join(f"{_HEADS[column]:>{_WIDTH}}" for column in columns)
        yield f"{what:<14}{'total':>{_WIDTH}}{'share':>8}{heads}"
        for name, row in profile.get({"family": "families", "layer": "layers", "part": "parts"}[what], {}).items():
            cells = "".join(f"{a_step(row[f'{column}_ns']):>{_WIDTH}}" for column in columns)
            share = "" if row["share"] is None else f"{row['share']:.1%}"
            yield f"{name:<14}{a_step(row['total_ns']):>{_WIDTH}}{share:>8}{cells}"

    lines = [
        f"profile of steps {first} to {last}, rank {profile['rank']}, {profile['device']}: "
        f"{profile['phase']} ({profile['phase_why']})"
    ]
    words = "nothing was recorded"
    if (dominant := profile["dominant"]) is not None:
        share, owners = profile["families"][dominant]["share"], "the kernels'" if on_device else "the operators'"
        words = f"dominant: {dominant}, {share:.1%}; {profile['attributed_share']:.1%} of {owners} time belongs to a family"
    lines.append(words)
    lines += ["", f"milliseconds a step, {profile['unit']}:", *rows("family"), ""]
    host_bound, bound = "not measured: no kernel was recorded", profile["host_bound_share"]
    host_bound = host_bound if bound is None else f"{bound:.1%} (the device had nothing to do)"
    words = "" if profile["device"] == CPU else f"; host-bound share: {host_bound}"
    lines.append(f"step: {a_step(profile['window_ns'])} ms{words}")
    if (outside := profile["no_operator_ns"]) is not None and profile["window_ns"]:
        share = outside / profile["window_ns"]
        lines.append(f"not in any operator (Python, waiting): {a_step(outside)} ms, {share:.1%} of the step")
    if profile["communication_ns"]:
        lines.append(
            f"communication: {a_step(profile['communication_ns'])} ms a step, {profile['hidden_share']:.1%} hidden behind "
            "computation (measured: intervals of streams)"
        )
    elif on_device:
        lines.append("communication: none")
    lines += [
        f"  {name}: {totals['calls'] / steps:.1f} calls, {a_step(totals['ns'])} ms, {a_step(totals['exposed_ns'])} ms exposed"
        for name, totals in profile["collectives"].items()
    ]
    if profile["bubble_ns"]:
        share = profile["bubble_ns"] / profile["window_ns"]
        lines.append(f"pipeline bubble (waiting for another stage): {a_step(profile['bubble_ns'])} ms, {share:.1%} of the step")
    if UNATTRIBUTED in profile["families"]:
        lines.append(f"{UNATTRIBUTED}: work outside the ranges of the model, the optimizer and gradient reduction")
    lines += ["", *rows("part")] if profile.get("parts") else []
    lines += ["", *rows("layer")]
    for name, row in profile["families"].items():
        lines += ["", f"{name}: what takes longest (milliseconds a step, calls a step)"]
        lines += [f"  {a_step(top['ns']):>9} {top['calls'] / steps:9.1f}  {top['name']}" for top in row["top"]]
    return "\n".join(lines) + "\n"


# --- Of a run's folder --------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Any]:
    """Return the profile in a ``table.json``.

    Raises:
        DataError: it cannot be read.
    """
    return events.load(file, "the table of a profile", "delete it, or profile again")


def pages(run: Path) -> list[str]:
    """Return the page of every profile of a run's rank 0.

    Raises:
        DataError: there is no profile, or one cannot be read.
    """
    files = sorted((run / FOLDER).glob("*/table.json"))
    if not files:
        raise DataError(f"{run / FOLDER} holds no profile of rank 0; launch with --profile FIRST-LAST")
    return [page(read(file)) for file in files]
