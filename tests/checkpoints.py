"""Reads a distributed checkpoint without a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


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
