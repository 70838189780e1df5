"""Regional compile and per-family recompute: what a built layer's regions are replaced with, and the warm-up before step 1.

A region is a pure function of tensors with static shapes, so that one compiled version serves all layers that call it with
the same shapes. It is compiled whole (``fullgraph``): a part that Dynamo cannot trace is an error and no silent graph break.

=================  =======  ==============================================================================================
region             layers   what it is
=================  =======  ==============================================================================================
norm               A M E R  RMSNorm over the hidden size, and A's over the latents, where it is torch's own
indexer score      A        the scores of a Full layer's indexer, a block of queries at a time (the plain-PyTorch backend)
mamba3 segment     M        from the projections to the gated output, 1024 tokens at a time (the plain-PyTorch backend)
m2rnn convolution  R        padding, depthwise convolution, SiLU
m2rnn gate         R        the forget gate
m2rnn skip         R        skip, output gate, sum of squares
m2rnn scale        R        RMSNorm after that sum has been reduced
=================  =======  ==============================================================================================

Not compiled, and why: projections, each one matrix product of its own kernel, behind whose autograd function stand the
collectives of tensor parallelism; core attention, whose blocks of queries each see another number of keys; the M²RNN
recurrence, a loop over tokens; the routing, dispatch and experts of E, whose shapes depend on the data; what Transformer
Engine brings, which has kernels of its own.

Recompute (:class:`megacpp_mcore.config.Recompute`) wraps whole modules or regions in Megatron's own checkpoint function, so
that random states and shared indices are handled as with ``--recompute-granularity``.
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

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore import cpu
from megacpp_mcore.config import PluginConfig, Recompute
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.layer_specs.attention import SparseCoreAttention
from megacpp_mcore.layer_specs.mamba import Mamba3Mixer
from megacpp_mcore.layer_specs.recurrent import M2RNNMixer, causal_convolution, scale_rows, skip_and_gate
from megacpp_mcore.ops.indexer.reference import indexer_scores, score_block
from megacpp_mcore.ops.m2rnn.reference import m2rnn_forget_gate
from megacpp_mcore.ops.mamba3.reference import mamba3, mix_segment
from megacpp_mcore.policy import EXPLICIT, CompilePolicy

logger = logging.getLogger(__name__)

BACKEND = "inductor"
"""What compiles regions, a name that ``torch.compile`` knows."""

_PLAIN = "reference"
"""The name of the backends in plain PyTorch, the only ones with something to compile."""


class Region:
    """A pure function of tensors, compiled when it is first called.

    Attributes:
        name: as in the table above.
        calls: how often it was called.
    """

    def __init__(self, name: str, function: Callable[..., Any], backend: str) -> None:
        self.name = name
        self.calls = 0
        # Dynamo keeps what it has compiled, and counts it against its limit, by code object: a region has one of its own.
        self._function = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
        )
        self._function.__kwdefaults__ = function.__kwdefaults__
        self._backend = backend
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function."""
        self.calls += 1
        with cpu.stepping_aside():
            if self._compiled is None:  # not before: what disables Dynamo is asked for here
                self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=self._backend)
            return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self


_REGIONS: dict[tuple[Any, ...], Region] = {}


