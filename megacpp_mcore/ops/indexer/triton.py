"""The DSA indexer's ops by Triton kernels: what :func:`~megacpp_mcore.ops.indexer.reference.select` and
:func:`~megacpp_mcore.ops.indexer.reference.indexer_grad` compute, on a GPU.

Legend: S queries, T keys, B batch, H indexer heads, D indexer head width, N selected keys of a query.

The selection takes a chunk of queries at a time (:func:`chunks`): one launch scores all their keys up to themselves, the next
takes the best of each row. It gives the same bits for the same inputs. The gradient is one launch, a program a query, which
adds its part to the gradient of k by atomic additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer import kernels
from megacpp_mcore.ops.indexer.reference import check_gradient, check_indexer, check_selection
from megacpp_mcore.ops.sums import integer_unit
from megacpp_mcore.ops.visibility import check_square

HEAD_DIM, MOST_HEADS = 64, 64
"""The head width, and for the gradient the most heads, that the kernels are compiled for without a spill, and compared with
the reference at."""

QUERIES, KEYS = 64, 128
"""Of a tile of scores: one warp group's product, whose result and running sum leave registers for three programs."""

SCRATCH = 2**24
"""Scores of a chunk, of four bytes: 64 MiB."""

SCORE_KEYS = {"D": HEAD_DIM, "QUERIES": QUERIES, "KEYS": KEYS, "STAGES": 3, "num_warps": 4, "num_stages": 3}
TAKE_BEST = {"KEYS": KEYS, "BLOCK": 1024, "num_warps": 1, "num_stages": 1}
"""How the kernels of the selection are launched. A row of scores has one warp, which waits for no other."""


def learn(heads: int, selected: int, deterministic: bool) -> dict[str, int]:
    """How :func:`kernels.learn` is launched: with all selected keys at a time where the registers hold them."""
    padded = max(16, triton.next_power_of_2(heads))
    block = max(64, triton.next_power_of_2(selected))
    block = 64 if padded > 32 or deterministic else block if block <= 256 else 128
    return {"H": heads, "HEADS": padded, "D": HEAD_DIM, "N": selected, "BLOCK": block, "num_warps": 4, "num_stages": 1}


class Chunk(NamedTuple):
    """Queries whose scores are held together: rows of the batch, rows of the sequence, and places in a row of scores."""

    batch: slice
    first: int
    rows: int
    width: int


