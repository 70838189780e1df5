"""Validation of external values, as read from JSON and YAML: the kind a value must have, and the place where it has not.

A :class:`Kind` has a name in :data:`NAMES`, is composed of others (:func:`record`, :func:`list_of`, …), or comes from an
annotation: a plain type, a dataclass, ``Mapping[str, X]``, ``Sequence[X]``, or a union of these with ``|``. ``true`` is not a
number.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from megacpp_mcore.util.nearest import nearest

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that may control a terminal, or that UTF-8 cannot encode."""


class SchemaError(ValueError):
    """A value has the wrong kind; the message names the value, its content and what was expected."""


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        words: its description in errors.
        holds: whether a value is of this kind, without checking its items.
        inner: checks the items of such a value at a place, and returns it converted to the kind.
    """

    words: str
    holds: Callable[[Any], bool]
    inner: Callable[[Any, str], Any] = lambda value, where: value

    def read(self, value: Any, where: str) -> Any:
        """``value``, found at ``where``, checked and converted to this kind.

        Raises:
            SchemaError: the value or one of its items has the wrong kind.
        """
        if not self.holds(value):
            raise SchemaError(wrong(where, value, self.words))
        return self.inner(value, where)


def check(value: Any, kind: Any, where: str = "it") -> Any:
    """``value`` checked and converted to ``kind`` (or an annotation): to a dataclass, or from a whole number to a float.

    Raises:
        SchemaError: it is not of that kind.
    """
    return of(kind).read(value, where)


def wrong(where: str, value: Any, expected: str) -> str:
    """The error sentence about an unexpected value; long texts are cut to 80 characters."""
    shown = repr(value[:80] if isinstance(value, str) else value)[:82]
    return f"{where} is {shown} ({type(value).__name__}); expected {expected}"


def printable(value: Any) -> Any:
    """``value`` with every character that :data:`TEXT` does not allow escaped."""
    if isinstance(value, str):
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], value)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    return value


# --- Kinds ------------------------------------------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


TEXT = Kind("a text of printable characters", lambda value: isinstance(value, str) and not _CONTROL.search(value))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
SIZE = Kind("a whole number, 1 or more", lambda value: _is_whole(value) and value >= 1)
NUMBER = Kind("a finite number", _is_number)
AMOUNT = Kind("a finite number, 0 or more", lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
LIST = Kind("a list", lambda value: isinstance(value, list))
MAP = Kind("an object", lambda value: isinstance(value, dict))
NULL = Kind("null", lambda value: value is None)


def either(*kinds: Kind) -> Kind:
    """A union of ``kinds``; the first that matches a value applies."""

    def inner(value: Any, where: str) -> Any:
        return next(kind for kind in kinds if kind.holds(value)).inner(value, where)

    words = " or ".join(kind.words for kind in kinds)
    return Kind(words, lambda value: any(kind.holds(value) for kind in kinds), inner)


def one_of(*values: str) -> Kind:
    """One of the given texts."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def list_of(kind: Kind) -> Kind:
    """A list of ``kind``."""

    def inner(value: Any, where: str) -> list[Any]:
        return [kind.read(each, f"{where}[{index}]") for index, each in enumerate(value)]

    return Kind(LIST.words, LIST.holds, inner)


def map_of(kind: Kind, keys: Kind = TEXT) -> Kind:
    """An object with keys of kind ``keys`` and values of ``kind``."""

    def inner(value: Any, where: str) -> dict[Any, Any]:
        return {keys.read(key, f"a key of {where}"): kind.read(each, f"{where}[{key}]") for key, each in value.items()}

    return Kind(MAP.words, MAP.holds, inner)


def record(fields: Mapping[str, Kind], *, more: bool = False) -> Kind:
    """An object with ``fields``; ``more`` allows any others."""
    words = f"a record of {', '.join(fields)}"

    def inner(value: Any, where: str) -> dict[str, Any]:
        missing = [name for name in fields if name not in value]
        other = [] if more else [str(printable(name)) for name in value if name not in fields]
        if missing or other:
            parts = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(other)}"] * bool(other)
            raise SchemaError(f"{where} {' and '.join(parts)}; expected {words}")
        return {
            name: fields[name].read(each, _path(where, name)) if name in fields else each
            for name, each in value.items()
        }

    return Kind(words, MAP.holds, inner)


def _read_value(value: Any, where: str) -> Any:
    return (_MAP_OF_VALUE if isinstance(value, dict) else _LIST_OF_VALUE if isinstance(value, list) else _LEAF).read(
        value, where
    )


