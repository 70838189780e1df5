"""Triton kernels of the router: a program handles some tokens of one sequence, with all experts.

Legend: as in :mod:`megacpp_mcore.ops.router.reference`; P programs of a sequence, C columns of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def selected(score_SE, here_E, K: tl.constexpr):
    """Select a row's top K: the first among ties, NaN above all; columns beyond the experts are not ``here``."""
    e = tl.arange(0, score_SE.shape[1])[None, :]
    # With NaN, comparisons would select one expert K times.
    left_SE = tl.where(here_E, tl.where(score_SE == score_SE, score_SE, float("inf")), float("-inf"))
    found_SE = tl.zeros(score_SE.shape, tl.int1)
    for _ in tl.static_range(K):
        best_S = tl.argmax(left_SE, 1, tie_break_left=True)
        now_SE = e == best_S[:, None]
        found_SE = found_SE | now_SE
        left_SE = tl.where(now_SE, float("-inf"), left_SE)
    return found_SE & here_E


@triton.jit
def shares(score_SE, TINY: tl.constexpr):
    """Divide each score by its row's sum, rounded like PyTorch's division."""
    sum_S1 = (tl.sum(score_SE, 1) + TINY)[:, None]
    return tl.div_rn(score_SE, tl.broadcast_to(sum_S1, score_SE.shape))


@triton.jit(do_not_specialize=["S", "B"])
def route(
    logits_TE,
    score_TE,
    bias_E,
    probs_TE,
    routing_TE,
    sums_PBC,
    S,
    B,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TINY: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute probabilities and routing of some tokens, and four groups of sums over them: load, best, scores, squares."""
    p, b = tl.program_id(0), tl.program_id(1)
    s, e = p * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    rows = (s.to(tl.int64) * B + b)[:, None] * E + e[None, :]
    here_E = (e < E)[None, :]
    seen = (s < S)[:, None] & here_E
    logits_SE = tl.load(logits_TE + rows, mask=seen, other=0.0)
    score_SE = tl.load(score_TE + rows, mask=seen, other=0.0)
    biased_SE = score_SE
    if bias_E is not None:
        biased_SE += tl.load(bias_E + e, mask=e < E, other=0.0)[None, :]
    routing_SE = selected(biased_SE, here_E, K)
    chosen_SE = tl.where(routing_SE, score_SE, 0.0)
    tl.store(probs_TE + rows, shares(chosen_SE, TINY), mask=seen)
    tl.store(routing_TE + rows, routing_SE, mask=seen)
    normalised_SE = shares(score_SE, TINY)
    best_SE = selected(normalised_SE, here_E, K)
    most_S = tl.max(tl.where(here_E, logits_SE, float("-inf")), 1)
    lse_S = most_S + tl.log(tl.sum(tl.where(here_E, tl.exp(logits_SE - most_S[:, None]), 0.0), 1))
    sums = sums_PBC + (p.to(tl.int64) * B + b) * (4 * E) + e
    tl.store(sums, tl.sum(tl.where(seen & routing_SE, 1.0, 0.0), 0), mask=e < E)
    tl.store(sums + E, tl.sum(tl.where(seen & best_SE, 1.0, 0.0), 0), mask=e < E)
    tl.store(sums + 2 * E, tl.sum(tl.where(seen, normalised_SE, 0.0), 0), mask=e < E)
    squared = tl.sum(tl.where(s < S, lse_S * lse_S, 0.0), 0)
    tl.store(sums + 3 * E, tl.where(e == 0, squared, 0.0), mask=e < E)


@triton.jit(do_not_specialize=["S", "B"])
def route_backward(
    logits_TE,
    score_TE,
    routing_TE,
    dprobs_TE,
    dscore_BE,
    dsquared,
    dlogits_TE,
    S,
    B,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TINY: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute the gradient of the logits; a gradient that is None is zero."""
    p, b = tl.program_id(0), tl.program_id(1)
    s, e = p * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    rows = (s.to(tl.int64) * B + b)[:, None] * E + e[None, :]
    here_E = (e < E)[None, :]
    seen = (s < S)[:, None] & here_E
    score_SE = tl.load(score_TE + rows, mask=seen, other=0.0)
    dscore_SE = tl.zeros_like(score_SE)
    if dprobs_TE is not None:
        routing_SE = tl.load(routing_TE + rows, mask=seen, other=0) != 0
        dprobs_SE = tl.load(dprobs_TE + rows, mask=seen & routing_SE, other=0.0)
        chosen_SE = tl.where(routing_SE, score_SE, 0.0)
        sum_S1 = (tl.sum(chosen_SE, 1) + TINY)[:, None]
        mean_S1 = (tl.sum(dprobs_SE * chosen_SE, 1))[:, None] / sum_S1
        dscore_SE += tl.where(routing_SE, (dprobs_SE - mean_S1) / sum_S1, 0.0)
    if dscore_BE is not None:
        dnormalised_1E = tl.load(dscore_BE + b * E + e, mask=e < E, other=0.0)[None, :]
        sum_S1 = (tl.sum(score_SE, 1) + TINY)[:, None]
        dscore_SE += (dnormalised_1E - tl.sum(dnormalised_1E * score_SE, 1)[:, None] / sum_S1) / sum_S1
    dlogits_SE = dscore_SE * score_SE * (1.0 - score_SE)
    if dsquared is not None:
        logits_SE = tl.load(logits_TE + rows, mask=seen, other=0.0)
        most_S = tl.max(tl.where(here_E, logits_SE, float("-inf")), 1)
        power_SE = tl.where(here_E, tl.exp(logits_SE - most_S[:, None]), 0.0)
        sum_S = tl.sum(power_SE, 1)
        lse_S = most_S + tl.log(sum_S)
        dlogits_SE += tl.load(dsquared) * 2.0 * (lse_S / sum_S)[:, None] * power_SE
    tl.store(dlogits_TE + rows, dlogits_SE, mask=seen)
