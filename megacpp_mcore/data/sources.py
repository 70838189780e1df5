"""Text sources of a dataset: which files, in which order, and the documents in them.

A file is one document; of JSON lines (``.jsonl``, ``.ndjson``, ``.json``, in any case) each line is one, the string under a
key, and of Parquet each row, the string in that column. Files may be packed (``.gz``, ``.zst``). Documents without text are
yielded empty. Text is UTF-8 and is kept byte for byte: no newline translation, no byte-order-mark removal.
"""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import stat
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megacpp_mcore.data.readable import require_readable
from megacpp_mcore.errors import DataError

DEFAULT_GLOBS = ("*.txt", "*.py", "*.md", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")
_TABLE = ".parquet"
_ROWS = (".csv", ".tsv")
"""Suffixes of tables, which are documents of a folder only if ``--glob`` takes them."""
_UNKNOWN = (".xz", ".bz2", ".zip", ".tar", ".tgz", ".arrow")
"""Suffixes of files that are not read."""
_STARTS = {
    b"\x1f\x8b": "gzip: name the file .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard: name the file .zst",
    b"\xff\xfe": "UTF-16: convert it by iconv",
    b"\xfe\xff": "UTF-16: convert it by iconv",
}
"""What a file is that begins so, and what to do."""
_NULS = 20
"""Text of which more than one byte in so many is NUL, every other byte, is UTF-16, where each space has one."""
_WIDE = "NUL bytes, as in UTF-16 without a byte-order mark: convert it, as by iconv -f UTF-16LE -t UTF-8"
JSON_KEY = "text"
LEFT_OUT = (".*", "__pycache__")
"""Names of files and folders that are ignored in a folder."""


@dataclass(frozen=True, order=True)
class Source:
    """One input file; ``relative`` is its POSIX path below the INPUT that contains it, and its name everywhere else.

    ``identity``, device and inode, shows whether two paths are the same file.
    """

    relative: str
    path: str
    size: int
    mtime_ns: int
    identity: tuple[int, int] = field(compare=False)

    @property
    def is_packed(self) -> bool:
        """Whether the name is that of a compressed file."""
        return self.relative.lower().endswith(_PACKED)

    @property
    def are_lines(self) -> bool:
        """Whether the name, without that of a packing, is that of JSON lines."""
        name = self.relative.lower()
        return (name.rpartition(".")[0] if self.is_packed else name).endswith(_LINES)

    @property
    def is_table(self) -> bool:
        """Whether the name is that of a Parquet file."""
        return self.relative.lower().endswith(_TABLE)


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of source ``number``; all of it unless the source is JSON lines or a table.

    Of packed lines ``lines`` is the piece's text, which begins at ``offset`` of the unpacked one. Of a table the piece is the
    row group ``offset``, and start and stop only divide the file's size.
    """

    number: int
    source: Source
    start: int
    stop: int
    lines: bytes | None = None
    offset: int = 0


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
            f"{path} is {stat.filemode(status.st_mode)}, not a regular file; expected one, which can be read twice: write the "
            "text to one, or remove this from the input"
        )
    return Source(relative, str(path), status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


def find_sources(inputs: Sequence[str | os.PathLike[str]], globs: Sequence[str] = (), json_key: str = JSON_KEY) -> list[Source]:
    """Return the files of ``inputs``, sorted by relative path.

    An INPUT that is a file is taken as it is. A folder is searched recursively for names that match one of ``globs``
    (default: :data:`DEFAULT_GLOBS`, in any case, and a line on stderr counts the others); names that begin with a dot
    and ``__pycache__`` are left out, and links to folders are not followed.

    Raises:
        DataError: an INPUT does not exist or cannot be read, nothing was found, two files would share a relative path,
            one file was found twice, or none can have ``json_key``.
    """
    patterns = tuple(globs) or DEFAULT_GLOBS
    sources: list[Source] = []
    for given in inputs:
        if not os.fspath(given):
            raise DataError("an INPUT is empty; expected a file or a folder: is the variable that names it set?")
        root, links = Path(given), list[Path]()
        if os.path.isdir(root):
            paths = list(walk_files(root, patterns if globs else ("*",), links=links))
            taken = [path for path in paths if globs or _matches(path.name.lower(), patterns)]
            sources += [make_source(path, path.relative_to(root).as_posix()) for path in taken]
            others = Counter(path.suffix.lower() or "without a suffix" for path in set(paths) - set(taken))
            if others:
                kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
                print(f"{root}: files left out: {kinds} (take some with --glob)", file=sys.stderr)
            if links:
                named = ", ".join(str(link.relative_to(root)) for link in links[:3])
                print(f"{root}: links to folders left out: {named} (name each as an input)", file=sys.stderr)
        else:
            if (name := root.name.lower().removesuffix(".gz").removesuffix(".zst")).endswith(_ROWS):
                raise DataError(
                    f"{root}: {os.path.splitext(name)[1]} is a table; expected text: write each row's text to JSON lines, or "
                    "name the file .txt to take it as one document"
                )
            sources.append(make_source(root, root.name))
    sources.sort()
    _refuse_twice(sources)
    if not sources:
        raise DataError(
            f"no file in {', '.join(str(i) for i in inputs)} matches {' '.join(patterns)}; "
            "name the files to take with --glob, for example --glob '*.rst'"
        )
    if json_key != JSON_KEY and not any(source.are_lines or source.is_table for source in sources):
        raise DataError(
            f"--json-key {json_key} names a key of JSON lines or a column of Parquet, and {len(sources)} files, from "
            f"{sources[0].path}, are neither by their names: name one .jsonl or .parquet, or remove the flag"
        )
    return sources


def walk_files(
    root: Path, patterns: Sequence[str], left_out: Sequence[str] = LEFT_OUT, links: list[Path] | None = None
) -> Iterator[Path]:
    """Yield the files below ``root`` whose names match one of ``patterns``, but none below or called ``left_out``.

    Links to folders are not followed, but added to ``links``.

    Raises:
        DataError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; expected a folder that can be listed") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not _matches(name, left_out))
        if links is not None:
            links += (path for path in (Path(folder, name) for name in folders) if path.is_symlink())
        yield from (Path(folder, name) for name in sorted(files) if _matches(name, patterns) and not _matches(name, left_out))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_twice(sources: Sequence[Source]) -> None:
    """Raise DataError if two sources have one name or are one file: its text could be on both sides of a split."""
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
    """Yield the sources in order, JSON lines in pieces of ``piece_bytes`` (unpacked), tables in row groups.

    Raises:
        DataError: a packed file or a table is damaged, or the package that reads it is not installed.
    """
    for number, source in enumerate(sources):
        if source.is_table or (source.is_packed and source.are_lines):
            yield from (_row_groups if source.is_table else _unpacked_lines)(number, source, piece_bytes)
            continue
        step = piece_bytes if source.are_lines else source.size
        for start in range(0, max(source.size, 1), max(step, 1)):
            yield Piece(number, source, start, min(start + step, source.size))


def _unpacked_lines(number: int, source: Source, piece_bytes: int) -> Iterator[Piece]:
    """Yield packed JSON lines in pieces; only the last one ends with the file."""
    with _opened(source) as (raw, stream):
        lines, start, offset, is_last = stream.readlines(piece_bytes), 0, 0, False
        while not is_last:
            after = stream.readlines(piece_bytes) if lines else []
            is_last = not after
            stop, text = source.size if is_last else min(raw.tell(), source.size - 1), b"".join(lines)
            yield Piece(number, source, start, stop, text, offset)
            lines, start, offset = after, stop, offset + len(text)


def _row_groups(number: int, source: Source, _: int) -> Iterator[Piece]:
    """Yield one piece for each row group of a table, or one for a table without rows."""
    with _table(source) as table:
        count = max(table.num_row_groups, 1)
    bounds = [source.size * group // count for group in range(count + 1)]
    for group, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield Piece(number, source, start, stop, offset=group)


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[BinaryIO, Any]]:
    """Open a source, and the unpacked stream in it."""
    with require_readable(source.path), open(source.path, "rb") as raw:
        if not source.is_packed:
            yield raw, raw
            return
        is_gzip = source.relative.lower().endswith(".gz")
        with _whole(source):
            packed = raw if is_gzip else _arrow("pyarrow", source).CompressedInputStream(raw, "zstd")
            yield raw, gzip.GzipFile(fileobj=raw) if is_gzip else io.BufferedReader(packed)


@contextlib.contextmanager
def _table(source: Source) -> Iterator[Any]:
    """Open a Parquet file."""
    parquet = _arrow("pyarrow.parquet", source)
    with require_readable(source.path), _whole(source), parquet.ParquetFile(source.path) as table:
        yield table


@contextlib.contextmanager
def _whole(source: Source) -> Iterator[None]:
    """Turn errors of the readers of packed files, which have no errno, into a DataError.

    pyarrow raises ValueErrors and OSErrors.
    """
    try:
        yield
    except (EOFError, zlib.error, OSError, ValueError) as error:
        if isinstance(error, DataError) or getattr(error, "errno", None):
            raise
        raise DataError(
            f"{source.path} cannot be unpacked: {error}; expected a whole {source.relative.rpartition('.')[2]} file: restore "
            "it from a copy, or leave it out"
        ) from error


def _arrow(name: str, source: Source) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"reading {source.path} needs pyarrow, which cannot be imported here ({error}): pip install "
            "'megacpp-mcore[data]', or unpack it first"
        ) from error


