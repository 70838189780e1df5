"""Tokens to expert order and back by Transformer Engine's permutation kernels, jagged or padded.

Shape legend: N tokens, E experts, T rows (each token once for every expert it is routed to, and padding), D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.te import imports


@dataclass(frozen=True)
class Permuted:
    """Rows in expert order, and what it takes to bring them back.

    Attributes:
        rows_TD: those of expert 0 first, then those of expert 1, and so on; padding is zero.
        probs_T: the routing probability of each row, 0 for padding.
        counts_E: rows of each expert, padding included; int64 on the host.
        row_map, pad_offsets, shape: for :func:`unpermute`.
    """

    rows_TD: torch.Tensor
    probs_T: torch.Tensor
    counts_E: torch.Tensor
    row_map: torch.Tensor
    pad_offsets: torch.Tensor | None
    shape: torch.Size


def permute(
    hidden_ND: torch.Tensor, routing_map_NE: torch.Tensor, probs_NE: torch.Tensor, *, align: int | None = None
) -> Permuted:
    """Bring tokens to expert order; the host waits once, for the rows of each expert.

    Args:
        hidden_ND: tokens.
        routing_map_NE: bool, which experts a token goes to.
        probs_NE: routing probabilities, float32 as the router gives them.
        align: what the rows of each expert are padded to a multiple of (16 for FP8 products); None: jagged.

    Raises:
        ModelError: the shapes do not fit, no token goes anywhere, or ``align`` is below 1.
        BackendError: the feature is off, or Transformer Engine is not there.
    """
    _require()
    tokens, experts = routing_map_NE.shape if routing_map_NE.dim() == 2 else (-1, -1)
    if hidden_ND.dim() != 2 or hidden_ND.shape[0] != tokens or tuple(probs_NE.shape) != (tokens, experts):
        raise ModelError(
            f"hidden, routing map and probabilities have shapes {tuple(hidden_ND.shape)}, {tuple(routing_map_NE.shape)}, "
            f"{tuple(probs_NE.shape)}; expected [N, D], [N, E], [N, E]"
        )
    if align is not None and align < 1:
        raise ModelError(f"rows are to be padded to a multiple of {align}; expected 1 or more, or None")
    counts_E = routing_map_NE.sum(0).cpu()
    if not (total := int(counts_E.sum())):
        raise ModelError(f"none of {tokens} tokens goes to an expert; there is nothing to permute")
    mask_NE = routing_map_NE.to(torch.int32)
    if align is None:
        rows_TD, probs_T, row_map = imports.entry("moe_permute_with_probs")(hidden_ND, probs_NE, mask_NE, total)
        return Permuted(rows_TD, probs_T, counts_E, row_map, None, hidden_ND.shape)
    rows_TD, probs_T, row_map, offsets, padded_E = imports.entry("moe_permute_and_pad_with_probs")(
        hidden_ND, probs_NE, mask_NE, counts_E, align
    )
    return Permuted(rows_TD, probs_T, padded_E.cpu(), row_map, offsets, hidden_ND.shape)


def unpermute(rows_TD: torch.Tensor, permuted: Permuted) -> torch.Tensor:
    """Sum the rows of each token, in the order that it had: ``[T, D] -> [N, D]``. Padding is left out.

    Raises:
        BackendError: the feature is off, or Transformer Engine is not there.
    """
    _require()
    output: torch.Tensor = imports.entry("moe_unpermute")(
        rows_TD, permuted.row_map, restore_shape=permuted.shape, pad_offsets=permuted.pad_offsets
    )
    return output


def _require() -> None:
    if not (found := imports.feature("permute")).ok:
        raise BackendError(f"permutation by Transformer Engine cannot be used: {found.reason}")
