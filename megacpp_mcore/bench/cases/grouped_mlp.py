"""Routed experts, rows sorted by expert: ours, Transformer Engine's GroupedLinear, and PyTorch's grouped products.

Legend: T rows (each token once per expert it is routed to), E experts, D hidden, F expert width.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megacpp_mcore.bench.cases.peers import lacking
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    OURS,
    PEER,
    Draw,
    Inputs,
    Problem,
    Tensors,
    differentiable,
    floors,
    missing,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import feed_forward

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}
ROUNDED = 3e-2
"""For peers, which round the hidden activation to the dtype of their inputs."""


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp

    sizes = options.shape
    E, D, width = (sizes[name] for name in ("experts", "hidden", "expert_width"))
    T, draw = sizes["B"] * sizes["S"] * sizes["routed"], Draw(options)
    counts_E = torch.bincount(draw.integers(E, T), minlength=E)

    def one() -> Inputs:
        leaves = {
            "x": draw.normal(T, D),
            "w1": draw.normal(E, width, D, scale=D**-0.5),
            "w2": draw.normal(E, D, width, scale=width**-0.5),
            "probs": torch.rand(T, generator=draw.generator, device=options.device),
        }
        for leaf in leaves.values():
            leaf.requires_grad_()
        return Inputs(leaves=leaves, cotangents=(draw.normal(T, D),), fixed={"counts": counts_E})

    inputs = one()
    work = feed_forward(T, D, width)
    weights, rows = 2 * E * D * width * draw.itemsize, T * D * draw.itemsize
    yield Problem(
        shape={**sizes, "T": T},
        dtype=options.dtype,
        inputs=inputs,
        variants=[
            _grouped_mm(options, sizes),
            _engine(options, inputs, counts_E.tolist()),
            differentiable("reference", OURS, partial(_ours, grouped_mlp)),
        ],
        works=floors(work, weights + 2 * rows, 3 * weights + 5 * rows, options.dtype),
        judge=AgainstTruth(partial(_truth, grouped_mlp), ("y", "dx", "dw1", "dw2", "dprobs"), LIMITS[options.dtype]),
    )


def _ours(fn: Any, inputs: Inputs) -> Tensors:
    x, w1, w2, probs = inputs.leaves.values()
    return [fn(x, inputs.fixed["counts"], w1, w2, probs)]


def _truth(fn: Any, inputs: Inputs) -> Tensors:
    double = inputs.in_double()
    (output,) = _ours(fn, double)
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _grouped_mm(options: Options, sizes: Any) -> Any:
    name = "torch._grouped_mm"
    if options.dtype != "bfloat16":
        return missing(name, f"it takes bfloat16, not {options.dtype}")
    if any(sizes[width] % 8 for width in ("hidden", "expert_width")):
        return missing(name, "it takes widths that are multiples of 8")

    def call(inputs: Inputs) -> Tensors:
        x, w1, w2, probs = inputs.leaves.values()
        ends_E = inputs.fixed["counts"].cumsum(0).to(torch.int32)
        hidden = F.gelu(torch._grouped_mm(x, w1.transpose(1, 2), offs=ends_E))
        hidden = (hidden * probs[:, None]).to(x.dtype)
        return [torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends_E)]

    return differentiable(name, PEER, call, limit=ROUNDED)


def _engine(options: Options, inputs: Inputs, counts: list[int]) -> Any:
    name = "TE GroupedLinear"
    reason = "no peer here: Transformer Engine runs on a GPU alone" if options.device != "cuda" else ""
    reason = reason or lacking("transformer_engine.pytorch", "transformer-engine")
    if reason:
        return missing(name, reason)
    engine, dtype = importlib.import_module("transformer_engine.pytorch"), getattr(torch, options.dtype)
    linears = []
    for weight_EOI in list(inputs.leaves.values())[1:3]:
        experts, outputs, width = weight_EOI.shape
        linear = engine.GroupedLinear(experts, width, outputs, bias=False, params_dtype=dtype, device=options.device)
        with torch.no_grad():
            for number, weight in enumerate(weight_EOI):
                getattr(linear, f"weight{number}").copy_(weight)
        linears.append(linear)

    def call(given: Inputs) -> Tensors:
        x, _, _, probs = given.leaves.values()
        hidden = (F.gelu(linears[0](x, counts)) * probs[:, None]).to(x.dtype)
        return [linears[1](hidden, counts)]

    def leaves(given: Inputs) -> Tensors:
        weights = [getattr(linear, f"weight{number}") for linear in linears for number in range(len(counts))]
        return [given.leaves["x"], given.leaves["probs"], *weights]

    def results(found: Any) -> Tensors:
        if len(found) == 1:
            return [found[0]]
        y, dx, dprobs, *weights = found
        return [y, dx, torch.stack(weights[: len(counts)]), torch.stack(weights[len(counts) :]), dprobs]

    return differentiable(name, PEER, call, leaves=leaves, results=results, limit=ROUNDED)
