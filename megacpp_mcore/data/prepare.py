"""Converts text files to Megatron's indexed datasets, built in a temporary folder and moved into place when complete.

The sources, sorted by relative path, are tokenized in pieces, by several worker processes if requested, and passed in order to
Megatron's own ``IndexedDatasetBuilder``. The output depends only on the sources and the settings. It is built in the
folder ``PREFIX.unfinished``, which a killed run leaves behind: the same call removes it and starts over. A run that is killed
while it moves files into place may leave a dataset without a manifest, which only ``overwrite`` replaces.
"""

from __future__ import annotations

import concurrent.futures.process
import dataclasses
import functools
import itertools
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import filelock  # which torch requires
import numpy as np

from megacpp_mcore.data.manifest import describe_sources, describe_tokenizer, manifest_path, write_manifest
from megacpp_mcore.data.readable import hash_file, refuse_remote, refuse_suffix
from megacpp_mcore.data.sources import (
    JSON_KEY,
    Piece,
    Skipped,
    Source,
    choose_split,
    cut_sources,
    find_sources,
    make_source,
    parse_split,
    read_documents,
)
from megacpp_mcore.data.tokenizer import Tokenizer, load_tokenizer
from megacpp_mcore.errors import DataError
from megacpp_mcore.util.host import end_with_the_parent

PIECE_BYTES = 16 << 20
_MAX_DOCUMENT_TOKENS = 2**31 - 1
_SECONDS = 10.0
_BUILT = "dataset"
"""Prefix of the names of files being built."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One preparation: all settings that determine the output, and the ``command`` that the manifests record."""

    output: str
    sources: Sequence[Source]
    command: str
    tokenizer_name: str = "byte"
    split: str | None = None
    skip_errors: bool = False
    overwrite: bool = False
    json_key: str = JSON_KEY

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """The manifests' entry for the tokenizer."""
        return describe_tokenizer(load_tokenizer(self.tokenizer_name))

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of each side of the split; without a split, of one side with an empty name."""
        return parse_split(self.split) if self.split else {"": 1.0}

    @property
    def prefixes(self) -> list[str]:
        """The datasets to write, one per split."""
        return [f"{self.output}_{name}" for name in self.shares] if self.split else [self.output]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token type: two bytes where the vocabulary allows, as ``GPTDatasetConfig.token_dtype_code`` has it."""
        return np.dtype(np.uint16 if self.tokenizer["vocab_size"] <= 1 << 16 else np.int32)


class Encoded(NamedTuple):
    """A tokenized piece: for each document its split's number, its tokens and the bytes of its text.

    ``empty`` counts the documents without text, which are left out. ``sha256`` is of the whole source, if the piece is its
    last one; otherwise empty.
    """

    documents: list[tuple[int, np.ndarray[Any, Any], int]]
    skipped: list[Skipped]
    empty: int
    sha256: str


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str,
    *,
    tokenizer: str = "byte",
    split: str | None = None,
    globs: Sequence[str] = (),
    workers: int = 1,
    overwrite: bool = False,
    skip_errors: bool = False,
    json_key: str = JSON_KEY,
) -> list[str]:
    """Tokenize text files into Megatron datasets with their manifests.

    Args:
        inputs: files, or folders to search.
        output: path prefix of the dataset; with ``split`` the prefix of ``<output>_<name>``.
        tokenizer: ``byte`` or a local Hugging Face folder.
        split: shares by name, such as ``train=0.98,valid=0.02``; the side of a document is decided by a hash of its
            relative path (of its text for a JSON line), so it never changes sides.
        json_key: the key of the text in JSON lines, the column of tables.
        globs: file names to take from folders instead of :data:`megacpp_mcore.data.sources.DEFAULT_GLOBS`.
        skip_errors: list undecodable files and lines in the manifest instead of raising.

    Raises:
        DataError: the inputs, the settings or the output folder do not allow it.
    """
    refuse_remote(output, *inputs)
    name = tokenizer if tokenizer == "byte" else os.path.basename(os.path.realpath(tokenizer))
    command = ["megacpp-mcore", "data", "prepare", *(os.path.basename(os.path.realpath(given)) for given in inputs)]
    command += ["--output", os.path.basename(output), "--tokenizer", name]
    command += ["--split", split] if split else []
    command += [word for glob in globs for word in ("--glob", glob)]
    command += ["--errors", "skip"] if skip_errors else []
    command += ["--json-key", json_key] if json_key != JSON_KEY else []
    plan = Plan(
        output=output,
        sources=find_sources(inputs, globs, json_key),
        command=shlex.join(command),
        tokenizer_name=tokenizer,
        split=split,
        skip_errors=skip_errors,
        overwrite=overwrite,
        json_key=json_key,
    )
    return carry_out(plan, workers)


