"""Document boundaries inside a row: how layers read them, and which runs are refused because stock parts ignore them.

Megatron (0.19) has two ways to mark documents. ``--dataloader-inter-document-masking`` packs: every layer of every stage gets
``packed_seq_params`` with the first row of each document, and multi-token prediction shifts tokens within documents.
``--reset-attention-mask`` passes a mask only to the layers of the first and the last stage, and nothing to multi-token
prediction, which then embeds and predicts tokens of the next document; it is refused where that makes a difference.

Either is read once per micro-batch and chunk, by the first layer that needs it; the others get the same tensor
(:func:`megacpp_mcore.ops.packed.documents.shared`). The host never waits for the GPU, with two exceptions. The first mask of a
process is read on the host, so that a wrong mask raises a readable error; later ones are checked on the device. And without a
stock script's arguments for whether masks are reset (Megatron-Bridge), every mask is read on the host, once per micro-batch
and chunk: a plain causal mask allows runs that a mask with documents does not.

Shape legend: S rows (of the whole sequence), B batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.packed.documents import (
    check_count,
    check_same_sequences,
    check_seq_idx,
    default_max_documents,
    require_one_document,
    seq_idx_from_cu_seqlens,
    seq_idx_from_mask,
    shared,
)

_ADVICE = "pass --dataloader-inter-document-masking instead of --reset-attention-mask"
_READ = "megacpp_mask_was_read"
"""Attribute set on a configuration once the host has read a mask of its layers."""


def documents(
    config: TransformerConfig,
    layer_number: int,
    *,
    batch: int,
    rows: int,
    attention_mask: torch.Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> torch.Tensor | None:
    """Return the document number of each row, int32 ``[B, S]``, or None: each row of the batch is one document.

    Args:
        config: of the run.
        layer_number: the calling layer, 1-based, for errors.
        batch: B.
        rows: S.
        attention_mask: what Megatron passed to the layer: None, or bool ``[B or 1, 1, S, S]``, True = masked. An int32 result
            of an earlier call is returned as it is.
        packed_seq_params: what Megatron passed to the layer: None, or the documents of a packed batch (B = 1).

    Raises:
        DataError: more documents in a row than :func:`max_documents`.
        ModelError: the documents cannot be determined, or other parts of the run would mix them.
    """
    if packed_seq_params is not None:
        return packed_documents(config, packed_seq_params, layer_number, batch=batch, rows=rows)
    if attention_mask is None:
        return None
    if config.context_parallel_size > 1:
        raise ModelError(
            f"layer {layer_number} got an attention mask, sharded over {config.context_parallel_size} context-parallel "
            "ranks; pass --no-create-attention-mask-in-dataloader (to keep documents apart: "
            "--dataloader-inter-document-masking)",
            code="mask-under-context",
        )
    if attention_mask.dtype == torch.int32:
        check_seq_idx(attention_mask, batch=batch, rows=rows)
        return attention_mask
    mask = attention_mask
    return shared(mask, ("documents", batch, rows), lambda: _masked_documents(config, mask, batch, rows))


def _masked_documents(config: TransformerConfig, attention_mask: torch.Tensor, batch: int, rows: int) -> torch.Tensor | None:
    arguments: Any = global_vars._GLOBAL_ARGS
    is_reset = None if arguments is None else bool(arguments.reset_attention_mask)
    wait = is_reset is None or not getattr(config, _READ, False)
    seq_idx_BS = seq_idx_from_mask(attention_mask, wait=wait)
    setattr(config, _READ, True)
    if is_reset is False:
        require_one_document(
            seq_idx_BS,
            lambda: "the attention mask separates documents, but --reset-attention-mask is not set; pass it",
            wait=wait,
        )
        return None
    if is_reset is None and bool((seq_idx_BS == seq_idx_BS[:, :1]).all()):
        return None
    _check_masked_documents(config)
    if seq_idx_BS.shape[1] != rows or seq_idx_BS.shape[0] not in (1, batch):
        raise ModelError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected [B, 1, S, S] with B, S = {batch}, {rows}"
        )
    return seq_idx_BS.expand(batch, rows).contiguous()


def packed_documents(
    config: TransformerConfig, packed_seq_params: PackedSeqParams, layer_number: int, *, batch: int, rows: int
) -> torch.Tensor:
    """Assign numbers to the documents of a packed batch, int32 ``[1, S]``; padding belongs to the one before.

    Raises:
        DataError: more documents than :func:`max_documents`.
        ModelError: the batch is not packed as ``thd`` in one row, the documents of keys differ from those of queries, or the
            batch is split over context-parallel ranks.
    """
    packed = packed_seq_params
    queries, keys = (
        padded if padded is not None else plain
        for padded, plain in (
            (packed.cu_seqlens_q_padded, packed.cu_seqlens_q),
            (packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv),
        )
    )
    if packed.qkv_format != "thd" or queries is None or batch != 1:
        raise ModelError(
            f"layer {layer_number}: packed sequences have qkv_format {packed.qkv_format!r}, "
            f"{'no ' if queries is None else ''}cu_seqlens_q and a batch of {batch}; expected 'thd', the first rows of the "
            "sequences, and a batch of 1"
        )
    if (packed.local_cp_size or 1) > 1:
        raise ModelError(
            f"layer {layer_number}: the packed batch is split over {packed.local_cp_size} context-parallel ranks; expected 1, "
            "leave out --hybrid-context-parallel"
        )
    arguments: Any = global_vars._GLOBAL_ARGS
    if config.context_parallel_size > 1 and not getattr(arguments, "dataloader_inter_document_masking", False):
        raise ModelError(
            f"layer {layer_number}: each packed sequence is split over {config.context_parallel_size} context-parallel ranks, "
            "but layers expect the whole row to be split; pack documents with --dataloader-inter-document-masking, or set "
            "--context-parallel-size 1",
            code="packed-under-context",
        )
    try:
        if keys is not None:
            check_same_sequences(queries, keys)

        def make() -> torch.Tensor:
            seq_idx_1S = seq_idx_from_cu_seqlens(queries, rows, of_keys=keys)
            check_count(queries.numel() - 1, rows, max_documents(config, rows))
            return seq_idx_1S

        return shared(queries, ("documents", rows), make)
    except ModelError as error:
        raise ModelError(f"layer {layer_number}: {error}") from error


def max_documents(config: TransformerConfig, rows: int) -> int:
    """Return the most documents in a row of ``rows`` tokens: the run's setting, or one per 16 tokens, at least 64."""
    return getattr(config, "max_documents", None) or default_max_documents(rows)


