"""Plain-PyTorch truth of the routed experts, a loop over experts, for rows sorted by expert or tokens with their routing.

Shape legend: T tokens (in :func:`grouped_mlp` each once per expert it is routed to), R rows of :func:`routed_mlp`, T × topk,
E experts (of this rank), D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.main_grad import MainGrad, added_to

# In megatron-core 0.19 `activation_func=F.gelu` is the erf form, in both grouped and sequential experts (the tanh form
# of `bias_gelu_impl` refuses routing probabilities); with `use_te_activation_func` it is TE's GELU, the tanh form.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def check_weights(x_TD: torch.Tensor, w1_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> None:
    """Raise ModelError unless the experts' two matrices fit each other and the rows of x."""
    x, w1, w2 = tuple(x_TD.shape), tuple(w1_EFD.shape), tuple(w2_EDF.shape)
    if len(x) != 2 or len(w1) != 3 or w2 != (w1[0], w1[2], w1[1]) or w1[2] != x[1] or w1[0] == 0:
        raise ModelError(
            f"x, w1, w2 have shapes {x}, {w1}, {w2}, expected [T, D], [E, F, D], [E, D, F] with the same D, E and F "
            "and at least one expert; each weight is [out, in], as in torch.nn.Linear"
        )


def check_activation(activation: str) -> None:
    """Raise ModelError unless this is the name of an activation."""
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation is {activation!r}, expected one of {sorted(ACTIVATIONS)}; gated ones have no entry")


def check_rows(
    x_TD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_T: torch.Tensor | None,
) -> None:
    """Raise ModelError unless the arguments of :func:`grouped_mlp` fit each other; reads no value."""
    named = {"x_TD": x_TD, "w1_EFD": w1_EFD, "w2_EDF": w2_EDF} | ({} if probs_T is None else {"probs_T": probs_T})
    require_float(**named)
    check_weights(x_TD, w1_EFD, w2_EDF)
    x, E = tuple(x_TD.shape), w1_EFD.shape[0]
    if probs_T is not None and tuple(probs_T.shape) != x[:1]:
        raise ModelError(f"probs have shape {tuple(probs_T.shape)}, expected [T] = [{x[0]}], one for each row of x")
    counts_E = tokens_per_expert_E
    if counts_E.is_floating_point() or counts_E.dtype == torch.bool or tuple(counts_E.shape) != (E,):
        raise ModelError(
            f"tokens_per_expert is {counts_E.dtype} {list(counts_E.shape)}, expected integers of shape [E] = [{E}]"
        )


def check_counts(counts: list[int], rows: int) -> None:
    """Raise ModelError unless the counts are non-negative and sum to ``rows``."""
    if min(counts) < 0 or sum(counts) != rows:
        raise ModelError(
            f"tokens_per_expert is {counts} (sum {sum(counts)}), expected non-negative counts that sum to T = {rows}; "
            "x must hold exactly the routed tokens, sorted by expert and without padding"
        )


def grouped_mlp(
    x_TD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_T: torch.Tensor | None,
    *,
    activation: str = "gelu",
    main_grads: Sequence[MainGrad | None] = (None, None),
) -> torch.Tensor:
    """Run each expert's two-matrix MLP on its block of tokens: ``y = (prob · act(x w1ᵀ)) w2ᵀ``.

    Computed in float32 (float64 inputs: in float64), differentiable in x, w1, w2 and probs. The routing probability
    multiplies the activation's output, before the second matrix, as ``permuted_probs`` does in megatron-core 0.19
    ``transformer/moe/experts.py`` (``TEGroupedMLP.forward`` and ``SequentialMLP`` without biases).

    Args:
        x_TD: routed tokens, those of expert 0 first, then those of expert 1, and so on; T may be 0.
        tokens_per_expert_E: integer tensor of counts, zeros allowed, sum T. The host reads it, which
            synchronises with a GPU. An expert without tokens gets a gradient of exactly zero, never None.
        w1_EFD: first matrices, [out, in].
        w2_EDF: second matrices, [out, in].
        probs_T: routing probability of each row of x, or None for 1.
        activation: "gelu" (erf, what ``activation_func=F.gelu`` runs) or "gelu_tanh".
        main_grads: buffers for the gradients of w1 and of w2; None: the gradient is returned.

    Returns:
        y_TD in the dtype of x.

    Raises:
        ModelError: shapes, dtypes, counts, the activation or a buffer are not as described.
    """
    check_activation(activation)
    check_rows(x_TD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_T)
    w1_EFD, w2_EDF = map(added_to, (w1_EFD, w2_EDF), main_grads)
    counts: list[int] = tokens_per_expert_E.tolist()
    check_counts(counts, x_TD.shape[0])
    dtype = compute_dtype(x_TD, w1_EFD, w2_EDF, *([] if probs_T is None else [probs_T]))
    probs = [None] * len(counts) if probs_T is None else probs_T.to(dtype).split(counts)
    outputs = []
    # Experts without tokens run too, on zero rows, so that their weights get a zero gradient.
    for x_tD, w1_FD, w2_DF, prob_t in zip(x_TD.split(counts), w1_EFD.unbind(), w2_EDF.unbind(), probs, strict=True):
        h_tF = ACTIVATIONS[activation](F.linear(x_tD.to(dtype), w1_FD.to(dtype)))
        if prob_t is not None:
            h_tF = h_tF * prob_t[:, None]
        outputs.append(F.linear(h_tF, w2_DF.to(dtype)))
    return torch.cat(outputs).to(x_TD.dtype)


