"""The ops of an E layer: its router, and its experts on rows sorted by expert, or on tokens with their routing.

The router goes from logits to probabilities, routing and losses, and its peer is stock's functions. Peers of the experts are
Transformer Engine's GroupedLinear, for which stock gathers rows and sums by token, and PyTorch's grouped products.

Legend: S sequence, B batch, T rows (sorted rows: each token once per expert it is routed to; otherwise tokens), E experts, D
hidden, F expert width.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.bench.cases.peers import engine_linear, lacking
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Call, Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import Work, feed_forward
from megacpp_mcore.ops.grouped_mlp import reference
from megacpp_mcore.ops.router.reference import Routed, route

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}
ROUNDED = 3e-2
"""For variants that round the hidden activation to the dtype of their inputs: all but the reference."""
QUANTIZED = 0.3
"""For products in FP8: a probability's gradient can be small compared with the products it sums."""

BACKENDS = {"triton": ROUNDED, "quack": ROUNDED, TRITON_FP8: QUANTIZED, "te": ROUNDED}
"""The limits of backends, which also add to a main_grad. All except ``te`` are also run as graphs; FP8 quantises the weights in
every replay."""

LOSS = 1e-4
"""Weight of both of the router's losses."""

SKEW = 0.3
"""Standard deviation of the experts' biases, relative to scores of standard deviation one."""


def router(options: Options) -> Problem:
    """Compare every implementation on one set of logits."""
    B, S, E, topk = options.sizes("B", "S", "experts", "routed")
    draw = Draw(options)
    bias_E = draw.normal(E, scale=0.1, dtype=torch.float32)
    logits, share = (draw.normal(S * B, E, dtype=torch.float32) for _ in range(2))
    inputs = Inputs(draw.leaves(logits=logits), {"probs": share})

    def run(fn: Call, inputs: Inputs) -> torch.Tensor:
        """Return probabilities with the losses added to each, so that one output depends on everything."""
        routed = fn(inputs.leaves["logits"], bias_E, topk=topk, batch=B)
        losses = (routed.score_BE * routed.best_BE).sum() / S**2 + routed.squared / S
        return routed.probs_TE + LOSS * losses

    moved = S * B * E * (4 + 4 + 1)
    peer = Variant.of("stock's functions", PEER, partial(run, _stock_router))
    variants = [peer, *Variant.candidates("router", options, run, dtype=torch.float32, experts=E)]
    works = Floor.pair(Work(0, 0), moved, 3 * moved, "float32")  # logits are float32 whatever the model's dtype
    return Problem(inputs, variants, works, inputs.truth(partial(run, route)), 1e-5)


def _stock_router(logits_TE: torch.Tensor, bias_E: torch.Tensor, *, topk: int, batch: int) -> Routed:
    """Make the calls of stock's TopKRouter in sequence (megatron-core 0.19.2, ``transformer/moe/router.py``)."""
    from megatron.core.transformer.moe import moe_utils

    probs_TE, routing_TE = moe_utils.topk_routing_with_score_function(
        logits_TE, topk, score_function="sigmoid", expert_bias=bias_E
    )
    best_TE, score_TE = moe_utils.compute_routing_scores_for_aux_loss(logits_TE, topk, "sigmoid")
    best_BE, score_BE = (scores_TE.unflatten(0, (-1, batch)).sum(0) for scores_TE in (best_TE, score_TE))
    squared = moe_utils.z_loss_func(logits_TE, 1.0) * logits_TE.shape[0]
    return Routed(probs_TE, routing_TE, routing_TE.sum(0), best_BE, score_BE, squared)