def carry_out(plan: Plan, workers: int = 1) -> list[str]:
    """Write the datasets of ``plan`` and return their prefixes.

    Raises:
        DataError: as :func:`prepare`.
    """
    if workers < 1:
        raise DataError(f"found {workers} workers; expected at least 1")
    if os.path.basename(plan.output) in ("", ".", ".."):
        raise DataError(
            f"output {plan.output!r} names a folder; expected a path prefix such as {os.path.join(plan.output, 'corpus')}"
        )
    refuse_suffix(plan.output)
    try:
        with _building(plan.output) as folder:
            _refuse_existing(plan)
            built = _build(plan, folder, workers)
            with _ignored_interrupts():
                for prefix in plan.prefixes:  # a manifest marks a dataset as complete: removed first, moved last
                    Path(manifest_path(prefix)).unlink(missing_ok=True)
                for suffix in (".bin", ".idx", ".manifest.json"):
                    for new, prefix in zip(built, plan.prefixes, strict=True):
                        os.replace(new + suffix, prefix + suffix)
    except OSError as error:
        raise DataError(
            f"{error.filename or plan.output}: {error.strerror}; expected a writable output folder with room: run it again"
        ) from error
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process ended abruptly, usually out of memory; run it again with fewer --workers"
        ) from error
    return plan.prefixes


