"""Dense layers: a layer's first norm, Mamba-3's input projection, MTP's feed-forward, and the output layer with its loss.

In bfloat16 and in FP8, also by Transformer Engine's linear layers. The head's losses and gradients are stock Megatron's, ours,
and installed vendors'; the three dense products are also timed by themselves: the floor of everything that forms logits.

Legend: S sequence, B batch, D or H hidden, F inner width; N all rows of the projection's weight, of which the wide parts come
first, or all tokens of the head; V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import engine_linear, lacking
from megacpp_mcore.bench.catalog import BOUND, OURS, PEER, Options
from megacpp_mcore.bench.problem import BOTH, Call, Draw, Floor, Inputs, Problem, Tensors, Variant, on_leaves
from megacpp_mcore.model import flops
from megacpp_mcore.ops.feed_forward import reference
from megacpp_mcore.ops.linear_cross_entropy import chunked
from megacpp_mcore.ops.linear_cross_entropy import reference as head
from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.rms_norm import reference as norm
from megacpp_mcore.ops.testing import PEER_RATIO, worst_row
from megacpp_mcore.te.fp8_scopes import RECIPES
from megacpp_mcore.util import te_imports

EPS = 1e-5

NORM_LIMIT = 8e-3
"""A row of bfloat16 is off by 2e-3; the gradient of the weight is a sum of as many rows as there are tokens, rounded once."""

QUANTIZED = 0.15
"""The worst row of products in FP8: two operands of E4M3 are off by 2.6 % each (rms), a gradient in E5M2 by 5 %."""

HEAD_LIMITS = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row; or one and a half times stock's, where that is more."""
STOCK = "stock"

SUMS = {"exact sums forward": {"forward": False}, "fast sums backward": {"backward": True}}
"""How the kernels of Mamba-3's projection can sum other than by default."""


