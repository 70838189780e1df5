"""Dense layers in bfloat16, in FP8, and by Transformer Engine's linear layers in FP8: MTP's feed-forward, Mamba-3's input.

Legend: S sequence, B batch, D hidden, F inner width; N all rows of the projection's weight, of which the wide parts come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import gelu

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import ENGINE, engine_linear, lacking
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import BOTH, Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model import flops
from megacpp_mcore.ops.feed_forward import reference
from megacpp_mcore.te.fp8_scopes import RECIPES
from megacpp_mcore.util import te_imports

QUANTIZED = 0.15
"""The worst row of products in FP8: two operands of E4M3 are off by 2.6 % each (rms), a gradient in E5M2 by 5 %."""

Context = Callable[[], AbstractContextManager[Any]]


def feed_forward(options: Options) -> Problem:
    """Compare every implementation on one input; the floor reads and writes nothing between the two products."""
    B, S, D, F = options.sizes("B", "S", "hidden", "ffn")
    draw = Draw(options)
    weights = {"w1": draw.normal(F, D, scale=D**-0.5), "w2": draw.normal(D, F, scale=F**-0.5)}
    inputs = Inputs(leaves=draw.leaves(x=draw.normal(S, B, D), **weights), cotangents={"y": draw.normal(S, B, D)})
    x, w = inputs.leaves["x"].nbytes, sum(weight.nbytes for weight in weights.values())

    def plain(inputs: Inputs) -> torch.Tensor:
        x, w1, w2 = inputs.leaves.values()
        return reference.feed_forward(x, w1, w2)

    def run(fn: Any, inputs: Inputs, main_grads: Any = (None, None)) -> torch.Tensor:
        return fn(*inputs.leaves.values(), main_grads)

    ours: list[Variant] = []
    for one in Variant.candidates("feed_forward", options, run, hidden=D, ffn=F):
        ours += _in_fp8(one, "w1", "w2") if one.runs and one.name == TRITON_FP8 else [one]
    return Problem(
        inputs=inputs,
        variants=[
            Variant.of("PyTorch", PEER, plain),
            *_engine_in_fp8(options, inputs, ("w1", "w2"), lambda x, first, second: second(gelu(first(x)))),
            *ours,
        ],
        works=Floor.pair(flops.feed_forward(S * B, D, F), 2 * x + w, 5 * x + 3 * w, options.dtype),
        truth=inputs.truth(plain),
        limit={"bfloat16": 1e-2, "float32": 1e-5}[options.dtype],
        stock="PyTorch",
    )


def mamba3_projection(options: Options) -> Problem:
    """Compare every implementation on one input, whose gradient comes as the implementation's own outputs are laid out."""
    B, S, D, wide, narrow = options.sizes("B", "S", "hidden", "wide", "narrow")
    draw = Draw(options)
    whole_SBN = draw.normal(S, B, wide + narrow)
    inputs = Inputs(
        leaves=draw.leaves(x=draw.normal(S, B, D), weight=draw.normal(wide + narrow, D, scale=D**-0.5)),
        cotangents={"wide": whole_SBN[..., :wide].contiguous(), "narrow": whole_SBN[..., wide:].contiguous()},
        fixed={"whole": whole_SBN},
    )
    x, weight, y = inputs.leaves["x"].nbytes, inputs.leaves["weight"].nbytes, whole_SBN.nbytes

    def plain(inputs: Inputs) -> torch.Tensor:
        return torch.nn.functional.linear(*inputs.leaves.values())

    peers = [
        Variant.of("PyTorch", PEER, plain),
        *_engine_in_fp8(options, inputs, ("weight",), lambda x, linear: linear(x)),
    ]
    return Problem(
        inputs=inputs,
        variants=[*(_whole(peer, wide) for peer in peers), *_projections(options, wide)],
        works=Floor.pair(
            flops.product(S * B * D * (wide + narrow)), x + weight + y, 3 * weight + 3 * x + 2 * y, options.dtype
        ),
        truth=inputs.truth(lambda inputs: plain(inputs).split([wide, narrow], -1)),
        limit={"bfloat16": 5e-3, "float32": 1e-5}[options.dtype],
        outputs=2,
        stock="PyTorch",
    )


