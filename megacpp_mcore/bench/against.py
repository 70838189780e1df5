"""New rows against those of a committed table: what got slower, and what may not be compared; no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.bench.registry import LAYER
from megacpp_mcore.bench.table import COLUMNS, CONDITIONS, TIMED
from megacpp_mcore.errors import BenchmarkError

Row = Mapping[str, Any]

SAME_RUN = ("benchmark", "shape", "dtype", "device")
"""What a run has measured: of the file's rows that agree in these, each has to have its counterpart in the run."""

FIGURES: Mapping[str, Callable[[str], float]] = {"ms": float, "peak_bytes": int}
"""What is compared, and what each is."""


@dataclass
class Comparison:
    """What became of every new row that was timed.

    Attributes:
        compared: how many rows were.
        slower: one line for each that takes more time or memory than the tolerance allows, and for each row of the file that
            lost its time, or has none of its name in this run any more.
        lines: one line for everything else: faster, equal, new, not comparable, no baseline.
    """

    compared: int = 0
    slower: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table of benchmarks.

    Raises:
        BenchmarkError: the file cannot be read, is not such a table, or is damaged: it ends within a line, or a row has more
            or fewer cells than columns or a figure that is none.
    """
    try:
        with path.open(newline="", encoding="utf-8") as source:
            text = source.read()
        header, *lines = list(csv.reader(io.StringIO(text, newline=""), strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchmarkError(
            f"{path} cannot be read ({error}); --against takes a table of `bench run --output`"
        ) from error
    if not text:
        raise BenchmarkError(f"{path} is empty; --against takes a table of `bench run --output`")
    if header != list(COLUMNS):
        lacking = [name for name in COLUMNS if name not in header]
        raise BenchmarkError(
            f"{path} is no table of `bench run`: it lacks {', '.join(lacking[:5]) or 'nothing, but has other columns too'}; "
            "name one that `bench run --output` wrote"
        )
    if not text.endswith("\n"):
        raise BenchmarkError(f"{path} ends within a line: a part of it is missing; name a whole table")
    return [_row(path, number, cells) for number, cells in enumerate(lines, 1)]


def _row(path: Path, number: int, cells: list[str]) -> dict[str, str]:
    """The cells of row ``number`` by column.

    Raises:
        BenchmarkError: there are more or fewer of them than columns, or a figure is none.
    """
    if len(cells) != len(COLUMNS):
        raise BenchmarkError(
            f"row {number} of {path} has {len(cells)} cells; expected {len(COLUMNS)}: the table is damaged; name a whole one"
        )
    row = dict(zip(COLUMNS, cells, strict=True))
    for name, number_of in FIGURES.items():
        if row[name] and not _is_positive(number_of, row[name]):
            raise BenchmarkError(f"row {number} of {path} has {row[name]!r} for {name}; expected a number above 0")
    return row


def _is_positive(number_of: Callable[[str], float], text: str) -> bool:
    try:
        return 0 < number_of(text) < math.inf
    except ValueError:
        return False


def compare(before: Sequence[Row], now: Sequence[Row], tolerance: float) -> Comparison:
    """Compare each new row with the last one of the same benchmark, work, variant and conditions.

    Our layer is one variant whatever backends it found: one that fell back is compared with what it was. A row of the file
    whose parity failed or is missing is no baseline.

    Args:
        before: rows of the committed table.
        now: rows of this run.
        tolerance: the share by which time or peak memory may be more.

    Raises:
        BenchmarkError: not one row can be compared; the message says what differs.
    """
    timed = [old for old in before if old["ms"] != ""]
    before = [old for old in timed if old["parity"] in TIMED]
    found, reasons = Comparison(), _no_baselines(timed, now)
    for row in now:
        same_work = [old for old in before if _key(old) == _key(row)]
        alike = [old for old in same_work if not _differences(old, row)]
        name = " / ".join((row["benchmark"], row["work"], row["variant"]))
        if alike:
            found.compared += 1
            fallen = "" if alike[-1]["variant"] == row["variant"] else f", which was {alike[-1]['variant']}"
            _judge(found, name + fallen, alike[-1], row, tolerance)
        elif same_work:
            reasons.append(f"{name}: not compared, {'; '.join(_differences(same_work[-1], row))}")
        elif row["ms"] != "":
            found.lines.append(f"{name}: new, the file has no baseline of it")
    found.lines += reasons
    found.slower += _lost(before, now)
    if not found.compared and not found.slower:
        why = "\n  ".join(reasons[:5]) or "the file has no baseline of any of these benchmarks"
        raise BenchmarkError(f"no row of this run may be compared with the file:\n  {why}")
    return found


def _key(row: Row) -> tuple[str, str, str]:
    """Benchmark, work and variant; of a layer without its bracket, which holds the backends that it found."""
    variant = str(row["variant"])
    name = variant.partition(" (")[0] if row["kind"] == LAYER else variant
    return (str(row["benchmark"]), str(row["work"]), name)


def _no_baselines(timed: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """A line for each row of the file, of a benchmark that ran now, whose time is of what did not compute the right thing."""
    ran = {_what(row) for row in now}
    return [
        f"{' / '.join(_key(old))}: {old['ms']} ms in the file is no baseline, its parity is {old['parity'] or 'not given'}"
        for old in timed
        if old["parity"] not in TIMED and _what(old) in ran
    ]


def _lost(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """A line for each baseline whose benchmark ran now, but not with this work and variant."""
    ran = {_what(row) for row in now}
    have = {(*_what(row), *_key(row)) for row in now}
    last = {(*_what(old), *_key(old)): old for old in before if _what(old) in ran}
    return [
        f"{' / '.join(_key(old))}: was {old['ms']} ms, and has no row in this run"
        for key, old in last.items()
        if key not in have
    ]


def _what(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SAME_RUN)


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
