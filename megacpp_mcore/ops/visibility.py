"""Visibility in attention: Megatron's mask, causality, selected keys; and the chunks of queries to process.

Shape legend: S queries, T keys, B batch, H heads, N selected keys per query.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError

# Elements of one [B, H, chunk, T] block of scores: 256 MiB in fp32. The backward pass holds several such blocks.
SCORE_BLOCK_ELEMENTS = 2**26


def query_chunks(num_queries: int, elements_per_query: int, budget: int, query_chunk: int | None) -> list[range]:
    """Split the queries into consecutive ranges.

    Args:
        num_queries: number of queries, at least one.
        elements_per_query: size of the largest temporary that one query needs, in elements.
        budget: target size of that temporary for a whole chunk, in elements; used when ``query_chunk`` is None.
        query_chunk: number of queries in a chunk, or None to choose it from the budget. It changes the memory that is
            needed and never the result beyond rounding.

    Raises:
        ModelError: there are no queries, or ``query_chunk`` is not positive.
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
            f"causal attention got {num_queries} queries and {num_keys} keys, expected equally many of each (aligning them "
            "at the start or at the end would both be a guess); pass the whole sequence, or, for partial queries, call "
            "mla_attention with causal=False and an explicit attention_mask"
        )


def check_window(window: int | None, causal: bool) -> None:
    """Raise ModelError unless ``window``, how many keys before its own a query sees, is None, or 0 or more and causal."""
    if window is not None and (window < 0 or not causal):
        raise ModelError(
            f"window is {window} with causal={causal}; expected 0 or more keys before a query's own, with causal attention"
        )


def visible_keys(
    rows: range, num_keys: int, *, attention_mask: torch.Tensor | None, causal: bool, device: torch.device
) -> torch.Tensor:
    """Return which keys some of the queries see.

    Args:
        rows: the queries, as a range of positions.
        num_keys: number of keys in the result; the mask may have more.
        attention_mask: a mask that ``check_mask`` accepts, or None.
        causal: whether query i sees only keys 0..i.
        device: device of the result.

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


def check_index(index_BSN: torch.Tensor, *, batch: int, num_queries: int) -> None:
    """Raise ModelError unless the selection is int32 [B, S, N] for this batch; the values are not read."""
    if index_BSN.dtype != torch.int32 or index_BSN.dim() != 3 or index_BSN.shape[:2] != (batch, num_queries):
        raise ModelError(
            f"index_BSN is {index_BSN.dtype} {list(index_BSN.shape)}, expected torch.int32 [B, S, N] with "
            f"B, S = {batch}, {num_queries}; take it from the indexer's select"
        )
