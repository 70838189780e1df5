"""The stock training loop for a pip-only install, without a checkout with ``pretrain_gpt.py`` and ``pretrain_hybrid.py``.

The wheel of megatron-core has the loop (``megatron.training.pretrain``) but not the scripts that feed it. This module
feeds it in the same way for text pretraining: GPTDataset, mock data or fill-in-the-middle, documents packed or not, every
parallel layout, MTP, ``--spec``. With ``--hybrid-layer-pattern`` the model is a HybridModel, otherwise a GPTModel; for
the same arguments the losses are those of the unmodified script, bit for bit. What it does not support (fine-tuning,
distillation, …) is refused by name before anything is built.

Checked with megatron-core 0.19.2.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0, training
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.ops.packed.documents import check_masked_count, fixed_cu_seqlens

# B: micro-batch (1 when packed), S: sequence (of this context-parallel rank; of all B samples when packed), N: documents
ROW_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
BATCH_KEYS = (*ROW_KEYS, *DOCUMENT_KEYS)
PACKED_ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

SPIKE_FACTOR = 10
"""``--check-for-spiky-loss`` reports a loss above this many times the largest one seen."""

_straggler = StragglerDetector()


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]],
    vp_stage: int | None,
    most_documents: Callable[[int], int] | None = None,
) -> dict[str, Any]:
    """Return this rank's next micro-batch: tokens, labels, loss_mask, position_ids ``[B, S]``, attention_mask or None.

    With ``--dataloader-inter-document-masking`` the samples are concatenated in one row, and ``cu_seqlens [1, N + 1]`` holds
    the starts of documents. Tensor-parallel rank 0 reads and broadcasts. A pipeline stage that needs no tokens gets None
    for every key except those of the documents.

    Args:
        data_iterator: yields samples on tensor-parallel rank 0.
        vp_stage: of the model chunk.
        most_documents: returns the maximum documents in a row of a given length, for models that accept packed rows
            padded with empty documents: that is then N, without a host sync. None: N is the number of documents,
            which the host reads, and max_seqlen is the longest.

    Raises:
        DataError: more documents in a packed row, or in one described by a mask, than ``most_documents``.
    """
    args = get_args()
    has_mtp, packed = _has_mtp(args, vp_stage), args.dataloader_inter_document_masking
    max_documents = None
    if packed and most_documents is not None:
        max_documents = most_documents(args.seq_length * max(args.micro_batch_size, args.eval_micro_batch_size or 0))
    needs_rows = is_first_or_last_pipeline_stage(vp_stage) or has_mtp
    if not needs_rows and not packed:
        return dict.fromkeys(BATCH_KEYS)

    batch: dict[str, Any] = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample: dict[str, Any] = dict(next(data_iterator))
        if args.reset_attention_mask and most_documents is not None and "attention_mask" in sample:
            check_masked_count(sample["attention_mask"], most_documents(args.seq_length))
        if max_documents is not None:
            fixed = fixed_cu_seqlens(sample["cu_seqlens"], rows=args.seq_length, max_documents=max_documents)
            sample |= {"cu_seqlens": fixed, "max_seqlen": None}
        for key in BATCH_KEYS:
            value = sample.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    documents = None
    if max_documents is not None:
        documents = _broadcast_documents(batch.get("cu_seqlens"), max_documents)
        if not needs_rows:
            return dict.fromkeys(BATCH_KEYS) | documents
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed and documents is None,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    cp_group = mpu.get_context_parallel_group()
    if documents is not None:
        rows = {key: batch[key].reshape(1, -1) for key in PACKED_ROW_KEYS if batch.get(key) is not None}
        rows = get_batch_on_this_cp_rank(rows, is_hybrid_cp=False, cp_group=cp_group, use_per_sequence_balancing=True)
        return dict.fromkeys(BATCH_KEYS) | rows | documents
    batch = flatten_batch_for_packed_sequences(batch)
    if not needs_rows:
        return dict.fromkeys(ROW_KEYS) | {key: batch[key] for key in DOCUMENT_KEYS}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group, use_per_sequence_balancing=packed)
    return {key: batch.get(key) for key in BATCH_KEYS}


def _broadcast_documents(cu_seqlens: torch.Tensor | None, max_documents: int) -> dict[str, Any]:
    """Broadcast the row boundaries ``[max_documents + 1]`` of tensor-parallel rank 0; no document is longer than a sample."""
    if cu_seqlens is None:
        cu_seqlens = torch.empty(max_documents + 1, dtype=torch.int32, device=torch.cuda.current_device())
    group = mpu.get_tensor_model_parallel_group()
    torch.distributed.broadcast(cu_seqlens, mpu.get_tensor_model_parallel_src_rank(), group=group)
    return {"cu_seqlens": cu_seqlens[None], "max_seqlen": get_args().seq_length}


def documents_of(batch: dict[str, Any], tokens_per_sample: int) -> PackedSeqParams | None:
    """Return the documents of a packed micro-batch in the form that the layers use, and count them; None for any other."""
    if batch["cu_seqlens"] is None:
        return None
    real, padded = (None if value is None else value.squeeze(0) for value in map(batch.get, DOCUMENT_KEYS[:2]))
    training.update_seqlen_stats_from_cu_seqlens(real)
    starts, longest = real if padded is None else padded, int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=tokens_per_sample,
    )


def loss_func(
    loss_mask_BS: torch.Tensor, losses_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return a micro-batch's summed loss, its number of counted tokens, and the pair to log; all of this rank's part.

    Under context parallelism Megatron makes a mean of its row only with the patch masked-losses, or of losses by token.
    """
    weights_BS = loss_mask_BS.float()
    loss = (losses_BS.float() * weights_BS).sum()
    counted = weights_BS.sum().int()
    _check_loss(loss)
    logged = {"lm loss": torch.hstack((loss.detach(), counted))}
    return loss, counted, logged


