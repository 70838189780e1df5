"""The ranks of a profile side by side, and the tables of rank 0 and of the slowest, from the files that they left. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.profile import table
from megacpp_mcore.observe.profile.profiler import FOLDER


def computing_ns(profile: Mapping[str, Any]) -> int:
    """The time in which a rank computed; the others wait for the one that does longest."""
    if profile["busy_ns"] is None:  # of a host
        return int(profile["total_ns"])
    return int(profile["busy_ns"] - profile["communication_ns"] + profile["hidden_ns"])


def pages(run: Path) -> list[str]:
    """A page for every profile of a run.

    Raises:
        DataError: there is none, or one cannot be read.
    """
    windows = sorted(file.parent for file in (run / FOLDER).glob("*/table.json"))
    if not windows:
        raise DataError(f"{run / FOLDER} holds no profile of rank 0; launch with --profile FIRST-LAST")
    return [
        _page([_read(file) for file in (folder / "table.json", *sorted(folder.glob("rank_*/table.json")))])
        for folder in windows
    ]


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}); expected the table of a profile") from error
    return found


def _page(profiles: Sequence[Mapping[str, Any]]) -> str:
    slowest = max(profiles, key=computing_ns)
    kinds = sorted({name for profile in profiles for name in profile["collectives"]})
    first, last = profiles[0]["steps"]
    heads = ["step", "computing", "bubble", *kinds]
    lines = [
        f"steps {first} to {last}, milliseconds a step; communication as far as it is exposed, waiting included:",
        f"{'rank':<16}" + "".join(f"{head:>15}" for head in heads),
    ]
    for profile in profiles:
        exposed = [profile["collectives"].get(kind, {"exposed_ns": 0})["exposed_ns"] for kind in kinds]
        cells = [profile["window_ns"], computing_ns(profile), profile["bubble_ns"], *exposed]
        mark = ", slowest" if profile is slowest and len(profiles) > 1 else ""
        row = "".join(f"{ns / 1e6 / (last - first + 1):>15.3f}" for ns in cells)
        lines.append(f"{profile['rank']}{mark}".ljust(16) + row)
    shown = [profiles[0]] if slowest is profiles[0] else [profiles[0], slowest]
    return "\n".join([*lines, "", *map(table.page, shown)])
