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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megacpp_mcore.errors import DataError

DEFAULT_GLOBS = ("*.txt", "*.py", "*.md", "*.jsonl")


@dataclass(frozen=True, order=True)
class Source:
    """One input file; ``relative`` is its POSIX path below the INPUT that led to it, and its name everywhere else."""

    relative: str
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Document:
    """One document: its text as UTF-8, and the ``key`` whose hash decides the side of a hold-out split."""

    key: str
    text: bytes


@dataclass(frozen=True)
class Skipped:
    """A file, or a line of a ``.jsonl`` file, that was left out under ``--errors skip``."""

    relative: str
    offset: int
    reason: str


def make_source(path: Path, relative: str) -> Source:
    """Return the source for the file at ``path``.

    Raises:
        DataError: the file cannot be examined.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a readable text file: remove it from the input") from error
    return Source(relative, str(path), status.st_size, status.st_mtime_ns)


def find_sources(inputs: Sequence[str | os.PathLike[str]], globs: Sequence[str] = ()) -> list[Source]:
    """Return the files of ``inputs``, sorted by relative path.

    An INPUT that is a file is taken as it is. A folder is searched recursively for names that match one of ``globs``
    (default: ``*.txt *.py *.md *.jsonl``); names that begin with a dot and ``__pycache__`` are left out, and links to
    folders are not followed.

    Raises:
        DataError: an INPUT does not exist, nothing was found, or two files would share a relative path.
    """
    patterns = tuple(globs) or DEFAULT_GLOBS
    sources: list[Source] = []
    for given in inputs:
        root = Path(given)
        if root.is_dir():
            sources += [make_source(path, path.relative_to(root).as_posix()) for path in _walk(root, patterns)]
        elif root.exists():
            sources.append(make_source(root, root.name))
        else:
            raise DataError(f"input {root} does not exist; expected a text file or a folder of text files")
    sources.sort()
    _refuse_same_names(sources)
    if not sources:
        raise DataError(
            f"no file in {', '.join(str(i) for i in inputs)} matches {' '.join(patterns)}; "
            "name the files to take with --glob, for example --glob '*.rst'"
        )
    return sources


def _walk(root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the matching files below ``root``; a folder that cannot be listed raises."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; expected a folder that can be listed") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            if not name.startswith(".") and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                yield Path(folder, name)


def _refuse_same_names(sources: Sequence[Source]) -> None:
    """Raise when two sources share a relative path: their names would not tell them apart."""
    for first, second in itertools.pairwise(sources):
        if first.relative == second.relative:
            raise DataError(
                f"{first.path} and {second.path} have the same relative path {first.relative!r}; expected every "
                "document to have a name of its own: pass the folder that holds both as one INPUT"
            )


def read_documents(source: Source, start: int, stop: int, skipped: list[Skipped] | None) -> Iterator[Document]:
    """Yield the documents of ``source`` that begin in bytes ``start`` to ``stop``.

    Args:
        source: the file.
        start: first byte; other than 0 only for ``.jsonl``.
        stop: the byte after the last; the file's size unless ``.jsonl``.
        skipped: where undecodable files and lines are listed; None raises instead.

    Raises:
        DataError: the file cannot be read, or holds something other than UTF-8 text (or JSON lines with ``text``); the
            message names the byte offset.
    """
    try:
        with open(source.path, "rb") as stream:
            if source.relative.endswith(".jsonl"):
                yield from _read_lines(source, stream, start, stop, skipped)
                return
            text = stream.read()
    except OSError as error:
        raise DataError(f"{source.path}: {error.strerror}; expected a readable text file") from error
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, error.start, f"byte 0x{text[error.start]:02x} is not UTF-8", skipped)
        return
    if text:
        yield Document(source.relative, text)


def _read_lines(
    source: Source, stream: BinaryIO, start: int, stop: int, skipped: list[Skipped] | None
) -> Iterator[Document]:
    """Yield the documents of the lines that begin in ``[start, stop)``."""
    offset = max(start - 1, 0)
    stream.seek(offset)
    if start:
        # A line that begins exactly at start is ours: from the byte before it, this reads one newline and no more.
        offset += len(next(stream, b""))
    for line in stream:
        if offset >= stop:
            return
        if line.strip():
            document = _parse_line(source, line, offset, skipped)
            if document is not None:
                yield document
        offset += len(line)


def _parse_line(source: Source, line: bytes, offset: int, skipped: list[Skipped] | None) -> Document | None:
    """Return the document of one JSON line; None when it holds no text or was skipped."""
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError("no string under the key 'text'")
        text = record["text"].encode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, offset + error.start, f"byte 0x{line[error.start]:02x} is not UTF-8", skipped)
        return None
    except (ValueError, RecursionError) as error:
        _refuse(source, offset, f"the JSON line that begins there is not usable: {error}", skipped)
        return None
    # A line has no name of its own. Its text names it, so copies of one text fall on one side of a split.
    return Document(hashlib.sha256(text).hexdigest(), text) if text else None


def _refuse(source: Source, offset: int, reason: str, skipped: list[Skipped] | None) -> None:
    """List what cannot be decoded, or raise when nothing may be skipped."""
    if skipped is None:
        raise DataError(
            f"{source.path}, byte offset {offset}: {reason}; expected UTF-8 text. Repair the file, leave it out, or "
            "pass --errors skip to list it in the manifest and go on"
        )
    skipped.append(Skipped(source.relative, offset, reason))


@dataclass(frozen=True)
class Split:
    """A named share of the documents."""

    name: str
    share: float


def parse_split(text: str) -> tuple[Split, ...]:
    """Parse ``train=0.98,valid=0.02``.

    Raises:
        DataError: not of that form, a name given twice, or shares that are not positive or do not add up to 1.
    """
    expected = "expected NAME=SHARE,NAME=SHARE with shares above 0 that add up to 1, such as train=0.98,valid=0.02"
    splits = []
    for item in text.split(","):
        name, _, share = item.partition("=")
        try:
            splits.append(Split(name.strip(), float(share)))
        except ValueError as error:
            raise DataError(f"split {text!r}: {item!r} has no number after '='; {expected}") from error
    names = [split.name for split in splits]
    if not all(name.replace("_", "").replace("-", "").isalnum() for name in names) or len(set(names)) != len(names):
        raise DataError(f"split {text!r}: found the names {names}, each must be a word and occur once; {expected}")
    total = sum(split.share for split in splits)
    if not all(split.share > 0 for split in splits) or not abs(total - 1) <= 1e-9:
        raise DataError(f"split {text!r}: the shares add up to {total}; {expected}")
    return tuple(splits)


def choose_split(key: str, splits: Sequence[Split]) -> int:
    """Return which of ``splits`` the document called ``key`` falls into: a function of the key and the shares alone."""
    position = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2.0**64
    bound = 0.0
    for number, split in enumerate(splits):
        bound += split.share
        if position < bound:
            return number
    return len(splits) - 1
