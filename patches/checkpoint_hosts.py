"""checkpoint-hosts: a distributed checkpoint of GPTModel loads into HybridModel, and back, where both hold our model.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: runs and checkpoints that use this spec; upstream handles all others.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.arguments import lowering
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.training import HYBRID
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

GPT_KEYS = "has_keys_of_gpt_model"
"""Attribute of a decoder whose model uses the checkpoint keys of a GPTModel."""


_SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "ffn_hidden_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Arguments that decide the shapes of parameters, under either model class."""
_BEHAVIOUR = ("rotary_base", "norm_epsilon", "moe_router_topk", "moe_router_score_function", "dsa_indexer_topk")
"""Arguments that decide no shape, but make a different model of the same parameters."""
_MTP = "MTP depths"


def _outline(args: Any, model_class: str) -> dict[str, Any]:
    """Return what the arguments of a run or checkpoint with the class's spec say about its model; E layers by number."""
    sizes = {name: getattr(args, name, None) for name in _SIZES}
    if model_class == HYBRID:
        trunk, *depths = args.hybrid_layer_pattern.split("/")
        layers = trunk.replace("|", "")
        experts = [number for number, symbol in enumerate(layers, start=1) if symbol == "E"]
        return {"layers": len(layers), "layers of experts": experts, _MTP: len(depths), **sizes}
    placed = args.moe_layer_freq if isinstance(args.moe_layer_freq, list) else []
    experts = [number for number, has_experts in enumerate(placed, start=1) if has_experts]
    return {"layers": args.num_layers, "layers of experts": experts, _MTP: args.mtp_num_layers or 0, **sizes}


@edit(
    "megatron.training.checkpointing:_maybe_setup_gpt_to_hybrid_load",
    "2347cabda1a1444532a6c896d02d91430ddb67097aa1fb203952df5a3b94846e",
    "d187bd7c8872c4309d0ff00dfbee33d8d1d37f007747eadc7c91ce481ef68d9a",
)
def _loads_as_it_is(original: Function, args: Any, ckpt_args: Any, model: Any) -> Any:
    """Replace ``_maybe_setup_gpt_to_hybrid_load(args, ckpt_args, model)``: ``(None, False)``: no conversion."""
    if any(lowering.preset_of(getattr(namespace, "spec", None)) is None for namespace in (args, ckpt_args)):
        return original(args, ckpt_args, model)
    run, saved = map(lowering.model_class_of, (args, ckpt_args))
    outline, saved_outline = _outline(args, run), _outline(ckpt_args, saved)
    if not getattr(args, "finetune", False):
        shared = [name for name in _BEHAVIOUR if hasattr(args, name) and hasattr(ckpt_args, name)]
        outline |= {name: getattr(args, name) for name in shared}
        saved_outline |= {name: getattr(ckpt_args, name) for name in shared}
    if None in (outline["vocab_size"], saved_outline["vocab_size"]):  # it is the tokenizer's, in no argument
        outline["vocab_size"] = saved_outline["vocab_size"]
    differ = [name for name in outline if outline[name] != saved_outline[name] and (run != saved or name != _MTP)]
    if differ:
        fields = "; ".join(f"checkpoint has {name} {saved_outline[name]}, run has {outline[name]}" for name in differ)
        raise ModelError(
            f"checkpoint ({saved}) and run ({run}) are different models: {fields}; load this model's checkpoint, or train "
            "the checkpoint's model; where no shape differs, --finetune begins at step 0 with its weights",
            code="another-model",
        )
    if run == saved:
        return original(args, ckpt_args, model)
    return None, False


@edit(
    "megatron.core.models.common.language_module.language_module:LanguageModule.sharded_state_dict",
    "10e15ea625faff7d9610a7bb02da26e3b196551e889dfa4c0232eca1521a12c9",
)
def _without_empty_state(original: Function, self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
    """GPTModel drops the always empty extra state of its output layer; HybridModel does not, and would have that one key more
    than a GPTModel checkpoint.
    """
    state = original(self, prefix, *args, **kwargs)
    key = f"{prefix}output_layer._extra_state"
    if getattr(getattr(self, "decoder", None), GPT_KEYS, False) and getattr(state.get(key), "data", None) is None:
        state.pop(key, None)
    return state


PATCH = Patch(
    name="checkpoint-hosts",
    fixes=(
        "a checkpoint of our model loads only into the class (GPTModel or HybridModel) that saved it, though all keys and "
        "shapes are the same but for one empty key"
    ),
    source=(
        "megatron-core 0.19.2, megatron/training/checkpointing.py and "
        "megatron/core/models/common/language_module/language_module.py"
    ),
    edits=(_loads_as_it_is, _without_empty_state),
    seam=(
        "_maybe_setup_gpt_to_hybrid_load is the one place that compares the classes of run and checkpoint, and its answer "
        "'as it is' leaves all loading to upstream; LanguageModule.sharded_state_dict is what HybridModel has instead "
        "of the method in which GPTModel drops that key"
    ),
    leaves_alone="what is loaded and how: all other keys, shards, optimizer state, refusals; other models in either direction",
    retire_when="upstream compares keys instead of classes, or lets a spec say that its keys are those of a GPTModel",
    cost="nothing",
)
