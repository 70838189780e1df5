"""E: the ModuleSpec of a mixture-of-experts layer, hosted by stock MoELayer; ``MoESubmodules.experts`` is the swap point."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore.layer_specs.parts import Parts


def expert_layer_spec(config: TransformerConfig, parts: Parts) -> ModuleSpec:
    """One E layer: norm, router + grouped experts + shared expert, residual; no sequence mixer."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.norm,
            mlp=get_moe_module_spec_for_backend(
                backend=parts.backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
