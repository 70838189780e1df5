"""Regional compile and per-family recompute: replaces regions of built layers, and warms them up before step 1.

A region is a pure function of tensors with static shapes. All layers that call it with the same shapes share one compiled
graph. Dynamo compiles a region whole (``fullgraph``) and raises an error at a part that it cannot trace; it never breaks the
graph in silence. Each new shape, dtype, or need of a gradient is another graph. A region may have :data:`MAX_GRAPHS` of them:
Dynamo's own limit of 8 is too low, since a recomputed mamba3 segment alone takes 6 graphs a shape (a first, a middle and a last
segment, each in the first run and in the second).

=================  =======  ==============================================================================================
region             layers   what it is
=================  =======  ==============================================================================================
norm               A M E R  RMSNorm over the hidden size, and A's over the latents, where it is torch's own
indexer score      A        the scores of a Full layer's indexer, a block of queries at a time (the plain-PyTorch backend)
mamba3 segment     M        from the projections to the gated output, 1024 tokens at a time (the plain-PyTorch backend)
=================  =======  ==============================================================================================

These stay uncompiled. A projection is one matrix product, and its autograd function runs the collectives of tensor
parallelism. Core attention works in blocks of queries, and each block sees another number of keys. The M²RNN recurrence is a
loop over tokens. The routing, dispatch and experts of E have shapes that depend on the data. Transformer Engine brings
kernels of its own.

Recompute (:class:`megacpp_mcore.model.training.Recompute`) wraps whole modules or regions in Megatron's own checkpoint
function, which handles random states and shared indices as it does with ``--recompute-granularity``.

Whatever replaces a method is bound to its module, so that a deep copy of the module computes with its own parameters.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import shutil
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore import cpu
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.layer_specs.attention import SparseCoreAttention
from megacpp_mcore.layer_specs.mamba import Mamba3Mixer
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.ops.indexer.reference import score_block, select
from megacpp_mcore.ops.mamba3.reference import mamba3, mix_segment
from megacpp_mcore.policy import EXPLICIT, CompilePolicy
from megacpp_mcore.settings import PluginConfig

logger = logging.getLogger(__name__)

BACKEND = "inductor"
"""The backend of ``torch.compile`` that compiles regions."""

MAX_GRAPHS = 64
"""How many graphs of one region Dynamo may compile before it is an error, in place of Dynamo's own limit of 8."""

_PLAIN = "reference"
"""The name of the backends in plain PyTorch, the only ones with something to compile."""


