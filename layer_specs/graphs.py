"""CUDA graphs: the layers whose forward and backward passes Megatron's own per-layer graphs replay.

``--cuda-graph-impl local`` (megatron-core 0.19, ``core/transformer/cuda_graphs.py``) records in step 1 the order in which
layers run, captures them in that order into one memory pool, and replays them from step 2 on; a replay runs no Python. Here
each layer says whether it is captured, and nothing of Megatron is replaced.

What a layer is given beside its input are the documents, as the tensor int32 ``[B, S]`` and not as sequence lengths or a mask
(:class:`GraphLayer`). What a Full DSA layer hands to its Shared layers, selected keys and the sum of targets, lies in the pool:
they are captured in the order in which they run, forward and backward, and find each other's tensors then
(:mod:`megacpp_mcore.ops.indexer.cache`). The order of a replay is that of the capture, for every micro-batch in flight has
graphs of its own. The indexer's logged loss and the factor on it are tensors of the process, changed in place.

The other graphs of Megatron do not fit. ``transformer_engine`` has one graph a layer and micro-batch, and MTP calls its layer
at every depth; it takes every layer with a mixer, and no packed rows. ``full_iteration`` holds a whole step, and a step waits
for the device elsewhere than in layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.backends.candidates import OWN_EXPERTS
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.documents import documents
from megacpp_mcore.layer_specs.experts import choose_experts
from megacpp_mcore.layer_specs.parts import compute_device, implementation
from megacpp_mcore.layer_specs.regions import RegionLayer, RegionPlan, with_inner_layer
from megacpp_mcore.model import Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.settings import PluginConfig

IMPLEMENTATION = "local"
"""The ``--cuda-graph-impl`` of layers that say themselves whether they are captured."""

NOT_REPEATED = ("core_attn", "mlp", "moe", "shared_experts")
"""The ``--recompute-modules`` that Megatron does not compute again where a CUDA graph holds them, nor ``moe`` beside any."""

MTP = "MTP"
"""The layer that multi-token prediction applies at every depth, among the trunk's numbers."""


