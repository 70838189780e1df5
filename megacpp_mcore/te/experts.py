"""Routed experts by Transformer Engine's GroupedLinear: sorted rows, or tokens with their routing map.

Shape legend: N tokens, T rows (each token once for every expert it is routed to), E experts of this rank, D hidden, F width of
an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.te import imports
from megacpp_mcore.te.permute import permute, unpermute

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""The function between the two products, by its name in the model; ``gelu`` is the erf form."""


def grouped_mlp(
    x_TD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_T: torch.Tensor | None,
    *,
    activation: str = "gelu",
) -> torch.Tensor:
    """Each expert's two-matrix MLP on its run of rows: ``y = (prob · act(x w1ᵀ)) w2ᵀ``.

    In an FP8 scope the products take quantised operands; every expert's rows are then a multiple of 16
    (:func:`routed_experts` pads them). The hidden activation is rounded to the dtype of x. The host reads the counts.

    Args:
        x_TD: rows of expert 0 first, then those of expert 1, and so on.
        tokens_per_expert_E: integers, zeros allowed, sum T.
        w1_EFD, w2_EDF: matrices, [out, in] each.
        probs_T: routing probability of each row, or None for 1.
        activation: of :data:`ACTIVATIONS`.

    Returns:
        y_TD in the dtype of x.

    Raises:
        ModelError: the shapes, the counts or the activation are not as described.
        BackendError: the feature is off, or Transformer Engine is not there.
    """
    if not (found := imports.feature("experts")).ok:
        raise BackendError(f"experts by Transformer Engine cannot be used: {found.reason}")
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    x, w1, w2 = tuple(x_TD.shape), tuple(w1_EFD.shape), tuple(w2_EDF.shape)
    counts_E = tokens_per_expert_E.to("cpu", torch.int64)
    if len(x) != 2 or len(w1) != 3 or w2 != (w1[0], w1[2], w1[1]) or w1[2] != x[1]:
        raise ModelError(f"x, w1, w2 have shapes {x}, {w1}, {w2}; expected [T, D], [E, F, D], [E, D, F]")
    if tuple(counts_E.shape) != w1[:1] or int(counts_E.sum()) != x[0]:
        raise ModelError(f"rows of the experts are {counts_E.tolist()}; expected {w1[0]} numbers that sum to {x[0]}")
    hidden_TF = ACTIVATIONS[activation](_product(x_TD, counts_E, w1_EFD))
    if probs_T is not None:
        hidden_TF = (hidden_TF * probs_T[:, None]).to(x_TD.dtype)
    return _product(hidden_TF, counts_E, w2_EDF)


def routed_experts(
    hidden_ND: torch.Tensor,
    routing_map_NE: torch.Tensor,
    probs_NE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    activation: str = "gelu",
    align: int | None = None,
) -> torch.Tensor:
    """Tokens to their experts and back: permutation, :func:`grouped_mlp`, sum over the experts of each token.

    Args:
        hidden_ND, routing_map_NE, probs_NE, align: as for :func:`megacpp_mcore.te.permute.permute`.
        w1_EFD, w2_EDF, activation: as for :func:`grouped_mlp`.
    """
    there = permute(hidden_ND, routing_map_NE, probs_NE, align=align)
    output_TD = grouped_mlp(there.rows_TD, there.counts_E, w1_EFD, w2_EDF, there.probs_T, activation=activation)
    return unpermute(output_TD, there)


def _product(x_TI: torch.Tensor, counts_E: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
    """``x wᵀ`` by expert, with ``weight_EOI`` in the place of the module's own weights."""
    linear = _module(*weight_EOI.shape, weight_EOI.dtype)
    weights = {f"weight{number}": weight for number, weight in enumerate(weight_EOI.unbind())}
    output: torch.Tensor = torch.func.functional_call(linear, weights, (x_TI, counts_E))
    return output


@functools.cache
def _module(experts: int, outputs: int, width: int, dtype: torch.dtype) -> Any:
    """GroupedLinear of these sizes, whose own weights have no memory."""
    return imports.entry("GroupedLinear")(experts, width, outputs, bias=False, params_dtype=dtype, device="meta")
