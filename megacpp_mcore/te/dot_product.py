"""DotProductAttention in Megatron's layout and with heads first, and the features that this wrapper lacks.

Shape legend: S queries, T keys, B batch, H heads, G groups of shared keys and values (H is a multiple), K query-key width,
V value width. Rotary embedding is applied before the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.util import te_imports

CANNOT = {
    "attention_mask": "a mask of its own shape: only its unfused kernel takes one",
    "seq_idx": "documents as a number of each row: it takes packed rows with cumulative lengths",
    "selected": "keys that a router or an indexer has selected",
    "softcap": "a soft cap of the scores, before 2.20",
}
"""Features that a layer may need and this wrapper lacks, each with the reason; they require another backend."""


def lacking(**needs: Any) -> str | None:
    """Return why a call with ``needs`` (of :data:`CANNOT`, None or 0: not needed) cannot run here; None if it can.

    Raises:
        ModelError: a need is not in :data:`CANNOT`.
    """
    for name in needs:
        if name not in CANNOT:
            raise ModelError(f"unknown need {name!r} of Transformer Engine's attention; known: {', '.join(CANNOT)}")
    unsupported = [
        f"{name}: {CANNOT[name]}"
        for name, value in needs.items()
        if value is not None and not (isinstance(value, int | float) and value == 0)
    ]
    return "; ".join(unsupported) or None


def attend(
    q_SBHK: torch.Tensor,
    k_TBGK: torch.Tensor,
    v_TBGV: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    layout: str = "sbhd",
    **needs: Any,
) -> torch.Tensor:
    """Compute ``softmax(scale · q kᵀ) v`` by head, by Transformer Engine's fused kernels, or unfused where none applies.

    float32 has no fused kernel and runs unfused.

    Args:
        q_SBHK, k_TBGK, v_TBGV: sequence first; G divides H.
        softmax_scale: factor on q·k before the softmax.
        causal: whether query i sees keys 0..i only (needs S == T).
        window: how many keys before its own a query sees, where causal; None: all.
        layout: the axes of the tensors and of the output: ``sbhd``, or ``bshd`` with the batch first.
        needs: of :data:`CANNOT`, None where not needed.

    Returns:
        o_SBHV in the dtype of q.

    Raises:
        ModelError: the shapes do not fit.
        BackendError: a need is not covered, or Transformer Engine is not installed.
    """
    q, k, v = q_SBHK, k_TBGK, v_TBGV
    if why := lacking(**needs):
        raise BackendError(f"Transformer Engine's attention does not support {why}; choose another backend, or auto")
    shapes, rows = [tuple(tensor.shape) for tensor in (q, k, v)], layout.index("s")
    fits = all(len(shape) == 4 for shape in shapes) and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1 - rows] != k.shape[1 - rows] or q.shape[2] % k.shape[2]:
        raise ModelError(
            f"q, k, v have shapes {shapes[0]}, {shapes[1]}, {shapes[2]} in {layout}; expected the same batch and query-key "
            "width, and heads of q that are a multiple of the groups of k and v"
        )
    if causal and q.shape[rows] != k.shape[rows]:
        raise ModelError(f"{q.shape[rows]} causal queries and {k.shape[rows]} keys; expected equally many")
    if window is not None and (window < 0 or not causal):
        raise ModelError(f"window is {window} with causal={causal}; expected 0 or more keys of a causal row")
    attention = _module(q.shape[2], k.shape[2], q.shape[3], v.shape[3], layout, softmax_scale, causal, window)
    return attention(q, k, v).view(*q.shape[:3], v.shape[3])


def attend_heads_first(q_BHSK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, **how: Any) -> torch.Tensor:
    """Call :func:`attend` (keywords as there) on ``[B, H, S, K]``, as ``scaled_dot_product_attention`` has it: o_BHSV."""
    q_BSHK, k_BTGK, v_BTGV = (tensor.transpose(1, 2) for tensor in (q_BHSK, k_BGTK, v_BGTV))
    return attend(q_BSHK, k_BTGK, v_BTGV, layout="bshd", **how).transpose(1, 2)


@functools.cache
def _module(heads: int, groups: int, qk: int, v: int, layout: str, scale: float, causal: bool, window: int | None) -> Any:
    """Return one module without parameters for every call with these sizes."""
    return te_imports.entry("DotProductAttention")(
        num_attention_heads=heads,
        kv_channels=qk if qk == v else (qk, v),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format=layout,
        attn_mask_type="causal" if causal else "no_mask",
        softmax_scale=scale,
        window_size=None if window is None else (window, 0),
    )
