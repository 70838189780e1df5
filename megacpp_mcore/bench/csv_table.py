"""The table of benchmarks: columns, CSV files, comparison with a committed table. No torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megacpp_mcore.bench.catalog import LAYER
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.util.files import writable

Row = Mapping[str, str]

PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "mamba-ssm", "liger-kernel")
"""Packages whose versions a row carries."""

COLUMNS = (
    "benchmark", "kind", "shape", "dtype", "work", "variant", "side", "ms", "peak_bytes", "kept_bytes", "computed_bytes",
    "floor_operations", "floor_bytes", "floor_result_bytes", "floor_ms", "floor_by", "of_floor",
    "parity", "worst_row", "against", "speed_up", "less_memory", "note", "repeats", "device", *PACKAGES, "cudnn", "commit",
)  # fmt: skip

GREEN = "green"
"""The verdict under which figures may be claimed."""

IS_REFERENCE, A_BOUND = "is the reference", "no parity: a bound"
"""Verdicts of a program that also made the truth, so that agreement proves nothing, and of a part of the work, unchecked."""

TIMED = (GREEN, IS_REFERENCE, A_BOUND)
"""All verdicts that a row with a time may have."""

CONDITIONS = ("shape", "dtype", "device", *PACKAGES, "cudnn")
"""Columns that must be equal before two rows of the same benchmark, work and variant may be compared."""

_PRINTED = {
    "work": ("work", 20), "variant": ("variant", 32), "ms": ("ms", 11), "floor_ms": ("floor ms", 11),
    "of_floor": ("of floor", 11), "peak_bytes": ("peak MB", 14), "speed_up": ("speed-up", 11),
    "less_memory": ("less memory", 11), "parity": ("parity", 18), "note": ("note", 0),
}  # fmt: skip
"""The columns that are printed, with their titles and widths."""


def read(path: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """Return the rows of a CSV file of ``columns``.

    Raises:
        BenchmarkError: the file cannot be read, is empty, has other columns, a row of another width, or ends within a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        header, *rows = list(csv.reader(text.splitlines(keepends=True), strict=True)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise BenchmarkError(f"{path} cannot be read ({error}); expected a benchmark table") from error
    if tuple(header) != tuple(columns):
        raise BenchmarkError(f"{path} begins with {','.join(header)[:80]!r}; expected the columns {','.join(columns)}")
    if not text.endswith("\n") or any(len(row) != len(columns) for row in rows):
        raise BenchmarkError(f"{path} ends with {text[-40:]!r}; expected complete lines of {len(columns)} columns: fix it")
    return [dict(zip(header, row, strict=True)) for row in rows]


class Table:
    """A CSV file to which rows are added; created, with its folder, by the first of them.

    Raises:
        BenchmarkError: the file cannot be read, or is not a complete table of these columns; nothing is measured then.
        DataError: it is no regular file, or its folder cannot be written to.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        self.path, self.columns = path, tuple(columns)
        folder = next(folder for folder in path.absolute().parents if folder.exists())  # others are created later
        writable(folder / path.absolute().relative_to(folder).parts[0], added_to=True)
        if path.exists() and path.stat().st_size:
            read(path, columns)

    def append(self, *rows: Mapping[str, object]) -> None:
        """Add ``rows``; each has every column.

        Raises:
            BenchmarkError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", newline="", encoding="utf-8") as sink:
                writer = csv.DictWriter(sink, fieldnames=self.columns, lineterminator="\n")
                if sink.tell() == 0:
                    writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise BenchmarkError(f"{len(rows)} rows could not be added to {self.path} ({error})") from error


def shape_text(shape: Mapping[str, str | int]) -> str:
    """Write ``B=2 S=4096 …``, in the order given."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def head() -> str:
    """Return the header for :func:`line`."""
    return "  ".join(f"{title:<{width}}" for title, width in _PRINTED.values()).rstrip()


def line(row: Row) -> str:
    """Format one row as printed."""
    shown = dict(row) | {"peak_bytes": row["peak_bytes"] and f"{int(row['peak_bytes']) / 1e6:.1f}"}
    empty = {name: "" if name == "note" else "-" for name in _PRINTED}
    return "  ".join(f"{shown[name] or empty[name]!s:<{width}}" for name, (_, width) in _PRINTED.items()).rstrip()


@dataclass
class Comparison:
    """Number of rows compared, a line for each that is slower, larger or lost, and a line for every other row."""

    compared: int = 0
    slower: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def compare(before: Sequence[Row], now: Sequence[Row], tolerance: float) -> Comparison:
    """Compare each new row with the last one, in ``before``, of the same benchmark, work, variant and conditions.

    Our layer is one variant whatever backends it uses: one that fell back is compared with its earlier self. A row of the file
    whose parity failed or is missing is no baseline. ``tolerance`` is the share by which time or peak memory may increase.

    Raises:
        BenchmarkError: no row can be compared; the message says what differs.
    """
    report, refused = Comparison(), []
    baselines = [old for old in before if old["ms"] != "" and old["parity"] in TIMED]
    for row in now:
        name, same = " / ".join(_key(row)), [old for old in baselines if _key(old) == _key(row)]
        alike = [old for old in same if not _differences(old, row)]
        if alike:
            report.compared += 1
            _judge(report, name, alike[-1], row, tolerance)
        elif same:
            refused.append(f"{name}: not compared, {'; '.join(_differences(same[-1], row))}")
        elif row["ms"] != "":
            report.lines.append(f"{name}: new, the file has no baseline of it")
    report.lines += refused
    ran, present = {_conditions(row) for row in now}, {(_conditions(row), _key(row)) for row in now}
    missed = [old for old in baselines if _conditions(old) in ran and (_conditions(old), _key(old)) not in present]
    lost = {" / ".join(_key(old)): old["ms"] for old in missed}
    report.slower += [f"{name}: was {ms} ms, and has no row in this run" for name, ms in lost.items()]
    if not report.compared and not report.slower:
        why = "\n  ".join(refused[:5]) or "the file has no baseline of any of these benchmarks"
        raise BenchmarkError(f"no row of this run may be compared with the file:\n  {why}")
    return report


def _key(row: Row) -> tuple[str, str, str]:
    """Return benchmark, work and variant; for a layer, without the parentheses that list its backends."""
    variant = row["variant"].partition(" (")[0] if row["kind"] == LAYER else row["variant"]
    return row["benchmark"], row["work"], variant


def _conditions(row: Row) -> tuple[str, ...]:
    """Return conditions that a run's rows share; without versions, so that a row counts as missing across versions, too."""
    return tuple(row[name] for name in ("benchmark", "shape", "dtype", "device"))


def _differences(old: Row, row: Row) -> list[str]:
    return [f"{name} is {row[name]} and was {old[name]}" for name in CONDITIONS if old[name] != row[name]]


def _judge(out: Comparison, name: str, old: Row, row: Row, tolerance: float) -> None:
    fallen = "" if old["variant"] == row["variant"] else f", which was {old['variant']}"
    if row["ms"] == "":
        out.slower.append(f"{name}{fallen}: was {old['ms']} ms, and has no time now ({row['note'] or row['parity']})")
        return
    for figure, unit, size in (("ms", "ms", 1.0), ("peak_bytes", "MB", 1e6)):
        if old[figure] == "" or row[figure] == "":
            continue
        was, is_now = float(old[figure]), float(row[figure])
        text = f"{name}{fallen}: {was / size:.4g} → {is_now / size:.4g} {unit} ({is_now / was:.2f}x)"
        if is_now / was > 1 + tolerance:
            out.slower.append(f"{text}: {'slower' if figure == 'ms' else 'more memory'}")
        elif figure == "ms":
            out.lines.append(f"{text}: {'faster' if is_now / was < 1 / (1 + tolerance) else 'as before'}")
