"""Megatron's optimizers of a small model with parameters of given dtypes; needs :func:`tests.stock.one_process`."""

from __future__ import annotations

from typing import Any


def build(dtypes: dict[str, str], *, distributed: bool, **settings: Any) -> tuple[Any, Any]:
    """A model of one vector (all of one size) and one matrix for each name, and its optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16)
    model = MegatronModule(config)
    generator = torch.Generator().manual_seed(5)
    for name, dtype in dtypes.items():
        for suffix, shape in (("vector", (4,)), ("matrix", (2, 4))):
            value = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
            model.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(value))
    settings = {"optimizer": "adam", "lr": 0.1, "bf16": True, "use_distributed_optimizer": distributed} | settings
    reduced = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, reduced, model)
    return model, get_megatron_optimizer(OptimizerConfig(**settings), [chunk])


def trained(dtypes: dict[str, str], *, distributed: bool, **settings: Any) -> tuple[Any, Any]:
    """:func:`build`, and one step by gradients that are all different."""
    model, optimizer = build(dtypes, distributed=distributed, **settings)
    accumulate(model, 6)
    optimizer.step()
    return model, optimizer


def take_over(given: Any, taker: Any, format_: str) -> None:
    """Load the state of a distributed optimizer into another, in a format as upstream's methods are called."""
    taker.load_state_dict(given.state_dict())
    if format_ == "fully_reshardable":
        state = {
            index: {name: {0: value.clone()} for name, value in given._get_main_param_and_optimizer_states(its).items()}
            for index, its in enumerate(given.model_param_gbuf_map)
        }
    else:
        state = getattr(given, f"get_parameter_state_{format_}")()
    if format_ == "dp_reshardable":
        for buckets in (held for number in range(len(given.buffers)) for held in state[number].values()):
            for parameter in (entry for bucket in buckets for entry in bucket):
                parameter["padding"] = False
    getattr(taker, f"load_parameter_state_from_{format_}")(state)


def accumulate(model: Any, seed: int) -> None:
    """Give the parameters gradients that are all different."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
