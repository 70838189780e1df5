"""Files that a run leaves: appended a line at a time, or replaced as a whole, so that a killed process leaves none half."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError

logger = logging.getLogger(__name__)
_LONGEST_LINE = 2**20
"""Bytes, more than any line that is recorded has."""


class Appender:
    """Appends lines to the file at ``path``, each in one write to the operating system.

    A write that fails, as on a full disk, ends what is recorded there with a warning, and not the run. What it left of a line
    is taken away by the first line of the next process, which is so one of its own.

    Raises:
        DataError: the file cannot be opened for appending, or is a pipe or socket, whose reader could hold training up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mended = False
        try:
            if path.exists():
                _refuse_pipe(path)
            self._output: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a file that can be appended to") from error

    def append(self, line: str) -> None:
        """Write ``line``, and what ends one; nothing once a write has failed."""
        if self._output is None:
            return
        try:
            missing = b"" if self._mended else _mend_end(self._output, self.path)
            self._mended = True
            content = missing + (line + "\n").encode()
            written = os.write(self._output, content)
            why = f"{written} of {len(content)} bytes were written" if written < len(content) else ""
        except OSError as error:
            why = error.strerror or repr(error)
        if why:
            logger.warning("%s: %s; this process records nothing more there, and training goes on", self.path, why)
            self.close()

    def close(self) -> None:
        """Close the file, if it is open."""
        output, self._output = self._output, None
        if output is not None:
            try:
                os.close(output)
            except OSError as error:  # a network file system says only now that it could not write
                logger.warning("%s: %s; what was recorded last may be missing there", self.path, error.strerror)


def _refuse_pipe(path: Path) -> None:
    """Raise DataError if what is at ``path`` has another end."""
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise DataError(
            f"{path} is a {'pipe' if stat.S_ISFIFO(mode) else 'socket'}; expected a file: name another, and read it from there"
        )


def _mend_end(output: int, path: Path) -> bytes:
    """Take a torn line away from the end of the file; what else is there is kept, and what it lacks to be a line returned."""
    about = os.fstat(output)
    if not stat.S_ISREG(about.st_mode):
        return b""
    begin = max(0, about.st_size - _LONGEST_LINE)
    last = os.pread(output, about.st_size - begin, begin).rpartition(b"\n")[2]
    if not last:
        return b""
    if not _is_torn(last):
        return b"\n"
    logger.warning("%s ends in the middle of a line, whose %d bytes are taken away", path, len(last))
    os.ftruncate(output, about.st_size - len(last))
    return b""


def _is_torn(text: bytes) -> bool:
    """Whether a line is the beginning of a record and no more; a machine that lost power may leave zeros instead."""
    written = text.rstrip(b"\0")
    try:
        json.loads(text)
    except ValueError:
        return not written or written.startswith(b"{")
    return False


class LineReader[Record]:
    """Reads the records in a file of JSON lines, also while it grows.

    A line that was cut short at the end of the file, or before the first line of a further start, is left out with a warning;
    anywhere else it is damage.

    Args:
        path: the file; it need not be there yet.
        parse: makes a record of what JSON says; what is none makes it raise an error of Python's own.
        begins: whether a record, given the one before it, is the first of a start.
        what: that a line should be.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[Any], Record],
        begins: Callable[[Record, Record | None], bool],
        what: str,
    ) -> None:
        self.path = path
        self._parse, self._begins, self._what = parse, begins, what
        self._offset = self._number = 0
        self._before: Record | None = None
        self._torn: int | None = None

    def read_new(self) -> Iterator[Record]:
        """The records whose lines were completed since the last call; none while there is no file.

        Raises:
            DataError: a line is no record.
        """
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return
        *whole, rest = content.split(b"\n")
        self._offset += len(content) - len(rest)
        for text in whole:
            self._number += 1
            try:
                said = json.loads(text)
            except ValueError as error:
                self._refuse_torn()
                if not _is_torn(text):
                    raise self._damaged(self._number, repr(error)) from error
                self._torn = self._number
                logger.warning("%s, line %d: cut short; it is left out", self.path, self._number)
            else:
                yield self._take(said)

    def read_all(self) -> Iterator[Record]:
        """The same, of a file that nobody is expected to go on with: a last line that was not completed is warned of.

        Raises:
            DataError: a line is no record.
        """
        yield from self.read_new()
        if self.path.is_file() and self.path.stat().st_size > self._offset:
            logger.warning("%s, line %d: not completed; it is left out", self.path, self._number + 1)

    def _take(self, said: Any) -> Record:
        try:
            record = self._parse(said)
            begins = self._begins(record, self._before)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._damaged(self._number, repr(error)) from error
        if not begins:
            self._refuse_torn()
        self._before, self._torn = record, None
        return record

    def _refuse_torn(self) -> None:
        """The start of a torn line goes on."""
        if self._torn is not None:
            raise self._damaged(self._torn, "cut short, and the same start goes on after it")

    def _damaged(self, number: int, why: str) -> DataError:
        return DataError(f"{self.path}, line {number}: not {self._what} ({why}); delete the file, or restore it")


def make_folder(path: Path) -> None:
    """Make the folder at ``path``, and those that it is in, where they are missing.

    Raises:
        DataError: there is something else, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a folder that can be written to") from error


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, meets the whole old file or the whole new one.

    Where ``path`` is a link, that is the file it leads to.

    Raises:
        DataError: the folder cannot be written to, or there is something else than a file.
    """
    if path.name in ("", ".."):
        raise DataError(f"{str(path)!r} names no file; expected the path of one that can be written")
    fresh = None
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no regular file; expected one, or a name that is free")
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: {why}; expected a file that can be written") from error
    finally:
        if fresh is not None:
            with contextlib.suppress(OSError):
                fresh.unlink()
