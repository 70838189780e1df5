"""Sparse MLA by Triton kernels on a GPU: :func:`megacpp_mcore.ops.sparse_mla.reference.attend`.

Launches: per :data:`HEADS` heads, one forward and two backward; for :data:`WIDE` widths, backward has up to four per
chunk of queries and 2 · :data:`HEADS` heads. The output, the gradient of the queries and the sum of probabilities have a fixed
reduction order. The gradient of a key is summed over the queries that selected it by float32 atomics, in no fixed order; under
``torch.use_deterministic_algorithms`` in integers, independent of the order.

Legend: S queries, T keys, B batch, H heads, K width of a query or key, V of the latent value, N selected keys, P columns of the
padded index, C queries of one chunk, D score gradients and probabilities of its heads, rounded up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.slices import aligned, eighths
from megacpp_mcore.ops.sparse_mla import kernels, wide
from megacpp_mcore.ops.sparse_mla.reference import check_attention
from megacpp_mcore.ops.sums import integer_unit
from megacpp_mcore.ops.triton_launch import launch, options

WIDE = ((576, 512),)
"""Widths of a query and of its value with separate kernels: DeepSeek's."""

WIDTHS = ((128, 64), *WIDE)
"""Widths of a query and of its value for which the kernels compile without register spills."""

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of queries and keys, the same for both."""

HEADS = 64
"""Maximum heads per launch."""

FORWARD: dict[str, int] = {"KEYS": kernels.KEYS, "STAGES": 2, "num_warps": 4}
MEANS = FORWARD | {"STAGES": 1}
BACKWARD: dict[str, int] = {"KEYS": kernels.KEYS, "STAGES": 3, "num_warps": 4}
SUMS = dict(FORWARD)
NARROW_LAUNCHES = (FORWARD, MEANS, BACKWARD, SUMS)
"""Launch options of the kernels; for forward and backward, the fastest on an H200."""

WIDE_FORWARD: dict[str, int] = {"KEYS": kernels.KEYS, "STAGES": 3, "num_warps": 8}
SCORES = WIDE_FORWARD | {"STAGES": 1}
WIDE_SUMS = WIDE_FORWARD | {"STAGES": 2}
QUERIES = WIDE_FORWARD | {"STAGES": 5, "PARTS": 2}
GRADIENTS = WIDE_FORWARD | options("keys", {"STAGES": 1, "W": 128})
WIDE_LAUNCHES = (WIDE_FORWARD, SCORES, QUERIES, GRADIENTS, WIDE_SUMS)
"""Launch options for :data:`WIDE` widths: among those without spills in any kernel, the fewest estimated cycles.

