"""Megatron's indexed dataset on disk, read and checked without Megatron and without torch.

The ``.idx`` layout (megatron-core 0.19.2, ``core/datasets/indexed_dataset.py``), little-endian: magic of 9 bytes,
version u64 = 1, token type u8, number of sequences S u64, number of document bounds D u64; then S lengths (i32, in
tokens), S pointers (i64, byte offsets into the ``.bin``) and D document bounds (i64, indices of sequences, from 0).
Stock does not check that the counts fit the file; here they are checked before anything is allocated.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacpp_mcore.data.readable import require_readable
from megacpp_mcore.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
TOKEN_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


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
    def tokens(self) -> int:
        """Number of tokens in the dataset."""
        return int(self.lengths_S.sum(dtype=np.int64))

    @property
    def documents(self) -> int:
        """Number of documents in the dataset."""
        return len(self.bounds) - 1

    def open_tokens(self) -> NDArray[Any]:
        """Return all tokens in file order, mapped from the file, or raise DataError when it cannot be read."""
        with require_readable(self.bin_path):
            return np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def read_last_tokens(self) -> NDArray[np.int64]:
        """Return the last token of every document; -1 stands for a document without tokens."""
        ends = np.concatenate(([0], np.cumsum(self.lengths_S, dtype=np.int64)))[self.bounds]
        last = np.full(self.documents, -1, dtype=np.int64)
        filled = ends[1:] > ends[:-1]
        last[filled] = self.open_tokens()[ends[1:][filled] - 1]
        return last


def read_index(prefix: str) -> DatasetIndex:
    """Read ``prefix.idx`` and check it in itself and against the size of ``prefix.bin``.

    Raises:
        DataError: a file is missing, or the index is incomplete or inconsistent with this ``.bin``.
    """
    bin_size = size_of(prefix + ".bin")
    index = _read_arrays(prefix, size_of(prefix + ".idx"))
    _check_arrays(index)
    size = index.tokens * index.dtype.itemsize
    if not size:
        raise _damaged(prefix + ".idx", "no tokens", "at least one")
    if bin_size != size:
        expected = f"{size} bytes ({index.tokens} tokens of {index.dtype.name}, says {prefix}.idx)"
        raise _damaged(index.bin_path, f"{bin_size} bytes", expected)
    return index


def size_of(path: str) -> int:
    """Return the size of one of a dataset's files; raises DataError if the file does not exist."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected the .bin and .idx of one dataset. Give the path without a suffix, "
            "restore the file, or run megacpp-mcore data prepare"
        ) from error


def _read_arrays(prefix: str, idx_size: int) -> DatasetIndex:
    """Read the three arrays of an index, after checking that its counts fit its size."""
    path = prefix + ".idx"
    with require_readable(path), open(path, "rb") as stream:
        header = stream.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or header[:9] != MAGIC:
            raise _damaged(path, f"the first bytes {header[:9]!r} of {idx_size}", f"{MAGIC!r} and {HEADER_BYTES} bytes")
        version, code, sequences, bounds = struct.unpack("<QBQQ", header[9:])
        if version != 1:
            raise _damaged(path, f"index version {version}", "version 1")
        if code not in TOKEN_DTYPES:
            raise _damaged(path, f"token type code {code}", f"one of the integer types {sorted(TOKEN_DTYPES)}")
        counts, size = f"{sequences} sequences and {bounds} document bounds", HEADER_BYTES + 12 * sequences + 8 * bounds
        if not sequences or bounds < 2:
            raise _damaged(path, counts, "at least one document")
        if idx_size != size:
            raise _damaged(path, f"{idx_size} bytes", f"{size} bytes for {counts}")
        return DatasetIndex(
            prefix,
            np.dtype(TOKEN_DTYPES[code]).newbyteorder("<"),
            lengths_S=np.fromfile(stream, dtype="<i4", count=sequences),
            pointers_S=np.fromfile(stream, dtype="<i8", count=sequences),
            bounds=np.fromfile(stream, dtype="<i8", count=bounds),
        )


def _check_arrays(index: DatasetIndex) -> None:
    """Raise DataError if lengths, pointers and document bounds disagree, naming the first place."""
    path, bounds = index.prefix + ".idx", index.bounds
    for number in np.flatnonzero(index.lengths_S < 0)[:1]:
        raise _damaged(path, f"length {index.lengths_S[number]} for sequence {number}", "0 or more")
    ends = np.zeros_like(index.pointers_S)
    np.cumsum(index.lengths_S[:-1].astype(np.int64) * index.dtype.itemsize, out=ends[1:])
    for number in np.flatnonzero(index.pointers_S != ends)[:1]:
        pointer = f"pointer {index.pointers_S[number]} for sequence {number}"
        raise _damaged(path, pointer, f"{ends[number]}, the end of the sequence before it")
    if bounds[0] != 0 or bounds[-1] != len(index.lengths_S) or bool((np.diff(bounds) < 0).any()):
        expected = f"bounds that rise from 0 to {len(index.lengths_S)}, the number of sequences"
        raise _damaged(path, f"document bounds from {bounds[0]} to {bounds[-1]}", expected)


def _damaged(path: str, found: str, expected: str) -> DataError:
    return DataError(
        f"{path}: found {found}, expected {expected}; the file is damaged or belongs to another dataset: restore it "
        "from a copy or run megacpp-mcore data prepare again"
    )
