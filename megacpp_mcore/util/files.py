"""Atomically replaced files, and checks of paths that a file can be written to."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from megacpp_mcore.errors import DataError

StrPath = str | os.PathLike[str]
TEMPORARY = ".megacpp-"
"""Infix of temporary file names: the target's name, this, the process id, ``~``."""


_FULL = (r"No space left on device|Disk quota exceeded|File too large", r"unexpected pos \d+ vs \d+")
"""What the system says of a full disk or quota, or a limit on a file's size, and PyTorch when it closes such a file."""


def fullness(error: str) -> str | None:
    """Return what ``error``, a traceback's text, says of a full disk, the system's words first; None if nothing."""
    return next((match[0] for words in _FULL if (match := re.search(words, error))), None)


def is_remote(path: object) -> bool:
    """Return whether ``path`` is in object storage, which Megatron reaches through its multi-storage client."""
    return str(path).startswith("msc://")


def sha256_of(path: StrPath) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_to_disk(path: StrPath) -> None:
    """Return once the contents of the file or folder at ``path`` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writable(path: StrPath, *, added_to: bool = False) -> Path:
    """Return where ``path`` leads: to a regular file that can be replaced (or ``added_to``), or a name that is free.

    Raises:
        DataError: it leads to something else, such as a device, a pipe or a folder, or its folder cannot be written to.
    """
    file = Path(os.path.realpath(path))
    if os.path.islink(file) or (os.path.exists(file) and not os.path.isfile(file)):  # a link by now leads to itself
        raise DataError(f"{file} is not a regular file; expected one, or a name that is free")
    place, right = (file, os.W_OK) if added_to and os.path.exists(file) else (file.parent, os.W_OK | os.X_OK)
    if not os.access(place, right) or not os.path.isdir(file.parent):
        raise DataError(
            f"{file} cannot be written; expected a folder that can be written to: make {file.parent}, or name another file"
        )
    return file


def replace(path: StrPath, content: bytes, like: os.stat_result | None = None) -> None:
    """Replace the file at ``path`` with ``content`` atomically: a reader, even after a crash, sees the old or the new file.

    ``like``: the status of a file whose mode (and owner, if permitted) the new one gets, and a later modification time.

    Raises:
        OSError: the folder cannot be written; the file is unchanged.
    """
    # The process id separates concurrent writers of one path, such as the ranks of a host. Version control ignores the names
    # of files left by a killed process.
    temporary = Path(f"{os.fspath(path)}{TEMPORARY}{os.getpid()}~")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            if like is not None:
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    with suppress(PermissionError):  # only root may change the owner
                        os.fchown(stream.fileno(), like.st_uid, like.st_gid)
                os.fchmod(stream.fileno(), like.st_mode & 0o7777)
                # Python considers a .pyc current by the source's size and its time in whole seconds.
                if int(os.fstat(stream.fileno()).st_mtime) <= int(like.st_mtime):
                    os.utime(stream.fileno(), (like.st_atime, int(like.st_mtime) + 1))
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(temporary.parent)
