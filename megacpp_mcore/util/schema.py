"""The one check of values from outside against a dataclass: its annotations say which keys there are and what each may be.

An annotation is a plain type, another dataclass, ``Mapping[str, X]``, ``Sequence[X]``, or several of these joined by ``|``.
JSON and YAML have told the types apart already, so ``true`` is no number here; a whole number may stand for any number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from megacpp_mcore.util.nearest import nearest

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


class SchemaError(ValueError):
    """A value is not of its annotation; the message says which, what it is and what was expected."""


def kinds(hint: Any) -> tuple[Any, ...]:
    """What ``hint`` joins by ``|``; itself alone where it joins nothing."""
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def build[T](definition: type[T], content: Any, where: str = "") -> T:
    """A ``definition`` of ``content``, a mapping with every key that has no default and none besides.

    Raises:
        SchemaError: a key is missing or not known, or a value is not of its type.
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
        SchemaError: a key is not known, or a value is not of its type.
    """
    content = _mapping(type(value), content, where)
    inner = {
        key: replace(getattr(value, key), content[key], _path(where, key))
        for key in content
        if dataclasses.is_dataclass(getattr(value, key))
    }
    rest = {key: new for key, new in content.items() if key not in inner}
    return dataclasses.replace(cast("Any", value), **inner, **_checked(type(value), rest, where))


def check(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint`` has it: a dataclass where it names one, a float where a whole number stands for a number.

    Raises:
        SchemaError: it is not of that type.
    """
    for kind in kinds(hint):
        origin, inner = get_origin(kind), get_args(kind)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
            return build(cast("type[Any]", kind), value, where)
        if isinstance(value, dict) and origin is Mapping:
            return {key: check(each, inner[1], _path(where, key)) for key, each in value.items()}
        if isinstance(value, list) and origin is Sequence:
            return [check(each, inner[0], f"{where}[{number}]") for number, each in enumerate(value)]
        if kind is Any or type(value) is kind:
            return value
    if type(value) is int and float in kinds(hint):
        return float(value)
    raise SchemaError(f"{where} is {value!r} ({type(value).__name__}); expected {describe(hint)}")


def read(text: str, hint: Any, where: str) -> Any:
    """The value of plain type that a word of a command line means.

    Raises:
        SchemaError: it means none of that type.
    """
    allowed = kinds(hint)
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
    raise SchemaError(f"{where!r}: {text!r} is not {describe(hint)}")


def plain_keys(definition: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that one word can set, with its annotation: ``depth``, ``dsa.topk``, …; lists and mappings are left out."""
    for name, hint in get_type_hints(definition).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from plain_keys(hint, f"{prefix}{name}.")
        elif set(kinds(hint)) <= set(_NAMES):
            yield prefix + name, hint


def describe(hint: Any) -> str:
    """What an annotation allows, in words."""
    names = []
    for kind in kinds(hint):
        origin = get_origin(kind)
        composed = "a list" if origin is Sequence else "a mapping"
        names.append(_NAMES.get(kind, composed))
    return " or ".join(names)


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
    return {key: check(value, hints[key], _path(where, key)) for key, value in content.items()}


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
