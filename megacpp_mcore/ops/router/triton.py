"""The router by Triton kernels: :func:`~megacpp_mcore.ops.router.reference.route`, with one launch each way.

Legend: as in :mod:`megacpp_mcore.ops.router.reference`.

Selection is exact: scores come from PyTorch's sigmoid, because Triton's rounds differently, and the bias is added once.
Sums have a fixed reduction order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.router import kernels
from megacpp_mcore.ops.router.reference import TINY, Routed, check
from megacpp_mcore.ops.triton_launch import launch

TOKENS = 64
"""Tokens per program: for 8192 tokens, about as many programs as an H200 has multiprocessors."""

WARPS = 4


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, *, topk: int, batch: int) -> Routed:
    """Compute the reference's :func:`route` in float32.

    Raises:
        ModelError: as in the reference, or the logits are not float32.
    """
    check(logits_TE, bias_E, topk, batch)
    if logits_TE.dtype != torch.float32:
        raise ModelError(f"the router's kernels got {logits_TE.dtype} logits; they take float32: use the reference")
    bias_E = None if bias_E is None else bias_E.contiguous()
    return Routed(*Route.apply(logits_TE.contiguous(), bias_E, topk, batch))


class Route(torch.autograd.Function):
    """The router as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, topk: int, batch: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the fields of :class:`Routed`."""
        T, E = logits_TE.shape
        score_TE, probs_TE = torch.sigmoid(logits_TE), torch.empty_like(logits_TE)
        routing_TE = torch.empty_like(logits_TE, dtype=torch.bool)
        grid, shape = _launch(T, E, batch)
        sums_PBC = logits_TE.new_empty(grid[0], batch, 4 * E)
        if T:
            launch(
                kernels.route, grid, logits_TE, score_TE, bias_E, probs_TE, routing_TE, sums_PBC, T // batch, batch, K=topk,
                **shape,
            )  # fmt: skip
        sums_BC = sums_PBC.sum(0)
        load_BE, best_BE, score_BE, squared_BE = sums_BC.unflatten(1, (4, E)).unbind(1)
        load_E = load_BE.sum(0)
        ctx.save_for_backward(logits_TE, score_TE, routing_TE)
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(routing_TE, load_E, best_BE)
        return probs_TE, routing_TE, load_E, best_BE, score_BE, squared_BE[:, 0].sum()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dprobs_TE: torch.Tensor | None, *others: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        """Compute the gradient of the logits."""
        logits_TE, score_TE, routing_TE = ctx.saved_tensors
        dscore_BE, dsquared = others[-2:]
        given = [None if grad is None else grad.contiguous() for grad in (dprobs_TE, dscore_BE, dsquared)]
        (T, E), dlogits_TE = logits_TE.shape, torch.empty_like(logits_TE)
        grid, shape = _launch(T, E, ctx.batch)
        if T:
            launch(
                kernels.route_backward, grid, logits_TE, score_TE, routing_TE, *given, dlogits_TE, T // ctx.batch, ctx.batch,
                **shape,
            )  # fmt: skip
        return dlogits_TE, None, None, None


def _launch(T: int, E: int, batch: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid, and the compile-time arguments of both kernels."""
    tokens = max(1, TOKENS * 16 // max(16, triton.next_power_of_2(E)))
    shape = {"E": E, "EXPERTS": triton.next_power_of_2(E), "TINY": TINY, "TOKENS": tokens, "num_warps": WARPS}
    return (triton.cdiv(T // batch, tokens), batch), shape
