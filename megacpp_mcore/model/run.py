"""One run: a model, its layout, its training plan, and how Megatron carries it out. No torch, no Megatron.

Everything before a step is decided from a :class:`Run`: the stock command (:mod:`megacpp_mcore.arguments.lowering`; its inverse
is :mod:`megacpp_mcore.arguments.read`), Megatron-Bridge's configuration, the launch policy, and the memory of a rank. The
usual settings follow from the run (:func:`usual_for`); its deviations from them are :attr:`Run.asked`.

Flags, defaults and conditions are those of Megatron-LM core_v0.19.0 and megatron-core 0.19.2.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.definition import Layout, Model
from megacpp_mcore.model.families import EXPERTS, FAMILIES
from megacpp_mcore.model.families.attention_family import FULL_INDEX
from megacpp_mcore.model.training import DEFAULT_MODEL_CLASS, Training
from megacpp_mcore.util import flags

if TYPE_CHECKING:
    from megacpp_mcore.settings import PluginConfig

GC_INTERVAL = 100
"""Steps between garbage collections: a step leaves little in cycles, and collecting takes 0.1 s in a large process."""
FULLY_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
"""With the distributed optimizer: its state is saved by parameter, not as the run's flat buckets, and at the same cost."""
BUCKET_ELEMENTS = 120_000_000
"""Elements of a gradient bucket where reductions are hidden; Megatron's is 40 million, or a million a replica if more.

A layer in a CUDA graph waits until all its weights are gathered, and Megatron gathers one bucket ahead, which with 40 million
is less than a layer of ``nam56r``: a step of two H200s took 1706 ms, with buckets of this size 1696, with twice that 1697.
"""
LOG_INTERVAL = 10
"""Steps between log lines of a run on several GPUs."""
LARGEST_GATHER = 8
"""Largest expert parallelism that all-gathers tokens: mostly the GPUs of one host. Four were measured."""
TORCH_FSDP = "--use-torch-fsdp2"
MOST_MICRO_BATCHES = 16
"""Most micro-batches of a step that a pipeline captures: each has its own graphs, 0.34 GB and a second; eight were measured."""
CAPTURED = (
    "layers are captured with Transformer Engine, in bf16, trained by Adam, without context parallelism or FSDP2, and in a "
    f"pipeline without tensor or expert parallelism, with at most {MOST_MICRO_BATCHES} micro-batches a step"
)


def _switch(*words: str, on: bool = False) -> Any:
    """Declare a field that ``words`` switch on, or off if it is ``on`` without them."""
    return field(default=on, metadata={"words": words})