_LEAF = either(TEXT, NUMBER, FLAG, NULL)
VALUE = Kind(f"{_LEAF.words}, or lists and objects of them", lambda value: True, _read_value)
_LIST_OF_VALUE, _MAP_OF_VALUE = list_of(VALUE), map_of(VALUE)
NAMES: Mapping[str, Kind] = {
    "text": TEXT, "flag": FLAG, "count": COUNT, "size": SIZE, "number": NUMBER, "amount": AMOUNT, "positive": POSITIVE,
    "share": SHARE, "value": VALUE,
}  # fmt: skip


def named(words: Any) -> Kind:
    """The kind that ``words`` name.

    Args:
        words: ``count``, ``list of text``, ``number?`` (may be null), ``warm|cold`` (one of these texts); ``[words]`` is a list
            of it, ``{"*": words}`` a map of it, and any other mapping a record, which a key ``...`` opens to other fields.
    """
    if isinstance(words, Kind):
        return words
    if isinstance(words, list):
        return list_of(named(words[0]))
    if isinstance(words, Mapping):
        if "*" in words:
            return map_of(named(words["*"]))
        fields = {name: named(each) for name, each in words.items() if name != "..."}
        return record(fields, more="..." in words)
    if words.endswith("?"):
        return either(named(words[:-1]), NULL)
    outer, _, inner = words.partition(" of ")
    if inner:
        return list_of(named(inner)) if outer == "list" else map_of(named(inner))
    return one_of(*words.split("|")) if "|" in words else NAMES[words]


# --- Annotations ------------------------------------------------------------------------------------------------------

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def of(hint: Any) -> Kind:
    """The kind of an annotation; a :class:`Kind` is returned as it is."""
    if isinstance(hint, Kind):
        return hint
    if isinstance(hint, UnionType):
        return either(*map(of, sorted(get_args(hint), key=lambda one: one is float)))  # float last: an int stays an int
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Mapping:
        return dataclasses.replace(map_of(of(inner[1]), of(inner[0])), words="a mapping")
    if origin is Sequence:
        return list_of(of(inner[0]))
    if dataclasses.is_dataclass(hint):
        known = cast("type[Any]", hint)
        return Kind(
            "a mapping",
            lambda value: isinstance(value, Mapping | known),
            lambda value, where: value if isinstance(value, known) else build(known, value, where),
        )
    if hint is float:
        return Kind(_PLAIN[float], lambda value: type(value) in (int, float), lambda value, where: float(value))
    name = _PLAIN.get(hint, str(getattr(hint, "__name__", hint)))
    return Kind(name, lambda value: hint is Any or type(value) is hint)


def build[T](definition: type[T], content: Any, where: str = "") -> T:
    """A ``definition`` built from ``content``, a mapping with all keys without a default and no unknown ones.

    Raises:
        SchemaError: a key is missing or unknown, or a value has the wrong type.
    """
    content = _mapping(definition, content, where)
    needed = {
        field.name
        for field in dataclasses.fields(cast("Any", definition))
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if missing := needed - set(content):
        raise SchemaError(f"{where or 'the top level'} has not {', '.join(sorted(missing))}, which are needed")
    return definition(**_checked(definition, content, where))


def replace[T](value: T, content: Any, where: str = "") -> T:
    """``value``, a dataclass, with the keys of ``content`` replaced, those of inner dataclasses one by one.

    Raises:
        SchemaError: a key is unknown, or a value has the wrong type.
    """
    content = _mapping(type(value), content, where)
    inner = {
        key: replace(getattr(value, key), content[key], _path(where, key))
        for key in content
        if dataclasses.is_dataclass(getattr(value, key))
    }
    rest = {key: new for key, new in content.items() if key not in inner}
    return dataclasses.replace(cast("Any", value), **inner, **_checked(type(value), rest, where))


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
    raise SchemaError(f"{where!r}: {text!r} is not {of(hint).words}")


def plain_keys(definition: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that one word can set, with its annotation: ``depth``, ``dsa.topk``, …; without lists and mappings."""
    for name, hint in get_type_hints(definition).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from plain_keys(hint, f"{prefix}{name}.")
        elif set(_parts(hint)) <= set(_PLAIN):
            yield prefix + name, hint


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _mapping(definition: type, content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise SchemaError(
            f"{where or 'the top level'} is {content!r}; expected a mapping of {definition.__name__} values"
        )
    known = [field.name for field in dataclasses.fields(cast("Any", definition))]
    for key in content:
        if key not in known:
            raise SchemaError(f"{where + ': ' if where else ''}unknown key {key!r}; {nearest(key, known)}")
    return content


def _checked(definition: type, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = get_type_hints(definition)
    return {key: of(hints[key]).read(value, _path(where, key)) for key, value in content.items()}


def _path(where: str, key: str) -> str:
    return key if where in ("", "it") else f"{where}.{key}"
