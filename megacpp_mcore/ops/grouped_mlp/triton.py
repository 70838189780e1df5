"""Routed experts on a GPU by Triton kernels, and by PyTorch's grouped product where there is nothing to fuse.

:func:`grouped_mlp` and :func:`routed_mlp` match the reference's functions of the same names. The host never waits for
the device or reads its counts, so a CUDA graph can capture them. Saved for backward: the inputs, the first product, and up to
three numbers per row; the activation is recomputed. Tokens are never copied once per expert.

Legend: T tokens, E experts, K experts per token (maximum), R rows (T × K), D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp import kernels
from megacpp_mcore.ops.grouped_mlp.reference import check_activation, check_counts, check_routed, check_rows
from megacpp_mcore.ops.main_grad import MainGrad, check_main_grad
from megacpp_mcore.ops.triton_launch import launch, options

DTYPES = (torch.bfloat16,)
"""Dtypes of tokens and weights. PyTorch's grouped product has a kernel only for this one; for others it loops over the counts,
which synchronises the host."""

EXPERTS = 256
"""Maximum number of experts: each program holds one number per expert."""

FORWARD: dict[str, int] = {"BM": 128, "BN": 256, "BK": 64, "SPLIT": 4, "STAGES": 4, "num_warps": 8}
BACKWARD: dict[str, int] = {"BM": 128, "BN": 128, "BK": 64, "SPLIT": 8, "STAGES": 3, "num_warps": 4}
WEIGHTS: dict[str, int] = {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}
"""Launch options of the products: among the fastest on an H200 at NAM56R's widths, and checked against float64 there.

The row tile sizes (BM, in WEIGHTS BK) are multiples of one another, in this order: each product reads only those unused rows
after the last expert's that the previous product has written.
"""


class Rows(NamedTuple):
    """Assignment of rows to experts and tokens; int32, except for the float32 probabilities.

    Attributes:
        end_E: where each expert's rows end.
        row_TK: the rows of each token; None if the input is rows instead of tokens.
        token_R: the token of each row; None in the same case.
        prob_R: the probability of each row; None for 1.
    """

    end_E: torch.Tensor
    row_TK: torch.Tensor | None
    token_R: torch.Tensor | None
    prob_R: torch.Tensor | None


class Products(NamedTuple):
    """The products of one backend or precision, in execution order.

    Attributes:
        multiple: widths must be a multiple of this.
        weights: (w1, w2) -> the tuple that the other functions take as ``weights``.
        hidden: (x, rows, weights, activation) -> tensors saved for backward, and the left operand of the second product.
        output: (that operand, weights, rows) -> the second product.
        hidden_gradient: (gradient of the second product, rows, weights, what ``hidden`` saved, activation) -> the activation,
            the gradient of the first product, partial gradients of the probabilities, and the left operand of
            ``input_gradient``.
        input_gradient: (that operand, weights, rows) -> the gradient of the rows.
        weight_gradient: as :func:`weight_gradient`, of x and the gradient of the first product (for w1), or of the output's
            gradient and the activation (for w2), in the form in which ``hidden_gradient`` returns them.
        check: raises if the device of x is not supported.
    """

    multiple: int
    weights: Callable[[torch.Tensor, torch.Tensor], Any]
    hidden: Callable[..., tuple[Sequence[torch.Tensor], Any]]
    output: Callable[[Any, Any, Rows], torch.Tensor]
    hidden_gradient: Callable[..., tuple[Any, Any, torch.Tensor, Any]]
    input_gradient: Callable[[Any, Any, Rows], torch.Tensor]
    weight_gradient: Callable[..., torch.Tensor]
    check: Callable[[torch.Tensor], None] = lambda x: None


class Call(NamedTuple):
    """Non-differentiable arguments: the activation, the products, and where the gradients of w1 and w2 are accumulated."""

    activation: str
    products: Products
    main_grads: Sequence[MainGrad | None]


def _check_kernels(
    x: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    products: Products,
    main_grads: Sequence[MainGrad | None],
) -> None:
    products.check(x)
    for weight, main_grad in zip((w1_EFD, w2_EDF), main_grads, strict=True):
        check_main_grad(weight, main_grad)
    dtypes = [x.dtype, w1_EFD.dtype, w2_EDF.dtype]
    if len(set(dtypes)) > 1 or x.dtype not in DTYPES:
        raise ModelError(
            f"the experts' kernels got {', '.join(map(str, dtypes))} as x, w1 and w2; they take one of {DTYPES}, the same "
            "for all three: use the reference"
        )
    multiple = products.multiple
    if any(width % multiple for width in w1_EFD.shape[1:]):
        raise ModelError(
            f"the experts' kernels got widths F, D = {list(w1_EFD.shape[1:])}; they take multiples of {multiple}: use "
            "the reference"
        )
    if w1_EFD.shape[0] > EXPERTS:
        raise ModelError(f"the experts' kernels got {w1_EFD.shape[0]} experts; they take up to {EXPERTS}: use the reference")


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is contiguous and 16-byte aligned, as tile copies require; else a copy."""
    fits = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


