"""Rewrites a checkpoint of megacpp-mcore 0.1.0 in today's layout: projections by part, biases and rank mixes with one axis.

All sizes are read off the tensors' own shapes: no model is needed, nor a process group. Tensors are read, changed and written
one at a time; whatever else is in the checkpoint is copied as the bytes it is, but for the content metadata, which is marked.

Shape legend: D hidden, H heads, G groups, P head dim, R MIMO rank, N state, A angles, K key dim, V value dim.
"""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, save_integrity_manifest
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from megacpp_mcore.checkpoints.layout import AS_TORCH_DIST, KEY, LAYOUT
from megacpp_mcore.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
"""What Megatron-Bridge has in an iteration's folder and, as ``latest_train_state.pt``, beside it."""
_METADATA = ".metadata"
_COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key
_MIXER = ".self_attention."
_BUCKETS = ".distributed.dp_group_idx_"
"""In the names of an optimizer state that is saved as Megatron's flat buckets of parameters lie in memory."""

Maker = Callable[[torch.Tensor], torch.Tensor]
Rows = Mapping[str, tuple[int, Mapping[str, int]]]
"""A weight's name to the number of its blocks, and the parts of each block in order with their rows."""


@dataclass(frozen=True)
class Converted:
    """What :func:`convert` wrote: the iteration's folder, and how many M and R layers and changed tensors are in it."""

    folder: Path
    layers: int
    tensors: int


def convert(old: Path, new: Path) -> Converted:
    """Write the checkpoint ``old`` in today's layout to the folder ``new``.

    Args:
        old: the folder of ``--save``, for its latest checkpoint, or the folder of one iteration.
        new: not there yet; gets the iteration's folder and the tracker file, as ``--load`` wants them.

    Raises:
        CheckpointError: ``old`` is no checkpoint of 0.1.0, or cannot be converted; ``new`` is there, or cannot be written.
            Nothing is left behind.
    """
    folder = _iteration_folder(old)
    source = _Source(folder)
    unfinished = new.with_name(f"{new.name}.partial")
    for path in (new, unfinished):
        if path.exists():
            raise CheckpointError(f"{path} is there already; name a folder that is not, or remove it")
    try:
        with warnings.catch_warnings():
            # Of every read and write, that it goes on in one process: as it is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            common, changes = _marked(source), _changes(source)
            target = unfinished / folder.name
            target.mkdir(parents=True)
            _write(target, source, changes, common)
        _copy_rest(folder, target)
        unfinished.rename(new)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{folder} cannot be converted to {new}: {_cause(error)}") from error
    layers = {name.partition(_MIXER)[0].rpartition("decoder.")[2] for name in changes}
    return Converted(new / folder.name, len(layers), sum(map(bool, changes.values())))


def _iteration_folder(old: Path) -> Path:
    if (old / _METADATA).is_file():
        return old.resolve()
    tracker = old / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(
            f"{old} is no checkpoint: it has neither {_METADATA} nor {TRACKER}; name the folder of --save, or one iter_… in it"
        ) from error
    folder = old / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(f"{folder} is in the format torch, which is cut as its run was; {AS_TORCH_DIST}")
    if not (folder / _METADATA).is_file():
        raise CheckpointError(
            f"{folder}, which {tracker} names, has no {_METADATA}; restore it, or name another iteration"
        )
    return folder.resolve()


class _Objects(DefaultLoadPlanner):
    """Hands out what is no tensor as the bytes that are in the file, and unpickles none of it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value


class _Source(checkpoint.FileSystemReader):
    """A checkpoint in the format torch_dist, read one entry at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    @cached_property
    def _metadata(self) -> Metadata:
        try:
            return super().read_metadata()
        except Exception as error:  # torch unpickles it: anything
            raise CheckpointError(
                f"{self.folder / _METADATA} cannot be read ({error!r}); restore it from a copy, or convert another iteration"
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's, once and not with every entry."""
        return self._metadata

    @property
    def names(self) -> tuple[str, ...]:
        """Of all entries, tensors and objects."""
        return tuple(self._metadata.state_dict_metadata)

    def outline(self, name: str) -> torch.Tensor | None:
        """A tensor without its values; None for what is no tensor."""
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, name: str, make: Maker | None = None) -> Any:
        """What ``make`` makes of a whole tensor; without it the tensor, or the bytes of what is none."""
        outline = self.outline(name)
        state: dict[str, Any] = {name: io.BytesIO() if outline is None else torch.empty_like(outline, device="cpu")}
        checkpoint.load(state, storage_reader=self, planner=_Objects(), no_dist=True)
        return state[name] if make is None else make(state[name])


def _marked(source: _Source) -> io.BytesIO:
    """The common state of ``source``, its content metadata marked, as the bytes that a checkpoint holds.

    Raises:
        CheckpointError: ``source`` is not of 0.1.0, or its optimizer state is in a format that has lost the parameters' shapes.
    """
    try:
        whole = torch.load(source.read(_COMMON), weights_only=True)
        content = whole[0]["content_metadata"]
    except (Exception, CheckpointException) as error:  # torch unpickles it: anything
        raise CheckpointError(
            f"{source.folder} has no content metadata that can be read ({_cause(error)}): megacpp-mcore 0.1.0 did not save it, "
            "or it is damaged; convert another iteration"
        ) from error
    if KEY in content:
        raise CheckpointError(f"{source.folder} is in layout {content[KEY]} already; load it as it is")
    if buckets := next((name for name in source.names if _BUCKETS in name), None):
        raise CheckpointError(
            f"{source.folder} holds the optimizer's state as flat buckets ({content.get('distrib_optim_sharding_type')}: "
            f"{buckets}), in which no parameter's rows can be told apart; with 0.1.0, in the parallelism that saved it, load "
            "and save it with --dist-ckpt-optim-fully-reshardable, or without the optimizer with --no-save-optim, by "
            "--ckpt-convert-format torch_dist --ckpt-convert-save OLD; then convert OLD/torch_dist"
        )
    content[KEY] = LAYOUT
    stream = io.BytesIO()
    torch.save(whole, stream)
    return stream


