"""Validation of external values, as read from YAML and command lines, by annotation; errors name the place.

An annotation is a plain type, or a union of these with ``|``. ``true`` is not a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_type_hints

from megacpp_mcore.util.nearest import nearest

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


class SchemaError(ValueError):
    """A value has the wrong kind; the message names the value, its content and what was expected."""


def check(value: Any, hint: Any, where: str = "it") -> Any:
    """Check ``value``, and return it, a whole number as a float where ``hint`` has only the latter.

    Raises:
        SchemaError: it is not of that kind.
    """
    kinds = _parts(hint)
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    raise SchemaError(wrong(where, value, _words(kinds)))


def wrong(where: str, value: Any, expected: str) -> str:
    """Format the error sentence about an unexpected value; long texts are cut to 80 characters."""
    shown = repr(value[:80] if isinstance(value, str) else value)[:82]
    return f"{where} is {shown} ({type(value).__name__}); expected {expected}"


def replace[T](value: T, content: Any, where: str = "") -> T:
    """Return the dataclass ``value`` with the keys of ``content`` replaced, those of inner dataclasses one by one.

    Raises:
        SchemaError: a key is unknown, or a value has the wrong type.
    """
    if not isinstance(content, Mapping):
        raise SchemaError(f"{where or 'the top level'} is {content!r}; expected a mapping of {type(value).__name__} values")
    hints, new = get_type_hints(type(value)), {}
    for key, override in content.items():
        if key not in hints:
            raise SchemaError(f"{where + ': ' if where else ''}unknown key {key!r}; {nearest(key, hints)}")
        old, path = getattr(value, key), f"{where}.{key}" if where else key
        new[key] = replace(old, override, path) if dataclasses.is_dataclass(old) else check(override, hints[key], path)
    return cast("T", dataclasses.replace(cast("Any", value), **new))


def read(text: str, hint: Any, where: str) -> Any:
    """Parse a command-line word as a value of plain type ``hint``.

    Raises:
        SchemaError: it is not of that type.
    """
    allowed = _parts(hint)
    if NoneType in allowed and text.lower() in ("none", "null"):
        return None
    if bool in allowed and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                continue
    raise SchemaError(f"{where!r}: {text!r} is not {_words(allowed)}")


def plain_keys(definition: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return every key that one word can set, with its annotation: ``depth``, ``dsa.topk``, …; without lists and mappings."""
    for name, hint in get_type_hints(definition).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from plain_keys(hint, f"{prefix}{name}.")
        elif set(_parts(hint)) <= set(_PLAIN):
            yield prefix + name, hint


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _words(kinds: tuple[Any, ...]) -> str:
    return " or ".join(_PLAIN[kind] for kind in sorted(kinds, key=lambda kind: kind is float))
