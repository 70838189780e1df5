"""Regional compile and per-family recompute: replaces regions of built layers, and warms them up before step 1.

A region is a pure function of tensors with static shapes. All layers that call it with the same shapes share one compiled
graph. Dynamo compiles a region with ``fullgraph``: code that it cannot trace is an error, never a silent graph break. Each new
combination of shapes, dtypes and required gradients is another graph, up to :data:`MAX_GRAPHS` per region.

=================  =======  ==============================================================================================
region             layers   what it is
=================  =======  ==============================================================================================
norm               A M E R  RMSNorm over the hidden size, and A's over the latents, if torch's module runs and not an op
indexer score      A        the scores of a Full layer's indexer, a block of queries at a time (the plain-PyTorch backend)
mamba3 segment     M        from the projections to the gated output, 1024 tokens at a time (the plain-PyTorch backend)
=================  =======  ==============================================================================================

The rest stays uncompiled. A projection is one GEMM, whose autograd function runs the tensor-parallel collectives. Core
attention works in blocks of queries, each with a different number of keys. The M²RNN recurrence is a loop over tokens. The
routing, dispatch and experts of E have data-dependent shapes. Transformer Engine has its own kernels.

Recompute (:class:`megacpp_mcore.model.training.Recompute`) wraps whole modules or regions in Megatron's own checkpoint
function, which handles RNG states and shared indices as with ``--recompute-granularity``.

Replacement methods are bound to their module, so that a deep copy of the module computes with its own parameters.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import log_single_rank
from megatron.training import global_vars

from megacpp_mcore import cpu
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.layer_specs import training_step
from megacpp_mcore.layer_specs.core_attention import SparseCoreAttention
from megacpp_mcore.layer_specs.mamba import Mamba3Mixer
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.ops.indexer.reference import score_block, select
from megacpp_mcore.ops.mamba3.reference import mamba3, mix_segment
from megacpp_mcore.patches.non_finite_origin import hold
from megacpp_mcore.policy import EXPLICIT, CompilePolicy
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.te import linear as te_linear
from megacpp_mcore.te import quantized
from megacpp_mcore.te.fp8_scopes import Scopes, scopes_of

logger = logging.getLogger(__name__)

BACKEND = "inductor"
"""The backend of ``torch.compile`` that compiles regions."""

MAX_GRAPHS = 64
"""How many graphs of one function Dynamo may compile before raising an error. Its default of 8 is too low: a recomputed mamba3
segment alone needs 6 per shape (first, middle and last segment, each in the first run and in the recompute)."""

_PLAIN = "reference"
"""The name of the plain-PyTorch backends, the only ones with regions to compile."""


class Region:
    """A pure function of tensors that is compiled on its first call.

    Attributes:
        name: as in the table above.
        graphs: how many graphs Dynamo has compiled for it.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function.

        Raises:
            ModelError: the region was called with more shapes than :data:`MAX_GRAPHS` graphs serve.
        """
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._dynamo.utils import counters

        if InferenceMode.is_active():  # each prompt length would be another graph
            return self._function(*args, **kwargs)
        with cpu.lane_suspended():
            if self._compiled is None:  # torch.compile itself checks whether Dynamo is disabled, so it runs here
                # For the whole process: patching Dynamo's configuration for each call would cost more than the call itself.
                config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
                self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=self._backend)
            before = counters["stats"]["unique_graphs"]
            try:
                return self._compiled(*args, **kwargs)
            except FailOnRecompileLimitHit as error:
                raise ModelError(
                    f"the region {self.name} has {self.graphs} compiled graphs and was called with another shape; "
                    "expected shapes that do not change from step to step: keep micro-batch and sequence length, or write "
                    "compile: off"
                ) from error
            finally:
                self.graphs += counters["stats"]["unique_graphs"] - before

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self


_REGIONS: dict[tuple[Any, ...], Region] = {}


def region(name: str, function: Callable[..., Any], backend: str, width: int | None = None) -> Region:
    """Return this process's region of ``function``, one for each ``width``; layers, chunks and models share it."""
    return _REGIONS.setdefault((name, backend, width), Region(name, function, backend))


