"""The patch sp-norm-gradients: a stock GPT under TP 2 with sequence parallelism, in real processes over gloo, against TP 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import micro_batch, stock
from tests.patches.test_dsa_index_cache import named_parameters

HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH, MICROBATCHES, LAYERS = 32, 4, 64, 16, 2, 2, 4
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One way to train: in DDP, finalized by the schedule or afterwards by the loop, over several calls of the schedule."""

    patched: bool = True
    wrapped: bool = False
    configured: bool = False
    afterwards: bool = False
    calls: int = 1


STOCK, TWICE = "stock, bare", "patched, bare, twice"
CASES = {
    STOCK: Case(patched=False),
    "patched, bare": Case(),
    TWICE: Case(calls=2),
    "patched, wrapped, twice": Case(wrapped=True, calls=2),
    "patched, finalized by the schedule": Case(wrapped=True, configured=True),
    "patched, twice, finalized by the loop": Case(wrapped=True, afterwards=True, calls=2),
}


def gpt_chunk(config: Any, vp_stage: int | None) -> Any:
    """A chunk of a stock GPT with QK norms and biases; its norms are ours, for lack of a stock one for CPU with SP."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from megacpp_mcore.layer_specs.parts import TorchNorm

    layer = get_gpt_layer_local_spec(qk_layernorm=True)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = TorchNorm
    count = get_num_layers_to_build(config, vp_stage)
    block = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=TorchNorm)
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(**where),
        "post_process": parallel_state.is_pipeline_last_stage(**where),
    }
    return GPTModel(
        config, block, VOCABULARY, SEQUENCE, **ends, vp_stage=vp_stage, share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )  # fmt: skip


def fill(chunk: Any, rank: int, world: int) -> None:
    """Give every parameter values that depend on its name alone, cut over tensor parallelism."""
    for name, parameter in named_parameters(chunk):
        generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
        shape, cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        axis = parameter.partition_dim if cut else 0
        if cut:
            shape[axis] *= world
        whole = torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name and "weight" in name else 0.0)
        with torch.no_grad():
            parameter.copy_(whole.chunk(world, axis)[rank] if cut else whole)


def forward_step(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> Any:
    tokens, labels = next(data)
    mask = micro_batch.causal_mask(SEQUENCE)
    output = model(tokens, torch.arange(SEQUENCE).expand(BATCH, -1), mask, labels=labels)
    return output, lambda losses: (losses.float().mean(), {})


def batches(call: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(call)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def gradients(case: Case, virtual: int | None) -> dict[str, torch.Tensor]:
    """This rank's gradients after one step of ``case``."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=48, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, sequence_parallel=tensor > 1,
        virtual_pipeline_model_parallel_size=virtual, pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,  # as megatron.training sets it
        qk_layernorm=True, normalization="LayerNorm", hidden_dropout=0.0, attention_dropout=0.0,
        masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    chunks = []
    for stage in range(virtual or 1):
        chunk = gpt_chunk(config, stage if virtual else None)
        fill(chunk, parallel_state.get_tensor_model_parallel_rank(), tensor)
        chunks.append(chunk)
    bare = list(chunks)
    if case.wrapped:
        chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads if case.configured else None
    for call in range(case.calls):
        get_forward_backward_func()(
            forward_step_func=forward_step, model=chunks, num_microbatches=MICROBATCHES, seq_length=SEQUENCE,
            data_iterator=[batches(call) for _ in chunks] if virtual else batches(call),
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
    if case.afterwards:
        finalize_model_grads(chunks)
    found = {}
    for chunk in bare:
        for name, parameter in named_parameters(chunk):
            gradient = parameter.main_grad if case.wrapped else parameter.grad
            axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            found[name] = _whole(gradient, axis)
    return found


def _whole(gradient: torch.Tensor, axis: int | None) -> torch.Tensor:
    """The gradient of all tensor-parallel ranks: joined along ``axis``, or one above the other when it is replicated."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    torch.distributed.all_gather(parts, gradient.contiguous(), group=group)
    return torch.stack(parts) if axis is None else torch.cat(parts, dim=axis)


def main(folder: Path, tensor: str, virtual: str, *names: str) -> dict[str, dict[str, torch.Tensor]]:
    """By case and parameter the gradients of the stages of one rank of a run."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megacpp_mcore.patches.sp_norm_gradients import PATCH

    pipeline, stages, results = int(os.environ["WORLD_SIZE"]) // int(tensor), int(virtual) or None, {}
    sizes = {"tensor_model_parallel_size": int(tensor), "pipeline_model_parallel_size": pipeline}
    with stock.one_process(folder / "store", **sizes, virtual_pipeline_model_parallel_size=stages):
        model_parallel_cuda_manual_seed(1)
        for name in names or CASES:
            with stock.patched(*[PATCH] * CASES[name].patched):
                results[name] = gradients(CASES[name], stages)
    return results


def run(folder: Path, *, pipeline: int = 1, virtual: int = 0) -> Any:
    """The gradients by case and parameter of a run with ``2 × pipeline`` processes."""
    merged: dict[str, dict[str, torch.Tensor]] = {name: {} for name in CASES}
    for of_rank in stock.on_ranks("tests.distributed.test_sp_norm_gradients", 2 * pipeline, folder, "2", str(virtual)):
        for name, found in of_rank.items():
            merged[name].update(found)
    return merged


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Of this process."""
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        return main(tmp_path_factory.mktemp("one"), "1", "0", STOCK, TWICE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("two"))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert float(min(gradient.norm() for gradient in expected.values())) > 1e-4
    for name, gradient in expected.items():
        # What is replicated, every rank has whole.
        for rank, part in enumerate(found[name] if name in NORMS_AND_BIASES else [found[name]]):
            whole = gradient[0] if name in NORMS_AND_BIASES else gradient
            assert difference(part, whole) < TOLERANCE, f"{name}, rank {rank}"


_LAYER = (
    "input_layernorm.weight", "input_layernorm.bias", "self_attention.linear_proj.bias",
    "self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias",
    "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias", "mlp.linear_fc2.bias",
)  # fmt: skip
NORMS_AND_BIASES = {f"decoder.layers.{layer}.{name}" for layer in range(LAYERS) for name in _LAYER} | {
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
}
"""Every replicated parameter of the model."""


def test_without_the_patch_each_rank_has_a_part(one: Any, two: Any) -> None:
    expected = one[STOCK]
    for parameter, gradient in two[STOCK].items():
        if parameter not in NORMS_AND_BIASES:
            assert difference(gradient, expected[parameter]) < TOLERANCE, parameter
            continue
        first, second = gradient
        assert difference(first, second) > 0.1, parameter
        assert difference(first, expected[parameter][0]) > 0.1, parameter
        assert difference(first + second, expected[parameter][0]) < TOLERANCE, parameter


@pytest.mark.parametrize("name", [name for name in CASES if name != STOCK])
def test_gradients_are_those_of_one_process(name: str, one: Any, two: Any) -> None:
    """In every way to train, also where the schedule or the loop finalizes: never summed twice."""
    check_equal(two[name], one[TWICE if CASES[name].calls == 2 else STOCK])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("virtual", [0, 2])
def test_under_pipeline_parallelism(virtual: int, one: Any, tmp_path: Path) -> None:
    found = run(tmp_path, pipeline=2, virtual=virtual)
    norm = "decoder.layers.0.input_layernorm.weight"
    assert difference(found[STOCK][norm][0], one[STOCK][norm][0]) > 0.1
    for name, case in CASES.items():
        if name != STOCK:
            check_equal(found[name], one[TWICE if case.calls == 2 else STOCK])