def check_run(config: TransformerConfig) -> None:
    """Refuse, before anything runs, a stock run in which documents would mix in some layer.

    Raises:
        ModelError: names the argument to change.
    """
    arguments: Any = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    if arguments is None:
        return
    if config.context_parallel_size > 1:
        _check_context(config, arguments)
    if arguments.dataloader_inter_document_masking:
        _check_packed_rows(config, max(arguments.micro_batch_size, arguments.eval_micro_batch_size or 0))
        return
    if not arguments.reset_attention_mask:
        return
    if not arguments.create_attention_mask_in_dataloader:
        raise ModelError(
            "--reset-attention-mask conflicts with --no-create-attention-mask-in-dataloader: Megatron makes no mask "
            f"and documents would see one another; leave the second out, or {_ADVICE}",
            code="no-mask",
        )
    _check_masked_documents(config)


def _check_context(config: TransformerConfig, arguments: Any) -> None:
    """Raise ModelError for what a sequence that is split over context-parallel ranks does not support."""
    mask_made = arguments.create_attention_mask_in_dataloader and not arguments.dataloader_inter_document_masking
    for unsupported, problem in (
        (arguments.reset_attention_mask, f"--reset-attention-mask, which shards its mask over the ranks; {_ADVICE}"),
        (
            mask_made,
            "the mask that Megatron makes for its own attention; pass --no-create-attention-mask-in-dataloader",
        ),
        (
            arguments.dataloader_inter_document_masking
            and max(arguments.micro_batch_size, arguments.eval_micro_batch_size or 0) > 1,
            "--dataloader-inter-document-masking of several samples a row, which Megatron splits as one; pass "
            "--micro-batch-size 1",
        ),
        (getattr(config, "hybrid_context_parallel", False), "--hybrid-context-parallel; leave it out"),
        (
            config.hierarchical_context_parallel_sizes is not None,
            "--hierarchical-context-parallel-sizes, which configures Transformer Engine's attention; leave it out",
        ),
    ):
        if unsupported:
            raise ModelError(f"--context-parallel-size {config.context_parallel_size} does not support {problem}")


def _check_packed_rows(config: TransformerConfig, micro_batch_size: int) -> None:
    """Raise ModelError where stock would misread a row packed from several samples.

    A pipeline stage receives tensors of unpacked shape; an E layer splits the row into samples by their length, although it
    holds only part of the row under sequence parallelism (0.19, ``schedules.py`` and ``transformer_layer.py``).
    """
    if micro_batch_size == 1:
        return
    kinds = config.moe_router_load_balancing_type
    by_sequence = "seq_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds) and config.num_moe_experts
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        flaw = "which Megatron's pipeline sends from stage to stage in the shape of unpacked ones, mixing them up"
    elif by_sequence and config.sequence_parallel:
        flaw = "of which Megatron under --sequence-parallel balances experts over all samples together instead of one by one"
    else:
        return
    raise ModelError(
        f"--dataloader-inter-document-masking packs the {micro_batch_size} samples of a micro-batch into one row, {flaw}; pass "
        "--micro-batch-size 1"
    )


def _check_masked_documents(config: TransformerConfig) -> None:
    """Raise ModelError where documents separated only by the attention mask would still mix."""
    if config.mtp_num_layers:
        raise ModelError(
            "the attention mask keeps documents apart, and multi-token prediction does not read it: Megatron shifts its tokens "
            f"from one document into the other; {_ADVICE}, where it shifts inside documents, or train without MTP",
            code="mtp",
        )
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if chunks > 2:
        raise ModelError(
            f"the attention mask keeps documents apart, and of {chunks} pipeline chunks Megatron gives it only to the first "
            f"and the last; {_ADVICE}, or use at most 2 chunks",
            code="chunks",
        )
