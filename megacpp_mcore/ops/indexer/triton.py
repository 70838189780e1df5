"""The DSA indexer's ops by Triton kernels on a GPU: :func:`~megacpp_mcore.ops.indexer.reference.select` and
:func:`~megacpp_mcore.ops.indexer.reference.indexer_grad`; and scores only (:func:`score_all`), for ``chunked.py``.

Legend: S queries, R queries of a chunk, T keys, B batch, H indexer heads, D indexer head width, N selected keys of a query.

Selection processes chunks of queries (:func:`chunks`): one launch scores all keys up to each query, the next takes the top-k of
each row. The same inputs give the same bits. The gradient is one launch, one program per query, which accumulates into the
gradient of k atomically.
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
from megacpp_mcore.ops.triton_launch import launch, options
from megacpp_mcore.ops.visibility import check_square

HEAD_DIM, MOST_HEADS = 64, 64
"""The head width, and for the gradient the maximum number of heads, for which the kernels compile without register spills and
are tested against the reference. :func:`score_all` has widths of its own."""

QUERIES, KEYS = 64, 128
"""Tile of scores: one warp group's product; result and accumulator leave enough registers for three programs."""

SCRATCH = 2**24
"""Scores of a chunk: 64 MiB in float32."""

SCORE_KEYS = {
    "D": HEAD_DIM, "QUERIES": QUERIES, "KEYS": KEYS, "STAGES": 3, "CAUSAL": True, "num_warps": 4, "num_stages": 3
}  # fmt: skip
TAKE_BEST = {"KEYS": KEYS, "BLOCK": 1024, "NEAR": 4096, "num_warps": 1, "num_stages": 1}
"""Launch options of the selection: one warp per row of scores, so that no warp waits for another."""

LONG_ROW = 2**14
"""Longest row of scores that every search step reads: the rows of a multiprocessor's programs must fit its L1 cache."""

ALL_KEYS = SCORE_KEYS | options("score_keys", {"CAUSAL": False, "maxnreg": 168})
SCORE_ALL = {HEAD_DIM: ALL_KEYS, 128: ALL_KEYS | {"D": 128, "STAGES": 2, "num_stages": 2}}
"""Launch options of :func:`score_all` by head width. Registers and shared memory leave room for three programs: without the
limit, rows with T not a multiple of 16, which are stored element by element, take 254 registers per thread."""


def learn(heads: int, selected: int, deterministic: bool) -> dict[str, int]:
    """Return launch options of :func:`kernels.learn`: all selected keys in one block if the registers suffice."""
    padded = max(16, triton.next_power_of_2(heads))
    block = max(64, triton.next_power_of_2(selected))
    block = 64 if padded > 32 or deterministic else block if block <= 256 else 128
    return {"H": heads, "HEADS": padded, "D": HEAD_DIM, "N": selected, "BLOCK": block, "num_warps": 4, "num_stages": 1}


class Chunk(NamedTuple):
    """Queries with scores in memory at the same time: rows of the batch, rows of the sequence, and columns of scores."""

    batch: slice
    first: int
    rows: int
    width: int