class GraphLayer(RegionLayer):
    """A layer that is captured, or not, as its plan says; stock would capture every layer with a mixer.

    Args:
        not_captured: why it is not; empty: it is.
    """

    def __init__(self, *args: Any, not_captured: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.not_captured = not_captured  # read for receipts
        if not not_captured:
            self.cudagraph_manager = CudaGraphManager(self.config)

    def create_mcore_cudagraph_manager(self, config: TransformerConfig) -> None:
        """Make none yet: stock's constructor calls this before it knows what the layer is."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a graph runs: in training alone, for it counts tokens, logs losses and has dropout, as a step does."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        called: bool = super()._should_call_local_cudagraph(*args, **kwargs)
        return called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As stock's."""
        if self._should_call_local_cudagraph(*args, **kwargs):
            return self.run_captured(**kwargs)
        return super().__call__(*args, **kwargs)

    def run_captured(
        self, *, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        """Run the layer's graph, or in step 1 what it is going to hold.

        It is given the documents themselves, which are all that it reads of a mask or of packed sequences; an E layer reads of
        both how many rows a sample has.
        """
        if isinstance(self.self_attention, IdentityOp):
            samples = packed_seq_params and PackedSeqParams(tokens_per_sample=packed_seq_params.tokens_per_sample)
            return super().__call__(hidden_states=hidden_states, packed_seq_params=samples, **kwargs)
        cut = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        seq_idx_BS = documents(
            self.config,
            self.layer_number,
            batch=hidden_states.shape[1],
            rows=hidden_states.shape[0] * cut,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        return super().__call__(hidden_states=hidden_states, attention_mask=seq_idx_BS, **kwargs)


class GraphExpertLayer(GraphLayer, MoETransformerLayer):
    """An E layer: stock's class keeps what its router has logged while Megatron captures it."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """Says which layers of a model are captured.

    Attributes:
        letters: the family of each trunk layer by its number from 1, and of the MTP layer under :data:`MTP`; empty without
            graphs.
        eager: why a layer is not captured.
    """

    letters: Mapping[int | str, str] = field(default_factory=dict)
    eager: Mapping[int | str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.letters)

    def spec(self, layer: ModuleSpec, key: int | str) -> ModuleSpec:
        """Return the spec of layer ``key`` under this plan, or ``layer`` itself without graphs; regions stay as planned."""
        if not self:
            return layer
        letter = self.letters[key]
        regions = layer.params if layer.module is RegionLayer else {"family": letter, "plan": RegionPlan()}
        module = GraphExpertLayer if letter == "E" else GraphLayer
        return dataclasses.replace(layer, module=module, params={**regions, "not_captured": self.eager.get(key, "")})

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """Return the MTP block with its inner layer under this plan."""
        return with_inner_layer(block, lambda layer: self.spec(layer, MTP)) if self else block

    def describe(self) -> list[str]:
        """What is captured and what is not, a line each, for the log of a start; none without graphs."""
        if not self:
            return []
        captured = [key for key in self.letters if key not in self.eager]
        lines = [f"CUDA graphs ({IMPLEMENTATION}) of layers {self._named(captured) or 'none'}"]
        for why in dict.fromkeys(self.eager.values()):
            lines.append(
                f"no CUDA graph of layers {self._named([key for key in self.eager if self.eager[key] == why])}: {why}"
            )
        return lines

    def _named(self, keys: list[int | str]) -> str:
        families: dict[str, list[str]] = {}
        for key in keys:
            families.setdefault(self.letters[key], []).append(str(key))
        return ", ".join(f"{letter} {' '.join(numbers)}" for letter, numbers in families.items())


def graph_plan(
    model: Model, config: TransformerConfig, dispatcher: Dispatcher, settings: PluginConfig | None
) -> GraphPlan:
    """Return what is captured of ``model``; nothing unless the run asks for graphs."""
    if config.cuda_graph_impl == "none":
        return GraphPlan()
    experts = _why_not_experts(config, dispatcher, settings) if "E" in model.layers else ""
    letters: dict[int | str, str] = dict(enumerate(model.layers, 1))
    eager: dict[int | str, str] = {}
    for number, (letter, role) in enumerate(zip(model.layers, model.roles, strict=True), 1):
        if letter == "E" and experts:
            eager[number] = experts
        elif letter == "A" and role != grammar.FULL_ATTENTION and model.dsa.warmup_steps:
            eager[number] = (
                f"dense attention ends after dsa.warmup_steps ({model.dsa.warmup_steps}), in the middle of a run"
            )
    if model.mtp.depth:
        letters[MTP] = "A"
    return GraphPlan(letters=letters, eager=eager)


def _why_not_experts(config: TransformerConfig, dispatcher: Dispatcher, settings: PluginConfig | None) -> str:
    """Why E layers are not captured, or nothing: experts that take tokens as they come read nothing on the host."""
    if CudaGraphModule.attn in config.cuda_graph_modules:
        return "--cuda-graph-modules attn"
    if settings is not None and settings.recompute.experts:
        return "recompute: experts"
    is_divided = config.expert_model_parallel_size > 1 or config.moe_shared_expert_overlap
    if is_divided or choose_experts(config, dispatcher).observed != OWN_EXPERTS:
        return "the host reads how many rows each expert gets"
    return ""


def check_graphs(model: Model, config: TransformerConfig, settings: PluginConfig | None) -> None:
    """Refuse, before anything is allocated, graphs that the layers cannot be given.

    Raises:
        ModelError: with what to change.
    """
    if config.cuda_graph_impl == "none":
        return
    asked = sorted(module.name for module in config.cuda_graph_modules)
    families = settings.recompute.on if settings is not None else ()
    recomputed = [f"recompute: {name}" for name in families if name != "experts"]
    if config.recompute_granularity == "selective":
        recomputed += [f"--recompute-modules {name}" for name in config.recompute_modules or () if name in NOT_REPEATED]
    for wrong, what in (
        (
            config.cuda_graph_impl != IMPLEMENTATION,
            f"--cuda-graph-impl {config.cuda_graph_impl} cannot hold its layers; pass --cuda-graph-impl {IMPLEMENTATION}",
        ),
        (compute_device() != "cuda", "CUDA graphs are for a GPU; leave --cuda-graph-impl out on a CPU"),
        (
            asked not in ([], [CudaGraphModule.attn.name]),
            f"--cuda-graph-modules {' '.join(asked)} names parts of layers, and a layer is captured whole; leave it out, or "
            f"pass {CudaGraphModule.attn.name}, which leaves out those without a mixer",
        ),
        (
            implementation(config) != "transformer_engine",
            "Megatron's graphs use the memory of a layer's input again unless a Python function has saved it, as those of "
            "--transformer-impl transformer_engine do, and the local norms do not; leave --cuda-graph-impl out",
        ),
        (
            bool(recomputed),
            f"{', '.join(recomputed)} is about layers that CUDA graphs hold, where Megatron computes nothing again; leave one "
            "of them out",
        ),
        (
            settings is not None and settings.fp8.recipe is not None,
            "FP8 scopes have not been captured: after a replay Megatron updates their scales under its own FP8 alone; leave "
            "fp8 or --cuda-graph-impl out",
        ),
    ):
        if wrong:
            raise ModelError(f"{model.name}: {what}")
