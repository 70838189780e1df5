"""Scores of the DSA indexer over all keys: the backends, and stock's function.

Legend: S queries and keys, B batch, H indexer heads, D indexer head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import PEER, Draw, Floor, Inputs, Problem, Tensors, candidates, differentiable, floors
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.observe.flops import Work, causal_pairs

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}
BEYOND_RELU = {"bfloat16": 5e-2, "float32": 5e-2}
"""For gradients: of so many logits some round to the other side of ReLU's step, where gradients jump."""
STOCK = "stock"


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    sizes = options.shape
    B, S, H, D = (sizes[name] for name in ("B", "S", "indexer_heads", "indexer_dim"))
    draw = Draw(options)
    # The loss reaches causal pairs alone.
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=options.device).tril()

    def one() -> Inputs:
        leaves = {
            "q": draw.normal(S, B, H, D).requires_grad_(),
            "k": draw.normal(S, B, D).requires_grad_(),
            "w": draw.normal(S, B, H, scale=(H * D) ** -0.5).requires_grad_(),
        }
        gradient = draw.normal(B, S, S, dtype=torch.float32).masked_fill_(~causal_SS, 0.0)
        return Inputs(leaves=leaves, cotangents=(gradient,))

    def call(fn: Any, inputs: Inputs) -> Tensors:
        return [fn(*inputs.leaves.values())]

    limits = {"score": LIMITS[options.dtype]} | dict.fromkeys(("dq", "dk", "dw"), BEYOND_RELU[options.dtype])
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        sets=[one() for _ in range(options.sets)],
        variants=[
            differentiable(STOCK, PEER, _stock),
            *candidates("indexer", call, device=options.device, dtype=options.dtype, dim=D),
        ],
        works=_floors(B, S, H, D, draw.itemsize, options.dtype),
        judge=AgainstTruth(_truth, tuple(limits), limits),
        stock=STOCK,
    )


def _floors(B: int, S: int, H: int, D: int, size: int, dtype: str) -> dict[str, Floor]:
    """The scores of all pairs, which parity demands; of the backward pass the causal ones, which alone have a gradient."""
    inputs = S * B * (H * D + D + H) * size
    one = H * (D + 1)  # multiply-adds of a pair: q·k of every head, and their weighted sum
    scores, reached = B * S * S, B * causal_pairs(S)
    forward = inputs + 4 * scores
    return floors(Work(2 * scores * one, 4 * reached * one), forward, forward + 2 * inputs + 4 * reached, dtype)


def _truth(inputs: Inputs) -> Tensors:
    from megacpp_mcore.ops.indexer.reference import indexer_scores

    double = inputs.in_double()
    score = indexer_scores(*double.leaves.values())
    return [score, *torch.autograd.grad(score, list(double.leaves.values()), double.cotangents)]


def _stock(inputs: Inputs) -> Tensors:
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, k, w = inputs.leaves.values()
    run: Any = dsa._compute_index_scores
    return [run(q, w, k)]