def _changes(source: _Source) -> dict[str, dict[str, Maker]]:
    """Each entry of ``source`` that does not stay: the names of what takes its place, and what makes that of it.

    Raises:
        CheckpointError: the tensors of a layer do not fit each other.
    """
    changes: dict[str, dict[str, Maker]] = {}
    for name in source.names:
        stem, found, parameter = name.rpartition(_MIXER)
        if found and parameter in ("bc_proj.weight", "qk_weight"):
            changes |= _layer(source, stem + found, _mamba if parameter == "bc_proj.weight" else _recurrent)
    return changes


def _layer(source: _Source, stem: str, rows: Callable[[Mapping[str, Any]], Rows]) -> dict[str, dict[str, Maker]]:
    """The changes of one layer's parameters, or of one state of the optimizer for them: of all that starts with ``stem``."""
    own = {name.removeprefix(stem): source.outline(name) for name in source.names if name.startswith(stem)}
    shapes = {name: tuple(outline.shape) for name, outline in own.items() if outline is not None}
    changes: dict[str, dict[str, Maker]] = {}
    try:
        for name, (blocks, parts) in rows(shapes).items():
            if shapes[name][0] != blocks * sum(parts.values()) or min(parts.values()) < 1:
                raise ValueError(f"{name} is not {blocks} times {dict(parts)} rows")
            sizes = list(parts.values())
            makers = (partial(_part, blocks, sizes, index) for index in range(len(sizes)))
            changes[name] = dict(zip((f"in_proj.weight.{part}" for part in parts), makers, strict=True))
    except (LookupError, ValueError, ArithmeticError) as error:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
        raise CheckpointError(
            f"{source.folder}: {stem}* is no layer of megacpp-mcore 0.1.0 ({error!r}): {listed}; "
            "convert a checkpoint that it saved"
        ) from error
    changes |= {name: {name: torch.flatten} for name, shape in shapes.items() if len(shape) == 3}
    changes |= {name: {} for name in own if "_proj._extra_state" in name and not name.startswith("out_proj")}
    return {stem + name: {stem + part: make for part, make in parts.items()} for name, parts in changes.items()}


def _mamba(shapes: Mapping[str, Any]) -> Rows:
    """Mamba-3: a head's rows were z [P], x [P], dt, A, trap; a group's B [R, N], C [R, N]; b_bias and its like [H, R, …]."""
    heads, rank, state = shapes["b_bias"]
    head_dim = (shapes["in_proj.weight"][0] // heads - 3) // 2
    columns = rank * state
    return {
        "in_proj.weight": (heads, {"z": head_dim, "x": head_dim, "dt": 1, "A": 1, "trap": 1}),
        "bc_proj.weight": (shapes["bc_proj.weight"][0] // (2 * columns), {"B": columns, "C": columns}),
        "angle_weight": (1, {"angles": shapes["angle_weight"][0]}),
    }


def _recurrent(shapes: Mapping[str, Any]) -> Rows:
    """M²RNN: a head's rows were v [V], f, g [V]; q [K] and k [K] a weight of their own; W [H, V, V]."""
    heads, values, _ = shapes["W"]
    keys = shapes["qk_weight"][0] // 2
    return {
        "in_proj.weight": (heads, {"v": values, "f": 1, "g": values}),
        "qk_weight": (1, {"q": keys, "k": keys}),
    }


def _part(blocks: int, sizes: list[int], index: int, weight: torch.Tensor) -> torch.Tensor:
    """The rows of one part, block by block: ``[blocks · Σ sizes, D] -> [blocks · sizes[index], D]``."""
    return weight.unflatten(0, (blocks, -1)).split(sizes, dim=1)[index].flatten(0, 1).contiguous()


class _Lazy(DefaultSavePlanner):
    """Makes what it saves when it is written; until then there are outlines."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.makers = makers

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.makers[write_item.index.fqn]()


def _write(target: Path, source: _Source, changes: Mapping[str, Mapping[str, Maker]], common: io.BytesIO) -> None:
    outlines: dict[str, Any] = {}
    makers: dict[str, Callable[[], Any]] = {}
    for name in source.names:
        outline = source.outline(name)
        for new_name, make in changes.get(name, {name: None}).items():
            outlines[new_name] = io.BytesIO() if outline is None else outline if make is None else make(outline)
            makers[new_name] = partial(source.read, name, make)
    makers[_COMMON] = lambda: common
    writer = checkpoint.FileSystemWriter(target, thread_count=1)
    checkpoint.save(outlines, storage_writer=writer, planner=_Lazy(makers), no_dist=True)


def _copy_rest(folder: Path, target: Path) -> None:
    """Copy what torch did not write: Megatron's marker, Bridge's files, a tokenizer; write the tracker beside ``target``."""
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
    """What went wrong in the first place: torch wraps it, once for reading and once for writing."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or repr(error)
