"""Values as text: in words, as readable JSON, and numbers of bytes, seconds and things."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that may control a terminal, or that UTF-8 cannot encode."""


def printable(value: Any) -> Any:
    """Return ``value`` with every character of :data:`_CONTROL` in its texts and keys escaped."""
    if isinstance(value, str):
        return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], value)
    if isinstance(value, list):
        return [printable(entry) for entry in value]
    if isinstance(value, dict):
        return {printable(key): printable(entry) for key, entry in value.items()}
    return value


def plain(value: Any) -> str:
    """Put any value in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    return "none" if value is None else str(value)


def dumps(value: Any, indent: str = "") -> str:
    """Write ``value`` as JSON that people read: what fits on a line, and every list or map of plain values, is on one line."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(indent + line) <= 160 or not any(isinstance(entry, dict | list) for entry in inner):
        return line
    is_map = isinstance(value, dict)
    names = [f"{json.dumps(name, ensure_ascii=False)}: " if is_map else "" for name in value]
    lines = ",\n".join(f"{indent} {name}{dumps(entry, indent + ' ')}" for name, entry in zip(names, inner, strict=True))
    begin, end = "{}" if is_map else "[]"
    return f"{begin}\n{lines}\n{indent}{end}"


def utc(since_epoch_ns: int) -> str:
    """Format UTC in whole seconds."""
    return datetime.datetime.fromtimestamp(since_epoch_ns // 10**9, datetime.UTC).isoformat()


def size(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Format a length of time for people."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"


def short(count: float) -> str:
    """Format a count with a letter for thousands, millions and billions."""
    for limit, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if count >= limit:
            return f"{count / unit:.4g}{letter}"
    return f"{count:,.0f}"
