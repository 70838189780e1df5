"""Registry of ops that patches ran instead of stock, for receipts. No torch.

A patch decides call by call, and stock has no place to record the decision, so only this note does. A note costs a few
microseconds; repeated notes are stored once.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.backends.candidate import Speed
from megacpp_mcore.backends.dispatcher import AUTO, Resolution

_notes: dict[tuple[Any, ...], dict[str, Any]] = {}


def note(
    op: str,
    observed: str,
    reason: str,
    *,
    speed: Speed,
    requested: str = AUTO,
    layer: int | None = None,
    slower_than_best: bool = False,
) -> None:
    """Record that ``observed`` ran ``op``; fields as in :class:`megacpp_mcore.backends.dispatcher.Resolution`."""
    key = (op, layer, requested, observed, reason)
    if key not in _notes:
        resolution = Resolution(op, layer, requested, observed, speed, slower_than_best, reason)
        _notes[key] = resolution.as_record()


def notes() -> list[dict[str, Any]]:
    """Return all notes of this process, in the order of their first occurrence."""
    return list(_notes.values())


def forget() -> None:
    """Clear the notes, for a second run in one process."""
    _notes.clear()
