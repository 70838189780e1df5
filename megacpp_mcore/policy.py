"""The launch policy: what a run is started with, where each value came from, and what the environment contradicts.

:func:`resolve` makes a :class:`LaunchPolicy` out of a :class:`Run` (what is to be trained, and how it is cut), the file that
``MEGACPP_CONFIG`` names, and the environment. The launcher prints it once and sets :meth:`LaunchPolicy.environment`; a recipe
can do the same with a :class:`Run` of its own. What a user has set is never replaced: it is reported, with a warning where it
contradicts the run. No torch here, and nothing is changed.

Flags are those of Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.config import ExperimentalTaxes, PluginConfig, Recompute, SpeedDefaults
from megacpp_mcore.model import PRESETS, Model

USER, RECIPE, DEFAULT = "user", "recipe", "default"
"""Where a value came from: an argument, a file or the environment of the user; the recipe; this package or what it runs on."""

EXPLICIT, SKIPPED = "explicit", "skipped"
"""What becomes of the compile warm-up."""

REASONS = ("user-disabled", "not-cuda", "fsdp-eager", "regional-moe")
"""Why a compile warm-up is skipped, in the order in which they are asked; the first that holds is given."""

MIN_BUCKET_BYTES = 32 * 2**20
"""A gradient bucket below this costs its launch more than its transfer, which then is not hidden but multiplied."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"
DYNAMO_DISABLE = "TORCHDYNAMO_DISABLE"
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the policy has to know of a run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        world_size, tensor, pipeline, expert, context: processes, and how the model is cut over them.
        has_moe: whether it has E layers.
        parameters: of the whole model; None where that is not known.
        fsdp: whether Megatron-FSDP or torch FSDP2 shards the parameters.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        fp8: the FP8 format, None without.
        bucket_elements, num_buckets: as ``--ddp-bucket-size`` and ``--ddp-num-buckets``.
        cuda_graph_impl, cuda_graph_scope: as Megatron's arguments; ``none`` without graphs.
        recompute_granularity, recompute_modules: Megatron's own recompute.
        flags: the names of the arguments that were given, for the source of what they say.
    """

    device: str
    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False
    transformer_impl: str = "transformer_engine"
    has_moe: bool = False
    parameters: int | None = None
    fsdp: bool = False
    precision: str = "fp32"
    fp8: str | None = None
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_moe_a2a: bool = False
    overlap_shared_expert: bool = False
    tp_comm_overlap: bool = False
    bucket_elements: int | None = None
    num_buckets: int | None = None
    grad_bytes: int = 4
    nccl_user_buffers: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_scope: tuple[str, ...] = ()
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, context parallelism not counted."""
        return max(1, self.world_size // (self.tensor * self.pipeline * self.context))

    @classmethod
    def from_arguments(cls, words: Sequence[str], *, device: str, world_size: int, model: Model | None = None) -> Run:
        """The run that Megatron's arguments ask for; without ``model``, the preset that they describe, if they do."""
        given = _flags(words)

        def number(flag: str, default: int | None = None) -> Any:
            return int(given[flag][0]) if given.get(flag) else default

        def word(flag: str, default: str | None) -> Any:
            return given[flag][0] if given.get(flag) else default

        model = model or _described(number("--num-layers"), number("--hidden-size"), number("--num-attention-heads"))
        precision = next((kind for kind in ("bf16", "fp16") if f"--{kind}" in given), "fp32")
        reduced = "--grad-reduce-in-bf16" in given or "--main-grads-dtype" in given
        return cls(
            device=device,
            world_size=world_size,
            tensor=number("--tensor-model-parallel-size", 1),
            pipeline=number("--pipeline-model-parallel-size", 1),
            expert=number("--expert-model-parallel-size", 1),
            context=number("--context-parallel-size", 1),
            sequence_parallel="--sequence-parallel" in given,
            transformer_impl=word("--transformer-impl", "transformer_engine"),
            has_moe="--num-experts" in given if model is None else "E" in model.layers,
            parameters=None if model is None else sum(model.parameters().values()),
            fsdp="--use-megatron-fsdp" in given or "--use-torch-fsdp2" in given,
            precision=precision,
            fp8=word("--fp8-format", None),
            distributed_optimizer="--use-distributed-optimizer" in given,
            overlap_grad_reduce="--overlap-grad-reduce" in given,
            overlap_param_gather="--overlap-param-gather" in given,
            overlap_moe_a2a="--overlap-moe-expert-parallel-comm" in given,
            overlap_shared_expert="--moe-shared-expert-overlap" in given,
            tp_comm_overlap="--tp-comm-overlap" in given,
            bucket_elements=number("--ddp-bucket-size"),
            num_buckets=number("--ddp-num-buckets"),
            grad_bytes=2 if reduced and precision == "bf16" else 4,
            nccl_user_buffers="--use-nccl-ub" in given,
            cuda_graph_impl=word("--cuda-graph-impl", "none"),
            cuda_graph_scope=given.get("--cuda-graph-modules", given.get("--cuda-graph-scope", ())),
            recompute_granularity=word("--recompute-granularity", None),
            recompute_modules=given.get("--recompute-modules", ()),
            flags=frozenset(given),
        )


def _flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag to the values that follow it; the last one of a flag counts."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = (value,) if equals else ()
        elif flag:
            found[flag] = (*found[flag], word)
    return found


def _described(layers: int | None, hidden: int | None, heads: int | None) -> Model | None:
    shape = (layers, hidden, heads)
    fitting = [model for model in PRESETS.values() if (model.depth, model.hidden_size, model.heads) == shape]
    return fitting[0] if fitting else None


# --- compile ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompilePolicy:
    """What is compiled, and whether that is done before step 1.

    Attributes:
        mode: ``off`` or ``regional``.
        warm_up: :data:`EXPLICIT`, or :data:`SKIPPED`: regions are then compiled when step 1 reaches them.
        reason: one of :data:`REASONS` when it is skipped, else empty.
        why: the reason as a sentence.
        precompile: whether the static regions of the layers without experts are compiled before step 1 all the same.
    """

    mode: str
    warm_up: str
    reason: str
    why: str
    precompile: bool = False


def compile_policy(
    *, mode: str, device: str, has_moe: bool, fsdp: bool, warm_up_asked: bool = True, precompile: bool = False
) -> CompilePolicy:
    """Decide the compile warm-up; the reasons against it are asked in the order of :data:`REASONS`.

    An explicit warm-up of a lane with regional compile and experts on CUDA is known to stall before step 1, where the same
    lane without it fills its caches in passing and trains; so there it is skipped, whatever was asked.

    Args:
        mode: ``off`` or ``regional``.
        device: ``cuda`` or ``cpu``.
        has_moe: whether the model has E layers.
        fsdp: whether parameters are sharded, so that no layer can be run by itself.
        warm_up_asked: False where the user has turned it off.
        precompile: whether static regions are to be compiled ahead where only the experts speak against it.
    """
    sentences = {
        "user-disabled": "nothing is compiled" if mode == "off" else "it was turned off",
        "not-cuda": f"the device is {device}; what it costs to start is paid in step 1",
        "fsdp-eager": "with sharded parameters a layer cannot run by itself before the training loop gathers them",
        "regional-moe": "regional compile beside experts on CUDA is known to stall in it; caches are filled in passing",
    }
    holds = {
        "user-disabled": mode == "off" or not warm_up_asked,
        "not-cuda": device != "cuda",
        "fsdp-eager": fsdp,
        "regional-moe": has_moe,
    }
    reason = next((name for name in REASONS if holds[name]), "")
    if not reason:
        return CompilePolicy(mode=mode, warm_up=EXPLICIT, reason="", why="all regions are dense and static")
    ahead = precompile and reason == "regional-moe"
    return CompilePolicy(mode=mode, warm_up=SKIPPED, reason=reason, why=sentences[reason], precompile=ahead)


# --- overlap ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Whether one kind of communication can be hidden behind computation.

    Attributes:
        name: what communicates.
        asked: whether the run asks for it.
        possible: whether streams, connections and bucket sizes let it happen.
        reason: what makes it possible, or what stands against it.
    """

    name: str
    asked: bool
    possible: bool
    reason: str


def overlap_contract(run: Run, connections: str | None) -> tuple[Overlap, ...]:
    """Which overlaps ``run`` can have; ``connections`` is what CUDA_DEVICE_MAX_CONNECTIONS will be (None: unset)."""
    one_queue = connections == "1"
    bucket = _bucket_obstacle(run)
    sharded = "" if run.distributed_optimizer or run.fsdp else "it needs --use-distributed-optimizer"
    reduced = "" if run.overlap_grad_reduce else "it needs --overlap-grad-reduce"
    replicas = "" if run.replicas * run.context > 1 else "there is one data-parallel replica"
    many = f"{CONNECTIONS}=1 gives both streams one queue" if one_queue else ""
    in_order = (
        "" if one_queue else f"it needs {CONNECTIONS}=1, which keeps a transfer ahead of the GEMM it hides behind"
    )
    experts = "" if run.expert > 1 else "experts are not cut over processes"
    tensor = "" if run.tensor > 1 else "tensor parallelism is 1"
    te = "" if run.transformer_impl == "transformer_engine" else "it is Transformer Engine's"
    sequence = "" if run.sequence_parallel else "it needs --sequence-parallel"
    rows: tuple[tuple[str, str, bool, tuple[str, ...]], ...] = (
        ("gradient reduce", "--overlap-grad-reduce", run.overlap_grad_reduce, (replicas, bucket)),
        ("parameter gather", "--overlap-param-gather", run.overlap_param_gather, (replicas, sharded, reduced, bucket)),
        ("MoE all-to-all", "--overlap-moe-expert-parallel-comm", run.overlap_moe_a2a, (experts, many)),
        ("shared expert", "--moe-shared-expert-overlap", run.overlap_shared_expert, (experts, many)),
        ("tensor-parallel", "--tp-comm-overlap", run.tp_comm_overlap, (tensor, sequence, te, in_order)),
    )
    found = []
    for name, flag, asked, obstacles in rows:
        against = [f"it is not asked for ({flag})"] if not asked else [each for each in obstacles if each]
        against = ["a CPU has no streams"] if run.device != "cuda" else against
        reason = "; ".join(against) or "it has a stream of its own, a queue that lets it run, and work to hide behind"
        found.append(Overlap(name=name, asked=asked, possible=not against, reason=reason))
    return tuple(found)


def _bucket_obstacle(run: Run) -> str:
    """Why the gradient buckets leave nothing to overlap; empty when they do leave something."""
    if run.parameters is None:
        return "how many buckets there are is not known: the arguments describe no model of this package"
    elements = run.parameters // (run.tensor * run.pipeline)
    if run.num_buckets:
        bucket = elements // run.num_buckets
    else:  # Megatron's own default, training.py resolve_ddp_bucket_size
        bucket = run.bucket_elements or max(40_000_000, 1_000_000 * run.replicas * run.context)
    if bucket * run.grad_bytes < MIN_BUCKET_BYTES:
        return f"a bucket of {bucket * run.grad_bytes / 2**20:.1f} MiB is below {MIN_BUCKET_BYTES // 2**20} MiB"
    if elements <= bucket:
        return f"one bucket of {bucket} elements holds all {elements} of a process, and is reduced when all is computed"
    return ""


# --- values -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the policy.

    Attributes:
        name: an environment variable, or what is planned.
        value: what it will be; None: left unset.
        source: :data:`USER`, :data:`RECIPE` or :data:`DEFAULT`.
        note: what it is for.
        warning: how the environment contradicts it, else empty.
        variable: whether it is an environment variable.
    """

    name: str
    value: str | None
    source: str
    note: str = ""
    warning: str = ""
    variable: bool = True


@dataclass(frozen=True, kw_only=True)
class LaunchPolicy:
    """Everything a run is started with that is not the model."""

    values: tuple[Value, ...]
    compile: CompilePolicy
    overlaps: tuple[Overlap, ...]
    taxes: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """The variables to set before torch and NCCL start: those that neither the user has set nor anybody leaves unset."""
        return {
            each.name: each.value
            for each in self.values
            if each.variable and each.value is not None and each.source != USER
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What contradicts the run, one sentence each."""
        return tuple(f"{each.name}: {each.warning}" for each in self.values if each.warning)

    def value(self, name: str) -> Value:
        """The value called ``name``; KeyError when there is none."""
        return {each.name: each for each in self.values}[name]

    def as_json(self) -> str:
        """One line of JSON, with all fields."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def describe(self) -> str:
        """Some lines of text: values with their sources, overlaps, compile policy, warnings last."""
        lines = ["launch policy:"]
        for each in self.values:
            note = f"; {each.note}" if each.note else ""
            lines.append(f"  {each.name} = {'(unset)' if each.value is None else each.value} ({each.source}{note})")
        for one in self.overlaps:
            lines.append(f"  {'overlap' if one.possible else 'no overlap'} of {one.name}: {one.reason}")
        chosen = self.compile
        because = f" ({chosen.reason})" if chosen.reason else ""
        lines.append(f"  compile = {chosen.mode}; warm-up {chosen.warm_up}{because}: {chosen.why}")
        if chosen.precompile:
            lines.append("  compile: the static regions of layers without experts are compiled before step 1")
        lines.append(f"  experimental taxes = {', '.join(self.taxes) or 'none'}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def resolve(
    run: Run,
    *,
    settings: PluginConfig | None = None,
    environment: Mapping[str, str],
    recipe: Mapping[str, str] | None = None,
    from_recipe: bool = False,
) -> LaunchPolicy:
    """The policy of ``run``.

    Args:
        run: what is trained.
        settings: the file that ``MEGACPP_CONFIG`` names, None without one.
        environment: the process's.
        recipe: environment variables that a recipe asks for.
        from_recipe: whether the run's arguments are a recipe's and not the user's.
    """
    speed = settings.speed_defaults if settings else SpeedDefaults()
    taxes = settings.experimental_taxes if settings else ExperimentalTaxes()
    recompute = settings.recompute if settings else Recompute()
    mode = settings.compile if settings else "off"
    given = settings.given if settings else frozenset()
    lookup = _Lookup(environment, recipe or {})
    disabled = environment.get(DYNAMO_DISABLE) == "1"
    connections = _connections(run, lookup)
    arguments = RECIPE if from_recipe else USER
    return LaunchPolicy(
        values=(
            connections,
            _allocator(run, lookup, speed, "speed_defaults.expandable_segments" in given),
            *_nccl(run, lookup),
            *_caches(run, lookup, speed),
            _blocking(lookup, taxes),
            *_dynamo(mode, disabled),
            _recompute(run, recompute, "recompute" in given, arguments),
            _graphs(run, arguments),
            _precision(run, arguments),
        ),
        compile=compile_policy(
            mode=mode,
            device=run.device,
            has_moe=run.has_moe,
            fsdp=run.fsdp,
            warm_up_asked=speed.compile_warmup and not disabled,
            precompile=speed.precompile_static,
        ),
        overlaps=overlap_contract(run, connections.value),
        taxes=taxes.on,
    )


@dataclass(frozen=True)
class _Lookup:
    environment: Mapping[str, str]
    recipe: Mapping[str, str]

    def find(self, name: str, default: str | None, note: str, refused: str = "") -> Value:
        """The value of a variable: the user's, else the recipe's, else ``default``; ``refused`` warns of the user's own."""
        if name in self.environment:
            found, wanted = self.environment[name], self.recipe.get(name)
            against = refused
            if wanted is not None and wanted != found:
                against = "; ".join(
                    filter(None, (f"the recipe asks for {wanted}, the environment has {found}", refused))
                )
            return Value(name=name, value=found, source=USER, note=note, warning=against)
        if name in self.recipe:
            return Value(name=name, value=self.recipe[name], source=RECIPE, note=note, warning=refused)
        return Value(name=name, value=default, source=DEFAULT, note=note)

    def asked(self, name: str) -> str | None:
        """What the user or else the recipe has set."""
        return self.environment.get(name, self.recipe.get(name))


def _connections(run: Run, lookup: _Lookup) -> Value:
    asked = lookup.asked(CONNECTIONS)
    if run.device != "cuda":
        return lookup.find(CONNECTIONS, None, "means nothing to a CPU; the CPU lane sets what Megatron insists on")
    if run.fsdp:
        refused = "FSDP needs more than one queue, and Megatron stops; unset it" if asked == "1" else ""
        return lookup.find(CONNECTIONS, None, "FSDP gathers beside the computation", refused)
    many = run.overlap_moe_a2a or run.overlap_shared_expert
    if run.tensor > 1 or run.context > 1:
        # Megatron asserts it up to Hopper, but with the overlap of MoE communication it only warns.
        note = "tensor and context parallelism rely on the order of launches (Hopper and older)"
        if run.overlap_moe_a2a:
            return lookup.find(
                CONNECTIONS, "32", f"{note}, overlapped MoE communication on many queues: the latter is taken"
            )
        refused = "" if asked in (None, "1") else f"Megatron stops unless it is 1 ({note})"
        return lookup.find(CONNECTIONS, "1", note, refused)
    if many:
        refused = "MoE communication cannot overlap in one queue; set 32" if asked == "1" else ""
        return lookup.find(CONNECTIONS, "32", "MoE communication runs beside the computation", refused)
    return lookup.find(CONNECTIONS, None, "nothing in this layout depends on it; the driver's default is 8")


def _allocator(run: Run, lookup: _Lookup, speed: SpeedDefaults, given: bool) -> Value:
    name = _NEW_ALLOCATOR if _NEW_ALLOCATOR in lookup.environment else ALLOCATOR
    if run.device != "cuda":
        return lookup.find(name, None, "means nothing to a CPU")
    obstacle = ""
    if run.nccl_user_buffers:
        obstacle = "NCCL user buffers (--use-nccl-ub) cannot be registered in expandable segments"
    elif run.cuda_graph_impl != "none" and lookup.asked("NCCL_GRAPH_REGISTER") != "0":
        obstacle = "Megatron stops with CUDA graphs and expandable segments unless NCCL_GRAPH_REGISTER=0"
    asked = lookup.asked(name) or ""
    refused = obstacle if _EXPANDABLE in asked else ""
    if given and speed.expandable_segments and asked and _EXPANDABLE not in asked:
        refused = f"speed_defaults asks for {_EXPANDABLE}, the environment has {asked}"
    default = _EXPANDABLE if speed.expandable_segments and not obstacle else None
    return lookup.find(name, default, obstacle or "segments that grow keep fragmentation down", refused)


def _nccl(run: Run, lookup: _Lookup) -> tuple[Value, ...]:
    if run.device != "cuda":
        return ()
    several = run.world_size > 1
    peers = several and lookup.asked("NCCL_P2P_DISABLE") == "1"
    through_host = "GPUs of one host then exchange through host memory; unset it" if peers else ""
    found = [
        lookup.find("NCCL_DEBUG", "WARN" if several else None, "without it NCCL does not say why it stopped"),
        lookup.find("NCCL_P2P_DISABLE", None, "recommended unset", through_host),
        lookup.find("NCCL_NVLS_ENABLE", None, "NVLink multicast; NCCL asks the host when it is unset"),
    ]
    pinned = "it pins what NCCL chooses by size; figures are not comparable with those of runs that leave it"
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if lookup.asked(name) is not None:
            found.append(lookup.find(name, None, "", pinned))
    return tuple(found)


def _caches(run: Run, lookup: _Lookup, speed: SpeedDefaults) -> tuple[Value, ...]:
    rows = (
        ("TRITON_CACHE_DIR", "triton", "kernels that Triton has compiled; by default ~/.triton/cache"),
        (
            "TORCHINDUCTOR_CACHE_DIR",
            "inductor",
            "regions that Inductor has compiled; by default in the temporary folder",
        ),
    )
    found = []
    for name, folder, note in rows:
        wanted = f"{speed.cache_root}/{folder}" if speed.cache_root else None
        asked = lookup.asked(name)
        refused = f"speed_defaults.cache_root asks for {wanted}" if wanted and asked not in (None, wanted) else ""
        found.append(lookup.find(name, wanted, note, refused))
    return tuple(found)


def _blocking(lookup: _Lookup, taxes: ExperimentalTaxes) -> Value:
    name = "CUDA_LAUNCH_BLOCKING"
    on = lookup.asked(name) == "1"
    refused = ""
    if on and not taxes.blocking_launches:
        refused = "the host waits for every kernel, and experimental_taxes.blocking_launches is off; unset it"
    elif taxes.blocking_launches and lookup.asked(name) not in (None, "1"):
        refused = "experimental_taxes.blocking_launches asks for 1"
    return lookup.find(name, "1" if taxes.blocking_launches else None, "1 makes every launch wait", refused)


def _dynamo(mode: str, disabled: bool) -> tuple[Value, ...]:
    if not disabled:
        return ()
    against = "compile: regional is asked for, but nothing will be compiled; unset it" if mode == "regional" else ""
    return (Value(name=DYNAMO_DISABLE, value="1", source=USER, note="torch.compile does nothing", warning=against),)


def _recompute(run: Run, recompute: Recompute, given: bool, arguments: str) -> Value:
    families = ", ".join(recompute.on)
    stock = run.recompute_granularity
    if stock == "selective":
        stock = f"selective ({', '.join(run.recompute_modules) or 'core_attn'})"
    plan = "; ".join(filter(None, (families, f"Megatron's {stock}" if stock else "")))
    source = USER if given else arguments if stock else DEFAULT
    return Value(name="recompute", value=plan or "nothing", source=source, variable=False)


def _graphs(run: Run, arguments: str) -> Value:
    scope = f" over {', '.join(run.cuda_graph_scope)}" if run.cuda_graph_scope else ""
    source = arguments if "--cuda-graph-impl" in run.flags else DEFAULT
    return Value(name="CUDA graphs", value=run.cuda_graph_impl + scope, source=source, variable=False)


def _precision(run: Run, arguments: str) -> Value:
    fp8 = f", FP8 {run.fp8}" if run.fp8 else ""
    note = "router, Mamba-3 and M²RNN parameters of the recurrence in fp32" if run.precision != "fp32" else ""
    source = arguments if {"--bf16", "--fp16", "--fp8-format"} & run.flags else DEFAULT
    return Value(name="precision", value=run.precision + fp8, source=source, note=note, variable=False)


@contextlib.contextmanager
def active(settings: PluginConfig | None) -> Iterator[None]:
    """For the duration, what the file asks of this process and no environment variable does; imports torch if it does.

    That is ``experimental_taxes.anomaly_detection`` and ``observability.recompiles``.
    """
    with contextlib.ExitStack() as stack:
        if settings is not None and settings.experimental_taxes.anomaly_detection:
            import torch

            before = torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(True)
            stack.callback(torch.autograd.set_detect_anomaly, before)
        if settings is not None and settings.observability.recompiles:
            import torch._logging

            torch._logging.set_logs(recompiles=True)
            stack.callback(torch._logging.set_logs)
        yield
