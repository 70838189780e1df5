"""MLA core attention within documents and windows by Triton kernels: :func:`megacpp_mcore.ops.mla.reference.mla_attention`.

Four launches, one forward and three backward, for any documents: other kernels take cumulative lengths, and the number of
lengths determines the launch, so a CUDA graph must always launch the maximum number of documents. Every sum has a fixed
order, so the same inputs give the same bits.

Shape legend: S queries and keys, B batch, H heads (of this rank), K query-key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.mla import kernels
from megacpp_mcore.ops.mla.sdpa import check_arguments
from megacpp_mcore.ops.packed.documents import document_starts, shared
from megacpp_mcore.ops.slices import aligned, eighths, empty_gradients
from megacpp_mcore.ops.triton_launch import launch

WIDTHS = ((128, 64),)
"""Widths of a query and of its value for which the kernels compile without register spills."""

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of queries, keys and values, the same for all."""

FORWARD: dict[str, int] = {"ROWS": 128, "KEYS": 128, "STAGES": 2, "num_warps": 8}
MEANS: dict[str, int] = {"ROWS": 64, "num_warps": 4}
QUERIES: dict[str, int] = {"ROWS": 128, "KEYS": 64, "STAGES": 3, "num_warps": 8}
KEYS: dict[str, int] = {"ROWS": 64, "KEYS": 128, "STAGES": 3, "num_warps": 8}
LAUNCHES = (FORWARD, MEANS, QUERIES, KEYS)
"""Launch options of the kernels."""


