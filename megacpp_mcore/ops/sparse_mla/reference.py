"""Plain-PyTorch truth of sparse MLA: absorbed multi-query attention over selected keys, and the indexer's targets.

Shape legend: S queries, R queries of one chunk, T keys, B batch, H heads (of this rank), K width of an absorbed query or key
(latent + rope), V width of the latent value, N selected keys per query.

"Absorbed" means that the key up-projection has been moved into the query and the value up-projection after the
attention: all heads then read one latent key, and its first V numbers are also the value (DeepSeek-V2, arXiv
2405.04434, section 2.1.2).
"""

from __future__ import annotations

from typing import Any

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.sums import add_rows
from megacpp_mcore.ops.visibility import (
    check_index,
    masked_softmax,
    query_chunks,
)

# Elements of one chunk's gathered keys and scores together: 128 MiB in fp32. Backward holds several such blocks.
GATHER_BLOCK_ELEMENTS = 2**25


def _check_query_and_latent(q_SBHK: torch.Tensor, kv_TBK: torch.Tensor) -> None:
    require_float(q_SBHK=q_SBHK, kv_TBK=kv_TBK)
    q, kv = tuple(q_SBHK.shape), tuple(kv_TBK.shape)
    if len(q) != 4 or len(kv) != 3 or kv[1:] != (q[1], q[3]) or 0 in kv:
        raise ModelError(
            f"q and kv have shapes {q} and {kv}, expected [S, B, H, K] and [T, B, K] with the same B and K and at "
            "least one key; drop the key's head dimension of size 1"
        )


def check_attention(q_SBHK: torch.Tensor, kv_TBK: torch.Tensor, index_BSN: torch.Tensor, value_dim: int) -> None:
    """Raise ModelError unless these are valid arguments of :func:`attend`."""
    _check_query_and_latent(q_SBHK, kv_TBK)
    num_queries, batch, _, width = q_SBHK.shape
    check_index(index_BSN, batch=batch, num_queries=num_queries)
    if not 1 <= value_dim <= width:
        raise ModelError(f"value_dim is {value_dim}, expected 1..{width} (the width of kv); it is the latent's rank")


class _Attend(torch.autograd.Function):
    """Attention over selected keys, a chunk of queries at a time; only the inputs are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBHK: torch.Tensor,
        kv_TBK: torch.Tensor,
        index_BSN: torch.Tensor,
        softmax_scale: float,
        value_dim: int,
        sink: TargetSum | None,
        chunks: list[range],
    ) -> torch.Tensor:
        ctx.save_for_backward(q_SBHK, kv_TBK, index_BSN)
        ctx.softmax_scale, ctx.value_dim, ctx.sink, ctx.chunks = softmax_scale, value_dim, sink, chunks
        o_SBHV = q_SBHK.new_empty(*q_SBHK.shape[:3], value_dim)
        kv_TBK = kv_TBK.to(compute_dtype(q_SBHK, kv_TBK))
        for rows in chunks:
            here = slice(rows.start, rows.stop)
            _, kv_BRNK, p_BRHN = _probabilities(q_SBHK[here], kv_TBK, index_BSN[:, here], softmax_scale)
            o_SBHV[here] = (p_BRHN @ kv_BRNK[..., :value_dim]).transpose(0, 1)
        return o_SBHV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_SBHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_SBHK, kv_TBK, index_BSN = ctx.saved_tensors
        dtype, batch = compute_dtype(q_SBHK, kv_TBK), kv_TBK.shape[1]
        whole_kv_TBK = kv_TBK.to(dtype)
        # Summed over the chunks in the compute dtype, not in bfloat16.
        grad_q_SBHK, grad_kv_TBK = (
            torch.empty_like(q_SBHK),
            torch.zeros(kv_TBK.shape, dtype=dtype, device=kv_TBK.device),
        )
        target_BSN = None if ctx.sink is None else ctx.sink.accumulator(index_BSN, dtype)
        batch_B11 = torch.arange(batch, device=kv_TBK.device)[:, None, None]
        for rows in ctx.chunks:
            here = slice(rows.start, rows.stop)
            index_BRN = index_BSN[:, here]
            q_BRHK, kv_BRNK, p_BRHN = _probabilities(q_SBHK[here], whole_kv_TBK, index_BRN, ctx.softmax_scale)
            if target_BSN is not None:
                target_BSN[:, here] += p_BRHN.sum(dim=2)
            grad_BRHV = grad_SBHV[here].to(dtype).transpose(0, 1)
            grad_p_BRHN = grad_BRHV @ kv_BRNK[..., : ctx.value_dim].transpose(2, 3)
            grad_score_BRHN = p_BRHN * (grad_p_BRHN - (p_BRHN * grad_p_BRHN).sum(dim=-1, keepdim=True))
            grad_score_BRHN *= ctx.softmax_scale
            grad_q_SBHK[here] = (grad_score_BRHN @ kv_BRNK).transpose(0, 1)
            grad_kv_BRNK = grad_score_BRHN.transpose(2, 3) @ q_BRHK
            grad_kv_BRNK[..., : ctx.value_dim] += p_BRHN.transpose(2, 3) @ grad_BRHV
            flat = (index_BRN.clamp_min(0).long() * batch + batch_B11).flatten()
            add_rows(grad_kv_TBK.view(-1, grad_kv_TBK.shape[-1]), flat, grad_kv_BRNK.flatten(0, 2))
        return grad_q_SBHK, grad_kv_TBK.to(kv_TBK.dtype), None, None, None, None, None


def _probabilities(
    q_RBHK: torch.Tensor, kv_TBK: torch.Tensor, index_BRN: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``q_BRHK``, the gathered ``kv_BRNK`` and ``p_BRHN`` of a chunk; kv already has the compute dtype."""
    q_BRHK = q_RBHK.to(kv_TBK.dtype).transpose(0, 1)
    batch_B11 = torch.arange(kv_TBK.shape[1], device=kv_TBK.device)[:, None, None]
    kv_BRNK = kv_TBK[index_BRN.clamp_min(0).long(), batch_B11]
    score_BRHN = (q_BRHK @ kv_BRNK.transpose(2, 3)).mul_(softmax_scale)
    return q_BRHK, kv_BRNK, masked_softmax(score_BRHN, (index_BRN >= 0)[:, :, None])


