"""Text sources of a dataset: which files, in which order, and the documents in them.

A file is one document; of a ``.jsonl`` file each line is one, the string under its key ``text``. Documents without text
are left out. Text is UTF-8 and is kept byte for byte: no newline translation, no byte-order-mark removal.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megacpp_mcore.data.files import require_readable
from megacpp_mcore.errors import DataError

DEFAULT_GLOBS = ("*.txt", "*.py", "*.md", "*.jsonl")
LEFT_OUT = (".*", "__pycache__")
"""Names of files and folders that are ignored in a folder."""


@dataclass(frozen=True, order=True)
class Source:
    """One input file; ``relative`` is its POSIX path below the INPUT that led to it, and its name everywhere else.

    ``identity``, device and inode, tells whether two paths lead to one file.
    """

    relative: str
    path: str
    size: int
    mtime_ns: int
    identity: tuple[int, int] = field(compare=False)


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of source ``number``; all of it unless the source is ``.jsonl``."""

    number: int
    source: Source
    start: int
    stop: int


Skipped = dict[str, str | int]
"""A file, or a line of a ``.jsonl`` file, left out under ``--errors skip``: ``relative`` (path), ``offset``, ``reason``."""


def make_source(path: Path, relative: str) -> Source:
    """Return the source for the file at ``path``.

    Raises:
        DataError: it cannot be examined, or is no regular file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(
            f"input {path}: {error.strerror}; expected a text file or a folder of text files that can be read, or a link to "
            "one: mend it, or remove it from the input"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{path} is {stat.filemode(status.st_mode)}, no regular file; expected one, which can be read twice: write the "
            "text to one, or remove this from the input"
        )
    return Source(relative, str(path), status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


def find_sources(inputs: Sequence[str | os.PathLike[str]], globs: Sequence[str] = ()) -> list[Source]:
    """Return the files of ``inputs``, sorted by relative path.

    An INPUT that is a file is taken as it is. A folder is searched recursively for names that match one of ``globs``
    (default: ``*.txt *.py *.md *.jsonl``); names that begin with a dot and ``__pycache__`` are left out, and links to
    folders are not followed.

    Raises:
        DataError: an INPUT does not exist or cannot be read, nothing was found, two files would share a relative path,
            or one file was found twice.
    """
    patterns = tuple(globs) or DEFAULT_GLOBS
    sources: list[Source] = []
    for given in inputs:
        root = Path(given)
        if os.path.isdir(root):
            sources += [make_source(path, path.relative_to(root).as_posix()) for path in walk_files(root, patterns)]
        else:
            sources.append(make_source(root, root.name))
    sources.sort()
    _refuse_twice(sources)
    if not sources:
        raise DataError(
            f"no file in {', '.join(str(i) for i in inputs)} matches {' '.join(patterns)}; "
            "name the files to take with --glob, for example --glob '*.rst'"
        )
    return sources


def walk_files(root: Path, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT) -> Iterator[Path]:
    """Yield the files below ``root`` whose names match one of ``patterns``, but none below or called ``left_out``.

    Raises:
        DataError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; expected a folder that can be listed") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not _matches(name, left_out))
        yield from (
            Path(folder, name) for name in sorted(files) if _matches(name, patterns) and not _matches(name, left_out)
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_twice(sources: Sequence[Source]) -> None:
    """Raise when two sources have one name, or are one file, whose text could then be on both sides of a split."""
    first: dict[str | tuple[int, int], Source] = {}
    for source in sources:
        for key, what in ((source.relative, "have one relative path"), (source.identity, "are one file")):
            other = first.setdefault(key, source)
            if other is not source:
                raise DataError(
                    f"{other.path} and {source.path} {what}; expected every text once, with a name of its own: pass the "
                    "folder that holds both as one INPUT, or leave one of them out"
                )


def cut_sources(sources: Sequence[Source], piece_bytes: int) -> Iterator[Piece]:
    """Yield the sources in order, ``.jsonl`` files in pieces of ``piece_bytes``."""
    for number, source in enumerate(sources):
        step = piece_bytes if source.relative.endswith(".jsonl") else source.size
        for start in range(0, max(source.size, 1), max(step, 1)):
            yield Piece(number, source, start, min(start + step, source.size))


def read_documents(piece: Piece, skipped: list[Skipped] | None) -> Iterator[tuple[str, bytes]]:
    """Yield the documents that begin in ``piece``: the key whose hash decides the side of a split, and the UTF-8 text.

    ``skipped`` takes what cannot be decoded; None raises instead.

    Raises:
        DataError: the file cannot be read, or holds something other than UTF-8 text (or JSON lines with ``text``); the
            message names the byte offset.
    """
    source = piece.source
    with require_readable(source.path), open(source.path, "rb") as stream:
        if source.relative.endswith(".jsonl"):
            yield from _read_lines(piece, stream, skipped)
            return
        text = stream.read()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, error.start, f"byte 0x{text[error.start]:02x} is not UTF-8", skipped)
        return
    if text:
        yield source.relative, text


