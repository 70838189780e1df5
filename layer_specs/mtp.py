"""MTP: the ModuleSpec of the shared multi-token-prediction block (full MLA + dense GELU feed-forward)."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
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
from megacpp_mcore.layer_specs.norm import residual_norm
from megacpp_mcore.layer_specs.parts import Parts
from megacpp_mcore.te import imports

FUSED_NORM = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
"""The norm's weight inside TELayerNormColumnParallelLinear, and its name in checkpoints."""


def mtp_block(parts: Parts, dispatcher: Dispatcher) -> MultiTokenPredictionBlockSubmodules:
    """One MTP layer, applied at every depth (``mtp_use_repeated_layer``): ``[norm(emb); norm(h)]`` → D → block → norm.

    With ``transformer_engine: {mtp: true}`` the feed-forward's norm is fused into its first linear layer. LayerNormMLP is not
    used: its GELU has only the tanh form, and the model's is erf.

    Raises:
        BackendError: this is requested, and Transformer Engine is not available.
    """
    fused = imports.features().mtp and imports.entry("TELayerNormColumnParallelLinear")
    norm = residual_norm(parts, dispatcher)
    block = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=full_attention(parts, dispatcher),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused else norm,
            sharded_state_dict_keys_map=FUSED_NORM if fused else {},
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=fused or parts.column_linear,
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
