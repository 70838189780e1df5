"""A profile as text to read. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megacpp_mcore.observe.profile.table import COLUMNS, DEVICE_TIME, EXPOSED, HIDDEN, UNATTRIBUTED

_HEADS = dict(
    zip(COLUMNS, ("forward", "recompute", "backward", "optimizer", "other", "comm exp.", "comm hid."), strict=True)
)
_WIDTH = 11
CPU = "CPU"
"""The ``device`` of a profile without a GPU, as :mod:`megacpp_mcore.observe.profile` writes it."""


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
    if not profile["communication_ns"]:
        return ["communication: none"]
    intervals = "streams" if profile["unit"] == DEVICE_TIME else "collectives and operators"
    lines = [
        f"communication: {profile['communication_ns'] / 1e6 / steps:.3f} ms a step, {profile['hidden_share']:.1%} hidden "
        f"behind computation (measured: intervals of {intervals})"
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
