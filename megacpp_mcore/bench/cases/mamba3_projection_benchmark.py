"""The input projection of Mamba-3: in bfloat16, with its wide parts in FP8, and Transformer Engine's linear layer in FP8.

Legend: S sequence, B batch, D hidden, N all rows of the weight, of which the wide parts come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import QUANTIZED, engine_in_fp8
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import BOTH, Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model.flops import product

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}


def problem(options: Options) -> Problem:
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
        *engine_in_fp8(options, inputs, ("weight",), lambda x, linear: linear(x)),
    ]
    return Problem(
        inputs=inputs,
        variants=[*(_whole(peer, wide) for peer in peers), *_ours(options, wide)],
        works=Floor.pair(
            product(S * B * D * (wide + narrow)), x + weight + y, 3 * weight + 3 * x + 2 * y, options.dtype
        ),
        truth=inputs.truth(lambda inputs: plain(inputs).split([wide, narrow], -1)),
        limit=LIMITS[options.dtype],
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


def _ours(options: Options, wide: int) -> Iterator[Variant]:
    """Yield our backends; in FP8 with the weight quantised in each call, or kept, also as graphs, which quantise it."""

    def run(fn: Any, inputs: Inputs, main_grads: Any = (None,)) -> tuple[torch.Tensor, ...]:
        return fn(*inputs.leaves.values(), *main_grads, wide)

    D = options.shape["hidden"]
    for found in Variant.candidates("mamba3_projection", options, run, hidden=D, outputs=wide):
        if not found.runs:
            yield found
            continue
        in_fp8 = TRITON_FP8 in found.name
        kept = dataclasses.replace(found, limit=QUANTIZED) if in_fp8 else _whole(found, wide)
        if options.device == "cuda":
            yield kept.captured()
        if in_fp8:
            yield kept.quantising()
            kept = dataclasses.replace(kept, name=f"{found.name}, weights kept quantised")
        yield kept
        if found.name == TRITON_FP8:
            from megacpp_mcore.ops.mamba3_projection import triton

            for direction, fast in (("forward", False), ("backward", True)):
                how = f"{'fast' if fast else 'exact'} sums {direction}"
                around = partial(mock.patch.dict, triton.FAST, {direction: fast})
                yield dataclasses.replace(kept, name=f"{kept.name}, {how}", around=around)
        yield kept.into_main_grad("weight")
