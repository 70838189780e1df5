"""CUDA graphs: which layers run forward and backward as Megatron's own per-layer graphs.

``--cuda-graph-impl local`` (megatron-core 0.19, ``core/transformer/cuda_graphs.py``) records in step 1 the order in which
layers run, captures them in that order into one memory pool, and replays them from step 2 on; a replay runs no Python. Here
each layer decides whether it is captured; no part of Megatron is replaced.

Besides its input, a layer gets the documents, as an int32 tensor ``[B, S]`` rather than sequence lengths or a mask
(:class:`GraphLayer`). A Full DSA layer passes selected keys and the target sum to its Shared layers through the pool: layers
are captured in execution order, forward and backward, and find each other's tensors during capture
(:mod:`megacpp_mcore.ops.indexer.cache`). Replays keep that order, since every micro-batch in flight has its own graphs. The
indexer's logged loss and its loss scale are process-wide tensors, updated in place.

Megatron's other implementations do not fit. ``transformer_engine`` has one graph per layer and micro-batch, but MTP calls its
layer at every depth; it captures every layer with a mixer, and supports no packed rows. ``full_iteration`` captures a whole
step, and a step syncs with the device outside of layers.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.training import global_vars

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.backends.candidates import OWN_EXPERTS
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.documents import documents
from megacpp_mcore.layer_specs.experts import choose_experts, takes_tokens
from megacpp_mcore.layer_specs.layer_plan import PlannedLayer, with_inner_layer
from megacpp_mcore.layer_specs.parts import compute_device, implementation
from megacpp_mcore.model import Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families import ATTENTION, EXPERTS, FAMILIES
from megacpp_mcore.ops import quantised_weights
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.util.graph_reset import reset_graphs

IMPLEMENTATION = "local"
"""The only supported ``--cuda-graph-impl``, in which each layer decides whether it is captured."""

NOT_REPEATED = ("core_attn", "mlp", "moe", "shared_experts")
"""The ``--recompute-modules`` that Megatron skips in layers with a CUDA graph; ``moe`` in all layers, if the run has graphs."""

IN_GRAPHS = ("block", "current")
"""The FP8 recipes that graphs support: their scales are computed from each tensor, independent of history."""

VARYING = ("rampup_batch_size", "step_batch_size_schedule")
"""Arguments that change the number of micro-batches of a step during a run."""

MTP = "MTP"
"""Key, next to the numbers of trunk layers, of the layer that multi-token prediction applies at every depth."""


class GraphManager(CudaGraphManager):
    """Stock's manager of a layer's graphs; refreshes the quantised weights that these read, once a step.

    Stock calls the method below before it records or replays a layer, after data parallelism has gathered the weights.
    """

    def get_cudagraph_runner(self, megatron_module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        quantised_weights.renew(_matrices(megatron_module))
        return super().get_cudagraph_runner(megatron_module, *args, **kwargs)


def _matrices(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (parameter for parameter in module.parameters() if parameter.dim() > 1)


class GraphLayer(PlannedLayer):
    """A layer captured only if its plan says so; stock would capture every layer with a mixer.

    Args:
        not_captured: why the layer is not captured; empty if it is.
        sends: whether the layer is the last of a pipeline stage, whose output is then copied: Megatron frees what it has sent,
            and a replay would write there. Autograd itself copies the gradient that a stage sends.
    """

    def __init__(self, *args: Any, not_captured: str, sends: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.not_captured = not_captured  # read for receipts
        self._sends = sends
        if not not_captured:
            self.cudagraph_manager = GraphManager(self.config)
            quantised_weights.renew_before_replays(_matrices(self))

    def create_mcore_cudagraph_manager(self, config: TransformerConfig) -> None:
        """Create none yet: stock's constructor calls this before ``not_captured`` is set."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether to run the graph: only in training, since it counts tokens, logs losses and applies dropout."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        return super()._should_call_local_cudagraph(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        if not self._should_call_local_cudagraph(*args, **kwargs):
            return super().__call__(*args, **kwargs)
        output = self.run_captured(**kwargs)
        return (output[0].clone(), *output[1:]) if self._sends else output

    def run_captured(
        self, *, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        """Run the layer's graph, or in step 1 the calls to be captured.

        The layer gets the documents instead of a mask or packed sequences; an E layer needs only the rows per sample.
        """
        if isinstance(self.self_attention, IdentityOp):
            samples = packed_seq_params and PackedSeqParams(tokens_per_sample=packed_seq_params.tokens_per_sample)
            return super().__call__(hidden_states=hidden_states, packed_seq_params=samples, **kwargs)
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        seq_idx_BS = documents(
            self.config,
            self.layer_number,
            batch=hidden_states.shape[1],
            rows=hidden_states.shape[0] * shards,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        return super().__call__(hidden_states=hidden_states, attention_mask=seq_idx_BS, **kwargs)


class GraphExpertLayer(GraphLayer, MoETransformerLayer):
    """An E layer: the stock base class preserves the router's logged losses during capture."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """Which layers of a model are captured.

    Attributes:
        letters: the family of each trunk layer by its 1-based number, and of the MTP layer under :data:`MTP`; empty without
            graphs.
        eager: the layers that are not captured, each with the reason.
    """

    letters: Mapping[int | str, str] = field(default_factory=dict)
    eager: Mapping[int | str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.letters)

    def spec(self, layer: ModuleSpec, key: int | str, *, sends: bool = False) -> ModuleSpec:
        """Return the spec of layer ``key`` under this plan (``sends``: of :class:`GraphLayer`), or ``layer`` without graphs."""
        if not self:
            return layer
        module = GraphLayer if FAMILIES[self.letters[key]].is_mixer else GraphExpertLayer
        more = {"not_captured": self.eager.get(key, ""), "sends": sends}
        return dataclasses.replace(layer, module=module, params={**layer.params, **more})

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """Return the MTP block with its inner layer under this plan."""
        return with_inner_layer(block, lambda layer: self.spec(layer, MTP)) if self else block

    def describe(self) -> list[str]:
        """Return startup log lines: which layers are captured, and which are not and why; empty without graphs."""
        if not self:
            return []
        captured = [key for key in self.letters if key not in self.eager]
        lines = [f"CUDA graphs ({IMPLEMENTATION}) of layers {self._named(captured) or 'none'}"]
        for why in dict.fromkeys(self.eager.values()):
            lines.append(f"no CUDA graph of layers {self._named([key for key in self.eager if self.eager[key] == why])}: {why}")
        return lines

    def _named(self, keys: list[int | str]) -> str:
        families: dict[str, list[str]] = {}
        for key in keys:
            families.setdefault(self.letters[key], []).append(str(key))
        return ", ".join(f"{letter} {' '.join(numbers)}" for letter, numbers in families.items())


def graph_plan(model: Model, config: TransformerConfig, dispatcher: Dispatcher, settings: PluginConfig | None) -> GraphPlan:
    """Return which layers of ``model`` are captured; none unless the run requests CUDA graphs.

    Under tensor and expert parallelism graphs hold collectives, so they are reset before the process exits, also on errors.
    """
    if config.cuda_graph_impl == "none":
        return GraphPlan()
    if max(config.tensor_model_parallel_size, config.expert_model_parallel_size) > 1:
        atexit.register(reset_graphs)
    experts = _why_not_experts(config, dispatcher, settings) if EXPERTS in model.families else ""
    letters: dict[int | str, str] = dict(enumerate(model.layers, 1))
    eager: dict[int | str, str] = {}
    for number, (letter, role) in enumerate(zip(model.layers, model.roles, strict=True), 1):
        if letter == EXPERTS.letter and experts:
            eager[number] = experts
        elif role in grammar.SPARSE and model.dsa.warmup_steps:
            eager[number] = f"dense attention ends after dsa.warmup_steps ({model.dsa.warmup_steps}), in the middle of a run"
    if model.mtp.depth:
        letters[MTP] = ATTENTION.letter
    return GraphPlan(letters=letters, eager=eager)


def _why_not_experts(config: TransformerConfig, dispatcher: Dispatcher, settings: PluginConfig | None) -> str:
    """Return why E layers are not captured; empty if they are: experts that take unpermuted tokens need no host sync."""
    if CudaGraphModule.attn in config.cuda_graph_modules:
        return "--cuda-graph-modules attn"
    if settings is not None and settings.recompute.experts:
        return "recompute: experts"
    if not takes_tokens(config) or choose_experts(config, dispatcher).observed != OWN_EXPERTS:
        return "the host reads how many rows each expert gets"
    return ""


def check_graphs(model: Model, config: TransformerConfig, settings: PluginConfig | None) -> None:
    """Refuse, before anything is allocated, CUDA-graph settings that the layers do not support.

    Raises:
        ModelError: says what to change.
    """
    if config.cuda_graph_impl == "none":
        return
    modules = sorted(module.name for module in config.cuda_graph_modules)
    families = settings.recompute.on if settings is not None else ()
    recomputed = [f"recompute: {name}" for name in families if name != "experts"]
    if config.recompute_granularity == "selective":
        recomputed += [f"--recompute-modules {name}" for name in config.recompute_modules or () if name in NOT_REPEATED]
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    changing = [f"--{name.replace('_', '-')}" for name in VARYING if getattr(arguments, name, None) is not None]
    for unsupported, problem in (
        (
            config.cuda_graph_impl != IMPLEMENTATION,
            f"--cuda-graph-impl {config.cuda_graph_impl} cannot hold its layers; pass --cuda-graph-impl {IMPLEMENTATION}",
        ),
        (compute_device() != "cuda", "CUDA graphs are for a GPU; leave --cuda-graph-impl out on a CPU"),
        (
            modules not in ([], [CudaGraphModule.attn.name]),
            f"--cuda-graph-modules {' '.join(modules)} names parts of layers, and a layer is captured whole; leave it out, or "
            f"pass {CudaGraphModule.attn.name}, which leaves out those without a mixer",
        ),
        (
            implementation(config) != "transformer_engine",
            "CUDA graphs reuse a layer's input buffer unless an autograd function saved it; local norms do not save it, "
            "--transformer-impl transformer_engine does; use that, or leave --cuda-graph-impl out",
        ),
        (
            config.pipeline_model_parallel_size > 1 and bool(changing),
            f"{' and '.join(changing)} changes the number of micro-batches, each of which has graphs of its own in a pipeline; "
            "leave it out, or --cuda-graph-impl",
        ),
        (
            config.context_parallel_size > 1,
            "captured layers do not know the chunks of --context-parallel-size; leave --cuda-graph-impl out",
        ),
        (
            bool(recomputed),
            f"{', '.join(recomputed)} would recompute captured layers, which Megatron does not support; leave one of them out",
        ),
        (
            settings is not None and settings.fp8.recipe not in (None, *IN_GRAPHS),
            f"fp8: {{recipe: {settings and settings.fp8.recipe}}} has not been captured (after a replay Megatron updates the "
            f"maxima of delayed only under its own FP8); use {' or '.join(IN_GRAPHS)}, or leave --cuda-graph-impl out",
        ),
    ):
        if unsupported:
            raise ModelError(f"{model.name}: {problem} (of a recipe: --set cuda_graphs=false)")
