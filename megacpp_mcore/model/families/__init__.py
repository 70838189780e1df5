"""The families of layers: one record each, looped over by everything that would branch on a letter. Pure Python.

A new family is a record here, a spec in :mod:`megacpp_mcore.layer_specs`, and its op (docs/extending.md).
"""

from __future__ import annotations

from megacpp_mcore.model.families.attention_family import ATTENTION
from megacpp_mcore.model.families.base import Family
from megacpp_mcore.model.families.experts_family import EXPERTS
from megacpp_mcore.model.families.mamba_family import MAMBA
from megacpp_mcore.model.families.recurrent_family import RECURRENT

FAMILIES: dict[str, Family] = {family.letter: family for family in (ATTENTION, EXPERTS, MAMBA, RECURRENT)}
"""Letter to family."""


def mixers_first() -> list[Family]:
    """Return the families in the order of their work: mixers, then feed-forward parts."""
    return sorted(FAMILIES.values(), key=lambda family: not family.is_mixer)
