"""Routed experts on a GPU: PyTorch's grouped products, and Triton kernels for all that lies between them.

:func:`grouped_mlp` and :func:`routed_mlp` do what the reference's functions of these names do. The host waits for nothing and
knows no count; a CUDA graph can hold them. Kept for the backward pass: the inputs, the first product, and two numbers a row.
The activation is computed a second time there, and so is each token's copy for each of its experts.

Legend: T tokens, E experts, K experts of each token, R rows (T × K), D model width, F expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import require_float
from megacpp_mcore.ops.grouped_mlp import kernels
from megacpp_mcore.ops.grouped_mlp.reference import (
    check_activation,
    check_counts,
    check_routing,
    check_rows,
    check_weights,
)

DTYPES = (torch.bfloat16,)
"""Of tokens and weights. PyTorch's grouped product has a kernel for it alone; in other dtypes it loops over counts, for which
the host waits."""

MULTIPLE = 8
"""Of widths: rows of a grouped product begin at multiples of 16 bytes."""

TILE = 4096
"""Elements that a program has at a time."""

WARPS = 4


class Places(NamedTuple):
    """Which rows are whose: where each expert's end, int32; the rows of each token, int32; each row's probability, float32."""

    end_E: torch.Tensor
    row_TK: torch.Tensor
    prob_R: torch.Tensor


def grouped_mlp(
    x_RD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_R: torch.Tensor | None,
    *,
    activation: str = "gelu",
) -> torch.Tensor:
    """Do what the reference of this name does, with its arguments, in bfloat16.

    Products are rounded to bfloat16, what they sum is not.

    Args:
        x_RD, w1_EFD, w2_EDF: as there; what is not contiguous is copied.
        tokens_per_expert_E: counts that lie on the host are checked; those on the device are not read there, so that rows
            beyond their sum have undefined results. A CUDA graph needs them on the device.
        probs_R, activation: as there.

    Raises:
        ModelError: as there, but for counts on the device; or dtypes that are not of :data:`DTYPES`, or widths that are no
            multiples of :data:`MULTIPLE`.
    """
    check_activation(activation)
    check_rows(x_RD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_R)
    _check_kernels(x_RD, w1_EFD, w2_EDF)
    if tokens_per_expert_E.device.type == "cpu":
        check_counts(tokens_per_expert_E.tolist(), x_RD.shape[0])
    end_E = tokens_per_expert_E.cumsum(0, dtype=torch.int32).to(x_RD.device, non_blocking=True)
    y_RD: torch.Tensor = GroupedMLP.apply(x_RD, end_E, w1_EFD, w2_EDF, probs_R, activation)
    return y_RD


def routed_mlp(
    x_TD: torch.Tensor,
    routing_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    topk: int,
    activation: str = "gelu",
) -> torch.Tensor:
    """Do what the reference of this name does, with its arguments, in bfloat16.

    Products are rounded to bfloat16, sums over a token's experts once.

    Args:
        x_TD, probs_TE, w1_EFD, w2_EDF, topk, activation: as there; what is not contiguous is copied.
        routing_TE: as there, but that no value is read on the host: a token without exactly ``topk`` experts has NaN as output
            and as gradient, and so may others then.

    Raises:
        ModelError: as there, but for a token's number of experts; or as :func:`grouped_mlp` does.
    """
    check_activation(activation)
    require_float(x_TD=x_TD, probs_TE=probs_TE, w1_EFD=w1_EFD, w2_EDF=w2_EDF)
    check_weights(x_TD, w1_EFD, w2_EDF)
    check_routing(x_TD, routing_TE, probs_TE, w1_EFD, topk)
    _check_kernels(x_TD, w1_EFD, w2_EDF)
    y_TD: torch.Tensor = RoutedMLP.apply(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, activation)
    return y_TD


def _check_kernels(x: torch.Tensor, w1_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> None:
    dtypes = [x.dtype, w1_EFD.dtype, w2_EDF.dtype]
    if len(set(dtypes)) > 1 or x.dtype not in DTYPES:
        raise ModelError(
            f"the experts' kernels were given {', '.join(map(str, dtypes))} as x, w1 and w2; they take one of {DTYPES}, all "
            "three alike: use the reference"
        )
    if any(width % MULTIPLE for width in w1_EFD.shape[1:]):
        raise ModelError(
            f"the experts' kernels were given widths F, D = {list(w1_EFD.shape[1:])}; they take multiples of {MULTIPLE}: use "
            "the reference"
        )


class GroupedMLP(torch.autograd.Function):
    """Rows that are sorted already."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        end_E: torch.Tensor,
        w1_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        probs_R: torch.Tensor | None,
        activation: str,
    ) -> torch.Tensor:
        """The output."""
        x_RD, w1_EFD, w2_EDF = x_RD.contiguous(), w1_EFD.contiguous(), w2_EDF.contiguous()
        prob_R = None if probs_R is None else probs_R.contiguous()
        h_RF = product(x_RD, w1_EFD.transpose(1, 2), end_E)
        ctx.save_for_backward(x_RD, end_E, w1_EFD, w2_EDF, prob_R, h_RF)
        ctx.activation = activation
        return product(activated(h_RF, prob_R, activation), w2_EDF.transpose(1, 2), end_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, w1, w2 and the probabilities."""
        x_RD, end_E, w1_EFD, w2_EDF, prob_R, h_RF = ctx.saved_tensors
        dy_RD = dy_RD.contiguous()
        da_RF = product(dy_RD, w2_EDF, end_E)
        a_RF, dh_RF, dprob_R = activated_backward(h_RF, prob_R, da_RF, ctx.activation)
        dw2_EDF = product(dy_RD.t(), a_RF, end_E) if ctx.needs_input_grad[3] else None
        dx_RD = product(dh_RF, w1_EFD, end_E) if ctx.needs_input_grad[0] else None
        dw1_EFD = product(dh_RF.t(), x_RD, end_E) if ctx.needs_input_grad[2] else None
        return dx_RD, None, dw1_EFD, dw2_EDF, dprob_R, None


class RoutedMLP(torch.autograd.Function):
    """Tokens, with the copies for their experts and the sums over them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        routing_TE: torch.Tensor,
        probs_TE: torch.Tensor,
        w1_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        topk: int,
        activation: str,
    ) -> torch.Tensor:
        """The output."""
        w1_EFD, w2_EDF, routing_TE = w1_EFD.contiguous(), w2_EDF.contiguous(), routing_TE.contiguous()
        places = placed(routing_TE, probs_TE, topk)
        h_RF = product(rows_of(x_TD, places.row_TK), w1_EFD.transpose(1, 2), places.end_E)
        ctx.save_for_backward(x_TD, routing_TE, w1_EFD, w2_EDF, h_RF, *places)
        ctx.activation, ctx.probs_dtype = activation, probs_TE.dtype
        y_RD = product(activated(h_RF, places.prob_R, activation), w2_EDF.transpose(1, 2), places.end_E)
        return summed(y_RD, places.row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, the probabilities, w1 and w2."""
        x_TD, routing_TE, w1_EFD, w2_EDF, h_RF, *maps = ctx.saved_tensors
        end_E, row_TK, prob_R = places = Places(*maps)
        dy_RD = rows_of(dy_TD, row_TK)
        da_RF = product(dy_RD, w2_EDF, end_E)
        a_RF, dh_RF, dprob_R = activated_backward(h_RF, prob_R, da_RF, ctx.activation)
        dw2_EDF = product(dy_RD.t(), a_RF, end_E) if ctx.needs_input_grad[4] else None
        del dy_RD, da_RF, a_RF  # their memory is that of what follows
        dprobs_TE = torch.empty_like(routing_TE, dtype=ctx.probs_dtype)
        dx_TD = summed(product(dh_RF, w1_EFD, end_E), row_TK, (routing_TE, dprob_R, dprobs_TE))
        dw1_EFD = product(dh_RF.t(), rows_of(x_TD, places.row_TK), end_E) if ctx.needs_input_grad[3] else None
        return dx_TD, None, dprobs_TE, dw1_EFD, dw2_EDF, None, None


def product(left: torch.Tensor, right: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows [R, ·] times its matrix [E, ·, ·], or where both have R, the sum over its rows [E, ·, ·]."""
    if left.shape[-1] == 0:  # refused as strides of no alignment
        return left.new_zeros(end_E.shape[0], left.shape[0], right.shape[1])
    return torch._grouped_mm(left, right, offs=end_E)


def placed(routing_TE: torch.Tensor, probs_TE: torch.Tensor, topk: int) -> Places:
    """The rows of every token."""
    (T, E), device = routing_TE.shape, routing_TE.device
    experts = triton.next_power_of_2(E)
    tokens = max(16, min(64, TILE // experts))
    blocks = triton.cdiv(T, tokens)
    places = Places(
        torch.zeros(E, dtype=torch.int32, device=device) if T == 0 else routing_TE.new_empty(E, dtype=torch.int32),
        routing_TE.new_empty(T, topk, dtype=torch.int32),
        routing_TE.new_empty(T * topk, dtype=torch.float32),
    )
    if T:
        count_BE = routing_TE.new_empty(blocks, E, dtype=torch.int32)
        shape = {"TOKENS": tokens, "EXPERTS": experts, "num_warps": WARPS}
        kernels.count[(blocks,)](routing_TE, count_BE, T, E, **shape)
        kernels.place[(blocks,)](
            routing_TE, probs_TE.contiguous(), count_BE, *places, T, E, blocks, K=topk, SLOTS=triton.next_power_of_2(topk),
            SPAN=tokens, **shape,
        )  # fmt: skip
    return places


def rows_of(x_TD: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """Each token at each of its rows."""
    (T, D), K = x_TD.shape, row_TK.shape[1]
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    x_RD = x_TD.new_empty(T * K, D)
    if T:
        kernels.spread[(T,)](
            x_TD, row_TK, x_RD, x_TD.stride(0), D=D, K=K, BLOCK=min(TILE, triton.next_power_of_2(D)), num_warps=WARPS
        )
    return x_RD


def summed(
    y_RD: torch.Tensor,
    row_TK: torch.Tensor,
    probabilities: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> torch.Tensor:
    """Each token's sum over its rows; with routing and the gradients of the rows' probabilities, those of all are written."""
    D, (T, K) = y_RD.shape[1], row_TK.shape
    y_TD, E = y_RD.new_empty(T, D), 1 if probabilities[0] is None else probabilities[0].shape[1]
    if T:
        kernels.combine[(T,)](
            y_RD, row_TK, y_TD, *probabilities, E, D=D, K=K, BLOCK=min(TILE, triton.next_power_of_2(D)),
            EXPERTS=triton.next_power_of_2(E), num_warps=WARPS,
        )  # fmt: skip
    return y_TD


def _tile(activation: str, F: int) -> dict[str, Any]:
    block = min(1024, triton.next_power_of_2(F))
    return {"F": F, "TANH": activation == "gelu_tanh", "ROWS": TILE // block, "BLOCK": block, "num_warps": WARPS}


def activated(h_RF: torch.Tensor, prob_R: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The second product's left side."""
    (R, F), a_RF = h_RF.shape, torch.empty_like(h_RF)
    tile = _tile(activation, F)
    if R:
        kernels.activate[(triton.cdiv(R, tile["ROWS"]),)](h_RF, prob_R, a_RF, R, **tile)
    return a_RF


def activated_backward(
    h_RF: torch.Tensor, prob_R: torch.Tensor | None, da_RF: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The second product's left side; the gradients of the first product, which replaces ``da_RF``, and of probabilities."""
    (R, F), a_RF = h_RF.shape, torch.empty_like(h_RF)
    dprob_R = None if prob_R is None else torch.empty_like(prob_R)
    tile = _tile(activation, F)
    if R:
        kernels.activate_backward[(triton.cdiv(R, tile["ROWS"]),)](h_RF, prob_R, da_RF, a_RF, da_RF, dprob_R, R, **tile)
    return a_RF, da_RF, dprob_R
