"""Text sources of a dataset: which files, in which order, and the documents in them.

A file is one document; of JSON lines (``.jsonl``, ``.ndjson``, ``.json``, in any case) each line is one, the string under a
key. Documents without text are left out. Text is UTF-8 and is kept byte for byte: no newline translation, no byte-order-mark
removal.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import os
import stat
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megacpp_mcore.data.readable import require_readable
from megacpp_mcore.errors import DataError

DEFAULT_GLOBS = ("*.txt", "*.py", "*.md", "*.jsonl")
_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".parquet", ".arrow")
JSON_KEY = "text"
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

    @property
    def are_lines(self) -> bool:
        """Whether the name is that of JSON lines."""
        return self.relative.lower().endswith(_LINES)


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of source ``number``; all of it unless the source is JSON lines."""

    number: int
    source: Source
    start: int
    stop: int


Skipped = dict[str, str | int]
"""A file, or a JSON line, left out under ``--errors skip``: ``relative`` (path), ``offset``, ``reason``."""


def make_source(path: Path, relative: str) -> Source:
    """Return the source for the file at ``path``.

    Raises:
        DataError: it cannot be examined, or is not a regular file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(
            f"input {path}: {error.strerror}; expected a text file or a folder of text files that can be read, or a link to "
            "one: fix it, or remove it from the input"
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
    (default: ``*.txt *.py *.md *.jsonl``, in any case, and a line on stderr counts the others); names that begin with a dot
    and ``__pycache__`` are left out, and links to folders are not followed.

    Raises:
        DataError: an INPUT does not exist or cannot be read, nothing was found, two files would share a relative path,
            or one file was found twice.
    """
    patterns = tuple(globs) or DEFAULT_GLOBS
    sources: list[Source] = []
    for given in inputs:
        root = Path(given)
        if os.path.isdir(root):
            found = list(walk_files(root, patterns if globs else ("*",)))
            taken = [path for path in found if globs or _matches(path.name.lower(), patterns)]
            sources += [make_source(path, path.relative_to(root).as_posix()) for path in taken]
            others = Counter(path.suffix.lower() or "without a suffix" for path in set(found) - set(taken))
            if others and taken:
                kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
                print(f"{root}: files left out: {kinds} (take some with --glob)", file=sys.stderr)
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
                    "folder that holds both as one INPUT, or leave one of them out",
                    code="duplicate",
                )


def cut_sources(sources: Sequence[Source], piece_bytes: int) -> Iterator[Piece]:
    """Yield the sources in order, JSON lines in pieces of ``piece_bytes``."""
    for number, source in enumerate(sources):
        step = piece_bytes if source.are_lines else source.size
        for start in range(0, max(source.size, 1), max(step, 1)):
            yield Piece(number, source, start, min(start + step, source.size))


def read_documents(
    piece: Piece, skipped: list[Skipped] | None, json_key: str = JSON_KEY
) -> Iterator[tuple[str, bytes]]:
    """Yield the documents that begin in ``piece``: the key whose hash decides the side of a split, and the UTF-8 text.

    ``skipped`` takes what cannot be decoded; None raises instead. ``json_key`` is the key of the text in JSON lines.

    Raises:
        DataError: the file cannot be read, or holds something other than UTF-8 text (or JSON lines with that key), or JSON
            lines by another name; the message names the byte offset.
    """
    source = piece.source
    with require_readable(source.path), open(source.path, "rb") as stream:
        if source.are_lines:
            yield from _read_lines(piece, stream, skipped, json_key)
            return
        text = stream.read()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        unpack = "; unpack it first" if source.relative.lower().endswith(_PACKED) else ""
        _refuse(source, error.start, f"byte 0x{text[error.start]:02x} is not UTF-8{unpack}", skipped)
        return
    if isinstance(_record(text.lstrip().partition(b"\n")[0]).get(json_key), str):
        _refuse(source, 0, f"a JSON line with the key {json_key!r} begins there: name the file .jsonl", skipped)
    elif text:
        yield source.relative, text


def _record(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in ``line``; empty where there is none."""
    if line.startswith(b"{"):
        with suppress(ValueError, RecursionError):
            return dict(json.loads(line))
    return {}


def _read_lines(
    piece: Piece, stream: BinaryIO, skipped: list[Skipped] | None, json_key: str
) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of the lines that begin in the piece."""
    offset = max(piece.start - 1, 0)
    stream.seek(offset)
    if piece.start:
        # A line that begins exactly at start is ours: reading from the byte before it consumes one newline and no more.
        offset += len(next(stream, b""))
    for line in stream:
        if offset >= piece.stop:
            return
        if line.strip() and (text := _parse_line(piece.source, line, offset, skipped, json_key)):
            # A line has no name of its own. Its text names it, so copies of one text fall on one side of a split.
            yield hashlib.sha256(text).hexdigest(), text
        offset += len(line)


def _parse_line(source: Source, line: bytes, offset: int, skipped: list[Skipped] | None, json_key: str) -> bytes:
    """Return the text of one JSON line; empty when it was skipped."""
    try:
        record = json.loads(line.decode("utf-8"))
        items = record if isinstance(record, dict) else {}
        if isinstance(text := items.get(json_key), str):
            return text.encode("utf-8")
        keys = "; ".join(f"{key!r}, a {type(value).__name__}" for key, value in list(items.items())[:8])
        found = f"found {keys}: --json-key names another" if keys else "found no object with keys"
        raise ValueError(f"no string under the key {json_key!r}; {found}")
    except UnicodeDecodeError as error:
        _refuse(source, offset + error.start, f"byte 0x{line[error.start]:02x} is not UTF-8", skipped)
    except (ValueError, RecursionError) as error:
        _refuse(source, offset, f"the JSON line that begins there is not usable: {error}", skipped)
    return b""


def _refuse(source: Source, offset: int, reason: str, skipped: list[Skipped] | None) -> None:
    """Record what cannot be decoded, or raise when nothing may be skipped."""
    if skipped is None:
        expected = "JSON objects, one a line" if source.are_lines else "UTF-8 text"
        raise DataError(
            f"{source.path}, byte offset {offset}: {reason}; expected {expected}. Repair the file, leave it out, or "
            "pass --errors skip to list it in the manifest and continue"
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
    """Return the index of the share of ``shares`` in which the document called ``key`` falls; depends on nothing else."""
    position = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2.0**64
    bounds = list(itertools.accumulate(shares))
    return min(bisect_right(bounds, position), len(bounds) - 1)