def grouped_mlp(options: Options) -> Problem:
    """Compare every implementation on one set of rows and weights."""
    T, draw = options.shape["B"] * options.shape["S"] * options.shape["routed"], Draw(options)
    counts_E = torch.bincount(draw.integers(options.shape["experts"], T), minlength=options.shape["experts"])
    probs = partial(torch.rand, T, generator=draw.generator, device=options.device)
    inputs, counts = _inputs(draw, options, T, probs), counts_E.tolist()

    def run(fn: Call, inputs: Inputs, **how: Any) -> torch.Tensor:
        x, probs, w1, w2 = inputs.leaves.values()
        return fn(x, counts_E, w1, w2, probs, **how)

    def by_engine(experts: Call, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return experts(x, others[-1], counts)

    peers = [_grouped_mm(options, run), _by_engine("TE GroupedLinear", options, inputs, run, by_engine)]
    return _problem("grouped_mlp", options, inputs, run, peers, shape={**options.shape, "T": T})


def routed_mlp(options: Options) -> Problem:
    """Compare every implementation on one set of tokens, routed by scores with a bias for each expert."""
    (E, K), T, draw = options.sizes("experts", "routed"), options.shape["B"] * options.shape["S"], Draw(options)
    score_TE = draw.normal(T, E, dtype=torch.float32) + draw.normal(E, scale=SKEW, dtype=torch.float32)
    routing_TE = torch.zeros_like(score_TE, dtype=torch.bool).scatter_(1, score_TE.topk(K).indices, True)
    probs_TE = score_TE.sigmoid() * routing_TE
    inputs = _inputs(draw, options, T, lambda: probs_TE / probs_TE.sum(1, keepdim=True))

    def run(fn: Call, inputs: Inputs, **how: Any) -> torch.Tensor:
        x, probs, w1, w2 = inputs.leaves.values()
        return fn(x, routing_TE, probs, w1, w2, topk=K, **how)

    # Megatron's permutation around TE's linears, like the alltoall dispatcher and TEGroupedMLP in one process.
    stock = [
        _by_engine(f"stock TEGroupedMLP{name}", options, inputs, run, partial(_permuted, fused))
        for name, fused in (("", False), (", fused permutation", True))
    ]
    return _problem("routed_mlp", options, inputs, run, stock)


def _inputs(draw: Draw, options: Options, rows: int, probs: Callable[[], torch.Tensor]) -> Inputs:
    E, D, width = options.sizes("experts", "hidden", "expert_width")
    x = draw.normal(rows, D)
    w1, w2 = draw.normal(E, width, D, scale=D**-0.5), draw.normal(E, D, width, scale=width**-0.5)
    return Inputs(draw.leaves(x=x, probs=probs(), w1=w1, w2=w2), {"y": draw.normal(rows, D)})


def _problem(op: str, options: Options, inputs: Inputs, run: Call, peers: Sequence[Variant], **more: Any) -> Problem:
    routed = options.shape["B"] * options.shape["S"] * options.shape["routed"]
    rows, weights = inputs.leaves["x"].nbytes, inputs.leaves["w1"].nbytes + inputs.leaves["w2"].nbytes
    E, D, width = options.sizes("experts", "hidden", "expert_width")
    variants = [*peers]
    for candidate in Variant.candidates(op, options, run, hidden=D, ffn=width, experts=E):
        variant = dataclasses.replace(candidate, limit=BACKENDS.get(candidate.name))
        if variant.name == TRITON_FP8 and variant.runs:
            variants.append(dataclasses.replace(variant, name=f"{TRITON_FP8}, weights kept quantised"))
            variant = variant.quantising()
        variants.append(variant)
        if variant.name in BACKENDS and variant.runs:
            variants += [variant.captured()] if options.device == "cuda" and variant.name != "te" else []
            variants.append(variant.into_main_grad("w1", "w2"))

    def norms(name: str, norm: torch.Tensor) -> torch.Tensor:
        """Return norms for errors; gradients of probabilities are few sums, some small by chance, so all share one norm."""
        return norm.square().mean().sqrt().expand_as(norm) if name == "dprobs" else norm

    work, truth = feed_forward(routed, D, width), inputs.truth(partial(run, getattr(reference, op)))
    works = Floor.pair(work, weights + 2 * rows, 3 * weights + 5 * rows, options.dtype)
    return Problem(inputs, variants, works, truth, LIMITS[options.dtype], norms=norms, **more)


def _grouped_mm(options: Options, run: Call) -> Variant:
    name = "torch._grouped_mm"
    if options.dtype != "bfloat16":
        return Variant.missing(name, f"it takes bfloat16, not {options.dtype}")
    if any(width % 8 for width in options.sizes("hidden", "expert_width")):
        return Variant.missing(name, "it takes widths that are multiples of 8")

    def call(x: Any, counts: Any, w1: torch.Tensor, w2: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ends_E = counts.cumsum(0).to(torch.int32)
        hidden = F.gelu(torch._grouped_mm(x, w1.transpose(1, 2), offs=ends_E))
        hidden = (hidden * probs[:, None]).to(x.dtype)
        return torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends_E)

    return Variant.of(name, PEER, partial(run, call), limit=ROUNDED)


def _permuted(fused: bool, experts: Call, x: Any, routing: Any, probs: Any, *_: Any, topk: int) -> torch.Tensor:
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    counts = routing.sum(0).tolist()  # the host waits, as it does in stock
    row, prob, places, *_ = moe_utils.permute(x, routing, probs=probs, num_out_tokens=len(x) * topk, fused=fused)
    return moe_utils.unpermute(experts(row, prob, counts), places, x.shape, routing_map=routing, fused=fused)


def _by_engine(name: str, options: Options, inputs: Inputs, run: Call, call: Call) -> Variant:
    """Return ``call``, given TE's linears of the experts with their activation, in ``run``; or why it cannot run here."""
    if reason := lacking(options.device):
        return Variant.missing(name, reason)
    linears = {weight: engine_linear(inputs.leaves[weight]) for weight in ("w1", "w2")}

    def experts(x: torch.Tensor, probs: torch.Tensor, counts: list[int]) -> torch.Tensor:
        hidden = (F.gelu(linears["w1"](x, counts)) * probs[:, None]).to(x.dtype)
        return linears["w2"](hidden, counts)

    numbers = range(options.shape["experts"])
    weights = {weight: [getattr(linear, f"weight{number}") for number in numbers] for weight, linear in linears.items()}
    return Variant.of(name, PEER, partial(run, partial(call, experts)), inputs.copied_to(weights), limit=ROUNDED)
