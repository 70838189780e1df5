"""mtp-shared-block: GPTModel's MTP uses the spec's own block, weights depths by a decay, and never syncs with the GPU.

Activate: applied by ``--spec megacpp_mcore nam56r``; or ``megacpp_mcore.patches.apply(["mtp-shared-block"])``.
Scope: specs with an ``mtp`` attribute, and configurations with ``mtp_loss_decay``; losses on context-parallel ranks, and those
    by token on replicas. All others are untouched, except for the shift of packed sequences, which does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import BoundArguments
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, bound_replacement, edit, named_replacement


@edit("megatron.training.models.gpt:mtp_block_spec", "43ccd8c4a2767959ffc9130b19ab176e524a3681c11643cd84b3a69b2968f550")
def _block_spec(original: Function, config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
    if hasattr(transformer_layer_spec, "mtp"):
        return transformer_layer_spec.mtp
    return original(config, transformer_layer_spec, vp_stage=vp_stage)


@edit(
    "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
    "7a459bac5884e8bf3bf19381b3eb2b02f1d443e7e5c48bae78b90c2b4ee52767",
    "918518880dbbacb7555c5ea0f112e11689e556881b091cc1e3ddffd419b71664",
    make=bound_replacement,
)
def _weighted_loss(original: Function, bound: BoundArguments) -> Any:
    """Replace ``process_mtp_loss``: the gradient of depth k is scaled by K·β^(k−1) / Σ β^(j−1).

    Upstream weights every depth by λ/K; the product is λ·β^(k−1) / Σ β^(j−1) (FastMTP, arXiv 2509.18362). Only gradients are
    scaled, so that the logged losses stay plain means, over the tokens of all ranks that divide by one number
    (:func:`_over_ranks`): those of a row, and under losses by token all replicas (NVIDIA/Megatron-LM#7452, finding 3). Where
    neither a log nor a gradient reads them, as in evaluation, ranks do not communicate.
    """
    import torch
    from megatron.core import parallel_state

    config = bound.arguments["config"]
    decay = getattr(config, "mtp_loss_decay", None)
    compute, group = bound.arguments["compute_language_model_loss"], bound.arguments.get("cp_group")
    if config.calculate_per_token_loss:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if decay is not None and config.mtp_num_layers > 1:
        compute = _scaled_by_depth(compute, config.mtp_num_layers, decay)
    is_read = bound.arguments["is_training"] or torch.is_grad_enabled()
    if group is not None and group.size() > 1 and is_read and not config.hybrid_context_parallel:
        compute = _over_ranks(compute, bound.arguments, group)
    bound.arguments["compute_language_model_loss"] = compute
    return original(*bound.args, **bound.kwargs)


def _scaled_by_depth(compute: Callable[..., Any], depths: int, decay: float) -> Callable[..., Any]:
    """``compute`` for ``depths`` calls, one per depth in order, with the gradient of each scaled by that depth's weight."""
    total = sum(decay**k for k in range(depths))
    factors = iter([depths * decay**k / total for k in range(depths)])

    def loss(labels: Any, logits: Any) -> Any:
        return _scale_gradient(compute(labels, logits), next(factors))

    return loss


def _over_ranks(compute: Callable[..., Any], arguments: dict[str, Any], group: Any) -> Callable[..., Any]:
    """``compute`` for one call per depth, with losses that become a mean over the tokens of all ranks of ``group``.

    Each rank divides by the tokens that it counts itself, and the ranks are averaged; but the last tokens of a sequence, which
    no depth can predict, are all on one rank. The mask is rolled as a copy: linear-cross-entropy follows its own rolls. By
    token, a rank whose part of the mask is empty trains no depth, not even on a token that is rolled in: stock multiplies by 0.
    """
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    config, labels, mask = arguments["config"], arguments["labels"], arguments["loss_mask"]
    tokens, row = arguments.get("input_ids"), {name: arguments.get(name) for name in ("cp_group", "packed_seq_params")}
    if labels is None and tokens is None:  # no loss
        return compute
    alike: Any = tokens if labels is None else labels
    mask = torch.ones_like(alike) if mask is None else mask.clone()
    if labels is None:  # which are the next tokens then
        mask, _ = roll_tensor(mask, -1, -1, **row)
    counts = [mask.sum()]
    for _ in range(config.mtp_num_layers):
        mask, count = roll_tensor(mask, -1, -1, **row)
        counts.append(count)
    own = torch.stack(counts).float()
    total = own.clone()
    torch.distributed.all_reduce(total, group=group)
    factors = own.clamp(min=1) / total.clamp(min=1) * group.size()
    of_depths = iter(factors[1:])

    def loss(labels: Any, logits: Any) -> Any:
        scaled = compute(labels, logits) * next(of_depths)
        # By token, stock multiplies by the tokens counted here before any were rolled away.
        return _scale_gradient(scaled, 1 / factors[0]) if config.calculate_per_token_loss else scaled

    return loss


@edit(
    "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq",
    "5eadfe5528df9b5388f0ab3cad8a4484a06e8b18d7b013628849f2a3d7f36937",
    "55d373df84993ed5d1527b48411b75fab41aed8ff3185668827265cc568a0a1b",
    make=named_replacement("tensor shifts dims packed_seq_params cp_group return_sum"),
)
def _roll(original: Function, call: SimpleNamespace) -> Any:
    """Replace ``_roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group, return_sum)``.

    Without context parallelism stock rolls the sequences one by one and reads their bounds on the host: two GPU syncs per
    sequence, for tokens, positions, labels and mask of every depth. Here they are all rolled at once, on the device. With it
    stock expects each sequence to be sharded over the ranks, but ``--dataloader-inter-document-masking`` shards the row that
    holds them: there the row is rolled, and what has come from the next sequence is cleared.
    """
    tensor, cp_group, cu_seqlens = call.tensor, call.cp_group, call.packed_seq_params.cu_seqlens_q
    on_last = call.dims in (-1, tensor.dim() - 1)
    ranks = 1 if cp_group is None else cp_group.size()
    if call.shifts != -1 or not on_last or cu_seqlens is None or (ranks > 1 and not _row_is_cut()):
        return original()
    if cu_seqlens.device != tensor.device:
        if ranks == 1:  # bounds on the host, which stock reads without a wait
            return original()
        cu_seqlens = cu_seqlens.to(tensor.device)
    from megacpp_mcore.ops.packed.documents import roll_left

    if ranks == 1:
        rolled = roll_left(tensor, cu_seqlens)
    else:
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        # A view, since linear-cross-entropy follows the rolls of the mask itself.
        of_row, _ = roll_tensor(tensor.view_as(tensor), -1, -1, cp_group=cp_group)
        rolled = roll_left(tensor, cu_seqlens, of_row, ranks=ranks, rank=cp_group.rank())
    return rolled, rolled.sum() if getattr(call, "return_sum", True) else None


def _row_is_cut() -> bool:
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "dataloader_inter_document_masking", False))


