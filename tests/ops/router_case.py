"""What the router's kernels are compared with, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megacpp_mcore.ops.router.reference import Routed, route


class Case(NamedTuple):
    """Sizes: tokens of all sequences, sequences, experts, experts of each token; and whether there is a bias."""

    tokens: int
    batch: int
    experts: int
    topk: int
    bias: bool = True


CASES = (
    Case(74, 2, 16, 4),
    Case(130, 1, 4, 2, bias=False),
    Case(195, 3, 12, 3),
    Case(40, 1, 100, 8),
    Case(3, 3, 16, 16),
)


def compared(function: Callable[..., Routed], case: Case, device: torch.device) -> None:
    """Fail unless routing and counts are the reference's in float32, and numbers and gradient those of float64."""
    generator = torch.Generator(device).manual_seed(3)
    logits_TE = torch.randn(case.tokens, case.experts, device=device, generator=generator)
    logits_TE[0], logits_TE[1, :3] = 0.0, 1.25  # ties
    bias_E2 = 0.1 * torch.randn(case.experts, 2, device=device, generator=generator)
    bias_E = bias_E2[:, 1] if case.bias else None  # whose strides a kernel may not ignore
    shapes = ((case.tokens, case.experts), (case.batch, case.experts), ())
    cotangents = [torch.randn(shape, device=device, generator=generator) for shape in shapes]

    def outcome(function: Callable[..., Routed], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        logits = logits_TE.to(dtype).requires_grad_()
        routed = function(logits, bias_E, topk=case.topk, batch=case.batch)
        differentiable = [routed.probs_TE, routed.score_BE, routed.squared]
        (gradient,) = torch.autograd.grad(differentiable, logits, [cotangent.to(dtype) for cotangent in cotangents])
        return {name: value.detach() for name, value in routed._asdict().items()} | {"dlogits": gradient}

    actual, single = outcome(function, torch.float32), outcome(route, torch.float32)
    truth = outcome(route, torch.float64)
    for name in ("routing_TE", "load_E", "best_BE"):
        assert actual[name].dtype == single[name].dtype
        assert torch.equal(actual[name], single[name]), (case, name)
    for name in ("probs_TE", "score_BE", "squared", "dlogits"):
        error = float((actual[name].double() - truth[name]).norm() / truth[name].norm())
        assert error < 2e-6, (case, name, error)
