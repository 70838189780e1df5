"""MLA core attention by FlashAttention-4 (the package flash-attn-4, written in NVIDIA's CuTe DSL), where it is installed.

Documents stay on the fast path: they are passed as cumulative lengths, computed on the device from ``seq_idx``. Kernels are
compiled on the first call, a few seconds per variant: with and without documents, deterministic or not.

Shape legend: S queries, T keys, B batch, H heads (of this rank), K query-key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megacpp_mcore.errors import BackendError
from megacpp_mcore.ops import vendors
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.mla.sdpa import check_arguments
from megacpp_mcore.ops.packed.documents import cu_seqlens_of, default_max_documents
from megacpp_mcore.te import dot_product as engine
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult


def attend(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    *,
    softmax_scale: float,
    attention_mask: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    max_documents: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Softmax attention with separate query-key and value widths: ``reference.mla_attention`` with the kernel's rounding.

    The host never waits for the device. Under ``torch.use_deterministic_algorithms`` the same inputs give the same bits.

    Args:
        q_SBHK: queries, rope part included.
        k_TBHK: keys.
        v_TBHV: values; V need not equal K.
        softmax_scale: factor on q·k before the softmax.
        attention_mask: must be None; no kernel supports a mask.
        seq_idx: int32 [B, S], the document number of each row (:mod:`megacpp_mcore.ops.packed.documents`), if causal. More
            than ``max_documents`` abort the process by a device-side assertion. None: one document.
        max_documents: upper bound on the documents in all rows; each costs H · K · 256 bytes in the backward pass. None:
            :func:`default_max_documents` of B · S rows.
        causal: whether query i sees keys 0..i only (needs S == T).

    Returns:
        o_SBHV, contiguous, in the dtype of q.

    Raises:
        ModelError: shapes, dtypes or documents are not as described.
        BackendError: a mask was passed, or FlashAttention-4 cannot be imported.
    """
    check_arguments(q_SBHK, k_TBHK, v_TBHV, attention_mask, seq_idx, causal)
    if attention_mask is not None:
        raise BackendError("FlashAttention-4 does not support a mask here; choose another backend of mla, or auto")
    deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v = (tensor.transpose(0, 1) for tensor in (q_SBHK, k_TBHK, v_TBHV))
    if seq_idx is None:
        o, _ = vendors.entry("flash4")(q, k, v, softmax_scale=softmax_scale, causal=causal, deterministic=deterministic)
        return o.transpose(0, 1).contiguous()
    rows = seq_idx.shape[1]
    cu_seqlens = cu_seqlens_of(seq_idx, max_documents or default_max_documents(seq_idx.numel()))
    o, _ = vendors.entry("flash4_packed")(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=rows,
        max_seqlen_k=rows,
        softmax_scale=softmax_scale,
        causal=True,
        deterministic=deterministic,
    )
    return o.unflatten(0, (-1, rows)).transpose(0, 1).contiguous()


@functools.cache
def probe() -> ProbeResult:
    """Return whether one causal call at NAM56R's widths agrees with plain PyTorch: run and compared once per process."""
    probe = vendors.installed("flash4")
    return probe if not probe.ok else tried("a causal call of FlashAttention-4", attend)


def probe_engine() -> ProbeResult:
    """Probe Transformer Engine's attention in the same way: it uses FlashAttention-4 by itself if that is installed.

    2.20.2 passes it the window (−1, 0) with a causal mask, which 4.0.0b36 interprets as no keys at all: the output is zero.
    """
    probe = te_imports.feature("attention")
    return probe if not probe.ok else _engine_runs()


@functools.cache
def _engine_runs() -> ProbeResult:
    return tried("a causal call of Transformer Engine's attention", engine.attend)


def tried(what: str, call: Callable[..., torch.Tensor]) -> ProbeResult:
    """Run ``call`` on two heads of widths 128 and 64, and compare it with the reference."""

    def leaves() -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)
        return [torch.randn(192, 1, 2, width, device="cuda", generator=generator).bfloat16() for width in (128, 128, 64)]

    how = {"softmax_scale": 128**-0.5}
    return vendors.tried(what, functools.partial(call, **how), functools.partial(mla_attention, **how), leaves)
