"""The recipes: a model, its layout and its training plan under one name, the same for every entry point. Pure Python.

``nemo_recipes`` turns them into Megatron-Bridge configurations, ``megacpp-mcore recipe emit`` into a stock command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Layout, Model, preset
from megacpp_mcore.model.run import NARROW, Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.util.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, except for its data.

    Attributes:
        name: ``<model>_pretrain_<processes><device>_<machine>_<precision>``, as Megatron-Bridge names recipes.
        run: what is trained, and how; data and tokenizer are set when it is started.
        settings: the file for ``MEGACPP_CONFIG`` that belongs to it; None without.
    """

    name: str
    run: Run
    settings: Path | None = None

    @property
    def model(self) -> Model:
        """What is trained."""
        return cast("Model", self.run.model)

    @property
    def processes(self) -> int:
        """The number of processes, one per GPU."""
        return self.run.training.processes

    def __post_init__(self) -> None:
        layout, training = self.run.layout, self.run.training
        self.model.check_layout(layout)
        sharded, replicas = layout.tensor * layout.context * layout.pipeline, layout.replicas(self.processes)
        if self.processes % sharded or (self.processes // layout.pipeline) % layout.expert:
            raise ModelError(
                f"{self.name}: {self.processes} processes cannot be divided into tensor {layout.tensor} × pipeline "
                f"{layout.pipeline} × context {layout.context} with expert parallelism {layout.expert}; change the layout or "
                "their number"
            )
        if training.global_batch_size % (training.micro_batch_size * replicas):
            raise ModelError(
                f"{self.name}: the global batch of {training.global_batch_size} is not a multiple of the micro-batch "
                f"({training.micro_batch_size}) × {replicas} data-parallel replicas; change one of them"
            )


def _on_gpus(
    model: str, gpus: int, machine: str, micro_batch: int, batch: int, precision: str = "bf16",
    execution: Mapping[str, Any] = MappingProxyType({}),
) -> Recipe:  # fmt: skip
    """Use replicas, the fastest layout where a GPU holds one, in CUDA graphs (``experiments/results/gpus_h200.csv``).

    On one H200 micro-batches of two sequences are 8 % faster than of one, and 12 GB more are reserved. ``fp8``: bf16, and what
    the model's settings file runs in FP8, the fastest of the rows in FP8 (``experiments/results/nam56r_h200.csv``).
    """
    training = Training(micro_batch_size=micro_batch, global_batch_size=batch * gpus, processes=gpus, cuda_graphs=True)
    settings = Path(__file__).resolve().with_name(f"{model}_fp8.yaml") if precision == "fp8" else None
    name = f"{model}_pretrain_{gpus}gpu_{machine}_{precision}"
    return Recipe(name=name, run=Run(preset(model), Layout(), training, asked=execution), settings=settings)


def _by_muon(run: Run) -> Recipe:
    """Train with Megatron's Muon (emerging-optimizers); experts are then Megatron's, and no layer is in CUDA graphs."""
    training = dataclasses.replace(run.training, optimizer="muon")
    on = f"1gpu_h200_{training.precision}" if run.device == "cuda" else f"1cpu_{training.precision}"
    return Recipe(name=f"{cast('Model', run.model).name}_pretrain_{on}_muon", run=dataclasses.replace(run, training=training))


def _of_long_rows(gpus: int) -> Recipe:
    """Train one row a GPU, recomputed as ``recipe memory`` estimates; not in CUDA graphs, which refuse recompute."""
    training = Training(micro_batch_size=1, global_batch_size=gpus, processes=gpus)
    settings = Path(__file__).resolve().with_name(f"nam56r_long{'_1gpu' if gpus == 1 else ''}.yaml")
    name = f"nam56r_long_pretrain_{gpus}gpu_h200_bf16"
    return Recipe(name=name, run=Run(preset("nam56r_long"), Layout(), training), settings=settings)


_TINY = Run(
    preset("nam56r_tiny"),
    training=Training(device="cpu", precision="fp32", transformer_impl="local", learning_rate=4e-3),
)
_ALL = (
    *(_on_gpus("nam56r", gpus, "h200", 2, 8) for gpus in (1, 2, 4, 8)),
    _on_gpus("nam56r", 1, "h100", 1, 8, execution=NARROW),
    *(_on_gpus("nam56r", gpus, "h100", 1, 8) for gpus in (2, 4, 8)),
    *(_on_gpus("nam56r", gpus, "h200", 2, 8, "fp8") for gpus in (1, 2, 4, 8)),
    *(_on_gpus("nam56r_quarter", 1, machine, 1, 2) for machine in ("h200", "h100")),
    *(_of_long_rows(gpus) for gpus in (1, 4, 8)),
    Recipe(name="nam56r_tiny_pretrain_1cpu_fp32", run=_TINY),
    *map(_by_muon, (_on_gpus("nam56r", 1, "h200", 2, 8).run, _TINY)),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""Every recipe by its name."""


def recipe(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Raises:
        ModelError: unknown name; the nearest ones are suggested.
    """
    if name not in RECIPES:
        raise ModelError(f"there is no recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
