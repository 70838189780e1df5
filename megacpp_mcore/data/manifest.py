"""The manifest of a dataset: what it was made from, and the checks that its files are unchanged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megacpp_mcore.data.index import DatasetIndex, read_index, size_of
from megacpp_mcore.data.readable import hash_file, refuse_suffix, require_readable
from megacpp_mcore.errors import DataError
from megacpp_mcore.util.files import replace

if TYPE_CHECKING:
    from megacpp_mcore.data.tokenizer import Tokenizer

SCHEMA_VERSION = 1
MAX_LISTED_SOURCES = 10_000
_BYTES_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Manifest:
    """Content of ``PREFIX.manifest.json``; None means unknown, for an adopted dataset.

    Attributes:
        tokenizer: ``kind``, ``checksum``, ``vocab_size``, ``eod_id``. For an adopted dataset each of them may be None, so
            check ``eod_id`` before putting it on a command line.
        dtype: NumPy name of the token type in the ``.bin``.
        tokens: number of tokens, end-of-document tokens included.
        max_token_id: the largest id in the ``.bin``.
        text_bytes: UTF-8 bytes of the documents' text, end-of-document tokens excluded.
        files: for ``.bin`` and ``.idx`` their ``size`` in bytes and ``sha256``.
        sources: ``count``, ``bytes``, ``sha256`` over the list, and ``list`` (None above 10,000 sources) of
            ``path`` (relative), ``bytes``, ``sha256`` and ``documents`` that went into this dataset.
        skipped: ``relative`` (path), ``offset`` and ``reason`` of what could not be decoded and was left out.
        split: ``name`` and ``of`` (the whole ``--split``) when this dataset is one side of a split.
        command: the command that makes it; paths are reduced to names.
    """

    tokenizer: Mapping[str, Any]
    dtype: str
    documents: int
    tokens: int
    max_token_id: int
    text_bytes: int | None
    files: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, Any] | None
    skipped: Sequence[Mapping[str, Any]]
    split: Mapping[str, str] | None
    command: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all that the manifest contains, and so over the dataset's contents."""
        return _digest({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)})

    def to_json(self) -> bytes:
        """Return the file's content, with a checksum over itself, which distinguishes a damaged manifest from damaged data."""
        body = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self), "checksum": self.digest}
        return json.dumps(body, indent=1, sort_keys=True).encode("ascii") + b"\n"


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def manifest_path(prefix: str) -> str:
    """Return the path of the manifest of the dataset at ``prefix``."""
    return prefix + ".manifest.json"


def load_manifest(prefix: str) -> Manifest:
    """Read the manifest of the dataset at ``prefix``; unknown values of an adopted one are None (see Manifest).

    A manifest with the right checksum holds what :class:`Manifest` describes: only this package writes it.

    Raises:
        DataError: there is none, or it is damaged or of another schema.
    """
    path = manifest_path(prefix)
    try:
        with open(path, "rb") as stream:
            body = json.loads(stream.read())
        version = body.pop("schema_version", None) if isinstance(body, dict) else type(body).__name__
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, expected {SCHEMA_VERSION}")
        checksum, expected = body.pop("checksum", None), _digest({"schema_version": version, **body})
        if checksum != expected:
            raise ValueError(f"its checksum is {checksum!r}, expected {expected!r}")
        return Manifest(**body)
    except FileNotFoundError as error:
        if not any(os.path.exists(prefix + suffix) for suffix in (".bin", ".idx")):
            refuse_suffix(prefix)
            folder = Path(prefix).parent
            known = ", ".join(sorted(path.stem for path in folder.glob("*.idx")))
            there = f"in {folder} there {f'are {known}' if known else 'is none'}"
            raise DataError(f"there is no dataset {prefix} (.bin, .idx, .manifest.json); {there}") from error
        raise DataError(
            f"{path} does not exist; expected the manifest of the dataset {prefix}. For a dataset that another tool "
            f"made, run: megacpp-mcore data verify --adopt {prefix}"
        ) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be used: {error}; expected the manifest that made the dataset. Restore it from a copy, prepare "
            "the dataset again, or delete it and adopt the dataset (megacpp-mcore data verify --adopt PREFIX)"
        ) from error


