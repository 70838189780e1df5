"""Positions of the rows of a packed batch, computed on the device: no host synchronisation, no shape that depends on data.

Legend: ``cu_seqlens`` holds the first row of each of N sequences and, last, the end of the last one: ``[N + 1]``,
integers. Under context parallelism (zigzag) each sequence is split into 2 · cp_size equal parts, and a rank holds part ``rank``
and then part ``2 · cp_size - rank - 1``. Source: megatron-core 0.19 ``dsa_layout.py`` and ``rope_utils.py``.
"""

from __future__ import annotations

import torch


def _sequence_of_row(lengths_N: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each of ``num_rows`` rows, the sequence (or piece) that it is in, and its offset there.

    Empty sequences have no rows. Rows after the last sequence count as its continuation.
    """
    ends_N = lengths_N.cumsum(0)
    row = torch.arange(num_rows, device=lengths_N.device)
    sequence = torch.searchsorted(ends_N, row, right=True).clamp_max(lengths_N.numel() - 1)
    return sequence, row - (ends_N - lengths_N)[sequence]


def zigzag_positions(cu_seqlens: torch.Tensor, *, cp_size: int, cp_rank: int, num_rows: int, padded: bool) -> torch.Tensor:
    """Return the position of each of this rank's rows in the packed batch of all ranks: int64 ``[num_rows]``.

    Args:
        cu_seqlens: of the whole batch; each length is a multiple of 2 · cp_size.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        num_rows: rows that this rank holds.
        padded: whether rows may follow the last sequence; they get positions after all sequences, distinct on all ranks.
    """
    cu_seqlens = cu_seqlens.long()
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    half = (ends - starts) // cp_size // 2
    piece_starts = torch.stack((starts + cp_rank * half, ends - (cp_rank + 1) * half), dim=1).flatten()
    piece_lengths = torch.stack((half, half), dim=1).flatten()
    if padded:
        rest = (num_rows - piece_lengths.sum()).clamp_min(0)
        piece_starts = torch.cat((piece_starts, (cu_seqlens[-1] + cp_rank * num_rows)[None]))
        piece_lengths = torch.cat((piece_lengths, rest[None]))
    piece, offset = _sequence_of_row(piece_lengths, num_rows)
    return piece_starts[piece] + offset


def rotary_rows(cu_seqlens: torch.Tensor, *, num_rows: int, num_frequencies: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the row of the rotary frequency table for each of this rank's rows: int64 ``[num_rows]``.

    Args:
        cu_seqlens: of the whole batch; each length is a multiple of 2 · cp_size, or any without context parallelism.
        num_rows: rows that this rank holds.
        num_frequencies: rows of the table. If that is the length of the packed batch, the table covers all sequences
            consecutively; otherwise each sequence starts at its row 0.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
    """
    cu_seqlens = cu_seqlens.long()
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size
    sequence, position = _sequence_of_row(lengths, num_rows)
    if cp_size > 1:
        length = lengths[sequence]
        half = length // 2
        back = cp_size * length - (cp_rank + 1) * half + position - half
        position = torch.where(position < half, cp_rank * half + position, back)
    first = torch.where(cu_seqlens[-1] == num_frequencies, cu_seqlens[sequence], 0)
    return (first + position).clamp_max(num_frequencies - 1)
