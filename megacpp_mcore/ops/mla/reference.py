"""Plain-PyTorch truth of MLA core attention.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query-key width, V value width.
The layout is Megatron-Core's (sequence first, then batch), so no transposes are needed.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.packed.documents import check_seq_idx
from megacpp_mcore.ops.visibility import (
    SCORE_BLOCK_ELEMENTS,
    check_mask,
    check_square,
    check_window,
    masked_softmax,
    query_chunks,
    visible_keys,
)


def _attend(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    rows: range,
    softmax_scale: float,
    attention_mask: torch.Tensor | None,
    seq_idx_BS: torch.Tensor | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Compute attention of the queries at ``rows``; k and v already have the compute dtype."""
    num_keys = k_TBHK.shape[0]
    visible = visible_keys(rows, num_keys, attention_mask=attention_mask, causal=causal, device=q_SBHK.device)
    if seq_idx_BS is not None:
        visible = visible & (seq_idx_BS[:, rows.start : rows.stop, None] == seq_idx_BS[:, None, :num_keys])
    if window is not None:
        first = max(0, rows.start - window)
        place = torch.arange(first, num_keys, device=q_SBHK.device)
        seen = place >= torch.arange(rows.start, rows.stop, device=q_SBHK.device)[:, None] - window
        visible, k_TBHK, v_TBHV = visible[..., first:] & seen, k_TBHK[first:], v_TBHV[first:]
    score_BHST = torch.einsum("sbhk,tbhk->bhst", q_SBHK.to(k_TBHK.dtype), k_TBHK) * softmax_scale
    p_BHST = masked_softmax(score_BHST, visible[:, None])
    return torch.einsum("bhst,tbhv->sbhv", p_BHST, v_TBHV).to(q_SBHK.dtype)


def check_shapes(q_SBHK: torch.Tensor, k_TBHK: torch.Tensor, v_TBHV: torch.Tensor) -> None:
    """Raise ModelError unless shapes are those of MLA's queries, keys and values, in floating point."""
    require_float(q_SBHK=q_SBHK, k_TBHK=k_TBHK, v_TBHV=v_TBHV)
    q, k, v = tuple(q_SBHK.shape), tuple(k_TBHK.shape), tuple(v_TBHV.shape)
    if len(q) != 4 or len(k) != 4 or len(v) != 4 or k[1:] != q[1:] or v[:3] != k[:3] or 0 in k:
        raise ModelError(
            f"q, k, v have shapes {q}, {k}, {v}, expected [S, B, H, K], [T, B, H, K], [T, B, H, V] with the same B, H "
            "and K and at least one key; expand shared keys over the heads before the call"
        )


def mla_attention(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    *,
    softmax_scale: float,
    attention_mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    max_documents: int | None = None,
    causal: bool = True,
    window: int | None = None,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """Softmax attention with separate query-key and value widths: ``o = softmax(scale · q kᵀ) v`` per head.

    Computed in float32 (float64 inputs: in float64), differentiable in q, k and v. Queries are processed in chunks that
    the backward pass recomputes, so no [B, H, S, T] tensor is saved. Source: DeepSeek-V2 (arXiv 2405.04434), section
    2.1.3, without its projections. The mask has the semantics of megatron-core 0.19 ``DotProductAttention``, except for
    a query that sees no key: its output is 0 here, the mean of all values in Megatron.

    Args:
        q_SBHK: queries, rope part included; any strides, also of keys and values.
        k_TBHK: keys.
        v_TBHV: values; V need not equal K.
        softmax_scale: factor on q·k before the softmax.
        attention_mask: Megatron's bool mask, True = masked, broadcastable to [B, 1, S, T]; combined with ``causal``.
        seq_idx: int32 [B, S], the document number of each row (:mod:`megacpp_mcore.ops.packed.documents`): a query sees only
            keys of its own document (needs S == T). None: one document.
        max_documents: upper bound on the documents in ``seq_idx``; ignored here.
        causal: whether query i sees keys 0..i only (needs S == T). A causal query always sees itself, unless
            ``attention_mask`` hides it. The output of a query that sees no key at all is 0, with zero gradients.
        window: how many keys before its own a query sees, if causal; None: all.
        query_chunk: queries per chunk, or None to choose (see ``query_chunks``).

    Returns:
        o_SBHV, contiguous, in the dtype of q.

    Raises:
        ModelError: shapes, dtypes, mask, documents or chunk are not as described.
    """
    check_shapes(q_SBHK, k_TBHK, v_TBHV)
    (num_queries, batch, heads, _), num_keys = q_SBHK.shape, k_TBHK.shape[0]
    check_mask(attention_mask, batch=batch, num_queries=num_queries, num_keys=num_keys)
    check_window(window, causal)
    if causal or seq_idx is not None:
        check_square(num_queries, num_keys)
    if seq_idx is not None:
        check_seq_idx(seq_idx, batch=batch, rows=num_queries)
    # One cast before the loop: autograd sums the chunks' gradients of k and v in this dtype, not in bfloat16.
    dtype = compute_dtype(q_SBHK, k_TBHK, v_TBHV)
    k_TBHK, v_TBHV = k_TBHK.to(dtype), v_TBHV.to(dtype)
    if window is not None and query_chunk is None:
        query_chunk = min(window + 1, SCORE_BLOCK_ELEMENTS // (batch * heads * 2 * (window + 1)) or 1)
    chunks = query_chunks(num_queries, batch * heads * num_keys, SCORE_BLOCK_ELEMENTS, query_chunk)
    outputs = []
    for rows, q_chunk_SBHK in zip(chunks, q_SBHK.split(len(chunks[0])), strict=True):
        end = rows.stop if causal else num_keys
        tensors, masks = (q_chunk_SBHK, k_TBHK[:end], v_TBHV[:end]), (attention_mask, seq_idx, causal, window)
        outputs.append(
            checkpoint(_attend, *tensors, rows, softmax_scale, *masks, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(outputs)
