"""A layer's first norm together with its residual, against Transformer Engine's and PyTorch's.

Legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import ENGINE, lacking
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import Work
from megacpp_mcore.ops.rms_norm import reference

EPS = 1e-5

LIMIT = 8e-3
"""A row of bfloat16 is off by 2e-3; the gradient of the weight is a sum of as many rows as there are tokens, rounded once."""


def rms_norm(options: Options) -> Problem:
    """Compare every implementation on one set of rows; both gradients of a row are added up."""
    B, S, D = options.sizes("B", "S", "hidden")
    draw = Draw(options)
    inputs = Inputs(
        leaves=draw.leaves(x=draw.normal(S, B, D), weight=1 + draw.normal(D, scale=0.1)),
        cotangents={"y": draw.normal(S, B, D), "residual": draw.normal(S, B, D)},
    )

    def run(fn: Any, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = fn(inputs.leaves["x"], inputs.leaves["weight"], EPS)
        return normed, residual.view_as(residual)

    def plain(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.rms_norm(x, weight_D.shape, weight_D, eps), x

    moved = S * B * D * draw.itemsize
    variants = [
        *_engine(options, inputs),
        Variant.of("PyTorch", PEER, partial(run, plain)),
        *Variant.candidates("rms_norm", options, run, hidden=D),
    ]
    if options.device == "cuda":  # on the host, launching these takes longer than computing them on the device
        variants += [one.captured() for one in variants if one.runs]
    return Problem(
        inputs=inputs,
        variants=variants,
        works=Floor.pair(Work(0, 0), 2 * moved, 6 * moved, "float32"),
        truth=inputs.truth(partial(run, reference.rms_norm)),
        limit=LIMIT,
        outputs=2,
    )


def _engine(options: Options, inputs: Inputs) -> list[Variant]:
    """Return Transformer Engine's norm, and stock's subclass that adds both gradients (``--fused-residual-rmsnorm``)."""
    names = ("Transformer Engine", "Transformer Engine, residual fused")
    if missing := lacking(options.device, ENGINE, names[0]):
        return [Variant.missing(name, missing) for name in names]
    import transformer_engine.pytorch as te
    from megatron.core.extensions import transformer_engine as stock

    def call(module: Any, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        found = module(x := inputs.leaves["x"])
        normed, residual = found if isinstance(found, tuple) else (found, x)
        return normed, residual.view_as(residual)

    weight = inputs.leaves["weight"]
    modules = [
        kind(weight.shape, eps=EPS, dtype=weight.dtype, device=weight.device)
        for kind in (te.RMSNorm, stock.TEFusedResidualRMSNorm)
    ]
    return [
        Variant.of(name, PEER, partial(call, module), inputs.copied_to({"weight": module.weight}))
        for name, module in zip(names, modules, strict=True)
    ]
