"""Whether a variant computes the right thing: worst rows against a truth in float64, made in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megacpp_mcore.bench.problem import BOTH, FORWARD, OURS, Tensors, Variant, Verdict
from megacpp_mcore.bench.table import GREEN, IS_REFERENCE
from megacpp_mcore.ops.testing import PEER_RATIO, row_norms, worst_row

YARDSTICK_LIMIT = 0.1
"""What the yardstick itself may be off by before it is no implementation of the op."""


class AgainstTruth:
    """Each result's worst row against the truth (:mod:`megacpp_mcore.ops.testing`).

    Anything that is not finite, or of another shape, fails. A peer may leave out the last gradients;
    ours has to give all of them. A variant that is the very program of the truth is checked, and called what it is.

    Args:
        truth: from inputs to results in float64, outputs first.
        names: of the results.
        outputs: how many of them the forward pass gives.
        limit: the largest error of a row, for all results or by name.
        yardstick: a variant whose own errors, times :data:`~megacpp_mcore.ops.testing.PEER_RATIO`, are allowed too.
        norms: from a result's name, its truth's row norms and the inputs to the norms that errors are measured against.
    """

    def __init__(
        self,
        truth: Callable[[Any], Tensors],
        names: Sequence[str],
        limit: float | Mapping[str, float],
        *,
        outputs: int = 1,
        yardstick: str = "",
        norms: Callable[[str, torch.Tensor, Any], torch.Tensor] | None = None,
    ) -> None:
        self._make, self.names, self.outputs, self.yardstick, self._norms = (
            truth,
            tuple(names),
            outputs,
            yardstick,
            norms,
        )
        self._limits = dict.fromkeys(names, limit) if isinstance(limit, float) else dict(limit)
        self._truth: Tensors = ()
        self._allowed: dict[str, float] = {}

    def prepare(self, inputs: Any) -> None:
        """Make the truth of ``inputs``."""
        self._truth = [want.detach() for want in self._make(inputs)]

    def verdict(self, variant: Variant, work: str, inputs: Any) -> Verdict:
        """Run ``variant`` once and compare what it gives."""
        found = variant.results(variant.runs[work](inputs))
        truth = self._truth if variant.truth is None else variant.truth(inputs)
        names = self.names[: self.outputs] if work == FORWARD else self.names[: len(found)]
        least = len(self.names) if variant.side == OURS and work == BOTH else self.outputs
        if len(found) < least:
            return Verdict(False, f"FAILS: it gives {len(found)} results, expected at least {least}")
        errors = {
            name: self._error(name, have.detach(), want, inputs)
            for name, have, want in zip(names, found[: len(names)], truth[: len(names)], strict=True)
        }
        return self._judged(variant, errors)

    def _judged(self, variant: Variant, errors: dict[str, float]) -> Verdict:
        if variant.name == self.yardstick:
            self._allowed = {name: PEER_RATIO * error for name, error in errors.items()}
            limits = dict.fromkeys(errors, YARDSTICK_LIMIT)
        elif variant.limit is not None:
            limits = dict.fromkeys(errors, variant.limit)
        else:
            limits = {name: max(self._limits[name], self._allowed.get(name, 0.0)) for name in errors}
        wrong = [
            f"{name} {error:.1e} > {limits[name]:.1e}" for name, error in errors.items() if not error <= limits[name]
        ]
        if wrong:
            return Verdict(False, f"FAILS: worst row {', '.join(wrong)}", errors)
        return Verdict(None, IS_REFERENCE, errors) if variant.is_reference else Verdict(True, GREEN, errors)

    def _error(self, name: str, have: torch.Tensor, want: torch.Tensor, inputs: Any) -> float:
        norms = None if self._norms is None else self._norms(name, row_norms(want), inputs)
        try:
            return worst_row(have, want, name, norms)
        except AssertionError:  # another shape, or no numbers
            return float("inf")
