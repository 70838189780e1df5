"""Megatron's cached sample indices: removes those that were built before their dataset came to its place; no torch.

Stock names a cache after the dataset's path and the run's settings, not after its contents (megatron-core 0.19.2,
``core/datasets/gpt_dataset.py`` and ``blended_dataset.py``), and reads whatever has that name: after a dataset is
replaced at its path, training would go on with the documents that the old one had.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError

_FILE_NAME = re.compile(
    r"([0-9a-f]{32}-\w+-\w+)-(description\.txt|(document|sample|shuffle|dataset|dataset_sample)_index\.npy)"
)
_DESCRIPTION = "description.txt"


def remove_beside(prefix: str) -> None:
    """Remove every index that stock keeps beside the dataset at ``prefix``, for it is about to be replaced.

    Raises:
        OSError: one cannot be removed.
    """
    for folder in _folders_beside(prefix):
        for files in _caches(folder).values():
            for path in files:
                path.unlink(missing_ok=True)


def remove_stale(prefixes: Sequence[str], cache_path: str | None) -> list[str]:
    """Remove the indices of ``prefixes`` that are older than their dataset, and return their paths without suffix.

    Args:
        prefixes: datasets, as stock is told of them.
        cache_path: stock's ``--data-cache-path``; the caches beside the datasets are looked at in any case.

    Raises:
        DataError: a dataset or cache cannot be examined, or a cache cannot be removed.
    """
    try:
        changes = {prefix: max(_changed_ns(prefix + suffix) for suffix in (".bin", ".idx")) for prefix in prefixes}
        stale = [
            (name, files)
            for prefix, changed in changes.items()
            for folder in _folders_beside(prefix)
            for name, files in _caches(folder).items()
            if _built_ns(files) < changed
        ]
        for name, files in _caches(Path(cache_path)).items() if cache_path else ():
            built = _built_ns(files)
            older = {prefix for prefix, changed in changes.items() if built < changed}
            if older and not older.isdisjoint(_indexed_prefixes(Path(f"{name}-{_DESCRIPTION}"))):
                stale.append((name, files))
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; expected datasets and cached indices that can be examined"
        ) from error
    for _, files in stale:
        _remove(files)
    return [name for name, _ in stale]


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(
                f"{path}: an index older than the dataset it indexes, which stock would still train on, cannot be "
                f"removed ({error.strerror}); expected a cache folder that can be written: delete the file, or give "
                "another --data-cache-path"
            ) from error


def _folders_beside(prefix: str) -> Iterator[Path]:
    """Yield the folders where stock keeps the caches of one dataset unless it is told another place."""
    return Path(prefix, "cache").glob("*_indices")


def _caches(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each cache in ``folder``, by the path that they share."""
    found: dict[str, list[Path]] = {}
    if folder.is_dir():
        for entry in os.listdir(folder):
            if match := _FILE_NAME.fullmatch(entry):
                found.setdefault(str(folder / match[1]), []).append(folder / entry)
    return found


def _built_ns(files: Sequence[Path]) -> int:
    """Return when the first of ``files`` was written: the dataset had been opened by then."""
    times = []
    for path in files:
        with suppress(FileNotFoundError):  # another run that starts now may have removed it
            times.append(path.stat().st_mtime_ns)
    return min(times, default=sys.maxsize)


def _changed_ns(path: str) -> int:
    """Return when ``path`` last came to name this file with this content.

    The change time, because no copying or renaming sets it back; and that of every link on the way.
    """
    whole = Path(path).absolute()
    links = [step.lstat().st_ctime_ns for step in (whole, *whole.parents) if step.is_symlink()]
    return max(os.stat(path).st_ctime_ns, *links, 0)


def _indexed_prefixes(description: Path) -> set[str]:
    """Return the datasets that the cache with this description is about."""
    try:
        body = json.loads(description.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return set()  # without it stock builds the cache again
    return set(_find_paths(body))


def _find_paths(body: Any) -> Iterator[str]:
    """Yield every ``dataset_path`` in ``body``; that of a blend is in the descriptions of its parts."""
    if isinstance(body, dict):
        if isinstance(body.get("dataset_path"), str):
            yield body["dataset_path"]
        for value in body.values():
            yield from _find_paths(value)
    elif isinstance(body, list):
        for value in body:
            yield from _find_paths(value)
