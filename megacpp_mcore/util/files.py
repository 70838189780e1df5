"""Files that are whole or absent, and locks between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

StrPath = str | os.PathLike[str]
TEMPORARY = ".megacpp-"
"""What the name of a file that is about to replace another has after that one's, before the process id and ``~``."""


def flush_to_disk(path: StrPath) -> None:
    """Return once the contents of the file or folder at ``path`` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: StrPath, content: bytes, like: os.stat_result | None = None) -> None:
    """Replace the file at ``path`` by one that holds ``content``: a reader, also after a crash, sees the old or the new one.

    Args:
        path: what is replaced, or made.
        content: all of the new file.
        like: the status of a file whose mode (and owner, where that is allowed) the new one takes.

    Raises:
        OSError: the folder cannot be written; the file is as it was.
    """
    # The process id keeps two writers of one path, such as the ranks of a host, out of each other's way. What a killed process
    # leaves has a name that version control ignores.
    temporary = Path(f"{os.fspath(path)}{TEMPORARY}{os.getpid()}~")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            if like is not None:
                _take_after(stream.fileno(), like)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(temporary.parent)


def _take_after(descriptor: int, like: os.stat_result) -> None:
    """Give an open file the mode of another, its owner where this process may, and a later time."""
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # only root may give a file away
            os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o7777)
    # Python takes a .pyc for current by the source's size and its time in whole seconds.
    if int(os.fstat(descriptor).st_mtime) <= int(like.st_mtime):
        os.utime(descriptor, (like.st_atime, int(like.st_mtime) + 1))


@contextmanager
def locked(path: StrPath, wait: bool = True) -> Iterator[None]:
    """Hold the lock file at ``path``, which is made and stays, against every other process (and every other holder here).

    Args:
        path: the lock file.
        wait: whether to wait for another holder; otherwise that is an error.

    Raises:
        BlockingIOError: another holds it, and ``wait`` is false.
        OSError: the folder cannot be written.
    """
    import filelock  # not of the standard library: torch requires it

    lock = filelock.FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise BlockingIOError(f"{os.fspath(path)} is held by another process") from error
    try:
        yield
    finally:
        lock.release()
