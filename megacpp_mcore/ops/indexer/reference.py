"""Plain-PyTorch truth of the DSA indexer: key selection, and the gradient that trains the indexer.

Shape legend: S queries, R queries of one chunk, T keys, B batch, H indexer heads, D indexer head width, N selected keys per
query (top-k), X some keys of a query.

:func:`select` and :func:`indexer_grad` are the ops; :func:`indexer_scores` and the two losses are the same mathematics through
autograd, over all keys.
Sources: DeepSeek-V3.2 report, equations 1-4; behaviour as in megatron-core 0.19
``transformer/experimental_attention_variant/dsa.py`` and ``dsa_indexer_loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.packed.documents import check_seq_idx
from megacpp_mcore.ops.visibility import (
    SCORE_BLOCK_ELEMENTS,
    check_index,
    check_square,
    masked_softmax,
    query_chunks,
    visible_keys,
)


def logits(q_BRHD: torch.Tensor, k_BTD: torch.Tensor) -> torch.Tensor:
    """Compute ``q·k`` of several query heads with one key head ``[B, R, H, T]``, as one matrix product per batch row."""
    return (q_BRHD.flatten(1, 2) @ k_BTD.transpose(1, 2)).unflatten(1, q_BRHD.shape[1:3])


def weigh(logit_BRHX: torch.Tensor, w_BRH: torch.Tensor) -> torch.Tensor:
    """Compute ``Σ_h w[h] · logit[h]``, as ``[B, R, X]``."""
    return torch.einsum("brhx,brh->brx", logit_BRHX, w_BRH)


def score_block(q_RBHD: torch.Tensor, k_TBD: torch.Tensor, w_RBH: torch.Tensor, relu: bool = True) -> torch.Tensor:
    """Score one chunk of queries as ``[B, R, T]``; k already has the compute dtype."""
    q_BRHD, w_BRH = (tensor.to(k_TBD.dtype).transpose(0, 1) for tensor in (q_RBHD, w_RBH))
    logit_BRHT = logits(q_BRHD, k_TBD.transpose(0, 1))
    return weigh(logit_BRHT.relu_() if relu else logit_BRHT, w_BRH)


def check_indexer(q_SBHD: torch.Tensor, k_TBD: torch.Tensor, w_SBH: torch.Tensor) -> None:
    """Raise ModelError unless shapes and dtypes are valid for :func:`indexer_scores`."""
    require_float(q_SBHD=q_SBHD, k_TBD=k_TBD, w_SBH=w_SBH)
    q, k, w = tuple(q_SBHD.shape), tuple(k_TBD.shape), tuple(w_SBH.shape)
    if len(q) != 4 or len(k) != 3 or w != q[:3] or k[1:] != (q[1], q[3]) or 0 in k:
        raise ModelError(
            f"indexer q, k, w have shapes {q}, {k}, {w}, expected [S, B, H, D], [T, B, D], [S, B, H] with the same S, "
            "B, H and D and at least one key; the indexer's key has no head dimension"
        )


def indexer_scores(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    *,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """Return ``score[b, i, j] = Σ_h w[i, b, h] · ReLU(q[i, b, h] · k[j, b])`` for every pair, non-causal ones too.

    Computed in float32 (float64 inputs: in float64), differentiable in q, k and w. Queries are processed in chunks that the
    backward pass recomputes, so no tensor with both H and T is saved. The scale heads^-1/2 · dim^-1/2 belongs to w.

    Args:
        q_SBHD: indexer queries, rope applied.
        k_TBD: indexer keys, one for all heads, rope applied.
        w_SBH: head weights, scale included.
        query_chunk: queries per chunk, or None to choose it (the result is the same except for rounding).

    Returns:
        score_BST in the compute dtype.

    Raises:
        ModelError: shapes, dtypes or chunk are not as described.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    (num_queries, batch, heads, _), num_keys = q_SBHD.shape, k_TBD.shape[0]
    # One cast before the loop: autograd sums the chunks' gradients of k in this dtype, not in bfloat16.
    k_TBD = k_TBD.to(compute_dtype(q_SBHD, k_TBD, w_SBH))
    size = len(query_chunks(num_queries, batch * heads * num_keys, SCORE_BLOCK_ELEMENTS, query_chunk)[0])
    scores = [
        checkpoint(score_block, q_chunk, k_TBD, w_chunk, use_reentrant=False, preserve_rng_state=False)
        for q_chunk, w_chunk in zip(q_SBHD.split(size), w_SBH.split(size), strict=True)
    ]
    return torch.cat(scores, dim=1)


