"""A layer's first norm together with its residual, against Transformer Engine's and PyTorch's.

Legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megacpp_mcore.bench.cases.peers import ENGINE, lacking
from megacpp_mcore.bench.parity import AgainstTruth, in_double
from megacpp_mcore.bench.problem import BOTH, FORWARD, Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.bench.registry import PEER, Options
from megacpp_mcore.ops.rms_norm.reference import rms_norm

EPS = 1e-5

LIMIT = 8e-3
"""A row of bfloat16 is off by 2e-3; the gradient of the weight is a sum of as many rows as there are tokens, rounded once."""


def problem(options: Options) -> Problem:
    """Every implementation on one set of rows; both gradients of a row are added up."""
    B, S, D = options.sizes("B", "S", "hidden")
    draw = Draw(options)
    inputs = Inputs(
        leaves=draw.leaves(x=draw.normal(S, B, D), weight=1 + draw.normal(D, scale=0.1)),
        cotangents={"y": draw.normal(S, B, D), "residual": draw.normal(S, B, D)},
    )

    def run(fn: Any, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = fn(inputs.leaves["x"], inputs.leaves["weight"], EPS)
        return normed, residual.view_as(residual)

    moved = S * B * D * draw.itemsize
    variants = [
        *_engine(inputs),
        Variant.of("PyTorch", PEER, partial(run, lambda x, weight, eps: (F.rms_norm(x, weight.shape, weight, eps), x))),
        *Variant.candidates("rms_norm", options, run, hidden=D),
    ]
    if options.device == "cuda":  # on the host, launching these takes longer than computing them on the device
        variants += [one.captured() for one in variants if one.runs]
    return Problem(
        inputs=inputs,
        variants=variants,
        works={
            FORWARD: Floor(operations=0, moved=2 * moved, precision="fp32"),
            BOTH: Floor(operations=0, moved=(2 + 4) * moved, precision="fp32"),
        },
        check=AgainstTruth(in_double(partial(run, rms_norm), inputs), LIMIT, outputs=2),
    )


def _engine(inputs: Inputs) -> list[Variant]:
    """Transformer Engine's norm, and stock's subclass of it that adds both gradients (``--fused-residual-rmsnorm``)."""
    names = ("Transformer Engine", "Transformer Engine, residual fused")
    device = str(inputs.leaves["x"].device.type)
    if missing := lacking(device, ENGINE, names[0]):
        return [Variant.missing(name, missing) for name in names]
    import transformer_engine.pytorch as te
    from megatron.core.extensions import transformer_engine as stock

    def variant(name: str, kind: Any) -> Variant:
        weight = inputs.leaves["weight"]
        module = kind(weight.shape, eps=EPS, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            module.weight.copy_(weight)

        def call(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
            found = module(inputs.leaves["x"])
            normed, residual = found if isinstance(found, tuple) else (found, inputs.leaves["x"])
            return normed, residual.view_as(residual)

        return Variant.of(name, PEER, call, leaves=lambda inputs: [inputs.leaves["x"], module.weight])

    return [variant(names[0], te.RMSNorm), variant(names[1], stock.TEFusedResidualRMSNorm)]
