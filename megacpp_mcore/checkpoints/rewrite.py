"""Rewrites a checkpoint in the format torch_dist, one entry at a time, without a model or a process group.

Tensors are read and written one by one, under their new names; everything else in the checkpoint is copied byte for byte.
"""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, save_integrity_manifest
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.util.files import flush_to_disk

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
"""Megatron-Bridge's file in an iteration's folder and, as ``latest_train_state.pt``, next to that folder."""
_METADATA = ".metadata"

_BUCKETS = ".distributed.dp_group_idx_"
"""Substring of the names of optimizer state that is saved in the memory layout of Megatron's flat parameter buckets."""
_RESAVE = (
    "load it in its parallelism and save it as torch_dist (--ckpt-convert-format torch_dist --ckpt-convert-save OLD), then "
    "name OLD/torch_dist"
)

Changes = Mapping[str, Sequence[str]]
"""The names under which to write an entry instead of its own: none, one or several."""


def rewrite(old: Path, new: Path, plan: Callable[[Source], Changes]) -> Path:
    """Write the checkpoint ``old`` to the folder ``new`` with the changes returned by ``plan``; returns the iteration folder.

    Args:
        old: the folder of ``--save``, for its latest checkpoint, or the folder of one iteration.
        new: must not exist; gets the iteration's folder and the tracker file, as expected by ``--load``.
        plan: returns the changes for a checkpoint.

    Raises:
        CheckpointError: ``old`` is not a checkpoint, or its optimizer state is in a format without the parameters' shapes;
            ``new`` exists or cannot be written; or raised by ``plan``. Nothing is left behind.
    """
    folder = _iteration_folder(old)
    if not re.fullmatch(r"iter_\d+|release", folder.name):
        raise CheckpointError(
            f"{folder} is called {folder.name!r}, which no tracker file can name; expected iter_NUMBER or release: rename it"
        )
    source = Source(folder)
    unfinished = new.with_name(f"{new.name}.partial")
    for path in (new, unfinished):
        if path.exists():
            raise CheckpointError(f"{path} is there already; name a folder that is not, or remove it")
    try:
        with warnings.catch_warnings():
            # torch warns at every read and write that it runs in a single process, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            _refuse_flat_buckets(source)
            changes = plan(source)
            target = unfinished / folder.name
            target.mkdir(parents=True)
            _write(target, source, changes)
        _copy_rest(folder, target)
        for path in (*unfinished.rglob("*"), unfinished):
            flush_to_disk(path)
        unfinished.rename(new)
        flush_to_disk(new.parent)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError | CheckpointException):
            raise
        raise CheckpointError(f"{folder} cannot be rewritten to {new}: {_cause(error)}") from error
    return new / folder.name


def _iteration_folder(old: Path) -> Path:
    if (old / _METADATA).is_file():
        return old.absolute()
    tracker = old / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(
            f"{old} is no checkpoint: it has neither {_METADATA} nor {TRACKER}; name the folder of --save, or one iter_… in it"
        ) from error
    folder = old / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(f"{folder} is in the format torch, which is cut as its run was; {_RESAVE}")
    if not (folder / _METADATA).is_file():
        raise CheckpointError(
            f"{folder}, which {tracker} names, has no {_METADATA}; restore it, or name another iteration"
        )
    return folder.absolute()


class _Objects(DefaultLoadPlanner):
    """Load planner that returns non-tensors as the file's bytes, without unpickling."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value


class Source(checkpoint.FileSystemReader):
    """A checkpoint in the format torch_dist, read one entry at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    @cached_property
    def _metadata(self) -> Metadata:
        try:
            return super().read_metadata()
        except Exception as error:  # torch unpickles the metadata, which can raise anything
            raise CheckpointError(
                f"{self.folder / _METADATA} cannot be read ({error!r}); restore it from a copy, or name another iteration"
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's method, but cached instead of rereading for every entry."""
        return self._metadata

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, tensors and objects."""
        return tuple(self._metadata.state_dict_metadata)

    def outline(self, name: str) -> torch.Tensor | None:
        """A tensor of the entry's shape and dtype without its values; None for non-tensors."""
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, name: str) -> Any:
        """A whole tensor, or the bytes of a non-tensor."""
        outline = self.outline(name)
        state: dict[str, Any] = {name: io.BytesIO() if outline is None else torch.empty_like(outline, device="cpu")}
        checkpoint.load(state, storage_reader=self, planner=_Objects(), no_dist=True)
        return state[name]


def _refuse_flat_buckets(source: Source) -> None:
    if buckets := next((name for name in source.names if _BUCKETS in name), None):
        raise CheckpointError(
            f"{source.folder} holds the optimizer's state as flat buckets ({buckets}), in which no parameter's rows can be "
            f"told apart; {_RESAVE}, with --dist-ckpt-optim-fully-reshardable, or without the optimizer with --no-save-optim"
        )


class _Lazy(DefaultSavePlanner):
    """Save planner that reads each entry only when writing it, and uses outlines until then."""

    def __init__(self, readers: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.readers = readers

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.readers[write_item.index.fqn]()


def _write(target: Path, source: Source, changes: Changes) -> None:
    outlines: dict[str, Any] = {}
    readers: dict[str, Callable[[], Any]] = {}
    for name in source.names:
        outline = source.outline(name)
        for new_name in changes.get(name, [name]):
            outlines[new_name] = io.BytesIO() if outline is None else outline
            readers[new_name] = partial(source.read, name)
    writer = checkpoint.FileSystemWriter(target, thread_count=1)
    checkpoint.save(outlines, storage_writer=writer, planner=_Lazy(readers), no_dist=True)


def _copy_rest(folder: Path, target: Path) -> None:
    """Copy files not written by torch (Megatron's marker, Bridge's files, a tokenizer); write the tracker beside ``target``."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        elif path.name not in (_METADATA, INTEGRITY_FNAME) and path.suffix != ".distcp":
            shutil.copy2(path, target / path.name)
    if (folder / INTEGRITY_FNAME).exists():
        save_integrity_manifest(str(target))
    if (folder / TRAIN_STATE).exists():
        shutil.copy2(folder / TRAIN_STATE, target.parent / f"latest_{TRAIN_STATE}")
    iteration = folder.name.removeprefix("iter_")
    (target.parent / TRACKER).write_text(str(int(iteration)) if iteration.isdecimal() else iteration, encoding="utf-8")


def _cause(error: BaseException) -> str:
    """The root cause of an error that torch has wrapped, once in reading and once in writing."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or repr(error)