def attend(
    q_SBHK: torch.Tensor,
    k_SBHK: torch.Tensor,
    v_SBHV: torch.Tensor,
    *,
    softmax_scale: float,
    attention_mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    max_documents: int | None = None,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Causal softmax attention within documents, windows or both, in bfloat16 or float16.

    Probabilities and the gradients of scores are rounded to the inputs' dtype before they are multiplied by values, keys and
    queries; all accumulators are float32. Saved for backward: the inputs (or their copies), the output, and one number per
    query and head. The host never waits for the device, so a CUDA graph can capture it.

    Args:
        q_SBHK, k_SBHK, v_SBHV: copied unless the width is contiguous and the other strides are multiples of 8.
        softmax_scale: positive factor on q·k before the softmax.
        attention_mask: must be None; no kernel supports a mask.
        seq_idx: int32 [B, S], the document number of each row (:mod:`megacpp_mcore.ops.packed.documents`). None: one document.
        max_documents: ignored: nothing is reserved for documents.
        causal: must be True.
        window: how many keys before its own a query sees; None: all.

    Returns:
        o_SBHV, contiguous, in the dtype of q.

    Raises:
        ModelError: shapes, dtypes or documents are not as described; dtypes not in :data:`DTYPES`, widths not in
            :data:`WIDTHS`, or a scale that is not positive.
        BackendError: a mask was passed, or attention is not causal.
    """
    check_arguments(q_SBHK, k_SBHK, v_SBHV, attention_mask, seq_idx, causal, window)
    if attention_mask is not None or not causal:
        raise BackendError(
            f"MLA's kernels support only causal attention without a mask; got causal={causal} and "
            f"{'no' if attention_mask is None else 'a'} mask: choose another backend of mla, or auto"
        )
    if q_SBHK.dtype not in DTYPES:
        raise ModelError(f"MLA's kernels got {q_SBHK.dtype}; they take one of {DTYPES}: use the reference")
    if (widths := (q_SBHK.shape[-1], v_SBHV.shape[-1])) not in WIDTHS:
        raise ModelError(
            f"MLA's kernels got widths {widths} of a query and of its value; they take one of {WIDTHS}: use sdpa or the "
            "reference"
        )
    if softmax_scale <= 0:
        raise ModelError(f"softmax_scale is {softmax_scale}; MLA's kernels need a positive one: use the reference")
    o_SBHV: torch.Tensor = MLAKernels.apply(q_SBHK, k_SBHK, v_SBHV, *_bounds(q_SBHK, seq_idx, window), softmax_scale)
    return o_SBHV


def _bounds(q_SBHK: torch.Tensor, seq_idx_BS: torch.Tensor | None, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each query sees, and the last query that sees each key: int32 [B, S]; cached across layers
    if there are documents."""
    S, B = q_SBHK.shape[:2]
    window = None if window is None or window >= S else window  # it might not fit 32 bits

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        row_S = torch.arange(S, dtype=torch.int32, device=q_SBHK.device)
        first_BS, last_BS = torch.zeros_like(row_S).expand(B, S), torch.full_like(row_S, S - 1).expand(B, S)
        if seq_idx_BS is not None:
            starts_BS = document_starts(seq_idx_BS, batch=B, rows=S)
            first_BS = torch.where(starts_BS, row_S, 0).cummax(1).values
            ends_BS = torch.where(starts_BS.roll(-1, 1), row_S, S - 1)
            last_BS = ends_BS.flip(1).cummin(1).values.flip(1)
        if window is not None:
            first_BS, last_BS = first_BS.maximum(row_S - window), last_BS.minimum(row_S + window)
        return first_BS.contiguous(), last_BS.contiguous()

    return make() if seq_idx_BS is None else shared(seq_idx_BS, ("runs of keys", window), make)


class MLAKernels(torch.autograd.Function):
    """Attention within runs of keys as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBHK: torch.Tensor,
        k_SBHK: torch.Tensor,
        v_SBHV: torch.Tensor,
        first_BS: torch.Tensor,
        last_BS: torch.Tensor,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Compute the output, contiguous."""
        (S, B, H, K), V = q_SBHK.shape, v_SBHV.shape[-1]
        q_SBHK, k_SBHK, v_SBHV = map(aligned, (q_SBHK, k_SBHK, v_SBHV))
        o_SBHV, lse_BHS = q_SBHK.new_empty(S, B, H, V), q_SBHK.new_empty(B, H, S, dtype=torch.float32)
        strides = [stride for tensor in (q_SBHK, k_SBHK, v_SBHV) for stride in eighths(tensor, 3)]
        launch(
            kernels.forward, (-(-S // FORWARD["ROWS"]), H, B), q_SBHK, k_SBHK, v_SBHV, first_BS, o_SBHV, lse_BHS,
            softmax_scale, S, *strides, K=K, V=V, **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(q_SBHK, k_SBHK, v_SBHV, first_BS, last_BS, o_SBHV, lse_BHS)
        ctx.softmax_scale = softmax_scale
        return o_SBHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_SBHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of q, k and v; gradients of one projection's parts share storage."""
        q_SBHK, k_SBHK, v_SBHV, first_BS, last_BS, o_SBHV, lse_BHS = ctx.saved_tensors
        (S, B, H, K), V, do_SBHV = q_SBHK.shape, v_SBHV.shape[-1], aligned(do_SBHV)
        dq_SBHK, dk_SBHK, dv_SBHV = empty_gradients(q_SBHK, k_SBHK, v_SBHV)
        given = [stride for tensor in (q_SBHK, k_SBHK, v_SBHV, do_SBHV) for stride in eighths(tensor, 3)]
        mean_BHS, inputs = torch.empty_like(lse_BHS), (q_SBHK, k_SBHK, v_SBHV)
        launch(
            kernels.means, (-(-S // MEANS["ROWS"]), H, B), o_SBHV, do_SBHV, mean_BHS, S, *eighths(do_SBHV, 3), V=V, **MEANS,
        )  # fmt: skip
        launch(
            kernels.backward_queries, (-(-S // QUERIES["ROWS"]), H, B), *inputs, first_BS, do_SBHV, lse_BHS, mean_BHS, dq_SBHK,
            ctx.softmax_scale, S, *given, *eighths(dq_SBHK, 3), K=K, V=V, **QUERIES,
        )  # fmt: skip
        launch(
            kernels.backward_keys, (-(-S // KEYS["KEYS"]), H, B), *inputs, last_BS, do_SBHV, lse_BHS, mean_BHS, dk_SBHK,
            dv_SBHV, ctx.softmax_scale, S, *given, *eighths(dk_SBHK, 3), *eighths(dv_SBHV, 3), K=K, V=V, **KEYS,
        )  # fmt: skip
        return dq_SBHK, dk_SBHK, dv_SBHV, None, None, None
