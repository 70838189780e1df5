"""Plain-PyTorch truth of the DSA indexer: scores, causal top-k, and the losses that train it.

Shape legend: S queries, T keys, B batch, H indexer heads, D indexer head width, N selected keys per query (top-k).
Sources: DeepSeek-V3.2 report, equations 1-4; behaviour as in megatron-core 0.19
``transformer/experimental_attention_variant/dsa.py`` and ``dsa_indexer_loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.visibility import (
    SCORE_BLOCK_ELEMENTS,
    check_index,
    check_mask,
    check_square,
    query_chunks,
    visible_keys,
)


def score_block(q_SBHD: torch.Tensor, k_TBD: torch.Tensor, w_SBH: torch.Tensor) -> torch.Tensor:
    """Score one chunk of queries; k already has the compute dtype."""
    logit_BSHT = torch.einsum("sbhd,tbd->bsht", q_SBHD.to(k_TBD.dtype), k_TBD)
    return torch.einsum("bsht,sbh->bst", logit_BSHT.relu(), w_SBH.to(k_TBD.dtype))


def indexer_scores(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    *,
    query_chunk: int | None = None,
    run_block: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return ``score[b, i, j] = Σ_h w[i, b, h] · ReLU(q[i, b, h] · k[j, b])`` for every pair, non-causal ones too.

    Computed in float32 (float64 inputs: in float64), differentiable in q, k and w. Queries are taken in chunks that the
    backward pass recomputes, so no tensor with both H and T is kept. The scale heads^-1/2 · dim^-1/2 belongs to w.

    Args:
        q_SBHD: indexer queries, rope applied.
        k_TBD: indexer keys, one for all heads, rope applied.
        w_SBH: head weights, scale included.
        query_chunk: queries in a chunk, or None to choose it (the result is the same but for rounding).
        run_block: what runs in place of :func:`score_block`, such as a compiled version of it; None runs it as it is.

    Returns:
        score_BST in the compute dtype.

    Raises:
        ModelError: shapes, dtypes or chunk are not as described.
    """
    require_float(q_SBHD=q_SBHD, k_TBD=k_TBD, w_SBH=w_SBH)
    q, k, w = tuple(q_SBHD.shape), tuple(k_TBD.shape), tuple(w_SBH.shape)
    if len(q) != 4 or len(k) != 3 or w != q[:3] or k[1:] != (q[1], q[3]) or 0 in k:
        raise ModelError(
            f"indexer q, k, w have shapes {q}, {k}, {w}, expected [S, B, H, D], [T, B, D], [S, B, H] with the same S, "
            "B, H and D and at least one key; the indexer's key has no head dimension"
        )
    num_queries, batch, heads, _ = q
    # One cast before the loop: autograd sums the chunks' gradients of k in this dtype, not in bfloat16.
    k_TBD = k_TBD.to(compute_dtype(q_SBHD, k_TBD, w_SBH))
    chunks = query_chunks(num_queries, batch * heads * k[0], SCORE_BLOCK_ELEMENTS, query_chunk)
    size = len(chunks[0])
    scores = [
        checkpoint(run_block or score_block, q_chunk, k_TBD, w_chunk, use_reentrant=False, preserve_rng_state=False)
        for q_chunk, w_chunk in zip(q_SBHD.split(size), w_SBH.split(size), strict=True)
    ]
    return torch.cat(scores, dim=1)


def _check_scores(score_BST: torch.Tensor) -> tuple[int, int, int]:
    """Return (B, S, T) of a score matrix, or raise ModelError."""
    require_float(score_BST=score_BST)
    if score_BST.dim() != 3 or 0 in score_BST.shape:
        raise ModelError(f"score_BST has shape {tuple(score_BST.shape)}, expected a non-empty [B, S, T]")
    batch, num_queries, num_keys = score_BST.shape
    return batch, num_queries, num_keys


