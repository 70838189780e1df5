"""The functions of Megatron that the CPU lane replaces; importing this module imports Megatron."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from megatron.core.distributed import torch_fully_sharded_data_parallel
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import experts, moe_utils
from megatron.training import initialize
from torch.distributed import DeviceMesh

if TYPE_CHECKING:
    from megacpp_mcore.cpu.lane import CpuLane

_RNG_LOGGER = "megatron.core.tensor_parallel.random"
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"


def install(lane: CpuLane) -> None:
    """Replace them, until ``lane`` is removed."""
    _preserve_rng_in_warm_up(lane)
    _quiet_shared_generator_warning(lane)
    _seed_experts_by_global_index(lane)
    # With Transformer Engine installed, the fp32 router would call its GEMM, which supports only CUDA tensors.
    lane.replace("is None (the router multiplies with torch)", moe_utils, te_general_gemm=None)
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):  # without Transformer Engine it raises
        lane.replace("is never true", multi_token_prediction, is_inference_column_parallel_linear=lambda module: False)
    of_cpus = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))
    lane.replace("is of CPUs", torch_fully_sharded_data_parallel, DeviceMesh=of_cpus)


def _preserve_rng_in_warm_up(lane: CpuLane) -> None:
    """Keep the random inputs with which Megatron warms up its fused functions from affecting the initial weights.

    Their size depends on micro-batch, sequence and tensor parallelism, and they are drawn after seeding, before the model
    is built. On a GPU they advance only the device's generator; here the two are one, and a different micro-batch would
    give a different model (``training/initialize.py``).
    """
    message = "does not move the generator (weights do not depend on batches)"
    warm_up = torch.random.fork_rng(devices=[])(initialize._warmup_jit_function)
    lane.replace(message, initialize, _warmup_jit_function=warm_up)


def _quiet_shared_generator_warning(lane: CpuLane) -> None:
    """Drop the tracker's warning about CPU RNG state changes: the two generators are one here, so every fork would warn."""
    logger = logging.getLogger(_RNG_LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.getMessage() != _RNG_WARNING

    logger.addFilter(keep)
    lane.callback(logger.removeFilter, keep)
    lane.messages.append(f"CPU lane: a filter of {_RNG_LOGGER} drops its warning of {_RNG_WARNING!r}")


def _seed_experts_by_global_index(lane: CpuLane) -> None:
    """Seed every expert of a ``SequentialMLP`` by its global index.

    With ``--use-cpu-initialization`` Megatron draws all weights from one random stream that is the same on every
    expert-parallel rank, so each rank would get the *same* experts. Here a layer draws one number from that
    stream, and each expert uses a generator seeded with it plus the expert's global index: experts differ
    from one another, and EP 1 and EP 2 start from the same model (``transformer/moe/experts.py``).
    """
    stock_init = experts.SequentialMLP.__init__
    signature = inspect.signature(stock_init)

    @functools.wraps(stock_init)
    def seeded_init(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        first = arguments["num_local_experts"] * arguments["pg_collection"].ep.rank()
        indices = itertools.count(first)
        layer_seed = int(torch.randint(2**48, (), device="cpu"))
        stock_mlp = experts.MLP

        def build_expert(*mlp_args: Any, **mlp_kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(layer_seed + next(indices))  # the CPU's only
                return stock_mlp(*mlp_args, **mlp_kwargs)

        with mock.patch.object(experts, "MLP", build_expert):
            stock_init(*args, **kwargs)

    message = "seeds experts by their global index (stock gives every EP rank the same ones)"
    lane.replace(message, experts.SequentialMLP, __init__=seeded_init)
