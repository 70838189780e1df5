"""Rewrites a checkpoint for another DSA schedule: indexers of layers that become Shared go, those that become Full get one.

A layer that becomes Full starts with the indexer that served it, optimizer state included, and so attends to the keys that it
attended to before. Source of the schedule: index cache, arXiv 2603.12201.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.checkpoints.rewrite import Maker, Source, refuse_flat_buckets, rewrite
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import Model
from megacpp_mcore.model.pattern import FULL_ATTENTION, FULL_INDEX

_INDEXER = re.compile(
    r"(?P<stem>.*\bdecoder\.layers\.)(?P<layer>\d+)(?P<rest>\.self_attention\.core_attention\.indexer\..*)"
)


@dataclass(frozen=True)
class Rescheduled:
    """What :func:`reschedule` wrote.

    Attributes:
        folder: of the iteration.
        became_shared: layers whose indexer went, 1-based.
        became_full: layers that got an indexer, to the layer whose it was.
    """

    folder: Path
    became_shared: tuple[int, ...]
    became_full: dict[int, int]


def reschedule(old: Path, new: Path, model: Model) -> Rescheduled:
    """Write the checkpoint ``old`` to the folder ``new`` with the indexers that ``model`` has.

    Args:
        old, new: as of :func:`megacpp_mcore.checkpoints.rewrite.rewrite`.
        model: with the new schedule; otherwise the checkpoint's own.

    Raises:
        CheckpointError: ``old`` has an indexer where the model has no sparse layer, or none before a layer that is to become
            Full; its optimizer state is in flat buckets; or as ``rewrite``.
    """
    shared: list[int] = []
    full: dict[int, int] = {}

    def plan(source: Source) -> dict[str, dict[str, Maker | None]]:
        refuse_flat_buckets(source)
        found = [match for match in map(_INDEXER.fullmatch, source.names) if match]
        present = {int(match["layer"]) + 1 for match in found}
        _check(source, model, present)
        wanted = {number for number, role in enumerate(model.roles, start=1) if role == FULL_INDEX}
        shared.extend(sorted(present - wanted))
        for layer in sorted(wanted - present):
            full[layer] = max((number for number in present if number < layer), default=0)
            if not full[layer]:
                raise CheckpointError(
                    f"{source.folder}: layer {layer} is to become Full and no layer before it has an indexer to start with; "
                    "choose a schedule whose first sparse layer is the checkpoint's"
                )
        changes: dict[str, dict[str, Maker | None]] = {}
        for match in found:
            layer = int(match["layer"]) + 1
            copies = [number for number, served in full.items() if served == layer]
            stays = [layer] if layer in wanted else []
            if stays != [layer] or copies:
                names = (f"{match['stem']}{number - 1}{match['rest']}" for number in (*stays, *copies))
                changes[match[0]] = dict.fromkeys(names)
        return changes

    return Rescheduled(rewrite(old, new, plan), tuple(shared), full)


def _check(source: Source, model: Model, present: set[int]) -> None:
    if not present:
        raise CheckpointError(f"{source.folder} has no DSA indexer; name a checkpoint of a model with sparse layers")
    for layer in sorted(present):
        role = model.roles[layer - 1] if layer <= model.depth else None
        if role in (None, FULL_ATTENTION):
            what = "ends before it" if layer > model.depth else "has no sparse attention there"
            raise CheckpointError(
                f"{source.folder} has an indexer in layer {layer} and {model.name} with the schedule {model.dsa.schedule} "
                f"{what}; F and S can take each other's place, and nothing else"
            )