On an H200, 4096 queries of 128 heads and 2048 keys: 5.5 ms forward, 21.7 with backward, 26.3 in deterministic mode."""

SCRATCH = 2**28
"""Maximum bytes of a chunk's probabilities and score gradients, unless one query needs more: 256 queries of 128 heads and
2048 keys; an H200 runs 132 of them at a time, one per multiprocessor."""


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
    """Compute the reference's :func:`attend` in bfloat16 or float16.

    Probabilities and the gradients of scores are rounded to the inputs' dtype before they are multiplied by keys and queries;
    all accumulators are float32. Saved for backward: the inputs (or their copies), the output, and one number per query and
    head. For :data:`WIDE` widths, backward allocates up to :data:`SCRATCH` bytes.

    Args:
        q_SBHK, kv_TBK, index_BSN, softmax_scale, value_dim, sink: as in the reference; copied unless the width is contiguous
            and the other strides are multiples of 8.
        query_chunk: ignored.

    Raises:
        ModelError: as in the reference; or dtypes differ or are not in :data:`DTYPES`, widths are not in :data:`WIDTHS`, or
            the scale is not positive.
    """
    _check(q_SBHK, kv_TBK, index_BSN, softmax_scale, value_dim)
    o_SBHV: torch.Tensor = SparseMLAKernels.apply(q_SBHK, kv_TBK, index_BSN, softmax_scale, value_dim, sink)
    return o_SBHV


@torch.no_grad()
def summed_probabilities(
    q_SBHK: torch.Tensor, kv_TBK: torch.Tensor, index_BSN: torch.Tensor, *, softmax_scale: float, value_dim: int
) -> torch.Tensor:
    """Compute the probabilities of :func:`attend`, summed over heads: float32 ``[B, S, N]``, 0 without a key.

    Arguments and errors as in :func:`attend`. The same inputs give the same bits.
    """
    _check(q_SBHK, kv_TBK, index_BSN, softmax_scale, value_dim)
    (S, B, H, K), V, N = q_SBHK.shape, value_dim, index_BSN.shape[2]
    q_SBHK, kv_TBK, index_BSP = aligned(q_SBHK), aligned(kv_TBK), _padded(index_BSN)
    sum_BSN = q_SBHK.new_empty(B, S, N, dtype=torch.float32)
    for first in range(0, H, HEADS):
        launch(
            kernels.sums, (S, B), q_SBHK, kv_TBK, index_BSP, sum_BSN, softmax_scale, S, H, N, index_BSP.shape[2], first,
            *eighths(q_SBHK, 3), *eighths(kv_TBK), M=_rows(H - first, 64), V=V, R=K - V,
            **(WIDE_SUMS if (K, V) in WIDE else SUMS),
        )  # fmt: skip
    return sum_BSN


def _check(q_SBHK: torch.Tensor, kv_TBK: torch.Tensor, index_BSN: torch.Tensor, softmax_scale: float, value_dim: int) -> None:
    check_attention(q_SBHK, kv_TBK, index_BSN, value_dim)
    if q_SBHK.dtype != kv_TBK.dtype or q_SBHK.dtype not in DTYPES:
        raise ModelError(
            f"sparse MLA's kernels got {q_SBHK.dtype} and {kv_TBK.dtype}; they take one of {DTYPES}, the same for q and kv: "
            "use the reference"
        )
    if (widths := (q_SBHK.shape[-1], value_dim)) not in WIDTHS:
        raise ModelError(
            f"sparse MLA's kernels got widths {widths} of a query and of its value; they take one of {WIDTHS}: use the "
            "reference"
        )
    if softmax_scale <= 0:
        raise ModelError(f"softmax_scale is {softmax_scale}; sparse MLA's kernels need a positive one: use the reference")


class SparseMLAKernels(torch.autograd.Function):
    """Sparse MLA as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBHK: torch.Tensor,
        kv_TBK: torch.Tensor,
        index_BSN: torch.Tensor,
        softmax_scale: float,
        value_dim: int,
        sink: TargetSum | None,
    ) -> torch.Tensor:
        """Compute the output, contiguous."""
        (S, B, H, K), V = q_SBHK.shape, value_dim
        q_SBHK, kv_TBK, index_BSP = aligned(q_SBHK), aligned(kv_TBK), _padded(index_BSN)
        o_SBHV, lse_BSH = q_SBHK.new_empty(S, B, H, V), q_SBHK.new_empty(B, S, H, dtype=torch.float32)
        kernel, options = (wide.forward, WIDE_FORWARD) if (K, V) in WIDE else (kernels.forward, FORWARD)
        for first in range(0, H, HEADS):
            launch(
                kernel, (S, B), q_SBHK, kv_TBK, index_BSP, o_SBHV, lse_BSH, softmax_scale, S, H, index_BSP.shape[2], first,
                *eighths(q_SBHK, 3), *eighths(kv_TBK), M=_rows(H - first, 64), V=V, R=K - V, **options,
            )  # fmt: skip
        ctx.save_for_backward(q_SBHK, kv_TBK, index_BSN, index_BSP, o_SBHV, lse_BSH)
        ctx.softmax_scale, ctx.sink = softmax_scale, sink
        return o_SBHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_SBHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of q and kv; add the probabilities, summed over heads, to the sink."""
        q_SBHK, kv_TBK, index_BSN, index_BSP, o_SBHV, lse_BSH = ctx.saved_tensors
        do_SBHV = aligned(do_SBHV)
        deterministic = torch.are_deterministic_algorithms_enabled()
        dkv_TBK = kv_TBK.new_zeros(kv_TBK.shape, dtype=torch.int64 if deterministic else torch.float32)
        unit = _integer_scale(q_SBHK, kv_TBK, do_SBHV, ctx.softmax_scale) if deterministic else None
        sum_BSN = None if ctx.sink is None else ctx.sink.accumulator(index_BSN, torch.float32)
        dq_SBHK = _backward(
            q_SBHK, kv_TBK, index_BSP, o_SBHV, lse_BSH, do_SBHV, dkv_TBK, sum_BSN, unit,
            softmax_scale=ctx.softmax_scale, selected=index_BSN.shape[2],
        )  # fmt: skip
        if unit is not None:
            dkv_TBK = dkv_TBK.double() / unit
        return dq_SBHK, dkv_TBK.to(kv_TBK.dtype), None, None, None, None


def _backward(
    q_SBHK: torch.Tensor,
    kv_TBK: torch.Tensor,
    index_BSP: torch.Tensor,
    o_SBHV: torch.Tensor,
    lse_BSH: torch.Tensor,
    do_SBHV: torch.Tensor,
    dkv_TBK: torch.Tensor,
    sum_BSN: torch.Tensor | None,
    unit: torch.Tensor | None,
    *,
    softmax_scale: float,
    selected: int,
) -> torch.Tensor:
    """Return dq; accumulate into dkv (with a unit, as integers in multiples of 1/unit) and into the sum of probabilities.

    For :data:`WIDE` widths, a chunk of queries at a time.
    """
    (S, B, H, K), V, P = q_SBHK.shape, o_SBHV.shape[3], index_BSP.shape[2]
    dq_SBHK, widths = q_SBHK.new_empty(S, B, H, K), {"V": V, "R": K - V}
    of_queries, of_keys, of_output = eighths(q_SBHK, 3), eighths(kv_TBK), eighths(do_SBHV, 3)
    strides = (*of_queries, *of_keys, *of_output)
    if (K, V) not in WIDE:
        mean_BSH = lse_BSH.new_empty(B, S, H)
        for first in range(0, H, HEADS):
            launch(
                kernels.means, (S, B), q_SBHK, kv_TBK, index_BSP, o_SBHV, lse_BSH, do_SBHV, mean_BSH, softmax_scale, S, H, P,
                first, *strides, M=_rows(H - first, 64), **widths, **MEANS,
            )  # fmt: skip
            launch(
                kernels.backward, (S, B), q_SBHK, kv_TBK, index_BSP, mean_BSH, lse_BSH, do_SBHV, dq_SBHK, dkv_TBK, sum_BSN,
                unit, softmax_scale, S, H, selected, P, first, *strides, M=_rows(H - first, 32), **widths, **BACKWARD,
            )  # fmt: skip
        return dq_SBHK
    chunk = min(S, max(1, SCRATCH // (2 * B * P * _all_rows(H) * q_SBHK.itemsize)))
    d_CBPD = q_SBHK.new_empty(chunk, B, P, 2 * _all_rows(H))
    for begin in range(0, S, chunk):
        queries = min(chunk, S - begin)
        for first in range(0, H, 2 * HEADS):
            ALL, place = _all_rows(H - first), (P, begin, first)
            groups, sizes = max(1, ALL // HEADS), {"ALL": ALL, **widths}
            for group in range(groups):
                launch(
                    wide.scores, (queries, B), q_SBHK, kv_TBK, index_BSP, o_SBHV, lse_BSH, do_SBHV, d_CBPD, sum_BSN,
                    softmax_scale, S, H, selected, *place, *strides, M=min(ALL, HEADS), GROUP=group, **sizes, **SCORES,
                )  # fmt: skip
            launch(
                wide.queries, (queries, B, QUERIES["PARTS"]), kv_TBK, index_BSP, d_CBPD, dq_SBHK, S, H, *place, *of_keys,
                **sizes, **QUERIES,
            )  # fmt: skip
            launch(
                wide.keys, (queries, B, groups), q_SBHK, index_BSP, do_SBHV, d_CBPD, dkv_TBK, unit, S, H, *place, *of_queries,
                *of_output, PARTS=groups, **sizes, **GRADIENTS,
            )  # fmt: skip
    return dq_SBHK


def _padded(index_BSN: torch.Tensor) -> torch.Tensor:
    """Pad the index with -1 to whole tiles of columns."""
    missing = -index_BSN.shape[2] % kernels.KEYS
    return torch.nn.functional.pad(index_BSN, (0, missing), value=-1) if missing else index_BSN.contiguous()


def _rows(heads: int, second: int) -> int:
    """Return the heads of a launch with ``heads`` left, rounded up to 16 (tensor-core minimum), ``second`` or HEADS."""
    return next(rows for rows in (16, second, HEADS) if rows >= min(heads, HEADS))


def _all_rows(heads: int) -> int:
    """Return the heads of one launch of ``queries`` and ``keys`` (up to two of ``scores``), with ``heads`` left, rounded up."""
    least: int = options("all_rows", {"LEAST": 1})["LEAST"]
    return 2 * HEADS if heads > HEADS else _rows(max(heads, least), HEADS)


def _integer_scale(q_SBHK: torch.Tensor, kv_TBK: torch.Tensor, do_SBHV: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Return the integer that represents 1 in the sum of a key's gradient; NaN or 0 if an input is not finite.

    Each query and head adds at most ``|do| + |dx|·|q|``, where ``|dx| ≤ 2·|scale|·V·|do|·|kv|``. Typical sums are about 2^30
    below the bound, and then still have 30 bits, more than float32.
    """
    q, kv, do = (torch.linalg.vector_norm(x, ord=math.inf, dtype=torch.float32).double() for x in (q_SBHK, kv_TBK, do_SBHV))
    S, _, H, V = do_SBHV.shape
    bound = S * H * do * (1 + 2 * abs(softmax_scale) * V * kv * q)
    return integer_unit(bound)
