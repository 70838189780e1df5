"""Megatron's indexed dataset on disk, read and checked without Megatron and without torch.

The ``.idx`` layout (megatron-core 0.19.2, ``core/datasets/indexed_dataset.py``), little-endian: magic of 9 bytes,
version u64 = 1, token type u8, number of sequences S u64, number of document bounds D u64; then S lengths (i32, in
tokens), S pointers (i64, byte offsets into the ``.bin``) and D document bounds (i64, indices of sequences, from 0).
Stock reads the counts without asking whether they fit the file; here they are checked before anything is allocated.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacpp_mcore.data.files import require_readable
from megacpp_mcore.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
TOKEN_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class DatasetIndex:
    """A checked ``.idx`` with the ``.bin`` it describes.

    S is the number of sequences: ``lengths_S`` in tokens, ``pointers_S`` in bytes; ``bounds`` are D indices into S.
    """

    prefix: str
    dtype: np.dtype[Any]
    lengths_S: NDArray[np.int32]
    pointers_S: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def bin_path(self) -> str:
        """Path of the token file."""
        return self.prefix + ".bin"

    @property
    def token_count(self) -> int:
        """Number of tokens in the dataset."""
        return int(self.lengths_S.sum(dtype=np.int64))

    @property
    def document_count(self) -> int:
        """Number of documents in the dataset."""
        return len(self.bounds) - 1

    def read_chunks(self) -> Iterator[NDArray[Any]]:
        """Yield all tokens in file order, in arrays of at most 4 Mi tokens.

        Raises:
            DataError: the file cannot be read, or ends before its last token.
        """
        left = self.token_count
        with require_readable(self.bin_path), open(self.bin_path, "rb") as stream:
            while left:
                chunk = np.fromfile(stream, dtype=self.dtype, count=min(left, _CHUNK_TOKENS))
                if not chunk.size:
                    raise DataError(
                        f"{self.bin_path} ends {left} tokens early; restore it or prepare the dataset again"
                    )
                left -= chunk.size
                yield chunk

    def read_last_tokens(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last token of each of the ``documents`` (indices); -1 stands for a document without tokens.

        Raises:
            DataError: the file cannot be read.
        """
        last = np.full(len(documents), -1, dtype=np.int64)
        with require_readable(self.bin_path):
            tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")
        ends = np.concatenate(([0], np.cumsum(self.lengths_S, dtype=np.int64)))
        first, stop = ends[self.bounds[documents]], ends[self.bounds[documents + 1]]
        filled = stop > first
        last[filled] = tokens[stop[filled] - 1]
        return last


def read_index(prefix: str) -> DatasetIndex:
    """Read ``prefix.idx`` and check it in itself and against the size of ``prefix.bin``.

    Raises:
        DataError: a file is missing, or the index is not a whole and consistent one for this ``.bin``.
    """
    index, problems = inspect_index(prefix)
    if index is None or problems:
        raise problems[0]
    return index


def inspect_index(prefix: str) -> tuple[DatasetIndex | None, list[DataError]]:
    """Do what :func:`read_index` does, and return all problems instead of raising the first.

    The index is None where a problem keeps it from being read; with any other problem it is not to be used either, but for
    its counts and its token type.
    """
    idx_path, bin_path = prefix + ".idx", prefix + ".bin"
    problems: list[DataError] = []
    bin_size, idx_size, index = None, None, None
    with collected(problems):
        bin_size = _require_file(bin_path)
    with collected(problems):
        idx_size = _require_file(idx_path)
    if idx_size is not None:
        with collected(problems), require_readable(idx_path):
            index = _read_arrays(prefix, idx_path, idx_size)
    if index is not None:
        contradictions = list(_find_contradictions(idx_path, index))
        problems += contradictions or _find_misfits(idx_path, bin_path, bin_size, index)
    return index, problems


@contextmanager
def collected(problems: list[DataError]) -> Iterator[None]:
    """Append the DataError that the body raises to ``problems``, and go on."""
    try:
        yield
    except DataError as error:
        problems.append(error)


