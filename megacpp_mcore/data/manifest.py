"""The manifest beside a dataset: what was made from what, and the checks that the files are still that."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megacpp_mcore.data.files import hash_file, require_readable, write_atomically
from megacpp_mcore.data.index import DatasetIndex, collected, inspect_index, read_index
from megacpp_mcore.data.tokenizer import Tokenizer
from megacpp_mcore.errors import DataError

SCHEMA_VERSION = 1
MAX_LISTED_SOURCES = 10_000
_SAMPLED_DOCUMENTS = 256
_DOCUMENTS_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Manifest:
    """``PREFIX.manifest.json``; None stands for what is not known of an adopted dataset.

    Attributes:
        tokenizer: ``kind``, ``checksum``, ``vocab_size``, ``eod_id``. Of an adopted dataset each of them may be None:
            whoever makes a command line of ``eod_id`` must ask first.
        dtype: NumPy name of the token type in the ``.bin``.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        max_token_id: the largest id in the ``.bin``.
        text_bytes: UTF-8 bytes of the documents' text, end-of-document tokens excluded.
        files: for ``.bin`` and ``.idx`` their ``size`` in bytes and ``sha256``.
        sources: ``count``, ``bytes``, ``sha256`` over the list, and ``list`` (None above 10,000 sources) of
            ``path`` (relative), ``bytes``, ``sha256`` and ``documents`` that went into this dataset.
        skipped: ``relative`` (path), ``offset`` and ``reason`` of what could not be decoded and was left out.
        split: ``name`` and ``of`` (the whole ``--split``) when this dataset is one side of a split.
        command: how to make it again; paths are reduced to names.
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

    def to_json(self) -> bytes:
        """Return the file's content, with a checksum over itself: a damaged manifest is told from damaged data."""
        body = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        return json.dumps({**body, "checksum": _digest(body)}, indent=1, sort_keys=True).encode("ascii") + b"\n"


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "tokenizer": (dict,),
    "dtype": (str,),
    "documents": (int,),
    "tokens": (int,),
    "max_token_id": (int,),
    "text_bytes": (int, type(None)),
    "files": (dict,),
    "sources": (dict, type(None)),
    "skipped": (list,),
    "split": (dict, type(None)),
    "command": (str,),
}
_TOKENIZER_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str, type(None)),
    "checksum": (str, type(None)),
    "vocab_size": (int, type(None)),
    "eod_id": (int, type(None)),
}
_FILE_TYPES: dict[str, tuple[type, ...]] = {"size": (int,), "sha256": (str,)}


def _digest(body: Any) -> str:
    """Return the SHA-256 over the canonical JSON of ``body``."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def manifest_path(prefix: str) -> str:
    """Return the path of the manifest of the dataset at ``prefix``."""
    return prefix + ".manifest.json"


def load_manifest(prefix: str) -> Manifest:
    """Read the manifest of the dataset at ``prefix``; of an adopted one, what is not known is None (see Manifest).

    Raises:
        DataError: there is none, or it is damaged or of another schema.
    """
    path = manifest_path(prefix)
    try:
        with open(path, "rb") as stream:
            body = json.loads(stream.read())
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist; expected the manifest of the dataset {prefix}. For a dataset that another tool "
            f"made, run: megacpp-mcore data verify --adopt {prefix}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    found = body.get("schema_version") if isinstance(body, dict) else type(body).__name__
    if type(found) is not int or found != SCHEMA_VERSION:
        raise _damaged(path, f"schema_version is {found!r}, expected {SCHEMA_VERSION}")
    checksum = body.pop("checksum", None)
    if checksum != _digest(body):
        raise _damaged(path, f"its checksum is {checksum!r}, expected {_digest(body)!r}")
    del body["schema_version"]
    _check_types(path, "", body, _FIELD_TYPES)
    _check_types(path, "tokenizer.", body["tokenizer"], _TOKENIZER_TYPES)
    for suffix in (".bin", ".idx"):
        _check_types(path, f"files{suffix}.", body["files"].get(suffix), _FILE_TYPES)
    return Manifest(**body)


def _check_types(path: str, where: str, body: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise unless ``body`` is an object with exactly these keys and types."""
    if not isinstance(body, dict) or body.keys() != types.keys():
        found = sorted(body) if isinstance(body, dict) else body
        raise _damaged(path, f"{where or 'the top level'} has {found}, expected the keys {sorted(types)}")
    for key, allowed in types.items():
        if type(body[key]) not in allowed:  # isinstance would take true for a number
            raise _damaged(path, f"{where}{key} is {body[key]!r}, expected {' or '.join(t.__name__ for t in allowed)}")


