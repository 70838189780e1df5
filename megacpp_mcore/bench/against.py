"""Compares new rows with those of a committed table: what got slower, and what may not be compared; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore.bench import table
from megacpp_mcore.bench.registry import LAYER
from megacpp_mcore.errors import BenchmarkError

Row = Mapping[str, Any]


@dataclass
class Comparison:
    """The result of the comparison.

    Attributes:
        compared: how many new rows were compared.
        slower: one line for each row that takes more time or memory than the tolerance allows, and for each row of the file
            that lost its time or is absent from this run.
        lines: one line for everything else: faster, as before, new, not comparable.
    """

    compared: int = 0
    slower: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def compare(before: Sequence[Row], now: Sequence[Row], tolerance: float) -> Comparison:
    """Compare each new row with the last one of the same benchmark, work, variant and conditions.

    Our layer is one variant whatever backends it uses: one that fell back is compared with its earlier self. A row of the
    file whose parity failed or is missing is no baseline.

    Args:
        before: rows of the committed table.
        now: rows of this run.
        tolerance: the share by which time or peak memory may increase.

    Raises:
        BenchmarkError: not one row can be compared; the message says what differs.
    """
    found, refused = Comparison(), []
    baselines = [old for old in before if old["ms"] != "" and old["parity"] in table.TIMED]
    for row in now:
        name, same = " / ".join(_key(row)), [old for old in baselines if _key(old) == _key(row)]
        alike = [old for old in same if not _differences(old, row)]
        if alike:
            found.compared += 1
            _judge(found, name, alike[-1], row, tolerance)
        elif same:
            refused.append(f"{name}: not compared, {'; '.join(_differences(same[-1], row))}")
        elif row["ms"] != "":
            found.lines.append(f"{name}: new, the file has no baseline of it")
    found.lines += refused
    ran, have = {_conditions(row) for row in now}, {(_conditions(row), _key(row)) for row in now}
    lost = {
        _key(old): old for old in baselines if _conditions(old) in ran and (_conditions(old), _key(old)) not in have
    }
    found.slower += [f"{' / '.join(key)}: was {old['ms']} ms, and has no row in this run" for key, old in lost.items()]
    if not found.compared and not found.slower:
        why = "\n  ".join(refused[:5]) or "the file has no baseline of any of these benchmarks"
        raise BenchmarkError(f"no row of this run may be compared with the file:\n  {why}")
    return found


def _key(row: Row) -> tuple[str, str, str]:
    """Benchmark, work and variant; for a layer without the bracket, which lists its backends."""
    variant = str(row["variant"])
    return row["benchmark"], row["work"], variant.partition(" (")[0] if row["kind"] == LAYER else variant


def _conditions(row: Row) -> tuple[str, ...]:
    """Conditions that a run's rows share; without versions, so that a row counts as missing across versions, too."""
    return tuple(str(row[name]) for name in ("benchmark", "shape", "dtype", "device"))


def _differences(old: Row, row: Row) -> list[str]:
    return [
        f"{name} is {row[name]} and was {old[name]}" for name in table.CONDITIONS if str(old[name]) != str(row[name])
    ]


def _judge(found: Comparison, name: str, old: Row, row: Row, tolerance: float) -> None:
    fallen = "" if old["variant"] == row["variant"] else f", which was {old['variant']}"
    if row["ms"] == "":
        found.slower.append(f"{name}{fallen}: was {old['ms']} ms, and has no time now ({row['note'] or row['parity']})")
        return
    for figure, unit, size in (("ms", "ms", 1.0), ("peak_bytes", "MB", 1e6)):
        if old[figure] == "" or row[figure] == "":
            continue
        was, is_now = float(old[figure]), float(row[figure])
        text = f"{name}{fallen}: {was / size:.4g} → {is_now / size:.4g} {unit} ({is_now / was:.2f}x)"
        if is_now / was > 1 + tolerance:
            found.slower.append(f"{text}: {'slower' if figure == 'ms' else 'more memory'}")
        elif figure == "ms":
            found.lines.append(f"{text}: {'faster' if is_now / was < 1 / (1 + tolerance) else 'as before'}")