@contextmanager
def _building(prefix: str) -> Iterator[Path]:
    """Hold the folder in which only this process builds ``prefix``."""
    folder = Path(prefix + ".unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    try:
        with filelock.FileLock(lock, timeout=0):
            _clear(folder)
            try:
                yield folder
            finally:
                _clear(folder)
                lock.unlink(missing_ok=True)  # still locked: other processes do not wait but are refused
                with suppress(OSError):  # files that are not ours are kept, and so is their folder
                    folder.rmdir()
    except filelock.Timeout as error:
        raise DataError(
            f"another process is preparing {prefix}; wait for it, or choose another --output",
            code="held",
        ) from error


def _clear(folder: Path) -> None:
    """Remove what a preparation has built in ``folder``."""
    for path in folder.glob(f"{_BUILT}.*"):
        path.unlink()


def _refuse_existing(plan: Plan) -> None:
    """Raise if a dataset exists, unless it is to be replaced and Megatron, not launched by us, has cached no indices of it."""
    paths = (prefix + suffix for prefix in plan.prefixes for suffix in (".bin", ".idx", ".manifest.json"))
    if not plan.overwrite and (path := next(filter(os.path.exists, paths), None)):
        raise DataError(f"{path} exists; expected a new dataset: choose another --output or pass --overwrite", code="exists")
    for prefix in plan.prefixes:
        if cached := next(Path(prefix, "cache").glob("*_indices/*.npy"), None):
            raise DataError(
                f"{cached.parent} holds sample indices of the dataset to be replaced, which Megatron would keep using; "
                "expected none: remove that folder, or choose another --output"
            )


def _build(plan: Plan, folder: Path, workers: int) -> list[str]:
    """Write the datasets of ``plan``, with their manifests, in ``folder``; return their prefixes there."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    built = [str(folder / f"{_BUILT}.{number}") for number in range(len(plan.shares))]
    builders = [IndexedDatasetBuilder(prefix + ".bin", dtype=plan.dtype.type) for prefix in built]
    documents = np.zeros((len(built), len(plan.sources)), dtype=np.int64)
    text_bytes = [0 for _ in built]
    hashes: dict[int, str] = {}
    skipped: list[Skipped] = []
    empty = Counter[str]()
    with closing(_encode_all(plan, cut_sources(plan.sources, PIECE_BYTES), workers)) as results:
        for piece, encoded in _reported(results, plan.sources):
            for side, tokens, size in encoded.documents:
                builders[side].add_document(tokens, [len(tokens)])
                documents[side, piece.number] += 1
                text_bytes[side] += size
            skipped += encoded.skipped
            empty[piece.source.relative] += encoded.empty
            hashes[piece.number] = encoded.sha256
    if total := empty.total():
        most = ", ".join(f"{count} in {name}" for name, count in empty.most_common(3) if count)
        print(f"documents without text left out: {total}, of them {most}", file=sys.stderr)
    for side, name in enumerate(plan.shares):
        if not documents[side].any():  # Megatron cannot open an empty dataset
            why = ". {} were skipped, the first in {relative}, offset {offset}: {reason}" if skipped else ""
            why = why.format(len(skipped), **(skipped or [{}])[0])
            raise DataError(
                f"{f'split {name!r}' if plan.split else 'the dataset'} got none of {documents.sum()} documents from "
                f"{len(plan.sources)} files; expected at least one: give more text or larger shares{why}"
            )
        builders[side].finalize(built[side] + ".idx")
        records = [
            {"path": source.relative, "bytes": source.size, "sha256": hashes[number], "documents": int(count)}
            for number, (source, count) in enumerate(zip(plan.sources, documents[side], strict=True))
            if count
        ]
        write_manifest(
            built[side],
            tokenizer=plan.tokenizer,
            command=plan.command,
            text_bytes=text_bytes[side],
            sources=describe_sources(records),
            skipped=skipped,
            split={"name": name, "of": plan.split} if plan.split else None,
        )
    return built


def _reported(results: Iterable[tuple[Piece, Encoded]], sources: Sequence[Source]) -> Iterator[tuple[Piece, Encoded]]:
    """Yield ``results``, with a plain line on stderr every ten seconds, and one at the end: what is done, rate, time left."""
    files, done, megabytes = 0, 0.0, sum(source.size for source in sources) / 1e6
    began = shown = time.monotonic()

    def show() -> None:
        rate = done / max(time.monotonic() - began, 1e-9)
        left = f"{max(0.0, megabytes - done) / rate:.0f} s" if rate else "unknown"
        state = f"{files}/{len(sources)} files  {done:.1f}/{megabytes:.1f} MB"
        print(f"{state}  {rate:.1f} MB/s  left {left}", file=sys.stderr, flush=True)

    for piece, encoded in results:
        yield piece, encoded
        files += bool(encoded.sha256)
        done += (piece.stop - piece.start) / 1e6
        if time.monotonic() - shown >= _SECONDS:
            shown = time.monotonic()
            show()
    show()


def _encode_all(plan: Plan, pieces: Iterator[Piece], workers: int) -> Generator[tuple[Piece, Encoded]]:
    """Yield the pieces, in order, with their tokens."""
    if workers == 1:
        tokenizer = load_tokenizer(plan.tokenizer_name)
        yield from ((piece, _encode_piece(plan, piece, tokenizer)) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    light = dataclasses.replace(plan, sources=())
    others = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(workers, context, end_with_the_parent) as pool:
        running: deque[tuple[Piece, concurrent.futures.Future[Encoded]]] = deque()
        try:
            while True:
                # Enough results are queued to keep the workers busy, and no more, as they are held in memory.
                with _without_interrupts():
                    for piece in itertools.islice(pieces, 2 * workers - len(running)):
                        running.append((piece, pool.submit(_encode_in_worker, light, piece)))
                if not running:
                    return
                piece, future = running.popleft()
                yield piece, future.result()
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Defer SIGINT. Processes started meanwhile never get it: Ctrl-C is for the parent, which ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore SIGINT, which Python handles only in its main thread, during the last moments of the work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_tokenizer = functools.cache(load_tokenizer)  # once in each worker


def _encode_in_worker(plan: Plan, piece: Piece) -> Encoded:
    return _encode_piece(plan, piece, _tokenizer(plan.tokenizer_name))


def _encode_piece(plan: Plan, piece: Piece, tokenizer: Tokenizer) -> Encoded:
    """Tokenize the documents that begin in a piece."""
    skipped: list[Skipped] = []
    shares = plan.shares.values()
    documents, empty = list[tuple[int, np.ndarray[Any, Any], int]](), 0
    for key, text in read_documents(piece, skipped if plan.skip_errors else None, plan.json_key):
        empty += not text
        if text:
            documents.append((choose_split(key, shares), _encode(plan, tokenizer, text, piece.source), len(text)))
    digest = hash_file(piece.source.path) if piece.stop == piece.source.size else ""
    if make_source(Path(piece.source.path), piece.source.relative) != piece.source:
        raise DataError(
            f"{piece.source.path} changed while it was being read; expected sources that do not change: run it again",
            code="changed",
        )
    return Encoded(documents, skipped, empty, digest)


def _encode(plan: Plan, tokenizer: Tokenizer, text: bytes, source: Source) -> np.ndarray[Any, Any]:
    """Return a document's ids with the end of document, in the dataset's type."""
    ids = tokenizer.encode(text)
    if len(ids) >= _MAX_DOCUMENT_TOKENS:
        raise DataError(
            f"{source.path}: one document has {len(ids)} tokens, expected below {_MAX_DOCUMENT_TOKENS} (the index "
            "holds lengths in 32 bits): cut the file into smaller ones"
        )
    return np.append(ids, tokenizer.eod_id).astype(plan.dtype)
