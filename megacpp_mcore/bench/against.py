"""New rows against those of a committed table: what got slower, and what may not be compared; no torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.table import COLUMNS, CONDITIONS
from megacpp_mcore.errors import BenchmarkError

Row = Mapping[str, Any]


@dataclass
class Comparison:
    """What became of every new row that was timed.

    Attributes:
        compared: how many rows were.
        slower: one line for each that takes more time or memory than the tolerance allows, or lost its time.
        lines: one line for everything else: faster, equal, new, not comparable.
    """

    compared: int = 0
    slower: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table of benchmarks.

    Raises:
        BenchmarkError: the file cannot be read, or is not such a table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as source:
            reader = csv.DictReader(source)
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(
            f"{path} cannot be read ({error}); --against takes a table of `bench run --output`"
        ) from error
    if reader.fieldnames is None or list(reader.fieldnames) != list(COLUMNS):
        lacking = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        raise BenchmarkError(
            f"{path} is no table of `bench run`: it lacks {', '.join(lacking[:5]) or 'nothing, but has other columns too'}; "
            "name one that `bench run --output` wrote"
        )
    return rows


def compare(before: Sequence[Row], now: Sequence[Row], tolerance: float) -> Comparison:
    """Compare each new row with the last one of the same benchmark, work, variant and conditions.

    Args:
        before: rows of the committed table.
        now: rows of this run.
        tolerance: the share by which time or peak memory may be more.

    Raises:
        BenchmarkError: not one row can be compared; the message says what differs.
    """
    found, reasons = Comparison(), []
    for row in now:
        same_work = [old for old in before if _key(old) == _key(row) and old["ms"] != ""]
        alike = [old for old in same_work if not _differences(old, row)]
        name = " / ".join(_key(row))
        if alike:
            found.compared += 1
            _judge(found, name, alike[-1], row, tolerance)
        elif same_work:
            reasons.append(f"{name}: not compared, {'; '.join(_differences(same_work[-1], row))}")
        elif row["ms"] != "":
            found.lines.append(f"{name}: new, the file has no time of it")
    found.lines += reasons
    if not found.compared:
        why = "\n  ".join(reasons[:5]) or "the file has no time of any of these benchmarks"
        raise BenchmarkError(f"no row of this run may be compared with the file:\n  {why}")
    return found


def _key(row: Row) -> tuple[str, str, str]:
    return (str(row["benchmark"]), str(row["work"]), str(row["variant"]))


def _differences(old: Row, row: Row) -> list[str]:
    return [
        f"{name} is {row[name]} and was {old[name]}" for name in CONDITIONS if str(old[name]) != str(row[name])
    ]  # fmt: skip


def _judge(found: Comparison, name: str, old: Row, row: Row, tolerance: float) -> None:
    if row["ms"] == "":
        found.slower.append(f"{name}: was {old['ms']} ms, and has no time now ({row['note'] or row['parity']})")
        return
    change = float(row["ms"]) / float(old["ms"])
    figures = f"{float(old['ms']):.4g} → {float(row['ms']):.4g} ms ({change:.2f}x)"
    if change > 1 + tolerance:
        found.slower.append(f"{name}: slower, {figures}")
    else:
        found.lines.append(f"{name}: {'faster' if change < 1 / (1 + tolerance) else 'as before'}, {figures}")
    if old["peak_bytes"] != "" and row["peak_bytes"] != "":
        before, now = int(old["peak_bytes"]), int(row["peak_bytes"])
        if now > before * (1 + tolerance):
            found.slower.append(f"{name}: more memory, {before / 1e6:.1f} → {now / 1e6:.1f} MB")
