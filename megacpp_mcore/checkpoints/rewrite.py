"""Renames the entries of a torch_dist checkpoint, without a model or a process group.

Files are copied byte for byte. Only the metadata, which maps each name to places in them, is rewritten.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megacpp_mcore.checkpoints.folder import TRACKER, iteration_folder, read_tracker
from megacpp_mcore.checkpoints.integrity import MANIFEST, METADATA, damages, read_metadata, write_manifest
from megacpp_mcore.checkpoints.layout import RESAVE
from megacpp_mcore.checkpoints.staging import new_folder
from megacpp_mcore.errors import CheckpointError

TRAIN_STATE = "train_state.pt"
"""Megatron-Bridge's file in an iteration's folder and, as ``latest_train_state.pt``, next to that folder."""

_BUCKETS = ".distributed.dp_group_idx_"
"""Substring of the names of optimizer state that is saved in the memory layout of Megatron's flat parameter buckets."""
Changes = Mapping[str, Sequence[str]]
"""The names under which to write an entry instead of its own: none, one or several."""


def rewrite(old: Path, new: Path, plan: Callable[[Path, Sequence[str]], Changes]) -> Path:
    """Write the checkpoint ``old`` to the folder ``new`` with the changes returned by ``plan``; returns the iteration folder.

    Args:
        old: the folder of ``--save``, for its latest checkpoint, or the folder of one iteration.
        new: must not exist; gets the iteration's folder and the tracker file, as expected by ``--load``.
        plan: returns the changes for an iteration's folder with entries of these names.

    Raises:
        CheckpointError: ``old`` is not a checkpoint, or is damaged, or its optimizer state is in a format without the
            parameters' shapes; ``new`` exists or cannot be written; or raised by ``plan``. Nothing is left behind.
    """
    folder = newest_iteration(old)
    if not re.fullmatch(r"iter_\d+|release", folder.name):
        raise CheckpointError(
            f"{folder} is called {folder.name!r}, which no tracker file can name; expected iter_NUMBER or release: rename it"
        )
    if damaged := damages(folder):
        raise CheckpointError(
            f"{folder} is damaged: {'; '.join(damaged)}; restore it from a copy, or name another iteration"
        )
    metadata = read_metadata(folder)
    if buckets := next((name for name in metadata.state_dict_metadata if _BUCKETS in name), None):
        raise CheckpointError(
            f"{folder} holds the optimizer's state as flat buckets ({buckets}), in which no parameter's rows can be "
            f"told apart; {RESAVE}, or without the optimizer with --no-save-optim"
        )
    changes = plan(folder, tuple(metadata.state_dict_metadata))
    # Several names may be of the same bytes, and bytes without a name are not read.
    renamed = dataclasses.replace(
        metadata,
        planner_data=None,
        state_dict_metadata={
            new: entry for old, entry in metadata.state_dict_metadata.items() for new in changes.get(old, [old])
        },
        storage_data={
            dataclasses.replace(index, fqn=new): place
            for index, place in metadata.storage_data.items()
            for new in changes.get(index.fqn, [index.fqn])
        },
    )
    with new_folder(new) as unfinished:
        target = unfinished / folder.name
        # Without modes: what is read-only in the old folder is writable in the new one.
        skipped = shutil.ignore_patterns(METADATA, MANIFEST)
        shutil.copytree(folder, target, copy_function=shutil.copyfile, ignore=skipped)
        target.chmod(0o755)
        (target / METADATA).write_bytes(pickle.dumps(renamed))
        if (folder / MANIFEST).exists():
            write_manifest(target)
        if (target / TRAIN_STATE).exists():
            shutil.copy2(target / TRAIN_STATE, unfinished / f"latest_{TRAIN_STATE}")
        iteration = folder.name.removeprefix("iter_")
        (unfinished / TRACKER).write_text(str(int(iteration)) if iteration.isdecimal() else iteration, encoding="utf-8")
    return new / folder.name


def newest_iteration(old: Path) -> Path:
    """Return the folder of one iteration: ``old``, or that of the latest one in ``old``.

    Raises:
        CheckpointError: it is not a checkpoint in the format torch_dist.
    """
    if (old / METADATA).is_file():
        return old.absolute()
    named = read_tracker(old)
    if named is None:
        raise CheckpointError(
            f"{old} is not a checkpoint: it has no {METADATA} and no {TRACKER}; name the folder of --save, or one iter_… in it"
        )
    folder = iteration_folder(old, named)
    if any(folder.glob("mp_rank_*")):
        raise CheckpointError(f"{folder} is in the format torch, which is sharded like its run; {RESAVE}")
    return folder.absolute()
