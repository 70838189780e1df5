"""Shared parts of the block families: linear and norm classes, and a mixer base with sharded and fp32 parameters.

Shape legend: S sequence (of this rank), B batch, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.training import global_vars

from megacpp_mcore import cpu
from megacpp_mcore.backends import Dispatcher, te_disabled
from megacpp_mcore.backends.candidates import LAYER_PARTS, layer_parts_candidates
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import exchange
from megacpp_mcore.layer_specs.context import Context
from megacpp_mcore.layer_specs.decode import LayerCache, refuse_decoding
from megacpp_mcore.layer_specs.documents import documents
from megacpp_mcore.layer_specs.gradients import main_grad_of, mark_replicated, replicated
from megacpp_mcore.layer_specs.initial import Initializer, drawn_by_input_size, filled
from megacpp_mcore.te import fp8_scopes
from megacpp_mcore.util import te_imports

if TYPE_CHECKING:
    from megatron.core.models.backends import BackendSpecProvider


class TorchNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` whose gradients are correct under sequence parallelism.

    Megatron-Core 0.19's own wrapper refuses sequence parallelism, and its default norm depends on which ``apex`` is
    importable, so norms are named explicitly here.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """Return the norm that ``config.normalization`` names over ``hidden_size`` values."""
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ModelError(f"normalization is {config.normalization!r}; expected {' or '.join(kinds)}")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class DuplicatedLinear(MegatronModule):
    """A bias-free linear layer replicated on all tensor-parallel ranks, with Transformer Engine's call signature.

    Replaces ``TELinear(parallel_mode="duplicated")`` without Transformer Engine.

    Raises:
        ModelError: a bias or another parallel mode is requested.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Initializer,
        bias: bool = False,
        parallel_mode: str = "duplicated",
        **_: Any,
    ) -> None:
        super().__init__(config)
        if bias or parallel_mode != "duplicated":
            raise ModelError(f"DuplicatedLinear got bias={bias}, parallel_mode={parallel_mode!r}; expected no bias, duplicated")
        self.weight = torch.nn.Parameter(filled((output_size, input_size), config, init_method, config.params_dtype))
        mark_replicated(self.weight, config)  # like Transformer Engine's

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Project: ``x [..., in] -> ([..., out], None)``."""
        return torch.nn.functional.linear(x, self.weight), None


class WholeLinear(DuplicatedLinear):
    """:class:`DuplicatedLinear` with the checkpoint keys of the local linear layers that are split over ranks."""

    def get_extra_state(self) -> None:
        """Return None, as those layers do."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state, as those layers do."""


class UncutLinear:
    """Builds a linear layer, with the arguments of a column- or row-parallel one, replicated on every tensor-parallel rank.

    Each rank multiplies its own rows of the sequence, so no rows are gathered or scattered, and the gradient is summed over
    ranks once a step, like those of the norms. Without sequence parallelism all ranks have all rows, and ``cut`` is built.

    Args:
        whole, cut: the classes of the replicated and of the sharded layer.
    """

    def __new__(cls, *sizes: int, whole: type, cut: Callable[..., Any], config: TransformerConfig, **extra: Any) -> Any:
        """Return the layer; it is never an instance of this class."""
        if not config.sequence_parallel:
            return cut(*sizes, config=config, **extra)
        common = {name: extra.get(name) for name in ("init_method", "bias", "skip_bias_add", "name")}
        linear = whole(*sizes, config=config, **common, parallel_mode="duplicated", skip_weight_param_allocation=False)
        linear.weight.partition_dim = -1  # Transformer Engine sets 0: Muon would concatenate the ranks' copies
        return linear


