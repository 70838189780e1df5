"""Inputs of a whole M²RNN mixer, and everything that comes out of one: outputs, final state, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_mcore.ops.m2rnn.reference import M2RNNState
from tests.ops.outcomes import leaves, with_gradients

TAPS = 4
OUTPUTS = ("out", "h", "window")


@dataclass(frozen=True)
class Case:
    """What is computed; the inputs are slices of one projection that has some more channels.

    Attributes:
        documents: whether a row holds several.
        state: whether a state comes in and is returned, with a gradient.
        ranks: the factor on the sum of squares that stands in for a sum over ranks; 1: no reduce at all.
    """

    B: int = 2
    S: int = 2345
    H: int = 44
    K: int = 64
    V: int = 16
    dtype: torch.dtype = torch.bfloat16
    documents: bool = False
    state: bool = False
    ranks: int = 1
    checkpoint_every: int = 64

    @property
    def widths(self) -> list[int]:
        """Channels of q, k, v, the output gate and the forget gate, and 4 more."""
        return [self.K, self.K, self.H * self.V, self.H * self.V, self.H, 4]


def draw(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The leaves by name, numbers that the dtype can hold; W shrinks, as a recurrence that stretches is chaotic."""
    generator = torch.Generator(device).manual_seed(seed)
    B, S, H, K, V = case.B, case.S, case.H, case.K, case.V

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=device) * scale + mean
        return drawn.to(dtype or case.dtype).requires_grad_()

    fp32 = torch.float32
    leaves = {
        "u": normal(S, B, sum(case.widths)),
        "qk_conv_weight": normal(2 * K, TAPS, scale=K**-0.25),
        "qk_conv_bias": normal(2 * K, scale=0.1),
        "v_conv_weight": normal(H * V, TAPS),
        "v_conv_bias": normal(H * V, scale=0.1),
        "W": normal(H, V, V, scale=0.02, dtype=fp32),
        "A_log": normal(H, scale=0.5, mean=1.0, dtype=fp32),
        "dt_bias": normal(H, scale=0.5, mean=-4.0, dtype=fp32),
        "D": normal(H * V, scale=0.1, mean=1.0, dtype=fp32),
        "norm_weight": normal(H * V, scale=0.1, mean=1.0),
    }
    with torch.no_grad():
        leaves["W"] += 0.8 * torch.eye(V, device=device)
    if case.state:
        leaves |= {"h0": normal(B, H, K, V, dtype=fp32), "window0": normal(B, TAPS - 1, 2 * K + H * V)}
    cotangents = [normal(S, B, H * V), normal(B, H, V, K, dtype=fp32).mT, normal(B, TAPS - 1, 2 * K + H * V)]
    starts = torch.rand(B, S, generator=generator, device=device) < 8 / S
    seq_idx = starts.cumsum(1).to(torch.int32) if case.documents else None
    return {"leaves": leaves, "cotangents": [c.detach() for c in cotangents], "seq_idx": seq_idx}


def run(
    fn: Callable[..., Any], case: Case, leaves: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, M2RNNState | None]:
    """The output and the final state of a call; ``options`` replace what the case says."""
    weights = dict(leaves)
    q, k, v, g, x_f, _ = weights.pop("u").split(case.widths, dim=-1)
    v, g = (part.unflatten(-1, (case.H, case.V)) for part in (v, g))
    how: dict[str, Any] = {
        "eps": 1e-5,
        "norm_width": case.ranks * case.H * case.V,
        "reduce": None if case.ranks == 1 else lambda squares: case.ranks * squares,
        "initial_state": M2RNNState(weights.pop("h0"), weights.pop("window0")) if case.state else None,
        "return_final_state": case.state,
        "checkpoint_every": case.checkpoint_every,
    }
    out, final = fn(q, k, v, g, x_f, **weights, **how | options)
    return out, final


def outcome(
    fn: Callable[..., Any], case: Case, inputs: dict[str, Any], dtype: torch.dtype | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name; ``dtype``: what all inputs are cast to first, None to take them as they are."""
    own = leaves(inputs["leaves"], dtype)
    out, final = run(fn, case, own, seq_idx=inputs["seq_idx"], **options)
    outputs = dict(zip(OUTPUTS, (out, *(final or ())), strict=False))
    return with_gradients(outputs, own, inputs["cotangents"][: len(outputs)])
