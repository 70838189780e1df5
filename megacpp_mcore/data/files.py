"""Durable files: write, flush to disk, then rename, so that a reader sees the old file or the new one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megacpp_mcore.errors import DataError


@contextmanager
def require_readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the system's refusal to read ``path`` into an error that names it.

    Raises:
        DataError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{os.fspath(path)}: {error.strerror or error}; expected a file that can be read: change its permissions, "
            "or restore it from a copy"
        ) from error


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Return once the contents of the file or folder at ``path`` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file at ``path`` by one that holds ``content``.

    Raises:
        OSError: the folder cannot be written.
    """
    # The process id keeps two writers of one path, such as the ranks of a host, out of each other's way.
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(temporary.parent)


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