def describe_sources(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``Manifest.sources`` for records of ``path``, ``bytes``, ``sha256``, ``documents``."""
    return {
        "count": len(records),
        "bytes": sum(record["bytes"] for record in records),
        "sha256": _digest(list(records)),
        "list": list(records) if len(records) <= MAX_LISTED_SOURCES else None,
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``Manifest.tokenizer``."""
    return {
        "kind": tokenizer.kind,
        "checksum": tokenizer.checksum(),
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
    }


def write_manifest(
    prefix: str,
    *,
    tokenizer: Mapping[str, Any],
    command: str,
    text_bytes: int | None = None,
    sources: Mapping[str, Any] | None = None,
    skipped: Sequence[Mapping[str, Any]] = (),
    split: Mapping[str, str] | None = None,
) -> Manifest:
    """Read the files at ``prefix`` back, check them, write their manifest in one step, and return it.

    Raises:
        DataError: the files are not a dataset of this vocabulary and end of document, or the folder is not writable.
    """
    index, path = read_index(prefix), manifest_path(prefix)
    sha256, least, largest = _scan_tokens(index)
    vocab_size = tokenizer["vocab_size"]  # None: not known
    if least < 0 or (vocab_size is not None and largest >= vocab_size):
        upper = "or more" if vocab_size is None else f"to {vocab_size - 1}"
        raise DataError(
            f"{index.bin_path} holds ids from {least} to {largest}, expected 0 {upper}; the file is damaged or was made with "
            "another tokenizer: prepare it again"
        )
    _check_ends(index, tokenizer["eod_id"])
    manifest = Manifest(
        tokenizer=tokenizer,
        dtype=index.dtype.name,
        documents=index.documents,
        tokens=index.tokens,
        max_token_id=largest,
        text_bytes=text_bytes,
        files={
            ".bin": {"size": os.path.getsize(index.bin_path), "sha256": sha256},
            ".idx": {"size": os.path.getsize(prefix + ".idx"), "sha256": hash_file(prefix + ".idx")},
        },
        sources=sources,
        skipped=list(skipped),
        split=split,
        command=command,
    )
    try:
        replace(path, manifest.to_json())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a folder that can be written") from error
    return manifest


def adopt(
    prefix: str, *, tokenizer: Tokenizer | None = None, vocab_size: int | None = None, eod_id: int | None = None
) -> Manifest:
    """Write a manifest for a dataset that another tool made, after checking what can be checked, and return it.

    What neither ``tokenizer`` nor the numbers determine is recorded as unknown; nothing is guessed.

    Raises:
        DataError: the dataset has a manifest, is damaged, or contradicts what was said about it.
    """
    refuse_suffix(prefix)
    path = manifest_path(prefix)
    if os.path.exists(path):
        raise DataError(
            f"{path} exists; expected a dataset without one: to adopt it anew, delete that file first", code="exists"
        )
    if tokenizer is not None and (vocab_size, eod_id) != (None, None):
        raise DataError("found a tokenizer and a vocabulary size or end-of-document id; expected one or the other")
    described: dict[str, Any] = {"kind": None, "checksum": None, "vocab_size": vocab_size, "eod_id": eod_id}
    if tokenizer is not None:
        described = describe_tokenizer(tokenizer)
    command = f"megacpp-mcore data verify --adopt {os.path.basename(prefix)}"
    return write_manifest(prefix, tokenizer=described, command=command)


def _scan_tokens(index: DatasetIndex) -> tuple[str, int, int]:
    """Read the ``.bin`` once; its SHA-256, and its smallest and largest id."""
    digest, ids = hashlib.sha256(), set[int]()
    with require_readable(index.bin_path), open(index.bin_path, "rb") as stream:
        while block := stream.read(_BYTES_AT_ONCE):
            digest.update(block)
            tokens = np.frombuffer(block, dtype=index.dtype)
            ids |= {int(tokens.min()), int(tokens.max())}
    return digest.hexdigest(), min(ids), max(ids)


def _check_ends(index: DatasetIndex, eod_id: int | None) -> None:
    """Raise DataError if a document does not end with ``eod_id``; None: ends are unknown and not checked."""
    last = index.read_last_tokens() if eod_id is not None else np.empty(0)
    wrong = np.flatnonzero(last != eod_id)
    if wrong.size:
        last_id = last[wrong[0]]
        raise DataError(
            f"{index.bin_path}: document {wrong[0]} ends with {f'id {last_id}' if last_id >= 0 else 'no token'}, expected the "
            f"end-of-document id {eod_id} ({wrong.size} of {len(last)} documents do not end with it); the file is damaged or "
            "was made with another tokenizer: restore it from a copy or prepare it again"
        )


def verify(prefix: str, hash_tokens: Callable[[str], str] = hash_file) -> Manifest:
    """Check that the files at ``prefix`` are those that its manifest was written for, and return it.

    Their contents (index, ids, ends of documents) were checked when it was written: the same bytes need no second check.
    ``hash_tokens`` returns the SHA-256 of the ``.bin`` at a path.

    Raises:
        DataError: a file is missing, damaged or not the one that the manifest describes.
    """
    manifest = load_manifest(prefix)
    for suffix, hashed in ((".idx", hash_file), (".bin", hash_tokens)):
        path, expected = prefix + suffix, manifest.files[suffix]
        if (size := size_of(path)) != expected["size"]:
            raise _mismatch(path, f"{size} bytes", f"{expected['size']} bytes")
        if (sha256 := hashed(path)) != expected["sha256"]:
            raise _mismatch(path, f"SHA-256 {sha256}", expected["sha256"])
    return manifest


def verify_for_training(
    prefixes: Sequence[str], *, vocab_size: int, eod_id: int | None = None, tokenizer_checksum: str | None = None
) -> None:
    """Check that the datasets at ``prefixes`` are whole and fit the model that is about to be trained.

    The SHA-256 of a ``.bin`` is remembered in ``PREFIX.verified.json``, and holds while size, modification and change time
    and inode of the file stay the same.

    Args:
        vocab_size: number of ids that the model embeds (padding of the vocabulary may be counted in).
        eod_id: the end-of-document id that training uses; None when it does not matter.
        tokenizer_checksum: :meth:`Tokenizer.checksum` of training's tokenizer, compared where the manifest has one; None:
            unnamed.

    Raises:
        DataError: names the file, what was found, what was expected.
    """
    for prefix in prefixes:
        manifest, checksum = verify(prefix, _hash_once), tokenizer_checksum
        made_by = manifest.tokenizer
        if checksum is not None and made_by["checksum"] not in (None, checksum):
            raise DataError(
                f"{prefix}.bin was made with the {made_by['kind']} tokenizer of checksum {made_by['checksum'][:12]}, and "
                f"training names one of checksum {checksum[:12]}; expected the same, or its ids mean other text: name the "
                "tokenizer that made the dataset, or prepare the dataset with this one. If this one gives every text the "
                f"same ids, delete {manifest_path(prefix)} and run megacpp-mcore data verify --adopt --tokenizer DIR {prefix}",
                code="tokenizer",
            )
        needed = max(manifest.max_token_id + 1, made_by["vocab_size"] or 0)
        if needed > vocab_size:
            raise DataError(
                f"{prefix}.bin was made with {needed} token ids, and the model embeds {vocab_size}; set --vocab-size to at "
                f"least {needed}, or prepare the dataset with the model's tokenizer",
                code="vocabulary",
            )
        if eod_id is not None and made_by["eod_id"] not in (None, eod_id):
            raise DataError(
                f"{prefix}.bin ends its documents with id {made_by['eod_id']}, and training uses {eod_id} as end of document; "
                f"name the dataset where the command is made (recipe emit --data {prefix}), or pass --null-tokenizer-eod-id "
                f"{made_by['eod_id']}; otherwise prepare it again with the tokenizer of training",
                code="end-of-document",
            )


def _mismatch(path: str, found: str, expected: str) -> DataError:
    return DataError(
        f"{path}: found {found}, expected {expected} as its manifest says; the file was damaged, changed or swapped: "
        "restore it from a copy or run megacpp-mcore data prepare again"
    )


def _hash_once(path: str) -> str:
    """Return the SHA-256 of a ``.bin``, cached next to it for as long as the file system reports the same file."""
    cache = path.removesuffix(".bin") + ".verified.json"
    with require_readable(path):
        status = os.stat(path)
    identity = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):  # no usable cache: the file is hashed
        with open(cache, "rb") as stream:
            known = json.loads(stream.read())
        if known["identity"] == identity and isinstance(known["sha256"], str):
            return str(known["sha256"])
    digest = hash_file(path)
    with suppress(OSError):  # if no file can be written next to it, the dataset is hashed at every start
        replace(cache, json.dumps({"identity": identity, "sha256": digest}).encode())
    return digest
