"""Rewrites a checkpoint for another DSA schedule: layers that become Full get an indexer, those that cease to be lose it.

A layer that becomes Full starts with a copy of the nearest indexer below (which served it, if it was Shared) or else above,
optimizer state included. It scores its own input with it, and so attends to other keys than before. Nothing else of a layer
differs by its role. Source of the schedule: index cache, arXiv 2603.12201.

Needs neither a model nor a process group: files are copied byte for byte, and only the metadata of torch_dist, which maps each
name to places in them, is rewritten. Several names may be of the same bytes, and bytes without a name are not read.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megacpp_mcore.checkpoints.folder import TRACKER, newest_iteration
from megacpp_mcore.checkpoints.integrity import MANIFEST, METADATA, read_metadata, write_manifest
from megacpp_mcore.checkpoints.layout import INDEXER, RESAVE, indexed
from megacpp_mcore.checkpoints.staging import new_folder
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import Model
from megacpp_mcore.model.pattern import FULL_INDEX, attention_roles

TRAIN_STATE = "train_state.pt"
"""Megatron-Bridge's file in an iteration's folder and, as ``latest_train_state.pt``, next to that folder."""

_BUCKETS = ".distributed.dp_group_idx_"
"""Substring of the names of optimizer state that is saved in the memory layout of Megatron's flat parameter buckets."""


@dataclass(frozen=True)
class Rescheduled:
    """Result of :func:`reschedule`.

    Attributes:
        folder: of the new checkpoint's iteration.
        lost: layers whose indexer was removed, 1-based.
        became_full: each layer that got an indexer, mapped to the layer it was copied from.
    """

    folder: Path
    lost: tuple[int, ...]
    became_full: dict[int, int]


def reschedule(old: Path, new: Path, model: Model, schedule: str) -> Rescheduled:
    """Write the checkpoint ``old`` of ``model`` to the folder ``new`` with the indexers of another schedule.

    Args:
        old: the folder of ``--save``, for its latest checkpoint, or the folder of one iteration.
        new: must not exist; gets the iteration's folder and the tracker file, as expected by ``--load``.
        model: with the schedule that it trained with.

    Raises:
        CheckpointError: a layer is to become Full, and there is no indexer to copy; the indexers in ``old`` do not match the
            model; its optimizer state is in a format without the parameters' shapes; ``old`` is not a whole checkpoint; ``new``
            exists or cannot be written. Nothing is left behind.
        PatternError: the schedule does not fit the model.
    """
    before, after = model.roles, attention_roles(model.layers, schedule)
    has, wants = ({n for n, role in enumerate(roles, start=1) if role == FULL_INDEX} for roles in (before, after))
    if wants and not has:
        raise CheckpointError(
            f"layers {sorted(wants)} of {model.name} are 'F' in the schedule {schedule}, and {model.dsa.schedule} has no "
            "indexer to begin with; make them 'W' (a window), or name a checkpoint with one"
        )
    full = {new: min(has, key=lambda layer: (layer > new, abs(layer - new))) for new in sorted(wants - has)}
    folder = newest_iteration(old)
    if not re.fullmatch(r"iter_\d+|release", folder.name):
        raise CheckpointError(
            f"{folder} is called {folder.name!r}, which no tracker file can name; expected iter_NUMBER or release: rename it"
        )
    metadata = read_metadata(folder)
    if buckets := next((name for name in metadata.state_dict_metadata if _BUCKETS in name), None):
        raise CheckpointError(
            f"{folder} holds the optimizer's state as flat buckets ({buckets}), in which no parameter's rows can be "
            f"told apart; {RESAVE}, or without the optimizer with --no-save-optim"
        )
    matches = [match for match in map(INDEXER.fullmatch, metadata.state_dict_metadata) if match]
    present = indexed(metadata.state_dict_metadata)
    if present != has:
        raise CheckpointError(
            f"{folder} has indexers in layers {sorted(present)}, and {model.name} with the schedule "
            f"{model.dsa.schedule} in {sorted(has)}; name the model that was trained, by MEGACPP_CONFIG if not a preset"
        )
    names: dict[str, list[str]] = {}
    for match in matches:
        layer = int(match["layer"]) + 1
        copies = [number for number, served in full.items() if served == layer]
        stays = [layer] if layer in wants else []
        names[match[0]] = [f"{match['stem']}{number - 1}{match['rest']}" for number in (*stays, *copies)]
    _write(folder, new, metadata, names)
    return Rescheduled(new / folder.name, tuple(sorted(has - wants)), full)


def _write(folder: Path, new: Path, metadata: Metadata, names: Mapping[str, Sequence[str]]) -> None:
    """Copy an iteration's ``folder`` to ``new``, each entry in ``names`` under these names instead of its own."""
    renamed = dataclasses.replace(
        metadata,
        planner_data=None,
        state_dict_metadata={
            name: entry for own, entry in metadata.state_dict_metadata.items() for name in names.get(own, [own])
        },
        storage_data={
            dataclasses.replace(index, fqn=name): place
            for index, place in metadata.storage_data.items()
            for name in names.get(index.fqn, [index.fqn])
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
