"""Rewrites a checkpoint for another DSA schedule: layers that become Full get an indexer, those that cease to be lose it.

A layer that becomes Full starts with a copy of the nearest indexer below (which served it, if it was Shared) or else above,
optimizer state included. It scores its own input with it, and so attends to other keys than before. Nothing else of a layer
differs by its role. Source of the schedule: index cache, arXiv 2603.12201.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.checkpoints.rewrite import rewrite
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import Model
from megacpp_mcore.model.pattern import FULL_INDEX, attention_roles

_INDEXER = re.compile(
    r"(?P<stem>.*\bdecoder\.layers\.)(?P<layer>\d+)(?P<rest>\.self_attention\.core_attention\.indexer\..*)"
)


@dataclass(frozen=True)
class Rescheduled:
    """Result of :func:`reschedule`.

    Attributes:
        lost: layers whose indexer was removed, 1-based.
        became_full: each layer that got an indexer, mapped to the layer it was copied from.
    """

    folder: Path
    lost: tuple[int, ...]
    became_full: dict[int, int]


def reschedule(old: Path, new: Path, model: Model, schedule: str) -> Rescheduled:
    """Write the checkpoint ``old`` of ``model`` to the folder ``new`` with the indexers of another schedule.

    ``old`` and ``new`` are as in :func:`megacpp_mcore.checkpoints.rewrite.rewrite`; ``model`` has the schedule that it trained
    with.

    Raises:
        CheckpointError: a layer is to become Full, and there is no indexer to copy; the indexers in ``old`` do not match the
            model; its optimizer state is in flat buckets; or as ``rewrite``.
        PatternError: the schedule does not fit the model.
    """
    before, after = model.roles, attention_roles(model.layers, schedule)
    has, wants = ({n for n, role in enumerate(roles, start=1) if role == FULL_INDEX} for roles in (before, after))
    if wants and not has:
        raise CheckpointError(
            f"layers {sorted(wants)} of {model.name} are 'F' in the schedule {schedule}, and {model.dsa.schedule} has no "
            "indexer to begin with; make them 'W' (a window), or name a checkpoint with one"
        )
    lost = tuple(sorted(has - wants))
    full = {new: min(has, key=lambda layer: (layer > new, abs(layer - new))) for new in sorted(wants - has)}

    def plan(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
        matches = [match for match in map(_INDEXER.fullmatch, names) if match]
        present = {int(match["layer"]) + 1 for match in matches}
        if present != has:
            raise CheckpointError(
                f"{folder} has indexers in layers {sorted(present)}, and {model.name} with the schedule "
                f"{model.dsa.schedule} in {sorted(has)}; name the model that was trained, by MEGACPP_CONFIG if not a preset"
            )
        changes: dict[str, list[str]] = {}
        for match in matches:
            layer = int(match["layer"]) + 1
            copies = [number for number, served in full.items() if served == layer]
            stays = [layer] if layer in wants else []
            changes[match[0]] = [f"{match['stem']}{number - 1}{match['rest']}" for number in (*stays, *copies)]
        return changes

    return Rescheduled(rewrite(old, new, plan), lost, full)
