"""What a benchmark is made of: inputs, the variants that are compared on them, floors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megacpp_mcore.bench.registry import BOUND, OURS, PEER, Options
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import Work

FORWARD, BOTH = "forward", "forward+backward"

PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
"""What the products of inputs of a dtype run in at best, as :mod:`megacpp_mcore.model.flops.peaks` calls it."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random inputs.

    Attributes:
        leaves: what gets a gradient, by name.
        cotangents: the gradients of the outputs.
        fixed: all else that a variant is called with.
    """

    leaves: Mapping[str, torch.Tensor]
    cotangents: tuple[torch.Tensor, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def in_double(self) -> Inputs:
        """The same numbers in float64; what is fixed stays as it is."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        return Inputs(leaves=leaves, cotangents=tuple(g.double() for g in self.cotangents), fixed=self.fixed)


def _as_they_are(found: Any) -> Tensors:
    results: Tensors = found
    return results


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of what a problem asks for.

    Attributes:
        name: how the table calls it.
        side: :data:`OURS`, :data:`PEER`, or :data:`BOUND`, which is timed and compared with nothing.
        runs: by name of the work, what is timed; given an :class:`Inputs` or whatever the problem's are.
        results: brings what the last of ``runs`` returns into the order and layout of the truth; not timed.
        around: what has to be in place around every run, such as a patch.
        absent: why it cannot run here; then ``runs`` is empty.
        truth: the truth where it has another one than the problem, because it does other work; no speed-up is over it then.
        limit: the largest error of a row, where it has another one than the problem.
        is_reference: whether the truth is made by this very program, so that their agreement proves nothing.
    """

    name: str
    side: str
    runs: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    results: Callable[[Any], Tensors] = _as_they_are
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    absent: str = ""
    truth: Callable[[Any], Tensors] | None = None
    limit: float | None = None
    is_reference: bool = False


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What no implementation can do without.

    Attributes:
        operations: floating-point operations, from :mod:`megacpp_mcore.model.flops`.
        moved: bytes that have to be read or written once.
        precision: what the operations run in at best, of :data:`megacpp_mcore.model.flops.peaks.PRECISIONS`.
        result: bytes of what is returned, for benchmarks of memory.
    """

    operations: int
    moved: int
    precision: str
    result: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a variant computes the right thing: ``right`` is None where that could not be checked, or would prove nothing."""

    right: bool | None
    text: str
    errors: Mapping[str, float] = field(default_factory=dict)


class Judge(Protocol):
    """Decides about parity."""

    def prepare(self, inputs: Any) -> None:
        """Make the truth, before any variant has run."""

    def verdict(self, variant: Variant, work: str, inputs: Any) -> Verdict:
        """Run ``variant`` on ``inputs`` and compare; ``variant.around()`` is in place."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One size of one benchmark.

    Attributes:
        shape: sizes by name, as the table gives them.
        dtype: of the inputs.
        inputs: what every variant gets.
        variants: in the order in which they run.
        works: what is timed, and its floor; parity is checked on the last one that a variant has.
        judge: decides about parity.
        stock: the peer that the others are compared with; empty: the fastest one that is right.
        computed: bytes of peak memory counted by hand, by variant.
    """

    shape: Mapping[str, Any]
    dtype: str
    inputs: Any
    variants: Sequence[Variant]
    works: Mapping[str, Floor]
    judge: Judge
    stock: str = ""
    computed: Mapping[str, int] = field(default_factory=dict)


def differentiable(
    name: str, side: str, call: Callable[[Inputs], Tensors], *, results: Callable[[Any], Tensors] = _as_they_are,
    leaves: Callable[[Inputs], Tensors] | None = None, **more: Any,
) -> Variant:  # fmt: skip
    """The variant whose forward pass is ``call`` and whose backward pass is autograd's.

    Args:
        name, side, results: of the variant.
        call: from the inputs to as many outputs as they have cotangents.
        leaves: what is differentiated; by default the leaves of the inputs.
        more: other fields of the variant.
    """

    def both(inputs: Inputs) -> list[torch.Tensor]:
        outputs = call(inputs)
        wanted = list(inputs.leaves.values()) if leaves is None else list(leaves(inputs))
        gradients = torch.autograd.grad(outputs, wanted, inputs.cotangents, allow_unused=True, materialize_grads=True)
        return [*(output.detach() for output in outputs), *gradients]

    return Variant(name=name, side=side, runs={FORWARD: call, BOTH: both}, results=results, **more)


def missing(name: str, reason: str, side: str = PEER) -> Variant:
    """A variant that cannot run here."""
    return Variant(name=name, side=side, absent=reason)


def floors(work: Work, forward_bytes: int, both_bytes: int, dtype: str) -> dict[str, Floor]:
    """The floors of a forward pass, and of forward and backward together."""
    return {
        FORWARD: Floor(operations=work.forward, moved=forward_bytes, precision=PRECISIONS[dtype]),
        BOTH: Floor(operations=work.training, moved=both_bytes, precision=PRECISIONS[dtype]),
    }


def candidates(op: str, call: Callable[[Callable[..., Any], Inputs], Tensors], **needs: Any) -> Iterator[Variant]:
    """Ours: every backend of ``op`` that ``auto`` could choose, those that cannot run here with the reason.

    Args:
        op: an op of the dispatcher.
        call: runs a backend's function on inputs.
        needs: what the backend has to cover, as in a request.

    Raises:
        BenchmarkError: no backend of that op is known.
    """
    from megacpp_mcore.backends import own_candidates

    known = [candidate for candidate in own_candidates() if candidate.op == op]
    if not known:
        raise BenchmarkError(
            f"the dispatcher has no backend of op {op!r}; name what is measured in the benchmark itself"
        )
    for candidate in known:
        present = candidate.present()
        lacking = present.reason if not present.ok else candidate.support.lacking(needs)
        if lacking:
            yield missing(candidate.name, f"not here: {lacking}", OURS)
        else:
            yield differentiable(candidate.name, OURS, _with(candidate.load(), call))


def _with(fn: Callable[..., Any], call: Callable[..., Tensors]) -> Callable[[Inputs], Tensors]:
    return lambda inputs: call(fn, inputs)


class Draw:
    """Random numbers of one device and dtype, the same for the same seed."""

    def __init__(self, options: Options, seed: int = 1) -> None:
        self.device, self.dtype = options.device, getattr(torch, options.dtype)
        self.generator = torch.Generator(options.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed, times ``scale``."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return (numbers * scale).to(self.dtype if dtype is None else dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Uniform, from 0 on."""
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(self.dtype.itemsize)


__all__ = [
    "BOTH", "BOUND", "FORWARD", "OURS", "PEER", "PRECISIONS", "Draw", "Floor", "Inputs", "Judge", "Problem", "Tensors",
    "Variant", "Verdict", "candidates", "differentiable", "floors", "missing",
]  # fmt: skip
