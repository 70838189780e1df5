"""Persistent memory of a rank: weights, gradients, fp32 main weights and Adam's moments, in bytes. No torch.

As in Megatron 0.19 with Adam's default dtypes. Gradient buffers are persistent; the distributed optimizer shards main weights
and moments over the ranks with the same weights, FSDP2 shards everything. The fp32 parameters of M and R layers are counted as
bf16 with a main weight, two bytes too many (4 MB in ``nam56r``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.definition import Layout, Model
from megacpp_mcore.model.parameters import by_stage

ROOM = 16
"""1/ROOM of a GPU is reserved for activations, workspaces and CUDA itself. On an 80 GB GPU that is 5.3 GB: a step of ``nam56r``
with one micro-batch of 4096 tokens used 4.6 GB on top of its states (experiments/results/quarter_h200.csv), and CUDA, which
torch does not count, uses half a GB."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    main_weights: int
    moments: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.main_weights + self.moments

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in asdict(self).items() if size)
        return f"{self.total / 1e9:.1f} GB ({parts})"


def rank_parameters(model: Model, layout: Layout) -> tuple[int, int]:
    """Parameters per rank in the largest stage: without routed experts, and of routed experts.

    Raises:
        ModelError: the layers cannot be split that way.
    """
    held = [
        (stage.tensor // layout.tensor + stage.whole, stage.expert // layout.expert)
        for stage in by_stage(model, layout)
    ]
    return max(held, key=sum)


def states(
    model: Model,
    layout: Layout,
    processes: int,
    *,
    precision: str = "bf16",
    grad_bytes: int = 4,
    distributed_optimizer: bool = False,
    fsdp: bool = False,
) -> States:
    """Persistent memory of a rank in the largest stage.

    Args:
        model: what is trained.
        layout: its parallel layout.
        processes: of the run.
        precision: dtype of the weights: ``bf16``, ``fp16`` or ``fp32``, which has no main weights.
        grad_bytes: bytes per gradient value in the buffers.
        distributed_optimizer: whether optimizer state is sharded over replicas.
        fsdp: whether FSDP2 shards everything over replicas; gradients then have the dtype of the weights.

    Raises:
        ModelError: the layers cannot be split that way.
    """
    weight, main = (4, 0) if precision == "fp32" else (2, 4)
    gradient = weight if fsdp else grad_bytes
    sizes = [0, 0, 0, 0]
    ranks_of_a_stage = processes // layout.pipeline
    for count, cut in zip(rank_parameters(model, layout), (layout.tensor, layout.expert), strict=True):
        replicas = max(1, ranks_of_a_stage // cut)
        of_all, of_optimizer = (replicas if fsdp else 1, replicas if fsdp or distributed_optimizer else 1)
        for place, (each, over) in enumerate(
            ((weight, of_all), (gradient, of_all), (main, of_optimizer), (8, of_optimizer))
        ):
            sizes[place] += each * count // over
    return States(weights=sizes[0], gradients=sizes[1], main_weights=sizes[2], moments=sizes[3])


def fits(held: States, gpu_bytes: int) -> bool:
    """Whether ``held`` leaves room for a step on a GPU of ``gpu_bytes``."""
    return held.total <= gpu_bytes - gpu_bytes // ROOM


def fitting(model: Model, gpu_bytes: int, processes: int, precision: str) -> Iterator[tuple[int, Layout, States]]:
    """Layouts that fit on the fewest GPUs of ``gpu_bytes``, ``processes`` or a multiple: number of GPUs, layout, states.

    Optimizer state is sharded over replicas. Layouts that split the model least come first; among them expert before tensor
    before pipeline parallelism.
    """
    sizes = (1, 2, 4, 8)
    layouts = [
        Layout(tensor=tensor, pipeline=pipeline, expert=expert, sequence_parallel=tensor > 1)
        for pipeline, tensor, expert in itertools.product(sizes, sizes, sizes)
    ]
    layouts.sort(key=lambda layout: layout.pipeline * layout.tensor * layout.expert)
    grad_bytes = 4 if precision != "fp16" else 2
    for count in (processes * more for more in (1, 2, 4, 8, 16, 32, 64)):
        found = False
        for layout in layouts:
            if count % layout.processes:
                continue
            try:
                model.check_layout(layout)
            except ModelError:
                continue
            held = states(model, layout, count, precision=precision, grad_bytes=grad_bytes, distributed_optimizer=True)
            if fits(held, gpu_bytes):
                found = True
                yield count, layout, held
        if found:
            return
