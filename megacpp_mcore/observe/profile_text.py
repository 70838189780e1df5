"""A profile as text to read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacpp_mcore.observe.profile_table import COLUMNS, UNATTRIBUTED

_HEADS = ("forward", "recompute", "backward", "optimizer", "other", "comm exp.", "comm hid.")
_WIDTH = 11


def page(profile: Mapping[str, Any]) -> str:
    """The profile that ``table.json`` holds, as lines of at most 120 columns but for names of kernels."""
    steps = max(1, profile["steps"][1] - profile["steps"][0] + 1)
    lines = [*_summary(profile), "", f"milliseconds a step, {profile['unit']}:", _head("family")]
    lines += [_line(name, row, steps) for name, row in profile["families"].items()]
    lines += _notes(profile, steps)
    lines += ["", _head("layer")]
    lines += [_line(name, row, steps) for name, row in profile["layers"].items()]
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
    return [*lines, f"dominant: {dominant}, {share:.1%}; {attributed:.1%} of the time belongs to a family"]


def _head(what: str) -> str:
    return f"{what:<14}{'total':>{_WIDTH}}{'share':>8}" + "".join(f"{head:>{_WIDTH}}" for head in _HEADS)


def _line(name: str, row: Mapping[str, Any], steps: int) -> str:
    share = "" if row["share"] is None else f"{row['share']:.1%}"
    columns = "".join(f"{row[f'{column}_ns'] / 1e6 / steps:>{_WIDTH}.3f}" for column in COLUMNS)
    return f"{name:<14}{row['total_ns'] / 1e6 / steps:>{_WIDTH}.3f}{share:>8}{columns}"


def _notes(profile: Mapping[str, Any], steps: int) -> list[str]:
    notes = [""]
    bound = profile["host_bound_share"]
    window = profile["window_ns"] / 1e6 / steps
    notes.append(
        f"step: {window:.3f} ms; host-bound share: "
        + ("not measured: no device" if bound is None else f"{bound:.1%} (the device had nothing to do)")
    )
    if profile["communication_ns"]:
        notes.append(
            f"communication: {profile['communication_ns'] / 1e6 / steps:.3f} ms a step, {profile['hidden_share']:.1%} hidden "
            "behind computation (measured: intervals of streams)"
        )
        for name, one in profile["collectives"].items():
            notes.append(
                f"  {name}: {one['calls'] / steps:.1f} calls, {one['ns'] / 1e6 / steps:.3f} ms, "
                f"{one['exposed_ns'] / 1e6 / steps:.3f} ms exposed"
            )
    else:
        notes.append("communication: none")
    notes.append(f"sparse work: {_sparse(profile['sparse_work'])}")
    notes.append(f"tensor pipes: {profile['tensor_pipes']}")
    if UNATTRIBUTED in profile["families"]:
        notes.append(f"{UNATTRIBUTED}: what lies in no range of the model, the optimizer, or the gradients' reduction")
    return notes


def _sparse(work: Mapping[str, Any]) -> str:
    if "why" in work:
        return f"not measured: {work['why']}"
    use = "unknown" if work["utilisation"] is None else f"{work['utilisation']:.1%}"
    return (
        f"{use} of the experts' rows were tokens ({work['rows_why']}), {work['dormant_share']:.1%} of the experts of a layer "
        f"had no token, {work['dropped_share']:.1%} of the assignments were dropped (tokens of this rank)"
    )
