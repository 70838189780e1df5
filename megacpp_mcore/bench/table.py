"""The columns of the table of benchmarks, how a floor becomes milliseconds, and how rows are printed; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.model.flops import peaks

BYTES_PER_SECOND = 4.2e12
"""What an H200 moves in practice, for floors."""

PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "mamba-ssm", "liger-kernel")
"""Whose versions a row carries."""

COLUMNS = (
    "benchmark", "kind", "shape", "dtype", "work", "variant", "side", "ms", "peak_bytes", "computed_bytes",
    "floor_operations", "floor_bytes", "floor_result_bytes", "floor_ms", "floor_by", "of_floor",
    "parity", "worst_row", "against", "speed_up", "less_memory", "note", "repeats", "device", *PACKAGES, "cudnn", "commit",
)  # fmt: skip

PRINTED = ("work", "variant", "ms", "floor_ms", "of_floor", "peak_bytes", "speed_up", "less_memory", "parity", "note")
_WIDTHS = {"work": 20, "variant": 32, "parity": 18, "note": 0, "peak_bytes": 14}

GREEN, IS_REFERENCE = "green", "is the reference"
"""Verdicts that are no failure; the second is of a program that the truth was made with, whose agreement proves nothing."""

IS_STOCK = "stock"
"""The verdict of stock where it is the truth that the others are compared with."""

A_BOUND, NO_STOCK = "no parity: a bound", "no stock to compare with"
"""What is timed without a verdict: a part of the work, and ours where stock ran out of memory."""

RIGHT = (GREEN, IS_STOCK)
"""Verdicts that figures may be claimed from."""

TIMED = (*RIGHT, IS_REFERENCE, A_BOUND, NO_STOCK)
"""Everything that the parity of a row with a time may be."""

CONDITIONS = ("shape", "dtype", "device", *PACKAGES, "cudnn")
"""What has to be equal before two rows of the same benchmark, work and variant may be compared."""


@dataclass(frozen=True)
class FloorTime:
    """A floor in milliseconds and what it comes from, or why it is not known."""

    ms: float | None
    by: str


def floor_time(operations: int, moved: int, precision: str, device: str) -> FloorTime:
    """The greater of operations at the device's peak and of bytes at :data:`BYTES_PER_SECOND`."""
    peak = peaks.peak(device, precision)
    if peak.flops_per_s is None:
        return FloorTime(None, f"not known: {peak.reason}")
    by_operations, by_bytes = operations / peak.flops_per_s * 1e3, moved / BYTES_PER_SECOND * 1e3
    if by_operations >= by_bytes:
        return FloorTime(by_operations, f"operations at {peak.name}")
    return FloorTime(by_bytes, f"bytes at {BYTES_PER_SECOND / 1e12:g} TB/s")


def shape_text(shape: Mapping[str, Any]) -> str:
    """``B=2 S=4096 …``, in the order given."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def line(row: Mapping[str, Any]) -> str:
    """One row as people read it."""
    return "  ".join(f"{_short(name, row[name]):<{_WIDTHS.get(name, 11)}}" for name in PRINTED).rstrip()


def head() -> str:
    """The titles of what :func:`line` prints."""
    titles = {"peak_bytes": "peak MB", "of_floor": "of floor", "floor_ms": "floor ms", "less_memory": "less memory"}
    return "  ".join(
        f"{titles.get(name, name.replace('_', '-')):<{_WIDTHS.get(name, 11)}}" for name in PRINTED
    ).rstrip()


def _short(name: str, value: Any) -> str:
    if name == "peak_bytes" and value != "":
        return f"{int(value) / 1e6:.1f}"
    return "-" if value == "" and name != "note" else str(value)
