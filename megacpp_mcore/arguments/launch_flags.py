"""Stock flags that change a run's speed but not its results: when each is on, and why. Pure Python.

``lower`` writes them, a Bridge recipe sets the same fields, and the launch policy reports for any run which are on and why.
Flags and conditions are those of Megatron-LM core_v0.19.0 and megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megacpp_mcore.errors import ModelError

FUSED_GRADIENTS = "gradient accumulation fusion"
DISTRIBUTED_OPTIMIZER = "distributed optimizer"
GRAD_REDUCE = "overlapped gradient reduce"
PARAM_GATHER = "overlapped parameter gather"
MOE_PERMUTE = "MoE permute fusion"
MANUAL_GC = "manual garbage collection"
GC_INTERVAL = 100
"""Steps between garbage collections: a step leaves little in cycles, and collecting takes 0.1 s in a large process."""
FULLY_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
"""With the distributed optimizer: its state is saved by parameter, not as the run's flat buckets, and at the same cost."""
BUCKET_ELEMENTS = 120_000_000
"""Elements of a gradient bucket where reductions are hidden; Megatron has 40 million, or a million a replica if that is more.

A layer in a CUDA graph waits until all its weights are gathered, and Megatron gathers one bucket ahead, which with 40 million
is less than a layer of ``nam56r``: a step of two H200s took 1706 ms, with buckets of this size 1696, with twice that 1697.
"""
LOG_INTERVAL = 10
"""Steps between log lines of a run on several GPUs."""
TORCH_FSDP, TORCH_FSDP_FORMAT = "--use-torch-fsdp2", "torch_dcp"
_UNDER_TORCH_FSDP: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "pipeline parallelism": (1, "a stage's weights would be gathered anew for every micro-batch"),
        "expert parallelism": (1, "experts are cut over the replicas"),
        "tensor parallelism": (1, "gradients of experts would not be summed over its ranks"),
        "calculate_per_token_loss": (False, "gradients would be divided by the replicas and by the tokens of them all"),
        "cuda_graph_impl": ("none", "gathered weights have no fixed place"),
        "MTP depths under --recompute-granularity full": (
            1,
            "gradients of a block that is computed again twice would be lost",
        ),
        "use_distributed_optimizer": (False, "optimizer state is cut already"),
        "ckpt_format": (TORCH_FSDP_FORMAT, "no other holds the optimizer's state of weights that are cut"),
    }
)
"""Values required of a run under FSDP2, and why."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Properties of a run that decide which flags it gets.

    ``idle_parameters``: why some get no gradient; ``torch_fsdp``: whether FSDP2 shards weights, gradients and optimizer state.
    """

    device: str
    has_engine: bool
    has_moe: bool
    processes: int
    replicas: int
    idle_parameters: str = ""
    torch_fsdp: bool = False


@dataclass(frozen=True, kw_only=True)
class LaunchFlag:
    """One stock flag that changes speed and not results.

    Attributes:
        name: the feature.
        words: arguments that switch it on; empty if Megatron's default is on.
        off: arguments that switch it off; empty if Megatron's default is off.
        reason: its benefit.
        obstacle: why a run on a machine cannot use it; empty if it can.
    """

    name: str
    words: tuple[str, ...]
    off: tuple[str, ...] = ()
    reason: str
    obstacle: Callable[[Machine], str]


def _engine(machine: Machine) -> str:
    return "" if machine.has_engine else "it is Transformer Engine's"


def _gpus(machine: Machine) -> str:
    return "" if machine.device == "cuda" else "it is for GPUs"


def _fsdp(machine: Machine) -> str:
    return "FSDP2 cuts, gathers and reduces by itself" if machine.torch_fsdp else ""


def _replicas(machine: Machine) -> str:
    return _gpus(machine) or _fsdp(machine) or ("" if machine.replicas > 1 else "there is one data-parallel replica")


def _every_gradient(machine: Machine) -> str:
    return _replicas(machine) or machine.idle_parameters


FLAGS = (
    LaunchFlag(
        name=FUSED_GRADIENTS,
        words=(),
        off=("--no-gradient-accumulation-fusion",),
        reason="Transformer Engine's products add to the fp32 gradients themselves: no 16-bit copy, no pass to add it",
        obstacle=lambda machine: _engine(machine) or _fsdp(machine),
    ),
    LaunchFlag(
        name=DISTRIBUTED_OPTIMIZER,
        words=("--use-distributed-optimizer", FULLY_RESHARDABLE),
        reason="fp32 weights and Adam's moments are cut over the replicas, and so is the work of the update",
        obstacle=_replicas,
    ),
    LaunchFlag(
        name=GRAD_REDUCE,
        words=("--overlap-grad-reduce",),
        reason="a full bucket of gradients is reduced while the backward pass goes on",
        obstacle=_every_gradient,
    ),
    LaunchFlag(
        name=PARAM_GATHER,
        words=("--overlap-param-gather",),
        reason="updated weights are gathered bucket by bucket while the next forward pass runs",
        obstacle=_every_gradient,
    ),
    LaunchFlag(
        name=MOE_PERMUTE,
        words=("--moe-permute-fusion",),
        reason="one kernel sorts tokens by expert, and one sorts them back, in place of an index, a gather and a scatter",
        obstacle=lambda machine: _engine(machine) or ("" if machine.has_moe else "there are no experts"),
    ),
    LaunchFlag(
        name=MANUAL_GC,
        words=("--manual-gc", "--manual-gc-interval", str(GC_INTERVAL)),
        reason=f"Python collects cycles on all ranks in the same step, every {GC_INTERVAL}; else each stops all by itself",
        obstacle=_gpus,
    ),
)


def check_torch_fsdp(run: Mapping[str, Any]) -> None:
    """Refuse a run that would train wrongly, or not at all, under FSDP2.

    Args:
        run: its settings as far as known: ``pipeline parallelism``, ``expert parallelism``, ``tensor parallelism``, and
            Megatron's arguments by name.

    Raises:
        ModelError: lists every obstacle.
    """
    found = [
        f"{name} is {value!r}, expected {_UNDER_TORCH_FSDP[name][0]!r} ({_UNDER_TORCH_FSDP[name][1]})"
        for name, value in run.items()
        if value != _UNDER_TORCH_FSDP[name][0]
    ]
    if found:
        raise ModelError(f"{TORCH_FSDP}: {'; '.join(found)}; change that, or leave {TORCH_FSDP} out")


def lowered(machine: Machine) -> tuple[str, ...]:
    """The arguments of all flags for a run on ``machine``."""
    return tuple(word for flag in FLAGS for word in (flag.off if flag.obstacle(machine) else flag.words))


def bucket_elements(machine: Machine) -> int | None:
    """Elements of a gradient bucket; None for Megatron's own size, which is as large from 120 replicas on."""
    is_larger = machine.replicas * 1_000_000 < BUCKET_ELEMENTS
    return BUCKET_ELEMENTS if is_larger and not _every_gradient(machine) else None


def log_interval(machine: Machine) -> int:
    """Steps between log lines; for each line all ranks wait for each other and for the loss."""
    return LOG_INTERVAL if machine.device == "cuda" and machine.processes > 1 else 1