def _read_lines(piece: Piece, stream: BinaryIO, skipped: list[Skipped] | None) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of the lines that begin in the piece."""
    offset = max(piece.start - 1, 0)
    stream.seek(offset)
    if piece.start:
        # A line that begins exactly at start is ours: reading from the byte before it consumes one newline and no more.
        offset += len(next(stream, b""))
    for line in stream:
        if offset >= piece.stop:
            return
        if line.strip() and (text := _parse_line(piece.source, line, offset, skipped)):
            # A line has no name of its own. Its text names it, so copies of one text fall on one side of a split.
            yield hashlib.sha256(text).hexdigest(), text
        offset += len(line)


def _parse_line(source: Source, line: bytes, offset: int, skipped: list[Skipped] | None) -> bytes:
    """Return the text of one JSON line; empty when it was skipped."""
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError("no string under the key 'text'")
        return record["text"].encode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, offset + error.start, f"byte 0x{line[error.start]:02x} is not UTF-8", skipped)
    except (ValueError, RecursionError) as error:
        _refuse(source, offset, f"the JSON line that begins there is not usable: {error}", skipped)
    return b""


def _refuse(source: Source, offset: int, reason: str, skipped: list[Skipped] | None) -> None:
    """Record what cannot be decoded, or raise when nothing may be skipped."""
    if skipped is None:
        raise DataError(
            f"{source.path}, byte offset {offset}: {reason}; expected UTF-8 text. Repair the file, leave it out, or "
            "pass --errors skip to list it in the manifest and go on"
        )
    skipped.append({"relative": source.relative, "offset": offset, "reason": reason})


def parse_split(text: str) -> dict[str, float]:
    """Parse ``train=0.98,valid=0.02`` into the share of each name.

    Raises:
        DataError: not of that form, a name given twice, or shares that are not positive or do not add up to 1.
    """
    shares: dict[str, float] = {}
    parts = [part.partition("=") for part in text.split(",")]
    with suppress(ValueError):
        shares = {name.strip(): float(share) for name, _, share in parts}
    are_words = all(name.replace("_", "").replace("-", "").isalnum() for name in shares)
    total = sum(shares.values())
    if len(shares) < len(parts) or not are_words or not min(shares.values()) > 0 or not abs(total - 1) <= 1e-9:
        raise DataError(
            f"split {text!r} is {shares or 'no list of shares'}, which add up to {total}; expected NAME=SHARE,NAME=SHARE, each "
            "name a word that occurs once, with shares above 0 that add up to 1, such as train=0.98,valid=0.02"
        )
    return shares


def choose_split(key: str, shares: Iterable[float]) -> int:
    """Return the index of the share of ``shares`` in which the document called ``key`` falls; depends on these two alone."""
    position = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2.0**64
    bounds = list(itertools.accumulate(shares))
    return min(bisect_right(bounds, position), len(bounds) - 1)