def region(name: str, function: Callable[..., Any], backend: str, width: int | None = None) -> Region:
    """The one region of ``function`` in this process (of each ``width``): layers, chunks and models share what is compiled."""
    key = (name, backend, width)
    if key not in _REGIONS:
        _REGIONS[key] = Region(name, function, backend)
    return _REGIONS[key]


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under Megatron's checkpoint: only its tensors that need gradients are kept for the backward pass.

    Without gradients, and where no tensor among its arguments needs one, it runs as it is.
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """RMSNorm over the last dimension, with :class:`torch.nn.RMSNorm`'s meaning of ``eps``."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """What is done to the layers of a run.

    Attributes:
        backend: what compiles regions; None: nothing is compiled.
        recompute: what the backward pass computes again.
    """

    backend: str | None = None
    recompute: Recompute = field(default_factory=Recompute)

    def __bool__(self) -> bool:
        return self.backend is not None or bool(self.recompute.on)

    def spec(self, layer: ModuleSpec, letter: str) -> ModuleSpec:
        """The spec of a treated layer of family ``letter``; ``layer`` itself when there is nothing to do."""
        if not self:
            return layer
        if layer.module is not TransformerLayer:
            raise ModelError(f"a layer of family {letter} is a {layer.module}; expected TransformerLayer, to treat it")
        return ModuleSpec(
            module=TreatedLayer, params={"family": letter, "treatment": self}, submodules=layer.submodules
        )

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """The MTP block with its inner layer treated, which is one of family A."""
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
        """Put compiled regions, and then what recomputes them, in their places in a built layer."""
        if self.backend is not None:
            self._compile(layer, self.backend)
        mixer, recompute = layer.self_attention, self.recompute
        if (letter == "A" and recompute.a) or (letter == "M" and recompute.m):
            mixer.forward = recomputed(mixer.forward)
        if letter == "R" and recompute.r_convolution:
            mixer._convolve = recomputed(mixer._convolve)
        if letter == "R" and recompute.r_recurrence:
            mixer._recur = recomputed(mixer._recur)
        if letter == "E" and recompute.experts:
            layer.mlp.experts.forward = recomputed(layer.mlp.experts.forward)

    def _compile(self, layer: TransformerLayer, backend: str) -> None:
        for module in layer.modules():
            if type(module) is torch.nn.RMSNorm:
                _compile_norm(module, backend)
            elif isinstance(module, Mamba3Mixer) and module.backend.observed == _PLAIN:
                run_segment = region("mamba3 segment", mix_segment, backend)
                scan = functools.partial(mamba3, run_segment=run_segment)
                module.backend = dataclasses.replace(module.backend, fn=scan)
            elif isinstance(module, M2RNNMixer):
                for attribute, name, function in (
                    ("_convolve", "m2rnn convolution", causal_convolution),
                    ("_forget", "m2rnn gate", m2rnn_forget_gate),
                    ("_gate", "m2rnn skip", skip_and_gate),
                    ("_scale", "m2rnn scale", scale_rows),
                ):
                    setattr(module, attribute, region(name, function, backend))
            elif isinstance(module, SparseCoreAttention) and _scores(module):
                score = functools.partial(indexer_scores, run_block=region("indexer score", score_block, backend))
                module.score_backend = dataclasses.replace(module.score_backend, fn=score)


def _scores(core: SparseCoreAttention) -> bool:
    return getattr(core, "indexer", None) is not None and core.score_backend.observed == _PLAIN


def _compile_norm(norm: torch.nn.RMSNorm, backend: str) -> None:
    compiled = region("norm", rms_norm, backend, norm.normalized_shape[0])
    norm.forward = lambda x: compiled(x, norm.weight, norm.eps)  # type: ignore[method-assign]


class TreatedLayer(TransformerLayer):
    """A layer that is treated when it has been built; parameters, their names and checkpoints are those of the stock class."""

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
    """What the file of a run asks to be done to its layers, checked against Megatron's own recompute.

    Raises:
        ModelError: Megatron's arguments ask for the same activations to be recomputed.
        LaunchError: regions are to be compiled for a CPU, and there is no C++ compiler.
    """
    if settings is None:
        return Treatment()
    _check_recompute(settings.recompute, config)
    backend = BACKEND if settings.compile == "regional" else None
    on_cpu = isinstance(torch.overrides._get_current_function_mode(), cpu.CpuDeviceMode)
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


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        seconds: how long it took, compilation and the kernels' own first calls included.
        layers: the numbers of the layers that were run, one of each kind.
        regions: names of the regions they called.
    """

    seconds: float
    layers: tuple[int, ...]
    regions: tuple[str, ...]

    def __str__(self) -> str:
        layers, regions = ", ".join(map(str, self.layers)) or "none", ", ".join(self.regions) or "no regions"
        return f"layers {layers} ({regions}): {self.seconds:.1f} s"


