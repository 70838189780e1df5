"""A dense feed-forward layer with GELU: in bfloat16, in FP8, and by Transformer Engine's linear layers in FP8.

Legend: S sequence, B batch, D hidden, F inner width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import gelu

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import QUANTIZED, engine_in_fp8
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.families.base import feed_forward
from megacpp_mcore.ops.feed_forward.reference import feed_forward as reference

LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}


def problem(options: Options) -> Problem:
    """Compare every implementation on one input; the floor reads and writes nothing between the two products."""
    B, S, D, F = options.sizes("B", "S", "hidden", "ffn")
    draw = Draw(options)
    weights = {"w1": draw.normal(F, D, scale=D**-0.5), "w2": draw.normal(D, F, scale=F**-0.5)}
    inputs = Inputs(leaves=draw.leaves(x=draw.normal(S, B, D), **weights), cotangents={"y": draw.normal(S, B, D)})
    x, w = inputs.leaves["x"].nbytes, sum(weight.nbytes for weight in weights.values())

    def plain(inputs: Inputs) -> torch.Tensor:
        x, w1, w2 = inputs.leaves.values()
        return reference(x, w1, w2)

    return Problem(
        inputs=inputs,
        variants=[
            Variant.of("PyTorch", PEER, plain),
            *engine_in_fp8(options, inputs, ("w1", "w2"), lambda x, first, second: second(gelu(first(x)))),
            *_ours(options),
        ],
        works=Floor.pair(feed_forward(S * B, D, F), 2 * x + w, 5 * x + 3 * w, options.dtype),
        truth=inputs.truth(plain),
        limit=LIMITS[options.dtype],
        stock="PyTorch",
    )


def _ours(options: Options) -> Iterator[Variant]:
    """Yield our backends; in FP8 with the weights quantised in each call, or kept, also as graphs, which quantise them."""

    def run(fn: Any, inputs: Inputs, main_grads: Any = (None, None)) -> torch.Tensor:
        return fn(*inputs.leaves.values(), main_grads)

    D, F = options.shape["hidden"], options.shape["ffn"]
    for one in Variant.candidates("feed_forward", options, run, hidden=D, ffn=F):
        if not one.runs or one.name != TRITON_FP8:
            yield one
            continue
        kept = dataclasses.replace(one, limit=QUANTIZED)
        yield kept.captured()
        yield kept.quantising()
        kept = dataclasses.replace(kept, name=f"{TRITON_FP8}, weights kept quantised")
        yield kept
        yield kept.into_main_grad("w1", "w2")
