"""A readable table of every op's candidates: what each supports, and whether this machine can run it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megacpp_mcore.backends.candidate import Candidate
from megacpp_mcore.backends.dispatcher import CHOSEN_ELSEWHERE
from megacpp_mcore.backends.support import DTYPES

_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3"}


def rows(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """Return a JSON-ready record per candidate: what it is, what it supports, and whether it can run here (by probing it)."""
    records = []
    for candidate in candidates:
        present = candidate.present()
        records.append(
            {
                "op": candidate.op,
                "name": candidate.name,
                "speed": candidate.speed.name.lower(),
                "requires": list(candidate.requires),
                **candidate.support.as_record(),
                "present": present.ok,
                "reason": present.reason or candidate.foreign({"device": "cuda"}) or "",
            }
        )
    return records


def text(candidates: Iterable[Candidate]) -> str:
    """Format the records as lines in columns, then the ops that the dispatcher does not choose for."""
    head = ("op", "backend", "class", "devices", "dtypes", "dims", "limits", "available")
    lines = [head, *(_cells(row) for row in rows(candidates))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*body, "", *(f"{op} is chosen by {chooser}" for op, chooser in CHOSEN_ELSEWHERE.items())])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    missing = [name for name in ("packed", "deterministic", "capturable") if not row[name]]
    dtypes = "all" if tuple(row["dtypes"]) == DTYPES else ", ".join(_SHORT[name] for name in row["dtypes"])
    return (
        row["op"],
        row["name"],
        row["speed"],
        ", ".join([*row["devices"], *row["archs"]]),
        dtypes,
        ", ".join(f"{name} {dim}" for name, dim in row["dims"].items()) or "any",
        ", ".join(missing) or "-",
        f"{'by name only' if row['present'] else 'no'}: {row['reason']}" if row["reason"] else "yes",
    )