def _scale_gradient(loss: Any, factor: Any) -> Any:
    if loss.requires_grad:
        loss = loss.clone()
        loss.register_hook(lambda gradient: gradient * factor)
    return loss


PATCH = Patch(
    name="mtp-shared-block",
    fixes=(
        "GPTModel's builder ignores --spec for multi-token prediction and rebuilds stock layers; "
        "all depths weigh the same; on context-parallel ranks, and by token on replicas, its losses are means of unequal "
        "counts; a shift of packed sequences waits for the GPU twice a sequence"
    ),
    source="megatron-core 0.19.2, megatron/training/models/gpt.py and megatron/core/transformer/multi_token_prediction.py",
    edits=(_block_spec, _weighted_loss, _roll),
    seam=(
        "mtp_block_spec is the one place where the builder turns a layer spec into an MTP spec, and sees the spec itself; "
        "process_mtp_loss gets the loss function that it calls once a depth; all shifts of packed sequences are one function"
    ),
    leaves_alone=(
        "specs without an mtp attribute, what is shifted where, shifts of sequences that context parallelism cuts one by one, "
        "one rank's losses, those of evaluation, and those of --hybrid-context-parallel, where ranks run unequal numbers of "
        "micro-batches; logging, speculative decoding"
    ),
    retire_when="the builder takes an MTP spec from the caller, and the depth weights from the configuration",
    cost=(
        "on context-parallel ranks, and by token on replicas, an all-reduce of a number a depth in the forward pass of every "
        "micro-batch: by token, replicas wait there for the slowest of them, otherwise once a step; not measured"
    ),
    upstream=(7498, 7570),
)
