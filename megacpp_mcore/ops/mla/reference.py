"""Plain-PyTorch truth of MLA core attention, and the visibility rule that the DSA references share.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query-key width, V value width.
The layout is Megatron-Core's own (sequence first, then batch), so that nothing is transposed at the seam.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import ModelError

# Elements of one [B, H, chunk, T] block of scores: 256 MiB in fp32. The backward pass holds a handful of such blocks.
SCORE_BLOCK_ELEMENTS = 2**26


def require_float(**tensors: torch.Tensor) -> None:
    """Raise ModelError unless every tensor (given under its own name) has a floating-point dtype."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(f"{name} has dtype {tensor.dtype}, expected a floating-point dtype; cast it first")


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype that a reference computes in: the widest of the tensors' dtypes, and at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def query_chunks(num_queries: int, elements_per_query: int, budget: int, query_chunk: int | None) -> list[range]:
    """Split the queries into consecutive ranges.

    Args:
        num_queries: number of queries, at least one.
        elements_per_query: size of the largest temporary that one query needs, in elements.
        budget: wanted size of that temporary for a whole chunk, in elements; used when ``query_chunk`` is None.
        query_chunk: number of queries in a chunk, or None to choose it from the budget. It changes the memory that is
            needed and never the result beyond rounding.

    Raises:
        ModelError: there is no query, or ``query_chunk`` is not positive.
    """
    if num_queries < 1:
        raise ModelError("there are 0 queries, expected at least one; do not call the op for an empty sequence")
    if query_chunk is None:
        query_chunk = max(1, budget // max(1, elements_per_query))
    if query_chunk < 1:
        raise ModelError(f"query_chunk is {query_chunk}, expected a positive number of queries (or None to choose it)")
    return [range(first, min(first + query_chunk, num_queries)) for first in range(0, num_queries, query_chunk)]


def check_mask(attention_mask: torch.Tensor | None, *, batch: int, num_queries: int, num_keys: int) -> None:
    """Raise ModelError unless the mask is None or Megatron's: bool, broadcastable to [B, 1, S, T], True = masked."""
    if attention_mask is None:
        return
    if attention_mask.dtype != torch.bool:
        raise ModelError(
            f"attention_mask has dtype {attention_mask.dtype}, expected torch.bool with True where a key is masked; "
            "convert an additive mask with `mask < 0`"
        )
    wanted = (batch, 1, num_queries, num_keys)
    shape = tuple(attention_mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, wanted, strict=True)):
        raise ModelError(
            f"attention_mask has shape {shape}, expected one that broadcasts to [B, 1, S, T] = {list(wanted)}; "
            "a mask that differs by head is not supported"
        )


def check_square(num_queries: int, num_keys: int) -> None:
    """Raise ModelError unless S == T, the only case in which a causal mask has one meaning."""
    if num_queries != num_keys:
        raise ModelError(
            f"causal attention got {num_queries} queries and {num_keys} keys, expected as many of each (aligning them "
            "at the start or at the end would both be a guess); pass the whole sequence, or, for partial queries, call "
            "mla_attention with causal=False and an explicit attention_mask"
        )


def visible_keys(
    rows: range, num_keys: int, *, attention_mask: torch.Tensor | None, causal: bool, device: torch.device
) -> torch.Tensor:
    """Say which keys some of the queries see.

    Args:
        rows: the queries, as a range of positions.
        num_keys: number of keys to answer for; the mask may hold more.
        attention_mask: a mask that ``check_mask`` accepts, or None.
        causal: whether query i sees only keys 0..i.
        device: where to build the answer.

    Returns:
        bool tensor of shape [1 or B, len(rows), num_keys], True = visible.
    """
    query_S, key_T = torch.arange(rows.start, rows.stop, device=device), torch.arange(num_keys, device=device)
    visible = (key_T <= query_S[:, None])[None]
    if not causal:
        visible = torch.ones_like(visible)
    if attention_mask is None:
        return visible
    query_rows = slice(rows.start, rows.stop) if attention_mask.shape[2] != 1 else slice(None)
    return visible & ~attention_mask[:, 0, query_rows, :num_keys].to(device)


