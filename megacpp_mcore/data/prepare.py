"""Text files to Megatron's indexed dataset: resumable, deterministic, finished in one step.

The sources, sorted by relative path, are cut into shards. A shard's tokens go to the journal folder
``PREFIX.unfinished`` and its receipt, written last, says that they are whole. When every shard has its receipt,
Megatron's own ``IndexedDatasetBuilder`` writes the datasets from them in order. A run that was killed is continued by
the same call: shards with a receipt are not done again. What is written depends on the sources and the settings alone,
never on the number of workers or on where a run was interrupted.

A journal that another call would continue differently is kept, and that call refused, unless the run before ended with
a DataError: its message named something to change, and whoever changed that has nothing to continue.
"""

from __future__ import annotations

import concurrent.futures.process
import dataclasses
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megacpp_mcore.data.files import flush_to_disk, hash_file, require_readable, write_atomically
from megacpp_mcore.data.index_cache import remove_beside
from megacpp_mcore.data.manifest import (
    Manifest,
    build_manifest,
    describe_sources,
    describe_tokenizer,
    manifest_path,
    write_manifest,
)
from megacpp_mcore.data.progress import Progress
from megacpp_mcore.data.sources import (
    Skipped,
    Source,
    Split,
    choose_split,
    find_sources,
    make_source,
    parse_split,
    read_documents,
)
from megacpp_mcore.data.tokenizer import Tokenizer, load_tokenizer
from megacpp_mcore.errors import DataError

SHARD_BYTES = 16 << 20
_MOST_SHARDS = 512
_MAX_DOCUMENT_TOKENS = 2**31 - 1
_PLAN = "plan.json"
_REFUSED = "refused"
_JOURNAL_NAME = re.compile(
    r"(plan\.json|\d{6}\.json|\d{6}\.\d+\.(tokens|lengths)|dataset\.\d+\.(bin|idx|manifest\.json))(\.\d+\.tmp)?"
)


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of source ``number``; all of it unless the source is ``.jsonl``."""

    number: int
    source: Source
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether this is all of the source."""
        return self.start == 0 and self.stop == self.source.size


@dataclass(frozen=True)
class Shard:
    """What is written, and after a kill done again, as one."""

    number: int
    pieces: tuple[Piece, ...]

    def name(self, *parts: object) -> str:
        """Return the name of one of the shard's files in the journal."""
        return ".".join([f"{self.number:06d}", *map(str, parts)])


