"""The input projection of Mamba-3: in bfloat16, with its wide parts in FP8, and Transformer Engine's linear layer in FP8.

Legend: S sequence, B batch, D hidden, N all rows of the weight, of which the wide parts come first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import ENGINE, lacking
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.measure import AgainstTruth, in_double
from megacpp_mcore.bench.problem import BOTH, FORWARD, Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model.flops import product
from megacpp_mcore.te.fp8_scopes import RECIPES
from megacpp_mcore.util import te_imports

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}
QUANTIZED = 0.15
"""The worst row of products in FP8: two operands of E4M3 are off by 2.6 % each (rms), a gradient in E5M2 by 5 %."""

Call = Callable[..., tuple[torch.Tensor, ...]]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def problem(options: Options) -> Problem:
    """Compare every implementation on one input, whose gradient comes as the implementation's own outputs are laid out."""
    B, S, D, wide, narrow = options.sizes("B", "S", "hidden", "wide", "narrow")
    draw = Draw(options)
    whole_SBN = draw.normal(S, B, wide + narrow)
    inputs = Inputs(
        leaves=draw.leaves(x=draw.normal(S, B, D), weight=draw.normal(wide + narrow, D, scale=D**-0.5)),
        cotangents={name: part.contiguous() for name, part in _parts(whole_SBN, wide).items()},
        fixed={"whole": whole_SBN},
    )
    x, weight, y = inputs.leaves["x"].nbytes, inputs.leaves["weight"].nbytes, whole_SBN.nbytes

    def truth(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return (*_parts(inputs.leaves["x"] @ inputs.leaves["weight"].T, wide).values(),)

    return Problem(
        inputs=inputs,
        variants=[
            _variant("PyTorch", PEER, lambda given: (torch.nn.functional.linear(*given.leaves.values()),), wide),
            *engine_in_fp8(options, inputs.leaves["weight"], make=partial(_engine, wide)),
            *_ours(options, wide),
        ],
        works=Floor.pair(
            product(S * B * D * (wide + narrow)), x + weight + y, 3 * weight + 3 * x + 2 * y, options.dtype
        ),
        check=AgainstTruth(in_double(truth, inputs), LIMITS[options.dtype], outputs=2),
        stock="PyTorch",
    )


def _parts(y: torch.Tensor, wide: int) -> dict[str, torch.Tensor]:
    return dict(zip(("wide", "narrow"), (y[..., :wide], y[..., wide:]), strict=True))


def _variant(name: str, side: str, call: Call, wide: int, weight: torch.Tensor | None = None, **more: Any) -> Variant:
    """Return the variant whose outputs are ``call``'s: one, or the wide and the narrow part apart."""

    def both(inputs: Inputs, **how: Any) -> Tensors:
        outputs = call(inputs, **how)
        given = [*inputs.cotangents.values()] if len(outputs) == 2 else [inputs.fixed["whole"]]
        leaves = [inputs.leaves["x"], inputs.leaves["weight"] if weight is None else weight]
        return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, given)]

    def results(found: Tensors) -> Tensors:
        is_whole = found[0].shape[-1] > wide
        return [*_parts(found[0], wide).values(), *found[1:]] if is_whole else found

    return Variant(name=name, side=side, runs={FORWARD: call, BOTH: both}, results=results, **more)


def _engine(wide: int, name: str, linears: Sequence[Any], scope: Scope) -> Variant:
    """Return Transformer Engine's linear layer in an FP8 recipe."""
    (linear,) = linears

    def call(inputs: Inputs) -> tuple[torch.Tensor]:
        with scope():
            return (linear(inputs.leaves["x"]),)

    return _variant(name, PEER, call, wide, linear.weight, limit=QUANTIZED)


def engine_in_fp8(
    options: Options, *weights: torch.Tensor, make: Callable[[str, Sequence[Any], Scope], Variant]
) -> Iterator[Variant]:
    """Yield a variant of each of Transformer Engine's FP8 recipes, which quantise the weights in every call.

    ``make`` is given its name, linear layers of these weights, and the recipe's scope.
    """
    for recipe in ("current", "block"):
        name = f"Transformer Engine, FP8 {recipe}"
        reason = lacking(options.device, ENGINE, name)
        if not reason:
            kind, asks = RECIPES[recipe]
            can, why = te_imports.entry(asks)(return_reason=True)
            reason = "" if can else f"not here: {why}"
        if reason:
            yield Variant.missing(name, reason)
            continue
        linears = []
        for weight in weights:
            made: dict[str, Any] = {"bias": False, "params_dtype": weight.dtype, "device": weight.device}
            linears.append(te_imports.entry("Linear")(weight.shape[1], len(weight), **made))
            with torch.no_grad():
                linears[-1].weight.copy_(weight)
        scope = partial(te_imports.entry("autocast"), enabled=True, recipe=te_imports.entry(kind)())
        yield make(name, linears, scope)


def _ours(options: Options, wide: int) -> Iterator[Variant]:
    """Yield our backends; in FP8 with the weight quantised in each call, or kept, also as graphs, which quantise it."""

    def run(fn: Any, inputs: Inputs, main_grads: Any = (None,)) -> tuple[torch.Tensor, ...]:
        return fn(*inputs.leaves.values(), *main_grads, wide)

    D = options.shape["hidden"]
    for found in Variant.candidates("mamba3_projection", options, run, hidden=D, outputs=wide):
        if not found.runs:
            yield found
            continue
        kept = _variant(
            found.name, found.side, found.runs[FORWARD], wide, limit=QUANTIZED if TRITON_FP8 in found.name else None
        )
        if options.device == "cuda":
            yield kept.captured()
        if TRITON_FP8 in found.name:
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
