"""dsa-indexer-memory: computes index scores, top-k, the indexer's KL loss and its gradient in chunks of queries.

Activate: ``megacpp_mcore.patches.apply(["dsa-indexer-memory"])``.
Scope: float32 and 16-bit inputs on one device, called without autograd (as stock does) and without autocast; masks of shape
[sq, sk] or [b, sq, sk], packed sequences, or neither. Every other call goes to the original.
Triton kernels compute on a GPU that they fit (``backends/architectures.py``), in 16-bit dtypes: scores with ReLU for widths of
64 and 128; without an additive mask, the target of the loss for one key head of 128 or 576; where they compute both, gradients
(of the sparse loss for a head width of 64 and up to 64 heads). The rest is PyTorch in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import Speed, observed
from megacpp_mcore.patches.machinery.record import Function, Patch, edit, named_replacement

if TYPE_CHECKING:
    import torch

    from megacpp_mcore.ops.indexer.chunked import Attention, Indexer, KeyRule

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"


_KNOWN = (
    "q k weights mask varlen_starts varlen_ends key_positions use_relu index_topk query key topk topk_indices softmax_scale "
    "loss_coeff sparse_loss pg_collection query_valid_rows calculate_per_token_loss grad_loss"
)


def _wrap(run: Callable[[SimpleNamespace], Any]) -> Callable[[Function], Function]:
    """Make replacements that call ``run`` with the arguments by name, and the original if it returns None."""

    @named_replacement(_KNOWN)
    def in_chunks(original: Function, call: SimpleNamespace) -> Any:
        result = run(call)
        if result is not None:
            return result
        reason = "the call is outside of the scope of the patch dsa-indexer-memory"
        observed.note("indexer", "megatron", reason, speed=Speed.REFERENCE, requested="chunked", slower_than_best=True)
        return original()

    return in_chunks


def _note(**by_kernel: bool) -> None:
    """Record for receipts a call that ran in chunks, and by what, without its layer, which stock does not pass."""
    from megacpp_mcore.ops.indexer.chunked import unfit

    parts = [part for part, does in by_kernel.items() if does]
    how = f"{', '.join(parts)} by Triton kernels, the rest in PyTorch" if parts else "all in PyTorch"
    why = unfit("indexer", "indexer_grad", "sparse_mla", "indexer_dense")
    reason = f"the patch dsa-indexer-memory, {how}{f' ({why})' if why else ''}"
    observed.note("indexer", "chunked", reason, speed=Speed.COMPILED, requested="chunked")


@edit(f"{_DSA}:fused_qk_topk_naive", "5711581142918bca1ddb48a7a4e53dd572b8e951677450db21f0ecadca579bb7", make=_wrap)
def _topk(call: SimpleNamespace) -> Any:
    """``fused_qk_topk_naive``: ``(index_scores, topk_indices)``, the former computed only if it is read."""
    from megacpp_mcore.ops.indexer.chunked import indexer_scores, select
    from megacpp_mcore.ops.indexer.deferred import DeferredScores

    indexer = _indexer(call)
    if indexer is None or call.index_topk < 1 or not mask_fits(call, call.q, call.k):
        return None
    rule = key_rule(call, call.q, call.k)
    _, index_BSN = select(indexer, call.index_topk, rule)
    _note(scores=indexer.by_kernel)
    (num_queries, batch), num_keys = call.q.shape[:2], call.k.shape[0]
    read = [call.q, call.k, call.weights, call.mask, call.varlen_starts, call.varlen_ends, call.key_positions]
    scores = DeferredScores(
        lambda: indexer_scores(indexer, rule),
        tuple(tensor for tensor in read if tensor is not None),
        (batch, num_queries, num_keys),
        indexer.dtype,
        call.q.device,
    )
    return scores, index_BSN


@edit(
    f"{_DSA}:fwd_fused_indexer_loss_naive",
    "689e62497f39bb62817814f5db0e58edb0b10bdf8c71455b88b41201af9af00c",
    make=_wrap,
)
def _forward(call: SimpleNamespace) -> Any:
    """``fwd_fused_indexer_loss_naive``: ``(topk_indices, loss)``."""
    from megatron.core.transformer.experimental_attention_variant.dsa_indexer_loss import reduce_indexer_kl_sum

    from megacpp_mcore.ops.indexer.chunked import dense_divergence, select, sparse_divergence

    parts = _parts(call)
    if parts is None or call.topk < 1:
        return None
    indexer, attention, loss_rule = parts
    # Without mask and bounds stock selects among all keys, and only the loss is causal. It adds an additive mask twice in the
    # loss's forward pass and once in its backward pass; for masks of 0 and -inf that makes no difference.
    rule = key_rule(call, call.q, call.k)
    best_BSN, index_BSN = select(indexer, call.topk, rule)
    _note(scores=indexer.by_kernel, targets=attention.by_kernel(loss_rule))
    if call.sparse_loss:
        divergence_BS = sparse_divergence(attention, best_BSN, index_BSN, loss_rule)
    else:
        divergence_BS = dense_divergence(indexer, attention, (rule, loss_rule))
    rows_BS = _valid_rows(call)
    if rows_BS is not None:
        divergence_BS = divergence_BS * rows_BS
    loss = reduce_indexer_kl_sum(
        divergence_BS.sum(),
        num_rows=divergence_BS.numel(),
        calculate_per_token_loss=call.calculate_per_token_loss,
        valid_row_count=None if rows_BS is None else rows_BS.sum(),
    )
    return index_BSN, loss * call.loss_coeff


@edit(
    f"{_DSA}:bwd_fused_indexer_loss_naive",
    "e7ab10b88119f5a9d85c82df88d2ebd7a48d557af0890d86ed8bef93e4072eae",
    make=_wrap,
)
def _backward(call: SimpleNamespace) -> Any:
    """``bwd_fused_indexer_loss_naive``: gradients w.r.t. q, weights and k."""
    from megacpp_mcore.ops.indexer.chunked import dense_backward, sparse_backward

    parts = _parts(call)
    if parts is None or call.topk_indices.shape[-1] < 1:
        return None
    indexer, attention, rule = parts
    num_queries, batch = call.q.shape[:2]
    rows_BS, weight = _valid_rows(call), call.grad_loss.float() * call.loss_coeff
    if not call.calculate_per_token_loss:
        weight = weight / (batch * num_queries if rows_BS is None else rows_BS.sum().clamp_min(1))
    targets = attention.by_kernel(rule)
    if call.sparse_loss:
        _note(targets=targets, gradients=targets and indexer.learns_by_kernel)
        return sparse_backward(indexer, attention, call.topk_indices, rule, weight, rows_BS)
    _note(scores=indexer.by_kernel, targets=targets, gradients=targets and indexer.by_kernel)
    weight_BS = weight.reshape(1, 1).expand(batch, num_queries)
    return dense_backward(indexer, attention, rule, weight_BS if rows_BS is None else weight_BS * rows_BS)[1:]


def _parts(call: SimpleNamespace) -> tuple[Indexer, Attention, KeyRule] | None:
    """Return the indexer, the attention it learns from, and the loss's key rule; None outside the patch's scope."""
    from megacpp_mcore.ops.indexer.chunked import KeyRule

    indexer, attention = _indexer(call), _attention(call)
    if indexer is None or attention is None or not mask_fits(call, call.q, call.k):
        return None
    (num_queries, batch), num_keys = call.q.shape[:2], call.k.shape[0]
    if attention.query_SBAK.shape[:2] != (num_queries, batch) or attention.key_TBGK.shape[0] != num_keys:
        return None
    rule = key_rule(call, call.q, call.k) or KeyRule.causal(num_queries, num_keys, call.q.device)
    return indexer, attention, rule


def _indexer(call: SimpleNamespace) -> Indexer | None:
    from megacpp_mcore.ops.indexer.chunked import Indexer

    q, k, w = call.q, call.k, call.weights
    if not _plain(q, k, w) or q.dim() != 4 or k.dim() != 3 or 0 in (*q.shape, *k.shape):
        return None
    if w.shape != q.shape[:3] or k.shape[1:] != (q.shape[1], q.shape[3]):
        return None
    return Indexer(q, k, w, relu=call.use_relu)


def _attention(call: SimpleNamespace) -> Attention | None:
    import torch

    from megacpp_mcore.ops.indexer.chunked import Attention

    query, key = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (call.query, call.key))
    if not _plain(query, key, call.q) or query.dim() != 4 or 0 in (*query.shape, *key.shape):
        return None
    if key.dim() != 4 or key.shape[1:] != query.shape[1:]:
        return None
    if key.stride(2) == 0:
        key = key[:, :, :1]  # absorbed MLA: one key head, expanded over the query heads
    ranks = call.pg_collection.tp
    reduce = functools.partial(torch.distributed.all_reduce, group=ranks) if ranks.size() > 1 else None
    return Attention(query, key, call.softmax_scale, reduce=reduce)


def _plain(*tensors: torch.Tensor) -> bool:
    """Return whether these are tensors on one device for which stock would compute in float32, without autograd."""
    import torch

    device = tensors[0].device
    computed = all(
        tensor.device == device and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
    )
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return computed and not recorded and not torch.is_autocast_enabled(device.type)


def mask_fits(call: SimpleNamespace, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether the keys of each query are masked in a supported form (the original refuses most other forms)."""
    import torch

    (num_queries, batch), num_keys, device = q.shape[:2], k.shape[0], q.device
    if call.varlen_starts is None:
        mask = call.mask
        shapes = ((num_queries, num_keys), (batch, num_queries, num_keys))
        return mask is None or (mask.dtype == torch.float32 and mask.device == device and mask.shape in shapes)
    if call.mask is not None or call.varlen_ends is None:
        return False
    lengths = [(call.varlen_starts, num_queries), (call.varlen_ends, num_queries), (call.key_positions, num_keys)]
    return all(tensor is None or tensor.shape == (length,) for tensor, length in lengths)