@dataclass(frozen=True)
class Plan:
    """One preparation: everything that decides what is written."""

    output: str
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]
    tokenizer_name: str
    tokenizer: dict[str, Any]
    splits: tuple[Split, ...]
    split_text: str | None
    skip_errors: bool
    overwrite: bool
    command: str

    @property
    def journal(self) -> Path:
        """The folder that holds the work done so far."""
        return _journal_path(self.output)

    @property
    def prefixes(self) -> list[str]:
        """The datasets to write, one per split."""
        return [f"{self.output}_{split.name}" for split in self.splits] if self.split_text else [self.output]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token type: two bytes where the vocabulary allows, as ``GPTDatasetConfig.token_dtype_code`` has it."""
        return np.dtype(np.uint16 if self.tokenizer["vocab_size"] <= 1 << 16 else np.int32)

    def describe(self) -> dict[str, Any]:
        """Return what a journal must share with this plan to be continued by it.

        ``skip_errors`` is not of it: a shard without anything skipped is the same with and without.
        """
        listed = json.dumps([(s.relative, s.size, s.mtime_ns) for s in self.sources]).encode("ascii")
        bounds = json.dumps([[(p.number, p.start, p.stop) for p in shard.pieces] for shard in self.shards]).encode()
        return {
            "sources": hashlib.sha256(listed).hexdigest(),
            "shards": hashlib.sha256(bounds).hexdigest(),
            "tokenizer": self.tokenizer,
            "split": self.split_text,
        }


def _journal_path(prefix: str) -> Path:
    return Path(prefix + ".unfinished")


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
    shard_bytes: int | None = None,
    progress: TextIO | None = None,
) -> list[str]:
    """Tokenize text files into Megatron datasets with their manifests, continuing a killed run of the same call.

    Args:
        inputs: files, or folders to search.
        output: path prefix of the dataset; with ``split`` the prefix of ``<output>_<name>``.
        tokenizer: ``byte`` or a local Hugging Face folder.
        split: shares by name, such as ``train=0.98,valid=0.02``; the side of a document is decided by a hash of its
            relative path (of its text for a ``.jsonl`` line), so it never changes sides.
        globs: file names to take from folders instead of ``*.txt *.py *.md *.jsonl``.
        workers: processes that tokenize.
        overwrite: replace existing datasets, and a journal of another preparation.
        skip_errors: list undecodable files and lines in the manifest instead of raising.
        shard_bytes: text per shard; default 16 MiB, more where that would be over 512 shards.
        progress: where progress is shown; default stderr.

    Returns:
        The prefixes of the datasets written.

    Raises:
        DataError: the inputs, the settings or the output folder do not allow it.
    """
    sources = find_sources(inputs, globs)
    command = ["megacpp-mcore", "data", "prepare", *(Path(given).resolve().name for given in inputs)]
    command += ["--output", os.path.basename(output), "--tokenizer", _base_name(tokenizer)]
    command += ["--split", split] if split else []
    command += [word for glob in globs for word in ("--glob", glob)]
    command += ["--errors", "skip"] if skip_errors else []
    return prepare_sources(
        sources,
        output,
        command=shlex.join(command),
        tokenizer=tokenizer,
        split=split,
        workers=workers,
        overwrite=overwrite,
        skip_errors=skip_errors,
        shard_bytes=shard_bytes,
        progress=progress,
    )


def _base_name(tokenizer: str) -> str:
    return tokenizer if tokenizer == "byte" else Path(tokenizer).resolve().name


def prepare_sources(
    sources: Sequence[Source],
    output: str,
    *,
    command: str,
    tokenizer: str = "byte",
    split: str | None = None,
    workers: int = 1,
    overwrite: bool = False,
    skip_errors: bool = False,
    shard_bytes: int | None = None,
    progress: TextIO | None = None,
) -> list[str]:
    """Do what :func:`prepare` does for given sources; ``command`` is what their manifests say made them.

    Raises:
        DataError: as there.
    """
    if workers < 1 or (shard_bytes is not None and shard_bytes < 1):
        raise DataError(f"found {workers} workers and shards of {shard_bytes} bytes; expected at least 1 of each")
    if not os.path.basename(output):
        raise DataError(f"output {output!r} names a folder; expected a path prefix such as {output}corpus")
    plan = Plan(
        output=output,
        sources=tuple(sources),
        shards=_cut_shards(sources, shard_bytes),
        tokenizer_name=tokenizer,
        tokenizer=describe_tokenizer(load_tokenizer(tokenizer)),
        splits=parse_split(split) if split else (Split("", 1.0),),
        split_text=split,
        skip_errors=skip_errors,
        overwrite=overwrite,
        command=command,
    )
    try:
        with _open_journal(plan, progress):
            _finish(plan, _encode_all(plan, workers, progress))
            _clear_journal(plan.journal)
    except OSError as error:
        raise DataError(
            f"{error.filename or plan.output}: {error.strerror}; expected a writable output folder with room. "
            "Work done so far is kept: repeat the call to continue"
        ) from error
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process ended abruptly, most often for lack of memory; work done so far is kept: repeat the "
            "call, with fewer --workers, to continue"
        ) from error
    return plan.prefixes


def _cut_shards(sources: Sequence[Source], shard_bytes: int | None) -> tuple[Shard, ...]:
    """Cut the sources, in order, into shards of about ``shard_bytes``; only ``.jsonl`` files are cut inside."""
    total = sum(source.size for source in sources)
    target = shard_bytes or max(SHARD_BYTES, -(-total // _MOST_SHARDS))
    shards: list[Shard] = []
    open_pieces: list[Piece] = []
    for number, source in enumerate(sources):
        step = target if source.relative.endswith(".jsonl") else max(source.size, 1)
        for start in range(0, max(source.size, 1), step):
            open_pieces.append(Piece(number, source, start, min(start + step, source.size)))
            if sum(piece.stop - piece.start for piece in open_pieces) >= target:
                shards.append(Shard(len(shards), tuple(open_pieces)))
                open_pieces = []
    if open_pieces:
        shards.append(Shard(len(shards), tuple(open_pieces)))
    return tuple(shards)


@contextmanager
def _open_journal(plan: Plan, stream: TextIO | None) -> Iterator[None]:
    """Hold the journal of ``plan``, new or continued, and its datasets for this process alone."""
    with ExitStack() as held:
        for prefix in dict.fromkeys((plan.output, *plan.prefixes)):
            held.enter_context(_hold(prefix))
        if _is_continued(plan, stream):
            _remove_temporary_files(plan.journal)
        else:
            _clear_journal(plan.journal)
            _refuse_existing(plan)
            write_atomically(plan.journal / _PLAN, json.dumps(plan.describe()).encode("ascii"))
        try:
            yield
        except DataError:
            with suppress(OSError):  # without the mark, the journal is one to be continued
                write_atomically(plan.journal / _PLAN, json.dumps({**plan.describe(), _REFUSED: True}).encode("ascii"))
            raise


@contextmanager
def _hold(prefix: str) -> Iterator[None]:
    """Keep every other process from preparing ``prefix``: its journal folder is the lock, and goes when it is empty."""
    folder = _journal_path(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, prefix)
        try:
            yield
        finally:
            # Still under the lock: whoever has opened the folder meanwhile finds that it is gone.
            with suppress(OSError):
                folder.rmdir()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, prefix: str) -> None:
    """Lock a journal folder, or raise when another process has it or has just finished with it."""
    folder = _journal_path(prefix)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
    except BlockingIOError:
        alone = False
    if not alone:
        raise DataError(
            f"another process is preparing {prefix}; expected to be the only one: wait for it, or choose another "
            "--output"
        )


def _is_continued(plan: Plan, stream: TextIO | None) -> bool:
    """Return whether there is a journal that ``plan`` continues; raise when there is one that must not be lost."""
    try:
        found = json.loads((plan.journal / _PLAN).read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        found = None
    if not isinstance(found, dict):
        found = {}
    refused = found.pop(_REFUSED, False)
    wanted = json.loads(json.dumps(plan.describe()))
    if found == wanted:
        return True
    differing = ", ".join(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
    if not refused and not plan.overwrite:
        raise DataError(
            f"{plan.journal} holds an unfinished preparation that differs in: {differing}; expected the same sources "
            "(unchanged since) and settings. Repeat the first call to continue it, or delete that folder to start anew"
        )
    print(
        f"starting anew: {plan.journal} holds another preparation, which differs in: {differing}",
        file=stream or sys.stderr,
    )
    return False


def _remove_temporary_files(journal: Path) -> None:
    """Delete what a run that was stopped was writing: its names are that process's own, and nobody would reuse them."""
    for name in os.listdir(journal):
        if name.endswith(".tmp") and _JOURNAL_NAME.fullmatch(name):
            os.unlink(journal / name)


