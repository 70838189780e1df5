"""Rewrites a checkpoint of megacpp-mcore 0.1.0 in today's layout: projections by part, biases and rank mixes with one axis.

All sizes are read off the tensors' own shapes: no model is needed. The content metadata is marked.

Shape legend: D hidden, H heads, G groups, P head dim, R MIMO rank, N state, A angles, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore.checkpoints.layout import KEY, LAYOUT
from megacpp_mcore.checkpoints.rewrite import Maker, Source, refuse_flat_buckets, rewrite
from megacpp_mcore.errors import CheckpointError

_MIXER = ".self_attention."

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

    Raises:
        CheckpointError: ``old`` is no checkpoint of 0.1.0, or cannot be converted; otherwise as that function.
    """
    changes: dict[str, dict[str, Maker]] = {}

    def plan(source: Source) -> dict[str, dict[str, Maker]]:
        _mark(source)
        changes.update(_changes(source))
        return changes

    folder = rewrite(old, new, plan)
    layers = {name.partition(_MIXER)[0].rpartition("decoder.")[2] for name in changes}
    return Converted(folder, len(layers), sum(map(bool, changes.values())))


def _mark(source: Source) -> None:
    """Mark the layout in the content metadata of ``source``.

    Raises:
        CheckpointError: ``source`` is not of 0.1.0, or its optimizer state is in a format that has lost the parameters' shapes.
    """
    whole = source.common()
    try:
        content = whole[0]["content_metadata"]
    except (LookupError, TypeError) as error:
        raise CheckpointError(
            f"{source.folder} has no content metadata: megacpp-mcore 0.1.0 did not save it, or it is damaged; convert another "
            "iteration"
        ) from error
    if KEY in content:
        raise CheckpointError(f"{source.folder} is in layout {content[KEY]} already; load it as it is")
    refuse_flat_buckets(source)
    content[KEY] = LAYOUT
    source.replace_common(whole)


def _changes(source: Source) -> dict[str, dict[str, Maker]]:
    """Each changed entry of ``source``: the names of its replacements, and the functions that compute them.

    Raises:
        CheckpointError: the tensors of a layer do not fit each other.
    """
    changes: dict[str, dict[str, Maker]] = {}
    for name in source.names:
        stem, found, parameter = name.rpartition(_MIXER)
        if found and parameter in ("bc_proj.weight", "qk_weight"):
            changes |= _layer(source, stem + found, _mamba if parameter == "bc_proj.weight" else _recurrent)
    return changes


def _layer(source: Source, stem: str, rows: Callable[[Mapping[str, Any]], Rows]) -> dict[str, dict[str, Maker]]:
    """The changes of one layer's parameters, or of one optimizer state of theirs: entries that start with ``stem``."""
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
