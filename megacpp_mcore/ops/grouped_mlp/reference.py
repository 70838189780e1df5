"""Plain-PyTorch truth of the grouped experts, a loop over their runs of tokens; no layer is wired to it yet.

Shape legend: T tokens (each once per expert it is routed to), E experts (of this rank), D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float

# In megatron-core 0.19 `activation_func=F.gelu` is the erf form, in grouped and sequential experts alike (the tanh form
# of `bias_gelu_impl` refuses routing probabilities); with `use_te_activation_func` it is TE's GELU, the tanh form.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def _check(
    x_TD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_T: torch.Tensor | None,
) -> list[int]:
    """Return the tokens of each expert as integers, or raise ModelError."""
    named = {"x_TD": x_TD, "w1_EFD": w1_EFD, "w2_EDF": w2_EDF} | ({} if probs_T is None else {"probs_T": probs_T})
    require_float(**named)
    x, w1, w2 = tuple(x_TD.shape), tuple(w1_EFD.shape), tuple(w2_EDF.shape)
    if len(x) != 2 or len(w1) != 3 or w2 != (w1[0], w1[2], w1[1]) or w1[2] != x[1] or w1[0] == 0:
        raise ModelError(
            f"x, w1, w2 have shapes {x}, {w1}, {w2}, expected [T, D], [E, F, D], [E, D, F] with the same D, E and F "
            "and at least one expert; each weight is [out, in], as in torch.nn.Linear"
        )
    if probs_T is not None and tuple(probs_T.shape) != x[:1]:
        raise ModelError(f"probs have shape {tuple(probs_T.shape)}, expected [T] = [{x[0]}], one for each row of x")
    counts_E = tokens_per_expert_E
    if counts_E.is_floating_point() or counts_E.dtype == torch.bool or tuple(counts_E.shape) != w1[:1]:
        raise ModelError(
            f"tokens_per_expert is {counts_E.dtype} {list(counts_E.shape)}, expected integers of shape [E] = [{w1[0]}]"
        )
    counts: list[int] = counts_E.tolist()
    if min(counts) < 0 or sum(counts) != x[0]:
        raise ModelError(
            f"tokens_per_expert is {counts} (sum {sum(counts)}), expected non-negative counts that sum to T = {x[0]}; "
            "x must hold exactly the routed tokens, sorted by expert and without padding"
        )
    return counts


def grouped_mlp(
    x_TD: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    probs_T: torch.Tensor | None,
    *,
    activation: str = "gelu",
) -> torch.Tensor:
    """Run each expert's two-matrix MLP on its run of tokens: ``y = (prob · act(x w1ᵀ)) w2ᵀ``.

    Computed in float32 (float64 inputs: in float64), differentiable in x, w1, w2 and probs. The routing probability
    multiplies the activation's output, before the second matrix, as ``permuted_probs`` does in megatron-core 0.19
    ``transformer/moe/experts.py`` (``TEGroupedMLP.forward`` and ``SequentialMLP`` without biases).

    Args:
        x_TD: routed tokens, those of expert 0 first, then those of expert 1, and so on; T may be 0.
        tokens_per_expert_E: integer tensor of counts, zeros allowed, sum T. The host reads it, which makes
            it wait for a GPU. An expert without tokens gets a gradient of exactly zero, never None.
        w1_EFD: first matrices, [out, in].
        w2_EDF: second matrices, [out, in].
        probs_T: routing probability of each row of x, or None for 1.
        activation: "gelu" (erf, what ``activation_func=F.gelu`` runs) or "gelu_tanh".

    Returns:
        y_TD in the dtype of x.

    Raises:
        ModelError: shapes, dtypes, counts or the activation are not as described.
    """
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation is {activation!r}, expected one of {sorted(ACTIVATIONS)}; gated ones have no entry"
        )
    counts = _check(x_TD, tokens_per_expert_E, w1_EFD, w2_EDF, probs_T)
    dtype = compute_dtype(x_TD, w1_EFD, w2_EDF, *([] if probs_T is None else [probs_T]))
    probs = [None] * len(counts) if probs_T is None else probs_T.to(dtype).split(counts)
    outputs = []
    # Experts without tokens run too, on zero rows: that ties their weights into the graph with a zero gradient.
    for x_tD, w1_FD, w2_DF, prob_t in zip(x_TD.split(counts), w1_EFD.unbind(), w2_EDF.unbind(), probs, strict=True):
        h_tF = ACTIVATIONS[activation](F.linear(x_tD.to(dtype), w1_FD.to(dtype)))
        if prob_t is not None:
            h_tF = h_tF * prob_t[:, None]
        outputs.append(F.linear(h_tF, w2_DF.to(dtype)))
    return torch.cat(outputs).to(x_TD.dtype)
