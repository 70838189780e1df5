"""Text files to Megatron's indexed dataset: resumable, deterministic, finished in one step.

The sources, sorted by relative path, are cut into shards. A shard's tokens go to the journal folder
``PREFIX.unfinished`` and its receipt, written last, says that they are whole. When every shard has its receipt,
Megatron's own ``IndexedDatasetBuilder`` writes the datasets from them in order. A run that was killed is continued by
the same call: shards with a receipt are not done again. What is written depends on the sources and the settings alone,
never on the number of workers or on where a run was interrupted.
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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megacpp_mcore.data.files import flush_to_disk, hash_file, write_atomically
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
    command: str

    @property
    def journal(self) -> Path:
        """The folder that holds the work done so far."""
        return Path(self.output + ".unfinished")

    @property
    def prefixes(self) -> list[str]:
        """The datasets to write, one per split."""
        return [f"{self.output}_{split.name}" for split in self.splits] if self.split_text else [self.output]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token type: two bytes where the vocabulary allows, as ``GPTDatasetConfig.token_dtype_code`` has it."""
        return np.dtype(np.uint16 if self.tokenizer["vocab_size"] <= 1 << 16 else np.int32)

    def describe(self) -> dict[str, Any]:
        """Return what a journal must share with this plan to be continued by it."""
        listed = json.dumps([(s.relative, s.size, s.mtime_ns) for s in self.sources]).encode("ascii")
        bounds = json.dumps([[(p.number, p.start, p.stop) for p in shard.pieces] for shard in self.shards]).encode()
        return {
            "sources": hashlib.sha256(listed).hexdigest(),
            "shards": hashlib.sha256(bounds).hexdigest(),
            "tokenizer": self.tokenizer,
            "split": self.split_text,
            "skip_errors": self.skip_errors,
            "command": self.command,
        }


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
    """Do what :func:`prepare` does for given sources; ``command`` is what their manifests say made them."""
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
        command=command,
    )
    try:
        with _open_journal(plan, overwrite):
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
def _open_journal(plan: Plan, overwrite: bool) -> Iterator[None]:
    """Hold the journal of ``plan``, new or continued, for this process alone; one that stayed empty is removed."""
    journal = plan.journal
    journal.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(journal, os.O_RDONLY)
    try:
        _lock(descriptor, plan)
        if not _matches(plan, overwrite):
            _clear_journal(journal)
            _refuse_existing(plan, overwrite)
            write_atomically(journal / _PLAN, json.dumps(plan.describe()).encode("ascii"))
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            journal.rmdir()


def _lock(descriptor: int, plan: Plan) -> None:
    """Lock the journal folder, or raise when another process has it or has just finished with it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = plan.journal.exists() and os.path.samestat(os.fstat(descriptor), plan.journal.stat())
    except BlockingIOError:
        alone = False
    if not alone:
        raise DataError(
            f"another process is preparing {plan.output}; expected to be the only one: wait for it, or choose another "
            "--output"
        )


def _matches(plan: Plan, overwrite: bool) -> bool:
    """Return whether there is a journal that ``plan`` continues."""
    path = plan.journal / _PLAN
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        found = {}
    wanted = json.loads(json.dumps(plan.describe()))
    if found == wanted:
        return True
    differing = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
    if not overwrite:
        raise DataError(
            f"{plan.journal} holds an unfinished preparation that differs in: {', '.join(differing)}; expected the "
            "same sources (unchanged since) and settings. Repeat the first call to continue it, or pass --overwrite to "
            "start anew"
        )
    return False


def _refuse_existing(plan: Plan, overwrite: bool) -> None:
    """Raise when a dataset is in the way."""
    for prefix in plan.prefixes:
        for path in (prefix + ".bin", prefix + ".idx", manifest_path(prefix)):
            if os.path.exists(path) and not overwrite:
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
        for number, receipt in _encode_in_pool(plan, missing, workers):
            receipts[number] = receipt
            progress.advance(*_count(plan.shards[number].pieces))
    progress.finish()
    return [receipts[shard.number] for shard in plan.shards]


def _count(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Return how many files end in ``pieces``, and their bytes."""
    return sum(p.stop == p.source.size for p in pieces), sum(p.stop - p.start for p in pieces)


_worker: dict[str, Any] = {}


def _encode_in_pool(plan: Plan, shards: Sequence[Shard], workers: int) -> Iterator[tuple[int, Receipt]]:
    """Yield number and receipt of each shard as worker processes finish it."""
    light = dataclasses.replace(plan, sources=(), shards=())
    with concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (light,)
    ) as pool:
        running = {pool.submit(_encode_in_worker, shard): shard.number for shard in shards}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker(plan: Plan) -> None:
    """Keep the plan and a tokenizer for the shards to come, and end with the parent, however that ends."""
    _worker.update(plan=plan, tokenizer=load_tokenizer(plan.tokenizer_name))
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
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
    tokens = np.empty(len(ids) + 1, dtype=plan.dtype)
    tokens[:-1] = ids
    tokens[-1] = tokenizer.eod_id
    return tokens


def _hash_unchanged(source: Source) -> str:
    """Return the SHA-256 of a source.

    Raises:
        DataError: it is not the file that the preparation began with.
    """
    digest = hash_file(source.path)
    if make_source(Path(source.path), source.relative) != source:
        raise DataError(
            f"{source.path} changed while it was being read; expected sources that stay as they are: repeat the call "
            "with --overwrite"
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
    """Return a shard's receipt; None when it has none or its files are not what it says, and it is to be done again."""
    try:
        receipt = Receipt(**json.loads((plan.journal / shard.name("json")).read_bytes()))
        for name, expected in receipt.files.items():
            path = plan.journal / name
            if path.stat().st_size != expected["size"] or hash_file(path) != expected["sha256"]:
                return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return receipt


def _finish(plan: Plan, receipts: Sequence[Receipt]) -> None:
    """Write the datasets inside the journal, check them, and move them to their names; manifests come last."""
    hashes = _collect_hashes(plan, receipts)
    builds = [str(plan.journal / f"dataset.{side}") for side in range(len(plan.prefixes))]
    for side, built in enumerate(builds):
        _require_documents(plan, side, receipts)
        _build_dataset(plan, side, built)
        write_manifest(built, _describe(plan, side, built, receipts, hashes))
    for prefix in plan.prefixes:
        # A manifest of the dataset that is being replaced must not outlive it.
        Path(manifest_path(prefix)).unlink(missing_ok=True)
    for built, prefix in zip(builds, plan.prefixes, strict=True):
        for suffix in (".bin", ".idx"):
            os.replace(built + suffix, prefix + suffix)
        flush_to_disk(plan.journal.parent)
        os.replace(manifest_path(built), manifest_path(prefix))
    flush_to_disk(plan.journal.parent)


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
            "give more text, larger shares, or repeat with other settings and --overwrite"
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
