"""Registry of ops that patches ran in place of stock, for receipts. No torch.

A patch decides call by call, and stock has no slot for its decision: so the note is the only witness. A note costs a few
microseconds and is kept once, however often it is made.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.backends.dispatcher import AUTO, Speed

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
    """Note that ``observed`` ran ``op``, in the fields of :class:`megacpp_mcore.backends.dispatcher.Resolution`."""
    key = (op, layer, requested, observed, reason)
    if key not in _notes:
        _notes[key] = {
            "op": op,
            "layer": layer,
            "requested": requested,
            "observed": observed,
            "speed": speed.name.lower(),
            "slower_than_best": slower_than_best,
            "reason": reason,
        }


def notes() -> list[dict[str, Any]]:
    """Every note of this process, in the order in which they were first made."""
    return list(_notes.values())


def forget() -> None:
    """Clear the notes, for a second run in one process."""
    _notes.clear()