def _option(*names: str, default: Any = None, kind: type = str) -> Any:
    """Declare a field that is the value of a flag, known by each of ``names``; ``tuple`` takes all its values."""
    return field(default=default, metadata={"names": names, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How Megatron carries out a run: what changes its speed and memory but not, or hardly, its results.

    Each default is Megatron's own, and each field without words is read from several flags.

    Attributes:
        gradient_accumulation_fusion: matrix products add to the gradients themselves.
        precision_aware: a bf16 weight's main parameter is kept as the 16 bits that the weight leaves of it.
        exp_avg, exp_avg_sq: what Adam's moments are kept in, by Megatron's names; any but fp32 need the former.
        moe_permute_fusion: one kernel sorts tokens by expert.
        manual_gc: Python collects garbage in named steps only.
        moe_dispatcher: as ``--moe-token-dispatcher-type``.
        bucket_elements, num_buckets: size and number of gradient buckets; Megatron takes one of them.
        log_interval: steps between two lines in the log.
        cpu_initialization: weights are drawn by the CPU's generator.
        stage_group: consecutive micro-batches of a virtual stage; None: as many as stages.
        torch_fsdp, megatron_fsdp: which FSDP shards the parameters, if any.
        fp16: weights in fp16, which no plan of this package has.
        fp8: Megatron's own FP8 format, for every layer.
        precision_file: the file of ``--te-precision-config-file``, if it is not this package's.
        recompute_granularity, recompute_method, recompute_modules: Megatron's own recompute.
        grad_bytes: bytes of a gradient element in the buckets.
        experts: there are routed experts; with a model of this package, its layers decide.
        own_states: the optimizer's states differ from those that :func:`megacpp_mcore.model.memory.states` counts.
        own_stages: the arguments define pipeline stages that the model's pattern does not mark.
    """

    gradient_accumulation_fusion: bool = _switch("--no-gradient-accumulation-fusion", on=True)
    distributed_optimizer: bool = _switch("--use-distributed-optimizer", FULLY_RESHARDABLE)
    precision_aware: bool = _switch("--use-precision-aware-optimizer")
    exp_avg: str = _option("--exp-avg-dtype", default="fp32")
    exp_avg_sq: str = _option("--exp-avg-sq-dtype", default="fp32")
    overlap_grad_reduce: bool = _switch("--overlap-grad-reduce")
    overlap_param_gather: bool = _switch("--overlap-param-gather")
    moe_permute_fusion: bool = _switch("--moe-permute-fusion")
    manual_gc: bool = _switch("--manual-gc", "--manual-gc-interval", str(GC_INTERVAL))
    moe_dispatcher: str = _option("--moe-token-dispatcher-type", default="allgather")
    bucket_elements: int | None = _option("--ddp-bucket-size", kind=int)
    num_buckets: int | None = _option("--ddp-num-buckets", kind=int)
    log_interval: int = _option("--log-interval", default=100, kind=int)
    cpu_initialization: bool = _switch("--use-cpu-initialization")
    cuda_graph_impl: str = _option("--cuda-graph-impl", default="none")
    cuda_graph_scope: tuple[str, ...] = _option("--cuda-graph-modules", "--cuda-graph-scope", default=(), kind=tuple)
    stage_group: int | None = _option("--microbatch-group-size-per-virtual-pipeline-stage", kind=int)
    torch_fsdp: bool = _switch(TORCH_FSDP)
    megatron_fsdp: bool = _switch("--use-megatron-fsdp")
    overlap_moe_a2a: bool = _switch("--overlap-moe-expert-parallel-comm")
    overlap_shared_expert: bool = _switch("--moe-shared-expert-overlap")
    tp_comm_overlap: bool = _switch("--tp-comm-overlap")
    fp16: bool = _switch("--fp16")
    fp8: str | None = _option("--fp8-format")
    precision_file: str | None = _option("--te-precision-config-file")
    recompute_granularity: str | None = _option("--recompute-granularity")
    recompute_method: str | None = _option("--recompute-method")
    recompute_modules: tuple[str, ...] = _option("--recompute-modules", default=(), kind=tuple)
    grad_bytes: int = 4
    experts: bool = False
    own_states: bool = False
    own_stages: bool = False

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded over the replicas."""
        return self.torch_fsdp or self.megatron_fsdp


FIELDS = {setting.name: setting for setting in dataclasses.fields(Execution)}
NARROW: Mapping[str, Any] = MappingProxyType({"precision_aware": True, "exp_avg": "bf16", "exp_avg_sq": "bf16"})
"""Settings for GPUs where 12 bytes a bf16 parameter fit and 18 do not."""

_OLDER: Mapping[str, tuple[str, str]] = MappingProxyType({
    "--enable-cuda-graph": ("cuda_graph_impl", "local"),
    "--external-cuda-graph": ("cuda_graph_impl", "transformer_engine"),
    "--recompute-activations": ("recompute_granularity", "selective"),
})  # fmt: skip
"""Flags that Megatron translates (megatron-core 0.19.2, ``training/arguments.py``), and the fields that they set."""


def words_of(name: str, value: Any) -> tuple[str, ...]:
    """Return the arguments that set the field ``name`` to ``value``; none for Megatron's default."""
    setting = FIELDS[name]
    if value == setting.default or not setting.metadata:
        return ()
    if "words" in setting.metadata:
        return tuple(setting.metadata["words"])
    return (setting.metadata["names"][0], *(value if isinstance(value, tuple) else [str(value)]))


def given_in(given: flags.Flags) -> dict[str, Any]:
    """Return the fields that a command line sets, as far as one flag decides them.

    Raises:
        LaunchError: a value is not a number, or below 1.
    """
    values: dict[str, Any] = {name: value for flag, (name, value) in _OLDER.items() if flag in given}
    for name, setting in FIELDS.items():
        if "words" in setting.metadata and setting.metadata["words"][0] in given:
            values[name] = not setting.default
        flag = next((flag for flag in setting.metadata.get("names", ()) if flag in given), None)
        if flag is not None:
            kind = setting.metadata["kind"]
            value = given[flag] if kind is tuple else flags.first(given, flag)
            values[name] = flags.whole(given, flag, LaunchError, 1) if kind is int else value
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Run:
    """One run, except for where it is started.

    Attributes:
        model: what is trained; None if it is not a model of this package.
        training: precision, batch, optimizer and data; :attr:`Training.processes` is their number.
        model_class: Megatron's model class that holds the layers, ``gpt`` or ``hybrid``.
        asked: fields of :class:`Execution` that deviate from what is usual for such a run.
        settings: the file of ``MEGACPP_CONFIG``, read once; None without.
        given: fields of :class:`Execution`, and ``precision``, that were set explicitly, even to the usual value.
    """

    model: Model | None = None
    layout: Layout = field(default_factory=Layout)
    training: Training = field(default_factory=Training)
    model_class: str = DEFAULT_MODEL_CLASS
    asked: Mapping[str, Any] = field(default_factory=dict)
    settings: PluginConfig | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __deepcopy__(self, memo: object) -> Run:
        """Return the run itself, which cannot change: Megatron copies the configuration that holds it."""
        return self

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.training.device

    @property
    def processes(self) -> int:
        """Number of processes: at least what the layout needs."""
        return max(self.training.processes, self.layout.processes)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights: data-parallel replicas, times context parallelism."""
        return max(1, self.processes // (self.layout.tensor * self.layout.pipeline))

    @property
    def families(self) -> str:
        """The letters of its layers; empty for a stock model."""
        return "" if self.model is None else "".join(letter for letter in FAMILIES if letter in self.model.layers)

    @property
    def has_moe(self) -> bool:
        """Whether it has routed experts."""
        return self._chosen.experts if self.model is None else EXPERTS in self.model.families

    @property
    def has_engine(self) -> bool:
        """Whether its layers are Transformer Engine's."""
        return self.training.transformer_impl == "transformer_engine"

    @property
    def precision(self) -> str:
        """``bf16``, ``fp16`` or ``fp32``: the dtype of the weights."""
        return "fp16" if self._chosen.fp16 else self.training.plan.model_dtype

    @property
    def torch_fsdp(self) -> bool:
        """Whether FSDP2 shards weights, gradients and optimizer state."""
        return self._chosen.torch_fsdp

    @property
    def is_captured(self) -> bool:
        """Whether layers are in CUDA graphs: requested, and of the kind that has been measured (:data:`CAPTURED`)."""
        layout, training = self.layout, self.training
        kind = self.has_engine and training.precision == "bf16" and training.optimizer == "adam"
        is_small = training.global_batch_size <= MOST_MICRO_BATCHES * training.micro_batch_size * self.replicas
        fits = layout.context == 1 and (layout.pipeline == 1 or (layout.tensor == layout.expert == 1 and is_small))
        return training.cuda_graphs and kind and fits and not self.torch_fsdp

    @cached_property
    def _chosen(self) -> Execution:
        """The execution as requested, with Megatron's defaults for the rest."""
        return Execution(**self._wanted())

    def _wanted(self) -> dict[str, Any]:
        return given_in(flags.read(self.training.extra)) | dict(self.asked)

    @cached_property
    def execution(self) -> Execution:
        """How Megatron carries it out: what is usual for such a run, overridden by what was requested."""
        return Execution(**usual_for(self) | self._wanted())

    def as_usual(self) -> Run:
        """Return the run without requests for the fields that :func:`usual_for` decides."""
        usual = usual_for(self)
        return dataclasses.replace(self, asked={name: value for name, value in self.asked.items() if name not in usual})

    def carried_out(self, found: Mapping[str, Any]) -> Run:
        """Return the run with :attr:`asked` set to the values of ``found`` that differ from the usual ones."""
        chosen = dataclasses.replace(self, asked=found)
        usual = dataclasses.asdict(Execution()) | usual_for(chosen)
        return dataclasses.replace(self, asked={name: value for name, value in found.items() if value != usual[name]})


@dataclass(frozen=True)
class Feature:
    """One of Megatron's features that changes speed and not results.

    Attributes:
        field: the field of :class:`Execution`.
        obstacle: why a run cannot use it; empty if it can.
    """

    name: str
    field: str
    reason: str
    obstacle: Callable[[Run], str]


def _unless(holds: Callable[[Run], Any], reason: str) -> Callable[[Run], str]:
    return lambda run: "" if holds(run) else reason


def _first(*obstacles: Callable[[Run], str]) -> Callable[[Run], str]:
    return lambda run: next(filter(None, (obstacle(run) for obstacle in obstacles)), "")


_engine = _unless(operator.attrgetter("has_engine"), "it is Transformer Engine's")
_gpus = _unless(lambda run: run.device == "cuda", "it is for GPUs")
_no_fsdp = _unless(lambda run: not run.torch_fsdp, "FSDP2 shards, gathers and reduces by itself")
_replicas = _first(_gpus, _no_fsdp, _unless(lambda run: run.replicas > 1, "there is one data-parallel replica"))
# A bucket waits for the gradients of all its parameters, and Megatron stops if one of them never arrives.
_every_gradient = _first(
    _replicas,
    _unless(
        lambda run: run.model is None or FULL_INDEX not in run.model.roles or run.model.dsa.loss_coeff,
        "without dsa.loss_coeff nothing trains the indexers",
    ),
)

FEATURES = (
    Feature(
        "gradient accumulation fusion", "gradient_accumulation_fusion",
        "Transformer Engine's products add to the fp32 gradients themselves: no 16-bit copy, no pass to add it",
        _first(_engine, _no_fsdp),
    ),
    Feature(
        "distributed optimizer", "distributed_optimizer",
        "fp32 weights and Adam's moments are sharded over the replicas, and so is the work of the update",
        lambda run: "" if run._chosen.precision_aware else _replicas(run),
    ),
    Feature(
        "overlapped gradient reduce", "overlap_grad_reduce",
        "a full bucket of gradients is reduced while the backward pass continues",
        _every_gradient,
    ),
    Feature(
        "overlapped parameter gather", "overlap_param_gather",
        "updated weights are gathered bucket by bucket while the next forward pass runs",
        _every_gradient,
    ),
    Feature(
        "MoE permute fusion", "moe_permute_fusion",
        "one kernel sorts tokens by expert, and one sorts them back, instead of an index, a gather and a scatter",
        _first(_engine, _unless(operator.attrgetter("has_moe"), "there are no experts")),
    ),
    Feature(
        "manual garbage collection", "manual_gc",
        f"Python collects cycles on all ranks in the same step, every {GC_INTERVAL}; else each stops all by itself",
        _gpus,
    ),
)  # fmt: skip


def usual_for(run: Run) -> dict[str, Any]:
    """Return the fields of :class:`Execution` that follow from ``run``, with their usual values."""
    chosen = run._chosen
    is_larger = run.replicas * 1_000_000 < BUCKET_ELEMENTS  # than Megatron's own size, from 120 replicas on
    hides = is_larger and not chosen.num_buckets and not _every_gradient(run)
    return {
        **{feature.field: not feature.obstacle(run) for feature in FEATURES},
        "bucket_elements": BUCKET_ELEMENTS if hides else None,
        "log_interval": usual_log_interval(run),
        "moe_dispatcher": token_dispatcher(run) if run.has_moe else "allgather",
        "cpu_initialization": run.device == "cpu",
        "cuda_graph_impl": "local" if run.is_captured else "none",
        "grad_bytes": 2 if chosen.fp16 else 4,
        **({} if run.model is None else {"experts": run.has_moe}),
    }


def usual_log_interval(run: Run) -> int:
    """Return the steps between log lines; for each line all ranks wait for each other and for the loss."""
    return LOG_INTERVAL if run.device == "cuda" and run.processes > 1 else 1


def token_dispatcher(run: Run) -> str:
    """Return ``--moe-token-dispatcher-type``.

    Gathering sends each token to all ranks, and the CPU waits for nothing. An all-to-all moves less with many ranks, but
    the CPU reads how many rows go to each, for which it waits longer within a host. FP8 experts read the counts in any
    case, and Megatron's overlaps of expert communication need it.
    """
    chosen = run._chosen
    sends = run.training.plan.file is not None or chosen.overlap_shared_expert or chosen.overlap_moe_a2a
    return "allgather" if 1 < run.layout.expert <= LARGEST_GATHER and not sends else "alltoall"
