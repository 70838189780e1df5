"""Reads and writes a distributed checkpoint without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

COMMON = "common_state/shard_0_1"


class Code:
    """What a pickle can do: make the folder ``made``."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte ``at``."""
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


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


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    common: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> None:
    """Write a ``torch_dist`` checkpoint in ``shards`` files: the tensors, objects by name, what Megatron calls common state."""
    folder.mkdir(parents=True)
    state: dict[str, Any] = {**tensors, **(objects or {})}
    if common is not None:
        state[COMMON] = [common]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(folder, thread_count=shards), planner=planner, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