def attend(
    q_SBHK: torch.Tensor,
    kv_TBK: torch.Tensor,
    index_BSN: torch.Tensor,
    *,
    softmax_scale: float,
    value_dim: int,
    sink: TargetSum | None = None,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """Attend to the selected keys only, in the absorbed multi-query form.

    Computed in float32 (float64 inputs: in float64), differentiable in q and kv. Queries are processed in chunks that
    the backward pass recomputes, so neither the gathered keys nor the scores are saved. No causal mask is applied:
    every key in the index is attended to. Source: DeepSeek-V3.2 report, equation 2.

    Args:
        q_SBHK: absorbed queries, rope part included; may be strided.
        kv_TBK: latent keys, rope part included; the value is ``kv[..., :value_dim]``; may be strided.
        index_BSN: keys of each query, int32, distinct within a row, -1 = none (in any column). A row of only -1 has
            output 0, probabilities 0 and zero gradients.
        softmax_scale: factor on q·k before the softmax.
        value_dim: V, from 1 to K.
        sink: buffer ``[B, S, N]`` in the compute dtype into which the backward pass accumulates the attention probabilities,
            summed over these heads; None: not computed. The forward pass does not touch it.
        query_chunk: queries per chunk, or None to choose it (the result is the same except for rounding).

    Returns:
        o_SBHV in the dtype of q, contiguous.

    Raises:
        ModelError: shapes, dtypes, value_dim or chunk are not as described.
    """
    check_attention(q_SBHK, kv_TBK, index_BSN, value_dim)
    num_queries, batch, heads, width = q_SBHK.shape
    per_query = batch * index_BSN.shape[2] * (width + heads)
    chunks = query_chunks(num_queries, per_query, GATHER_BLOCK_ELEMENTS, query_chunk)
    o_SBHV: torch.Tensor = _Attend.apply(q_SBHK, kv_TBK, index_BSN, softmax_scale, value_dim, sink, chunks)
    return o_SBHV


def summed_probabilities(
    q_SBHK: torch.Tensor, kv_TBK: torch.Tensor, index_BSN: torch.Tensor, *, softmax_scale: float, value_dim: int
) -> torch.Tensor:
    """Compute the probabilities of :func:`attend`, summed over heads: ``[B, S, N]`` in the compute dtype, 0 without a key.

    Arguments and errors as in :func:`attend`.
    """
    check_attention(q_SBHK, kv_TBK, index_BSN, value_dim)
    num_queries, batch, heads, width = q_SBHK.shape
    kv_TBK = kv_TBK.to(compute_dtype(q_SBHK, kv_TBK))
    parts = []
    for rows in query_chunks(num_queries, batch * index_BSN.shape[2] * (width + heads), GATHER_BLOCK_ELEMENTS, None):
        here = slice(rows.start, rows.stop)
        parts.append(_probabilities(q_SBHK[here], kv_TBK, index_BSN[:, here], softmax_scale)[2].sum(dim=2))
    return torch.cat(parts, dim=1)
