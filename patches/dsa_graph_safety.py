"""dsa-graph-safety: makes the forward and backward passes of DSA capturable in a CUDA graph.

Activate: ``megacpp_mcore.patches.apply(["dsa-graph-safety"])``.
Scope: while the current stream is being captured. Outside a capture every call goes to the original, with its checks.
"""

from __future__ import annotations

from inspect import BoundArguments
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, bound_replacement, edit, named_replacement

_DSA = "megatron.core.transformer.experimental_attention_variant"
_ROTATION = "rotary_interleaved mla_rotary_interleaved mscale inverse mla_output_remove_interleaving"
"""Parameters of the rotation of rows, which have their frequencies."""


def capturing() -> bool:
    """Return whether work on the current CUDA stream is being captured; False without a GPU."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@edit(f"{_DSA}.dsa:FusedDSAIndexerLoss.backward", "f6763f4863e3a333d9272328a4182fef0bae859309034bf30b4826e25b0a8b67")
def _loss_backward(original: Function, ctx: Any, grad_topk_indices: Any, grad_loss: Any) -> Any:
    """Without a row mask stock divides by a row count that it copies from the host, which a capture forbids. With a row mask it
    counts on the device; a mask of ones gives the same count, and bit-identical gradients.
    """
    if ctx.query_valid_rows is None and not ctx.calculate_per_token_loss and capturing():
        import torch

        q_SBHD = ctx.saved_tensors[0]
        ctx.query_valid_rows = torch.ones(q_SBHD.shape[1::-1], dtype=torch.bool, device=q_SBHD.device)
    return original(ctx, grad_topk_indices, grad_loss)


@edit(f"{_DSA}.dsa:DSAIndexerLossAutoScaler.backward", "e68eea9044f28c5357ba417493e1e6882867ca066f3f58c1770f90c22fb66b4c")
def _scaler_backward(original: Function, ctx: Any, grad_output: Any) -> Any:
    """Replace ``DSAIndexerLossAutoScaler.backward(ctx, grad_output)``: the loss scale defaults to 1 in a capture, too.

    Stock copies a 1 from the host and stores it. In a capture the 1 is filled on the device and not stored, as its memory
    belongs to the graph.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    if DSAIndexerLossAutoScaler.main_loss_backward_scale is not None or not capturing():
        return original(ctx, grad_output)
    import torch

    (loss,) = ctx.saved_tensors
    return grad_output, torch.ones_like(loss)


@edit(
    f"{_DSA}.dsa:_validate_nonpacked_cp_uniform_length",
    "59e125f39723868640efc63ad3888b2e7ae3e7403c6c03b3e7a25508e4741aef",
    make=bound_replacement,
)
def _validate(original: Function, bound: BoundArguments) -> Any:
    """Replace ``_validate_nonpacked_cp_uniform_length(sq, skv, cp_size, cp_group, device)``.

    Stock gathers the lengths of other ranks and reads them on the host. A capture skips that, since the eager warm-up has
    checked these shapes; checks that need only this rank remain.
    """
    if capturing():
        bound.arguments["cp_group"] = None
    return original(*bound.args, **bound.kwargs)


@edit(
    f"{_DSA}.dsa_layout:build_packed_allgather_cp_local_positions",
    "1e34f4cfb33348c6fa6d37be363361b1bf95863ab41bbd5d1a57cb5d21e77a1a",
    make=named_replacement("cu_seqlens cp_size cp_rank device output_size cu_seqlens_cover_output"),
)
def _positions(original: Function, call: SimpleNamespace) -> Any:
    """Replace ``build_packed_allgather_cp_local_positions(cu_seqlens, cp_size, cp_rank, device, …)``.

    Stock drops empty sequences by boolean indexing, which syncs with the GPU. The positions are the same, except for a batch
    without any token: stock returns none, this one per row.
    """
    if call.cp_size <= 1 or not call.output_size or not capturing():
        return original()
    from megacpp_mcore.ops.packed.positions import zigzag_positions

    return zigzag_positions(
        call.cu_seqlens.to(call.device),
        cp_size=call.cp_size,
        cp_rank=call.cp_rank,
        num_rows=call.output_size,
        padded=not call.cu_seqlens_cover_output,
    )


@edit(
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    "99798acffbb2e50cbe72e1f595005364c49d49de1969c387dcd4f5b274690b16",
    "28b2a965734bf099ab83c4fa550a73910073aa3bf015134558434d00aadb3d98",  # NVIDIA/Megatron-LM#5944
    make=named_replacement(f"t cu_seqlens freqs cp_group multi_latent_attention max_seqlen {_ROTATION}"),
)
def _rotary(original: Function, call: SimpleNamespace) -> Any:
    """Replace ``_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, …)``, which splits rows by lengths read on the host.

    Here each row's frequencies are gathered on the device, and the same rotation is applied to all rows at once. Upstream's
    next version does so itself where ``max_seqlen`` is passed, which stock's DSA indexer does not.
    """
    by_itself = getattr(call, "max_seqlen", None) is not None
    if by_itself or call.cp_group is None or call.multi_latent_attention is not None or not capturing():
        return original()
    from megatron.core.models.common.embeddings import rope_utils

    from megacpp_mcore.ops.packed.positions import rotary_rows

    rows = rotary_rows(
        call.cu_seqlens,
        num_rows=call.t.shape[0],
        num_frequencies=call.freqs.shape[0],
        cp_size=call.cp_group.size(),
        cp_rank=call.cp_group.rank(),
    )
    rotation = {name: value for name, value in vars(call).items() if name in _ROTATION.split()}
    freqs = call.freqs.index_select(0, rows)
    return rope_utils._apply_rotary_pos_emb_bshd(call.t.unsqueeze(1), freqs, **rotation).squeeze(1)


PATCH = Patch(
    name="dsa-graph-safety",
    fixes=(
        "CUDA graph capture of a DSA layer fails: the indexer loss's backward pass copies from the host, and packed sequences "
        "and context parallelism read lengths on the host"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/transformer/experimental_attention_variant/{dsa,dsa_layout}.py and "
        "megatron/core/models/common/embeddings/rope_utils.py"
    ),
    edits=(_loss_backward, _scaler_backward, _validate, _positions, _rotary),
    seam=(
        "each is the smallest function around one host synchronisation; the backward pass is met at the autograd function, so "
        "that the function it calls stays free for dsa-indexer-memory"
    ),
    leaves_alone=(
        "everything outside of a capture; scatter_topk_into_index_mask, which is without branches in 0.19 already; "
        "generate_varlen_mask_params, which nothing calls; get_cp_positions_from_layout for ranks of unequal length, which the "
        "eager check refuses before; fused kernels; activation recompute of the core attention; the log "
        "of the loss, whose tensor an eager warm-up has to have made"
    ),
    cost="an eager warm-up before the capture, as for any capture",
    retire_when="upstream captures a DSA layer with its indexer loss, packed and with context parallelism",
)
