"""The optimizer's kernel on a GPU against Transformer Engine's, which it stands in for."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops import adam
from tests.gpu.device import without_waiting

pytestmark = pytest.mark.gpu

SIZES = (3 * adam.BLOCK + 8, 64, 5_000_000)


def test_it_is_transformer_engines_step_with_the_clipping_and_the_copy() -> None:
    optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(size, device="cuda", generator=draw) for size in SIZES]
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    theirs = [weight.clone() for weight in weights]
    engine = optimizers.FusedAdam(theirs, **options, adam_w_mode=True)
    shards = [
        adam.Shard(weight, *(torch.zeros_like(weight) for _ in range(3)), weight.bfloat16()) for weight in weights
    ]
    table, scale = adam.Table(shards), torch.tensor([0.37], device="cuda")
    for number in range(1, 6):
        for shard, other in zip(shards, theirs, strict=True):
            shard.gradient.normal_(generator=draw)
            other.grad = shard.gradient * scale
        engine.step()
        with without_waiting():
            adam.step(table, **options, number=number, scale=scale)
    for shard, other in zip(shards, theirs, strict=True):
        assert (shard.weight - other).abs().max() < 2e-6
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(shard, name), engine.state[other][name], rtol=1e-5, atol=1e-7)
        assert shard.copy is not None
        assert torch.equal(shard.copy, shard.weight.bfloat16())
