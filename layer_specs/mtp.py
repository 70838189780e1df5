"""MTP: the ModuleSpec of the shared multi-token-prediction block (full MLA + dense GELU feed-forward)."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.layer_specs.attention import full_attention
from megacpp_mcore.layer_specs.parts import Parts


def mtp_block(parts: Parts, dispatcher: Dispatcher) -> MultiTokenPredictionBlockSubmodules:
    """One MTP layer, applied at every depth (``mtp_use_repeated_layer``): ``[norm(emb); norm(h)]`` → D → block → norm."""
    block = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=full_attention(parts, dispatcher),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=parts.column_linear,
                    linear_fc2=parts.row_linear,
                    activation_func=parts.backend.activation_func(),
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=parts.norm,
            hnorm=parts.norm,
            eh_proj=parts.column_linear,
            mtp_model_layer=block,
            layer_norm=parts.norm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