def _refuse_existing(plan: Plan) -> None:
    """Raise when a dataset is in the way."""
    for prefix in plan.prefixes:
        for path in (prefix + ".bin", prefix + ".idx", manifest_path(prefix)):
            if os.path.exists(path) and not plan.overwrite:
                raise DataError(f"{path} exists; expected a new dataset: choose another --output or pass --overwrite")


def _clear_journal(journal: Path) -> None:
    """Delete every file that a preparation may have left in ``journal``.

    The plan goes first: a journal without one is finished, or was never begun, and has nothing to continue.
    """
    names = sorted(os.listdir(journal), key=lambda name: name != _PLAN)
    foreign = [name for name in names if not _JOURNAL_NAME.fullmatch(name)]
    if foreign:
        raise DataError(
            f"{journal} holds {foreign[0]!r}, which no preparation writes; expected that folder to be free: move it"
        )
    for name in names:
        os.unlink(journal / name)


@dataclass
class Receipt:
    """A finished shard. Lists over the splits: ``text_bytes``; per source: ``documents`` in each split."""

    files: dict[str, dict[str, Any]]
    text_bytes: list[int]
    documents: dict[str, list[int]]
    hashes: dict[str, str]
    skipped: list[dict[str, Any]]


def _encode_all(plan: Plan, workers: int, stream: TextIO | None) -> list[Receipt]:
    """Return the receipts of all shards, encoding those that have none."""
    progress = Progress(len(plan.sources), sum(source.size for source in plan.sources), stream)
    receipts = {shard.number: receipt for shard in plan.shards if (receipt := _load_receipt(plan, shard)) is not None}
    missing = [shard for shard in plan.shards if shard.number not in receipts]
    for number in receipts:
        progress.resume(*_count(plan.shards[number].pieces))
    if workers == 1:
        tokenizer = load_tokenizer(plan.tokenizer_name)
        for shard in missing:
            receipts[shard.number] = _encode_shard(
                plan, shard, tokenizer, lambda piece: progress.advance(*_count((piece,)))
            )
    else:
        with closing(_encode_in_pool(plan, missing, workers)) as finished:
            for number, receipt in finished:
                receipts[number] = receipt
                progress.advance(*_count(plan.shards[number].pieces))
    progress.finish()
    return [receipts[shard.number] for shard in plan.shards]