def _damaged(path: str, found: str) -> DataError:
    return DataError(
        f"{path} cannot be used: {found}. Restore it from a copy, prepare the dataset again, or delete it and "
        "adopt the dataset (megacpp-mcore data verify --adopt PREFIX)"
    )


def write_manifest(prefix: str, manifest: Manifest) -> None:
    """Write the manifest of the dataset at ``prefix``, in one step.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        write_atomically(manifest_path(prefix), manifest.to_json())
    except OSError as error:
        raise DataError(f"{manifest_path(prefix)}: {error.strerror}; expected a folder that can be written") from error


def describe_sources(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``Manifest.sources`` for records of ``path``, ``bytes``, ``sha256``, ``documents``."""
    return {
        "count": len(records),
        "bytes": sum(record["bytes"] for record in records),
        "sha256": _digest(list(records)),
        "list": list(records) if len(records) <= MAX_LISTED_SOURCES else None,
    }


@dataclass(frozen=True)
class TokenScan:
    """One pass over a ``.bin``: its SHA-256, smallest and largest id (None without a token)."""

    sha256: str
    smallest: int | None
    largest: int | None


def _ignore(amount: int) -> None:
    """Nobody asked how far it is."""


def scan_tokens(path: str, dtype: np.dtype[Any], advance: Callable[[int], None] = _ignore) -> TokenScan:
    """Read a ``.bin`` of ``dtype`` tokens once, calling ``advance`` with every number of bytes read.

    Raises:
        DataError: the file cannot be read.
    """
    digest = hashlib.sha256()
    extremes: list[int] = []
    with require_readable(path), open(path, "rb") as stream:
        while block := stream.read(_BYTES_AT_ONCE):
            digest.update(block)
            tokens = np.frombuffer(block, dtype=dtype, count=len(block) // dtype.itemsize)
            if tokens.size:
                extremes = [min([*extremes, int(tokens.min())]), max([*extremes, int(tokens.max())])]
            advance(len(block))
    smallest, largest = extremes or (None, None)
    return TokenScan(digest.hexdigest(), smallest, largest)


def build_manifest(
    prefix: str,
    *,
    tokenizer: Mapping[str, Any],
    command: str,
    text_bytes: int | None = None,
    sources: Mapping[str, Any] | None = None,
    skipped: Sequence[Mapping[str, Any]] = (),
    split: Mapping[str, str] | None = None,
) -> Manifest:
    """Read the files at ``prefix`` back and return a manifest for them, without writing it.

    Raises:
        DataError: the files are no dataset of this vocabulary with this end of document.
    """
    index = read_index(prefix)
    scan = scan_tokens(index.bin_path, index.dtype)
    _check_ids(index.bin_path, scan, tokenizer["vocab_size"])
    _check_document_ends(index, tokenizer["eod_id"], np.arange(index.document_count))
    return Manifest(
        tokenizer=tokenizer,
        dtype=index.dtype.name,
        documents=index.document_count,
        tokens=index.token_count,
        max_token_id=scan.largest or 0,
        text_bytes=text_bytes,
        files={
            ".bin": {"size": os.path.getsize(index.bin_path), "sha256": scan.sha256},
            ".idx": {"size": os.path.getsize(prefix + ".idx"), "sha256": hash_file(prefix + ".idx")},
        },
        sources=sources,
        skipped=list(skipped),
        split=split,
        command=command,
    )


def adopt(
    prefix: str, *, tokenizer: Tokenizer | None = None, vocab_size: int | None = None, eod_id: int | None = None
) -> Manifest:
    """Write a manifest for a dataset that another tool made, after checking what can be checked, and return it.

    What neither ``tokenizer`` nor the numbers say is recorded as unknown; nothing is guessed.

    Raises:
        DataError: the dataset has a manifest, is damaged, or contradicts what was said about it.
    """
    path = manifest_path(prefix)
    if os.path.exists(path):
        raise DataError(
            f"{path} exists; expected a dataset without a manifest. To adopt it anew, delete that file first"
        )
    if tokenizer is not None and (vocab_size is not None or eod_id is not None):
        raise DataError(
            "found a tokenizer together with a vocabulary size or end-of-document id; give one or the other"
        )
    if tokenizer is not None:
        described = describe_tokenizer(tokenizer)
    else:
        described = {"kind": None, "checksum": None, "vocab_size": vocab_size, "eod_id": eod_id}
    command = f"megacpp-mcore data verify --adopt {os.path.basename(prefix)}"
    manifest = build_manifest(prefix, tokenizer=described, command=command)
    write_manifest(prefix, manifest)
    return manifest


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``Manifest.tokenizer``."""
    return {
        "kind": tokenizer.kind,
        "checksum": tokenizer.checksum(),
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
    }


def verify(prefix: str) -> Manifest:
    """Check everything about the dataset at ``prefix`` from the files themselves, and return its manifest.

    Raises:
        DataError: a file is missing, damaged or not the one that the manifest describes.
    """
    examination = examine(prefix)
    if examination.manifest is None or examination.problems:
        raise examination.problems[0]
    return examination.manifest


@dataclass(frozen=True)
class Examination:
    """All that :func:`examine` found of one dataset."""

    manifest: Manifest | None
    problems: tuple[DataError, ...]


def examine(prefix: str, advance: Callable[[int], None] = _ignore) -> Examination:
    """Do what :func:`verify` does, and return all problems instead of raising the first.

    Checked are the manifest; of both files size and SHA-256; in the index the header, the token type, lengths, pointers and
    document bounds, and whether they describe the ``.bin`` and are the manifest's; of the tokens that their ids are in the
    vocabulary and that every document has its end. What a damage makes unreadable is left out, not guessed.

    Args:
        prefix: path without suffix.
        advance: called with every number of bytes read of the ``.bin``.
    """
    problems: list[DataError] = []
    manifest = None
    with collected(problems):
        manifest = load_manifest(prefix)
    resized = [] if manifest is None else list(_find_resized(prefix, manifest))
    problems += resized
    index, damages = inspect_index(prefix)
    problems += damages
    if manifest is not None:
        problems += _find_differences(prefix, index, manifest)
    if os.path.exists(prefix + ".bin"):
        with collected(problems):
            problems += _find_wrong_tokens(prefix + ".bin", index, manifest, advance)
    if index is not None and manifest is not None and not damages:
        with collected(problems):
            _check_document_ends(index, manifest.tokenizer["eod_id"], np.arange(index.document_count))
    return Examination(manifest, tuple(problems))


def _find_resized(prefix: str, manifest: Manifest) -> Iterator[DataError]:
    """Say which files have not the manifest's size; read_index tells of what is missing."""
    for suffix in (".bin", ".idx"):
        path, expected = prefix + suffix, manifest.files[suffix]["size"]
        size = os.path.getsize(path) if os.path.exists(path) else expected
        if size != expected:
            yield _mismatch(path, f"{size} bytes", f"{expected} bytes")


def _find_differences(prefix: str, index: DatasetIndex | None, manifest: Manifest) -> list[DataError]:
    """Say where an index, of the right size or readable at all, is not the manifest's."""
    problems: list[DataError] = []
    path = prefix + ".idx"
    with collected(problems), require_readable(path):
        if os.path.exists(path) and os.path.getsize(path) == manifest.files[".idx"]["size"]:
            _check_hash(path, hash_file(path), manifest)
    if index is not None:
        with collected(problems):
            _check_counts(index, manifest)
    return problems


def _find_wrong_tokens(
    path: str, index: DatasetIndex | None, manifest: Manifest | None, advance: Callable[[int], None]
) -> list[DataError]:
    """Read a ``.bin``, whatever its size, and say what its tokens are not; without a known token type their bytes alone.

    Raises:
        DataError: the file cannot be read.
    """
    problems: list[DataError] = []
    scan = scan_tokens(path, np.dtype(np.uint8) if index is None else index.dtype, advance)
    if manifest is not None and os.path.getsize(path) == manifest.files[".bin"]["size"]:
        with collected(problems):
            _check_hash(path, scan.sha256, manifest)
    if index is not None and scan.largest is not None:
        with collected(problems):
            _check_ids(path, scan, None if manifest is None else manifest.tokenizer["vocab_size"])
        if manifest is not None and scan.largest != manifest.max_token_id:
            problems.append(_mismatch(path, f"largest id {scan.largest}", f"{manifest.max_token_id}"))
    return problems


def verify_for_training(
    prefixes: Sequence[str],
    *,
    vocab_size: int,
    eod_id: int | None = None,
    tokenizer_checksum: str | None = None,
    full: bool = False,
) -> None:
    """Check that the datasets at ``prefixes`` are whole and fit the model that is about to be trained.

    Always: manifest, sizes, the whole ``.idx`` with its hash, and the last token of up to 256 documents. With ``full``
    the ``.bin`` is hashed too; the result is remembered in ``PREFIX.verified.json`` and holds while size, modification
    and change time and inode of the ``.bin`` stay the same.

    Args:
        prefixes: paths without suffix.
        vocab_size: number of ids that the model embeds (padding of the vocabulary may be counted in).
        eod_id: the end-of-document id that training uses; None when it does not matter.
        tokenizer_checksum: :meth:`Tokenizer.checksum` of the tokenizer that training names; None when it names none.
            It is compared where the manifest has one too.
        full: whether to hash the ``.bin``.

    Raises:
        DataError: names the file, what was found, what was expected.
    """
    for prefix in prefixes:
        manifest = load_manifest(prefix)
        index = _check_structure(prefix, manifest)
        _check_tokenizer(prefix, manifest, tokenizer_checksum)
        _check_fit(prefix, manifest, vocab_size, eod_id)
        count = min(index.document_count, _SAMPLED_DOCUMENTS)
        sample = np.linspace(0, index.document_count - 1, count).astype(np.int64)
        _check_document_ends(index, manifest.tokenizer["eod_id"], sample)
        if full:
            _check_hash(index.bin_path, _hash_once(prefix, index.bin_path), manifest)


def _check_structure(prefix: str, manifest: Manifest) -> DatasetIndex:
    """Check sizes, the index and the counts against the manifest, and return the index."""
    for problem in _find_resized(prefix, manifest):
        raise problem
    index = read_index(prefix)
    for problem in _find_differences(prefix, index, manifest):
        raise problem
    return index


def _check_counts(index: DatasetIndex, manifest: Manifest) -> None:
    """Raise when token type, documents or tokens are not the manifest's."""
    found = (index.dtype.name, index.document_count, index.token_count)
    if found != (manifest.dtype, manifest.documents, manifest.tokens):
        raise _mismatch(
            index.prefix + ".idx",
            "{}, {} documents, {} tokens".format(*found),
            f"{manifest.dtype}, {manifest.documents} documents, {manifest.tokens} tokens",
        )


def _check_tokenizer(prefix: str, manifest: Manifest, checksum: str | None) -> None:
    """Raise when the tokenizer that training names is not the one that made the dataset."""
    made_by = manifest.tokenizer
    if checksum is not None and made_by["checksum"] is not None and made_by["checksum"] != checksum:
        raise DataError(
            f"{prefix}.bin was made with the {made_by['kind']} tokenizer of checksum {made_by['checksum'][:12]}, and "
            f"training names one of checksum {checksum[:12]}; expected the same, or its ids mean other text: name the "
            "tokenizer that made the dataset, or prepare the dataset with this one. If this one gives every text the "
            f"same ids, delete {manifest_path(prefix)} and run megacpp-mcore data verify --adopt --tokenizer DIR {prefix}"
        )


def _check_fit(prefix: str, manifest: Manifest, vocab_size: int, eod_id: int | None) -> None:
    """Raise when the model's vocabulary or end of document is not the dataset's."""
    needed = max(manifest.max_token_id + 1, manifest.tokenizer["vocab_size"] or 0)
    if needed > vocab_size:
        raise DataError(
            f"{prefix}.bin was made with {needed} token ids, and the model embeds {vocab_size}; set --vocab-size to at "
            f"least {needed}, or prepare the dataset with the model's tokenizer"
        )
    own = manifest.tokenizer["eod_id"]
    if eod_id is not None and own is not None and own != eod_id:
        raise DataError(
            f"{prefix}.bin ends its documents with id {own}, and training uses {eod_id} as end of document; pass the "
            "stock tokenizer flags that fit the dataset (megacpp-mcore data verify prints them), or prepare it again"
        )


def _check_ids(path: str, scan: TokenScan, vocab_size: int | None) -> None:
    """Raise when an id is negative or not in the vocabulary."""
    if scan.smallest is None or scan.largest is None:
        return
    if scan.smallest < 0 or (vocab_size is not None and scan.largest >= vocab_size):
        upper = f"to {vocab_size - 1}" if vocab_size is not None else "or more"
        raise DataError(
            f"{path} holds ids from {scan.smallest} to {scan.largest}, expected 0 {upper}; the file is damaged or "
            "was made with another tokenizer: prepare it again"
        )


def _check_document_ends(index: DatasetIndex, eod_id: int | None, documents: np.ndarray[Any, Any]) -> None:
    """Raise when one of ``documents`` does not end with ``eod_id``; None is a dataset that says nothing of its ends."""
    if eod_id is None:
        return
    count, first, found = 0, 0, 0
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        part = documents[start : start + _DOCUMENTS_AT_ONCE]
        last = index.read_last_tokens(part)
        wrong = np.flatnonzero(last != eod_id)
        if wrong.size and not count:
            first, found = int(part[wrong[0]]), int(last[wrong[0]])
        count += wrong.size
    if count:
        raise DataError(
            f"{index.bin_path}: document {first} ends with {f'id {found}' if found >= 0 else 'no token'}, expected the "
            f"end-of-document id {eod_id} ({count} of {len(documents)} documents looked at have not that end); the file is "
            "damaged or was made with another tokenizer: restore it from a copy or prepare it again"
        )


def _check_hash(path: str, found: str, manifest: Manifest) -> None:
    """Raise when a file's SHA-256 is not the manifest's."""
    expected = manifest.files[path[-4:]]["sha256"]
    if found != expected:
        raise _mismatch(path, f"SHA-256 {found}", expected)


def _mismatch(path: str, found: str, expected: str) -> DataError:
    return DataError(
        f"{path}: found {found}, expected {expected} as its manifest says; the file was damaged, changed or swapped: "
        "restore it from a copy or run megacpp-mcore data prepare again"
    )


def _hash_once(prefix: str, path: str) -> str:
    """Return the SHA-256 of ``path``, remembered beside it for as long as the file system says it is the same file."""
    cache = prefix + ".verified.json"
    with require_readable(path):
        status = os.stat(path)
    identity = {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
    try:
        with open(cache, "rb") as stream:
            known = json.loads(stream.read())
        if isinstance(known, dict) and known.get("identity") == identity and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    except (OSError, ValueError, RecursionError):
        pass  # no usable memory: the file is hashed, which is the check itself
    with require_readable(path):
        digest = hash_file(path)
    # A dataset that cannot be written beside is hashed at every start.
    with contextlib.suppress(OSError):
        write_atomically(cache, json.dumps({"identity": identity, "sha256": digest}).encode())
    return digest
