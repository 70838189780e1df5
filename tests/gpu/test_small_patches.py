"""Patches that the CPU tests see with stand-ins, on Transformer Engine's modules and a GPU's memory."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megacpp_mcore.patches import moe_recompute_memory, tensor_parallel_sums
from tests import micro_batch, stock

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
S, B, H = 1024, 2, 512


@needs_engine
def test_transformer_engines_sinks_are_marked_as_sharded(process: None) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=8, softmax_type="learnable", bf16=True)
    spec = get_gpt_layer_with_transformer_engine_spec().submodules.self_attention

    def sinks() -> torch.nn.Parameter:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        sink = build_module(spec, config=config, layer_number=1, pg_collection=groups).core_attention.softmax_offset
        assert isinstance(sink, torch.nn.Parameter)
        return sink

    assert not getattr(sinks(), "tensor_model_parallel", False)
    with stock.patched(tensor_parallel_sums.PATCH):
        offset = sinks()
        assert (offset.tensor_model_parallel, offset.partition_dim) == (True, 0)
        assert offset.shape[0] == 8


def test_full_recompute_leaves_nothing_of_layers_with_experts(process: None) -> None:
    """Two tensors of the hidden states' size for each of four layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    off = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    config = TransformerConfig(
        num_layers=4, hidden_size=H, num_attention_heads=8, num_moe_experts=4, moe_router_topk=2, bf16=True,
        moe_token_dispatcher_type="alltoall", add_bias_linear=False, hidden_dropout=0.0, params_dtype=torch.bfloat16,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, **dict.fromkeys(off, False),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    model = GPTModel(config, spec, 256, S, position_embedding_type="rope").cuda().bfloat16()  # PyTorch's norms, too

    def kept() -> int:
        """Bytes that are freed after a step when the layers forget their last call."""
        tokens = micro_batch.draw_tokens(B, S).cuda()
        inputs = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": None}
        model(position_ids=torch.arange(S, device="cuda").expand(B, S), **inputs).mean().backward()
        holding = torch.cuda.memory_allocated()
        for layer in model.decoder.layers:
            layer.mlp.token_dispatcher.probs = None
        return holding - torch.cuda.memory_allocated()

    of_layers = 4 * 2 * S * B * H * 2
    assert kept() >= of_layers
    with stock.patched(moe_recompute_memory.PATCH):
        assert kept() < of_layers / 4
