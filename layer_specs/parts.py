"""What the block families share: linear and norm choices, and parameters that tensor parallelism and fp32 need care for.

Shape legend: S sequence (of this rank), B batch, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from megacpp_mcore.errors import ModelError

if TYPE_CHECKING:
    from megatron.core.models.backends import BackendSpecProvider

Initializer = Callable[[torch.Tensor], Any]


class TorchNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` whose gradients are right under sequence parallelism.

    Megatron-Core 0.19's own wrapper refuses sequence parallelism, and its default norm follows whatever ``apex`` can be
    imported, so norms are named explicitly here.
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
    """A bias-free linear layer that every tensor-parallel rank holds whole, with Transformer Engine's call signature.

    Stands in for ``TELinear(parallel_mode="duplicated")`` where there is no Transformer Engine.
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
            raise ModelError(
                f"DuplicatedLinear got bias={bias}, parallel_mode={parallel_mode!r}; expected no bias, duplicated"
            )
        self.weight = torch.nn.Parameter(_filled((output_size, input_size), config, init_method, config.params_dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``x [..., in] -> ([..., out], None)``."""
        return torch.nn.functional.linear(x, self.weight), None


@dataclass(frozen=True)
class Parts:
    """The linear, norm and expert classes of one ``transformer_impl``."""

    column_linear: type
    row_linear: type
    down_linear: type
    duplicated_linear: type
    norm: Any
    backend: BackendSpecProvider


def parts_for(config: TransformerConfig) -> Parts:
    """The classes to build layers from: Transformer Engine's or Megatron's local ones, as ``transformer_impl`` says.

    Raises:
        ModelError: for another implementation.
    """
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TELinear
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        provider = TESpecProvider()
        return Parts(
            column_linear=provider.column_parallel_linear(),
            row_linear=provider.row_parallel_linear(),
            down_linear=TELinear,
            duplicated_linear=TELinear,
            norm=provider.layer_norm(rms_norm=True),
            backend=provider,
        )
    if config.transformer_impl == "local":
        from megatron.core.models.backends import LocalSpecProvider

        return Parts(
            column_linear=ColumnParallelLinear,
            row_linear=RowParallelLinear,
            down_linear=ColumnParallelLinear,
            duplicated_linear=DuplicatedLinear,
            norm=TorchNorm,
            backend=LocalSpecProvider(),
        )
    raise ModelError(f"transformer_impl is {config.transformer_impl!r}; expected 'transformer_engine' or 'local'")


class Mixer(MegatronModule):
    """Base of the M and R mixers: a sequence mixer that TransformerLayer hosts in its self-attention slot.

    Adds to MegatronModule: parameters that are built whole from the data-parallel random state and cut over tensor
    parallelism (so that initial values do not depend on it), parameters that stay fp32 under ``Float16Module``, replicated
    parameters whose gradients are summed over tensor parallelism, and the sharded state dict of them all.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.tp_size = self.tp_group.size()
        self.tp_rank = self.tp_group.rank()
        self._sharded: dict[str, int] = {}
        self._fp32: set[str] = set()

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Initializer, *, axis: int | None, fp32: bool = False
    ) -> None:
        """Register a parameter of global ``shape``, cut along ``axis`` (None: replicated), filled by ``init``."""
        dtype = torch.float32 if fp32 else self.config.params_dtype
        whole = _filled(shape, self.config, init, dtype)
        if axis is not None:
            if shape[axis] % self.tp_size:
                raise ModelError(f"{name} has {shape[axis]} entries on axis {axis}, no multiple of TP {self.tp_size}")
            whole = whole.chunk(self.tp_size, dim=axis)[self.tp_rank].clone()
            self._sharded[name] = axis
        if fp32:
            self._fp32.add(name)
        parameter = torch.nn.Parameter(whole)
        set_tensor_model_parallel_attributes(parameter, axis is not None and self.tp_size > 1, axis or 0, 1)
        self.register_parameter(name, parameter)

    def replicated(self, parameter: torch.Tensor) -> torch.Tensor:
        """``parameter`` as it is, its gradient summed over the tensor-parallel ranks, each of which sees some heads."""
        return copy_to_tensor_model_parallel_region(parameter, group=self.tp_group)

    def replicated_linear(self, hidden_SBD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Project the whole sequence with a replicated ``weight [out, D]``; gradients are summed over ranks.

        Under sequence parallelism the input is gathered, and its gradient reduce-scattered.
        """
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(
                hidden_SBD, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            whole = self.replicated(hidden_SBD)
        return torch.nn.functional.linear(whole, self.replicated(weight))

    def refuse_unsupported(self, inference_context: Any) -> None:
        """Raise ModelError for what training-only mixers cannot do yet."""
        if inference_context is not None:
            raise ModelError(
                f"{type(self).__name__} (layer {self.layer_number}): inference caches are not supported yet"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Mixer:
        """Apply ``fn`` as torch.nn.Module does, but let fp32 parameters (and their gradients) change device only."""
        own = [getattr(self, name) for name in self._fp32]
        kept = {id(tensor) for parameter in own for tensor in (parameter, parameter.grad) if tensor is not None}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        super()._apply(keep_dtype, recurse)
        return self

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Own parameters cut along their tensor-parallel axis, then those of the sub-modules."""
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
                sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return state


def ones(tensor: torch.Tensor) -> None:
    """Fill with 1."""
    tensor.fill_(1.0)


def constant(value: float) -> Initializer:
    """An initializer that fills with ``value``."""
    return lambda tensor: tensor.fill_(value)


def inverse_softplus_of_step(tensor: torch.Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """Fill so that softplus of it is log-uniform in [low, high] (mamba-ssm 2.3.2.post1, ``dt_bias``)."""
    tensor.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
    tensor.add_(torch.log(-torch.expm1(-tensor)))


def _filled(shape: tuple[int, ...], config: TransformerConfig, init: Initializer, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of ``shape``, drawn in fp32 on the device Megatron initializes on, then cast."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    if config.perform_initialization:
        with torch.no_grad():
            init(tensor)
    return tensor.to(dtype)
