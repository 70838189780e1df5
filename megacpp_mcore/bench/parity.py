"""Parity of a variant: the worst rows of its results against a float64 truth computed in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megacpp_mcore.bench.problem import BOTH, FORWARD, OURS, Call, Inputs, Result, Tensors, Variant, with_gradients
from megacpp_mcore.bench.table import GREEN, IS_REFERENCE
from megacpp_mcore.ops.testing import PEER_RATIO, row_norms, worst_row

YARDSTICK_LIMIT = 0.1
"""Error above which the yardstick itself does not count as an implementation of the op."""


def in_double(call: Call, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The truth of a forward pass that supports float64: its output and the gradient of every leaf, by name."""
    return dict(zip(inputs.names, with_gradients(call, inputs.in_double()), strict=True))


def judged(errors: Mapping[str, float], limits: Mapping[str, float]) -> Result:
    """Whether the worst rows of results are within their limits."""
    wrong = [f"{name} {error:.1e} > {limits[name]:.1e}" for name, error in errors.items() if not error <= limits[name]]
    return Result(False, f"FAILS: worst row {', '.join(wrong)}", errors) if wrong else Result(True, GREEN, errors)


class AgainstTruth:
    """Compares each result's worst row with the truth (:mod:`megacpp_mcore.ops.testing`).

    Anything not finite, or of a different shape, fails. A peer may leave out the last gradients; ours must return all. A
    variant that is the very program of the truth is checked, and labelled as such.

    Args:
        truth: the results by name, outputs first.
        limit: the largest error of a row, for all results or by name.
        outputs: number of results of the forward pass.
        yardstick: a variant whose own errors, times :data:`~megacpp_mcore.ops.testing.PEER_RATIO`, are allowed too.
        norms: maps a result's name and its truth's row norms to the norms that errors are measured against.
        rows: maps a result and its truth to the rows of both that are compared.
    """

    def __init__(
        self,
        truth: Mapping[str, torch.Tensor],
        limit: float | Mapping[str, float],
        *,
        outputs: int = 1,
        yardstick: str = "",
        norms: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, norm: norm,
        rows: Callable[[torch.Tensor, torch.Tensor], Tensors] = lambda have, want: (have, want),
    ) -> None:
        self._truth, self._outputs, self._yardstick = dict(truth), outputs, yardstick
        self._norms, self._rows = norms, rows
        self._limits = dict.fromkeys(truth, limit) if isinstance(limit, float) else dict(limit)
        self._allowed: dict[str, float] = {}

    def __call__(self, variant: Variant, work: str, inputs: Inputs) -> Result:
        """Run ``variant`` once on ``inputs`` and compare its results."""
        given = variant.runs[work](inputs)
        found = variant.results([given] if isinstance(given, torch.Tensor) else list(given))
        least = len(self._truth) if variant.side == OURS and work == BOTH else self._outputs
        if len(found) < least:
            return Result(False, f"FAILS: it gives {len(found)} results, expected at least {least}")
        names = list(self._truth)[: self._outputs if work == FORWARD else len(found)]
        truth = variant.truth or self._truth
        errors = {name: self._error(name, have.detach(), truth[name]) for name, have in zip(names, found, strict=False)}
        result = judged(errors, self._limits_of(variant, errors))
        return Result(None, IS_REFERENCE, errors) if result.right and variant.is_reference else result

    def _limits_of(self, variant: Variant, errors: Mapping[str, float]) -> dict[str, float]:
        if variant.name == self._yardstick:
            # A yardstick that is not an implementation of the op allows no larger errors.
            right = all(error <= YARDSTICK_LIMIT for error in errors.values())
            self._allowed |= {name: PEER_RATIO * error for name, error in errors.items() if right}
            return dict.fromkeys(errors, YARDSTICK_LIMIT)
        if isinstance(variant.limit, Mapping):
            return dict(variant.limit)
        if variant.limit is not None:
            return dict.fromkeys(errors, variant.limit)
        return {name: max(self._limits[name], self._allowed.get(name, 0.0)) for name in errors}

    def _error(self, name: str, have: torch.Tensor, want: torch.Tensor) -> float:
        try:
            have, want = self._rows(have, want.detach())
            return worst_row(have, want, name, self._norms(name, row_norms(want)))
        except AssertionError:  # a different shape, or not finite
            return float("inf")
