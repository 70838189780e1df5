"""The patch expert-counts: routers of a 16-bit model count in fp32, stock's and ours.

Shape legend: S sequence, B batch, D hidden, E experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.patches.expert_counts import PATCH
from tests import stock

S, B, D, E, MICRO_BATCHES = 8, 2, 16, 4, 300


def wrapped_router(ours: bool, **settings: Any) -> Any:
    """A router in Float16Module, as Megatron's set-up leaves it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.dist_utils import _wrap_with_mp_wrapper

    from megacpp_mcore.layer_specs.router import Router
    from megacpp_mcore.ops.router.reference import route

    config = TransformerConfig(
        num_layers=1, hidden_size=D, num_attention_heads=2, num_moe_experts=E, moe_router_topk=2,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32",
        use_cpu_initialization=True, **settings,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = Router(config, groups, route=route) if ours else TopKRouter(config, groups)
    router.set_layer_number(1)
    return _wrap_with_mp_wrapper([router], config, Float16Module)[0].module.train()


def count(router: Any) -> torch.Tensor:
    """Runs the micro-batches; returns the tokens ``[E]`` of each expert in whole numbers."""
    draw, routed_E = torch.Generator().manual_seed(0), torch.zeros(E, dtype=torch.int64)
    for _ in range(MICRO_BATCHES):
        hidden_SBD = torch.randn(S, B, D, generator=draw).to(router.weight.dtype)
        routed_E += router(hidden_SBD)[1].sum(0)
    return routed_E


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
def test_counts_are_the_tokens_that_were_routed(process: Path, ours: bool, precision: str) -> None:
    """And the buffer stays where the wrapped model has it, as a CUDA graph requires; without the patch counts are rounded."""
    for patches in ((), (PATCH,)):
        with stock.patched(*patches):
            router = wrapped_router(ours, **{precision: True})
            place = router.local_tokens_per_expert.data_ptr()
            routed_E = count(router)
            counted_E = router.local_tokens_per_expert
            assert counted_E.data_ptr() == place
            assert counted_E.long().equal(routed_E) is bool(patches)
            assert "local_tokens_per_expert" not in router.state_dict()


def test_the_global_loss_divides_by_all_micro_batches(process: Path) -> None:
    with stock.patched(PATCH):
        router = wrapped_router(
            False, bf16=True, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01
        )
        routed_E = count(router)
        assert router.ga_steps == MICRO_BATCHES
        assert router.global_tokens_per_expert.sum() == routed_E.sum()
