"""A block family defined outside the package: gated causal convolutions instead of NAM56R's R layers.

``--spec block_family nam56r_with_convolutions``; ``block_family.sh`` next to this file runs it. A family is a mixer
(``[S, B, D] -> [S, B, D]``, causal) and a ModuleSpec that puts it into a stock TransformerLayer, which provides norm,
residual, recompute and checkpoints. Its layers go where the pattern has the letter R.

Shapes: S sequence, B batch, D hidden, C channels (of this tensor-parallel rank).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.nam56r import HybridBlockSubmodules, nam56r
from megacpp_mcore.layer_specs.parts import Mixer, Parts, mixer_layer_spec, parts_for
from megacpp_mcore.layer_specs.recurrent import M2RNNMixer
from megacpp_mcore.ops.m2rnn.reference import causal_convolution


class GatedConvolution(Mixer):
    """``out = W_out (convolution(x) · sigmoid(gate))`` with ``x, gate = W_in h``; a depthwise causal convolution."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        parts: Parts,
        taps: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config, layer_number, pg_collection)
        width = config.hidden_size
        self.in_proj = build_module(
            parts.column_linear,
            width,
            2 * width,
            config=config,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            init_method=config.init_method,
            gather_output=False,
            tp_group=self.tp_group,
        )
        self.out_proj = self.output_projection(parts.row_linear, width)
        # Mixer splits it over tensor parallelism along axis 0, and saves and loads it in any parallel layout.
        self.add_parameter("taps_weight", (width, taps), config.init_method, axis=0)
        self.add_parameter("taps_bias", (width,), torch.nn.init.zeros_, axis=0)

    def forward(
        self,
        hidden_SBD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix along the sequence; inherently causal, so the mask is read only for document boundaries."""
        if inference_context is not None:
            raise ModelError(f"layer {self.layer_number} keeps no state for decoding")
        pairs_SBX, _ = self.in_proj(hidden_SBD)
        seq_idx_BS = self.documents(pairs_SBX, attention_mask, packed_seq_params)
        x_SBC, gate_SBC = pairs_SBX.unflatten(-1, (-1, 2)).unbind(-1)
        x_BSC = causal_convolution(x_SBC.transpose(0, 1), self.taps_weight, self.taps_bias, seq_idx_BS=seq_idx_BS)
        return self.out_proj((x_BSC.transpose(0, 1) * gate_SBC.sigmoid()).contiguous())


def convolution_layer_spec(parts: Parts, taps: int = 8) -> ModuleSpec:
    """Return one layer: norm, gated convolution, residual; no feed-forward part."""
    return mixer_layer_spec(parts.norm, ModuleSpec(module=GatedConvolution, params={"parts": parts, "taps": taps}))


def mixer_of(layer: ModuleSpec) -> type | None:
    """Return the class in a layer's self-attention slot; None if the slot is empty, as in E layers."""
    return getattr(layer.submodules.self_attention, "module", None)


def nam56r_with_convolutions(config: Any, vp_stage: int | None = None) -> HybridBlockSubmodules:
    """Return the layers of ``--spec megacpp_mcore nam56r_tiny``, or of MEGACPP_CONFIG's file, with each R layer replaced."""
    block = nam56r(config, vp_stage, "nam56r_tiny")
    parts = parts_for(getattr(config, "transformer", config))
    block.layer_specs = [convolution_layer_spec(parts) if mixer_of(spec) is M2RNNMixer else spec for spec in block.layer_specs]
    return block