def warm_up(models: Sequence[torch.nn.Module], *, rows: int, batch: int) -> WarmUp:
    """Run one built layer of each kind forward and backward, so that its regions are compiled for the run's shapes.

    Norms and mixers run on random inputs, of one document a row, with recompute as in training; no parameter is told of its
    gradient and no reduction starts. Every tensor-parallel rank has to take part, as the projections communicate. E layers
    contribute their norm: routing is not entered.

    Args:
        models: the model chunks of this process, in whatever Megatron has wrapped them.
        rows: rows of the sequence of one micro-batch on this rank, as the layers see them (under sequence parallelism, a part).
        batch: the micro-batch.
    """
    start = time.perf_counter()
    before = {each: each.calls for each in _REGIONS.values()}
    seen: dict[tuple[Any, ...], int] = {}
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for layer in _treated(models):
            kind = _kind(layer)
            if kind not in seen:
                seen[kind] = layer.layer_number
                _run_layer(layer, rows, batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    called = sorted({each.name for each, calls in before.items() if each.calls > calls})
    return WarmUp(seconds=time.perf_counter() - start, layers=tuple(seen.values()), regions=tuple(called))


def _treated(models: Sequence[torch.nn.Module]) -> Iterator[TreatedLayer]:
    for model in models:
        for module in model.modules():
            if isinstance(module, TreatedLayer):
                yield module


def _kind(layer: TreatedLayer) -> tuple[Any, ...]:
    core = getattr(layer.self_attention, "core_attention", None)
    return layer.family, type(core), isinstance(core, SparseCoreAttention) and core.indexer is not None


def _run_layer(layer: TreatedLayer, rows: int, batch: int) -> None:
    config = layer.config
    shape, device = (rows, batch, config.hidden_size), next(layer.parameters()).device
    hidden_SBD = torch.randn(shape, device=device, dtype=config.params_dtype, requires_grad=True)
    attention = layer.self_attention
    core = getattr(attention, "core_attention", None)
    with _parameters_of_its_own(layer):
        if layer.family == "E":
            output = layer.pre_mlp_layernorm(hidden_SBD)
        elif not isinstance(core, SparseCoreAttention):
            output, _ = attention(layer.input_layernorm(hidden_SBD), attention_mask=None)
        elif core.indexer is not None:
            output = _run_sparse(layer, core, hidden_SBD)
        else:  # a Shared layer attends to what it is given, and has no region that its Full layer has not
            output = layer.input_layernorm(hidden_SBD)
        output.float().sum().backward()


def _run_sparse(layer: TreatedLayer, core: SparseCoreAttention, hidden_SBD: torch.Tensor) -> torch.Tensor:
    """The output of a Full layer, with its indexer's scores beside it: nothing stays published, no loss is logged."""
    normed_SBD, config = layer.input_layernorm(hidden_SBD), layer.config
    with _no_indexer_loss(core):
        output, _ = layer.self_attention(normed_SBD, attention_mask=None)
    core.index_cache.forget(core.layer_number)
    shape = (*hidden_SBD.shape[:2], config.q_lora_rank)
    latent = torch.randn(shape, device=hidden_SBD.device, dtype=hidden_SBD.dtype)
    if core.indexer is None or not _scores(core):
        return output
    score_BST = core.score_backend.fn(*core.indexer.forward_before_topk(normed_SBD.detach(), latent))
    return output.float().sum() + score_BST.sum()


@contextlib.contextmanager
def _no_indexer_loss(core: SparseCoreAttention) -> Iterator[None]:
    before, core.training = core.training, False
    try:
        yield
    finally:
        core.training = before


@contextlib.contextmanager
def _parameters_of_its_own(layer: torch.nn.Module) -> Iterator[None]:
    """For the duration, new parameters over the same memory: what waits for the gradients of the real ones is not told."""
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


@contextlib.contextmanager
def before_training(policy: CompilePolicy, say: Callable[[str], None]) -> Iterator[None]:
    """Warm up what stock Megatron has built before it trains, as ``policy`` says; ``say`` is told what became of it.

    ``megatron.training.training.setup_model_and_optimizer`` is wrapped for the duration: the model is then where it will be
    trained, a checkpoint is loaded, and no step has begun.
    """
    if policy.warm_up != EXPLICIT and not policy.precompile:
        say(f"compile warm-up: skipped ({policy.reason}): {policy.why}")
        yield
        return
    from megatron.training import training

    stock = training.setup_model_and_optimizer

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = stock(*args, **kwargs)
        from megatron.training import get_args

        arguments = get_args()
        cut = arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1
        done = warm_up(built[0], rows=arguments.seq_length // cut, batch=arguments.micro_batch_size)
        if policy.warm_up == EXPLICIT:
            say(f"compile warm-up: explicit, before step 1: {done}")
        else:
            say(f"compile warm-up: skipped ({policy.reason}): {policy.why}; static regions precompiled: {done}")
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer
    try:
        yield
    finally:
        training.setup_model_and_optimizer = stock
