"""Which layers Megatron puts in which model chunk, read from its own configuration."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def model_chunks(config: TransformerConfig) -> tuple[range, ...]:
    """Return the 1-based layer numbers of every model chunk, as Megatron splits them, in layer order."""
    return tuple(
        chunk_layers(config, vp_stage, pp_rank)
        for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1)
        for pp_rank in range(config.pipeline_model_parallel_size)
    )


def chunk_layers(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None = None) -> range:
    """Return the 1-based layer numbers of one model chunk, as Megatron splits them; by default of this pipeline rank."""
    if pp_rank is None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        stage = vp_stage or 0
        before = [
            layout.layout[rank][virtual].count(LayerType.decoder)
            for virtual in range(layout.virtual_pipeline_model_parallel_size)
            for rank in range(layout.pipeline_model_parallel_size)
            if (virtual, rank) < (stage, pp_rank)
        ]
        first = 1 + sum(before)
        return range(first, first + layout.layout[pp_rank][stage].count(LayerType.decoder))
    if config.virtual_pipeline_model_parallel_size is None:
        vp_stage = None
    first = 1 + get_transformer_layer_offset(config, vp_stage, pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
