"""Floating-point operations of a training step: the audited count and what recompute adds. No torch."""

from megacpp_mcore.model.families.attention_family import full_core, indexer, mla_projections, sparse_core
from megacpp_mcore.model.families.base import Work, causal_pairs, feed_forward, product, selected_pairs
from megacpp_mcore.model.families.mamba_family import mamba_scan
from megacpp_mcore.model.families.recurrent_family import m2rnn_recurrence
from megacpp_mcore.model.flops.count import NAMES, Families, Step, indexer_projections, step

__all__ = [
    "NAMES",
    "Families",
    "Step",
    "Work",
    "causal_pairs",
    "feed_forward",
    "full_core",
    "indexer",
    "indexer_projections",
    "m2rnn_recurrence",
    "mamba_scan",
    "mla_projections",
    "product",
    "selected_pairs",
    "sparse_core",
    "step",
]
