"""Transformer Engine's wrapper against plain PyTorch: a whole attention block.

Legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megacpp_mcore.bench.cases.peers import ENGINE, lacking
from megacpp_mcore.bench.parity import AgainstTruth, in_double
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.bench.registry import OURS, PEER, Options
from megacpp_mcore.model.flops import causal_pairs, feed_forward, product

LIMITS = {"bfloat16": 3e-2, "float32": 1e-2}
"""Transformer Engine multiplies float32 in TF32."""

EPS = 1e-5


def native_block(x_SBD: torch.Tensor, weights: dict[str, torch.Tensor], width: int) -> torch.Tensor:
    """The block of :class:`megacpp_mcore.te.block.Block` with GELU (erf), from its state dict, in plain PyTorch."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], EPS)

    y = norm(x_SBD, "qkv.layer_norm_weight")
    heads = (
        F.linear(y, weights[f"qkv.{part}_weight"]).unflatten(-1, (-1, width)) for part in ("query", "key", "value")
    )
    q, k, v = (one.permute(1, 2, 0, 3) for one in heads)
    o_SBHK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    x_SBD = x_SBD + F.linear(o_SBHK.flatten(2), weights["output.weight"])
    y = F.linear(norm(x_SBD, "feed_forward.0.layer_norm_weight"), weights["feed_forward.0.weight"])
    return x_SBD + F.linear(F.gelu(y), weights["feed_forward.2.weight"])


def block(options: Options) -> Problem:
    """An attention block with four query heads a group, and its feed-forward."""
    B, S, D, heads = options.sizes("B", "S", "hidden", "heads")
    groups, width, draw = max(1, heads // 4), D // heads, Draw(options)
    shapes = {
        **{f"qkv.{part}_weight": (n * width, D) for part, n in (("query", heads), ("key", groups), ("value", groups))},
        "output.weight": (D, D), "feed_forward.0.weight": (4 * D, D), "feed_forward.2.weight": (D, 4 * D),
    }  # fmt: skip
    leaves = {name: draw.normal(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    leaves |= {
        name: 1 + draw.normal(D, scale=0.1) for name in ("qkv.layer_norm_weight", "feed_forward.0.layer_norm_weight")
    }
    inputs = Inputs(leaves=draw.leaves(x=draw.normal(S, B, D), **leaves), cotangents={"y": draw.normal(S, B, D)})

    def native(inputs: Inputs) -> torch.Tensor:
        x, *_ = inputs.leaves.values()
        return native_block(x, dict(inputs.leaves), width)

    work = feed_forward(B * S, D, 4 * D) + product(B * S * D * (2 * D + 2 * groups * width))
    work = work + product(2 * B * heads * causal_pairs(S) * width)
    parameters = sum(weight.numel() for weight in leaves.values()) * draw.itemsize
    rows = B * S * D * draw.itemsize
    return Problem(
        inputs=inputs,
        variants=[_engine_block(options, inputs, heads, groups), Variant.of("reference", OURS, native)],
        works=Floor.pair(work, parameters + 2 * rows, 3 * parameters + 4 * rows, options.dtype),
        check=AgainstTruth(in_double(native, inputs), LIMITS[options.dtype]),
    )


def _engine_block(options: Options, inputs: Inputs, heads: int, groups: int) -> Variant:
    name = "TE block"
    if reason := lacking(options.device, ENGINE, "Transformer Engine"):
        return Variant.missing(name, reason)
    from megacpp_mcore.te.block import Block

    D = options.shape["hidden"]
    built: Any = Block(
        D, heads, 4 * D, groups=groups, eps=EPS, dtype=getattr(torch, options.dtype), device=options.device
    )
    built.load_state_dict({key: leaf for key, leaf in inputs.leaves.items() if key != "x"}, strict=False)
    parameters = dict(built.named_parameters())

    def leaves(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs.leaves["x"], *(parameters[key] for key in inputs.leaves if key != "x")]

    return Variant.of(name, PEER, lambda inputs: built(inputs.leaves["x"]), leaves=leaves)