def _check_loss(loss: torch.Tensor) -> None:
    args, state_machine = get_args(), get_rerun_state_machine()
    check = partial(state_machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        check(rejection_func=torch.isnan, message="the loss of the local forward pass is NaN", fatal=True)
        check(rejection_func=torch.isinf, message="the loss of the local forward pass is infinite", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(state_machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        check(rejection_func=is_spike, message="the loss jumped", fatal=False)


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run one micro-batch; return the model's output (or its schedule plan) and the loss function for it.

    Raises:
        LaunchError: under context parallelism, if tokens would weigh by the rank that holds them.
    """
    _refuse_means_of_ranks()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"), _most_documents(model))
        documents = documents_of(batch, get_args().seq_length)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with _straggler:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=documents)
    return output, partial(loss_func, batch["loss_mask"])


@cache
def _refuse_means_of_ranks() -> None:
    args = get_args()
    if args.context_parallel_size == 1 or args.calculate_per_token_loss:
        return
    from megacpp_mcore import patches

    if ("masked-losses", "applied") not in [(patch["name"], patch["state"]) for patch in patches.status()]:
        raise LaunchError(
            "under context parallelism Megatron averages the ranks' mean losses, whatever number of tokens each counts: call "
            'megacpp_mcore.patches.apply(["masked-losses"]) first, or pass --calculate-per-token-loss'
        )


def _most_documents(model: Any) -> Callable[[int], int] | None:
    """Return the maximum documents per row as a function of its length, for this package's layers; None (stock): no limit."""
    config = get_attr_wrapped_model(model, "config")
    if not hasattr(config, "max_documents"):
        return None
    from megacpp_mcore.layer_specs.documents import max_documents

    return partial(max_documents, config)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets of ``num_samples`` samples each (None on a rank without data)."""
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset,
        num_samples,
        lambda: _reads_data(args, vp_stage),
        dataset_config_from_args(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


# Every rank builds its own part; without this Megatron calls the provider on tensor-parallel rank 0 only.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def dataset_config_from_args(args: Namespace) -> GPTDatasetConfig:
    """Return the dataset configuration that Megatron's parsed arguments ask for."""
    kind: type[GPTDatasetConfig] = GPTFIMDatasetConfig if args.fim_data else GPTDatasetConfig
    same = (field.name for field in dataclasses.fields(kind) if hasattr(args, field.name))
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    counts = args.per_dataset_sequences_path
    renamed: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": None if counts is None else json.loads(Path(counts).read_text(encoding="utf-8")),
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    if args.fim_data:
        tokens = ("prefix", "middle", "suffix", "pad", "eod")
        renamed["fim_extra_tokens"] = {part: getattr(args, f"fim_{part}_token") for part in tokens}
    return kind(**{name: getattr(args, name) for name in same}, **renamed)


def _reads_data(args: Namespace, vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    if args.dataloader_inter_document_masking:  # every stage needs the starts of documents
        return True
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(args, vp_stage)


def _has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return which of a pipeline group's ranks hold word embeddings: the first, the last if tied, and those with MTP."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def refuse_unsupported(args: Namespace) -> None:
    """Raise LaunchError if ``args`` contradict each other, or request what no HybridModel can do."""
    if args.dataloader_inter_document_masking and args.overlap_moe_expert_parallel_comm:
        raise LaunchError(
            "--overlap-moe-expert-parallel-comm uses a schedule that ignores document boundaries; remove that, or "
            "--dataloader-inter-document-masking",
            code="documents-ignored",
        )
    if args.fim_data and args.mock_data:
        raise LaunchError("--fim-data is ignored by Megatron with --mock-data; remove one of them")
    if args.hybrid_layer_pattern is not None and args.overlap_moe_expert_parallel_comm:
        raise LaunchError("--overlap-moe-expert-parallel-comm is for GPTModel; leave it out with --hybrid-layer-pattern")


def main() -> None:
    """Train with the Megatron arguments in ``sys.argv``."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_unsupported(args)
    model_config = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    pretrain(
        pretrain_cfg_container_from_args(args, model_config(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
