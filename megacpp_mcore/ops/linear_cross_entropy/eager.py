"""The steps of linear cross-entropy between and after its matrix products, in plain PyTorch.

Legend: C tokens of a chunk, V vocabulary of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed


class Statistics(NamedTuple):
    """Per-token statistics that losses are computed from, [C] each; float32 (float64 logits: float64).

    Attributes:
        top: the largest logit of this rank, at least the lowest finite number.
        column: the first column that has it, int64.
        total: Σ exp(logit − ``top``).
        picked: the label's logit − ``top``; 0 if the label is not on this rank.
    """

    top: torch.Tensor
    column: torch.Tensor
    total: torch.Tensor
    picked: torch.Tensor

    def losses(
        self, label_C: torch.Tensor, vocab: int, group: distributed.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute loss and log-sum-exp of each token over the vocabulary of all ranks.

        If no rank has the label, its logit minus the largest one counts as 0, as in Megatron.
        """
        top, total, picked = self.top, self.total, self.picked
        if group is not None:
            top = top.clone()
            distributed.all_reduce(top, op=distributed.ReduceOp.MAX, group=group)
            lower = self.top - top
            both = torch.stack((total * lower.exp(), torch.where(has(vocab, label_C), picked + lower, 0.0)))
            distributed.all_reduce(both, group=group)
            total, picked = both
        log_total = total.log()
        return log_total - picked, log_total + top


def has(vocab: int, label_C: torch.Tensor) -> torch.Tensor:
    """Return whether each label is one of this rank's columns."""
    return (label_C >= 0) & (label_C < vocab)


def statistics(logit_CV: torch.Tensor, label_C: torch.Tensor, weight_C: torch.Tensor | None) -> Statistics:
    """Compute each row's statistics; with weights, also replace the logits as :func:`gradient_` does (one rank only).

    Args:
        logit_CV: contiguous along a row.
        label_C: int64; may lie outside of the columns.
        weight_C: for :func:`gradient_`; None: do not change the logits.
    """
    dtype = torch.promote_types(logit_CV.dtype, torch.float32)
    top, column = logit_CV.max(dim=-1)
    # Clamp to the lowest finite number: the difference of two −∞ is NaN.
    top = top.to(dtype).clamp_(min=torch.finfo(dtype).min)
    total = (logit_CV - top[:, None]).exp_().sum(dim=-1)
    here = has(logit_CV.shape[1], label_C)
    picked = torch.where(here, logit_CV.gather(1, label_C.where(here, 0)[:, None])[:, 0] - top, 0.0)
    if weight_C is not None:
        gradient_(logit_CV, label_C, top + total.log(), weight_C)
    return Statistics(top, column, total, picked)


def gradient_(logit_CV: torch.Tensor, label_C: torch.Tensor, logsumexp_C: torch.Tensor, weight_C: torch.Tensor) -> None:
    """Replace the logits by their gradient ``weight · (softmax − onehot(label))``, each rounded once."""
    here = has(logit_CV.shape[1], label_C)
    column_C1 = label_C.where(here, 0)[:, None]
    at_label_C1 = (logit_CV.gather(1, column_C1) - logsumexp_C[:, None]).exp_() - here[:, None].to(weight_C.dtype)
    softmax_CV = (logit_CV - logsumexp_C[:, None]).exp_()
    torch.mul(softmax_CV, weight_C[:, None], out=logit_CV)
    logit_CV.scatter_(1, column_C1, (at_label_C1 * weight_C[:, None]).to(logit_CV.dtype))


def add_scaled_(out: torch.Tensor, gradient: torch.Tensor, factor_1: torch.Tensor, beta: float = 1.0) -> None:
    """``out = beta · out + factor · gradient``, rounded once; beta is 0 or 1."""
    if beta:
        torch.addcmul(out, gradient, factor_1, out=out)
    else:
        torch.mul(gradient, factor_1, out=out)
