"""Reads a :class:`~megacpp_mcore.model.run.Run` from Megatron-Bridge's configuration; ``arguments.read`` is for Megatron's own.

Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megacpp_mcore.arguments.read import layout_of
from megacpp_mcore.model.pattern import parse
from megacpp_mcore.model.precision import FP8_EXPERTS
from megacpp_mcore.model.run import FIELDS, Run


def read(chosen: Run, config: Any, processes: int) -> Run:
    """Return the run that ``config`` describes.

    Args:
        chosen: the run that the configuration was made from: its model, device and settings stay.
        config: Bridge's ``ConfigContainer``, overrides applied.
        processes: number of processes.

    Raises:
        ModelError: a combination that no run can have.
    """
    model, train, optimizer, mixed = config.model, config.train, config.optimizer, mixed_precision(config)
    dtypes = mixed or model
    has_plan = bool(model.te_precision_config_file)
    training = dataclasses.replace(
        chosen.training,
        precision=FP8_EXPERTS if has_plan else "bf16" if dtypes.bf16 else "fp32",
        transformer_impl=model.transformer_impl,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        train_iters=train.train_iters,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta2=optimizer.adam_beta2,
        clip_grad=optimizer.clip_grad,
        seed=config.rng.seed,
        processes=processes,
        cuda_graphs=False,  # Bridge has none of the kind that recipes capture
    )
    found = {name: _FOUND[name](config) for name in _FOUND}
    fp32_reduced = config.ddp.grad_reduce_in_fp32 if mixed is None else mixed.grad_reduce_in_fp32
    run = Run(chosen.model, layout_of(model), training, chosen.host, settings=chosen.settings)
    found |= {
        "fp16": dtypes.fp16,
        "fp8": dtypes.fp8,
        "grad_bytes": 2 if (dtypes.bf16 or dtypes.fp16) and not fp32_reduced else 4,
        "experts": run.has_moe,
        "own_stages": model.pipeline_model_parallel_layout is not None
        and chosen.model is not None
        and not parse(chosen.model.pattern).staged,
    }
    names = {name: known.default for name, known in FIELDS.items()} | found
    said = {
        "precision": run.precision != "fp32" or dtypes.fp8 or has_plan,
        "cuda_graph_impl": model.cuda_graph_impl != "none",
    }
    return dataclasses.replace(run.carried_out(names), given=frozenset(name for name, is_so in said.items() if is_so))


_FOUND: dict[str, Any] = {
    "gradient_accumulation_fusion": lambda config: config.model.gradient_accumulation_fusion,
    "distributed_optimizer": lambda config: (
        config.ddp.use_distributed_optimizer or config.optimizer.use_distributed_optimizer
    ),
    "overlap_grad_reduce": lambda config: config.ddp.overlap_grad_reduce,
    "overlap_param_gather": lambda config: config.ddp.overlap_param_gather,
    "moe_permute_fusion": lambda config: config.model.moe_permute_fusion,
    "manual_gc": lambda config: config.train.manual_gc,
    "moe_dispatcher": lambda config: config.model.moe_token_dispatcher_type,
    "bucket_elements": lambda config: config.ddp.bucket_size,
    "num_buckets": lambda config: config.ddp.num_buckets,
    "log_interval": lambda config: config.logger.log_interval,
    "cpu_initialization": lambda config: config.model.use_cpu_initialization,
    "cuda_graph_impl": lambda config: config.model.cuda_graph_impl,
    "cuda_graph_scope": lambda config: (
        _names(config.model.cuda_graph_modules) if config.model.cuda_graph_impl != "none" else ()
    ),
    "torch_fsdp": lambda config: config.dist.use_torch_fsdp2,
    "megatron_fsdp": lambda config: config.dist.use_megatron_fsdp,
    "overlap_moe_a2a": lambda config: config.model.overlap_moe_expert_parallel_comm,
    "overlap_shared_expert": lambda config: config.model.moe_shared_expert_overlap,
    "tp_comm_overlap": lambda config: config.model.tp_comm_overlap,
    "recompute_granularity": lambda config: config.model.recompute_granularity,
    "recompute_modules": lambda config: tuple(config.model.recompute_modules or ()),
    "own_states": lambda config: bool(
        config.optimizer.optimizer != "adam"
        or config.optimizer.use_precision_aware_optimizer
        or config.optimizer.optimizer_cpu_offload
        or config.dist.use_megatron_fsdp
    ),
}
"""Fields of an execution, each as Bridge's configuration has it."""


def _names(modules: Any) -> tuple[str, ...]:
    """Module names, from any form that Megatron accepts: a word, a list of words, or one of its enumerations."""
    listed = [modules] if isinstance(modules, str) else modules or ()
    return tuple(str(getattr(one, "name", one)) for one in listed)


def mixed_precision(config: Any) -> Any:
    """Return the mixed-precision configuration, also if ``config`` only names it; None without."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    mixed = config.mixed_precision
    return get_mixed_precision_config(mixed) if isinstance(mixed, str) else mixed
