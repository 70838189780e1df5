"""Which rows of a sequence belong to one document: from packed sequence lengths or from Megatron's attention mask, and back.

``seq_idx_BS`` numbers the document of every row, int32, as mamba-ssm's argument of that name: the rows of a document follow
one another, and nothing of one document reaches another.

Legend: B batch, S rows. ``cu_seqlens`` is described in :mod:`megacpp_mcore.ops.packed.positions`.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.visibility import check_mask


def seq_idx_from_cu_seqlens(
    cu_seqlens: torch.Tensor, num_rows: int, of_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Number the documents of a packed batch: int32 ``[1, num_rows]``, without waiting for the device.

    Rows behind the last sequence (padding) are a document of their own.

    Args:
        cu_seqlens: first row of each sequence and the end of the last one, ``[N + 1]``, integers.
        num_rows: rows of the packed batch.
        of_keys: the same of the keys, where queries and keys are told apart.

    Raises:
        ModelError: ``cu_seqlens`` or ``of_keys`` is no vector of two or more integers, or they differ in length. For tensors
            on the CPU also: their numbers differ, do not begin with 0, decrease, or end behind the last row. Numbers on a GPU
            are not read, since it would have to be waited for.
    """
    _check_cu_seqlens(cu_seqlens, num_rows)
    if of_keys is not None and of_keys is not cu_seqlens:
        _check_cu_seqlens(of_keys, num_rows)
        _check_same_sequences(cu_seqlens, of_keys)
    row = torch.arange(num_rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True)[None]


def _check_cu_seqlens(cu_seqlens: torch.Tensor, num_rows: int) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ModelError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}, expected integers [N + 1]: the first row of each "
            "of N ≥ 1 sequences and the end of the last"
        )
    if cu_seqlens.device.type != "cpu":
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > num_rows or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ModelError(
            f"cu_seqlens is {_abridged(cu_seqlens)}, expected first rows that begin with 0, never decrease, and end with at "
            f"most the {num_rows} rows of the packed batch"
        )


def _check_same_sequences(queries: torch.Tensor, keys: torch.Tensor) -> None:
    if queries.shape != keys.shape:
        raise ModelError(
            f"{queries.numel() - 1} packed sequences of queries and {keys.numel() - 1} of keys; expected the same, as in "
            "self-attention"
        )
    if queries.device.type == keys.device.type == "cpu" and not bool((queries == keys).all()):
        raise ModelError(
            f"cu_seqlens is {_abridged(queries)} of queries and {_abridged(keys)} of keys; expected the same, as in "
            "self-attention"
        )


def _abridged(cu_seqlens: torch.Tensor) -> str:
    first = ", ".join(map(str, cu_seqlens[:8].tolist()))
    return f"[{first}, …, {int(cu_seqlens[-1])}]" if cu_seqlens.numel() > 8 else f"[{first}]"


def seq_idx_from_mask(attention_mask: torch.Tensor) -> torch.Tensor | None:
    """Number the documents that Megatron's mask keeps apart: int32 ``[B, S]``, or None where a causal mask keeps none apart.

    The mask is what ``--reset-attention-mask`` makes: row i sees row j ≤ i if both are in one document. It is checked to be
    exactly that, which makes a GPU wait.

    Args:
        attention_mask: bool ``[B, 1, S, S]``, True = masked.

    Raises:
        ModelError: the mask is another, so that no numbering of documents says the same.
    """
    if attention_mask.dim() != 4 or attention_mask.shape[2] != attention_mask.shape[3] or not attention_mask.shape[2]:
        raise ModelError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected [B, 1, S, S]; this layer reads the documents of "
            "a row from it"
        )
    batch, _, rows, _ = attention_mask.shape
    check_mask(attention_mask, batch=batch, num_queries=rows, num_keys=rows)
    hidden_BSS = attention_mask[:, 0]
    starts_BS = torch.nn.functional.pad(hidden_BSS.diagonal(-1, 1, 2), (1, 0))
    seq_idx_BS = starts_BS.cumsum(1, dtype=torch.int32)
    future_SS = torch.ones(rows, rows, dtype=torch.bool, device=attention_mask.device).triu(1)
    differs_BSS = hidden_BSS != (other_documents(seq_idx_BS)[:, 0] | future_SS)
    has_starts, has_differences = torch.stack((starts_BS.any(), differs_BSS.any())).tolist()
    if has_differences:
        b, i, j = differs_BSS.nonzero()[0].tolist()
        state = "masked" if bool(hidden_BSS[b, i, j]) else "visible"
        raise ModelError(
            f"attention_mask[{b}, 0, {i}, {j}] is {state}, which neither causality nor documents explain; expected a causal "
            "mask that a document's first row resets (--reset-attention-mask): a layer with a state cannot follow another"
        )
    return seq_idx_BS if has_starts else None


def document_starts(seq_idx_BS: torch.Tensor, *, batch: int, rows: int) -> torch.Tensor:
    """Say which rows begin a document after another one: bool ``[B, S]``, False in the first row.

    Raises:
        ModelError: ``seq_idx_BS`` is no int32 tensor ``[B, S]``.
    """
    check_seq_idx(seq_idx_BS, batch=batch, rows=rows)
    return torch.nn.functional.pad(seq_idx_BS[:, 1:] != seq_idx_BS[:, :-1], (1, 0))


def check_seq_idx(seq_idx_BS: torch.Tensor, *, batch: int, rows: int) -> None:
    """Raise ModelError unless ``seq_idx_BS`` is int32 ``[B, S]``; the numbers are not read."""
    if tuple(seq_idx_BS.shape) != (batch, rows) or seq_idx_BS.dtype != torch.int32:
        raise ModelError(
            f"seq_idx is {seq_idx_BS.dtype} {list(seq_idx_BS.shape)}, expected torch.int32 [B, S] = [{batch}, {rows}]: the "
            "number of the document of every row"
        )


def other_documents(seq_idx_BS: torch.Tensor) -> torch.Tensor:
    """The mask, True = masked, that hides other documents: bool ``[B, 1, S, S]``; not causal by itself."""
    return (seq_idx_BS[:, :, None] != seq_idx_BS[:, None, :])[:, None]


def segmented_cumsum(values: torch.Tensor, starts_BS: torch.Tensor) -> torch.Tensor:
    """Running sum over axis 1 of ``[B, S, …]`` that begins anew at every start.

    By doubling, log₂ S additions: no number of one document is ever added to one of another and taken off again.
    """
    seq_idx_BS = starts_BS.cumsum(1, dtype=torch.int32)
    step, rows = 1, values.shape[1]
    while step < rows:
        together_BS = seq_idx_BS[:, step:] == seq_idx_BS[:, :-step]
        together = together_BS.reshape(*together_BS.shape, *(1,) * (values.dim() - 2))
        added = values[:, step:] + torch.where(together, values[:, :-step], torch.zeros_like(values[:, step:]))
        values = torch.cat((values[:, :step], added), dim=1)
        step *= 2
    return values
