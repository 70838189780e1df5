"""Inputs of the ops between MLA's projections and its core attention, and everything that comes out: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megacpp_mcore.ops.mla_projection.reference import rotation_table
from megacpp_mcore.ops.testing import assert_parity, worst_row
from tests.ops.outcomes import leaves, with_gradients


@dataclass(frozen=True)
class Case:
    """One call: the op, what gets a gradient by name, and all else."""

    name: str
    op: str
    leaves: dict[str, torch.Tensor]
    others: dict[str, Any] = field(default_factory=dict)


def cases(
    S: int,
    B: int,
    H: int,
    *,
    width: int = 64,
    hidden: int = 96,
    indexer_heads: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Iterator[Case]:
    """What A layers call, with every width ``width``; inputs as projections leave them, some in parts of wider tensors."""
    generator = torch.Generator(device).manual_seed(S)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    angle_SP = torch.rand(S, width // 2, generator=generator, device=device) * 6
    table_SR = rotation_table(angle_SP.repeat(1, 2))
    turned: dict[str, Any] = {"rotation_SR": torch.cat([table_SR, table_SR], -1)[:, :width]}
    up_HXC, side = normal(H, 2 * width, width, scale=width**-0.5), normal(S, B, 3 * width)
    yield Case("absorbed queries", "project", {"x_SBHX": normal(S, B, H, 2 * width), "weight_HCK": up_HXC[:, :width]}, turned)
    yield Case("outputs", "project", {"x_SBHX": normal(S, B, H, width), "weight_HCK": up_HXC[:, width:].mT})
    yield Case("queries", "project", {"x_SBHX": normal(S, B, H, 2 * width)}, turned)
    yield Case("the indexer's", "project", {"x_SBHX": normal(S, B, H, width)}, turned | {"interleaved": False})
    yield Case(
        "keys and values",
        "keys_and_values",
        {"kv_SBHX": normal(S, B, H, 2 * width), "rotary_SBR": side[..., 2 * width :]},
        turned | {"value_dim": width},
    )
    yield Case(
        "latent keys",
        "keys_and_values",
        {"kv_SBHX": side[..., None, :width], "rotary_SBR": side[..., 2 * width :]},
        turned | {"value_dim": 0, "interleaved": False},
    )
    downs = {
        "q_down_QD": normal(width, hidden, scale=hidden**-0.5),
        "kv_down_XD": normal(2 * width, hidden, scale=hidden**-0.5),
        "q_norm_Q": (1 + normal(width, 2, scale=0.3))[:, 0],
        "kv_norm_L": (1 + normal(width, 2, scale=0.3))[:, 1],
    }
    yield Case("latents", "latents", {"hidden_SBD": normal(S, B, hidden)} | downs, {"eps": 1e-5})
    weights = {
        "q_up_XQ": normal(indexer_heads * width, 8, scale=0.5),
        "k_down_RD": normal(width, hidden, scale=hidden**-0.5),
        "k_norm_R": (1 + normal(width, 2, scale=0.3))[:, 0],
        "k_bias_R": normal(width, 2)[:, 1],
        "w_down_ND": normal(indexer_heads, hidden, scale=hidden**-0.5),
    }
    inputs = {"hidden_SBD": normal(S, B, hidden), "latent_SBQ": normal(S, B, 8), "eps": 1e-5, "scale": 0.3}
    for interleaved in (False, True):
        yield Case("the indexer's inputs", "indexer_inputs", weights, inputs | turned | {"interleaved": interleaved})


def outcome(fn: Callable[..., Any], case: Case, cast: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name; ``cast``: what all leaves are cast to first."""
    own = leaves(case.leaves, cast)
    others = {
        name: other.to(cast) if cast is not None and name in ("hidden_SBD", "latent_SBQ") else other
        for name, other in case.others.items()
    }
    returned = fn(**own, **others)
    outputs = [output for output in (returned if isinstance(returned, tuple) else (returned,)) if output.numel()]
    dtype = next(iter(case.leaves.values())).dtype
    cotangents = [  # made of no random numbers, which a CUDA graph would not repeat
        (torch.arange(output.numel(), device=output.device) % 1009 * 1.7).cos().to(dtype).view(output.shape)
        for output in outputs
    ]
    return with_gradients({f"output {i}": output for i, output in enumerate(outputs)}, own, cotangents)


def assert_same(
    case: Case,
    found: dict[str, torch.Tensor],
    truth: dict[str, torch.Tensor],
    peer: dict[str, torch.Tensor],
    rms: float,
) -> None:
    """Every result is the truth's."""
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        actual, other = found[name], peer[name]
        print(f"{case.name}, {name}: {worst_row(actual, expected):.1e}, plain PyTorch {worst_row(other, expected):.1e}")
        factor = None if other.dtype == torch.float32 else 2.0
        assert_parity(actual, expected, rms=rms, dtype_peer=other, max_abs_factor=factor, name=f"{case.name}, {name}")
