"""A whole attention block of Transformer Engine's classes: LayerNormLinear, DotProductAttention, Linear, LayerNormMLP.

For custom layer patterns: pre-norm attention with grouped queries, then a feed-forward layer, each with its residual. The order
is Transformer Engine's own, which therefore decides what is saved for the backward pass.

Shape legend: S sequence (of this rank: all of it, or its part under sequence parallelism), B batch, D hidden, H query
heads, G groups of shared keys and values, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.util import te_imports

ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu", "swiglu": "swiglu", "geglu_tanh": "geglu"}
"""Activations of LayerNormMLP, with its names for them: its GELU is the tanh form."""


class Block(torch.nn.Module):
    """One attention block and its feed-forward layer; no biases, RMSNorm.

    Args:
        hidden, heads, ffn: sizes over all tensor-parallel ranks; ``hidden`` is a multiple of ``heads``.
        groups: of keys and values, dividing ``heads``; None: as many as heads.
        activation: of :data:`ACTIVATIONS`, or ``gelu`` (erf), which LayerNormMLP lacks: then LayerNormLinear and Linear.
        eps: of the norms.
        tp_group: tensor-parallel group; heads and groups are multiples of its size.
        sequence_parallel: whether the block takes, and returns, this rank's part of the sequence.
        dtype, device: of the parameters.

    Raises:
        ModelError: the sizes do not fit.
        BackendError: the feature is off, or Transformer Engine is not installed.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        groups: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-5,
        tp_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        if not (probe := te_imports.feature("block")).ok:
            raise BackendError(f"blocks of Transformer Engine cannot be used: {probe.reason}")
        groups, ranks = groups or heads, 1 if tp_group is None else tp_group.size()
        if hidden % heads or heads % groups or groups % ranks:
            raise ModelError(
                f"hidden {hidden}, heads {heads}, groups {groups}, {ranks} tensor-parallel ranks; expected each to be a "
                "multiple of the next"
            )
        if activation not in (*ACTIVATIONS, "gelu"):
            raise ModelError(f"activation is {activation!r}; expected gelu or one of {', '.join(ACTIVATIONS)}")
        self.width, self.heads, self.groups = hidden // heads, heads // ranks, groups // ranks
        shared: dict[str, Any] = {"bias": False, "params_dtype": dtype, "device": device}
        parallel = {"tp_group": tp_group, "tp_size": ranks, "sequence_parallel": sequence_parallel}
        normed = {"normalization": "RMSNorm", "eps": eps}
        column, row = {"parallel_mode": "column", **parallel}, {"parallel_mode": "row", **parallel}
        sizes = {"query": heads * self.width, "key": groups * self.width, "value": groups * self.width}
        linear, normed_linear = te_imports.entry("Linear"), te_imports.entry("LayerNormLinear")
        self.qkv = normed_linear(hidden, sum(sizes.values()), parameters_split=sizes, **shared, **normed, **column)
        self.attention = te_imports.entry("DotProductAttention")(
            heads, self.width, num_gqa_groups=groups, attention_dropout=0.0, tp_group=tp_group, tp_size=ranks
        )
        self.output = linear(hidden, hidden, **shared, **row)
        if activation == "gelu":
            first = normed_linear(hidden, ffn, **shared, **normed, **column)
            self.feed_forward = torch.nn.Sequential(first, torch.nn.GELU(), linear(ffn, hidden, **shared, **row))
        else:
            self.feed_forward = te_imports.entry("LayerNormMLP")(
                hidden, ffn, activation=ACTIVATIONS[activation], set_parallel_mode=True, **shared, **normed, **parallel
            )

    def forward(self, hidden_SBD: torch.Tensor, rotary: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Map ``[S, B, D] -> [S, B, D]``, causal; ``rotary`` is applied to queries and keys ``[S, B, heads, K]``."""
        qkv = self.qkv(hidden_SBD)
        sizes = [heads * self.width for heads in (self.heads, self.groups, self.groups)]
        query, key, value = (part.unflatten(-1, (-1, self.width)) for part in qkv.split(sizes, dim=-1))
        if rotary is not None:
            query, key = rotary(query), rotary(key)
        hidden_SBD = hidden_SBD + self.output(self.attention(query, key, value))
        return hidden_SBD + self.feed_forward(hidden_SBD)