@functools.cache
def scattering(linear: type) -> type:
    """Subclass of a row-parallel linear layer, with its name and arguments, that sends large outputs while computing others.

    Only under sequence parallelism, in a run without a feature that the layer implements separately: FP8, userbuffers,
    delayed weight gradients, offloaded activations, and local layers that Transformer Engine's replace.
    """

    def __init__(self: Any, *sizes: int, config: TransformerConfig, **options: Any) -> None:
        linear.__init__(self, *sizes, config=config, **options)  # type: ignore[misc]
        unsupported = (config.fp8, config.fp4, config.quant_recipe, config.tp_comm_overlap, config.delay_wgrad_compute)
        is_unsupported = any(unsupported) or config.cpu_offloading or te_imports.features().linear
        if config.sequence_parallel and not (is_unsupported or options["bias"]):
            self.__class__ = sending

    def forward(self: Any, x_SBK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project: ``[S, B, K] -> ([S / ranks, B, N], no bias)``."""
        sent = x_SBK.shape[:-1].numel() // self.tp_group.size() * len(self.weight) * x_SBK.element_size()
        if sent < exchange.WORTH_PIECES or fp8_scopes.is_active():
            return linear.forward(self, x_SBK)  # type: ignore[attr-defined]
        main_grad = main_grad_of(self.weight, self.config)
        return exchange.scattered_product(x_SBK, self.weight, main_grad, self.tp_group), None

    name_and_bases = linear.__name__, (linear,)
    sending = type(*name_and_bases, {"forward": forward, "__module__": linear.__module__})
    return type(*name_and_bases, {"__init__": __init__, "__module__": linear.__module__})


@dataclass(frozen=True)
class Parts:
    """The linear, norm and expert classes of one ``transformer_impl``.

    ``row_linear`` writes to the residual stream; ``residual_norm`` is stock's norm where a layer's residual begins, which
    ``--fused-residual-rmsnorm`` changes under Transformer Engine. ``whole_linear`` is not split, like ``duplicated_linear``,
    but has the checkpoint keys of those that are.
    """

    column_linear: type
    row_linear: type
    down_linear: type
    duplicated_linear: type
    whole_linear: type
    norm: Any
    residual_norm: Any
    backend: BackendSpecProvider


def parts_for(config: TransformerConfig) -> Parts:
    """Choose the classes to build layers from, Transformer Engine's or Megatron's, by ``transformer_impl``.

    ``MEGACPP_DISABLE_TE`` forces the local ones; ``config`` is not changed.

    Raises:
        ModelError: unknown implementation, or a feature that only Transformer Engine has while it is disabled.
        BackendError: Transformer Engine is requested and does not work here.
    """
    requested = config.transformer_impl
    if requested not in ("transformer_engine", "local"):
        raise ModelError(f"transformer_impl is {requested!r}; expected 'transformer_engine' or 'local'")
    if te_disabled():
        _refuse_without_te(config)
    candidates = layer_parts_candidates(transformer_engine=_te_parts, local=_local_parts)
    return Dispatcher(candidates=candidates).request(LAYER_PARTS, requested, device=compute_device()).fn()


def implementation(config: TransformerConfig) -> str:
    """Return ``transformer_engine`` or ``local``, the source of the classes that :func:`parts_for` returns."""
    return "local" if te_disabled() else str(config.transformer_impl)


def compute_device() -> str:
    """Return ``cuda``, or ``cpu`` on the CPU lane and on machines without a GPU."""
    on_lane = cpu.is_active()
    return "cuda" if torch.cuda.is_available() and not on_lane else "cpu"


def backend_needs(config: TransformerConfig) -> dict[str, Any]:
    """Return what every op of a run with ``config`` requires of its backend (:class:`megacpp_mcore.backends.Support`).

    Without a stock script it is unknown whether a row holds several documents: ``packed`` is None.
    """
    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert
    names = ("reset_attention_mask", "dataloader_inter_document_masking")
    return {
        "packed": arguments and any(getattr(arguments, name, True) for name in names),
        "device": compute_device(),
        "dtype": config.params_dtype,
        "deterministic": config.deterministic_mode or torch.are_deterministic_algorithms_enabled(),
        "capturable": config.cuda_graph_impl != "none",
    }


def _te_parts() -> Parts:
    from megatron.core.extensions.transformer_engine import TELinear
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    provider = TESpecProvider()
    return Parts(
        column_linear=provider.column_parallel_linear(),
        row_linear=scattering(drawn_by_input_size(provider.row_parallel_linear())),
        down_linear=TELinear,
        duplicated_linear=TELinear,
        whole_linear=TELinear,
        norm=provider.layer_norm(rms_norm=True),
        residual_norm=provider.layer_norm(rms_norm=True, has_residual=True),
        backend=provider,
    )


def _local_parts() -> Parts:
    from megatron.core.models.backends import LocalSpecProvider

    return Parts(
        column_linear=ColumnParallelLinear,
        row_linear=scattering(drawn_by_input_size(RowParallelLinear)),
        down_linear=ColumnParallelLinear,
        duplicated_linear=DuplicatedLinear,
        whole_linear=WholeLinear,
        norm=TorchNorm,
        residual_norm=TorchNorm,
        backend=LocalSpecProvider(),
    )


def _refuse_without_te(config: TransformerConfig) -> None:
    """Raise ModelError for requested stock features that only Transformer Engine has."""
    for requested, feature, remedy in (
        (config.quant_recipe is not None, "FP8 experts", "leave --te-precision-config-file out"),
        (config.moe_permute_fusion, "fused permutation of tokens", "leave --moe-permute-fusion out"),
        (config.moe_router_fusion, "a fused router", "leave --moe-router-fusion out"),
        (config.tp_comm_overlap, "overlapped tensor-parallel communication", "leave --tp-comm-overlap out"),
        (config.cpu_offloading, "activations on the host", "leave --cpu-offloading-num-layers out"),
        (config.use_transformer_engine_op_fuser, "fused operations", "leave --use-transformer-engine-op-fuser out"),
    ):
        if requested:
            raise ModelError(
                f"the run requests {feature}, which Megatron has only in Transformer Engine, and {te_disabled()}; {remedy}, "
                "or unset the variable"
            )


def mixer_layer_spec(norm: Any, mixer: ModuleSpec) -> ModuleSpec:
    """Build a layer with only a sequence mixer, as in A, M and R: norm, mixer, residual; no feed-forward part."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(input_layernorm=norm, self_attention=mixer, self_attn_bda=get_bias_dropout_add),
    )