def _count(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Return how many files end in ``pieces``, and their bytes."""
    return sum(p.stop == p.source.size for p in pieces), sum(p.stop - p.start for p in pieces)


_worker: dict[str, Any] = {}


def _encode_in_pool(plan: Plan, shards: Sequence[Shard], workers: int) -> Generator[tuple[int, Receipt]]:
    """Yield number and receipt of each shard as worker processes finish it.

    The workers end at once when this process closes ``alive`` or ends: what they have not committed is done again.
    """
    light = dataclasses.replace(plan, sources=(), shards=())
    context = multiprocessing.get_context("spawn")
    watched, alive = context.Pipe(duplex=False)
    with (
        watched,
        alive,
        concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (light, watched)) as pool,
    ):
        try:
            with _without_interrupts():
                running = {pool.submit(_encode_in_worker, shard): shard.number for shard in shards}
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        except BaseException:
            alive.close()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put SIGINT off. Processes started meanwhile never get it: Ctrl-C is for the parent, which ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(plan: Plan, watched: Connection) -> None:
    """Keep the plan and a tokenizer for the shards to come, and end as soon as nobody holds the other end of ``watched``."""
    _worker.update(plan=plan, tokenizer=load_tokenizer(plan.tokenizer_name))

    def follow() -> None:
        with suppress(EOFError, OSError):
            watched.recv_bytes()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _encode_in_worker(shard: Shard) -> Receipt:
    return _encode_shard(_worker["plan"], shard, _worker["tokenizer"], lambda piece: None)


def _encode_shard(plan: Plan, shard: Shard, tokenizer: Tokenizer, done: Callable[[Piece], None]) -> Receipt:
    """Write one shard's tokens and lengths per split, then its receipt."""
    receipt = Receipt({}, [0] * len(plan.splits), {}, {}, [])
    skipped: list[Skipped] = []
    with ExitStack() as stack:
        sinks = [
            tuple(
                stack.enter_context(open(plan.journal / shard.name(number, suffix, os.getpid(), "tmp"), "wb"))
                for suffix in ("tokens", "lengths")
            )
            for number in range(len(plan.splits))
        ]
        for piece in shard.pieces:
            counts = [0] * len(plan.splits)
            for document in read_documents(
                piece.source, piece.start, piece.stop, skipped if plan.skip_errors else None
            ):
                side = choose_split(document.key, plan.splits)
                tokens = _encode(plan, tokenizer, document.text, piece.source)
                sinks[side][0].write(tokens.tobytes())
                sinks[side][1].write(np.int32(len(tokens)).tobytes())
                counts[side] += 1
                receipt.text_bytes[side] += len(document.text)
            receipt.documents[str(piece.number)] = counts
            if piece.whole:
                receipt.hashes[str(piece.number)] = _hash_unchanged(piece.source)
            done(piece)
        receipt.skipped = [dataclasses.asdict(item) for item in skipped]
    _commit_shard(plan, shard, receipt)
    return receipt


def _encode(plan: Plan, tokenizer: Tokenizer, text: bytes, source: Source) -> np.ndarray[Any, Any]:
    """Return a document's ids with the end of document, in the dataset's type."""
    ids = tokenizer.encode(text)
    if len(ids) >= _MAX_DOCUMENT_TOKENS:
        raise DataError(
            f"{source.path}: one document has {len(ids)} tokens, expected below {_MAX_DOCUMENT_TOKENS} (the index "
            "holds lengths in 32 bits): cut the file into smaller ones"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(
            f"{source.path}: the tokenizer gave ids from {ids.min()} to {ids.max()}, expected 0 to "
            f"{tokenizer.vocab_size - 1}: its vocabulary and its rules for text do not fit each other"
        )
    tokens = np.empty(len(ids) + 1, dtype=plan.dtype)
    tokens[:-1] = ids
    tokens[-1] = tokenizer.eod_id
    return tokens


def _hash_unchanged(source: Source) -> str:
    """Return the SHA-256 of a source.

    Raises:
        DataError: it is not the file that the preparation began with.
    """
    with require_readable(source.path):
        digest = hash_file(source.path)
    if make_source(Path(source.path), source.relative) != source:
        raise DataError(
            f"{source.path} changed while it was being read; expected sources that stay as they are: repeat the call"
        )
    return digest


def _commit_shard(plan: Plan, shard: Shard, receipt: Receipt) -> None:
    """Move a shard's files to their names, and write the receipt once they are on disk."""
    for number, suffix in itertools.product(range(len(plan.splits)), ("tokens", "lengths")):
        name = shard.name(number, suffix)
        temporary = plan.journal / shard.name(number, suffix, os.getpid(), "tmp")
        flush_to_disk(temporary)
        os.replace(temporary, plan.journal / name)
        path = plan.journal / name
        receipt.files[name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    write_atomically(plan.journal / shard.name("json"), json.dumps(dataclasses.asdict(receipt)).encode("ascii"))


def _load_receipt(plan: Plan, shard: Shard) -> Receipt | None:
    """Return a shard's receipt; None when the shard is to be done again.

    That is when there is none, its files are not what it says, or it left out what now is to be refused.
    """
    try:
        receipt = Receipt(**json.loads((plan.journal / shard.name("json")).read_bytes()))
        for name, expected in receipt.files.items():
            path = plan.journal / name
            if path.stat().st_size != expected["size"] or hash_file(path) != expected["sha256"]:
                return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return receipt if plan.skip_errors or not receipt.skipped else None


def _finish(plan: Plan, receipts: Sequence[Receipt]) -> None:
    """Write the datasets inside the journal, check them, and move them to their names; manifests come last."""
    hashes = _collect_hashes(plan, receipts)
    builds = [str(plan.journal / f"dataset.{side}") for side in range(len(plan.prefixes))]
    for side, built in enumerate(builds):
        _require_documents(plan, side, receipts)
        _build_dataset(plan, side, built)
        write_manifest(built, _describe(plan, side, built, receipts, hashes))
    if not plan.overwrite:
        for built, prefix in zip(builds, plan.prefixes, strict=True):
            _refuse_other(plan, built, prefix)
    for prefix in plan.prefixes:
        # Neither the manifest nor the cached indices of a dataset that is being replaced may outlive it.
        Path(manifest_path(prefix)).unlink(missing_ok=True)
        remove_beside(prefix)
    for built, prefix in zip(builds, plan.prefixes, strict=True):
        for suffix in (".bin", ".idx"):
            os.replace(built + suffix, prefix + suffix)
        flush_to_disk(plan.journal.parent)
        os.replace(manifest_path(built), manifest_path(prefix))
    flush_to_disk(plan.journal.parent)


def _refuse_other(plan: Plan, built: str, prefix: str) -> None:
    """Raise when ``prefix`` is another dataset than ``built``, which an earlier run of ``plan`` may have begun to move."""
    for suffix in (".bin", ".idx"):
        path = prefix + suffix
        if os.path.exists(path) and hash_file(path) != hash_file(built + suffix):
            raise DataError(
                f"{path} was made by something else while {plan.journal} was unfinished; expected it to be free: move "
                "it and repeat the call, or repeat it with --overwrite to replace it. Work done so far is kept"
            )


def _collect_hashes(plan: Plan, receipts: Sequence[Receipt]) -> list[str]:
    """Return the SHA-256 of every source; one that was cut into pieces is read once more."""
    known = {int(number): digest for receipt in receipts for number, digest in receipt.hashes.items()}
    return [known.get(number) or _hash_unchanged(source) for number, source in enumerate(plan.sources)]


def _require_documents(plan: Plan, side: int, receipts: Sequence[Receipt]) -> None:
    """Raise when one side got no document: Megatron cannot open an empty dataset."""
    counts = [sum(c[n] for r in receipts for c in r.documents.values()) for n in range(len(plan.splits))]
    if not counts[side]:
        what = f"split {plan.splits[side].name!r}" if plan.split_text else "the dataset"
        raise DataError(
            f"{what} got none of {sum(counts)} documents from {len(plan.sources)} files; expected at least one: "
            "give more text or larger shares"
        )


def _build_dataset(plan: Plan, side: int, built: str) -> None:
    """Write ``built.bin`` and ``built.idx`` with Megatron's builder, shard by shard."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(built + ".bin", dtype=plan.dtype.type)
    for shard in plan.shards:
        lengths = np.fromfile(plan.journal / shard.name(side, "lengths"), dtype=np.int32)
        if not lengths.size:
            continue
        tokens = np.memmap(plan.journal / shard.name(side, "tokens"), dtype=plan.dtype, mode="r")
        stop = 0
        for length in lengths.tolist():
            start, stop = stop, stop + length
            builder.add_document(tokens[start:stop], [length])
    builder.finalize(built + ".idx")
    flush_to_disk(built + ".bin")
    flush_to_disk(built + ".idx")


def _describe(plan: Plan, side: int, built: str, receipts: Sequence[Receipt], hashes: Sequence[str]) -> Manifest:
    """Return the manifest of one dataset; of a split it lists the sources that have documents on this side."""
    documents = [0] * len(plan.sources)
    for receipt in receipts:
        for number, counts in receipt.documents.items():
            documents[int(number)] += counts[side]
    records = [
        {"path": source.relative, "bytes": source.size, "sha256": hashes[number], "documents": documents[number]}
        for number, source in enumerate(plan.sources)
        if documents[number]
    ]
    name = plan.splits[side].name
    return build_manifest(
        built,
        tokenizer=plan.tokenizer,
        command=plan.command,
        text_bytes=sum(receipt.text_bytes[side] for receipt in receipts),
        sources=describe_sources(records),
        skipped=[item for receipt in receipts for item in receipt.skipped],
        split={"name": name, "of": plan.split_text} if plan.split_text else None,
    )