@torch.no_grad()
def select(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    topk: int,
    seq_idx_BS: torch.Tensor | None = None,
    *,
    first_row: int = 0,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """Select the keys that each query attends to: the highest-scoring ones of its document up to itself.

    :func:`causal_topk` defines the choice, ties included. Scores are computed in float32 (float64 inputs: in float64)
    and in chunks of queries sized so that their per-head scores fit in ``SCORE_BLOCK_ELEMENTS``. Inputs may be strided.

    Args:
        q_SBHD, k_TBD, w_SBH: as for :func:`indexer_scores`, T == first_row + S.
        topk: keys to select; values over T act as T.
        seq_idx_BS: document number of each row, int32, or None: one document per batch row.
        first_row: position of the first query among the keys.
        query_chunk: queries per chunk, or None to choose it (the result is the same except for rounding).

    Returns:
        index_BSN, as from :func:`causal_topk`.

    Raises:
        ModelError: topk is below 1, or shapes, dtypes or chunk are not as described.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    (num_queries, batch, heads, _), num_keys = q_SBHD.shape, k_TBD.shape[0]
    check_square(first_row + num_queries, num_keys)
    k_TBD = k_TBD.to(compute_dtype(q_SBHD, k_TBD, w_SBH))
    selected = []
    for rows in query_chunks(num_queries, batch * heads * num_keys, SCORE_BLOCK_ELEMENTS, query_chunk):
        q_chunk, w_chunk = (tensor[rows.start : rows.stop] for tensor in (q_SBHD, w_SBH))
        score_BRT = score_block(q_chunk, k_TBD, w_chunk)
        selected.append(causal_topk(score_BRT, topk, seq_idx_BS, first_row=first_row + rows.start))
    return torch.cat(selected, dim=1)


@torch.no_grad()
def select_last(q_SBHD: torch.Tensor, k_TBD: torch.Tensor, w_SBH: torch.Tensor, topk: int) -> torch.Tensor:
    """Run :func:`select` for the last S of T rows, as in decoding; one document per batch row."""
    return select(q_SBHD, k_TBD, w_SBH, topk, first_row=len(k_TBD) - len(q_SBHD))


def _check_scores(score_BST: torch.Tensor) -> tuple[int, int, int]:
    """Return (B, S, T) of a score matrix, or raise ModelError."""
    require_float(score_BST=score_BST)
    if score_BST.dim() != 3 or 0 in score_BST.shape:
        raise ModelError(f"score_BST has shape {tuple(score_BST.shape)}, expected a non-empty [B, S, T]")
    batch, num_queries, num_keys = score_BST.shape
    return batch, num_queries, num_keys


def check_selection(topk: int, seq_idx_BS: torch.Tensor | None, *, batch: int, num_keys: int) -> None:
    """Raise ModelError unless ``topk`` and the documents are valid for :func:`causal_topk`."""
    if topk < 1:
        raise ModelError(f"topk is {topk}, expected at least 1; each query must attend to something")
    if seq_idx_BS is not None:
        check_seq_idx(seq_idx_BS, batch=batch, rows=num_keys)


@torch.no_grad()
def causal_topk(
    score_BRT: torch.Tensor, topk: int, seq_idx_BS: torch.Tensor | None = None, *, first_row: int = 0
) -> torch.Tensor:
    """Select each query's highest-scoring visible keys, deterministically.

    By descending score; ties (−0 equals +0) go to the lower key. ``torch.topk`` does not define the order of ties, so this is a
    stable sort. NaN counts as the highest score, so that it shows up in the loss instead of hiding.

    Args:
        score_BRT: scores of the queries ``first_row`` to ``first_row + R - 1`` of T.
        topk: keys to select; values over T act as T.
        seq_idx_BS: document number of each row, int32 [B, T], or None: one document per batch row.
        first_row: position of the first query.

    Returns:
        index_BRN, int32, N = min(topk, T): positions of keys, ascending, then -1. Query i of a document's row j holds
        min(j + 1, N) keys.

    Raises:
        ModelError: topk is below 1, the queries are not among the T rows, or a shape or dtype is not as described.
    """
    batch, num_queries, num_keys = _check_scores(score_BRT)
    rows = range(first_row, first_row + num_queries)
    if rows.stop > num_keys:
        raise ModelError(f"there are queries up to row {rows.stop} and {num_keys} keys, expected queries among the keys")
    check_selection(topk, seq_idx_BS, batch=batch, num_keys=num_keys)
    visible = visible_keys(rows, num_keys, attention_mask=None, causal=True, device=score_BRT.device)
    if seq_idx_BS is not None:
        visible = visible & (seq_idx_BS[:, rows.start : rows.stop, None] == seq_idx_BS[:, None, :])
    # Adding 0 turns −0 into +0, which some sort kernels distinguish; the clamp keeps a visible −inf above hidden keys.
    ranked_BRT = (score_BRT + 0.0).clamp_min(torch.finfo(score_BRT.dtype).min).masked_fill(~visible, float("-inf"))
    best_BRN = ranked_BRT.argsort(dim=-1, descending=True, stable=True)[..., : min(topk, num_keys)]
    is_visible_BRN = visible.expand_as(score_BRT).gather(-1, best_BRN)
    index_BRN = best_BRN.masked_fill(~is_visible_BRN, num_keys).sort(dim=-1).values
    return index_BRN.masked_fill(index_BRN == num_keys, -1).int()


def through_heads(
    logit_BRHX: torch.Tensor, w_BRH: torch.Tensor, grad_BRX: torch.Tensor, relu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of logits and weights from that of the scores; the former overwrites ``logit``."""
    positive = logit_BRHX > 0 if relu else None
    if relu:
        logit_BRHX.relu_()
    grad_w_BRH = torch.einsum("brhx,brx->brh", logit_BRHX, grad_BRX)
    torch.mul(w_BRH[..., None], grad_BRX[:, :, None], out=logit_BRHX)
    if positive is not None:
        logit_BRHX.mul_(positive)
    return logit_BRHX, grad_w_BRH


Selected = Callable[[range], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]
"""For a chunk of queries: ``index_BRN``, the target p over these keys (sums to 1, or is 0), each query's ``weight_BR`` on its
divergence, and ``bias_BRN``, added to the scores, or None."""


@torch.no_grad()
def selected_gradient(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    selected: Selected,
    chunks: list[range],
    *,
    relu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute divergences over the selected keys and the gradients of ``Σ weight · divergence``, a chunk of queries at a time.

    Args:
        q_SBHD, k_TBD, w_SBH: as for :func:`indexer_scores`.
        selected: returns a chunk's selection and target (:data:`Selected`).
        chunks: the queries in chunks.
        relu: whether ``q·k`` goes through ReLU.

    Returns:
        divergence_BS in the compute dtype, dq_SBHD, dk_TBD, dw_SBH.
    """
    (num_keys, batch, width), num_queries, dtype = k_TBD.shape, len(q_SBHD), compute_dtype(q_SBHD, k_TBD, w_SBH)
    k_BTD = k_TBD.to(dtype).transpose(0, 1)
    grad_q_SBHD, grad_w_SBH, grad_k_BTD = (
        torch.empty_like(q_SBHD),
        torch.empty_like(w_SBH),
        k_BTD.new_zeros(k_BTD.shape),
    )
    divergence_BS = k_BTD.new_empty(batch, num_queries)
    batch_B11 = torch.arange(batch, device=k_BTD.device)[:, None, None]
    for rows in chunks:
        here = slice(rows.start, rows.stop)
        index_BRN, p_BRN, weight_BR, bias_BRN = selected(rows)
        at, valid = index_BRN.clamp_min(0).long(), index_BRN >= 0
        q_BRHD, w_BRH = (tensor[here].to(dtype).transpose(0, 1) for tensor in (q_SBHD, w_SBH))
        k_BRND = k_BTD[batch_B11, at]
        logit_BRHN = q_BRHD @ k_BRND.transpose(2, 3)
        score_BRN = weigh(logit_BRHN.relu() if relu else logit_BRHN, w_BRH)
        if bias_BRN is not None:
            score_BRN += bias_BRN
        divergence_BS[:, here] = _divergence(score_BRN, p_BRN, valid)
        # Softmax, not exp(log_softmax), which is less accurate.
        grad_BRN = masked_softmax(score_BRN, valid).sub_(p_BRN).mul_(weight_BR[:, :, None])
        grad_logit_BRHN, grad_w_BRH = through_heads(logit_BRHN, w_BRH, grad_BRN, relu)
        grad_q_SBHD[here] = (grad_logit_BRHN @ k_BRND).transpose(0, 1)
        grad_w_SBH[here] = grad_w_BRH.transpose(0, 1)
        grad_k_BRND = torch.matmul(grad_logit_BRHN.transpose(2, 3), q_BRHD, out=k_BRND)
        flat = (at + batch_B11 * num_keys).flatten()
        grad_k_BTD.view(-1, width).index_add_(0, flat, grad_k_BRND.flatten(0, 2))
    return divergence_BS, grad_q_SBHD, grad_k_BTD.transpose(0, 1).to(k_TBD.dtype).contiguous(), grad_w_SBH


@torch.no_grad()
def indexer_grad(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    index_BSN: torch.Tensor,
    target_BSN: torch.Tensor,
    coefficient: float | torch.Tensor,
    *,
    query_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the sparse stage's loss and gradients: mean over rows of KL(p ‖ softmax(score over the selected keys)).

    p is the target, L1-normalised over the selected keys. The same as :func:`indexer_loss` through autograd, without scoring
    any other key. The gradient of k is summed with ``index_add_``: on a GPU in no fixed order, unless
    ``torch.use_deterministic_algorithms(True)``.

    Args:
        q_SBHD, k_TBD, w_SBH: the inputs of :func:`select`.
        index_BSN: the selected keys, int32, -1 = none, distinct within a row.
        target_BSN: attention probability of each selected key, summed over heads (and over TP ranks, and over the layers
            that attend to these keys), non-negative. A row without any target mass contributes 0 and no gradient; the mean
            still divides by all B·S rows, so that every token has the same weight in every micro-batch.
        coefficient: factor on the gradients, a number or a one-element tensor.
        query_chunk: queries per chunk, or None to choose it (the result is the same except for rounding).

    Returns:
        The loss, a scalar in the compute dtype, without the coefficient; dq_SBHD, dk_TBD and dw_SBH in the dtypes of q, k, w.

    Raises:
        ModelError: shapes, dtypes or chunk are not as described.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    check_gradient(q_SBHD, index_BSN, target_BSN)
    num_queries, batch = q_SBHD.shape[:2]
    dtype = compute_dtype(q_SBHD, k_TBD, w_SBH)
    weight_BS = target_BSN.new_full((batch, num_queries), 1 / (batch * num_queries), dtype=dtype) * coefficient

    def selected(rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        here = slice(rows.start, rows.stop)
        index_BRN = index_BSN[:, here]
        p_BRN = _normalised(target_BSN[:, here].to(dtype), index_BRN >= 0)
        return index_BRN, p_BRN, weight_BS[:, here] * p_BRN.any(dim=-1), None

    per_query = batch * index_BSN.shape[2] * sum(q_SBHD.shape[2:])
    chunks = query_chunks(num_queries, per_query, SCORE_BLOCK_ELEMENTS, query_chunk)
    divergence_BS, grad_q_SBHD, grad_k_TBD, grad_w_SBH = selected_gradient(q_SBHD, k_TBD, w_SBH, selected, chunks)
    return divergence_BS.mean(), grad_q_SBHD, grad_k_TBD, grad_w_SBH


def check_gradient(q_SBHD: torch.Tensor, index_BSN: torch.Tensor, target_BSN: torch.Tensor) -> None:
    """Raise ModelError unless selection and target are valid for :func:`indexer_grad`."""
    require_float(target_BSN=target_BSN)
    check_index(index_BSN, batch=q_SBHD.shape[1], num_queries=len(q_SBHD))
    _check_target(index_BSN, target_BSN)


def _normalised(target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Compute ``target / Σ target`` over the valid entries of a row, 0 elsewhere; a row without mass stays 0."""
    target = target.masked_fill(~valid, 0.0)
    return target / target.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(target.dtype).tiny)


def _divergence(score: torch.Tensor, p: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Compute KL(p ‖ softmax(score)) of each row over the valid entries; p is 0 at the others."""
    # Finite fill before, zero after: log_softmax of a row without any valid entry then has no NaN, forward or backward.
    log_q = score.masked_fill(~valid, torch.finfo(score.dtype).min).log_softmax(dim=-1).masked_fill(~valid, 0.0)
    return (torch.xlogy(p, p) - p * log_q).sum(dim=-1)


def _mean_row_divergence(score: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Average KL(target / Σ target ‖ softmax(score)) over rows, both over the valid entries of a row."""
    dtype = compute_dtype(score, target)
    return _divergence(score.to(dtype), _normalised(target.detach().to(dtype), valid), valid).mean()


def _check_target(index_BSN: torch.Tensor, target_BSN: torch.Tensor) -> None:
    if target_BSN.shape != index_BSN.shape:
        raise ModelError(
            f"target_BSN has shape {list(target_BSN.shape)} and index_BSN {list(index_BSN.shape)}, expected the same; "
            "compute the target from the attention over this index"
        )


def indexer_loss(score_BST: torch.Tensor, index_BSN: torch.Tensor, target_BSN: torch.Tensor) -> torch.Tensor:
    """Loss of the sparse stage: mean over rows of KL(p ‖ softmax(score over the selected keys)).

    p is the target, L1-normalised over the selected keys and detached. A row without a valid index, or without any
    target mass, contributes 0 and no gradient; the mean still divides by all B·S rows, so that every token has the
    same weight in every micro-batch. Source: DeepSeek-V3.2 report, equation 4.

    Args:
        score_BST: indexer scores; the gradient flows here.
        index_BSN: selected keys, int32, -1 = none, distinct within a row.
        target_BSN: attention probability of each selected key, summed over heads (and over TP ranks), non-negative.

    Returns:
        scalar in the compute dtype, not yet multiplied by a loss coefficient.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    batch, num_queries, _ = _check_scores(score_BST)
    require_float(target_BSN=target_BSN)
    check_index(index_BSN, batch=batch, num_queries=num_queries)
    _check_target(index_BSN, target_BSN)
    return _mean_row_divergence(score_BST.gather(-1, index_BSN.clamp_min(0).long()), target_BSN, index_BSN >= 0)
