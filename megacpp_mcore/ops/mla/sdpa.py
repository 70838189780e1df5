"""MLA core attention through the fused kernels behind ``torch.nn.functional.scaled_dot_product_attention``.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query-key width, V value width. Inputs and output have
Megatron-Core's layout; the kernels get permuted views of it, never copies. cuDNN reads and writes any strides with
the width innermost, and PyTorch gives its output and gradients the layouts of query, key and value.

Documents are passed as ``seq_idx``. In 16 bits they use flash's variable-length kernel, with values padded to the width of the
keys: forward and backward take 2.0 ms with room for 64 documents and 4.9 ms for 256, instead of 13.1 (4096 rows, 56 heads,
128/64, an H200). In other dtypes they use the memory-efficient kernel with a mask of B · S² elements, built once per
micro-batch and shared by all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megacpp_mcore.backends import Speed, observed
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.checks import one_dtype
from megacpp_mcore.ops.mla.reference import check_shapes
from megacpp_mcore.ops.packed.documents import additive_mask, check_seq_idx, cu_seqlens_of, default_max_documents
from megacpp_mcore.ops.visibility import check_mask, check_square, check_window

FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""Kernels without a [B, H, S, T] tensor, fastest first. Flash supports documents, or K == V, but no mask; cuDNN neither."""

_CAN_USE = {
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
}
_CUDNN_TILE = 128
_CUDNN_ODD_LENGTHS = 91501
"""The first cuDNN that PyTorch allows for lengths that do not fill a tile (pytorch/pytorch#169849)."""


def fused_backend(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    backends: tuple[SDPBackend, ...] = FUSED,
    deterministic: bool = False,
) -> SDPBackend | None:
    """Return the first of ``backends`` that can run forward and backward on these tensors, or None.

    Args:
        q_SBHK, k_TBHK, v_TBHV, attention_mask, seq_idx, causal, window: as for :func:`sdpa_attention`.
        backends: candidates, in order; ``SDPBackend.MATH`` (plain PyTorch, any device) always works.
        deterministic: skip the fused kernels, because their gradients can differ from run to run; implied by
            ``torch.use_deterministic_algorithms``.

    Raises:
        ModelError: shapes, dtypes or mask are not as described there.
    """
    check_arguments(q_SBHK, k_TBHK, v_TBHV, attention_mask, seq_idx, causal, window)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    for backend in backends:
        if backend == SDPBackend.MATH:
            return backend
        if q_SBHK.device.type != "cuda" or deterministic:
            continue
        bounded = seq_idx is not None or window is not None
        apart = bounded and backend == SDPBackend.FLASH_ATTENTION and _flash_takes(k_TBHK, v_TBHV)
        is_masked = attention_mask is not None or (bounded and not apart)
        if window is not None and not (apart and attention_mask is None):
            continue
        if is_masked and backend != SDPBackend.EFFICIENT_ATTENTION:
            continue
        q_BHSK, k_BHTK, v_BHTV = map(_heads_first, (q_SBHK, k_TBHK, k_TBHK if apart else v_TBHV))
        if not _CAN_USE[backend](SDPAParams(q_BHSK, k_BHTK, v_BHTV, None, 0.0, causal and not is_masked, False)):
            continue
        if backend != SDPBackend.CUDNN_ATTENTION or _cudnn_is_right(len(q_SBHK), len(k_TBHK), causal):
            return backend
    return None


def sdpa_attention(
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
    backend: SDPBackend | None = None,
) -> torch.Tensor:
    """Softmax attention with separate query-key and value widths, by one fused kernel per pass.

    The same function as :func:`megacpp_mcore.ops.mla.reference.mla_attention` with the kernel's rounding. The host never
    waits for the device, so a CUDA graph can capture it.

    Args:
        q_SBHK: queries, rope part included.
        k_TBHK: keys.
        v_TBHV: values; V need not equal K.
        softmax_scale: factor on q·k before the softmax.
        attention_mask: Megatron's bool mask, True = masked, broadcastable to [B, 1, S, T]; combined with ``causal``. Two
            masks of its size are built from it, one in the dtype of q.
        seq_idx: int32 [B, S], the document number of each row (:mod:`megacpp_mcore.ops.packed.documents`), if causal and
            without ``attention_mask``. None: one document.
        max_documents: upper bound on the documents in all rows of ``seq_idx``, for which flash reserves room: more abort the
            process by a device-side assertion. None: :func:`default_max_documents` of B · S rows.
        causal: whether query i sees keys 0..i only (needs S == T).
        window: how many keys before its own a query sees, if causal; None: all. Only flash supports windows.
        backend: the kernel, or None for the choice of :func:`fused_backend`, which receipts name as the backend of ``sdpa``.

    Returns:
        o_SBHV, contiguous, in the dtype of q; without a copy where the kernel is cuDNN's.

    Raises:
        ModelError: shapes, dtypes, mask or documents are not as described.
        BackendError: no fused kernel can run on these tensors.
    """
    check_arguments(q_SBHK, k_TBHK, v_TBHV, attention_mask, seq_idx, causal, window)
    if backend is None:
        how: dict[str, Any] = {"seq_idx": seq_idx, "causal": causal, "window": window}
        backend = fused_backend(q_SBHK, k_TBHK, v_TBHV, attention_mask=attention_mask, **how)
        if backend is None:
            masked = " with documents" if seq_idx is not None else " with a mask" if attention_mask is not None else ""
            masked += " in a window" if window is not None else ""
            raise BackendError(
                f"no fused attention kernel takes q {tuple(q_SBHK.shape)}, v {tuple(v_TBHV.shape)} of {q_SBHK.dtype} on "
                f"{q_SBHK.device}{masked}; "
                "call megacpp_mcore.ops.mla.reference.mla_attention, which runs anywhere; in a training run, set "
                "backends: {mla: reference}"
            )
        _note(backend, q_SBHK, v_TBHV)
    if window is not None and backend != SDPBackend.FLASH_ATTENTION:
        raise BackendError(f"PyTorch's {backend.name} has no window; omit backend, or pass FLASH_ATTENTION")
    if (seq_idx is not None or window is not None) and backend == SDPBackend.FLASH_ATTENTION:
        return _packed(q_SBHK, k_TBHK, v_TBHV, softmax_scale, seq_idx, max_documents, window)
    visible = None if seq_idx is None else additive_mask(seq_idx, q_SBHK.dtype)
    if attention_mask is not None:
        visible = ~attention_mask
        if causal:
            visible = visible & torch.ones(len(q_SBHK), len(k_TBHK), dtype=torch.bool, device=q_SBHK.device).tril()
    with sdpa_kernel(backend):
        o_BHSV = torch.nn.functional.scaled_dot_product_attention(
            _heads_first(q_SBHK),
            _heads_first(k_TBHK),
            _heads_first(v_TBHV),
            attn_mask=visible,
            is_causal=causal and visible is None,
            scale=softmax_scale,
        )
    return o_BHSV.permute(2, 0, 1, 3).contiguous()


