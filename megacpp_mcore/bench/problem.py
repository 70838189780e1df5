"""The parts of a benchmark: inputs, the variants compared on them, their parity, floors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megacpp_mcore import backends
from megacpp_mcore.backends.candidates import linear_cross_entropy_candidates
from megacpp_mcore.bench.catalog import OURS, PEER, Options
from megacpp_mcore.bench.csv_table import GREEN, IS_REFERENCE
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import Work, peaks
from megacpp_mcore.ops import quantised_weights
from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import PEER_RATIO, row_norms, worst_row

FORWARD, BOTH = "forward", "forward+backward"

PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float32": "fp32"}
"""Fastest precision for products of inputs of a dtype, by the names of :mod:`megacpp_mcore.model.flops.peaks`."""

BYTES_PER_SECOND = 4.2e12
"""What an H200 moves in practice, for floors."""

Tensors = Sequence[torch.Tensor]
Weights = Mapping[str, torch.Tensor | Tensors]
"""Tensors that replace leaves, by the leaf's name: one, or one for each part along the leaf's first axis."""
Call = Callable[..., Any]
"""A forward pass: from the inputs to its one output, or to a tuple of them."""


@dataclass(frozen=True)
class Inputs:
    """Random inputs.

    Attributes:
        leaves: the tensors that get a gradient, by name.
        cotangents: the gradients of the outputs, by the outputs' names.
    """

    leaves: Mapping[str, torch.Tensor]
    cotangents: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results of forward and backward: the outputs, then the gradient of each leaf."""
        return (*self.cotangents, *(f"d{name}" for name in self.leaves))

    def in_double(self) -> Inputs:
        """Return the same numbers in float64."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        cotangents = {name: grad.double() for name, grad in self.cotangents.items()}
        return dataclasses.replace(self, leaves=leaves, cotangents=cotangents)

    def truth(self, call: Call) -> dict[str, torch.Tensor]:
        """Run forward and backward in float64, which ``call`` must support: return outputs and leaf gradients by name."""
        return dict(zip(self.names, with_gradients(call, self.in_double()), strict=True))

    @torch.no_grad()
    def copied_to(self, weights: Weights) -> Weights:
        """Copy the leaves with these names into ``weights``, and return them."""
        for name, own in weights.items():
            leaf = self.leaves[name]
            for part, value in [(own, leaf)] if isinstance(own, torch.Tensor) else zip(own, leaf, strict=True):
                part.copy_(value)
        return weights


class Captured:
    """A piece of work as a CUDA graph: captured at its first call, after a few calls that compile and tune, then replayed.

    Its results are the graph's own tensors, which the next call overwrites.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._results = call, None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: Any) -> Any:
        """Replay the graph; ``args`` must be the first call's arguments every time."""
        if self._graph is None:
            side_stream = torch.cuda.Stream()
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                for _ in range(3):
                    self._call(*args)
            torch.cuda.current_stream().wait_stream(side_stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = self._call(*args)
        self._graph.replay()
        return self._results


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of a problem.

    Attributes:
        side: ours, a peer, or a bound, which is timed and compared with nothing.
        runs: the functions to be timed, by name of the work; each returns one tensor or several, outputs first.
        results: brings the results of ``runs`` into the order and layout of the truth; not timed.
        around: context around every run, such as a patch.
        absent: why it cannot run here; then ``runs`` are not called.
        truth: its own truth where the problem's does not apply, because it does other work; it then has no speed-up.
        limit: its own largest error of a row, for all results or by name, where it differs from the problem's.
        is_reference: whether this very program computes the truth, so that their agreement proves nothing.
        is_captured: whether ``runs`` are replays of CUDA graphs: they take no memory of their own, and are compared only
            with other replays.
    """

    name: str
    side: str
    runs: Mapping[str, Call] = field(default_factory=dict)
    results: Callable[[Tensors], Tensors] = list
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    absent: str = ""
    truth: Mapping[str, torch.Tensor] | None = None
    limit: float | Mapping[str, float] | None = None
    is_reference: bool = False
    is_captured: bool = False

    def captured(self) -> Variant:
        """Return this variant as CUDA graphs, one per piece of work: measures the device's time without the host's.

        Each call gets :attr:`Inputs.leaves` of its own with the same memory: a leaf whose gradient's node was made on the
        default stream, and is kept alive by what another variant keeps of its forward pass, cannot be differentiated in a
        capture.
        """

        def anew(run: Call, inputs: Inputs) -> Any:
            leaves = {name: leaf.detach().requires_grad_(leaf.requires_grad) for name, leaf in inputs.leaves.items()}
            return run(dataclasses.replace(inputs, leaves=leaves))

        name, opening, rest = self.name.partition(" (")
        runs = {work: Captured(partial(anew, run)) for work, run in self.runs.items()}
        return dataclasses.replace(self, name=f"{name}, CUDA graph{opening}{rest}", runs=runs, is_captured=True)

    def quantising(self) -> Variant:
        """Return this variant with FP8 weights quantised in every call, like the first one after an optimizer's step."""

        def anew(run: Call, inputs: Inputs, **how: Any) -> Any:
            quantised_weights.forget()
            results = run(inputs, **how)
            quantised_weights.forget()
            return results

        return dataclasses.replace(self, runs={work: partial(anew, run) for work, run in self.runs.items()})

    def into_main_grad(self, *names: str) -> Variant:
        """Return this variant accumulating gradients of the last leaves, ``names``, into float32 buffers like Megatron.

        Its forward pass takes ``main_grads``, one for each. Before the first call, which checks parity, they are zero.
        """
        main: dict[str, torch.Tensor] = {}

        def both(inputs: Inputs) -> list[torch.Tensor]:
            leaves = {name: inputs.leaves[name] for name in names}
            for name, leaf in leaves.items() if not main else ():
                main[name] = torch.zeros_like(leaf, dtype=torch.float32)
            main_grads = [MainGrad(main[name], partial(torch.empty_like, leaf)) for name, leaf in leaves.items()]
            return [*self.runs[BOTH](inputs, main_grads=main_grads)[: -len(names)], *main.values()]

        return dataclasses.replace(self, name=f"{self.name}, dW into main_grad", runs={BOTH: both})

    def deterministic(self) -> Variant:
        """Return this variant as Megatron's ``--deterministic-mode`` runs it; a graph has to be captured in that mode."""
        if self.is_captured:  # its graphs would be shared with the variant of the other mode
            raise BenchmarkError(f"{self.name} is captured; expected deterministic() before captured()")
        return dataclasses.replace(self, name=f"{self.name}, deterministic", around=_deterministic_algorithms)

    @classmethod
    def missing(cls, name: str, reason: str, side: str = PEER) -> Variant:
        """Return a variant that cannot run here."""
        return cls(name=name, side=side, absent=reason)

    @classmethod
    def of(cls, name: str, side: str, call: Call, weights: Weights | None = None, **more: Any) -> Variant:
        """Return the variant whose forward pass is ``call`` and whose backward pass is autograd's.

        ``weights`` are its own, used instead of the last leaves (:meth:`Inputs.copied_to`); ``more`` are other fields.
        """
        own = list((weights or {}).values())
        parts = [part for weight in own for part in ([weight] if isinstance(weight, torch.Tensor) else weight)]

        def both(inputs: Inputs, **how: Any) -> list[torch.Tensor]:
            leaves = list(inputs.leaves.values())[: len(inputs.leaves) - len(own)]
            return with_gradients(partial(call, **how), inputs, [*leaves, *parts])

        def stacked(grads: Tensors) -> Tensors:
            """Return one gradient per leaf."""
            if len(grads) <= len(parts):  # the outputs of a forward pass
                return grads
            tail = iter(grads[-len(parts) :])
            full = (torch.stack([next(tail) for _ in w]) if isinstance(w, Sequence) else next(tail) for w in own)
            return [*grads[: -len(parts)], *full]

        results = stacked if any(isinstance(weight, Sequence) for weight in own) else list
        return cls(name=name, side=side, runs={FORWARD: call, BOTH: both}, **{"results": results} | more)

    @classmethod
    def candidates(cls, op: str, options: Options, call: Call, *, work: str = "", **needs: Any) -> Iterator[Variant]:
        """Yield our variants: every backend of ``op`` except Megatron's module, with the reason if one cannot run here.

        ``call`` computes the output from a backend's function and the inputs, or all results of ``work``; ``needs`` are
        further requirements of the backend, or replacements, as in a request.
        """
        for candidate in (*backends.own_candidates(), *linear_cross_entropy_candidates()):
            if candidate.op != op or candidate.name == backends.STOCK:
                continue
            present = candidate.present()
            lacking = candidate.support.lacking({"device": options.device, "dtype": options.dtype, **needs})
            if reason := lacking if present.ok else present.reason:
                yield cls.missing(candidate.name, f"not here: {reason}", OURS)
            elif work:
                yield cls(name=candidate.name, side=OURS, runs={work: partial(call, candidate.load())})
            else:
                yield cls.of(candidate.name, OURS, partial(call, candidate.load()))


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class Floor:
    """The work that no implementation can avoid.

    Attributes:
        operations: floating-point operations, from :mod:`megacpp_mcore.model.flops`.
        moved: bytes that have to be read or written once.
        dtype: of the operations' inputs, whose fastest precision counts.
    """

    operations: int
    moved: int
    dtype: str

    @classmethod
    def pair(cls, work: Work, forward_bytes: int, both_bytes: int, dtype: str) -> dict[str, Floor]:
        """Return the floors of a forward pass, and of forward and backward together."""
        return {FORWARD: cls(work.forward, forward_bytes, dtype), BOTH: cls(work.training, both_bytes, dtype)}

    def time(self, device: str) -> tuple[float | None, str]:
        """Return milliseconds (None: not known) and what they derive from: operations at the device's peak, or bytes at
        :data:`BYTES_PER_SECOND`, whichever takes longer.
        """
        peak = peaks.peak(device, PRECISIONS[self.dtype])
        if peak.flops_per_s is None:
            return None, f"not known: {peak.reason}"
        by_operations, by_bytes = self.operations / peak.flops_per_s * 1e3, self.moved / BYTES_PER_SECOND * 1e3
        if by_operations >= by_bytes:
            return by_operations, f"operations at {peak.name}"
        return by_bytes, f"bytes at {BYTES_PER_SECOND / 1e12:g} TB/s"


@dataclass(frozen=True)
class Result:
    """The result of one variant on one piece of work.

    Attributes:
        right: whether it is correct; None where that could not be checked, or would prove nothing.
        parity: the same in words.
        errors: the worst row of each of its results.
        ms: milliseconds, as the median of ``repeats`` calls; None if it was not timed, and ``note`` says why.
        peak, kept: bytes at the peak of a call and at its end; None where they are not counted.
    """

    right: bool | None
    parity: str
    errors: Mapping[str, float] = field(default_factory=dict)
    ms: float | None = None
    peak: int | None = None
    kept: int | None = None
    repeats: int = 0
    note: str = ""


YARDSTICK_LIMIT = 0.1
"""Error above which the yardstick itself does not count as an implementation of the op."""


@dataclass(frozen=True)
class Problem:
    """One benchmark at one size.

    Attributes:
        variants: in the order in which they run.
        works: the pieces of work to check and time, each with its floor.
        truth: the results by name, outputs first.
        limit: the largest error of a row, for all results or by name.
        outputs: number of results of the forward pass.
        yardstick: a variant whose own errors, times :data:`~megacpp_mcore.ops.testing.PEER_RATIO`, are allowed too.
        norms: maps a result's name and its truth's row norms to the norms that errors are measured against.
        rows: maps a result and its truth to the rows of both that are compared.
        stock: the peer that ours are compared with; empty: the fastest correct one.
        shape: sizes for the table, where they are not just those requested.
    """

    inputs: Inputs
    variants: Sequence[Variant]
    works: Mapping[str, Floor]
    truth: Mapping[str, torch.Tensor]
    limit: float | Mapping[str, float]
    outputs: int = 1
    yardstick: str = ""
    norms: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, norm: norm
    rows: Callable[[torch.Tensor, torch.Tensor], Tensors] = lambda result, truth: (result, truth)
    stock: str = ""
    shape: Mapping[str, str | int] = field(default_factory=dict)
    _allowed: dict[str, float] = field(default_factory=dict)

    def check(self, variant: Variant, work: str) -> Result:
        """Run ``variant`` once, and compare each result's worst row with the truth (:mod:`megacpp_mcore.ops.testing`).

        Anything not finite, or of a different shape, fails. A peer may leave out the last gradients; ours must return all. A
        variant that is the program that computed the truth is checked, and labelled as such.
        """
        raw_results = variant.runs[work](self.inputs)
        results = variant.results([raw_results] if isinstance(raw_results, torch.Tensor) else list(raw_results))
        minimum = len(self.truth) if variant.side == OURS and work == BOTH else self.outputs
        if len(results) < minimum:
            return Result(False, f"FAILS: it gives {len(results)} results, expected at least {minimum}")
        names = list(self.truth)[: self.outputs if work == FORWARD else len(results)]
        truth = variant.truth or self.truth
        errors = {name: self._error(name, out.detach(), truth[name]) for name, out in zip(names, results, strict=False)}
        limits = self._limits(variant, errors)
        wrong = [f"{name} {error:.1e} > {limits[name]:.1e}" for name, error in errors.items() if not error <= limits[name]]
        if wrong:
            return Result(False, f"FAILS: worst row {', '.join(wrong)}", errors)
        return Result(None, IS_REFERENCE, errors) if variant.is_reference else Result(True, GREEN, errors)

    def _limits(self, variant: Variant, errors: Mapping[str, float]) -> dict[str, float]:
        if variant.name == self.yardstick:
            # A yardstick that is not an implementation of the op allows no larger errors.
            if all(error <= YARDSTICK_LIMIT for error in errors.values()):
                self._allowed.update({name: PEER_RATIO * error for name, error in errors.items()})
            return dict.fromkeys(errors, YARDSTICK_LIMIT)
        limit, allowed = (self.limit, self._allowed) if variant.limit is None else (variant.limit, {})
        limits = limit if isinstance(limit, Mapping) else dict.fromkeys(errors, limit)
        return {name: max(limits[name], allowed.get(name, 0.0)) for name in errors}

    def _error(self, name: str, result: torch.Tensor, truth: torch.Tensor) -> float:
        try:
            result, truth = self.rows(result, truth.detach())
            return worst_row(result, truth, name, self.norms(name, row_norms(truth)))
        except AssertionError:  # a different shape, or not finite
            return float("inf")


def on_leaves(*more: Any, **how: Any) -> Call:
    """Return a function that calls an op on all leaves of the inputs and these arguments."""
    return lambda fn, inputs: fn(*inputs.leaves.values(), *more, **how)


def with_gradients(call: Call, inputs: Inputs, leaves: Tensors | None = None) -> list[torch.Tensor]:
    """Return the outputs of ``call``, and the gradients of ``leaves``, by default the inputs' leaves."""
    returned, inputs_of_grad = call(inputs), list(inputs.leaves.values() if leaves is None else leaves)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    gradients = torch.autograd.grad(
        outputs, inputs_of_grad, list(inputs.cotangents.values()), allow_unused=True, materialize_grads=True
    )
    return [*(output.detach() for output in outputs), *gradients]


class Draw:
    """Random numbers for one device and dtype, the same for the same seed."""

    def __init__(self, options: Options, seed: int = 1) -> None:
        self.device, self.dtype = options.device, getattr(torch, options.dtype)
        self.generator = torch.Generator(options.device).manual_seed(seed)
        self.itemsize = int(self.dtype.itemsize)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw normally distributed numbers, times ``scale``."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return (numbers * scale).to(self.dtype if dtype is None else dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Draw uniform integers from 0 to ``below``, exclusive."""
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def leaves(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``tensors`` as leaves that get gradients."""
        return {name: tensor.requires_grad_() for name, tensor in tensors.items()}
