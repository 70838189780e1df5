"""Mamba-3 between its two projections, MIMO or SISO: the backends, and mamba-ssm's module with its projections left out.

Legend: B batch, S sequence, H heads, P head width, R MIMO rank, G groups, N state, A angles, X what the input projection gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import mamba3_module, mamba_ssm_lacking
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    PEER,
    Draw,
    Inputs,
    Problem,
    Tensors,
    candidates,
    differentiable,
    floors,
    missing,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model import Mamba3
from megacpp_mcore.model.flops import mamba_scan

LIMITS = {"bfloat16": 1e-2, "float32": 2e-4}
SUMMED = {"db_bias": 2.0, "dc_bias": 2.0}
"""How much more some may be off: a head's sums, over all tokens, of what tensor cores make of operands in bf16."""
ROUNDED = 3e-2
"""For mamba-ssm, which rounds B and C after their norm, and between the steps of the scan."""

A_FLOOR, EPS = 1e-4, 1e-5
MIX = ("mimo_x", "mimo_z", "mimo_o")
WEIGHTS = ("dt_bias", "b_bias", "c_bias", "b_norm_weight", "c_norm_weight", "D")
THEIRS = {"b_bias": "B_bias", "c_bias": "C_bias", "b_norm_weight": "B_norm.weight", "c_norm_weight": "C_norm.weight"}
"""mamba-ssm's names of the weights, where they differ."""


def widths(sizes: Mapping[str, int]) -> list[int]:
    """Of the parts that the input projection gives: z, x, B, C, step, decay, trapezoid, angles."""
    H, P, R, G, N = (sizes[name] for name in ("mamba_heads", "head_dim", "rank", "groups", "state"))
    return [H * P, H * P, G * R * N, G * R * N, H, H, H, N // 4]


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    sizes = options.shape
    B, S, H, P, R, N = (sizes[name] for name in ("B", "S", "mamba_heads", "head_dim", "rank", "state"))
    draw = Draw(options)
    inputs = _draw(draw, sizes)
    ssm = Mamba3(
        head_dim=P, groups=sizes["groups"], state=N, mimo_rank=R, chunk=sizes["chunk"], rope_fraction=0.5
    )  # fmt: skip
    moved = B * S * (sum(widths(sizes)) + H * P) * draw.itemsize
    backward = moved + B * S * sum(widths(sizes)) * draw.itemsize
    needs = {"device": options.device, "dtype": options.dtype, "head_dim": P, "mimo_rank": R, "state": N}
    names = ("y", *(f"d{name}" for name in inputs.leaves))
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=inputs,
        variants=[_peer(options, inputs), *candidates("mamba3", partial(_call, sizes), **needs)],
        works=floors(mamba_scan(B, S, H, ssm), moved, moved + backward, options.dtype),
        judge=AgainstTruth(
            partial(_truth, sizes), names, {name: LIMITS[options.dtype] * SUMMED.get(name, 1.0) for name in names}
        ),
    )


def _draw(draw: Draw, sizes: Mapping[str, int]) -> Inputs:
    B, S, H, P, R, N = (sizes[name] for name in ("B", "S", "mamba_heads", "head_dim", "rank", "state"))

    def weight(*shape: int, around: float = 1.0) -> torch.Tensor:
        return draw.normal(*shape, scale=0.1, dtype=torch.float32) + around

    leaves = {"u": draw.normal(B, S, sum(widths(sizes)))}
    leaves |= {"dt_bias": weight(H, around=-4.0), "b_bias": weight(H, R, N), "c_bias": weight(H, R, N)}
    leaves |= {"b_norm_weight": weight(N).to(draw.dtype), "c_norm_weight": weight(N).to(draw.dtype), "D": weight(H)}
    if R > 1:
        leaves |= {name: weight(H, R, P, around=1.0 if name == "mimo_z" else 1 / R) for name in MIX}
    for leaf in leaves.values():
        leaf.requires_grad_()
    return Inputs(leaves=leaves, cotangents=(draw.normal(B, S, H, P),))


def _call(sizes: Mapping[str, int], fn: Any, inputs: Inputs, **how: Any) -> Tensors:
    H, P, R, G, N = (sizes[name] for name in ("mamba_heads", "head_dim", "rank", "groups", "state"))
    u_BSX, *_ = inputs.leaves.values()
    z, x, b, c, dd_dt, dd_A, trap, angles = u_BSX.transpose(0, 1).split(widths(sizes), dim=-1)
    z, x = (part.unflatten(-1, (H, P)) for part in (z, x))
    b, c = (
        part.unflatten(-1, (R, G, N)).transpose(2, 3) for part in (b, c)
    )  # as mamba-ssm has them: by rank, then group
    weights = {name: leaf for name, leaf in inputs.leaves.items() if name != "u"}
    out_SBHP, _ = fn(
        x, z, b, c, dd_dt, dd_A, trap, angles, **weights, chunk_size=sizes["chunk"], A_floor=A_FLOOR, eps=EPS, **how
    )
    return [out_SBHP.transpose(0, 1)]


def _truth(sizes: Mapping[str, int], inputs: Inputs) -> Tensors:
    """Token by token, in float64, keeping the states of few tokens at a time."""
    from megacpp_mcore.ops.mamba3.reference import mamba3

    double = inputs.in_double()
    (output,) = _call(sizes, mamba3, double, method="sequential", segment_size=256)
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _peer(options: Options, inputs: Inputs) -> Any:
    sizes = options.shape
    name = f"mamba-ssm {'MIMO' if sizes['rank'] > 1 else 'SISO'}"
    reason = mamba_ssm_lacking(options.device, sizes["rank"])
    if reason:
        return missing(name, reason)
    module = mamba3_module().Mamba3(
        sizes["mamba_heads"] * sizes["head_dim"] // 2, d_state=sizes["state"], expand=2, headdim=sizes["head_dim"],
        ngroups=sizes["groups"], is_mimo=sizes["rank"] > 1, mimo_rank=sizes["rank"], chunk_size=sizes["chunk"],
        device=options.device, dtype=getattr(torch, options.dtype),
    )  # fmt: skip
    module.in_proj = module.out_proj = torch.nn.Identity()
    weights = [module.get_parameter(THEIRS.get(leaf, leaf)) for leaf in inputs.leaves if leaf != "u"]

    def call(given: Inputs) -> Tensors:
        return [module(given.leaves["u"]).view(given.cotangents[0].shape)]

    with torch.no_grad():
        for weight, leaf in zip(weights, list(inputs.leaves.values())[1:], strict=True):
            weight.copy_(leaf.view(weight.shape))
    return differentiable(name, PEER, call, leaves=lambda given: [given.leaves["u"], *weights], limit=ROUNDED)