class Mixer(MegatronModule):
    """Base of the M and R mixers: a sequence mixer that TransformerLayer hosts in its self-attention slot.

    Adds to MegatronModule: parameters initialized unsharded from the data-parallel RNG state and then split over tensor
    parallelism (so that initial values do not depend on it), parameters that stay fp32 under ``Float16Module``, replicated
    parameters, read through :meth:`replicated`, with gradients summed over tensor parallelism, the sharded state dict of
    all of them, and the document boundaries that a state must not cross.
    """

    _version = checkpoint_layout.LAYOUT  # torch writes it into a plain state_dict, as with ``--ckpt-format torch``

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.tp_size = self.tp_group.size()
        self.tp_rank = self.tp_group.rank()
        self.context = Context(pg_collection)
        self._sharded: dict[str, int] = {}
        self._fp32: set[str] = set()

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Initializer, *, axis: int | None, fp32: bool = False
    ) -> None:
        """Register a parameter of global ``shape``, split along ``axis`` (None: :meth:`replicated`), filled by ``init``.

        Raises:
            ModelError: the axis is not divisible by the tensor-parallel size.
        """
        dtype = torch.float32 if fp32 else self.config.params_dtype
        values = filled(shape, self.config, init, dtype)
        if axis is not None:
            if shape[axis] % self.tp_size:
                raise ModelError(f"{name} has {shape[axis]} entries on axis {axis}, not a multiple of TP {self.tp_size}")
            values = values.chunk(self.tp_size, dim=axis)[self.tp_rank].clone()
            self._sharded[name] = axis
        if fp32:
            self._fp32.add(name)
        parameter = torch.nn.Parameter(values)
        if axis is None:
            mark_replicated(parameter, self.config)
        is_cut = axis is not None and self.tp_size > 1
        set_tensor_model_parallel_attributes(parameter, is_cut, -1 if axis is None else axis, 1)
        self.register_parameter(name, parameter)

    def output_projection(self, row_linear: type, width: int) -> torch.nn.Module:
        """Build a ``row_linear`` from ``width`` values, split over tensor parallelism, to the hidden size."""
        config = self.config
        return row_linear(
            width,
            config.hidden_size,
            config=config,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )

    def replicated(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``parameter`` unchanged; its gradient is summed over the tensor-parallel ranks, which hold some heads each."""
        return replicated(parameter, self.config, self.tp_group)

    def documents(
        self,
        rows_SBX: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor | None:
        """Return the document number of each row, int32 ``[B, S]``, or None (:func:`megacpp_mcore.layer_specs.documents`).

        Args:
            rows_SBX: any tensor with the rows of the whole sequence, ``[S, B, …]``.
            attention_mask, packed_seq_params: what Megatron passed to the layer.
            cache: entry of an inference context, if any: each row of the batch is then one document, and no mask is read.

        Raises:
            ModelError: the documents cannot be determined, or other parts of the run would mix them.
        """
        if cache is not None:
            return None
        return documents(
            self.config,
            self.layer_number,
            batch=rows_SBX.shape[1],
            rows=rows_SBX.shape[0],
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )

    def cache(
        self, inference_context: Any, rows_SBX: torch.Tensor, packed_seq_params: PackedSeqParams | None
    ) -> LayerCache | None:
        """Return this layer's entry in an inference context; None in training.

        Raises:
            ModelError: as :class:`megacpp_mcore.layer_specs.decode.LayerCache`.
        """
        if inference_context is None:
            return None
        refuse_decoding(self.config, self.layer_number, packed_seq_params)
        return LayerCache(inference_context, self.layer_number, rows_SBX.shape[0])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Mixer:
        """Apply ``fn`` as torch.nn.Module does, except that fp32 parameters and their gradients change only device."""
        own = [getattr(self, name) for name in self._fp32]
        kept = {id(tensor) for parameter in own for tensor in (parameter, parameter.grad) if tensor is not None}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        super()._apply(keep_dtype, recurse)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *lists: Any) -> None:
        checkpoint_layout.check_version(prefix, local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return own parameters, sharded along their tensor-parallel axis, then those of the submodules."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            self._sharded,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state.update(
                sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
            )
        return state