def chunks(num_keys: int, batch: int, first_row: int = 0) -> Iterator[Chunk]:
    """Split the queries from ``first_row`` on into chunks of at most :data:`SCRATCH` scores, but at least one tile."""
    longest = triton.cdiv(num_keys, KEYS) * KEYS
    together = min(batch, max(1, SCRATCH // (QUERIES * longest)))
    for start in range(0, batch, together):
        stop, first = min(start + together, batch), first_row
        while first < num_keys:
            # The most rows with rows · (first + KEYS + rows) scores or fewer.
            before = first + KEYS
            rows = int(math.sqrt(before**2 + 4 * (SCRATCH // (stop - start))) - before) // 2
            rows = min(max(rows // QUERIES, 1) * QUERIES, num_keys - first)
            yield Chunk(slice(start, stop), first, rows, triton.cdiv(first + rows, KEYS) * KEYS)
            first += rows


@torch.no_grad()
def select(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    topk: int,
    seq_idx_BS: torch.Tensor | None = None,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """Select like the reference's ``select``; operands of q·k have the dtype of q, accumulators are float32.

    Inputs may be strided. At most :data:`SCRATCH` scores, or those of one tile's queries, exist at a time, plus a quarter as
    many for rows longer than :data:`LONG_ROW`.

    Raises:
        ModelError: as in the reference, and for sizes or dtypes that the kernels do not support.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    (S, B, H, _), T = q_SBHD.shape, len(k_TBD)
    check_square(first_row + S, T)
    check_selection(topk, seq_idx_BS, batch=B, num_keys=T)
    _check_kernels(q_SBHD, k_TBD)
    q, k = _rows(q_SBHD), _rows(k_TBD)
    seq = None if seq_idx_BS is None else seq_idx_BS.contiguous()
    N, cut = min(topk, T), list(chunks(T, B, first_row))
    index_BSN = q.new_empty(B, S, N, dtype=torch.int32)
    scratch = q.new_empty(max((c.batch.stop - c.batch.start) * c.rows * c.width for c in cut), dtype=torch.float32)
    most = max((c.batch.stop - c.batch.start) * c.rows for c in cut if c.width > LONG_ROW) if T > LONG_ROW else 0
    near = q.new_empty(most * TAKE_BEST["NEAR"], dtype=torch.float32)
    for part in cut:
        q_part, k_part, w_part = (tensor[:, part.batch] for tensor in (q, k, w_SBH))
        size = part.batch.stop - part.batch.start
        launch(
            kernels.score_keys, (part.width // KEYS, triton.cdiv(part.rows, QUERIES), size), q_part, k_part, w_part,
            None if seq is None else seq[part.batch], scratch, *q.stride()[:3], *k.stride()[:2], *w_SBH.stride(), T, part.first,
            part.rows, part.width, H, None, first_row, **SCORE_KEYS,
        )  # fmt: skip
        launch(
            kernels.take_best, (part.rows, size), scratch, near if part.width > LONG_ROW else None, index_BSN[part.batch], S,
            part.first, part.rows, part.width, N, first_row, **TAKE_BEST,
        )  # fmt: skip
    return index_BSN


@torch.no_grad()
def score_all(score_BRT: torch.Tensor, q_SBHD: torch.Tensor, k_TBD: torch.Tensor, w_SBH: torch.Tensor, first: int = 0) -> None:
    """Write into ``score_BRT`` the scores of all T keys, unmasked, for queries ``first`` to ``first + R - 1``.

    The same as :func:`~megacpp_mcore.ops.indexer.reference.score_block` except for rounding, including NaN and infinities;
    operands of q·k have the dtype of q, accumulators are float32. One launch, without synchronisation.

    Args:
        score_BRT: float32; may be a slice of a larger tensor, but with whole rows, strides ``(any, T, 1)``.
        q_SBHD, k_TBD, w_SBH: inputs of the scores, which may be strided; if strides of q or k are not multiples of 16, the
            kernel spills registers.
        first: first query to score.

    Raises:
        ModelError: sizes, strides or dtypes that the kernel does not support.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    _check_kernels(q_SBHD, k_TBD, tuple(SCORE_ALL))
    (S, B, H, D), T, R = q_SBHD.shape, len(k_TBD), score_BRT.shape[1]
    layout = (score_BRT.dtype, tuple(score_BRT.shape), score_BRT.stride()[1:])
    if layout != (torch.float32, (B, R, T), (T, 1)) or not 0 <= first <= first + R <= S:
        raise ModelError(
            f"scores of {S} queries from {first} on have dtype, shape and last strides {layout}, expected "
            f"{(torch.float32, (B, f'at most {S - first}', T), (T, 1))}"
        )
    q, k = _rows(q_SBHD), _rows(k_TBD)
    with torch.cuda.device_of(q):
        launch(
            kernels.score_keys, (triton.cdiv(T, KEYS), triton.cdiv(R, QUERIES), B), q, k, w_SBH, None, score_BRT,
            *q.stride()[:3], *k.stride()[:2], *w_SBH.stride(), S, first, R, T, H, score_BRT.stride(0), 0, **SCORE_ALL[D],
        )  # fmt: skip


@torch.no_grad()
def indexer_grad(
    q_SBHD: torch.Tensor,
    k_TBD: torch.Tensor,
    w_SBH: torch.Tensor,
    index_BSN: torch.Tensor,
    target_BSN: torch.Tensor,
    coefficient: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the reference's ``indexer_grad``; operands of products have the dtype of q, accumulators are float32.

    Inputs may be strided. Under ``torch.use_deterministic_algorithms`` the gradient of k is bitwise reproducible, too: it is
    summed in integers, independent of the order, at a quarter of the speed.

    Raises:
        ModelError: as in the reference, and for sizes or dtypes that the kernels do not support.
    """
    check_indexer(q_SBHD, k_TBD, w_SBH)
    check_gradient(q_SBHD, index_BSN, target_BSN)
    _check_kernels(q_SBHD, k_TBD)
    S, B, H, _ = q_SBHD.shape
    if H > MOST_HEADS:
        raise ModelError(f"the indexer has {H} heads; the gradient kernel supports at most {MOST_HEADS}: use the reference")
    q, k = _rows(q_SBHD), _rows(k_TBD)
    weight = (q.new_full((), 1 / (B * S), dtype=torch.float32) * coefficient).float()
    deterministic = torch.are_deterministic_algorithms_enabled()
    units = _units(q, w_SBH, weight) if deterministic else None
    dq, dk = q.new_empty(q.shape), k.new_zeros(k.shape, dtype=torch.float32 if units is None else torch.int64)
    dw, divergence_BS = w_SBH.new_empty(w_SBH.shape), q.new_empty(B, S, dtype=torch.float32)
    launch(
        kernels.learn, (S, B), q, k, w_SBH, index_BSN.contiguous(), target_BSN.contiguous(), weight, units, dq, dk, dw,
        divergence_BS, *q.stride()[:3], *k.stride()[:2], *w_SBH.stride(), S, B, **learn(H, index_BSN.shape[2], deterministic),
    )  # fmt: skip
    loss = divergence_BS.mean()
    if units is not None:
        dk = dk.double() / units + 0 * loss  # integers cannot hold NaN
    return loss, dq, dk.to(k_TBD.dtype), dw


def _units(q: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the integer that represents 1 in the sum of a key's gradient; NaN or 0 if an input is not finite.

    Two probabilities differ by at most 1, so a query adds at most ``weight · Σ_h |w · q|``.
    """
    largest = weight.abs() * w.abs().amax().float() * q.abs().amax().float() * q.shape[2]
    return integer_unit(len(q) * largest)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its rows are contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_kernels(q_SBHD: torch.Tensor, k_TBD: torch.Tensor, widths: tuple[int, ...] = (HEAD_DIM,)) -> None:
    """Raise ModelError for sizes and dtypes that the kernels were not built and tested for."""
    if not len(q_SBHD):
        raise ModelError("there are 0 queries, expected at least one; do not call the op for an empty sequence")
    if q_SBHD.dtype != k_TBD.dtype or q_SBHD.dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(
            f"indexer q and k have dtypes {q_SBHD.dtype} and {k_TBD.dtype}; the Triton kernels take both in bfloat16 or both "
            "in float16: cast them, or use the reference"
        )
    if q_SBHD.shape[-1] not in widths:
        raise ModelError(
            f"the indexer's head width is {q_SBHD.shape[-1]}; the Triton kernels take "
            f"{' or '.join(map(str, widths))}: use the reference"
        )