def key_rule(call: SimpleNamespace, q: torch.Tensor, k: torch.Tensor) -> KeyRule | None:
    """Return the keys that may be selected; None: all."""
    from megatron.core.transformer.experimental_attention_variant.dsa_masking import normalize_varlen_bounds

    from megacpp_mcore.ops.indexer.chunked import KeyRule

    if call.varlen_starts is None:
        return None if call.mask is None else KeyRule.additive(call.mask)
    bounds = normalize_varlen_bounds(
        mask=None,
        varlen_starts=call.varlen_starts,
        varlen_ends=call.varlen_ends,
        key_positions=call.key_positions,
        sk=k.shape[0],
        device=q.device,
    )
    return KeyRule.within(*bounds)


def _valid_rows(call: SimpleNamespace) -> torch.Tensor | None:
    """Return the queries that count in the loss, float32 ``[b, sq]``; None: all."""
    from megatron.core.transformer.experimental_attention_variant.dsa_masking import normalize_query_valid_rows

    num_queries, batch = call.q.shape[:2]
    rows = normalize_query_valid_rows(call.query_valid_rows, b=batch, sq=num_queries, device=call.q.device)
    return None if rows is None else rows.float()


PATCH = Patch(
    name="dsa-indexer-memory",
    fixes=(
        "the unfused DSA fallback (every head dim but 576/512) holds [sq, b, h, sk] index scores and, for the indexer's loss, "
        "four [b, heads, sq, sk] tensors, all float32: at sq 16384 with 32 and 56 heads 34 and 60 GB each"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/experimental_attention_variant/dsa.py",
    edits=(_topk, _forward, _backward),
    seam=(
        "these three functions are all that DSAttention, DSAIndexer and FusedDSAIndexerLoss call for scores, top-k and loss, "
        "looked up in the module at each call; their arguments hold everything the mathematics needs"
    ),
    leaves_alone=(
        "which keys are selected and what the loss is (masks, packed sequences, bounds, valid rows, per-token loss, the sum "
        "over tensor-parallel ranks); fused kernels; DSAttention.forward, its mask and its sparse attention; "
        "compute_dsa_indexer_loss, which stock then calls no more; calls that record autograd, float64, autocast"
    ),
    cost=(
        "in plain PyTorch (float32, other widths, additive masks, no ReLU), one H200, b 1, sq 4096, 32 heads: forward 1.1 × "
        "stock's time, with the dense loss 1.5 ×, and 1.6 × with gradients; under a sparse loss the gradient of k is not "
        "deterministic on a GPU, unless torch.use_deterministic_algorithms(True)"
    ),
    gain=(
        "b 1, 32 heads × 64, bf16: at sq 4096, one H200, forward 0.7 ms and 0.13 GB instead of 6.3 ms and 4.3 GB; at sq "
        "16,384, one H100, where stock runs out of memory: forward 10 ms, with its sparse loss and gradients 12 ms and "
        "0.18 GB (243 GB computed), with the dense loss 49 ms, and 110 ms and 0.37 GB with gradients"
    ),
    retire_when="upstream's fallback works in chunks, or a fused kernel covers the head dims in use",
)
