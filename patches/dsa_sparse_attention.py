"""dsa-sparse-attention: absorbed DSA computes attention only over its selected keys, by our kernels where supported.

Activate: ``megacpp_mcore.patches.apply(["dsa-sparse-attention"])``.
Scope: absorbed MLA's fallback for calls without a fused stock kernel: queries and keys of one dtype, float32 or 16 bits, on one
device; keys masked by bounds, by position, or by a mask of 0 and −inf, as DSAttention does. On a GPU the op ``sparse_mla`` uses
Triton kernels at the widths that they support, otherwise plain PyTorch, in chunks of queries; ``backends`` of the settings file
does not apply. Any other call goes to the original, and the reason is logged once.

Shape legend: S queries, T keys, B batch, H heads, K query/key dim, V latent value dim, N selected keys.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import Dispatcher, Resolution, Speed, observed
from megacpp_mcore.patches.dsa_indexer_memory import key_rule, mask_fits
from megacpp_mcore.patches.machinery.record import Function, Patch, edit, named_replacement

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@edit(
    "megatron.core.transformer.experimental_attention_variant.dsa:_unfused_absorbed_dsa_fn",
    "cce334fffe65648397896c7cb2257f7fed0861ff77a5209422910ce333489e17",
    make=named_replacement("query key topk_indices softmax_scale v_channels mask varlen_starts varlen_ends key_positions"),
)
def _attend(original: Function, call: SimpleNamespace) -> Any:
    """Replace ``_unfused_absorbed_dsa_fn``: ``[S, B, H, V]``."""
    if (obstacle := _obstacle(call)) is not None:
        _log_once(obstacle)
        observed.note("sparse_mla", "megatron", obstacle, speed=Speed.REFERENCE, slower_than_best=True)
        return original()
    query, kv_TBK = call.query, call.key.squeeze(2)
    backend = _backend(query.device.type, query.dtype, query.shape[-1], call.v_channels)
    observed.note(
        "sparse_mla",
        backend.observed,
        f"the patch {PATCH.name}: {backend.reason}",
        speed=backend.speed,
        slower_than_best=backend.slower_than_best,
    )
    return backend.fn(query, kv_TBK, _visible(call), softmax_scale=call.softmax_scale, value_dim=call.v_channels)


def _obstacle(call: SimpleNamespace) -> str | None:
    """Why to fall back to stock, or None."""
    import torch

    query, key, index = call.query, call.key, call.topk_indices
    if any(type(tensor) is not torch.Tensor for tensor in (query, key, index)) or query.dim() != 4 or key.dim() != 4:
        return "query, key and indices are not plain tensors of absorbed MLA"
    if key.shape[1:] != (query.shape[1], 1, query.shape[3]) or 0 in (*query.shape, *key.shape, *index.shape):
        return f"query {tuple(query.shape)} and key {tuple(key.shape)} are not those of one key head"
    if len({tensor.device for tensor in (query, key, index)}) > 1:
        return f"query, key and indices are on {query.device}, {key.device} and {index.device}"
    if query.dtype != key.dtype or query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the dtypes are {query.dtype} and {key.dtype}"
    if torch.is_autocast_enabled(query.device.type):
        return "autocast is on"
    if call.softmax_scale <= 0:
        return f"the softmax scale is {call.softmax_scale}"
    if not mask_fits(call, query, key):
        return "keys are hidden by something other than a float32 mask or bounds"
    return None


def _visible(call: SimpleNamespace) -> torch.Tensor:
    """Return the selected keys that a query may see, int32 ``[B, S, N]``, −1 elsewhere; causal without mask and bounds."""
    import torch

    from megacpp_mcore.ops.indexer.chunked import KeyRule

    index_BSN, S, T = call.topk_indices, call.query.shape[0], call.key.shape[0]
    rule = key_rule(call, call.query, call.key) or KeyRule.causal(S, T, index_BSN.device)
    with torch.no_grad():
        seen_BSN = rule.valid_at(range(S), index_BSN.clamp_min(0).long()) & (index_BSN >= 0)
        return torch.where(seen_BSN, index_BSN, -1).int()


@functools.cache
def _backend(device: str, dtype: torch.dtype, qk_dim: int, v_dim: int) -> Resolution:
    return Dispatcher().request("sparse_mla", device=device, dtype=dtype, qk_dim=qk_dim, v_dim=v_dim)


@functools.cache
def _log_once(obstacle: str) -> None:
    from megatron.core.utils import log_single_rank

    log_single_rank(logger, logging.WARNING, f"dsa-sparse-attention: stock's attention to all keys runs: {obstacle}")


PATCH = Patch(
    name="dsa-sparse-attention",
    fixes=(
        "absorbed DSA without a fused kernel attends to every key and hides those that are not selected: [b, heads, sq, sk] "
        "scores in float32, at sq 4096 with b 2 and 56 heads 57 GB and 187 ms forward and backward"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/experimental_attention_variant/dsa.py",
    edits=(_attend,),
    seam=(
        "_run_sparse_attention looks this function up at each call, after its fused kernels have declined; its arguments hold "
        "all that the mathematics needs"
    ),
    leaves_alone=(
        "which keys are selected, masks, packed sequences and context parallelism; fused kernels; MLA that is not absorbed; "
        "the projection of the values behind it; calls under autocast or in float64"
    ),
    cost=(
        "an int32 index a layer and micro-batch, kept for its backward pass; on a GPU the gradient of the keys has no fixed "
        "order of sums, unless torch.use_deterministic_algorithms(True)"
    ),
    gain="b 2, sq 4096, 56 heads of 128/64, 256 keys, one H200, only the op: 0.72 ms and 0.2 GB instead of 187 ms and 57 GB",
    retire_when="upstream has a fused kernel, or a fallback over selected keys, for the head dims in use",
)
