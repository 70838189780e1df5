"""The table of benchmarks: its columns, its CSV files, how rows are printed, and how a floor becomes milliseconds; no torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import peaks

BYTES_PER_SECOND = 4.2e12
"""What an H200 moves in practice, for floors."""

PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "mamba-ssm", "liger-kernel")
"""Packages whose versions a row carries."""

COLUMNS = (
    "benchmark", "kind", "shape", "dtype", "work", "variant", "side", "ms", "peak_bytes", "kept_bytes", "computed_bytes",
    "floor_operations", "floor_bytes", "floor_result_bytes", "floor_ms", "floor_by", "of_floor",
    "parity", "worst_row", "against", "speed_up", "less_memory", "note", "repeats", "device", *PACKAGES, "cudnn", "commit",
)  # fmt: skip

GREEN, IS_REFERENCE = "green", "is the reference"
"""Verdicts that are not failures; the second is for a program that also made the truth, so that agreement proves nothing."""

IS_STOCK = "stock"
"""The verdict of stock where it is the truth that the others are compared with."""

A_BOUND, NO_STOCK = "no parity: a bound", "no stock to compare with"
"""Verdicts of what is timed without a check: a part of the work, and ours where stock ran out of memory."""

RIGHT = (GREEN, IS_STOCK)
"""Verdicts under which figures may be claimed."""

TIMED = (*RIGHT, IS_REFERENCE, A_BOUND, NO_STOCK)
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
    """The rows of a CSV file of ``columns``.

    Raises:
        BenchmarkError: the file cannot be read, is empty, has other columns, a row of another width, or ends within a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        header, *rows = list(csv.reader(text.splitlines(keepends=True), strict=True)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise BenchmarkError(f"{path} cannot be read ({error}); name a table of these columns") from error
    if tuple(header) != tuple(columns):
        raise BenchmarkError(f"{path} begins with {','.join(header)[:80]!r}; expected the columns {','.join(columns)}")
    if not text.endswith("\n") or any(len(row) != len(columns) for row in rows):
        raise BenchmarkError(
            f"{path} ends with {text[-40:]!r}; expected whole lines of {len(columns)} columns: mend it"
        )
    return [dict(zip(header, row, strict=True)) for row in rows]


class Table:
    """A CSV file to which rows are added.

    Args:
        path: the file; created, with its folder, by the first rows.
        columns: its header.

    Raises:
        BenchmarkError: the file cannot be read, or is not a complete table of these columns; nothing is measured then.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        self.path, self.columns = path, tuple(columns)
        if path.exists() and not (path.is_file() and path.stat().st_size == 0):
            read(path, columns)

    def append(self, *rows: Mapping[str, Any]) -> None:
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


def floor_time(operations: int, moved: int, precision: str, device: str) -> tuple[float | None, str]:
    """Milliseconds (None: not known) and what they derive from: operations at the device's peak, or bytes at
    :data:`BYTES_PER_SECOND`, whichever takes longer.
    """
    peak = peaks.peak(device, precision)
    if peak.flops_per_s is None:
        return None, f"not known: {peak.reason}"
    by_operations, by_bytes = operations / peak.flops_per_s * 1e3, moved / BYTES_PER_SECOND * 1e3
    if by_operations >= by_bytes:
        return by_operations, f"operations at {peak.name}"
    return by_bytes, f"bytes at {BYTES_PER_SECOND / 1e12:g} TB/s"


def shape_text(shape: Mapping[str, Any]) -> str:
    """``B=2 S=4096 …``, in the order given."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def head() -> str:
    """The header for :func:`line`."""
    return "  ".join(f"{title:<{width}}" for title, width in _PRINTED.values()).rstrip()


def line(row: Mapping[str, Any]) -> str:
    """One row as printed."""
    shown = dict(row) | {"peak_bytes": row["peak_bytes"] and f"{int(row['peak_bytes']) / 1e6:.1f}"}
    empty = {name: "" if name == "note" else "-" for name in _PRINTED}
    return "  ".join(f"{shown[name] or empty[name]!s:<{width}}" for name, (_, width) in _PRINTED.items()).rstrip()
