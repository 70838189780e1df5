"""torch-fsdp: FSDP2 (``--use-torch-fsdp2``) supports blocks whose parameters have two dtypes, and blocks called repeatedly.

PyTorch's ``fully_shard`` gathers a block's parameters in one collective, which needs a single dtype. The few that stay fp32 in
a bf16 model (biases, decays and scales of a recurrence) are replicated instead; their gradients are averaged in one all-reduce
per step, and only the first replica counts them in the gradient norm. Modules that multi-token prediction calls at every depth
(its block, the embedding, the output layer) keep their gathered weights until the backward pass. The output layer is gathered
with the model itself, so that its weight is a plain tensor during the whole forward pass (``linear-cross-entropy``).
Optimizer state can be loaded: torch_dcp loads into existing tensors, and before the first step there are none. A checkpoint in
Megatron's ``torch`` format, saved by unsharded replicas, is copied into the model: stock reads it, but does not apply it.

Activate: applied by the spec; or ``megacpp_mcore.patches.apply(["torch-fsdp"])``.
Scope: models wrapped by TorchFullyShardedDataParallel; for ours only, unsupported runs are refused, and other modules wrapped.
Provenance: PyTorch 2.11 ``distributed/fsdp``, and the files of the record.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any
from unittest import mock

from megacpp_mcore.arguments.lowering import check_under_torch_fsdp
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.patches.machinery.record import Function, Patch, edit
from megacpp_mcore.patches.torch_adam_resume import begin, is_torch_adam

_STOCK = "megatron.core.distributed.torch_fully_sharded_data_parallel"


@edit(
    f"{_STOCK}:TorchFullyShardedDataParallel.__init__",
    "bc7cd7ff6400674367d2197a1ee0d0198583e0901270fd92192f0555f4a4c928",
)
def _by_block(original: Function, self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    import torch
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.distributed.fsdp import FSDPModule

    ours = hasattr(config, checkpoint_layout.KEY)  # other models are left to stock
    if ours:
        _check(config, ddp_config)
    stock = importlib.import_module(_STOCK)
    parameters = list(module.parameters())
    is_mixed = len({parameter.dtype for parameter in parameters}) > 1
    replicated = [parameter for parameter in parameters if is_mixed and parameter.dtype == torch.float32]
    shard = functools.partial(stock.fully_shard, ignored_params=set(replicated))
    if ours and not args:
        kwargs.setdefault("sub_modules_to_wrap", {TransformerLayer, LanguageModelEmbedding})
    with mock.patch.object(stock, "fully_shard", shard):
        original(self, config, ddp_config, module, *args, **kwargs)
    self.whole_parameters = replicated
    device = self.device_mesh.device_type
    for parameter in replicated:
        parameter.data = parameter.data.to(device)
        parameter.shared = self.process_group.rank() > 0  # in Megatron: another rank counts it in the norm
    module.set_reshard_after_forward(False, recurse=False)  # the backward pass needs its weights first
    if config.mtp_num_layers:
        for submodule in module.modules():
            if isinstance(submodule, LanguageModelEmbedding | MultiTokenPredictionBlock):
                for inner in submodule.modules():
                    if isinstance(inner, FSDPModule):
                        inner.set_reshard_after_forward(False)


def _check(config: Any, ddp_config: Any) -> None:
    """Refuse a run of our model that FSDP2 would train wrongly, or not at all."""
    from megatron.training import global_vars

    run = {
        "pipeline parallelism": config.pipeline_model_parallel_size,
        "expert parallelism": config.expert_model_parallel_size,
        "tensor parallelism": config.tensor_model_parallel_size,
        "context parallelism": config.context_parallel_size,
        "calculate_per_token_loss": config.calculate_per_token_loss,
        "cuda_graph_impl": config.cuda_graph_impl,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
    }
    if config.recompute_granularity == "full":
        run["MTP depths under --recompute-granularity full"] = config.mtp_num_layers or 1
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    if arguments is not None and (arguments.save or arguments.load):
        run["ckpt_format"] = arguments.ckpt_format
    check_under_torch_fsdp(run)


@edit(
    f"{_STOCK}:TorchFullyShardedDataParallel.finish_grad_sync",
    "e7a290299e253eb6500203d04d0485b17c5a3a2cb6055d54d152704d5b2d2a67",
)
def _with_whole_parameters(original: Function, self: Any, force_all_reduce: bool = False) -> None:
    """Replace ``TorchFullyShardedDataParallel.finish_grad_sync``, called once a step."""
    import torch

    original(self, force_all_reduce)
    trained = [parameter for parameter in getattr(self, "whole_parameters", ()) if parameter.grad is not None]
    if trained:
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in trained])
        torch.distributed.all_reduce(flat, group=self.process_group)
        flat /= self.process_group.size()
        for parameter, mean in zip(trained, flat.split([param.numel() for param in trained]), strict=True):
            # Megatron's optimizer reads gradients of fp32 parameters in a bf16 model from here.
            parameter.grad = parameter.main_grad = mean.view_as(parameter)


@edit(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.state_dict",
    "70accfba5af8c8e3ec3a5a16adb2ebdb5fdaeb83b5ffb814ab6774fdfe3f2ba9",
)
def _with_state_to_load(original: Function, self: Any, is_loading: bool = False) -> Any:
    """Replace ``ChainedOptimizer.state_dict()``, which the loader of torch_dcp calls with ``is_loading``."""
    for optimizer in self.chained_optimizers if is_loading else ():
        adam = optimizer.optimizer
        if not adam.state and is_torch_adam(adam):
            begin(adam)
        elif not adam.state:
            optimizer.init_state_fn(adam, optimizer.config)
            for group in adam.param_groups:
                group.setdefault("step", 0)  # Transformer Engine's Adam counts steps there
    return original(self)


@edit(
    f"{_STOCK}:TorchFullyShardedDataParallel.load_state_dict",
    "f33082399a2b7735b266cbcc0fe7444cafb430631d107d8b2e849c4c703a0a5e",
)
def _with_whole_tensors(original: Function, self: Any, state_dict: Any, strict: bool = True) -> None:
    """Replace ``TorchFullyShardedDataParallel.load_state_dict``, which does nothing.

    torch_dcp loads in place. A ``torch`` checkpoint arrives as replicated DTensors, which Megatron creates even for buffers and
    unsharded parameters.
    """
    from torch.distributed.tensor import DTensor

    read = {name for name, t in state_dict.items() if isinstance(t, DTensor) and t.placements[0].is_replicate()}
    if not read:
        return
    own = self.module.state_dict()
    values = {
        name: t.to_local() if name in read and not isinstance(own.get(name), DTensor) else t for name, t in state_dict.items()
    }
    self.module.load_state_dict(values, strict=strict)


PATCH = Patch(
    name="torch-fsdp",
    fixes=(
        "under --use-torch-fsdp2 a block whose parameters have two dtypes fails in its first forward pass ('FSDP expects "
        "uniform original parameter dtype'); what multi-token prediction re-uses is gathered once more at every depth; a "
        "checkpoint cannot be loaded with its optimizer (TypeError: 'is_loading', or KeyError: 'step'); one in torch format is "
        "read, and the model keeps its random weights"
    ),
    source=f"megatron-core 0.19.2, {_STOCK.replace('.', '/')}.py, megatron/core/optimizer/optimizer.py",
    edits=(_by_block, _with_whole_parameters, _with_whole_tensors, _with_state_to_load),
    seam=(
        "the constructor wraps, and names fully_shard in its module; finish_grad_sync is called once a step has its gradients; "
        "the loader of torch_dcp reads state_dict first"
    ),
    leaves_alone=(
        "Megatron-FSDP and DDP; the dtype of reductions and of sharded gradients, which is the parameters'; what is saved"
    ),
    cost="the fp32 parameters of a bf16 model, and their optimizer states, are on every replica",
    retire_when="fully_shard groups parameters by dtype, and upstream lets a model say what is not resharded",
)