class Region:
    """A pure function of tensors that is compiled on its first call.

    Attributes:
        name: as in the table above.
        graphs: how many graphs Dynamo has compiled of it.
    """

    def __init__(self, name: str, function: Callable[..., Any], backend: str) -> None:
        self.name = name
        self.graphs = 0
        # Dynamo stores compiled graphs, and counts them against its limit, by code object: each region gets its own.
        self._function = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
        )
        self._function.__kwdefaults__ = function.__kwdefaults__
        self._backend = backend
        self._compiled: Callable[..., Any] | None = None
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function; log a warning, once, if Dynamo compiles nothing.

        Raises:
            ModelError: the region was called with more shapes than :data:`MAX_GRAPHS` graphs serve.
        """
        with cpu.stepping_aside():
            if self._compiled is None:  # torch.compile itself asks whether Dynamo is disabled, so it runs in here
                self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=self._backend)
            output = self._run(self._compiled, *args, **kwargs)
        if not self.graphs and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"compile is regional, and torch compiled nothing of the region {self.name}: it runs as plain PyTorch, as "
                "TORCHDYNAMO_DISABLE=1 or TORCH_COMPILE_DISABLE=1 makes it; unset both variables, or write compile: off"
            )
        return output

    def _run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._dynamo.utils import counters

        # A patch of Dynamo's configuration costs more than the call, so only a region that needs the room pays for it.
        is_full = self.graphs >= config.recompile_limit
        room = config.patch(recompile_limit=max(MAX_GRAPHS, config.recompile_limit)) if is_full else None
        before = counters["stats"]["unique_graphs"]
        try:
            with room or contextlib.nullcontext():
                return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise ModelError(
                f"the region {self.name} has {self.graphs} compiled graphs and was called with yet another shape; expected "
                "shapes that do not change from step to step: keep micro-batch and sequence length, or write compile: off"
            ) from error
        finally:
            self.graphs += counters["stats"]["unique_graphs"] - before

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self


_REGIONS: dict[tuple[Any, ...], Region] = {}


def region(name: str, function: Callable[..., Any], backend: str, width: int | None = None) -> Region:
    """Return this process's region of ``function``, one for each ``width``; layers, chunks and models share it."""
    key = (name, backend, width)
    if key not in _REGIONS:
        _REGIONS[key] = Region(name, function, backend)
    return _REGIONS[key]


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` under Megatron's checkpoint, which keeps for the backward pass the arguments that need gradients.

    A call without gradients, or with no argument that needs one, runs ``function`` directly.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        names = [*range(len(args)), *kwargs]
        values = dict(zip(names, (*args, *kwargs.values()), strict=True))
        moving = [name for name in names if isinstance(values[name], torch.Tensor) and values[name].requires_grad]
        if not moving or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        kept = {name: value for name, value in values.items() if name not in moving}

        def again(*tensors: torch.Tensor) -> Any:
            found = kept | dict(zip(moving, tensors, strict=True))
            return function(*(found[i] for i in range(len(args))), **{name: found[name] for name in kwargs})

        return megatron_random.checkpoint(again, False, *(values[name] for name in moving))

    return run


def _recompute(module: torch.nn.Module, name: str) -> None:
    """Replace the method ``name`` of ``module`` by its recomputed version."""
    method = getattr(module, name)
    if isinstance(method, types.MethodType):
        setattr(module, name, types.MethodType(recomputed(method.__func__), module))
    else:  # a region, which reads no module
        setattr(module, name, recomputed(method))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """RMSNorm over the last dimension, with :class:`torch.nn.RMSNorm`'s meaning of ``eps``."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Says which regions of a run's layers are compiled and recomputed.

    Attributes:
        backend: the backend that compiles regions; None compiles nothing.
        recompute: what the backward pass computes again.
    """

    backend: str | None = None
    recompute: Recompute = field(default_factory=Recompute)

    def __bool__(self) -> bool:
        return self.backend is not None or bool(self.recompute.on)

    def spec(self, layer: ModuleSpec, letter: str) -> ModuleSpec:
        """Return the spec of a treated layer of family ``letter``, or ``layer`` itself if nothing is treated.

        Raises:
            ModelError: the layer is no TransformerLayer.
        """
        if not self:
            return layer
        if layer.module is not TransformerLayer:
            raise ModelError(f"a layer of family {letter} is a {layer.module}; expected TransformerLayer, to treat it")
        return ModuleSpec(
            module=TreatedLayer, params={"family": letter, "treatment": self}, submodules=layer.submodules
        )

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """Return the MTP block with its inner layer, of family A, treated."""
        if not self:
            return block
        treated = copy.copy(block)
        treated.layer_specs = [
            dataclasses.replace(
                spec,
                submodules=dataclasses.replace(
                    spec.submodules, mtp_model_layer=self.spec(spec.submodules.mtp_model_layer, "A")
                ),
            )
            for spec in block.layer_specs
        ]
        return treated

    def apply(self, layer: TransformerLayer, letter: str) -> None:
        """Replace regions of a built layer by compiled ones, and then wrap in recompute what is to be recomputed."""
        if self.backend is not None:
            self._compile(layer, self.backend)
        mixer, recompute = layer.self_attention, self.recompute
        if {"A": recompute.a, "M": recompute.m, "R": recompute.r}.get(letter):
            _recompute(mixer, "forward")
        if letter == "E" and recompute.experts:
            _recompute(layer.mlp.experts, "forward")

    def _compile(self, layer: TransformerLayer, backend: str) -> None:
        for module in layer.modules():
            if type(module) is torch.nn.RMSNorm:
                _compile_norm(module, backend)
            elif isinstance(module, Mamba3Mixer) and module.backend.observed == _PLAIN:
                run_segment = region("mamba3 segment", mix_segment, backend)
                scan = functools.partial(mamba3, run_segment=run_segment)
                module.backend = dataclasses.replace(module.backend, fn=scan)
            elif isinstance(module, SparseCoreAttention) and _scores(module):
                run_block = region("indexer score", score_block, backend)
                chosen = functools.partial(select, run_block=run_block)
                module.select_backend = dataclasses.replace(module.select_backend, fn=chosen)


def _scores(core: SparseCoreAttention) -> bool:
    return getattr(core, "indexer", None) is not None and core.select_backend.observed == _PLAIN


def _compile_norm(norm: torch.nn.RMSNorm, backend: str) -> None:
    compiled = region("norm", rms_norm, backend, norm.normalized_shape[0])

    def forward(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        # As rows of one axis: of a batch of 1 the embedding's strides are others than a layer's, and would be another graph.
        return compiled(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    norm.forward = types.MethodType(forward, norm)  # type: ignore[method-assign]


class TreatedLayer(TransformerLayer):
    """A stock layer that its treatment changes once it is built; parameters, their names and checkpoints stay stock's."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        family: str,
        treatment: Treatment,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.family = family
        self.treatment = treatment
        treatment.apply(self, family)


def treatment_of_run(settings: PluginConfig | None, config: TransformerConfig) -> Treatment:
    """Return the treatment that the file of a run asks for, checked against Megatron's own recompute.

    Raises:
        ModelError: Megatron's arguments ask for the same activations to be recomputed.
        LaunchError: regions are to be compiled for a CPU, and there is no C++ compiler.
    """
    if settings is None:
        return Treatment()
    _check_recompute(settings.recompute, config)
    backend = BACKEND if settings.compile == "regional" else None
    on_cpu = cpu.answers_here()
    if backend == "inductor" and on_cpu and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise LaunchError(
            f"{settings.path}: compile is regional, and for a CPU that needs a C++ compiler: no {os.environ.get('CXX', 'g++')} "
            "was found; install one, name it in CXX, or write compile: off"
        )
    return Treatment(backend=backend, recompute=settings.recompute)


def _check_recompute(recompute: Recompute, config: TransformerConfig) -> None:
    if not recompute.on or config.recompute_granularity is None:
        return
    if config.recompute_granularity == "full":
        raise ModelError(
            f"recompute asks for {', '.join(recompute.on)}, and --recompute-granularity full recomputes whole layers; leave "
            "one of them out"
        )
    overlapping = {"a": {"core_attn", "mla_up_proj"}, "experts": {"moe", "moe_act"}}
    for name in recompute.on:
        twice = sorted(overlapping.get(name, set()) & set(config.recompute_modules or ()))
        if twice:
            raise ModelError(
                f"recompute asks for {name}, and --recompute-modules {' '.join(twice)} for a part of it; leave one of them out"
            )


# --- warm-up ------------------------------------------------------------------------------------------------------------


def warm_up(models: Sequence[torch.nn.Module], *, rows: int, batch: int) -> str:
    """Run one built layer of each kind forward and backward, which compiles its regions for the run's shapes.

    Norms and mixers run on random inputs, with recompute as in training. Stand-ins take the gradients of parameters, so that
    no reduction starts. Projections communicate, so every tensor-parallel rank has to call this. Of an E layer, and of a Shared
    layer, which cannot run without the indices of a Full one, only the norm runs.

    Args:
        models: the model chunks of this process, wrapped by Megatron or not.
        rows: rows of the sequence of one micro-batch that a layer of this rank is given (under sequence parallelism, a part).
        batch: the batch dimension that a layer is given.

    Returns:
        The layers that ran, the regions that were compiled meanwhile, and the seconds it took.
    """
    start = time.perf_counter()
    before = {each: each.graphs for each in _REGIONS.values()}
    layers: dict[tuple[Any, ...], TreatedLayer] = {}
    for layer in (module for model in models for module in model.modules() if isinstance(module, TreatedLayer)):
        core = getattr(layer.self_attention, "core_attention", None)
        kind = (layer.family, type(core), isinstance(core, SparseCoreAttention) and core.indexer is not None)
        layers.setdefault(kind, layer)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for layer in layers.values():
            _run_layer(layer, rows, batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    numbers = ", ".join(str(layer.layer_number) for layer in layers.values()) or "none"
    compiled = ", ".join(sorted({each.name for each, graphs in before.items() if each.graphs > graphs}))
    return f"layers {numbers} ({compiled or 'no regions'}): {time.perf_counter() - start:.1f} s"


def _run_layer(layer: TreatedLayer, rows: int, batch: int) -> None:
    config = layer.config
    core: Any = getattr(layer.self_attention, "core_attention", None)
    is_sparse = isinstance(core, SparseCoreAttention)
    shape, device = (rows, batch, config.hidden_size), next(layer.parameters()).device
    dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    hidden_SBD = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    with _parameters_of_its_own(layer), _without_traces(core) if is_sparse else contextlib.nullcontext():
        output = layer.pre_mlp_layernorm(hidden_SBD) if layer.family == "E" else layer.input_layernorm(hidden_SBD)
        if layer.family != "E" and (not is_sparse or core.indexer is not None):
            output, _ = layer.self_attention(output, attention_mask=None)
        output.float().sum().backward()


@contextlib.contextmanager
def _without_traces(core: SparseCoreAttention) -> Iterator[None]:
    """Keep the indexer's loss out of Megatron's log for the duration, backward pass included, and take back its indices."""
    before, core.training = core.training, False
    try:
        yield
    finally:
        core.training = before
        core.index_cache.forget(core.layer_number)


@contextlib.contextmanager
def _parameters_of_its_own(layer: torch.nn.Module) -> Iterator[None]:
    """Replace the parameters for the duration by new ones over the same memory, whose gradients nothing waits for."""
    replaced = []
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                stand_in = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                stand_in.__dict__.update(parameter.__dict__)
                replaced.append((module, name, parameter))
                module._parameters[name] = stand_in
    try:
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def warm_up_run(
    models: Sequence[torch.nn.Module],
    policy: CompilePolicy,
    say: Callable[[str], None],
    *,
    seq_length: int,
    micro_batch_size: int,
    cut: int,
    packed: bool,
) -> None:
    """Warm up a run's ``models`` as ``policy`` says, and tell ``say`` what was done or why not.

    Args:
        models: the model chunks of this process.
        policy: what is compiled, and when.
        say: prints a line.
        seq_length, micro_batch_size: rows of a sample, and samples of a micro-batch.
        cut: ranks that a sequence is cut over (sequence parallelism).
        packed: whether the samples of a micro-batch are packed side by side in one row, which is not warmed up.
    """
    skipped = f"compile warm-up: skipped ({policy.reason}): {policy.why}"
    if policy.warm_up != EXPLICIT and not policy.precompile:
        say(skipped)
    elif packed:
        say("compile warm-up: skipped (packed): the graphs of rows that hold several documents are compiled in step 1")
    else:
        done = warm_up(models, rows=seq_length // cut, batch=micro_batch_size)
        explicit = "compile warm-up: explicit, before step 1"
        say(f"{explicit if policy.warm_up == EXPLICIT else f'{skipped}; static regions precompiled'}: {done}")


@contextlib.contextmanager
def before_training(policy: CompilePolicy, say: Callable[[str], None]) -> Iterator[None]:
    """Warm up stock Megatron's model before it trains, as ``policy`` says, and tell ``say`` what was done or why not.

    For the duration ``megatron.training.training.setup_model_and_optimizer`` is wrapped: when it returns, the model is on its
    device, a checkpoint is loaded, and no step has begun.
    """
    from megatron.training import training

    stock = training.setup_model_and_optimizer

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = stock(*args, **kwargs)
        from megatron.training import get_args

        arguments = get_args()
        warm_up_run(
            built[0],
            policy,
            say,
            seq_length=arguments.seq_length,
            micro_batch_size=arguments.micro_batch_size,
            cut=arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1,
            packed=arguments.dataloader_inter_document_masking,
        )
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", setup_model_and_optimizer):
        yield
