"""File helpers for datasets: read errors that name the file, and SHA-256."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megacpp_mcore.errors import DataError
from megacpp_mcore.util.files import sha256_of

_SUFFIXES = (".bin", ".idx", ".manifest.json")


@contextmanager
def require_readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an operating-system error on reading ``path`` into a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{os.fspath(path)}: {error.strerror or error}; expected a file that can be read: change its permissions, "
            "or restore it from a copy"
        ) from error


def refuse_remote(*paths: str | os.PathLike[str]) -> None:
    """Raise DataError if a path is in an object store, such as ``s3://bucket/corpus``."""
    if far := next((path for path in paths if "://" in os.fspath(path)), None):
        raise DataError(
            f"{os.fspath(far)} is in an object store, whose files cannot be checked against a manifest; expected a path of a "
            "file system: copy it to one, or mount the bucket"
        )


def refuse_suffix(prefix: str) -> None:
    """Raise DataError if ``prefix`` has the suffix of a dataset's file, unless there is a dataset of just that prefix."""
    bare = next((prefix.removesuffix(suffix) for suffix in _SUFFIXES if prefix.endswith(suffix)), None)
    if bare is not None and not os.path.exists(prefix + ".idx"):
        other = bare if os.path.basename(bare) else "a name"
        raise DataError(f"{prefix} is the name of a dataset's file; expected its prefix, without a suffix: give {other}")


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal, or raise DataError when it cannot be read."""
    with require_readable(path):
        return sha256_of(path)