class GroupedMLP(torch.autograd.Function):
    """Experts over rows that are already sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        end_E: torch.Tensor,
        w1_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        probs_R: torch.Tensor | None,
        call: Call,
        weights: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Compute the output; ``weights`` are those of the products."""
        x_RD, prob_R = packed(x_RD), None if probs_R is None else probs_R.contiguous()
        rows = Rows(end_E, None, None, prob_R)
        saved, left = call.products.hidden(x_RD, rows, weights, call.activation)
        ctx.save_for_backward(x_RD, end_E, prob_R, *weights, *saved)
        ctx.call, ctx.num_weights = call, len(weights)
        return call.products.output(left, weights, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of x, w1, w2 and the probabilities."""
        x_RD, end_E, prob_R, *others = ctx.saved_tensors
        weights, saved = others[: ctx.num_weights], others[ctx.num_weights :]
        dy_RD, rows, products = packed(dy_RD), Rows(end_E, None, None, prob_R), ctx.call.products
        a, dh, dprob_PR, left = products.hidden_gradient(dy_RD, rows, weights, saved, ctx.call.activation)
        dw2_EDF = _of_weight(ctx.call, dy_RD, rows, a, tokens_left=True) if ctx.needs_input_grad[3] else None
        dx_RD = products.input_gradient(left, weights, rows) if ctx.needs_input_grad[0] else None
        dw1_EFD = _of_weight(ctx.call, x_RD, rows, dh, tokens_left=False) if ctx.needs_input_grad[2] else None
        dprobs_R = None if prob_R is None else dprob_PR.sum(0).to(prob_R.dtype)
        return dx_RD, None, dw1_EFD, dw2_EDF, dprobs_R, None, None


class RoutedMLP(torch.autograd.Function):
    """Experts over tokens: placement in rows, and the sums over each token's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        routing_TE: torch.Tensor,
        probs_TE: torch.Tensor,
        w1_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        topk: int,
        exact: bool,
        call: Call,
        weights: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Compute the output; ``weights`` are those of the products."""
        x_TD, routing_TE = packed(x_TD), routing_TE.contiguous()
        rows, row_TK = placed(routing_TE, probs_TE, topk, exact)
        saved, left = call.products.hidden(x_TD, rows, weights, call.activation)
        ctx.save_for_backward(x_TD, routing_TE, *rows, *weights, *saved)
        ctx.call, ctx.num_weights, ctx.probs_dtype = call, len(weights), probs_TE.dtype
        ctx.exact = exact
        y_RD = call.products.output(left, weights, rows)
        return summed(y_RD, row_TK, exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of x, the probabilities, w1 and w2."""
        x_TD, routing_TE, end_E, row_TK, token_R, prob_R, *others = ctx.saved_tensors
        weights, saved = others[: ctx.num_weights], others[ctx.num_weights :]
        dy_TD, rows, products = packed(dy_TD), Rows(end_E, row_TK, token_R, prob_R), ctx.call.products
        a, dh, dprob_PR, left = products.hidden_gradient(dy_TD, rows, weights, saved, ctx.call.activation)
        dw2_EDF = _of_weight(ctx.call, dy_TD, rows, a, tokens_left=True) if ctx.needs_input_grad[4] else None
        del a  # free its memory for what follows
        dprobs_TE = torch.empty_like(routing_TE, dtype=ctx.probs_dtype)
        dx_RD = products.input_gradient(left, weights, rows)
        dx_TD = summed(dx_RD, row_TK, ctx.exact, (routing_TE, dprob_PR, dprobs_TE))
        del dx_RD
        dw1_EFD = _of_weight(ctx.call, x_TD, rows, dh, tokens_left=False) if ctx.needs_input_grad[3] else None
        return dx_TD, None, dprobs_TE, dw1_EFD, dw2_EDF, None, None, None, None


def _of_weight(call: Call, x: torch.Tensor, rows: Rows, h: Any, *, tokens_left: bool) -> torch.Tensor | None:
    """Return the gradient of w2 (tokens on the left) or of w1; if it is added to a buffer, the buffer's placeholder."""
    main_grad = call.main_grads[tokens_left]
    total = None if main_grad is None else main_grad.buffer
    gradient = call.products.weight_gradient(x, rows, h, tokens_left=tokens_left, total=total)
    return gradient if main_grad is None else main_grad.placeholder()


def placed(routing_TE: torch.Tensor, probs_TE: torch.Tensor, topk: int, exact: bool) -> tuple[Rows, torch.Tensor]:
    """Assign rows to experts and tokens; also return ``row_TK`` separately."""
    T, E = routing_TE.shape
    experts = triton.next_power_of_2(E)
    tokens = max(16, min(64, 4096 // experts))
    blocks = triton.cdiv(T, tokens)
    end_E, row_TK, token_R = (routing_TE.new_empty(*shape, dtype=torch.int32) for shape in ((E,), (T, topk), (T * topk,)))
    rows = Rows(end_E, row_TK, token_R, token_R.new_empty(T * topk, dtype=torch.float32))
    if not T:
        end_E.zero_()
        return rows, row_TK
    count_BE = routing_TE.new_empty(blocks, E, dtype=torch.int32)
    shape = {"TOKENS": tokens, "EXPERTS": experts, "num_warps": 4}
    launch(kernels.count, (blocks,), routing_TE, count_BE, T, E, **shape)
    launch(
        kernels.place, (blocks,), routing_TE, probs_TE.contiguous(), count_BE, *rows, T, E, blocks, K=topk,
        SLOTS=triton.next_power_of_2(topk), SPAN=tokens, EXACT=exact, **options("place", shape),
    )  # fmt: skip
    return rows, row_TK


@torch.no_grad()
def _weights(w1_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed(w1_EFD), packed(w2_EDF)


def _hidden(
    x: torch.Tensor, rows: Rows, weights: Sequence[torch.Tensor], activation: str
) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    w1_EFD, _ = weights
    (E, F, D), R = w1_EFD.shape, (x if rows.token_R is None else rows.token_R).shape[0]
    h_RF, a_RF = x.new_empty(R, F), x.new_empty(R, F)
    if R:
        w_tiles = TensorDescriptor.from_tensor(w1_EFD.view(E * F, D), [FORWARD["BN"], FORWARD["BK"]])
        outputs = h_RF, a_RF, None, None
        _product(x, rows, w_tiles, outputs, activation, FORWARD, MODE=kernels.ACTIVATE.value, OUTER_FIRST=True)
    return (h_RF,), a_RF


def _hidden_gradient(
    dy: torch.Tensor, rows: Rows, weights: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (_, w2_EDF), (h_RF,) = weights, saved
    (E, D, F), R = w2_EDF.shape, h_RF.shape[0]
    a_RF, dh_RF = torch.empty_like(h_RF), torch.empty_like(h_RF)
    dprob_PR = h_RF.new_empty(triton.cdiv(F, BACKWARD["BN"]), R, dtype=torch.float32)
    if R:
        w_tiles = TensorDescriptor.from_tensor(w2_EDF.view(E * D, F), [BACKWARD["BK"], BACKWARD["BN"]])
        outputs = h_RF, a_RF, dh_RF, dprob_PR
        _product(dy, rows, w_tiles, outputs, activation, BACKWARD, MODE=kernels.BACKWARD.value, OUTER_FIRST=False)
    return a_RF, dh_RF, dprob_PR, dh_RF


def _product(
    x: torch.Tensor,
    rows: Rows,
    w_tiles: TensorDescriptor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    activation: str,
    tile: dict[str, int],
    **constants: Any,
) -> None:
    (R, F), E = outputs[0].shape, rows.end_E.shape[0]
    x_tiles = TensorDescriptor.from_tensor(x, [tile["BM"], tile["BK"]]) if rows.token_R is None else None
    launch(
        kernels.product, ((triton.cdiv(R, tile["BM"]) + E) * triton.cdiv(F, tile["BN"]),), x, x_tiles, w_tiles, rows.token_R,
        rows.end_E, rows.prob_R, *outputs, E, R, INNER=x.shape[1], OUTER=F, TANH=activation == "gelu_tanh",
        EXPERTS=triton.next_power_of_2(E), **constants, **tile,
    )  # fmt: skip


def _output(a_RF: torch.Tensor, weights: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    return torch._grouped_mm(a_RF, weights[1].transpose(1, 2), offs=rows.end_E)


def _input_gradient(dh_RF: torch.Tensor, weights: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    return torch._grouped_mm(dh_RF, weights[0], offs=rows.end_E)


def weight_gradient(
    x: torch.Tensor, rows: Rows, h_RF: torch.Tensor, *, tokens_left: bool, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute each expert's ``xᵀ h`` [E, D, F] over its rows (tokens gathered), or ``hᵀ x`` [E, F, D] unless ``tokens_left``.

    With ``total`` the result is added to it; without being rounded first, if ``total`` is float32.
    """
    E, (R, F), D = rows.end_E.shape[0], h_RF.shape, x.shape[1]
    M, N = (D, F) if tokens_left else (F, D)
    if not R:
        return x.new_zeros(E, M, N) if total is None else total
    adds = total is not None and total.dtype == torch.float32
    dw_EMN = total if total is not None and adds else x.new_empty(E, M, N)
    h_tiles = TensorDescriptor.from_tensor(h_RF, [WEIGHTS["BK"], WEIGHTS["BN" if tokens_left else "BM"]])
    launch(
        kernels.weight_gradient, (triton.cdiv(M, WEIGHTS["BM"]) * triton.cdiv(N, WEIGHTS["BN"]), E), x, rows.token_R, h_tiles,
        rows.end_E, dw_EMN, M=M, N=N, TOKENS_LEFT=tokens_left, ADD=adds, **WEIGHTS,
    )  # fmt: skip
    return dw_EMN if total is None or adds else total.add_(dw_EMN)


BF16 = Products(8, _weights, _hidden, _output, _hidden_gradient, _input_gradient, weight_gradient)


def summed(
    y_RD: torch.Tensor,
    row_TK: torch.Tensor,
    exact: bool,
    probabilities: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> torch.Tensor:
    """Sum each token's rows; given routing and partial sums, also write the gradients of all probabilities."""
    (R, D), (T, K), (routing_TE, dprob_PR, _) = y_RD.shape, row_TK.shape, probabilities
    y_TD, E = y_RD.new_empty(T, D), 1 if routing_TE is None else routing_TE.shape[1]
    if T:
        launch(
            kernels.combine, (T,), y_RD, row_TK, y_TD, *probabilities, E, R, D=D, K=K,
            P=0 if dprob_PR is None else dprob_PR.shape[0], BLOCK=min(4096, triton.next_power_of_2(D)),
            EXPERTS=triton.next_power_of_2(E), EXACT=exact, num_warps=4,
        )  # fmt: skip
    return y_TD


def grouped_mlp(
    x_RD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_R: torch.Tensor | None,
    *,
    activation: str = "gelu",
    main_grads: Sequence[MainGrad | None] = (None, None),
    products: Products = BF16,
) -> torch.Tensor:
    """Compute the reference's :func:`grouped_mlp` in bfloat16.

    Products are rounded to bfloat16; their accumulators are float32.

    Args:
        x_RD, w1_EFD, w2_EDF: as in the reference; copied if not contiguous or not 16-byte aligned.
        tokens_per_expert_E: counts on the host are checked; counts on the device are not read back. If they sum to less than
            R, the results of the remaining rows, and the gradients of weights, are undefined. A CUDA graph needs them on the
            device.
        probs_R, activation, main_grads: as in the reference.
        products: the products of another precision or backend.

    Raises:
        ModelError: as in the reference, except for counts on the device; or a dtype not in :data:`DTYPES`, widths that are not
            multiples of 8 (rows of a grouped product are 16-byte aligned), or more experts than :data:`EXPERTS`.
    """
    check_activation(activation)
    check_rows(x_RD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_R)
    _check_kernels(x_RD, w1_EFD, w2_EDF, products, main_grads)
    if tokens_per_expert_E.device.type == "cpu":
        check_counts(tokens_per_expert_E.tolist(), x_RD.shape[0])
    end_E = tokens_per_expert_E.cumsum(0, dtype=torch.int32).to(x_RD.device, non_blocking=True)
    end_E.clamp_(max=x_RD.shape[0])
    call, weights = Call(activation, products, main_grads), products.weights(w1_EFD, w2_EDF)
    y_RD: torch.Tensor = GroupedMLP.apply(x_RD, end_E, w1_EFD, w2_EDF, probs_R, call, weights)
    return y_RD


def routed_mlp(
    x_TD: torch.Tensor,
    routing_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    *,
    topk: int,
    exact: bool = True,
    activation: str = "gelu",
    main_grads: Sequence[MainGrad | None] = (None, None),
    products: Products = BF16,
) -> torch.Tensor:
    """Compute the reference's :func:`routed_mlp` in bfloat16.

    Products are rounded to bfloat16, and so is each sum over a token's experts, once. Memory is allocated for ``topk`` rows per
    token, even if it has fewer; time depends on the actual number of rows.

    Args:
        x_TD, probs_TE, w1_EFD, w2_EDF, topk, exact, activation, main_grads: as in the reference; copied if not contiguous or
            not 16-byte aligned.
        routing_TE: as in the reference, but the host reads no value: a token with a wrong number of experts gets NaN as
            output and gradient, and may corrupt others.
        products: the products of another precision or backend.

    Raises:
        ModelError: as in the reference, except for a token's number of experts; or as in :func:`grouped_mlp`.
    """
    check_routed(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, activation)
    _check_kernels(x_TD, w1_EFD, w2_EDF, products, main_grads)
    call, weights = Call(activation, products, main_grads), products.weights(w1_EFD, w2_EDF)
    y_TD: torch.Tensor = RoutedMLP.apply(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, exact, call, weights)
    return y_TD