def chunks(num_queries: int, batch: int) -> Iterator[Chunk]:
    """Cut the queries into chunks of :data:`SCRATCH` scores or fewer, and at least a tile's queries."""
    longest = triton.cdiv(num_queries, KEYS) * KEYS
    together = min(batch, max(1, SCRATCH // (QUERIES * longest)))
    for start in range(0, batch, together):
        stop, first = min(start + together, batch), 0
        while first < num_queries:
            # The most rows with rows · (first + KEYS + rows) scores or fewer.
            before = first + KEYS
            rows = int(math.sqrt(before**2 + 4 * (SCRATCH // (stop - start))) - before) // 2
            rows = min(max(rows // QUERIES, 1) * QUERIES, num_queries - first)
            yield Chunk(slice(start, stop), first, rows, triton.cdiv(first + rows, KEYS) * KEYS)
            first += rows


@torch.no_grad()
def select(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    topk: int,
    seq_idx_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select as the reference's ``select`` does, from scores whose products of q and k have the dtype of q; sums are float32.

    Inputs may be strided. The scores of at most :data:`SCRATCH` pairs, or of one tile's queries, are there at a time.

    Raises:
        ModelError: as the reference, and for sizes or dtypes that the kernels do not take.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    (S, B, H, _), T = q_SBHD.shape, len(k_TBD)
    check_square(S, T)
    check_selection(topk, seq_idx_BS, batch=B, num_keys=T)
    _check_kernels(q_SBHD, k_TBD)
    q, k = _rows(q_SBHD), _rows(k_TBD)
    seq = None if seq_idx_BS is None else seq_idx_BS.contiguous()
    N, cut = min(topk, T), list(chunks(S, B))
    index_BSN = q.new_empty(B, S, N, dtype=torch.int32)
    scratch = q.new_empty(max((c.batch.stop - c.batch.start) * c.rows * c.width for c in cut), dtype=torch.float32)
    for part in cut:
        q_part, k_part, w_part = (tensor[:, part.batch] for tensor in (q, k, w_SBH))
        size = part.batch.stop - part.batch.start
        kernels.score_keys[(part.width // KEYS, triton.cdiv(part.rows, QUERIES), size)](
            q_part, k_part, w_part, None if seq is None else seq[part.batch], scratch,
            *q.stride()[:3], *k.stride()[:2], *w_SBH.stride(), S, part.first, part.rows, part.width, H,
            **SCORE_KEYS,
        )  # fmt: skip
        kernels.take_best[(part.rows, size)](
            scratch, index_BSN[part.batch], S, part.first, part.rows, part.width, N, **TAKE_BEST
        )
    return index_BSN


@torch.no_grad()
def indexer_grad(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    index_BSN: torch.Tensor,
    target_BSN: torch.Tensor,
    coefficient: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and the gradients that the reference's ``indexer_grad`` gives; products have the dtype of q, sums are float32.

    Inputs may be strided. Under ``torch.use_deterministic_algorithms`` the gradient of k is the same bits each time, too: it is
    summed in integers instead of in whatever order its parts come, at a quarter of the speed.

    Raises:
        ModelError: as the reference, and for sizes or dtypes that the kernels do not take.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    check_gradient(q_SBHD, index_BSN, target_BSN)
    _check_kernels(q_SBHD, k_TBD)
    S, B, H, _ = q_SBHD.shape
    if H > MOST_HEADS:
        raise ModelError(
            f"the indexer has {H} heads; the gradient's kernel takes {MOST_HEADS} at most: use the reference"
        )
    q, k = _rows(q_SBHD), _rows(k_TBD)
    weight = (q.new_full((), 1 / (B * S), dtype=torch.float32) * coefficient).float()
    deterministic = torch.are_deterministic_algorithms_enabled()
    units = _units(q, w_SBH, weight) if deterministic else None
    dq, dk = q.new_empty(q.shape), k.new_zeros(k.shape, dtype=torch.float32 if units is None else torch.int64)
    dw, divergence_BS = w_SBH.new_empty(w_SBH.shape), q.new_empty(B, S, dtype=torch.float32)
    kernels.learn[(S, B)](
        q, k, w_SBH, index_BSN.contiguous(), target_BSN.contiguous(), weight, units, dq, dk, dw, divergence_BS,
        *q.stride()[:3], *k.stride()[:2], *w_SBH.stride(), S, B,
        **learn(H, index_BSN.shape[2], deterministic),
    )  # fmt: skip
    loss = divergence_BS.mean()
    if units is not None:
        dk = dk.double() / units + 0 * loss  # integers have no NaN
    return loss, dq, dk.to(k_TBD.dtype), dw


def _units(q: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How many integers make 1 in the sum of a key's gradient; NaN or 0 where an input is not finite.

    Of a query's probabilities no two differ by more than 1: its part is at most ``weight · Σ_h |w · q|``.
    """
    largest = weight.abs() * w.abs().amax().float() * q.abs().amax().float() * q.shape[2]
    return integer_unit(len(q) * largest)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_kernels(q_SBHD: torch.Tensor, k_TBD: torch.Tensor) -> None:
    """Refuse what no kernel was built and tested for."""
    if not len(q_SBHD):
        raise ModelError("there are 0 queries, expected at least one; do not call the op for an empty sequence")
    if q_SBHD.dtype != k_TBD.dtype or q_SBHD.dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(
            f"indexer q and k have dtypes {q_SBHD.dtype} and {k_TBD.dtype}; the Triton kernels take both in bfloat16 or both "
            "in float16: cast them, or use the reference"
        )
    if q_SBHD.shape[-1] != HEAD_DIM:
        raise ModelError(
            f"the indexer's head width is {q_SBHD.shape[-1]}; the Triton kernels take {HEAD_DIM}: use the reference"
        )
