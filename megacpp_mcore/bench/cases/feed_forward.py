"""A dense feed-forward layer with GELU: in bfloat16, in FP8, and by Transformer Engine's linear layers in FP8.

Legend: S sequence, B batch, D hidden, F inner width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu

from megacpp_mcore.bench.cases.mamba3_projection import FP8, QUANTIZED, engine_in_fp8
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.measure import AgainstTruth, in_double
from megacpp_mcore.bench.problem import BOTH, FORWARD, Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model.families.base import feed_forward
from megacpp_mcore.ops.feed_forward.reference import feed_forward as reference
from megacpp_mcore.ops.main_grad import MainGrad

LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}


def problem(options: Options) -> Problem:
    """Compare every implementation on one input; the floor reads and writes nothing between the two products."""
    B, S, D, F = options.sizes("B", "S", "hidden", "ffn")
    draw = Draw(options)
    weights = {"w1": draw.normal(F, D, scale=D**-0.5), "w2": draw.normal(D, F, scale=F**-0.5)}
    inputs = Inputs(leaves=draw.leaves(x=draw.normal(S, B, D), **weights), cotangents={"y": draw.normal(S, B, D)})
    x, w = inputs.leaves["x"].nbytes, sum(weight.nbytes for weight in weights.values())

    def truth(inputs: Inputs) -> torch.Tensor:
        x, w1, w2 = inputs.leaves.values()
        return reference(x, w1, w2)

    return Problem(
        inputs=inputs,
        variants=[Variant.of("PyTorch", PEER, truth), *_engine(options, weights), *_ours(options)],
        works=Floor.pair(feed_forward(S * B, D, F), 2 * x + w, 5 * x + 3 * w, options.dtype),
        check=AgainstTruth(in_double(truth, inputs), LIMITS[options.dtype]),
        stock="PyTorch",
    )


def _engine(options: Options, weights: dict[str, torch.Tensor]) -> Iterator[Variant]:
    """Yield Transformer Engine's linear layers in its FP8 recipes, which quantise both weights in every call."""
    for name, made in engine_in_fp8(options, *weights.values()):
        if isinstance(made, str):
            yield Variant.missing(name, made)
            continue
        (first, second), scope = made

        def call(inputs: Inputs, first: Any = first, second: Any = second, scope: Any = scope) -> torch.Tensor:
            with scope():
                y: torch.Tensor = second(gelu(first(inputs.leaves["x"])))
                return y

        def leaves(inputs: Inputs, first: Any = first, second: Any = second) -> Tensors:
            return [inputs.leaves["x"], first.weight, second.weight]

        yield Variant.of(name, PEER, call, leaves, limit=QUANTIZED)


def _ours(options: Options) -> Iterator[Variant]:
    """Yield our backends; in FP8 with the weights quantised in each call, or kept, also as graphs, which quantise them."""

    def run(fn: Callable[..., torch.Tensor], inputs: Inputs, *main_grads: Any) -> torch.Tensor:
        return fn(*inputs.leaves.values(), *main_grads)

    D, F = options.shape["hidden"], options.shape["ffn"]
    for kept in Variant.candidates("feed_forward", options, run, hidden=D, ffn=F):
        if not kept.runs or kept.name != FP8:
            yield kept
            continue
        kept = dataclasses.replace(kept, limit=QUANTIZED)
        yield kept.captured()
        yield kept.quantising()
        kept = dataclasses.replace(kept, name=f"{FP8}, weights kept quantised")
        yield kept
        runs = {BOTH: partial(_accumulated, kept.runs[FORWARD], {})}
        yield dataclasses.replace(kept, name=f"{kept.name}, dW into main_grad", runs=runs)


def _accumulated(forward: Callable[..., torch.Tensor], main: dict[str, torch.Tensor], inputs: Inputs) -> Tensors:
    """Add the weights' gradients in float32 to earlier ones, as Megatron does; ``main`` is empty before the first call."""
    leaves = dict(inputs.leaves)
    x = leaves.pop("x")
    for name, weight in leaves.items():
        if name not in main:
            main[name] = torch.zeros_like(weight, dtype=torch.float32)
    main_grads = tuple(MainGrad(main[name], partial(torch.empty_like, weight)) for name, weight in leaves.items())
    y = forward(inputs, main_grads)
    dx, *_ = torch.autograd.grad(y, [x, *leaves.values()], list(inputs.cotangents.values()))
    return [y.detach(), dx, *main.values()]