def recomputed(function: Callable[..., Any], *, by_engine: bool = False) -> Callable[..., Any]:
    """Return ``function`` under Megatron's checkpoint function, with the tensors that require grad as its saved inputs.

    With grad disabled, or no such tensor, ``function`` runs directly. ``by_engine`` selects Transformer Engine's checkpoint
    function, which recomputes an FP8 scope with its original scales.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = dict(enumerate(args)) | kwargs
        moving = [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        if not moving or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        kept = {name: value for name, value in values.items() if name not in moving}

        def call(*tensors: torch.Tensor) -> Any:
            found = kept | dict(zip(moving, tensors, strict=True))
            return function(*(found[i] for i in range(len(args))), **{name: found[name] for name in kwargs})

        tensors = [values[name] for name in moving]
        if by_engine:
            # Imported late: a patch may have replaced it.
            from megatron.core.extensions.transformer_engine import te_checkpoint
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            tracker = megatron_random.get_cuda_rng_tracker
            return te_checkpoint(call, False, tracker, get_tensor_model_parallel_group(), *tensors)
        return megatron_random.checkpoint(call, False, *tensors)

    return run


def _recompute(module: torch.nn.Module, name: str, *, by_engine: bool = False) -> None:
    """Replace the method ``name`` of ``module`` with its recomputed version."""
    method = getattr(module, name)
    if isinstance(method, types.MethodType):
        setattr(module, name, types.MethodType(recomputed(method.__func__, by_engine=by_engine), module))
    else:  # a region, which has no ``self``
        setattr(module, name, recomputed(method, by_engine=by_engine))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """RMSNorm over the last dimension, with :class:`torch.nn.RMSNorm`'s meaning of ``eps``."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """Which regions of a run's layers are compiled and recomputed.

    Attributes:
        backend: the ``torch.compile`` backend for regions; None compiles nothing.
        recompute: what the backward pass recomputes.
        fp8: the FP8 scopes of trunk layers, if any.
        linear: whether Transformer Engine's linear layers replace the dense ones.
    """

    backend: str | None = None
    recompute: Recompute = field(default_factory=Recompute)
    fp8: Scopes | None = None
    linear: bool = False

    def spec(self, layer: ModuleSpec, letter: str) -> ModuleSpec:
        """Return the spec of a layer of family ``letter`` under this plan.

        Raises:
            ModelError: the layer is not a TransformerLayer.
        """
        if layer.module is not TransformerLayer:
            raise ModelError(f"a layer of family {letter} is a {layer.module}; expected TransformerLayer")
        return ModuleSpec(module=RegionLayer, params={"family": letter, "plan": self}, submodules=layer.submodules)

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """Return the MTP block with its inner layer, of family A, under this plan."""
        outside = dataclasses.replace(self, fp8=None)  # MTP, an auxiliary head, has no FP8 scope
        return with_inner_layer(block, lambda layer: outside.spec(layer, "A"))

    def apply(self, layer: TransformerLayer, letter: str) -> None:
        """Replace linear layers, then compile regions, wrap in recompute, and wrap that in an FP8 scope."""
        if self.linear:
            done = te_linear.report(te_linear.replace(layer))
            log_single_rank(logger, logging.INFO, f"megacpp-mcore: layer {layer.layer_number}: linear layers: {done}")
        if self.backend is not None:
            for module in layer.modules():
                _compile(module, self.backend)
        family = FAMILIES[letter]
        recompute = family.recompute in self.recompute.on
        if recompute and family.is_mixer:
            in_scope = (
                self.fp8 is not None and letter in self.fp8.fp8.letters and not self.fp8.in_zone(layer.layer_number)
            )
            _recompute(layer.self_attention, "forward", by_engine=in_scope)
        elif recompute:
            _recompute(layer.mlp.experts, "forward")
        if self.fp8 is not None and letter in self.fp8.fp8.letters:
            self.fp8.install(layer.self_attention if family.is_mixer else layer.mlp.shared_experts, layer.layer_number)
            if letter == "A" and not self.fp8.in_zone(layer.layer_number):
                layer.self_attention.latents_backend = None  # it would bypass the modules, which run in FP8


def with_inner_layer(
    block: MultiTokenPredictionBlockSubmodules, change: Callable[[ModuleSpec], ModuleSpec]
) -> MultiTokenPredictionBlockSubmodules:
    """Copy the MTP block with ``change`` applied to the specs of its inner layers."""
    changed = copy.copy(block)
    changed.layer_specs = []
    for spec in block.layer_specs:
        submodules = dataclasses.replace(spec.submodules, mtp_model_layer=change(spec.submodules.mtp_model_layer))
        changed.layer_specs.append(dataclasses.replace(spec, submodules=submodules))
    return changed


def _compile(module: torch.nn.Module, backend: str) -> None:
    """Make ``module`` call its compiled region, if it has one."""
    if type(module) is torch.nn.RMSNorm:
        compiled = region("norm", rms_norm, backend, module.normalized_shape[0])

        def forward(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
            # Flattened: at batch size 1 the embedding's strides differ from a layer's, which would need another graph.
            return compiled(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    elif isinstance(module, Mamba3Mixer) and module.backend.observed == _PLAIN:
        scan = functools.partial(mamba3, run_segment=region("mamba3 segment", mix_segment, backend))
        module.backend = dataclasses.replace(module.backend, fn=scan)
    elif isinstance(module, SparseCoreAttention) and _has_indexer(module) and module.select_backend.observed == _PLAIN:
        chosen = functools.partial(select, run_block=region("indexer score", score_block, backend))
        module.select_backend = dataclasses.replace(module.select_backend, fn=chosen)


def _has_indexer(core: Any) -> bool:
    return isinstance(core, SparseCoreAttention) and getattr(core, "indexer", None) is not None


class RegionLayer(TransformerLayer):
    """A stock layer that knows its family, modified by its plan; parameters, their names and checkpoints stay stock's."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        family: str,
        plan: RegionPlan,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.family = family
        plan.apply(self, family)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; leaves what names this layer if a value is not finite."""
        output = super().__call__(*args, **kwargs)
        hold(self, args[0] if args else kwargs["hidden_states"], output[0])
        return output


def region_plan(settings: PluginConfig | None, config: TransformerConfig) -> RegionPlan:
    """Return the plan of the run's configuration file, checked against Megatron's own arguments.

    Raises:
        ModelError: Megatron's recompute arguments cover the same activations, or ``transformer_engine: {linear: true}`` is set
            without local linear layers.
        LaunchError: regions are to be compiled for a CPU, and there is no C++ compiler.
    """
    if config.quant_recipe is not None:
        quantized.watch()
    if settings is None:
        return RegionPlan()
    settings.recompute.check(config.recompute_granularity, config.recompute_modules or ())
    features, source = settings.transformer_engine, str(settings.path)
    if features.linear and config.transformer_impl != "local":
        raise ModelError(
            f"{source}: transformer_engine: {{linear: true}} replaces Megatron's local linear layers, and the run has "
            f"--transformer-impl {config.transformer_impl}, whose are Transformer Engine's; leave it out, or use local"
        )
    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert; None where no stock script runs
    fsdp2 = getattr(arguments, "use_torch_fsdp2", False)
    scopes = scopes_of(settings.fp8, config, source=source, rows=_rows(config, arguments), fsdp2=fsdp2)
    if scopes is not None:
        quantized.watch()
    backend = BACKEND if settings.compile == "regional" else None
    compiler = os.environ.get("CXX", "g++")
    if backend == "inductor" and cpu.is_active() and shutil.which(compiler) is None:
        raise LaunchError(
            f"{settings.path}: compile is regional, and for a CPU that needs a C++ compiler: no {compiler} was found; "
            "install one, name it in CXX, or write compile: off"
        )
    return RegionPlan(backend=backend, recompute=settings.recompute, fp8=scopes, linear=features.linear)


def _rows(config: TransformerConfig, arguments: Any) -> int | None:
    """Rows of a micro-batch on this rank; None without arguments."""
    if arguments is None:
        return None
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(arguments.seq_length * arguments.micro_batch_size // cut)


# --- warm-up ------------------------------------------------------------------------------------------------------------


def warm_up(
    models: Sequence[torch.nn.Module],
    policy: CompilePolicy,
    say: Callable[[str], None],
    *,
    rows: int,
    batch: int,
    packed: bool = False,
) -> None:
    """Compile the regions of a run's ``models`` before step 1 if ``policy`` says so; report through ``say`` either way.

    Norm and mixer of one built layer of each kind run forward and backward on random inputs, with recompute as in training.
    Projections communicate, so every tensor-parallel rank has to call this. E layers and Shared A layers are left out: their
    only region is the norm, which other layers warm up, and a Shared layer cannot run without a Full layer's indices.

    Args:
        models: the model chunks of this process, wrapped by Megatron or not.
        policy: what is compiled, and when.
        say: prints a line.
        rows: sequence rows of one micro-batch that a layer of this rank gets (under sequence parallelism, its shard).
        batch: the batch dimension that a layer gets.
        packed: whether the samples of a micro-batch are packed into one row, which is not warmed up.
    """
    if policy.mode == "regional":
        names = ", ".join(sorted({each.name for each in _REGIONS.values()}))
        say(f"compile: regional compiles {names or 'nothing: the backends of this run have no region'}")
    skipped = f"skipped ({policy.reason}): {policy.why}"
    if packed and (policy.warm_up == EXPLICIT or policy.precompile):
        return say("compile warm-up: skipped (packed): graphs of rows with several documents are compiled in step 1")
    if policy.warm_up != EXPLICIT and not policy.precompile:
        return say(f"compile warm-up: {skipped}")
    start, before = time.perf_counter(), {each: each.graphs for each in _REGIONS.values()}
    layers: dict[tuple[Any, ...], RegionLayer] = {}
    for layer in (module for model in models for module in model.modules() if isinstance(module, RegionLayer)):
        core = getattr(layer.self_attention, "core_attention", None)
        if layer.family != "E" and (_has_indexer(core) or not isinstance(core, SparseCoreAttention)):
            layers.setdefault((layer.family, type(core)), layer)
    on_gpu = torch.cuda.is_available()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        for layer in layers.values():
            _run_layer(layer, rows, batch)
    if on_gpu:
        torch.cuda.synchronize()
    numbers = ", ".join(str(layer.layer_number) for layer in layers.values()) or "none"
    compiled = ", ".join(sorted({each.name for each, graphs in before.items() if each.graphs > graphs})) or "no regions"
    how = "explicit, before step 1" if policy.warm_up == EXPLICIT else f"{skipped}; static regions precompiled"
    say(f"compile warm-up: {how}: layers {numbers} ({compiled}): {time.perf_counter() - start:.1f} s")


def _run_layer(layer: RegionLayer, rows: int, batch: int) -> None:
    """Run norm and mixer forward and backward without side effects on gradients, logged losses or shared indices."""
    config, core = layer.config, getattr(layer.self_attention, "core_attention", None)
    dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    device = next(layer.parameters()).device
    hidden_SBD = torch.randn(rows, batch, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    with contextlib.ExitStack() as stack:
        for module in layer.modules():  # stand-ins share memory but have no DDP hooks
            stand_ins = {
                name: _stand_in(parameter) for name, parameter in module._parameters.items() if parameter is not None
            }
            stack.enter_context(mock.patch.dict(module._parameters, stand_ins))
        if isinstance(core, SparseCoreAttention):
            stack.callback(core.index_cache.forget, core.layer_number)
            stack.enter_context(
                mock.patch.object(core, "training", False)
            )  # the indexer's loss is logged only in training
        stack.enter_context(training_step.assumed(sys.maxsize))  # select keys, as after the indexer's dense warm-up
        normed = layer.input_layernorm(hidden_SBD)
        normed_SBD = normed[0] if isinstance(normed, tuple) else normed  # (normed, residual)
        output, _ = layer.self_attention(normed_SBD, attention_mask=None)
        output.float().sum().backward()


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    stand_in = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


@contextlib.contextmanager
def before_training(policy: CompilePolicy, say: Callable[[str], None]) -> Iterator[None]:
    """Warm up stock Megatron's model before it trains, as ``policy`` says (:func:`warm_up`).

    Inside the context ``megatron.training.training.setup_model_and_optimizer`` is wrapped: when it returns, the model is on its
    device, any checkpoint is loaded, and no step has begun.
    """
    from megatron.training import training

    stock = training.setup_model_and_optimizer

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        built = stock(*args, **kwargs)
        given = get_args()
        rows = given.seq_length // (given.tensor_model_parallel_size if given.sequence_parallel else 1)
        packed = given.dataloader_inter_document_masking
        warm_up(built[0], policy, say, rows=rows, batch=given.micro_batch_size, packed=packed)
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", setup_model_and_optimizer):
        yield
