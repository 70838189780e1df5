"""Files that a run leaves: appended a line at a time, or replaced as a whole, so that a killed process leaves none half."""

from __future__ import annotations

import os
from pathlib import Path

from megacpp_mcore.errors import DataError


def open_for_appending(path: Path) -> int:
    """A descriptor of the file at ``path`` to which each ``os.write`` appends a line.

    Raises:
        DataError: the file cannot be opened for appending, or ends in the middle of a line.
    """
    try:
        if path.exists() and path.stat().st_size:
            with path.open("rb") as stream:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    raise DataError(
                        f"{path} ends in the middle of a line; expected whole lines: name another file, or mend it"
                    )
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be appended to") from error


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, meets the whole old file or the whole new one.

    Raises:
        DataError: the folder cannot be written to.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise DataError(f"{path}: {error.strerror}; expected a file that can be written") from error
