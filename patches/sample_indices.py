"""sample-indices: cached sample indices are written whole, with digests, and checked before they are used.

Upstream writes each index in place and later uses any file of the right name: half a file ends every later start, and changed
entries train on other samples. For a split without a token, such as one of few documents, it counts epochs without end.

Upstream builds on rank 0 only, before the others read. Here a rank that then finds none builds them, once per folder:
hosts need not share it.

Activate: applied by the launcher for the specs of this package; or ``megacpp_mcore.patches.apply(["sample-indices"])``.
Scope: the document, sample and shuffle index of a GPTDataset and the two of a BlendedDataset, in the folder ``path_to_cache``.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore.errors import DataError
from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit
from megacpp_mcore.util import console
from megacpp_mcore.util.collectives import rank_and_size
from megacpp_mcore.util.files import replace, sha256_of

DIGESTS = "sha256.json"
"""Suffix of the file, written last, with the SHA-256 of every file of one dataset's indices."""
_building = threading.Lock()
"""Held while one of the threads that build datasets takes this rank for rank 0."""


@edit(
    "megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
    "31ef3869909a992bddcf816811c83ec73c625ff8b54f7ab614ef783e3ede39a9",
)
def _checked(original: Function, self: Any) -> Any:
    """Replace the two methods that read a dataset's indices, or build them on rank 0."""
    if not self.config.path_to_cache:
        return original(self)
    split = self.index_split if hasattr(self, "index_split") else self.split
    base = f"{self.unique_description_hash}-{type(self).__name__}-{split.name}"
    folder = Path(self.config.path_to_cache)
    if (problem := problem_of(folder, base)) is None:
        return original(self)
    if self.config.fast_cache_load or self.config.defer_npy_index_mmap:
        raise DataError(
            f"{problem}; with --dataloader-fast-cache-load and --dataloader-defer-npy-index-mmap no index is built: start "
            "once without them and with the same --data-cache-path, below which the data's contents choose a folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _in_turn(folder / f".{base}.lock"):
            if (problem := problem_of(folder, base)) is None:  # another rank of this host has built them
                return original(self)
            if any(folder.glob(f"{base}-*")):
                console.say(f"megacpp-mcore: {problem}; the sample indices are built anew")
            return _build(self, original, folder, base)
    except OSError as error:
        raise DataError(
            f"the sample indices cannot be cached in {folder}: {error}; name a folder that can be written with "
            "--data-cache-path",
            code="no-cache",
        ) from error


@edit(
    "megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs",
    "2a8e50253a5e1dd6859c6f410d6ddc687c47834363210a72609bb435610cf996",
)
def _counted(original: Function, self: Any, num_tokens_per_epoch: int) -> Any:
    """Replace the method that adds epochs until there are tokens for all samples."""
    if num_tokens_per_epoch <= 0 and self.num_samples is not None:
        raise DataError(
            f"the {self.index_split.name} split of {self.dataset_path} has no token: --split {self.config.split} leaves it "
            f"{len(self.indices)} documents; give it a larger share, or 0 with --eval-iters 0",
            code="empty-split",
        )
    sample = self.config.sequence_length + bool(self.config.add_extra_token_to_sequence)
    needs_full_sample = self.index_split.name != "valid" or self.config.drop_last_partial_validation_sequence
    if self.num_samples is None and needs_full_sample and num_tokens_per_epoch < sample:
        raise DataError(
            f"the {self.index_split.name} split of {self.dataset_path} has {num_tokens_per_epoch} tokens, and one sample "
            f"{sample}: leave it out, or give the datasets weights, by which it is repeated",
            code="empty-split",
        )
    return original(self, num_tokens_per_epoch)


def problem_of(folder: Path, base: str) -> str | None:
    """Why the indices whose files begin with ``base`` in ``folder`` cannot be used; None: they are as they were written."""
    record = folder / f"{base}-{DIGESTS}"
    try:
        expected = json.loads(record.read_bytes())
        changed = [name for name in expected if sha256_of(folder / name) != expected[name]]
    except FileNotFoundError as error:
        return f"{error.filename} does not exist"
    except (OSError, ValueError, TypeError) as error:
        return f"{record}: {error}"
    return f"{folder / changed[0]} is not what was written there (SHA-256)" if changed else None


@contextlib.contextmanager
def _in_turn(lock: Path) -> Iterator[None]:
    """On rank 0, do nothing: stock makes the others wait. On another, wait for those with this folder, then be rank 0."""
    from torch import distributed

    with contextlib.ExitStack() as stack:
        with _building:  # else this rank may be taken for rank 0
            is_first = rank_and_size()[0] == 0
        if not is_first:
            with contextlib.suppress(OSError):  # without locks, each builds the same and replaces it atomically
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks what can be written
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            stack.enter_context(_building)
            stack.enter_context(mock.patch.object(distributed, "get_rank", return_value=0))
        yield


def _build(dataset: Any, original: Callable[..., Any], folder: Path, base: str) -> Any:
    """Have ``original`` build the indices in a folder of their own, and move them to ``folder``, the digests last."""
    config = copy.copy(dataset.config)  # other threads build other datasets by the same one
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as built:
        config.path_to_cache = built
        with mock.patch.object(dataset, "config", config):
            indices = original(dataset)
        digests = {path.name: sha256_of(path) for path in Path(built).iterdir()}
        for name in digests:
            os.replace(Path(built, name), folder / name)
    replace(folder / f"{base}-{DIGESTS}", json.dumps(digests).encode())
    return indices


PATCH = Patch(
    name="sample-indices",
    fixes=(
        "sample indices that a killed run left cut off end every later start, and damaged ones are trained with; neither is "
        "named; hosts that do not share the cache end; a split to which --split leaves no document hangs the start"
    ),
    source="megatron-core 0.19.2, megatron/core/datasets/gpt_dataset.py and blended_dataset.py; NVIDIA/Megatron-LM#957",
    edits=(
        _checked,
        _counted,
        Edit(
            "megatron.core.datasets.blended_dataset:BlendedDataset._build_indices",
            ("c526c2c6ddd9d47ee82fbc7352ca7fb112b5ab67753792f4f56bb6d934ed0b79",),
            _checked.make,
        ),
    ),
    seam=(
        "each of two methods both reads and builds all indices of a dataset, and takes the folder from its configuration; the "
        "third has the loop"
    ),
    leaves_alone="what the indices contain, and their names; datasets without path_to_cache",
    retire_when="upstream writes indices atomically and checks them, and refuses a split without a token",
    cost="indices are hashed once per start and rank; those without digests are built once more, and once for each folder",
)
