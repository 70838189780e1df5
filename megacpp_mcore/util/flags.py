"""Reads a command line of ``--flag value …`` words like Megatron's own parser, as far as the words allow."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Mapping, Sequence

from megacpp_mcore.errors import DataError
from megacpp_mcore.util.files import writable

Flags = Mapping[str, tuple[str, ...]]


def read(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map each flag to the values that follow it, ``--flag=value`` included; the last occurrence of a flag counts."""
    flags: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flags[flag] = (value,) if equals else ()
        elif flag:
            flags[flag] += (word,)
    return flags


def first(flags: Flags, flag: str) -> str | None:
    """Return the first value of ``flag``; None without one."""
    return next(iter(flags.get(flag, ())), None)


def whole(flags: Flags, flag: str, error: type[Exception], least: int | None = None) -> int | None:
    """Return the first value of ``flag`` as an integer, ``least`` or more; None without one.

    Raises:
        error: it is not such an integer.
    """
    text = first(flags, flag)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise error(f"{flag} is {text!r}; expected a whole number{bound}, such as 2")
    return number


def output(text: str, replaced: str = "") -> str:
    """Parse the name of a new file that rank 0 will write, for argparse; refuse it before anything starts if it cannot be.

    A file with ``replaced`` in its first 4096 bytes may be there: it is an earlier one.
    """
    try:
        is_there = os.environ.get("RANK", "0") == "0" and (path := writable(text)).exists()
        if is_there and not (replaced and replaced.encode() in path.read_bytes()[:4096]):
            raise DataError(f"{text} exists; expected a new file: name another, or remove it", code="exists")
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def utf8(text: str) -> str:
    """Parse text for argparse: words of a command line that are not UTF-8 arrive with surrogates, which no tokenizer takes."""
    if not text:
        raise argparse.ArgumentTypeError("found '', expected at least a character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected UTF-8: mind the terminal's encoding") from error
    return text


def positive(text: str) -> int:
    """Parse a whole number, 1 or more, for argparse."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, 1 or more")
    return int(text)


def not_negative(text: str) -> float:
    """Parse a finite number, 0 or more, for argparse."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"found {text!r}, expected a finite number, 0 or more")
