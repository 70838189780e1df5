"""Rewrites a checkpoint for another DSA schedule: layers that become Shared lose their indexer, those that become Full get one.

A layer that becomes Full starts with a copy of the indexer that served it, optimizer state included. It scores its own
input with it, and so attends to other keys than before. Source of the schedule: index cache, arXiv 2603.12201.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.checkpoints.rewrite import rewrite
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import Model
from megacpp_mcore.model.pattern import FULL_ATTENTION, FULL_INDEX, attention_roles

_INDEXER = re.compile(
    r"(?P<stem>.*\bdecoder\.layers\.)(?P<layer>\d+)(?P<rest>\.self_attention\.core_attention\.indexer\..*)"
)


@dataclass(frozen=True)
class Rescheduled:
    """Result of :func:`reschedule`.

    Attributes:
        folder: of the iteration.
        became_shared: layers whose indexer was removed, 1-based.
        became_full: layers that got an indexer, to the layer it was copied from.
    """

    folder: Path
    became_shared: tuple[int, ...]
    became_full: dict[int, int]


def reschedule(old: Path, new: Path, model: Model, schedule: str) -> Rescheduled:
    """Write the checkpoint ``old`` of ``model`` to the folder ``new`` with the indexers of another schedule.

    Args:
        old, new: as in :func:`megacpp_mcore.checkpoints.rewrite.rewrite`.
        model: the trained model, its schedule included.
        schedule: the new one.

    Raises:
        CheckpointError: the new schedule has different sparse layers, or the indexers in ``old`` do not match the model; its
            optimizer state is in flat buckets; or as ``rewrite``.
        PatternError: the schedule does not fit the model.
    """
    before, after = model.roles, attention_roles(model.layers, schedule)
    for number, (role, one) in enumerate(zip(before, after, strict=True), start=1):
        if (role == FULL_ATTENTION) != (one == FULL_ATTENTION):
            raise CheckpointError(
                f"layer {number} of {model.name} is {role!r} in the schedule {model.dsa.schedule} and {one!r} in {schedule}; "
                "only F and S can replace each other"
            )
    has, wants = ({n for n, role in enumerate(roles, start=1) if role == FULL_INDEX} for roles in (before, after))
    shared = tuple(sorted(has - wants))
    full = {layer: max(number for number in has if number < layer) for layer in sorted(wants - has)}

    def plan(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
        found = [match for match in map(_INDEXER.fullmatch, names) if match]
        present = {int(match["layer"]) + 1 for match in found}
        if present != has:
            raise CheckpointError(
                f"{folder} has indexers in layers {sorted(present)}, and {model.name} with the schedule "
                f"{model.dsa.schedule} in {sorted(has)}; name the model that was trained, by MEGACPP_CONFIG if not a preset"
            )
        changes: dict[str, list[str]] = {}
        for match in found:
            layer = int(match["layer"]) + 1
            copies = [number for number, served in full.items() if served == layer]
            stays = [layer] if layer in wants else []
            changes[match[0]] = [f"{match['stem']}{number - 1}{match['rest']}" for number in (*stays, *copies)]
        return changes

    return Rescheduled(rewrite(old, new, plan), shared, full)
