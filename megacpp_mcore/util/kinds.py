"""Kinds of JSON values, composed from simpler ones: they describe our files, which are checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A type of values: its name in the documentation's table, and whether a value is of it."""

    words: str
    fits: Callable[[Any], bool]


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """Make the kind of lists of values of ``kind``, of this length or any."""

    def fits(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(kind.fits, value))

    return Kind(f"list of {'' if length is None else f'{length} × '}{kind.words}", fits)


def map_of(kind: Kind) -> Kind:
    """Make the kind of maps from any text to values of ``kind``."""
    return Kind(f"map of {kind.words}", lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())))


def one_of(*words: str) -> Kind:
    """Make the kind of these texts."""
    return Kind("one of " + ", ".join(f"`{word}`" for word in words), lambda value: value in words)


def or_null(kind: Kind) -> Kind:
    """Make the kind of values of ``kind``, or null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


def record(is_open: bool = False, **fields: Kind) -> Kind:
    """Make the kind of maps with these keys; if it is open, with any others too."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or not (is_open or len(value) == len(fields)):
            return False
        return all(name in value and kind.fits(value[name]) for name, kind in fields.items())

    return Kind(f"{{{', '.join([*fields, *['…'] * is_open])}}}", fits)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("flag", lambda value: isinstance(value, bool))
COUNT = Kind("count", lambda value: type(value) is int and value >= 0)
SIZE = Kind("size", lambda value: type(value) is int and value >= 1)
NUMBER = Kind("number", _is_number)
AMOUNT = Kind("amount", lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind("positive", lambda value: _is_number(value) and value > 0)
SHARE = Kind("share", lambda value: _is_number(value) and 0 <= value <= 1)
VALUE = Kind("value", lambda value: True)