def read_documents(piece: Piece, skipped: list[Skipped] | None, json_key: str = JSON_KEY) -> Iterator[tuple[str, bytes]]:
    """Yield the documents that begin in ``piece``: the key that is hashed to choose the side of a split, and the UTF-8 text.

    ``skipped`` collects what cannot be decoded; None raises instead. ``json_key`` is the key of the text in JSON lines.

    Raises:
        DataError: the file cannot be read, or holds something other than UTF-8 text (or JSON lines with that key), or JSON
            lines by another name; the message names the byte offset.
    """
    source = piece.source
    if source.is_table:
        yield from _read_rows(piece, skipped, json_key)
        return
    if piece.lines is not None:
        yield from _read_lines(piece, io.BytesIO(piece.lines), skipped, json_key)
        return
    if (name := source.relative.lower().removesuffix(".gz").removesuffix(".zst")).endswith(_UNKNOWN):
        _refuse(source, 0, f"{os.path.splitext(name)[1]} is not text; unpack it first", skipped)
        return
    with _opened(source) as (_, stream):
        if source.are_lines:
            yield from _read_lines(piece, stream, skipped, json_key)
            return
        text = stream.read()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, error.start, _undecodable(text, error), skipped)
        return
    fewer, more = sorted(text[start::2].count(0) for start in (0, 1))
    if more > 1 and more > 9 * fewer and more * _NULS > len(text):
        _refuse(source, text.index(0), _WIDE, skipped)
        return
    first, _, rest = text.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    second, record = rest.lstrip().partition(b"\n")[0], _record(first)
    if isinstance(record.get(json_key), str) or (record and (not second or _record(second))):
        keys = ", ".join(map(repr, list(record)[:8]))
        _refuse(
            source,
            0,
            f"JSON lines begin there, with {keys}: name the file .jsonl, and their key with --json-key",
            skipped,
        )
    else:
        yield source.relative, text


