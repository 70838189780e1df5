"""Plain-PyTorch truth of a sigmoid router: selection by biased scores, probabilities, and the sums for its losses.

Shape legend: S sequence, B batch, T tokens (S × B, a sequence's tokens B apart), E experts, K experts per token.
Source: DeepSeek-V3 (arXiv 2412.19437, 2.1.2) for scores, bias and the loss by sequence, ST-MoE (arXiv 2202.08906, 2.2) for the
z-loss; megatron-core 0.19 ``transformer/moe/router.py`` and ``moe_utils.py`` for the order of operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megacpp_mcore.errors import ModelError

TINY = 1e-20
"""Added to the sum that normalises scores."""


class Routed(NamedTuple):
    """Result of :func:`route`.

    Attributes:
        probs_TE: scores of a token's experts over their sum; zero elsewhere. Differentiable.
        routing_TE: bool, the K experts of each token: the best by score + bias, the first among ties.
        load_E: tokens per expert, float32.
        best_BE: how many tokens of each sequence have an expert among their top K by score without bias, float32.
        score_BE: the sum over a sequence of scores, each token's normalised over all experts. Differentiable.
        squared: the sum over all tokens of the squared log-sum-exp of the logits. Differentiable.
    """

    probs_TE: torch.Tensor
    routing_TE: torch.Tensor
    load_E: torch.Tensor
    best_BE: torch.Tensor
    score_BE: torch.Tensor
    squared: torch.Tensor


def check(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, topk: int, batch: int) -> None:
    """Raise ModelError unless the arguments of :func:`route` fit together."""
    shape = tuple(logits_TE.shape)
    if logits_TE.dtype not in (torch.float32, torch.float64) or len(shape) != 2:
        raise ModelError(f"logits are {logits_TE.dtype} {list(shape)}, expected float32 [T, E]")
    if batch < 1 or shape[0] % batch:
        raise ModelError(f"there are {shape[0]} tokens, expected a multiple of the batch, {batch}")
    if not 1 < topk <= shape[1]:
        raise ModelError(f"topk is {topk}, expected 2 to E = {shape[1]}: with one expert a score is not normalised")
    if bias_E is not None and (bias_E.dtype != torch.float32 or tuple(bias_E.shape) != shape[1:]):
        raise ModelError(f"bias is {bias_E.dtype} {list(bias_E.shape)}, expected float32 [E] = [{shape[1]}]")


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, *, topk: int, batch: int) -> Routed:
    """Route every token to ``topk`` experts.

    Args:
        logits_TE: logits of the router, float32 (float64: everything is computed in float64).
        bias_E: the load-balancing bias, added to the scores for the selection only; None: no bias.
        topk: K, 2 or more.
        batch: B.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check(logits_TE, bias_E, topk, batch)
    score_TE = torch.sigmoid(logits_TE)
    normalised_TE = score_TE / (score_TE.sum(1, keepdim=True) + TINY)
    routing_TE = _best(score_TE if bias_E is None else score_TE + bias_E, topk)
    chosen_TE = score_TE * routing_TE
    best_SBE, normalised_SBE = (tensor.unflatten(0, (-1, batch)) for tensor in (_best(normalised_TE, topk), normalised_TE))
    return Routed(
        probs_TE=chosen_TE / (chosen_TE.sum(1, keepdim=True) + TINY),
        routing_TE=routing_TE,
        load_E=routing_TE.sum(0).float(),
        best_BE=best_SBE.sum(0).float(),
        score_BE=normalised_SBE.sum(0),
        squared=logits_TE.logsumexp(1).square().sum(),
    )


def _best(score_TE: torch.Tensor, topk: int) -> torch.Tensor:
    """Select each row's top-k, the first among ties."""
    best_TK = score_TE.detach().sort(dim=1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(score_TE, dtype=torch.bool).scatter(1, best_TK, True)
