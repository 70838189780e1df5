"""own-groups: modules with a tensor-parallel group of their own use it throughout.

Activate: ``megacpp_mcore.patches.apply(["own-groups"])`` before the model is built.
Scope: modules whose ``pg_collection.tp`` is not the process's tensor-parallel group: GPTModel with a padding mask under
    sequence parallelism, CrossAttention, and LLaVAModel under sequence parallelism, which is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from inspect import BoundArguments
from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, bound_replacement, edit


@edit(
    "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
    "1bc57437dfdab74abffdcc0e28b19924ae3969c5333d763e128a40e91567cebd",
    make=bound_replacement,
)
def _cut_as_the_hidden_states(original: Function, bound: BoundArguments) -> Any:
    """Replace ``GPTModel._preprocess``: the padding mask, [B, S], is sharded over the model's group, as the embeddings are."""
    self = bound.arguments["self"]
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    mask: Any = bound.arguments.get("padding_mask")
    is_sharded = self.config.sequence_parallel and self.pre_process and bound.arguments.get("decoder_input") is None
    if mask is None or not is_sharded or mask.shape != bound.arguments["input_ids"].shape:  # stock refuses it
        return original(*bound.args, **bound.kwargs)
    bound.arguments["padding_mask"] = None
    outputs = original(*bound.args, **bound.kwargs)  # the mask is the sixth
    mask_shard = scatter_to_sequence_parallel_region(mask.transpose(0, 1).contiguous(), group=self.pg_collection.tp)
    return (*outputs[:5], mask_shard.transpose(0, 1).contiguous(), *outputs[6:])


@edit(
    "megatron.core.transformer.attention:CrossAttention.__init__",
    "68e0704abd23bbc429c60611bc1066d7ff9e812bfaec28f38ad81c472ebe5ce4",
    make=bound_replacement,
)
def _of_own_group(original: Function, bound: BoundArguments) -> None:
    """Replace ``CrossAttention.__init__``: projections of queries, keys and values are sharded over the attention's group."""
    if (groups := bound.arguments.get("pg_collection")) is not None:
        parts = bound.arguments["submodules"]
        bound.arguments["submodules"] = dataclasses.replace(
            parts,
            linear_q=functools.partial(parts.linear_q, tp_group=groups.tp),
            linear_kv=functools.partial(parts.linear_kv, tp_group=groups.tp),
        )
    original(*bound.args, **bound.kwargs)


@edit(
    "megatron.core.models.multimodal.llava_model:LLaVAModel._process_embedding_token_parallel",
    "1a6902da923e65e67ddecaf572e4b1a860fd3e82b5a752e31041d71b82fd73f7",
    "f3af3bcce3efd51643ab9bf4a6f7010c432b49769f0dff366a74f14980bf3fa1",
)
def _of_the_process(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``LLaVAModel._process_embedding_token_parallel``: refuse any group but the process's."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    if self.sequence_parallel_lm and self.pg_collection.tp is not get_tensor_model_parallel_group():
        raise ValueError(
            "LLaVAModel was given a tensor-parallel group of its own, and would cut sequences over the process's; build it "
            "without pg_collection, or without sequence parallelism (NVIDIA/Megatron-LM#7452)"
        )
    return original(self, *args, **kwargs)


PATCH = Patch(
    name="own-groups",
    fixes=(
        "given a tensor-parallel group of its own, GPTModel cuts its padding mask, CrossAttention its projections and "
        "LLaVAModel its sequences over the process's group"
    ),
    source=(
        "NVIDIA/Megatron-LM#7452, findings 5, 6 and 7; megatron-core 0.19.2, megatron/core/models/gpt/gpt_model.py, "
        "megatron/core/transformer/attention.py and megatron/core/models/multimodal/llava_model.py"
    ),
    edits=(_cut_as_the_hidden_states, _of_own_group, _of_the_process),
    seam="the three get the group, but do not pass it to what shards",
    leaves_alone="modules of the process's group; the sharding of LLaVAModel, which is refused",
    retire_when="upstream passes the group on",
    cost="nothing",
)
