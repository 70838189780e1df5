"""Floating-point operations of a training step: the audited count and what recompute adds. No torch."""

from megacpp_mcore.model.families.attention_family import (
    full_core,
    indexer,
    mla_projections,
    mla_up_projections,
    mla_value_up_projection,
    sparse_core,
)
from megacpp_mcore.model.families.base import Work, causal_pairs, feed_forward, product, selected_pairs
from megacpp_mcore.model.families.mamba_family import mamba_projections, mamba_scan
from megacpp_mcore.model.families.recurrent_family import depthwise_convolution, m2rnn_projections, m2rnn_recurrence
from megacpp_mcore.model.flops.count import NAMES, Families, Step, indexer_projections, step

__all__ = [
    "NAMES",
    "Families",
    "Step",
    "Work",
    "causal_pairs",
    "depthwise_convolution",
    "feed_forward",
    "full_core",
    "indexer",
    "indexer_projections",
    "m2rnn_projections",
    "m2rnn_recurrence",
    "mamba_projections",
    "mamba_scan",
    "mla_projections",
    "mla_up_projections",
    "mla_value_up_projection",
    "product",
    "selected_pairs",
    "sparse_core",
    "step",
]
