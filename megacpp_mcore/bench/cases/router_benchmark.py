"""The router of an E layer, from logits to probabilities, routing and losses, against stock's functions.

Legend: S sequence, B batch, T tokens (S × B), E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import Work
from megacpp_mcore.ops.router.reference import Routed, route

LIMIT = 1e-5
"""Logits are float32 whatever the model's dtype."""

LOSS = 1e-4
"""Weight of both losses."""


def problem(options: Options) -> Problem:
    """Compare every implementation on one set of logits."""
    B, S, E, topk = options.sizes("B", "S", "experts", "routed")
    draw = Draw(options)
    bias_E = draw.normal(E, scale=0.1, dtype=torch.float32)
    inputs = Inputs(
        leaves=draw.leaves(logits=draw.normal(S * B, E, dtype=torch.float32)),
        cotangents={"probs": draw.normal(S * B, E, dtype=torch.float32)},
    )

    def run(fn: Any, inputs: Inputs) -> torch.Tensor:
        """Return probabilities with the losses added to each, so that one output depends on everything."""
        routed = fn(inputs.leaves["logits"], bias_E, topk=topk, batch=B)
        losses = (routed.score_BE * routed.best_BE).sum() / S**2 + routed.squared / S
        return routed.probs_TE + LOSS * losses

    moved = S * B * E * (4 + 4 + 1)
    return Problem(
        inputs=inputs,
        variants=[
            Variant.of("stock's functions", PEER, partial(run, _stock)),
            *Variant.candidates("router", options, run, dtype=torch.float32, experts=E),
        ],
        works=Floor.pair(Work(0, 0), moved, 3 * moved, "float32"),
        truth=inputs.truth(partial(run, route)),
        limit=LIMIT,
    )


def _stock(logits_TE: torch.Tensor, bias_E: torch.Tensor, *, topk: int, batch: int) -> Routed:
    """Make the calls of stock's TopKRouter in sequence (megatron-core 0.19.2, ``transformer/moe/router.py``)."""
    from megatron.core.transformer.moe import moe_utils

    probs_TE, routing_TE = moe_utils.topk_routing_with_score_function(
        logits_TE, topk, score_function="sigmoid", expert_bias=bias_E
    )
    best_TE, score_TE = moe_utils.compute_routing_scores_for_aux_loss(logits_TE, topk, "sigmoid")
    best_BE, score_BE = (each.unflatten(0, (-1, batch)).sum(0) for each in (best_TE, score_TE))
    squared = moe_utils.z_loss_func(logits_TE, 1.0) * logits_TE.shape[0]
    return Routed(probs_TE, routing_TE, routing_TE.sum(0), best_BE, score_BE, squared)
