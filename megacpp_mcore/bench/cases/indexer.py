"""The DSA indexer: the selection of keys, against stock's function, and the gradient that trains it.

Legend: S queries and keys, B batch, H indexer heads, D indexer head width, N selected keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    FORWARD,
    PEER,
    PRECISIONS,
    Draw,
    Floor,
    Inputs,
    Problem,
    Tensors,
    candidates,
    differentiable,
    missing,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import causal_pairs, selected_pairs

SELECTED = 1e-5
"""How far the score of a selected key may be below that of the one it was taken for: rounding of scores in float32."""
BEYOND_RELU = 5e-2
"""For gradients: of so many logits some round to the other side of ReLU's step, where gradients jump."""
LIMITS = {"loss": 1e-4, "dq": BEYOND_RELU, "dk": BEYOND_RELU, "dw": BEYOND_RELU}
GRADIENT = "gradient"
STOCK = "stock"


def problems(options: Options) -> Iterator[Problem]:
    """The selection."""
    sizes = options.shape
    B, S, H, D, N = (sizes[name] for name in ("B", "S", "indexer_heads", "indexer_dim", "topk"))
    draw = Draw(options)

    def call(fn: Any, inputs: Inputs) -> Tensors:
        return [fn(*inputs.leaves.values(), N)]

    # Of queries that select every key they see, no score is needed.
    scored = causal_pairs(S) - causal_pairs(min(N, S))
    moved = S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 4
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=Inputs(leaves=_indexer(draw, sizes), cotangents=()),
        variants=[
            differentiable(STOCK, PEER, lambda inputs: _stock(inputs, N)),
            *candidates("indexer", call, device=options.device, dtype=options.dtype, dim=D),
        ],
        works={
            FORWARD: Floor(operations=2 * B * scored * H * (D + 1), moved=moved, precision=PRECISIONS[options.dtype])
        },
        judge=BestSelected(_scores, ("selected",), SELECTED),
        stock=STOCK,
    )


def gradient_problems(options: Options) -> Iterator[Problem]:
    """The gradient of the indexer's loss against a given target."""
    from megacpp_mcore.ops.indexer.reference import select

    sizes = options.shape
    B, S, H, D, N = (sizes[name] for name in ("B", "S", "indexer_heads", "indexer_dim", "topk"))
    draw = Draw(options)

    def one() -> Inputs:
        leaves = _indexer(draw, sizes)
        index_BSN = select(leaves["q"], leaves["k"], leaves["w"], N)
        target_BSN = draw.normal(*index_BSN.shape, dtype=torch.float32).exp().masked_fill(index_BSN < 0, 0.0)
        return Inputs(leaves=leaves, cotangents=(), fixed={"index": index_BSN, "target": target_BSN})

    def call(fn: Any, inputs: Inputs) -> Tensors:
        loss, *gradients = fn(*inputs.leaves.values(), inputs.fixed["index"], inputs.fixed["target"], 1.0)
        return [loss[None], *gradients]

    pairs = B * selected_pairs(S, N)
    moved = 2 * S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 8
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=one(),
        variants=[
            missing(STOCK, "no peer: stock's function makes the target, too"),
            *(
                dataclasses.replace(variant, runs={GRADIENT: variant.runs[FORWARD]} if variant.runs else {})
                for variant in candidates("indexer_grad", call, device=options.device, dtype=options.dtype, dim=D)
            ),
        ],
        works={GRADIENT: Floor(operations=6 * pairs * H * (D + 1), moved=moved, precision=PRECISIONS[options.dtype])},
        judge=AgainstTruth(_gradient, tuple(LIMITS), LIMITS, outputs=len(LIMITS)),
    )


class BestSelected(AgainstTruth):
    """The scores of the selected keys, best first, against the best that a query could select; the truth is all scores."""

    def _error(self, name: str, have: torch.Tensor, want: torch.Tensor, inputs: Any) -> float:
        keys = want.shape[-1]
        causal_SS = torch.ones(keys, keys, dtype=torch.bool, device=want.device).tril()
        best_BSN = want.masked_fill(~causal_SS, float("-inf")).topk(have.shape[-1], dim=-1).values
        has_key = best_BSN > float("-inf")
        chosen = torch.zeros((*want.shape[:2], keys + 1), dtype=torch.bool, device=want.device)
        chosen.scatter_(2, torch.where(have < 0, keys, have).long(), True)
        chosen = chosen[..., :keys]
        if bool((chosen & ~causal_SS).any()) or not torch.equal(chosen.sum(-1), has_key.sum(-1)):
            return float("inf")  # a key of the future, one key twice, or too few
        found_BSN = want.masked_fill(~chosen, float("-inf")).topk(have.shape[-1], dim=-1).values
        return super()._error(name, found_BSN.masked_fill(~has_key, 0.0), best_BSN.masked_fill(~has_key, 0.0), inputs)


def _indexer(draw: Draw, sizes: Any) -> dict[str, torch.Tensor]:
    B, S, H, D = (sizes[name] for name in ("B", "S", "indexer_heads", "indexer_dim"))
    return {
        "q": draw.normal(S, B, H, D),
        "k": draw.normal(S, B, D),
        "w": draw.normal(S, B, H, scale=(H * D) ** -0.5),
    }


def _scores(inputs: Inputs) -> Tensors:
    from megacpp_mcore.ops.indexer.reference import indexer_scores

    return [indexer_scores(*inputs.in_double().leaves.values()).detach()]


def _gradient(inputs: Inputs) -> Tensors:
    """Through autograd, over all keys."""
    from megacpp_mcore.ops.indexer.reference import indexer_loss, indexer_scores

    leaves = list(inputs.in_double().leaves.values())
    loss = indexer_loss(indexer_scores(*leaves), inputs.fixed["index"], inputs.fixed["target"].double())
    return [loss[None], *torch.autograd.grad(loss, leaves)]


def _stock(inputs: Inputs, topk: int) -> Tensors:
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, k, w = inputs.leaves.values()
    starts = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    ends = torch.arange(1, len(q) + 1, device=q.device)
    with torch.no_grad():
        _, index_BSN = dsa.fused_qk_topk_naive(q, k, w, topk, varlen_starts=starts, varlen_ends=ends)
    return [index_BSN]
