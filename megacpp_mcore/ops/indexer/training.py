"""How attention trains the indexer: targets accumulated in the backward pass, and the autograd node that consumes the sum.

No target is computed in the forward pass. Every layer that attends to a Full layer's selection recomputes its attention
probabilities in its backward pass anyway, and accumulates them into the selection's :class:`TargetSum` there.
:func:`training_token` returns a scalar that depends on the indexer's q, k and weights; attached to the *input* of the Full
layer's attention, it is reached by autograd only after that attention's backward pass. By then the Shared layers' backward
passes are done, too, because those layers come later in the model: the sum is complete. This holds under recompute, where
layers run forward again but still run backward one after the other, and in every pipeline schedule, because a Full layer and
its Shared layers are in one model chunk.

Legend: S queries, B batch, H indexer heads, D indexer head width, N selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_mcore.errors import ModelError

Learn = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class TargetSum:
    """Attention probabilities of the selected keys, summed over heads and layers in the backward pass of one micro-batch.

    A layer's probabilities sum to its number of heads in every row that selects a key, and all layers have the same number of
    heads, so the L1-normalised sum is the mean of the layers' L1-normalised targets.

    Args:
        layers: how many layers add to it: the Full layer itself and the Shared layers that its indexer learns from.
    """

    def __init__(self, layers: int = 1) -> None:
        self.layers = layers
        self._added = 0
        self._sum_BSN: torch.Tensor | None = None

    def accumulator(self, index_BSN: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the tensor ``[B, S, N]`` that a layer adds its probabilities to, in place; zeros for the first layer."""
        if self._sum_BSN is None:
            self._sum_BSN = torch.zeros(index_BSN.shape, dtype=dtype, device=index_BSN.device)
        self._added += 1
        return self._sum_BSN

    def take(self) -> torch.Tensor:
        """Return the sum, which now belongs to the caller, and start a new one.

        Raises:
            ModelError: not every layer has added to it.
        """
        found_BSN, added = self._sum_BSN, self._added
        self._sum_BSN, self._added = None, 0
        if found_BSN is None or added != self.layers:
            raise ModelError(
                f"{added} layers added their attention to the indexer's loss, expected {self.layers}: a Full layer was "
                "recomputed while the patch dsa-index-cache is not applied, or the backward pass skipped one of its Shared "
                "layers; keep that patch applied, and run the layers of a model chunk in one backward pass",
                code="incomplete-sum",
            )
        return found_BSN


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBHD: torch.Tensor,
        k_TBD: torch.Tensor,
        w_SBH: torch.Tensor,
        index_BSN: torch.Tensor | None,
        learn: Learn,
    ) -> torch.Tensor:
        ctx.save_for_backward(q_SBHD, k_TBD, w_SBH, index_BSN)
        ctx.learn = learn
        return q_SBHD.new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.learn(*ctx.saved_tensors, scale), None, None


def training_token(
    q_SBHD: torch.Tensor, k_TBD: torch.Tensor, w_SBH: torch.Tensor, index_BSN: torch.Tensor | None, learn: Learn
) -> torch.Tensor:
    """Return a zero scalar that trains the indexer in its backward pass.

    Args:
        q_SBHD, k_TBD, w_SBH: inputs of the indexer's scores.
        index_BSN: the keys selected by them; None if attention is dense.
        learn: called in the backward pass with these four and the token's gradient, which is the schedule's factor
            on the loss (a one-element tensor); returns the gradients of q, k and w.
    """
    token: torch.Tensor = _Token.apply(q_SBHD, k_TBD, w_SBH, index_BSN, learn)
    return token
