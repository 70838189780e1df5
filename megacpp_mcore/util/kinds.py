"""Kinds of values in JSON files: each says of a value, in a sentence that names the field, why it is none. No torch.

Numbers are bounded so that no sum, product or quotient of two overflows; texts hold nothing that a terminal obeys.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class Kind:
    """What a value may be: in ``words`` for an error, and the ``problems`` of a value at a place."""

    words: str
    problems: Callable[[Any, str], Iterator[str]]

    def accepts(self, value: Any) -> bool:
        """Whether nothing is wrong with ``value``."""
        return next(self.problems(value, "it"), None) is None


def check(value: Any, kind: Kind, where: str = "it") -> None:
    """Raise unless ``value`` is of ``kind``.

    Raises:
        ValueError: with the field, what was found, and what was expected.
    """
    found = list(kind.problems(value, where))
    if found:
        raise ValueError(joined(found))


def joined(problems: Sequence[str]) -> str:
    """The first problems, and how many more there are."""
    more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + more


def wrong(where: str, value: Any, expected: str) -> str:
    """The sentence about a value that is not what was expected."""
    return f"{where} is {shown(value)} ({type(value).__name__}); expected {expected}"


def shown(value: Any) -> str:
    """The first 80 characters of a value, printable."""
    try:
        return repr(value[:80] if isinstance(value, str) else value)[:82]
    except (ValueError, RecursionError):  # an integer of too many digits, or what lies too deep
        return "what cannot be shown"


def printable(value: Any) -> Any:
    """``value`` with every character of its texts that a terminal may obey written as its escape."""
    if isinstance(value, str):
        return "".join(ascii(letter)[1:-1] if _is_control(letter) else letter for letter in value)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    return value


def _is_control(letter: str) -> bool:
    """Control and formatting characters, and halves of a surrogate pair, which no file can hold as UTF-8."""
    return letter not in "\n\t" and not letter.isprintable() and unicodedata.category(letter) in ("Cc", "Cf", "Cs")


def plain(words: str, holds: Callable[[Any], bool]) -> Kind:
    """A kind of which a value either is or is not."""

    def problems(value: Any, where: str) -> Iterator[str]:
        if not holds(value):
            yield wrong(where, value, words)

    return Kind(words, problems)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isprintable() or not any(map(_is_control, value)))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100


def _value_problems(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from TEXT.problems(key, f"a key of {where}")
            yield from _value_problems(each, f"{where}[{printable(key)}]")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _value_problems(each, f"{where}[{index}]")
    elif not (value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)):
        yield wrong(where, value, VALUE.words)


TEXT = plain("a text of printable characters", _is_text)
FLAG = plain("true or false", lambda value: isinstance(value, bool))
COUNT = plain("a whole number, 0 or more", lambda value: _is_whole(value) and 0 <= value <= 10**30)
SIZE = plain("a whole number, 1 or more", lambda value: _is_whole(value) and 1 <= value <= 10**30)
NUMBER = plain("a finite number", _is_number)
AMOUNT = plain("a finite number, 0 or more", lambda value: _is_number(value) and value >= 0)
POSITIVE = plain("a finite number above 0", lambda value: _is_number(value) and value > 0)
SHARE = plain("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
RESULT = plain(
    "a number, NaN and infinities included",
    lambda value: _is_number(value) or (isinstance(value, float) and not math.isfinite(value)),
)
"""What training computed, which may be no number."""
NANOSECONDS = plain("nanoseconds, a whole number, 0 or more", lambda value: _is_whole(value) and 0 <= value < 2**63)
LIST = plain("a list", lambda value: isinstance(value, list))
MAP = plain("an object", lambda value: isinstance(value, dict))
VALUE = Kind("a printable text, a finite number, true, false or null, or lists and objects of them", _value_problems)


def nullable(kind: Kind) -> Kind:
    """``kind`` or null."""
    return Kind(
        f"{kind.words}, or null", lambda value, where: iter(()) if value is None else kind.problems(value, where)
    )


def either(*kinds: Kind) -> Kind:
    """One of ``kinds``."""
    return plain(" or ".join(kind.words for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


def one_of(*values: str) -> Kind:
    """One of some texts."""
    return plain(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def list_of(kind: Kind) -> Kind:
    """A list of ``kind``."""

    def problems(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield wrong(where, value, "a list")
            return
        for index, each in enumerate(value):
            yield from kind.problems(each, f"{where}[{index}]")

    return Kind("a list", problems)


def map_of(kind: Kind, keys: Kind = TEXT) -> Kind:
    """An object whose keys are ``keys``, and whose values ``kind``."""

    def problems(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield wrong(where, value, "an object")
            return
        for key, each in value.items():
            yield from keys.problems(key, f"a key of {where}")
            yield from kind.problems(each, f"{where}[{printable(key)}]")

    return Kind("an object", problems)


def record(fields: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None, *, more: bool = False) -> Kind:
    """An object with ``fields``, and perhaps ``optional`` ones; ``more``: also others, whatever they are."""
    every = {**fields, **(optional or {})}
    words = f"a record of {', '.join(fields)}"

    def problems(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield wrong(where, value, words)
            return
        missing = [name for name in fields if name not in value]
        other = [] if more else [printable(name) for name in value if name not in every]
        if missing or other:
            parts = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(other)}"] * bool(other)
            yield f"{where} {' and '.join(parts)}; expected {words}"
        for name, kind in every.items():
            if name in value:
                yield from kind.problems(value[name], name if where == "it" else f"{where}.{name}")

    return Kind(words, problems)


_NAMED: Mapping[str, Kind] = {
    "text": TEXT, "flag": FLAG, "count": COUNT, "size": SIZE, "number": NUMBER, "amount": AMOUNT, "positive": POSITIVE,
    "share": SHARE, "layer": either(COUNT, TEXT), "list": LIST, "map": MAP, "value": VALUE,
}  # fmt: skip


def named(words: str | Mapping[str, Any]) -> Kind:
    """The kind that ``words`` name: ``count``, ``list of text``, ``number?`` (may be null); a mapping is a record of them."""
    if isinstance(words, Mapping):
        return record({name: named(each) for name, each in words.items()})
    if words.endswith("?"):
        return nullable(named(words[:-1]))
    outer, _, inner = words.partition(" of ")
    if not inner:
        return _NAMED[outer]
    return list_of(named(inner)) if outer == "list" else map_of(named(inner))
