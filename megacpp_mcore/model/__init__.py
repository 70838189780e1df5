"""What is trained: NAM56R's definition, how it is cut, in which precision, and what a step costs. No torch, no Megatron.

==================  =========================================================
:mod:`~.definition`  the model: families of layers, sizes, presets
:mod:`~.pattern`     the letters of the layers, and the schedule of DSA
:mod:`~.hybrid`      the same as Megatron's ``--hybrid-layer-pattern``
:mod:`~.precision`   which layers compute in which number format
:mod:`~.training`    what one run adds: machine, data, optimizer
:mod:`~.recipes`     model, cut and training together, by name
:mod:`~.parameters`  how many there are, by part and by what a layout cuts
:mod:`~.memory`      bytes that a rank holds from step to step
:mod:`~.flops`       operations of a step, counted
==================  =========================================================
"""

from megacpp_mcore.model.definition import (
    DSA,
    M2RNN,
    MLA,
    MTP,
    OWN,
    PRESETS,
    SERVED,
    Layout,
    Mamba3,
    Model,
    MoE,
    Start,
    preset,
    with_overrides,
)

__all__ = [
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
    "Start",
    "preset",
    "with_overrides",
]
