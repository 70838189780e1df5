"""The end of an error about a name that is not known: what it may have been meant to be, and what there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(word: object, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """``did you mean 'a' or 'b'? known: a, b, c``; without the question where nothing is near.

    Args:
        word: the name that is not known.
        known: those that are.
        meant: what it stands for, where something better than its letters says so.
    """
    names = list(known)
    near = meant or difflib.get_close_matches(str(word), names, cutoff=0.5)
    question = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{question}known: {', '.join(names) or 'none'}"