def _record(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in ``line``; empty if there is none."""
    if line.startswith(b"{"):
        with contextlib.suppress(ValueError, RecursionError):
            return dict(json.loads(line))
    return {}


def _read_lines(piece: Piece, stream: BinaryIO, skipped: list[Skipped] | None, json_key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of the lines that begin in the piece."""
    offset = piece.offset
    if piece.lines is None:
        offset = max(piece.start - 1, 0)
        stream.seek(offset)
        if piece.start:
            # A line that begins exactly at start is ours: reading from the byte before it consumes one newline and no more.
            offset += len(next(stream, b""))
    for line in stream:
        if piece.lines is None and offset >= piece.stop:
            return
        if line.strip() and (text := _parse_line(piece.source, line, offset, skipped, json_key)) is not None:
            # A line has no name: its text is the key, so copies of one text fall on one side of a split.
            yield hashlib.sha256(text).hexdigest(), text
        offset += len(line)


def _read_rows(piece: Piece, skipped: list[Skipped] | None, column: str) -> Iterator[tuple[str, bytes]]:
    """Yield the documents of a table's row group."""
    with _table(piece.source) as table:
        names = table.schema_arrow.names
        if names.count(column) != 1:
            number = "no column" if column not in names else f"{names.count(column)} columns"
            _refuse(piece.source, 0, f"{number} {column!r}; found {', '.join(names)}: --json-key names another", skipped)
            return
        if piece.offset >= table.num_row_groups:
            return
        first = sum(table.metadata.row_group(group).num_rows for group in range(piece.offset))
        values = table.read_row_group(piece.offset, columns=[column])[column]
    # Nothing has checked that the bytes of a column of strings are text.
    binary = {"string": "binary", "large_string": "large_binary"}.get(str(values.type))
    for row, value in enumerate((values.cast(binary) if binary else values).to_pylist(), first):
        if binary and value is not None:
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                _refuse(piece.source, row, f"byte {error.start} of its text is not UTF-8", skipped)
                continue
        if not isinstance(value, str):
            _refuse(piece.source, row, f"the value of {column!r} is a {type(value).__name__}, not a string", skipped)
        else:
            text = value.encode("utf-8")
            yield hashlib.sha256(text).hexdigest(), text


def _parse_line(source: Source, line: bytes, offset: int, skipped: list[Skipped] | None, json_key: str) -> bytes | None:
    """Return the text of one JSON line; None when it was skipped."""
    try:
        record = json.loads(line.decode("utf-8"))
        items = record if isinstance(record, dict) else {}
        if isinstance(text := items.get(json_key), str):
            return text.encode("utf-8")
        keys = "; ".join(f"{key!r}, a {type(value).__name__}" for key, value in list(items.items())[:8])
        found = f"found {keys}: --json-key names another" if keys else f"found no object with keys{_hint(line, record)}"
        raise ValueError(f"no string under the key {json_key!r}; {found}")
    except UnicodeDecodeError as error:
        _refuse(source, offset + error.start, _undecodable(line, error), skipped)
    except (ValueError, RecursionError) as error:
        _refuse(source, offset, f"the JSON line that begins there is not usable: {error}{_hint(line, error)}", skipped)
    return None


def _hint(line: bytes, found: object) -> str:
    """Say what a JSON line is in place of an object, and what to do; ``found``: its value, or why it has none."""
    if isinstance(found, list) or (isinstance(found, json.JSONDecodeError) and found.pos >= len(found.doc.rstrip())):
        return "; JSON over many lines, or in an array, becomes JSON lines by jq -c . or, of an array, jq -c '.[]'"
    if not isinstance(found, json.JSONDecodeError):
        return ""
    if line.startswith(codecs.BOM_UTF8):
        return "; it begins with a byte-order mark, which JSON has not: remove it, as by sed '1s/^\\xef\\xbb\\xbf//'"
    if b"\0" in line:
        return f"; it holds {_WIDE}"
    if b"\r" in line.strip():
        return "; its lines end with CR alone: convert them, as by tr '\\r' '\\n'"
    return "" if line.endswith(b"\n") else "; its file ends in this line, and may be cut off"


def _undecodable(text: bytes, error: UnicodeDecodeError) -> str:
    kind = next((f", and it begins like {kind}" for start, kind in _STARTS.items() if text.startswith(start)), "")
    return f"byte 0x{text[error.start]:02x} is not UTF-8{kind}"


def _refuse(source: Source, offset: int, reason: str, skipped: list[Skipped] | None) -> None:
    """Record what cannot be decoded, or raise if nothing may be skipped."""
    if skipped is None:
        unit, expected = "byte offset", "JSON objects, one a line" if source.are_lines else "UTF-8 text"
        if source.is_table:
            unit, expected = "row", "a string in every row"
        raise DataError(
            f"{source.path}, {unit} {offset}: {reason}; expected {expected}. Repair the file, or leave it "
            "out, as `data prepare --errors skip` does, which lists it in the manifest"
        )
    skipped.append({"relative": source.relative, "offset": offset, "reason": reason})


def parse_split(text: str) -> dict[str, float]:
    """Parse ``train=0.98,valid=0.02`` into the share of each name.

    Raises:
        DataError: not of that form, a name given twice, or shares that are not positive or do not add up to 1.
    """
    shares: dict[str, float] = {}
    parts = [part.partition("=") for part in text.split(",")]
    with contextlib.suppress(ValueError):
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
    """Return the index of the share that the document ``key`` falls into; depends on nothing else."""
    position = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2.0**64
    bounds = list(itertools.accumulate(shares))
    return min(bisect_right(bounds, position), len(bounds) - 1)