def _whole(variant: Variant, wide: int) -> Variant:
    """Return the variant of an implementation with both parts in one output, for which it is given one gradient."""

    def both(inputs: Inputs, **how: Any) -> Tensors:
        given = dataclasses.replace(inputs, cotangents={"y": inputs.fixed["whole"]})
        return variant.runs[BOTH](given, **how)

    def results(found: Tensors) -> Tensors:
        return [found[0][..., :wide], found[0][..., wide:], *found[1:]]

    return dataclasses.replace(variant, runs=variant.runs and {**variant.runs, BOTH: both}, results=results)


def _projections(options: Options, wide: int) -> Iterator[Variant]:
    """Yield the backends of the projection; those in bfloat16 also as graphs."""

    def run(fn: Any, inputs: Inputs, main_grads: Any = (None,)) -> tuple[torch.Tensor, ...]:
        return fn(*inputs.leaves.values(), *main_grads, wide)

    for one in Variant.candidates("mamba3_projection", options, run, hidden=options.shape["hidden"], outputs=wide):
        if not one.runs:
            yield one
        elif TRITON_FP8 in one.name:
            yield from _in_fp8(one, "weight", within=_sums() if one.name == TRITON_FP8 else {})
        else:
            whole = _whole(one, wide)
            if options.device == "cuda":
                yield whole.captured()
            yield from (whole, whole.into_main_grad("weight"))


def _sums() -> dict[str, Context]:
    """Return contexts in which the kernels of the projection sum otherwise than they do by default."""
    from megacpp_mcore.ops.mamba3_projection.triton import FAST

    others = {"exact sums forward": {"forward": False}, "fast sums backward": {"backward": True}}
    return {how: partial(mock.patch.dict, FAST, change) for how, change in others.items()}


def _in_fp8(found: Variant, *weights: str, within: Mapping[str, Context] | None = None) -> Iterator[Variant]:
    """Yield a backend as a graph, which quantises the weights; with them quantised in each call; and kept, also in contexts."""
    one = dataclasses.replace(found, limit=QUANTIZED)
    yield from (one.captured(), one.quantising())
    kept = dataclasses.replace(one, name=f"{found.name}, weights kept quantised")
    yield kept
    for how, around in (within or {}).items():
        yield dataclasses.replace(kept, name=f"{kept.name}, {how}", around=around)
    yield kept.into_main_grad(*weights)


def _engine_in_fp8(
    options: Options, inputs: Inputs, names: tuple[str, ...], call: Callable[..., torch.Tensor]
) -> Iterator[Variant]:
    """Yield a variant of each of Transformer Engine's FP8 recipes, which quantise the weights in every call.

    ``call`` computes the output from the input ``x`` and linear layers of the weights ``names``.
    """
    for recipe, (kind, asks) in ((each, RECIPES[each]) for each in ("current", "block")):
        name = f"Transformer Engine, FP8 {recipe}"
        if not (reason := lacking(options.device, ENGINE, name)):
            can, why = te_imports.entry(asks)(return_reason=True)
            reason = "" if can else f"not here: {why}"
        if reason:
            yield Variant.missing(name, reason)
            continue
        linears = {weight: engine_linear(inputs.leaves[weight]) for weight in names}
        scope = partial(te_imports.entry("autocast"), enabled=True, recipe=te_imports.entry(kind)())

        def run(inputs: Inputs, linears: Any = linears, scope: Any = scope) -> torch.Tensor:
            with scope():
                return call(inputs.leaves["x"], *linears.values())

        weights = inputs.copied_to({weight: linear.weight for weight, linear in linears.items()})
        yield Variant.of(name, PEER, run, weights, limit=QUANTIZED)
