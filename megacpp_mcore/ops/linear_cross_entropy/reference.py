"""Plain-PyTorch truth of linear cross-entropy, and the argument checks that the chunked path shares.

Shape legend: … leading axes of the tokens ([sequence, batch] in Megatron-Core), H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError


def check_arguments(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    label: torch.Tensor,
    bias_V: torch.Tensor | None,
    token_weight: torch.Tensor | None,
) -> None:
    """Check the arguments that do not depend on how tokens and vocabulary are sharded.

    Raises:
        ModelError: widths or dtypes do not fit, or there are no tokens or no vocabulary.
    """
    if weight_VH.dim() != 2 or hidden.shape[-1:] != weight_VH.shape[1:] or 0 in (*hidden.shape, *weight_VH.shape):
        raise ModelError(
            f"hidden and weight have shapes {tuple(hidden.shape)} and {tuple(weight_VH.shape)}, expected [..., H] and "
            "[V, H] with the same H and nothing empty"
        )
    if not hidden.is_floating_point() or hidden.dtype != weight_VH.dtype:
        raise ModelError(
            f"hidden and weight have dtypes {hidden.dtype} and {weight_VH.dtype}, expected one floating-point dtype; "
            "cast one of them first"
        )
    if bias_V is not None and (bias_V.shape != weight_VH.shape[:1] or bias_V.dtype != weight_VH.dtype):
        raise ModelError(
            f"bias has shape {tuple(bias_V.shape)} and dtype {bias_V.dtype}, expected [{weight_VH.shape[0]}] and "
            f"{weight_VH.dtype}, as the weight has"
        )
    if label.dtype != torch.int64:
        raise ModelError(f"label has dtype {label.dtype}, expected torch.int64")
    if token_weight is not None and (token_weight.shape != label.shape or token_weight.requires_grad):
        differentiable = " that requires a gradient" if token_weight.requires_grad else ""
        raise ModelError(
            f"token_weight has shape {tuple(token_weight.shape)}{differentiable}, expected {tuple(label.shape)} without a "
            "gradient: one for each label"
        )


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    label: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    token_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each token's cross-entropy: ``logsumexp(x) − x[label]`` with ``x = logit_scale · (hidden weightᵀ + bias)``.

    Computed in float32 (float64 inputs: in float64). There is no reduction and no ignore index: as in megatron-core 0.19
    ``vocab_parallel_cross_entropy``, a label outside of [0, V) counts as the label of the largest logit,
    ``logsumexp(x) − max(x)``, and the second term has no gradient; weight such tokens by 0.

    The weights do not change the losses; they announce the gradient. Megatron multiplies each loss by the loss mask (for an MTP
    depth, the rolled one) and the sum by factors that are the same for all tokens, so the incoming gradient is
    ``s · token_weight`` with one ``s`` for all. An implementation may rely on that: it can compute the gradients of hidden and
    weight for ``s = 1`` from the logits of the forward pass, three products instead of four, and multiply them by s in the
    backward pass. A token of weight 0 has its usual loss and no gradient, regardless of the incoming one.

    Args:
        hidden: [..., H].
        weight_VH: the output projection, dtype of ``hidden``.
        label: int64, the leading shape of ``hidden``.
        bias_V: added to the logits, or None.
        logit_scale: factor on the logits (the output multiplier of muP).
        token_weight: the weight that each token's loss will be multiplied by, up to one common factor; the shape of
            ``label``, any dtype, no gradient. None: unknown.

    Returns:
        The losses, in the shape of ``label``.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check_arguments(hidden, weight_VH, label, bias_V, token_weight)
    if label.shape != hidden.shape[:-1]:
        raise ModelError(f"label has shape {tuple(label.shape)}, expected {tuple(hidden.shape[:-1])}: one for each token")
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if bias_V is None else bias_V.to(dtype)
    logit = torch.nn.functional.linear(hidden.to(dtype), weight_VH.to(dtype), bias) * logit_scale
    known = (label >= 0) & (label < weight_VH.shape[0])
    of_label = logit.gather(-1, label.where(known, 0)[..., None])[..., 0]
    loss = logit.logsumexp(-1) - torch.where(known, of_label, logit.detach().amax(-1))
    return loss if token_weight is None else torch.where(token_weight != 0, loss, loss.detach())
