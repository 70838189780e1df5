"""The DSA indexer against stock's function: the selection of keys, and the gradient that trains it.

Legend: S queries and keys, B batch, H indexer heads, D indexer head width, N selected keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import FORWARD, PRECISIONS, Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.model.flops import causal_pairs, selected_pairs
from megacpp_mcore.ops.indexer.reference import indexer_loss, indexer_scores, select

SELECTED = 1e-5
"""How far a selected key's score may be below the one it replaced: rounding of scores in float32."""
BEYOND_RELU = 5e-2
"""For gradients: among so many logits, some round to the other side of ReLU's step, where gradients jump."""
LIMITS = {"loss": 1e-4, "dq": BEYOND_RELU, "dk": BEYOND_RELU, "dw": BEYOND_RELU}
GRADIENT = "gradient"
STOCK = "stock"


def problem(options: Options) -> Problem:
    """Check the selection against all scores."""
    B, S, H, D, N = options.sizes("B", "S", "indexer_heads", "indexer_dim", "topk")
    draw = Draw(options)

    def run(fn: Any, inputs: Inputs) -> Any:
        return fn(*inputs.leaves.values(), N)

    # Queries that select every key they see need no scores.
    scored = causal_pairs(S) - causal_pairs(min(N, S))
    moved = S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 4
    floor = Floor(operations=2 * B * scored * H * (D + 1), moved=moved, precision=PRECISIONS[options.dtype])
    inputs = Inputs(leaves=_drawn(draw, options))
    truth = {"selected": indexer_scores(*inputs.in_double().leaves.values())}
    return Problem(
        inputs=inputs,
        variants=[
            Variant.of(STOCK, PEER, lambda inputs: _stock(inputs, N)),
            *Variant.candidates("indexer", options, run, dim=D, heads=H),
        ],
        works={FORWARD: floor},
        truth=truth,
        limit=SELECTED,
        rows=selected_scores,
        stock=STOCK,
    )


def gradient_problem(options: Options) -> Problem:
    """Check the gradient of the indexer's loss against a given target; the truth is autograd's, over all keys."""
    B, S, H, D, N = options.sizes("B", "S", "indexer_heads", "indexer_dim", "topk")
    draw = Draw(options)
    leaves = _drawn(draw, options)
    index_BSN = select(leaves["q"], leaves["k"], leaves["w"], N)
    target_BSN = draw.normal(*index_BSN.shape, dtype=torch.float32).exp().masked_fill(index_BSN < 0, 0.0)

    def run(fn: Any, inputs: Inputs) -> Any:
        loss, *gradients = fn(*inputs.leaves.values(), index_BSN, target_BSN, 1.0)
        return [loss[None], *gradients]

    double = list(Inputs(leaves=leaves).in_double().leaves.values())
    true_loss = indexer_loss(indexer_scores(*double), index_BSN, target_BSN.double())
    truth = dict(zip(LIMITS, (true_loss[None], *torch.autograd.grad(true_loss, double)), strict=True))
    moved = 2 * S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 8
    operations = 6 * B * selected_pairs(S, N) * H * (D + 1)
    ours = Variant.candidates("indexer_grad", options, run, dim=D, heads=H)
    return Problem(
        inputs=Inputs(leaves=leaves),
        variants=[
            Variant.missing(STOCK, "no peer: stock's function makes the target, too"),
            *(dataclasses.replace(one, runs={GRADIENT: one.runs[FORWARD]} if one.runs else {}) for one in ours),
        ],
        works={GRADIENT: Floor(operations=operations, moved=moved, precision=PRECISIONS[options.dtype])},
        truth=truth,
        limit=LIMITS,
        outputs=len(LIMITS),
    )


def selected_scores(index_BSN: torch.Tensor, score_BSS: torch.Tensor) -> Tensors:
    """Return the scores of the selected keys, best first, and the best that each query could select; both padded with 0.

    Args:
        index_BSN: selected keys, -1 for none.
        score_BSS: of all keys; those of the future are ignored.

    Raises:
        AssertionError: a key of the future, a duplicate key, or too few.
    """
    keys, topk = score_BSS.shape[-1], index_BSN.shape[-1]
    causal_SS = torch.ones(keys, keys, dtype=torch.bool, device=score_BSS.device).tril()
    best_BSN = score_BSS.masked_fill(~causal_SS, float("-inf")).topk(topk, dim=-1).values
    has_key = best_BSN > float("-inf")
    chosen = torch.zeros((*score_BSS.shape[:2], keys + 1), dtype=torch.bool, device=score_BSS.device)
    chosen = chosen.scatter_(2, torch.where(index_BSN < 0, keys, index_BSN).long(), True)[..., :keys]
    if bool((chosen & ~causal_SS).any()) or not torch.equal(chosen.sum(-1), has_key.sum(-1)):
        raise AssertionError("a key of the future is selected, one key twice, or too few")
    found_BSN = score_BSS.masked_fill(~chosen, float("-inf")).topk(topk, dim=-1).values
    return [found_BSN.masked_fill(~has_key, 0.0), best_BSN.masked_fill(~has_key, 0.0)]


def _drawn(draw: Draw, options: Options) -> dict[str, torch.Tensor]:
    B, S, H, D = options.sizes("B", "S", "indexer_heads", "indexer_dim")
    q, k = draw.normal(S, B, H, D), draw.normal(S, B, D)
    return {"q": q, "k": k, "w": draw.normal(S, B, H, scale=(H * D) ** -0.5)}


def _stock(inputs: Inputs, topk: int) -> Any:
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, k, w = inputs.leaves.values()
    starts = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    ends = torch.arange(1, len(q) + 1, device=q.device)
    with torch.no_grad():
        return dsa.fused_qk_topk_naive(q, k, w, topk, varlen_starts=starts, varlen_ends=ends)[1]
