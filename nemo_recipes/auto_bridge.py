"""Exported models in Megatron-Bridge's AutoBridge: ``import_ckpt``, ``export_ckpt``, ``save_hf_pretrained`` and the like.

:func:`megacpp_mcore.nemo_recipes.bridge.prepare` registers it. Weights are matched by keys and offsets of Megatron's sharded
state, for which the export has a table (:mod:`megacpp_mcore.huggingface.names`), so every layout is read and written. Written
against megatron-bridge 0.6.2.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple, MegatronModelBridge
from megatron.bridge.training import model_load_save
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.utils import get_model_config, unwrap_model

from megacpp_mcore.arguments import lowering
from megacpp_mcore.cpu import lane
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.huggingface.load import model_of
from megacpp_mcore.huggingface.names import Tensor, tensors
from megacpp_mcore.model import Model, hybrid
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.nemo_recipes.provider import NAM56RHybridProvider, NAM56RProvider, provider
from megacpp_mcore.settings import from_environment
from megacpp_mcore.util import host


@MegatronModelBridge.register_bridge(source="NAM56RForCausalLM", target=HybridModel, model_type="nam56r")
class NAM56RBridge(MegatronModelBridge):
    """The mapping of the model of ``MEGACPP_CONFIG``, or of the preset that the configuration is of."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        """Return the provider of the model, in the dtype of the export, with Transformer Engine where that is installed."""
        dtype = self.dtype_from_hf(hf_pretrained.config, default=torch.float32)
        device = "cpu" if lane.is_active() else "cuda"
        has_engine = device == "cuda" and host.version("transformer-engine")
        plan = Training(
            device=device,
            precision="bf16" if dtype == torch.bfloat16 else "fp32",
            transformer_impl="transformer_engine" if has_engine else "local",
        )
        model = _model(hf_pretrained)
        run = Run(model=model, training=plan, settings=from_environment())
        model_provider = provider(run)
        model_provider.hybrid_layer_pattern = hybrid.plan(model, run.layout).text
        model_provider.vocab_size, model_provider.should_pad_vocab = hf_pretrained.config.vocab_size, True
        model_provider.make_vocab_size_divisible_by = lowering.padding_of(1)
        model_provider.bf16, model_provider.params_dtype = dtype == torch.bfloat16, dtype
        return model_provider

    def mapping_registry(self) -> NoReturn:
        """Refuse what Bridge does parameter by parameter."""
        raise NotImplementedError("NAM56R has no mapping by parameter: adapters and quantized exports are not supported")

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: Any, allowed_mismatched_params: list[str] | None = None
    ) -> list[Any]:
        """Copy this rank's part of every weight of the export; rows that pad the vocabulary become zeros.

        Raises:
            CheckpointError: a weight is missing, or has another shape; names it.
        """
        for tensor, piece in _pieces(_model(hf_pretrained), megatron_model):
            value = hf_pretrained.state.get(tensor.name)
            if value is None or tuple(value.shape) != tensor.shape:
                what = "is missing" if value is None else f"has the shape {list(value.shape)}"
                raise CheckpointError(f"{tensor.name} {what}, expected {list(tensor.shape)}; export the model again")
            own = value[_place(piece)].reshape(-1, *piece.local_shape[1:])
            with torch.no_grad():
                piece.data[len(own) :] = 0
                piece.data[: len(own)].copy_(own)
        return megatron_model if isinstance(megatron_model, list) else [megatron_model]

    def stream_weights_megatron_to_hf(
        self, megatron_model: Any, hf_pretrained: Any, cpu: bool = True, show_progress: bool = True,
        conversion_tasks: Any = None, merge_adapter_weights: bool = True, weight_dtype: torch.dtype | None = None,
    ) -> Iterator[HFWeightTuple]:  # fmt: skip
        """Yield every weight of the model on every rank, gathered one by one."""
        if conversion_tasks is not None:
            self.mapping_registry()
        model, own = _model(hf_pretrained), defaultdict(list)
        for _, piece in _pieces(model, megatron_model):
            if is_main_replica(piece.replica_id):
                own[piece.key].append(piece)
        places: list[Any] = [None] * dist.get_world_size()
        # A piece without its data: what another rank needs to receive it.
        dist.all_gather_object(places, {key: [piece.without_data() for piece in own[key]] for key in own})
        device = next((pieces[0].data.device for pieces in own.values()), "cpu")
        for tensor in tensors(model):
            full: Any = None
            for rank, of_rank in enumerate(places):
                for number, piece in enumerate(of_rank.get(tensor.key, ())):
                    if rank == dist.get_rank():
                        data = own[tensor.key][number].data.detach().contiguous()
                    else:
                        data = torch.empty(piece.local_shape, dtype=piece.dtype, device=device)
                    dist.broadcast(data, src=rank)
                    full = data.new_zeros(piece.global_shape) if full is None else full
                    full[_place(piece)] = data
            if full is None:
                raise CheckpointError(f"no rank has {tensor.key}; expected all weights of {model.name}")
            full = full[: tensor.shape[0]].to(weight_dtype or full.dtype)
            yield HFWeightTuple(tensor.name, full.cpu() if cpu else full)


def _marked(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Bridge's ``save_megatron_model``, whose low-memory path loses what marks a checkpoint of our layers.

    That path builds the checkpoint's metadata after deleting the model, which marks them.
    """

    @functools.wraps(original)
    def save_megatron_model(model: list[Any], *args: Any, low_memory_save: bool = False, **kwargs: Any) -> None:
        is_ours = isinstance(get_model_config(model[0]), NAM56RHybridProvider | NAM56RProvider)
        original(model, *args, low_memory_save=low_memory_save and not is_ours, **kwargs)

    return save_megatron_model


model_load_save.save_megatron_model = _marked(model_load_save.save_megatron_model)


def _model(hf_pretrained: Any) -> Model:
    config = getattr(hf_pretrained, "config", hf_pretrained)
    return model_of(config.to_dict(), str(config.name_or_path or "the configuration"))


def _pieces(model: Model, megatron_model: Any) -> Iterator[tuple[Tensor, ShardedTensor]]:
    """Yield this rank's parts of every weight; their data are views of the parameters."""
    table = {tensor.key: tensor for tensor in tensors(model)}
    for chunk in megatron_model if isinstance(megatron_model, list) else [megatron_model]:
        state = unwrap_model(chunk).sharded_state_dict(metadata={})
        apply_factories(state)
        for piece in nested_values(state):
            if isinstance(piece, ShardedTensor):
                if piece.key not in table:
                    raise CheckpointError(
                        f"Megatron's model has {piece.key}, but {model.name} does not; name its settings file"
                    )
                yield table[piece.key], piece


def _place(piece: ShardedTensor) -> tuple[slice, ...]:
    sizes = (*(1,) * piece.prepend_axis_num, *piece.local_shape)
    return tuple(slice(first, first + size) for first, size in zip(piece.global_offset, sizes, strict=True))
