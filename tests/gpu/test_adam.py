"""The optimizer's kernel on a GPU against Transformer Engine's, which it stands in for, and in 16 bits against PyTorch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from megacpp_mcore.ops import adam
from megacpp_mcore.ops.remainder_adam import PrecisionAwareAdam, joined
from tests.gpu.device import without_waiting

pytestmark = pytest.mark.gpu

SIZES = (3 * adam.BLOCK + 8, 64, 5_000_000)


def test_it_is_transformer_engines_step_with_the_clipping_and_the_copy() -> None:
    optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(size, device="cuda", generator=draw) for size in SIZES]
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    engine_weights = [weight.clone() for weight in weights]
    engine = optimizers.FusedAdam(engine_weights, **options, adam_w_mode=True)
    shards = [adam.Shard(weight, *(torch.zeros_like(weight) for _ in range(3)), weight.bfloat16()) for weight in weights]
    table, scale = adam.Table(shards), torch.tensor([0.37], device="cuda")
    for number in range(1, 6):
        for shard, other in zip(shards, engine_weights, strict=True):
            shard.gradient.normal_(generator=draw)
            other.grad = shard.gradient * scale
        engine.step()
        with without_waiting():
            adam.step(table, **options, number=number, scale=scale)
    for shard, other in zip(shards, engine_weights, strict=True):
        assert (shard.weight - other).abs().max() < 2e-6
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(shard, name), engine.state[other][name], rtol=1e-5, atol=1e-7)
        assert shard.copy is not None
        assert torch.equal(shard.copy, shard.weight.bfloat16())


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "on two bytes"])
def test_a_step_in_16_bits_is_the_cpus(moments: torch.dtype, gradient: torch.dtype, offset: int) -> None:
    """Main parameters, from weights and remainders, and of fp32 parameters; and again after its states have been loaded."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=draw) for size in (3 * adam.BLOCK + 8, 1_000_001)]
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "dtypes": (moments, moments)}

    def on(device: str) -> PrecisionAwareAdam:
        typed = [weight.to(device, dtype) for dtype in (torch.bfloat16, torch.float32) for weight in weights]
        params: list[Any] = [torch.cat([weight.new_zeros(offset), weight])[offset:] for weight in typed]
        for param in params:
            param.decoupled_grad = torch.empty_like(param, dtype=gradient if param.dtype == torch.bfloat16 else None)
        return PrecisionAwareAdam(params, **options, remainders=True)

    def mains(optimizer: PrecisionAwareAdam) -> list[torch.Tensor]:
        pairs = [(weight, optimizer.state[weight]["master_param"]) for weight in optimizer.param_groups[0]["params"]]
        return [joined(weight, main).cpu() if main.dtype == torch.int16 else main.cpu() for weight, main in pairs]

    here, there = on("cuda"), on("cpu")
    resumed = on("cuda")
    for number in range(1, 7):
        for optimizer in (there, here, resumed):
            draw.manual_seed(number)
            for param in optimizer.param_groups[0]["params"]:
                param.decoupled_grad.copy_(torch.randn(param.shape, generator=draw))
            optimizer.scale = None if number % 2 else torch.tensor([0.37], device=param.device)
        there.step()
        with without_waiting() if number > 1 else contextlib.nullcontext():
            here.step()
        if number == 3:
            for own, other in zip(resumed.param_groups[0]["params"], here.param_groups[0]["params"], strict=True):
                own.copy_(other)
            resumed.load_state_dict(here.state_dict())
        elif number > 3:
            resumed.step()
    # A moment whose last bit is rounded the other way moves a weight by lr times 2**-8, and the next steps' alike.
    error = 2e-6 if moments == torch.float32 else 3e-5
    for actual, again, wanted in zip(mains(here), mains(resumed), mains(there), strict=True):
        assert torch.equal(actual, again)
        assert (actual - wanted).abs().max() < error
        assert (actual - wanted).abs().mean() < 1e-7
    for param in here.param_groups[0]["params"][:2]:
        main = joined(param, here.state[param]["master_param"])
        assert ((param.float() - main).abs() <= (main.bfloat16().float() - main).abs()).all()
