"""What a run's configuration file changes in built layers: recompute by family, FP8 scopes, linear layers.

Recompute (:class:`megacpp_mcore.model.training.Recompute`) wraps whole modules in Megatron's own checkpoint function, which
handles RNG states and shared indices as with ``--recompute-granularity``. Replacement methods are bound to their module, so
that a deep copy of the module computes with its own parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import log_single_rank
from megatron.training import global_vars

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.families import ATTENTION, FAMILIES
from megacpp_mcore.model.training import MTP_MLP, MTP_MLP_TOKENS, Recompute
from megacpp_mcore.patches.non_finite_origin import hold
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.te import linear as te_linear
from megacpp_mcore.te import quantized
from megacpp_mcore.te.fp8_scopes import Scopes, scopes_of

logger = logging.getLogger(__name__)


def recomputed(function: Callable[..., Any], *, by_engine: bool = False) -> Callable[..., Any]:
    """Return ``function`` under Megatron's checkpoint function, with the tensors that require grad as its saved inputs.

    With grad disabled, or no such tensor, ``function`` runs directly. ``by_engine`` selects Transformer Engine's checkpoint
    function, which recomputes an FP8 scope with its original scales.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = dict(enumerate(args)) | kwargs
        grad_names = [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        if not grad_names or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        constants = {name: value for name, value in values.items() if name not in grad_names}

        def call(*tensors: torch.Tensor) -> Any:
            inputs = constants | dict(zip(grad_names, tensors, strict=True))
            return function(*(inputs[i] for i in range(len(args))), **{name: inputs[name] for name in kwargs})

        tensors = [values[name] for name in grad_names]
        if by_engine:
            # Imported late: a patch may have replaced it.
            from megatron.core.extensions.transformer_engine import te_checkpoint
            from megatron.core.parallel_state import get_tensor_model_parallel_group

            tracker = megatron_random.get_cuda_rng_tracker
            return te_checkpoint(call, False, tracker, get_tensor_model_parallel_group(), *tensors)
        return megatron_random.checkpoint(call, False, *tensors)

    return run


def recompute(module: torch.nn.Module, *, by_engine: bool = False) -> None:
    """Replace the ``forward`` of ``module`` with its :func:`recomputed` version."""
    method: Any = module.forward
    module.forward = types.MethodType(recomputed(method.__func__, by_engine=by_engine), module)


def recompute_in_chunks(mlp: torch.nn.Module) -> None:
    """Make ``mlp``, ``[S, B, D] -> ([S, B, D], None)``, compute chunks of rows one by one, each recomputed in backward.

    Its modules are called once per chunk, which Megatron's first-call marks have to allow (:class:`RepeatedLayer`).
    """
    method: Any = mlp.forward
    run = recomputed(method.__func__)

    def forward(module: torch.nn.Module, hidden_SBD: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        rows = max(1, MTP_MLP_TOKENS // hidden_SBD.shape[1])
        outputs, biases = zip(*(run(module, part, *args, **kwargs) for part in hidden_SBD.split(rows)), strict=True)
        return torch.cat(outputs), biases[0]

    mlp.forward = types.MethodType(forward, mlp)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What is changed in a run's layers.

    Attributes:
        recompute: what the backward pass recomputes.
        fp8: the FP8 scopes of trunk layers and of MTP's projection, if any.
        linear: whether Transformer Engine's linear layers replace the dense ones.
        is_mtp: whether the layer is the MTP block's.
    """

    recompute: Recompute = field(default_factory=Recompute)
    fp8: Scopes | None = None
    linear: bool = False
    is_mtp: bool = False

    def spec(self, layer: ModuleSpec, letter: str) -> ModuleSpec:
        """Return the spec of a layer of family ``letter`` under this plan.

        Raises:
            ModelError: the layer is not a TransformerLayer.
        """
        if layer.module is not TransformerLayer:
            raise ModelError(f"a layer of family {letter} is a {layer.module}; expected TransformerLayer")
        return ModuleSpec(module=PlannedLayer, params={"family": letter, "plan": self}, submodules=layer.submodules)

    def mtp(self, block: MultiTokenPredictionBlockSubmodules) -> MultiTokenPredictionBlockSubmodules:
        """Return the MTP block with its projection, and its inner layer of family A without a scope, under this plan."""
        outside = dataclasses.replace(self, fp8=None, is_mtp=True)
        changed = with_inner_layer(block, lambda layer: outside.spec(layer, ATTENTION.letter))
        if self.fp8 is not None and self.fp8.fp8.mtp:
            changed.layer_specs = [dataclasses.replace(old, params={"scopes": self.fp8}) for old in changed.layer_specs]
        return changed

    def apply(self, layer: TransformerLayer, letter: str) -> None:
        """Replace linear layers, then wrap in recompute, and wrap that in an FP8 scope."""
        if self.linear:
            report = te_linear.report(te_linear.replace(layer))
            log_single_rank(logger, logging.INFO, f"megacpp-mcore: layer {layer.layer_number}: linear layers: {report}")
        family = FAMILIES[letter]
        scopes = self.fp8 if self.fp8 is not None and family.fp8 in self.fp8.fp8.on else None
        if family.recompute in self.recompute.on:
            in_scope = scopes is not None and family.is_mixer and not scopes.in_zone(layer.layer_number)
            recompute(layer.self_attention if family.is_mixer else layer.mlp.experts, by_engine=in_scope)
        if self.is_mtp and MTP_MLP in self.recompute.on:
            recompute_in_chunks(layer.mlp)
        if scopes is not None:
            scopes.install(layer.self_attention if family.is_mixer else layer.mlp.shared_experts, layer.layer_number)


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


class PlannedLayer(TransformerLayer):
    """A stock layer that knows its family, modified by its plan; parameters, their names and checkpoints stay stock's."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        family: str,
        plan: LayerPlan,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.family = family
        plan.apply(self, family)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; records this layer so that a non-finite value can be traced to it."""
        output = super().__call__(*args, **kwargs)
        hold(self, args[0] if args else kwargs["hidden_states"], output[0])
        return output


def layer_plan(settings: PluginConfig | None, config: TransformerConfig) -> LayerPlan:
    """Return the plan of the run's configuration file, checked against Megatron's own arguments.

    Raises:
        ModelError: Megatron's recompute arguments cover the same activations, or ``transformer_engine: {linear: true}`` is set
            without local linear layers.
    """
    if config.quant_recipe is not None:
        quantized.watch()
    if settings is None:
        return LayerPlan()
    settings.recompute.check(config.recompute_granularity, config.recompute_modules or ())
    features, source = settings.transformer_engine, str(settings.path)
    if features.linear and config.transformer_impl != "local":
        raise ModelError(
            f"{source}: transformer_engine: {{linear: true}} replaces Megatron's local linear layers, but the run has "
            f"--transformer-impl {config.transformer_impl}, which uses Transformer Engine's; remove it, or use local"
        )
    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert; None where no stock script runs
    fsdp2 = getattr(arguments, "use_torch_fsdp2", False)
    scopes = scopes_of(settings.fp8, config, source=source, rows=_rows(config, arguments), fsdp2=fsdp2)
    if scopes is not None:
        quantized.watch()
    return LayerPlan(recompute=settings.recompute, fp8=scopes, linear=features.linear)


def _rows(config: TransformerConfig, arguments: Any) -> int | None:
    """Return the rows of a micro-batch on this rank; None without arguments."""
    if arguments is None:
        return None
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(arguments.seq_length * arguments.micro_batch_size // (shards * config.context_parallel_size))
