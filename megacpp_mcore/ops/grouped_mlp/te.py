"""Routed experts by Transformer Engine: its permutation, and GroupedLinear with the experts' matrices instead of its own.

Used only when requested by name: the host waits for each expert's row count, and float32 is multiplied in TF32.
Intermediate results are rounded to the dtype of x. In an FP8 scope operands are quantised, and each expert's rows padded.

Legend: T tokens, E experts, R rows (each token once for each of its experts, and padding), D model width, F expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.grouped_mlp.reference import (
    ACTIVATIONS,
    check_activation,
    check_counts,
    check_routed,
    check_rows,
    check_topk,
)
from megacpp_mcore.ops.main_grad import MainGrad, added_to
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.te_imports import ALIGNMENT


def grouped_mlp(
    x_RD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_R: torch.Tensor | None,
    *,
    activation: str = "gelu",
    main_grads: Sequence[MainGrad | None] = (None, None),
) -> torch.Tensor:
    """Compute as the reference does; in an FP8 scope each expert's row count must be a multiple of 16.

    Raises:
        ModelError: as in the reference, or the scope uses delayed scaling, which keeps amax history in the module: here
            layers of equal sizes share one module.
        BackendError: the feature is off, or Transformer Engine is not installed.
    """
    _require("experts")
    check_activation(activation)
    check_rows(x_RD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_R)
    w1_EFD, w2_EDF = map(added_to, (w1_EFD, w2_EDF), main_grads)
    counts_E = tokens_per_expert_E.to("cpu", torch.int64)
    check_counts(counts_E.tolist(), x_RD.shape[0])
    state = te_imports.entry("FP8GlobalStateManager")
    if state.is_fp8_enabled() and state.get_fp8_recipe().delayed():
        raise ModelError(
            "experts by Transformer Engine are in an FP8 scope with delayed scaling; layers of equal sizes would share one "
            "amax history: use block or current scaling, or another backend of the experts"
        )
    h_RF = ACTIVATIONS[activation](_product(x_RD, counts_E, w1_EFD))
    if probs_R is not None:
        h_RF = (h_RF * probs_R[:, None]).to(x_RD.dtype)
    return _product(h_RF, counts_E, w2_EDF)


def routed_mlp(
    x_TD: torch.Tensor,
    routing_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    topk: int,
    activation: str = "gelu",
    main_grads: Sequence[MainGrad | None] = (None, None),
) -> torch.Tensor:
    """Compute the reference's :func:`routed_mlp`.

    Raises:
        ModelError: as in the reference, or there are no tokens.
        BackendError: a feature is off, or Transformer Engine is not installed.
    """
    _require("experts", "permute")
    check_routed(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, activation)
    check_topk(routing_TE, topk)
    if not x_TD.shape[0]:
        raise ModelError("x has no tokens, but Transformer Engine's permutation needs at least one; use the reference")
    counts_E, mask_TE, offsets = routing_TE.sum(0).cpu(), routing_TE.to(torch.int32), None
    if te_imports.entry("FP8GlobalStateManager").is_fp8_enabled():
        permute = te_imports.entry("moe_permute_and_pad_with_probs")
        x_RD, probs_R, row_map, offsets, counts_E = permute(x_TD, probs_TE, mask_TE, counts_E, ALIGNMENT)
    else:
        permute = te_imports.entry("moe_permute_with_probs")
        x_RD, probs_R, row_map = permute(x_TD, probs_TE, mask_TE, x_TD.shape[0] * topk)
    y_RD = grouped_mlp(x_RD, counts_E, w1_EFD, w2_EDF, probs_R, activation=activation, main_grads=main_grads)
    y_TD: torch.Tensor = te_imports.entry("moe_unpermute")(y_RD, row_map, restore_shape=x_TD.shape, pad_offsets=offsets)
    return y_TD


def _require(*features: str) -> None:
    if not (probe := te_imports.feature(*features)).ok:
        raise BackendError(f"experts by Transformer Engine cannot be used: {probe.reason}")


def _product(x_RI: torch.Tensor, counts_E: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
    linear = _module(*weight_EOI.shape, weight_EOI.dtype)
    weights = {f"weight{number}": weight for number, weight in enumerate(weight_EOI.unbind())}
    output: torch.Tensor = torch.func.functional_call(linear, weights, (x_RI, counts_E))
    return output


@functools.cache
def _module(experts: int, outputs: int, width: int, dtype: torch.dtype) -> Any:
    """Create a GroupedLinear of these sizes, with its own weights on the meta device."""
    return te_imports.entry("GroupedLinear")(experts, width, outputs, bias=False, params_dtype=dtype, device="meta")