def masked_softmax(score: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, restricted to the visible entries.

    An invisible entry gets probability exactly 0 and gradient exactly 0, and so does a whole row in which nothing is
    visible (a padding query, say); no NaN appears in either direction.
    """
    # The lowest finite number and not -inf: a row of -inf has NaN as its softmax, in the backward pass too.
    score = score.masked_fill(~visible, torch.finfo(score.dtype).min)
    return score.softmax(dim=-1).masked_fill(~visible, 0.0)


def _attend(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    rows: range,
    softmax_scale: float,
    attention_mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Attend with the queries at ``rows``; k and v already have the compute dtype."""
    visible = visible_keys(rows, k_TBHK.shape[0], attention_mask=attention_mask, causal=causal, device=q_SBHK.device)
    score_BHST = torch.einsum("sbhk,tbhk->bhst", q_SBHK.to(k_TBHK.dtype), k_TBHK) * softmax_scale
    p_BHST = masked_softmax(score_BHST, visible[:, None])
    return torch.einsum("bhst,tbhv->sbhv", p_BHST, v_TBHV).to(q_SBHK.dtype)


def _check_shapes(q_SBHK: torch.Tensor, k_TBHK: torch.Tensor, v_TBHV: torch.Tensor) -> None:
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
    causal: bool = True,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """Softmax attention with separate query-key and value widths: ``o = softmax(scale · q kᵀ) v`` per head.

    Computed in float32 (float64 inputs: in float64), differentiable in q, k and v. Queries are taken in chunks that the
    backward pass recomputes, so no [B, H, S, T] tensor is kept. Source: DeepSeek-V2 (arXiv 2405.04434), section
    2.1.3, without its projections. The mask means what it means to megatron-core 0.19 ``DotProductAttention``, but for
    a query that sees no key: there the mean of all values, here 0.

    Args:
        q_SBHK: queries, rope part included.
        k_TBHK: keys.
        v_TBHV: values; V need not equal K.
        softmax_scale: factor on q·k before the softmax.
        attention_mask: Megatron's bool mask, True = masked, broadcastable to [B, 1, S, T]; combined with ``causal``.
        causal: whether query i sees keys 0..i only (needs S == T). A causal query always sees itself, unless
            ``attention_mask`` hides it. The output of a query that sees no key at all is 0, with zero gradients.
        query_chunk: queries in a chunk, or None to choose (see ``query_chunks``).

    Returns:
        o_SBHV in the dtype of q.

    Raises:
        ModelError: shapes, dtypes, mask or chunk are not as described.
    """
    _check_shapes(q_SBHK, k_TBHK, v_TBHV)
    (num_queries, batch, heads, _), num_keys = q_SBHK.shape, k_TBHK.shape[0]
    check_mask(attention_mask, batch=batch, num_queries=num_queries, num_keys=num_keys)
    if causal:
        check_square(num_queries, num_keys)
    # One cast before the loop: autograd sums the chunks' gradients of k and v in this dtype, not in bfloat16.
    dtype = compute_dtype(q_SBHK, k_TBHK, v_TBHV)
    k_TBHK, v_TBHV = k_TBHK.to(dtype), v_TBHV.to(dtype)
    chunks = query_chunks(num_queries, batch * heads * num_keys, SCORE_BLOCK_ELEMENTS, query_chunk)
    outputs = []
    for rows, q_chunk_SBHK in zip(chunks, q_SBHK.split(len(chunks[0])), strict=True):
        end = rows.stop if causal else num_keys
        arguments = (q_chunk_SBHK, k_TBHK[:end], v_TBHV[:end], rows, softmax_scale, attention_mask, causal)
        outputs.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)