@torch.no_grad()
def causal_topk(score_BST: torch.Tensor, topk: int, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Select each query's highest-scoring visible keys, deterministically.

    Order: descending score; equal scores (−0 equals +0) go to the lower key index first. ``torch.topk`` leaves ties
    open, so this is a stable sort. NaN counts as the highest score, which lets a NaN show up in the loss
    instead of hiding.

    Args:
        score_BST: indexer scores, S == T.
        topk: keys to select; values over T act as T.
        attention_mask: Megatron's bool mask, True = masked, broadcastable to [B, 1, S, T], on top of the causal one.

    Returns:
        index_BSN, int64, N = min(topk, T). Without a mask row i holds min(i + 1, N) keys; the other columns, which are
        always the last ones, are -1.

    Raises:
        ModelError: topk is below 1, S differs from T, or a shape or dtype is not as described.
    """
    batch, num_queries, num_keys = _check_scores(score_BST)
    check_square(num_queries, num_keys)
    check_mask(attention_mask, batch=batch, num_queries=num_queries, num_keys=num_keys)
    if topk < 1:
        raise ModelError(f"topk is {topk}, expected at least 1; each query must attend to something")
    visible = visible_keys(
        range(num_queries), num_keys, attention_mask=attention_mask, causal=True, device=score_BST.device
    )
    # Adding 0 turns −0 into +0, which some sort kernels tell apart; the clamp keeps a visible −inf above the hidden.
    ranked_BST = (score_BST + 0.0).clamp_min(torch.finfo(score_BST.dtype).min).masked_fill(~visible, float("-inf"))
    index_BSN = ranked_BST.argsort(dim=-1, descending=True, stable=True)[..., : min(topk, num_keys)]
    return index_BSN.masked_fill(~visible.expand_as(score_BST).gather(-1, index_BSN), -1)


def _mean_row_divergence(score: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean over the rows of KL(target / Σ target ‖ softmax(score)), both over the valid entries of a row."""
    dtype = compute_dtype(score, target)
    target = target.detach().to(dtype).masked_fill(~valid, 0.0)
    p = target / target.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    # Finite fill first, zero after: log_softmax of a row without any valid entry then has no NaN, forward or backward.
    log_q = score.to(dtype).masked_fill(~valid, torch.finfo(dtype).min).log_softmax(dim=-1).masked_fill(~valid, 0.0)
    return (torch.xlogy(p, p) - p * log_q).sum(dim=-1).mean()


def indexer_loss(score_BST: torch.Tensor, index_BSN: torch.Tensor, target_BSN: torch.Tensor) -> torch.Tensor:
    """Loss of the sparse stage: mean over rows of KL(p ‖ softmax(score over the selected keys)).

    p is the target, L1-normalised over the selected keys and detached. A row without a valid index, or without any
    target mass, contributes 0 and no gradient; the mean still divides by all B·S rows, so that the loss weighs
    a token the same in every micro-batch. Source: DeepSeek-V3.2 report, equation 4.

    Args:
        score_BST: indexer scores; the gradient flows here.
        index_BSN: selected keys, int64, -1 = none, distinct within a row.
        target_BSN: attention probability of each selected key, summed over heads (and over TP ranks), non-negative.

    Returns:
        scalar in the compute dtype, not yet multiplied by a loss coefficient.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    batch, num_queries, _ = _check_scores(score_BST)
    require_float(target_BSN=target_BSN)
    check_index(index_BSN, batch=batch, num_queries=num_queries)
    if target_BSN.shape != index_BSN.shape:
        raise ModelError(
            f"target_BSN has shape {list(target_BSN.shape)} and index_BSN {list(index_BSN.shape)}, expected the same; "
            "take the target from sparse_mla_attention with this very index"
        )
    return _mean_row_divergence(score_BST.gather(-1, index_BSN.clamp_min(0)), target_BSN, index_BSN >= 0)


def indexer_loss_dense(
    score_BST: torch.Tensor, target_BST: torch.Tensor, *, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Loss of the dense warm-up: as ``indexer_loss``, over all causal keys. Source: DeepSeek-V3.2 report, equation 3.

    Args:
        score_BST: indexer scores, S == T; the gradient flows here.
        target_BST: attention probabilities summed over heads (and over TP ranks), as from ``dense_attention_target``.
        attention_mask: Megatron's bool mask, True = masked, broadcastable to [B, 1, S, T], on top of the causal one.

    Returns:
        scalar in the compute dtype, not yet multiplied by a loss coefficient.

    Raises:
        ModelError: shapes, dtypes or mask are not as described.
    """
    batch, num_queries, num_keys = _check_scores(score_BST)
    require_float(target_BST=target_BST)
    check_square(num_queries, num_keys)
    check_mask(attention_mask, batch=batch, num_queries=num_queries, num_keys=num_keys)
    if target_BST.shape != score_BST.shape:
        raise ModelError(
            f"target_BST has shape {list(target_BST.shape)} and score_BST {list(score_BST.shape)}, expected the same; "
            "take the target from dense_attention_target over the same tokens"
        )
    visible = visible_keys(
        range(num_queries), num_keys, attention_mask=attention_mask, causal=True, device=score_BST.device
    )
    return _mean_row_divergence(score_BST, target_BST, visible)
