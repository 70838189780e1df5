"""The kernel of linear cross-entropy under Triton's interpreter, on a CPU, against plain PyTorch."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.linear_cross_entropy import eager, triton
from megacpp_mcore.ops.testing import assert_parity

V = 1003
LABELS = [0, 1002, 5, -1, V, 2**40, 7, 640]


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Logits in padded rows that begin and end with NaN: equal largest ones, −∞ in all of a block, far apart."""
    padded = torch.full((len(LABELS), 1024), torch.nan, dtype=dtype)
    logit_CV = padded[:, :V]
    logit_CV.copy_(torch.randn(logit_CV.shape, generator=torch.Generator().manual_seed(1)) * 3)
    logit_CV[1, [130, 129, 900]] = 50.0
    logit_CV[2, 6:600] = -torch.inf
    logit_CV[6] *= 1000
    return logit_CV


def main(_: str) -> None:
    """Fail unless statistics, gradients, and what lies beyond the rows are right."""
    triton.BLOCK = 256
    label_C = torch.tensor(LABELS)
    weight_C = torch.tensor([1.0, 0.0, -0.3, 2.0, 1.0, 1.0, 0.5, 1.0])
    for dtype, rms in ((torch.float32, 1e-6), (torch.float16, 5e-4)):
        outcomes = []
        for module in (eager, triton):
            alone, given = rows(dtype), rows(dtype)
            found = module.statistics(alone, label_C, weight_C)
            again = module.statistics(given, label_C, None)
            assert all(map(torch.equal, found, again))
            assert torch.equal(given, rows(dtype))
            logsumexp_C = found.top + found.total.log()
            module.gradient_(given, label_C, logsumexp_C, weight_C)
            outcomes.append((found, alone, given))
        (stock, *expected), (ours, *actual) = outcomes
        assert torch.equal(stock.column, ours.column), (stock.column, ours.column)
        assert torch.equal(stock.top, ours.top)
        for name in ("total", "picked"):
            assert_parity(getattr(ours, name)[:, None], getattr(stock, name)[:, None], rms=1e-6, name=name)
        for name, have, want in zip(("at once", "later"), actual, expected, strict=True):
            assert_parity(have, want, rms=rms, name=name)
    gradient, total = torch.randn(5, 1000).half(), torch.randn(5, 1000)
    for beta in (0.0, 1.0):
        have, want = total.clone(), total.clone()
        for module, out in ((triton, have), (eager, want)):
            module.add_scaled_(out, gradient, torch.tensor([0.3]), beta)
        assert_parity(have, want, rms=1e-6)
