"""Mamba-3 between its two projections, MIMO or SISO, heads normed: the backends, and mamba-ssm's module without projections.

Legend: B batch, S sequence, H heads, P head width, R MIMO rank, G groups, N state, A angles, X output of the input projection.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases import peers
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.measure import AgainstTruth, in_double
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model import Mamba3
from megacpp_mcore.model.flops import mamba_scan
from megacpp_mcore.ops.mamba3.reference import mamba3
from megacpp_mcore.ops.slices import split

LIMITS = {"bfloat16": 1e-2, "float32": 2e-4}
EPS = 1e-5
SUMMED = {"db_bias": 3.0, "dc_bias": 2.0}
"""Factor by which some results may be off more: sums per head over all tokens, of tensor-core products of bf16 operands. The
norm of the output takes no notice of its scale, so the part of B's bias that scales it cancels in that sum: plain PyTorch with
its scan in bf16 is off by 3.3e-2 at rank 1 and by 3.4e-2 at rank 4 (B 2 × S 4096)."""
ONE_RANK = {"y": 1.5}
"""At rank 1 no sum over ranks evens out rounding: plain PyTorch in bf16 is off by 2.3e-2 in its worst row."""
ROUNDED = {"db_bias": 5e-2}
"""For mamba-ssm, which also rounds B and C after their norm, and between the steps of the scan; 3e-2 for the other results."""


def problem(options: Options) -> Problem:
    """Compare every implementation on one output of the input projection; the truth is computed token by token."""
    B, S, H, P, R, G, N = options.sizes("B", "S", "mamba_heads", "head_dim", "rank", "groups", "state")
    chunk, draw = options.shape["chunk"], Draw(options)
    widths = [H * P, H * P, G * R * N, G * R * N, H, H, H, N // 4]  # z, x, B, C, step, decay, trapezoid, angles

    def weight(*shape: int, around: float = 1.0) -> torch.Tensor:
        return draw.normal(*shape, scale=0.1, dtype=torch.float32) + around

    given = {"u": draw.normal(B, S, sum(widths))}
    given |= {"dt_bias": weight(H, around=-4.0), "b_bias": weight(H, R, N), "c_bias": weight(H, R, N)}
    given |= {"b_norm_weight": weight(N).to(draw.dtype), "c_norm_weight": weight(N).to(draw.dtype), "D": weight(H)}
    if R > 1:
        given |= {name: weight(H, R, P, around=1.0 if name == "mimo_z" else 1 / R) for name in peers.MIX}
    given["out_norm_weight"] = weight(H * P).to(draw.dtype)
    inputs = Inputs(leaves=draw.leaves(**given), cotangents={"y": draw.normal(B, S, H, P)})

    def scan(fn: Any, inputs: Inputs) -> torch.Tensor:
        weights = dict(inputs.leaves)
        z, x, b, c, *rest = split(weights.pop("u").transpose(0, 1), widths)
        z, x = (part.unflatten(-1, (H, P)) for part in (z, x))
        b, c = (part.unflatten(-1, (R, G, N)).transpose(2, 3) for part in (b, c))  # mamba-ssm has them rank by rank
        out_SBHP: torch.Tensor = fn(x, z, b, c, *rest, **weights, chunk_size=chunk, A_floor=1e-4, eps=EPS)[0]
        return out_SBHP.transpose(0, 1)

    ssm = Mamba3(head_dim=P, groups=G, state=N, mimo_rank=R, chunk=chunk, rope_fraction=0.5)
    moved = B * S * (sum(widths) + H * P) * draw.itemsize
    wider = SUMMED | (ONE_RANK if R == 1 else {})
    limits = {name: LIMITS[options.dtype] * wider.get(name, 1.0) for name in inputs.names}
    # In float64, keeping the states of few tokens at a time.
    sequential = partial(scan, partial(mamba3, method="sequential", segment_size=256))
    ours = list(Variant.candidates("mamba3", options, scan, head_dim=P, mimo_rank=R, state=N))
    graphs = [one.captured() for one in ours if one.runs and one.name == "triton"]
    return Problem(
        inputs=inputs,
        variants=[_peer(options, inputs), *ours, *graphs],
        works=Floor.pair(
            mamba_scan(B, S, H, ssm), moved, 2 * moved + B * S * sum(widths) * draw.itemsize, options.dtype
        ),
        check=AgainstTruth(in_double(sequential, inputs), limits),
    )


def _peer(options: Options, inputs: Inputs) -> Variant:
    H, P, R, G, N = options.sizes("mamba_heads", "head_dim", "rank", "groups", "state")
    given = {name: leaf for name, leaf in inputs.leaves.items() if name in peers.MAMBA3_WEIGHTS}
    head_norm = peers.HeadNorm(inputs.leaves["out_norm_weight"], P, EPS)

    def variant(name: str, module: Any) -> Variant:
        module.in_proj, module.out_proj = torch.nn.Identity(), head_norm
        weights = [module.get_parameter(peers.MAMBA3_WEIGHTS[leaf]) for leaf in given]

        def call(inputs: Inputs) -> torch.Tensor:
            output: torch.Tensor = module(inputs.leaves["u"])
            return output.view(inputs.cotangents["y"].shape)

        def leaves(inputs: Inputs) -> Tensors:
            return [inputs.leaves["u"], *weights, head_norm.weight]

        return Variant.of(name, PEER, call, leaves=leaves, limit=dict.fromkeys(inputs.names, 3e-2) | ROUNDED)

    sizes = {"d_state": N, "headdim": P, "ngroups": G, "chunk_size": options.shape["chunk"]}
    return peers.mamba3_peer(options, R, given, variant, H * P // 2, expand=2, **sizes)