def _flash_takes(k_TBHK: torch.Tensor, v_TBHV: torch.Tensor) -> bool:
    """Return whether flash's variable-length kernel supports these widths: values are padded to the keys' width, not keys."""
    return k_TBHK.shape[-1] % 8 == 0 and v_TBHV.shape[-1] <= k_TBHK.shape[-1]


def _packed(
    q_SBHK: torch.Tensor,
    k_SBHK: torch.Tensor,
    v_SBHV: torch.Tensor,
    softmax_scale: float,
    seq_idx_BS: torch.Tensor | None,
    max_documents: int | None,
    window: int | None,
) -> torch.Tensor:
    """Run causal attention within documents by flash, with the rows of the batch concatenated."""
    S, B = q_SBHK.shape[:2]
    V, missing = v_SBHV.shape[-1], k_SBHK.shape[-1] - v_SBHV.shape[-1]
    if seq_idx_BS is None:
        cu_seqlens = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=q_SBHK.device)
    else:
        cu_seqlens = cu_seqlens_of(seq_idx_BS, max_documents or default_max_documents(B * S))
    tensors = (q_SBHK, k_SBHK, torch.nn.functional.pad(v_SBHV, (0, missing)))
    q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in tensors)
    how: dict[str, Any] = {"scale": softmax_scale, "window_size": (-1 if window is None else min(window, S), 0)}
    o: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, S, S, **how)  # one tensor: no log-sum-exp was requested
    o_SBHV: torch.Tensor = o[..., :V].unflatten(0, (B, S)).transpose(0, 1).contiguous()
    return o_SBHV


def _note(backend: SDPBackend, q_SBHK: torch.Tensor, v_TBHV: torch.Tensor) -> None:
    """Record the kernel that was chosen; not while tracing, when nothing runs."""
    if torch.compiler.is_compiling():
        return
    kind = str(q_SBHK.dtype).removeprefix("torch.")
    reason = f"the first of PyTorch's fused kernels that takes widths {q_SBHK.shape[-1]} and {v_TBHV.shape[-1]} of {kind}"
    observed.note("sdpa", backend.name, reason, speed=Speed.REFERENCE if backend == SDPBackend.MATH else Speed.KERNEL)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return [S, B, H, D] as a [B, H, S, D] view."""
    return tensor.permute(1, 2, 0, 3)


def _cudnn_is_right(num_queries: int, num_keys: int, causal: bool) -> bool:
    """Return whether cuDNN's gradients are correct at these lengths, without a mask.

    If scores are very negative, a tile that the sequence does not fill makes them NaN: seen with a mask
    (pytorch/pytorch#196678) and with one query (NVIDIA/cudnn-frontend#1072), not with causal attention.
    """
    full_tiles = num_queries % _CUDNN_TILE == 0 and num_keys % _CUDNN_TILE == 0
    return full_tiles or (causal and (torch.backends.cudnn.version() or 0) >= _CUDNN_ODD_LENGTHS)


def check_arguments(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    mask: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    causal: bool,
    window: int | None = None,
) -> None:
    """Raise ModelError unless these are valid arguments of :func:`sdpa_attention`."""
    check_shapes(q_SBHK, k_TBHK, v_TBHV)
    if not q_SBHK.numel() or not v_TBHV.numel():
        raise ModelError(f"q and v have shapes {tuple(q_SBHK.shape)} and {tuple(v_TBHV.shape)}, expected nothing empty")
    one_dtype("MLA", q=q_SBHK, k=k_TBHK, v=v_TBHV)
    (rows, batch), keys = q_SBHK.shape[:2], k_TBHK.shape[0]
    check_mask(mask, batch=batch, num_queries=rows, num_keys=keys)
    check_window(window, causal)
    if causal:
        check_square(rows, keys)
    if seq_idx is not None:
        check_seq_idx(seq_idx, batch=batch, rows=rows)
        if not causal or mask is not None:
            raise ModelError(
                f"seq_idx was passed with causal={causal} and {'a' if mask is not None else 'no'} attention_mask, expected "
                "causal attention without a mask; put the documents into the mask"
            )
