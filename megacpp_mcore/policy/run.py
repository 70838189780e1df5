"""The description of a run that the launch policy needs, and how it is read from Megatron's arguments. No torch here.

Flags and their defaults are those of Megatron-LM core_v0.19.0, ``megatron/training/arguments.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megacpp_mcore.arguments.lowering import host_of
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.model import PRESETS, Layout, Model, memory
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.precision import EXPERTS_FILE, FP8_EXPERTS, PLANS, PrecisionPlan
from megacpp_mcore.util import flags

PRECISION_FILE = "--te-precision-config-file"
_CUT = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "expert-model-parallel-size",
    "context-parallel-size",
)
_STAGES = "--pipeline-model-parallel-layout"
_OTHER_STATES = (
    "--optimizer", "--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--offload-optimizer-states",
    "--fp8-param-gather", "--use-megatron-fsdp", "--num-distributed-optimizer-instances",
    "--skip-train", "--yaml-cfg", "--use-checkpoint-args",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments under which a rank's states differ from :func:`megacpp_mcore.model.memory.states`, or others determine them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the policy needs to know of a run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        world_size: number of processes.
        tensor, pipeline, virtual, expert, context: how the model is cut over the processes.
        families: the letters of the layers that a model of this package has; empty for a stock model.
        has_moe: whether it has E layers.
        model: what is trained; None where that is not known.
        mtp_depths: number of multi-token prediction depths.
        fsdp: whether Megatron-FSDP or torch FSDP2 shards the parameters.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        fp8: the FP8 format, None without.
        precision_plan: the plan of the file of ``--te-precision-config-file``; None without one, or with one of the user's.
        precision_file: the file, if it is not this package's own; None without.
        moe_dispatcher: as ``--moe-token-dispatcher-type``.
        bucket_elements, num_buckets: as ``--ddp-bucket-size`` and ``--ddp-num-buckets``.
        grad_bytes: bytes of one gradient element in the buckets.
        gradient_accumulation_fusion: whether matrix products add to the gradients themselves.
        moe_permute_fusion: whether one kernel sorts tokens by expert.
        manual_gc: whether Python collects garbage in named steps only.
        log_interval: steps between two lines in the log.
        cpu_initialization: whether weights are drawn by the CPU's generator.
        tf32_products: whether torch computes fp32 products in TF32, as :func:`tf32_products` returns it.
        cuda_graph_impl, cuda_graph_scope: as Megatron's arguments; ``none`` without graphs.
        recompute_granularity, recompute_modules: Megatron's own recompute.
        flags: the names of the arguments that were used, for the source of their values.
    """

    device: str
    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False
    transformer_impl: str = "transformer_engine"
    families: str = ""
    has_moe: bool = False
    model: Model | None = None
    mtp_depths: int = 0
    fsdp: bool = False
    precision: str = "fp32"
    fp8: str | None = None
    precision_plan: PrecisionPlan | None = None
    precision_file: str | None = None
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_moe_a2a: bool = False
    overlap_shared_expert: bool = False
    tp_comm_overlap: bool = False
    moe_dispatcher: str = "alltoall"
    bucket_elements: int | None = None
    num_buckets: int | None = None
    grad_bytes: int = 4
    gradient_accumulation_fusion: bool = False
    moe_permute_fusion: bool = False
    manual_gc: bool = False
    log_interval: int = 100
    cpu_initialization: bool = False
    tf32_products: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_scope: tuple[str, ...] = ()
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, without counting context parallelism."""
        return max(1, self.world_size // (self.tensor * self.pipeline * self.context))

    @property
    def process_parameters(self) -> int | None:
        """Parameters of a process of the largest stage; None where the model's, or its stages, are not known."""
        layout = self._layout()
        return None if self.model is None or layout is None else sum(memory.rank_parameters(self.model, layout))

    @property
    def states(self) -> memory.States | None:
        """What a process of the largest stage holds from step to step; None where that is not known."""
        layout = self._layout()
        if self.model is None or layout is None or self.flags.intersection(_OTHER_STATES):
            return None
        return memory.states(
            self.model,
            layout,
            self.world_size,
            precision=self.precision,
            grad_bytes=self.grad_bytes,
            distributed_optimizer=self.distributed_optimizer,
            fsdp=self.fsdp,
        )

    def _layout(self) -> Layout | None:
        """How the model is cut, if its definition determines the stages."""
        if self.model is None:
            return None
        pattern = grammar.parse(self.model.pattern)
        if _STAGES in self.flags and not pattern.staged:
            return None
        virtual = max(1, len(pattern.stages) // self.pipeline) if pattern.staged else self.virtual
        try:
            layout = Layout(tensor=self.tensor, pipeline=self.pipeline, virtual=virtual, expert=self.expert)
            self.model.chunks(layout)
        except ModelError:
            return None
        return layout

    def check_processes(self) -> None:
        """Compare the layout with the number of processes.

        Raises:
            LaunchError: the model is cut for a different number.
        """
        cut = {name: size for name in ("tensor", "pipeline", "context") if (size := getattr(self, name)) > 1}
        if self.world_size % (least := math.prod(cut.values())):
            words = " × ".join(f"{name} {size}" for name, size in cut.items())
            raise LaunchError(
                f"parallelism {words} takes {least} processes or a multiple, and there are {self.world_size}: start as many "
                "(launch --nproc, torchrun --nproc-per-node), or change the layout"
            )

    @classmethod
    def from_arguments(cls, words: Sequence[str], *, device: str, world_size: int, model: Model | None = None) -> Run:
        """Read the run that Megatron's arguments describe.

        Args:
            words: the arguments.
            device: ``cuda`` or ``cpu``.
            world_size: number of processes.
            model: what a spec of this package builds; None: the preset that the arguments describe, if they name such a spec.

        Raises:
            LaunchError: a size is not a whole number, or below 1.
        """
        given = flags.read(words)
        model = model or _described(given)
        facts: dict[str, Any] = {"has_moe": "--num-experts" in given} if model is None else model_facts(model)
        precision = next((kind for kind in ("bf16", "fp16") if f"--{kind}" in given), "fp32")
        plan, file = _precision_plan(given)
        tensor, pipeline, expert, context = (flags.whole(given, f"--{name}", LaunchError, 1) or 1 for name in _CUT)
        return cls(
            device=device,
            world_size=world_size,
            tensor=tensor,
            pipeline=pipeline,
            virtual=flags.whole(given, "--num-virtual-stages-per-pipeline-rank", LaunchError, 1) or 1,
            expert=expert,
            context=context,
            sequence_parallel="--sequence-parallel" in given,
            transformer_impl=flags.first(given, "--transformer-impl") or "transformer_engine",
            fsdp="--use-megatron-fsdp" in given or "--use-torch-fsdp2" in given,
            precision=precision,
            fp8=flags.first(given, "--fp8-format"),
            precision_plan=plan,
            precision_file=file,
            distributed_optimizer="--use-distributed-optimizer" in given,
            overlap_grad_reduce="--overlap-grad-reduce" in given,
            overlap_param_gather="--overlap-param-gather" in given,
            overlap_moe_a2a="--overlap-moe-expert-parallel-comm" in given,
            overlap_shared_expert="--moe-shared-expert-overlap" in given,
            tp_comm_overlap="--tp-comm-overlap" in given,
            moe_dispatcher=flags.first(given, "--moe-token-dispatcher-type") or "allgather",
            bucket_elements=flags.whole(given, "--ddp-bucket-size", LaunchError, 1),
            num_buckets=flags.whole(given, "--ddp-num-buckets", LaunchError, 1),
            grad_bytes=_grad_bytes(given, precision),
            gradient_accumulation_fusion="--no-gradient-accumulation-fusion" not in given,
            moe_permute_fusion="--moe-permute-fusion" in given,
            manual_gc="--manual-gc" in given,
            log_interval=flags.whole(given, "--log-interval", LaunchError, 1) or 100,
            cpu_initialization="--use-cpu-initialization" in given,
            cuda_graph_impl=flags.first(given, "--cuda-graph-impl") or "none",
            cuda_graph_scope=given.get("--cuda-graph-modules", given.get("--cuda-graph-scope", ())),
            recompute_granularity=flags.first(given, "--recompute-granularity"),
            recompute_modules=given.get("--recompute-modules", ()),
            flags=frozenset(given),
            **facts,
        )


def tf32_products() -> bool:
    """Whether torch computes fp32 products on a GPU in TF32, as set by the environment or a program; imports torch."""
    import torch

    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def model_facts(model: Model) -> dict[str, Any]:
    """The fields of a :class:`Run` that describe its model."""
    return {
        "families": "".join(letter for letter in "AMER" if letter in model.layers),
        "has_moe": "E" in model.layers,
        "model": model,
        "mtp_depths": model.mtp.depth,
    }


def _described(given: Mapping[str, tuple[str, ...]]) -> Model | None:
    """The preset with the depth, width and heads in the arguments; None without a spec of this package."""
    if host_of(given.get("--spec")) is None:
        return None
    shape = tuple(
        flags.whole(given, flag, LaunchError, 1) for flag in ("--num-layers", "--hidden-size", "--num-attention-heads")
    )
    fitting = [model for model in PRESETS.values() if (model.depth, model.hidden_size, model.heads) == shape]
    return fitting[0] if fitting else None


def _grad_bytes(given: Mapping[str, tuple[str, ...]], precision: str) -> int:
    """Bytes of a gradient element in the buckets, as decided by Megatron's ``validate_args``."""
    in_fp32 = "--accumulate-allreduce-grads-in-fp32" in given
    if precision == "fp16":
        return 4 if in_fp32 else 2
    if precision == "bf16":
        halved = flags.first(given, "--main-grads-dtype") == "bf16" and not in_fp32
        return 2 if halved or "--grad-reduce-in-bf16" in given else 4
    return 4


def _precision_plan(given: Mapping[str, tuple[str, ...]]) -> tuple[PrecisionPlan | None, str | None]:
    """The precision file's request: the plan whose file says the same, otherwise the name of the file."""
    file = flags.first(given, PRECISION_FILE)
    if file is None:
        return None, None
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None, file  # Megatron reports why it cannot be read
    is_ours = content == yaml.safe_load(EXPERTS_FILE.read_text(encoding="utf-8"))
    return (PLANS[FP8_EXPERTS], None) if is_ours else (None, file)
