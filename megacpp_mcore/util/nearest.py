"""For error messages: names near an unknown one, with the known names; the nearest number that fits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def nearest(word: object, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """Return ``did you mean 'a' or 'b'? known: a, b, c``; without the question if no name is near.

    ``meant`` are suggestions to use instead of names with similar spelling.
    """
    names = list(known)
    return f"{_question(meant or _near(word, names))}known: {', '.join(names) or 'none'}"


def suggestion(message: str, options: Iterable[str]) -> str:
    """Return ``did you mean '--a'? `` for what argparse's ``message`` does not know of choices or ``options``, or ``""``."""
    if match := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return _question(_near(match[1], [name.strip("'") for name in match[2].split(", ")], cutoff=0.7))
    if match := re.search(r"unrecognized arguments:.*?(--[^\s=]+)", message):
        return _question(_near(match[1], options, cutoff=0.7))
    return ""


def _near(word: object, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    names = {name.lower(): name for name in known}
    return [names[near] for near in difflib.get_close_matches(str(word).lower(), names, cutoff=cutoff)]


def _question(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def nearest_number(found: int, fitting: Iterable[int]) -> int:
    """Return the number of ``fitting`` nearest to ``found``; of two equally near ones the larger."""
    return min(fitting, key=lambda number: (abs(number - found), -number))
