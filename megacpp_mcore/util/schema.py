"""Validation of external values, as read from YAML and command lines, by annotation; errors name the place.

An annotation is a plain type, a dataclass, ``Mapping[str, X]``, ``Sequence[X]``, or a union of these with ``|``. ``true`` is
not a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from megacpp_mcore.util.nearest import nearest


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


def check(value: Any, hint: Any, where: str = "it") -> Any:
    """``value`` checked and converted to the annotation ``hint``: to a dataclass, or from a whole number to a float.

    Raises:
        SchemaError: it is not of that kind.
    """
    return of(hint).read(value, where)


def wrong(where: str, value: Any, expected: str) -> str:
    """The error sentence about an unexpected value; long texts are cut to 80 characters."""
    shown = repr(value[:80] if isinstance(value, str) else value)[:82]
    return f"{where} is {shown} ({type(value).__name__}); expected {expected}"


# --- Annotations ------------------------------------------------------------------------------------------------------

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def of(hint: Any) -> Kind:
    """The kind of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, UnionType):
        kinds = [of(one) for one in sorted(inner, key=lambda one: one is float)]  # float last: an int stays an int
        return Kind(
            " or ".join(kind.words for kind in kinds),
            lambda value: any(kind.holds(value) for kind in kinds),
            lambda value, where: next(kind for kind in kinds if kind.holds(value)).inner(value, where),
        )
    if origin is Mapping:
        keys, values = map(of, inner)
        return Kind(
            "a mapping",
            lambda value: isinstance(value, dict),
            lambda value, where: {
                keys.read(key, f"a key of {where}"): values.read(each, f"{where}[{key}]") for key, each in value.items()
            },
        )
    if origin is Sequence:
        items = of(inner[0])
        return Kind(
            "a list",
            lambda value: isinstance(value, list),
            lambda value, where: [items.read(each, f"{where}[{index}]") for index, each in enumerate(value)],
        )
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
