"""For error messages: names near an unknown one, with the known names; the number that fits nearest to one that does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(word: object, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """``did you mean 'a' or 'b'? known: a, b, c``; without the question if no name is near.

    Args:
        word: the unknown name.
        known: the known names.
        meant: suggestions to use instead of names with similar spelling.
    """
    names = list(known)
    near = meant or difflib.get_close_matches(str(word), names, cutoff=0.5)
    question = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{question}known: {', '.join(names) or 'none'}"


def nearest_number(found: int, fitting: Iterable[int]) -> int:
    """The number of ``fitting`` nearest to ``found``; of two equally near ones the larger."""
    return min(fitting, key=lambda number: (abs(number - found), -number))