def _find_misfits(idx_path: str, bin_path: str, bin_size: int | None, index: DatasetIndex) -> list[DataError]:
    """What is wrong between an index that agrees with itself and its ``.bin`` (None: there is none)."""
    if not index.token_count:
        return [_damaged(idx_path, "no tokens", "at least one")]
    token_bytes = index.token_count * index.dtype.itemsize
    if bin_size in (None, token_bytes):
        return []
    expected = f"{token_bytes} bytes ({index.token_count} tokens of {index.dtype.name}, says {idx_path})"
    return [_damaged(bin_path, f"{bin_size} bytes", expected)]


def _read_arrays(prefix: str, idx_path: str, idx_size: int) -> DatasetIndex:
    """Read the three arrays of an index whose counts fit its size."""
    with open(idx_path, "rb") as stream:
        dtype, sequence_count, bound_count = _parse_header(idx_path, stream.read(HEADER_BYTES))
        expected = HEADER_BYTES + 12 * sequence_count + 8 * bound_count
        if idx_size != expected:
            raise _damaged(
                idx_path,
                f"{idx_size} bytes",
                f"{expected} bytes for {sequence_count} sequences and {bound_count} document bounds",
            )
        lengths_S = np.fromfile(stream, dtype="<i4", count=sequence_count)
        pointers_S = np.fromfile(stream, dtype="<i8", count=sequence_count)
        bounds = np.fromfile(stream, dtype="<i8", count=bound_count)
    return DatasetIndex(prefix, dtype, lengths_S, pointers_S, bounds)


def _require_file(path: str) -> int:
    """Return the size of ``path`` in bytes."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected the .bin and .idx of one dataset. Give the path without a suffix, "
            "restore the file, or run megacpp-mcore data prepare"
        ) from error
    return size


def _parse_header(path: str, header: bytes) -> tuple[np.dtype[Any], int, int]:
    """Return token type, number of sequences and number of document bounds."""
    if len(header) < HEADER_BYTES:
        raise _damaged(path, f"{len(header)} bytes", f"a header of {HEADER_BYTES} bytes")
    if header[:9] != MAGIC:
        raise _damaged(path, f"the first bytes {header[:9]!r}", f"{MAGIC!r}, the mark of a Megatron index")
    version, code, sequence_count, bound_count = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise _damaged(path, f"index version {version}", "version 1")
    if code not in TOKEN_DTYPES:
        raise _damaged(path, f"token type code {code}", f"one of the integer types {sorted(TOKEN_DTYPES)}")
    if not sequence_count or bound_count < 2:
        raise _damaged(path, f"{sequence_count} sequences and {bound_count} document bounds", "at least one document")
    return np.dtype(TOKEN_DTYPES[code]).newbyteorder("<"), sequence_count, bound_count


def _find_contradictions(path: str, index: DatasetIndex) -> Iterator[DataError]:
    """Say where lengths, pointers and document bounds disagree, the first place of each."""
    negative = np.flatnonzero(index.lengths_S < 0)
    if negative.size:
        yield _damaged(path, f"length {index.lengths_S[negative[0]]} for sequence {negative[0]}", "0 or more")
    expected = np.zeros_like(index.pointers_S)
    np.cumsum(index.lengths_S[:-1].astype(np.int64) * index.dtype.itemsize, out=expected[1:])
    wrong = np.flatnonzero(index.pointers_S != expected)
    if wrong.size:
        yield _damaged(
            path,
            f"pointer {index.pointers_S[wrong[0]]} for sequence {wrong[0]}",
            f"{expected[wrong[0]]}, the end of the sequence before it",
        )
    bounds = index.bounds
    if bounds[0] != 0 or bounds[-1] != len(index.lengths_S) or bool((np.diff(bounds) < 0).any()):
        yield _damaged(
            path,
            f"document bounds from {bounds[0]} to {bounds[-1]}",
            f"bounds that rise from 0 to {len(index.lengths_S)}, the number of sequences",
        )


def _damaged(path: str, found: str, expected: str) -> DataError:
    return DataError(
        f"{path}: found {found}, expected {expected}; the file is damaged or belongs to another dataset: restore it "
        "from a copy or run megacpp-mcore data prepare again"
    )
