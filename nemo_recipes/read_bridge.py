"""Reads a :class:`~megacpp_mcore.model.run.Run` from Megatron-Bridge's configuration; ``arguments.read`` is for Megatron's own.

Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import torch

from megacpp_mcore.arguments.read import layout_of
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.pattern import parse
from megacpp_mcore.model.precision import FP8_EXPERTS
from megacpp_mcore.model.run import FIELDS, Run
from megacpp_mcore.model.training import named_as


def read(chosen: Run, config: Any, processes: int) -> Run:
    """Return the run that Bridge's ``config``, overrides applied, describes for so many ``processes``.

    Model, device and settings stay those of ``chosen``, the run that the configuration was made from.

    Raises:
        LaunchError: a value of the training plan is null.
        ModelError: a combination that no run can have.
    """
    model, optimizer, mixed = config.model, config.optimizer, mixed_precision(config)
    dtypes = mixed or model
    has_plan = bool(model.te_precision_config_file)
    trained = {name: attrgetter(path)(config) for name, path in _TRAINED.items()}
    if missing := [path for name, path in _TRAINED.items() if trained[name] is None]:
        raise LaunchError(f"{', '.join(missing)} is null; expected the recipe's value, or another of its type")
    with named_as(_TRAINED):
        training = dataclasses.replace(
            chosen.training,
            precision=FP8_EXPERTS if has_plan else "bf16" if dtypes.bf16 else "fp32",
            processes=processes,
            cuda_graphs=False,  # Bridge has none of the kind that recipes capture
            **trained,
        )
    execution = {name: attrgetter(path)(config) for name, path in _EXECUTION.items()}
    fp32_reduced = config.ddp.grad_reduce_in_fp32 if mixed is None else mixed.grad_reduce_in_fp32
    run = Run(chosen.model, layout_of(model), training, chosen.model_class, settings=chosen.settings)
    execution |= {
        "distributed_optimizer": config.ddp.use_distributed_optimizer or optimizer.use_distributed_optimizer,
        "exp_avg": DTYPES.get(optimizer.exp_avg_dtype),
        "exp_avg_sq": DTYPES.get(optimizer.exp_avg_sq_dtype),
        "cuda_graph_scope": _names(model.cuda_graph_modules) if model.cuda_graph_impl != "none" else (),
        "recompute_modules": tuple(model.recompute_modules or ()),
        "own_states": DTYPES.get(optimizer.main_params_dtype) != "fp32"
        or optimizer.optimizer_cpu_offload
        or config.dist.use_megatron_fsdp,
        "fp16": dtypes.fp16,
        "fp8": dtypes.fp8,
        "grad_bytes": 2 if (dtypes.bf16 or dtypes.fp16) and not fp32_reduced else 4,
        "experts": run.has_moe,
        "own_stages": model.pipeline_model_parallel_layout is not None
        and chosen.model is not None
        and not parse(chosen.model.pattern).staged,
    }
    names = {name: field.default for name, field in FIELDS.items()} | execution
    is_set = {
        "precision": run.precision != "fp32" or dtypes.fp8 or has_plan,
        "cuda_graph_impl": model.cuda_graph_impl != "none",
    }
    return dataclasses.replace(run.carried_out(names), given=frozenset(name for name, is_so in is_set.items() if is_so))


DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Names of the dtypes in which optimizer states may be kept."""
_TRAINED = {
    "transformer_impl": "model.transformer_impl", "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size", "train_iters": "train.train_iters", "optimizer": "optimizer.optimizer",
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "adam_beta2": "optimizer.adam_beta2",
    "clip_grad": "optimizer.clip_grad", "seed": "rng.seed",
}  # fmt: skip
"""Fields of a training plan to fields of Bridge's configuration."""
_EXECUTION = {
    "gradient_accumulation_fusion": "model.gradient_accumulation_fusion", "moe_permute_fusion": "model.moe_permute_fusion",
    "moe_dispatcher": "model.moe_token_dispatcher_type", "cpu_initialization": "model.use_cpu_initialization",
    "overlap_moe_a2a": "model.overlap_moe_expert_parallel_comm", "overlap_shared_expert": "model.moe_shared_expert_overlap",
    "tp_comm_overlap": "model.tp_comm_overlap", "cuda_graph_impl": "model.cuda_graph_impl",
    "recompute_granularity": "model.recompute_granularity", "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather", "bucket_elements": "ddp.bucket_size", "num_buckets": "ddp.num_buckets",
    "manual_gc": "train.manual_gc", "log_interval": "logger.log_interval", "torch_fsdp": "dist.use_torch_fsdp2",
    "megatron_fsdp": "dist.use_megatron_fsdp", "precision_aware": "optimizer.use_precision_aware_optimizer",
}  # fmt: skip
"""Fields of an execution to fields of Bridge's configuration."""


def _names(modules: Any) -> tuple[str, ...]:
    """Return module names, from any form that Megatron accepts: a word, a list of words, or one of its enumerations."""
    listed = [modules] if isinstance(modules, str) else modules or ()
    return tuple(str(getattr(module, "name", module)) for module in listed)


def mixed_precision(config: Any) -> Any:
    """Return the mixed-precision configuration, also if ``config`` only names it; None without."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    mixed = config.mixed_precision
    return get_mixed_precision_config(mixed) if isinstance(mixed, str) else mixed
