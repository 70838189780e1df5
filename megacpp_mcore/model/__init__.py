"""The model: NAM56R's definition, parallel layout, precision, and the cost of a step. No torch, no Megatron."""

from megacpp_mcore.model.definition import (
    DEFAULT,
    DSA,
    M2RNN,
    MLA,
    MTP,
    PRESETS,
    Layout,
    Mamba3,
    Model,
    MoE,
    preset,
    with_overrides,
)
from megacpp_mcore.model.families.attention_family import OWN, SERVED

__all__ = [
    "DEFAULT",
    "DSA",
    "M2RNN",
    "MLA",
    "MTP",
    "OWN",
    "PRESETS",
    "SERVED",
    "Layout",
    "Mamba3",
    "MoE",
    "Model",
    "preset",
    "with_overrides",
]
