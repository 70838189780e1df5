"""The model: NAM56R's definition, parallel layout, precision, and the cost of a step. No torch, no Megatron.

==================  =========================================================
:mod:`~.families`    a record for each family of layers
:mod:`~.definition`  the model: its families' sizes, presets
:mod:`~.pattern`     layer letters, and the DSA schedule
:mod:`~.hybrid`      the same as Megatron's ``--hybrid-layer-pattern``
:mod:`~.precision`   which layers compute in which number format
:mod:`~.training`    what one run adds: machine, data, optimizer
:mod:`~.run`         model, layout and training plan together, and what follows from them
:mod:`~.recipes`     runs by name
:mod:`~.parameters`  parameter counts, by part and by how a layout shards them
:mod:`~.memory`      bytes of persistent state per rank
:mod:`~.flops`       FLOPs of a step
==================  =========================================================
"""

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