def check_routed(
    x_TD: torch.Tensor,
    routing_TE: torch.Tensor,
    probs_TE: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    topk: int,
    activation: str,
) -> None:
    """Raise ModelError unless the arguments of :func:`routed_mlp` fit each other; reads no value."""
    check_activation(activation)
    require_float(x_TD=x_TD, probs_TE=probs_TE, w1_EFD=w1_EFD, w2_EDF=w2_EDF)
    check_weights(x_TD, w1_EFD, w2_EDF)
    T, E = x_TD.shape[0], w1_EFD.shape[0]
    if routing_TE.dtype != torch.bool or tuple(routing_TE.shape) != (T, E):
        raise ModelError(
            f"routing is {routing_TE.dtype} {list(routing_TE.shape)}, expected torch.bool of shape [T, E] = [{T}, {E}]"
        )
    if tuple(probs_TE.shape) != (T, E):
        raise ModelError(f"probs have shape {list(probs_TE.shape)}, expected [T, E] = [{T}, {E}], as routing has")
    if not 1 <= topk <= E:
        raise ModelError(f"topk is {topk}, expected 1 to E = {E}: the experts of each token")


def check_topk(routing_TE: torch.Tensor, topk: int, exact: bool = True) -> None:
    """Raise ModelError unless every token has ``topk`` experts, or at most that many (not ``exact``); synchronises the host."""
    experts_T = routing_TE.sum(1)
    if (wrong := (experts_T != topk if exact else experts_T > topk).nonzero()).numel():
        first = int(wrong[0])
        what, remedy = ("another number of", "exactly topk experts and drop none") if exact else ("more", "at most topk")
        raise ModelError(
            f"{wrong.shape[0]} of {routing_TE.shape[0]} tokens have {what} experts than topk = {topk}, the first "
            f"one is token {first} with {int(experts_T[first])}; route every token to {remedy}"
        )


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
) -> torch.Tensor:
    """Run every token through its experts: ``y = Σ_e (prob_e · act(x w1_eᵀ)) w2_eᵀ`` over the experts it is routed to.

    Computed in float32 (float64 inputs: in float64), differentiable in x, probs, w1 and w2. The same as
    :func:`grouped_mlp` between a gather of the tokens' rows and a sum of each token's: what megatron-core 0.19
    ``transformer/moe/moe_utils.py`` does with ``permute``, ``TEGroupedMLP`` and ``unpermute``, without dropped tokens.

    Args:
        x_TD: tokens in any order; T may be 0.
        routing_TE: bool, which experts each token goes to.
        probs_TE: routing probabilities, of any float dtype; those of experts that a token is not routed to are not read and
            have a gradient of zero.
        w1_EFD, w2_EDF, activation, main_grads: as in :func:`grouped_mlp`.
        topk: experts of each token.
        exact: False: a token may have fewer experts here, or none (its output is then 0), because others are on other ranks.

    Returns:
        y_TD in the dtype of x.

    Raises:
        ModelError: shapes, dtypes, the activation, a buffer or a token's number of experts are not as described.
    """
    check_routed(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk, activation)
    check_topk(routing_TE, topk, exact)
    dtype = compute_dtype(x_TD, w1_EFD, w2_EDF, probs_TE)
    routing_ET = routing_TE.T
    token_R = routing_ET.nonzero()[:, 1]
    x_RD, probs_R = x_TD.to(dtype)[token_R], probs_TE.to(dtype).T[routing_ET]
    y_RD = grouped_mlp(x_RD, routing_TE.sum(0), w1_EFD, w2_EDF, probs_R, activation=activation, main_grads=main_grads)
    return torch.zeros_like(x_TD, dtype=dtype).index_add(0, token_R, y_RD).to(x_TD.dtype)
