"""Reads and writes a distributed checkpoint without a model, and makes one of 0.1.0 of one of today's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megacpp_mcore.model import Model

COMMON = "common_state/shard_0_1"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the ``torch_dist`` checkpoint in ``folder``, whole: parameters, buffers, the optimizer's state."""
    reader = FileSystemReader(folder)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(state), storage_reader=reader, no_dist=True)
    return state


def objects_in(folder: Path) -> set[str]:
    """The names of all that is no tensor."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)}


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    common: Mapping[str, Any] | None = None,
) -> None:
    """Write a ``torch_dist`` checkpoint: the tensors, objects by name, and what Megatron calls the common state."""
    folder.mkdir(parents=True)
    state: dict[str, Any] = {**tensors, **(objects or {})}
    if common is not None:
        state[COMMON] = [common]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(folder, thread_count=1), planner=planner, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def as_saved_by_0_1_0(saved: Path, old: Path, model: Model) -> None:
    """Write the checkpoint of ``model`` in the folder ``saved`` to ``old`` as 0.1.0 had it: rows, axes, objects, no mark."""
    from megacpp_mcore.checkpoints import rewrite

    source = rewrite.Source(saved)
    tensors = as_0_1_0(
        tensors_in(saved), groups=model.mamba3.groups, rank=model.mamba3.mimo_rank, values=model.m2rnn.value_dim
    )
    objects = {name: torch.load(source.read(name), weights_only=True) for name in objects_in(saved)}
    (common,) = objects.pop(COMMON)
    assert common["content_metadata"].pop("megacpp_layout") == 2
    for name in tensors:
        if name.startswith("decoder.") and name.endswith(("in_proj.weight", "bc_proj.weight")):
            objects[f"{name.removesuffix('weight')}_extra_state/shard_0_1"] = [None]
    write(old, tensors, objects, common)


def as_0_1_0(tensors: Mapping[str, torch.Tensor], *, groups: int, rank: int, values: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of layout 2 as megacpp-mcore 0.1.0 had them, put together row by row.

    Args:
        tensors: of the whole checkpoint.
        groups, rank: of Mamba-3.
        values: width of M²RNN's values.
    """
    old = dict(tensors)
    for name in tensors:
        if name.endswith("in_proj.weight.z"):
            _put_mamba(old, name.removesuffix("in_proj.weight.z"), groups, rank)
        elif name.endswith("in_proj.weight.q"):
            _put_recurrent(old, name.removesuffix("in_proj.weight.q"), values)
    return old


def _put_mamba(old: dict[str, torch.Tensor], stem: str, groups: int, rank: int) -> None:
    part = {name: old.pop(f"{stem}in_proj.weight.{name}") for name in ("z", "x", "B", "C", "dt", "A", "trap", "angles")}
    heads = len(part["dt"])

    def head_rows() -> Iterator[torch.Tensor]:
        width = len(part["z"]) // heads
        for head in range(heads):
            yield from part["z"][head * width : (head + 1) * width]
            yield from part["x"][head * width : (head + 1) * width]
            yield from (part["dt"][head], part["A"][head], part["trap"][head])

    def group_rows() -> Iterator[torch.Tensor]:
        width = len(part["B"]) // groups
        for group in range(groups):
            yield from part["B"][group * width : (group + 1) * width]
            yield from part["C"][group * width : (group + 1) * width]

    old[f"{stem}in_proj.weight"] = torch.stack(list(head_rows()))
    old[f"{stem}bc_proj.weight"] = torch.stack(list(group_rows()))
    old[f"{stem}angle_weight"] = part["angles"]
    for name in ("b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o"):
        if f"{stem}{name}" in old:
            old[f"{stem}{name}"] = old[f"{stem}{name}"].reshape(heads, rank, -1)


def _put_recurrent(old: dict[str, torch.Tensor], stem: str, values: int) -> None:
    part = {name: old.pop(f"{stem}in_proj.weight.{name}") for name in "qkvgf"}
    rows: list[torch.Tensor] = []
    for head in range(len(part["f"])):
        rows += [*part["v"][head * values : (head + 1) * values], part["f"][head]]
        rows += [*part["g"][head * values : (head + 1) * values]]
    old[f"{stem}in_proj.weight"] = torch.stack(rows)
    old[f"{stem}qk_weight"] = torch.cat([part["q"], part["k"]])
    old[f"{stem}W"] = old[f"{stem}W"].reshape(-1, values, values)