def rms_norm(options: Options) -> Problem:
    """Compare every implementation on one set of rows; both gradients of a row are summed."""
    B, S, D = options.sizes("B", "S", "hidden")
    draw = Draw(options)
    leaves = draw.leaves(x=draw.normal(S, B, D), weight=1 + draw.normal(D, scale=0.1))
    inputs = Inputs(leaves, {"y": draw.normal(S, B, D), "residual": draw.normal(S, B, D)})

    def run(fn: Call, inputs: Inputs) -> Tensors:
        normed, residual = fn(inputs.leaves["x"], inputs.leaves["weight"], EPS)
        return normed, residual.view_as(residual)

    def plain(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> Tensors:
        return functional.rms_norm(x, weight_D.shape, weight_D, eps), x

    variants = [
        *_engine_norms(options, inputs, run),
        Variant.of("PyTorch", PEER, partial(run, plain)),
        *Variant.candidates("rms_norm", options, run, hidden=D),
    ]
    if options.device == "cuda":  # on the host, launching these takes longer than computing them on the device
        variants += [variant.captured() for variant in variants if variant.runs]
    moved = S * B * D * draw.itemsize
    works = Floor.pair(flops.Work(0, 0), 2 * moved, 6 * moved, "float32")
    return Problem(inputs, variants, works, inputs.truth(partial(run, norm.rms_norm)), NORM_LIMIT, outputs=2)


def _engine_norms(options: Options, inputs: Inputs, run: Call) -> Iterator[Variant]:
    """Yield Transformer Engine's norm, and stock's subclass that adds both gradients (``--fused-residual-rmsnorm``)."""
    names = ("Transformer Engine", "Transformer Engine, residual fused")
    if missing := lacking(options.device):
        yield from (Variant.missing(name, missing) for name in names)
        return
    import transformer_engine.pytorch as te
    from megatron.core.extensions import transformer_engine as stock

    def call(module: Call, x: torch.Tensor, *_: Any) -> Tensors:
        returned = module(x)
        return returned if isinstance(returned, tuple) else (returned, x)

    weight = inputs.leaves["weight"]
    for name, kind in zip(names, (te.RMSNorm, stock.TEFusedResidualRMSNorm), strict=True):
        module = kind(weight.shape, eps=EPS, dtype=weight.dtype, device=weight.device)
        yield Variant.of(name, PEER, partial(run, partial(call, module)), inputs.copied_to({"weight": module.weight}))


def feed_forward(options: Options) -> Problem:
    """Compare every implementation on one input; the floor reads and writes nothing between the two products."""
    B, S, D, F = options.sizes("B", "S", "hidden", "ffn")
    draw = Draw(options)
    weights = {"w1": draw.normal(F, D, scale=D**-0.5), "w2": draw.normal(D, F, scale=F**-0.5)}
    inputs = Inputs(draw.leaves(x=draw.normal(S, B, D), **weights), {"y": draw.normal(S, B, D)})
    x, w = inputs.leaves["x"].nbytes, sum(weight.nbytes for weight in weights.values())
    plain = partial(on_leaves(), reference.feed_forward)

    def run(fn: Call, inputs: Inputs, main_grads: Any = (None, None)) -> torch.Tensor:
        return fn(*inputs.leaves.values(), main_grads)

    engine = _engine_in_fp8(options, inputs, ("w1", "w2"), lambda x, first, second: second(functional.gelu(first(x))))
    variants = [Variant.of("PyTorch", PEER, plain), *engine]
    for candidate in Variant.candidates("feed_forward", options, run, hidden=D, ffn=F):
        variants += _in_fp8(candidate, "w1", "w2") if candidate.runs and candidate.name == TRITON_FP8 else [candidate]
    works = Floor.pair(flops.feed_forward(S * B, D, F), 2 * x + w, 5 * x + 3 * w, options.dtype)
    limit = {"bfloat16": 1e-2, "float32": 1e-5}[options.dtype]
    return Problem(inputs, variants, works, inputs.truth(plain), limit, stock="PyTorch")


def mamba3_projection(options: Options) -> Problem:
    """Compare every implementation on one input; its gradient has the layout of the implementation's own outputs."""
    B, S, D, wide, narrow = options.sizes("B", "S", "hidden", "wide", "narrow")
    draw = Draw(options)
    whole_SBN = draw.normal(S, B, wide + narrow)
    leaves = draw.leaves(x=draw.normal(S, B, D), weight=draw.normal(wide + narrow, D, scale=D**-0.5))
    parts = [part.contiguous() for part in whole_SBN.split([wide, narrow], -1)]
    inputs = Inputs(leaves, dict(zip(("wide", "narrow"), parts, strict=True)))
    x, weight, y = inputs.leaves["x"].nbytes, inputs.leaves["weight"].nbytes, whole_SBN.nbytes
    plain = partial(on_leaves(), functional.linear)

    def run(fn: Call, inputs: Inputs, main_grads: Any = (None,)) -> Tensors:
        return fn(*inputs.leaves.values(), *main_grads, wide)

    def joint(variant: Variant) -> Variant:
        """Return the variant of an implementation with both parts in one output, which takes one gradient."""

        def both(inputs: Inputs, **how: Any) -> Tensors:
            return variant.runs[BOTH](dataclasses.replace(inputs, cotangents={"y": whole_SBN}), **how)

        def results(outputs: Tensors) -> Tensors:
            return [outputs[0][..., :wide], outputs[0][..., wide:], *outputs[1:]]

        return dataclasses.replace(variant, runs=variant.runs and {**variant.runs, BOTH: both}, results=results)

    engine = _engine_in_fp8(options, inputs, ("weight",), lambda x, linear: linear(x))
    variants = [joint(peer) for peer in (Variant.of("PyTorch", PEER, plain), *engine)]
    for candidate in Variant.candidates("mamba3_projection", options, run, hidden=D, outputs=wide):
        if not candidate.runs:
            variants.append(candidate)
        elif TRITON_FP8 in candidate.name:
            variants += _in_fp8(candidate, "weight", all_sums=candidate.name == TRITON_FP8)
        else:  # the outputs are parts of one; in bfloat16 also as graphs
            variants += [joint(candidate).captured()] if options.device == "cuda" else []
            variants += [joint(candidate), joint(candidate).into_main_grad("weight")]
    work = flops.product(S * B * D * (wide + narrow))
    works = Floor.pair(work, x + weight + y, 3 * weight + 3 * x + 2 * y, options.dtype)
    truth = inputs.truth(lambda inputs: plain(inputs).split([wide, narrow], -1))
    limit = {"bfloat16": 5e-3, "float32": 1e-5}[options.dtype]
    return Problem(inputs, variants, works, truth, limit, outputs=2, stock="PyTorch")


def _in_fp8(backend: Variant, *weights: str, all_sums: bool = False) -> Iterator[Variant]:
    """Yield a backend as a graph that quantises the weights, with them quantised per call, and kept, also with ``SUMS``."""
    quantised = dataclasses.replace(backend, limit=QUANTIZED)
    yield from (quantised.captured(), quantised.quantising())
    kept = dataclasses.replace(quantised, name=f"{backend.name}, weights kept quantised")
    yield kept
    for how, change in SUMS.items() if all_sums else ():
        around = partial(mock.patch.dict, "megacpp_mcore.ops.mamba3_projection.triton.FAST", change)
        yield dataclasses.replace(kept, name=f"{kept.name}, {how}", around=around)
    yield kept.into_main_grad(*weights)


def _engine_in_fp8(options: Options, inputs: Inputs, names: tuple[str, ...], call: Call) -> Iterator[Variant]:
    """Yield a variant of each of Transformer Engine's FP8 recipes, which quantise the weights in every call.

    ``call`` computes the output from the input ``x`` and linear layers of the weights ``names``.
    """
    for recipe, (kind, check) in ((key, RECIPES[key]) for key in ("current", "block")):
        name = f"Transformer Engine, FP8 {recipe}"
        if not (reason := lacking(options.device, name=name)):
            can, why = te_imports.entry(check)(return_reason=True)
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


def linear_cross_entropy(options: Options) -> Problem:
    """Compute in every variant per-token losses and both gradients for random weights of the tokens."""
    hidden, vocab = options.sizes("hidden", "vocab")
    tokens, draw = options.shape["B"] * options.shape["S"], Draw(options)
    weight_VH = draw.normal(vocab, hidden, scale=hidden**-0.5)
    hidden_NH, share_N = draw.normal(tokens, hidden), draw.normal(tokens, dtype=torch.float32)
    inputs = Inputs(draw.leaves(hidden=hidden_NH, weight=weight_VH), {"loss": share_N})
    call = on_leaves(draw.integers(vocab, tokens))
    logit_NV = torch.empty(tokens, vocab, dtype=weight_VH.dtype, device=weight_VH.device).normal_()

    def products(inputs: Inputs) -> None:
        """Multiply for logits, gradient of hidden, gradient of weight."""
        hidden, weight = (leaf.detach() for leaf in inputs.leaves.values())
        torch.mm(hidden, weight.t(), out=logit_NV)
        torch.mm(logit_NV, weight)
        torch.mm(logit_NV.t(), hidden)

    variants = [
        *_stock_head(hidden, vocab, call),
        *_reduced(options, inputs, call),
        Variant.of("reference", OURS, partial(call, head.linear_cross_entropy)),
        Variant.of("chunked", OURS, partial(call, lambda *args: chunked.linear_cross_entropy(*args).loss)),
        _into("chunked, main_grad", weight_VH, call, None),
        _into("known weights, main_grad", weight_VH, call, share_N),
        Variant(name="three dense products", side=BOUND, runs={BOTH: products}),
    ]
    moved = 3 * (hidden_NH.nbytes + weight_VH.nbytes)  # both are read in both passes, and their gradients written
    # No forward pass by itself: some variants compute gradients in it.
    works = {BOTH: Floor(flops.product(tokens * hidden * vocab).training, moved, options.dtype)}
    truth = inputs.truth(partial(call, _dense))
    return Problem(inputs, variants, works, truth, HEAD_LIMITS[options.dtype], yardstick=STOCK)


def _dense(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    return functional.cross_entropy(hidden @ weight.t(), label, reduction=reduction)


def _stock_head(hidden: int, vocab: int, call: Call) -> Iterator[Variant]:
    """Yield ColumnParallelLinear with each of Megatron's two cross-entropies."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, gradient_accumulation_fusion=False,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    layer = ColumnParallelLinear(
        hidden, vocab, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_weight_param_allocation=True
    )
    group = parallel_state.get_tensor_model_parallel_group()

    def losses(loss_of: Call, hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits, _ = layer(hidden[:, None], weight=weight)
        return loss_of(logits, label[:, None], tp_group=group)[:, 0]

    yield Variant.of(STOCK, PEER, partial(call, partial(losses, vocab_parallel_cross_entropy)))
    fused = partial(losses, fused_vocab_parallel_cross_entropy)
    yield Variant.of("stock, fused cross-entropy", PEER, partial(call, fused))


def _into(name: str, weight_VH: torch.Tensor, call: Call, weight_N: torch.Tensor | None) -> Variant:
    """Accumulate as with fusion: the weight's gradient is added to an existing float32 buffer.

    The first run, which checks parity, starts with a zero buffer. Known weights are the gradients of the losses themselves.
    """
    buffer_VH = torch.zeros_like(weight_VH, dtype=torch.float32)

    def run(inputs: Inputs) -> Tensors:
        main_grad, leaves = MainGrad(buffer_VH, lambda: None), list(inputs.leaves.values())
        fn = partial(chunked.linear_cross_entropy, main_grad=main_grad, token_weight=weight_N)
        loss = call(fn, inputs).loss
        grad_hidden, _ = torch.autograd.grad(loss, leaves, inputs.cotangents["loss"], allow_unused=True)
        return [loss.detach(), grad_hidden, buffer_VH]

    return Variant(name=name, side=OURS, runs={BOTH: run})


def _reduced(options: Options, inputs: Inputs, call: Call) -> Iterator[Variant]:
    """Yield the mean loss over tokens, ours and of vendors that return only that: less work than the other variants."""

    def mean(fn: Call, inputs: Inputs) -> Tensors:
        loss, leaves = call(fn, inputs), list(inputs.leaves.values())
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    sizes = {name: options.shape[name] for name in ("hidden", "vocab")}
    dense = partial(mean, partial(_dense, reduction="mean"))
    truth = dict(zip(inputs.names, dense(inputs.in_double()), strict=True))
    plain = zip(dense(inputs), truth.items(), strict=True)
    limit = max(HEAD_LIMITS[options.dtype], *(PEER_RATIO * worst_row(out, ref, name) for out, (name, ref) in plain))
    for candidate in Variant.candidates("linear_cross_entropy", options, mean, work=BOTH, **sizes):
        side = OURS if candidate.name == "chunked" else PEER
        yield dataclasses.replace(candidate, name=f"{candidate.name}, mean", side=side, truth=truth, limit=limit)
