"""The parts of a benchmark: inputs, the variants that are compared on them, floors."""

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
from megacpp_mcore.bench.catalog import OURS, PEER, Options
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import Work
from megacpp_mcore.ops import quantised_weights
from megacpp_mcore.ops.main_grad import MainGrad

FORWARD, BOTH = "forward", "forward+backward"

PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
"""Fastest precision for products of inputs of a dtype, by the names of :mod:`megacpp_mcore.model.flops.peaks`."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random inputs.

    Attributes:
        leaves: the tensors that get a gradient, by name.
        cotangents: the gradients of the outputs, by the outputs' names.
        fixed: all other arguments of a variant.
    """

    leaves: Mapping[str, torch.Tensor]
    cotangents: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results of forward and backward: the outputs, then the gradient of each leaf."""
        return (*self.cotangents, *(f"d{name}" for name in self.leaves))

    def with_new_leaves(self) -> Inputs:
        """Return the same inputs, whose leaves are other tensors with the same memory."""
        leaves = {name: leaf.detach().requires_grad_(leaf.requires_grad) for name, leaf in self.leaves.items()}
        return dataclasses.replace(self, leaves=leaves)

    def in_double(self) -> Inputs:
        """Return the same numbers in float64; fixed arguments are unchanged."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        cotangents = {name: given.double() for name, given in self.cotangents.items()}
        return dataclasses.replace(self, leaves=leaves, cotangents=cotangents)


Call = Callable[..., Any]
"""A forward pass: from the inputs to its one output, or to a tuple of them."""


class Captured:
    """A piece of work as a CUDA graph: captured at its first call, after a few calls that compile and tune, then replayed.

    Its results are the graph's own tensors, which the next call overwrites.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._results = call, None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *given: Any) -> Any:
        """Replay the graph; ``given`` must be the first call's arguments every time."""
        if self._graph is None:
            apart = torch.cuda.Stream()
            apart.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(apart):
                for _ in range(3):
                    self._call(*given)
            torch.cuda.current_stream().wait_stream(apart)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = self._call(*given)
        self._graph.replay()
        return self._results


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of a problem.

    Attributes:
        name: its name in the table.
        side: ours, a peer, or a bound, which is timed and compared with nothing.
        runs: the functions to be timed, by name of the work; each returns one tensor or several, outputs first.
        results: brings the results of ``runs`` into the order and layout of the truth; not timed.
        around: context around every run, such as a patch.
        absent: why it cannot run here; then ``runs`` is empty.
        truth: its own truth where the problem's does not apply, because it does other work; it then has no speed-up.
        limit: its own largest error of a row, for all results or by name, where it differs from the problem's.
        is_reference: whether the truth is made by this very program, so that their agreement proves nothing.
        is_captured: whether ``runs`` are replays of CUDA graphs: they take no memory of their own, and are compared only
            with other replays.
    """

    name: str
    side: str
    runs: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    results: Callable[[Tensors], Tensors] = list
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
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
        runs = {
            work: Captured(lambda inputs, run=run: run(inputs.with_new_leaves())) for work, run in self.runs.items()
        }
        name, opening, rest = self.name.partition(" (")
        return dataclasses.replace(self, name=f"{name}, CUDA graph{opening}{rest}", runs=runs, is_captured=True)

    def quantising(self) -> Variant:
        """Return this variant with FP8 weights quantised in every call, like the first one after an optimizer's step."""

        def anew(run: Callable[..., Any], inputs: Inputs, **how: Any) -> Any:
            quantised_weights.forget()
            found = run(inputs, **how)
            quantised_weights.forget()
            return found

        return dataclasses.replace(self, runs={work: partial(anew, run) for work, run in self.runs.items()})

    def into_main_grad(self, *names: str) -> Variant:
        """Return this variant adding gradients to float32 buffers, as Megatron does: of the leaves ``names``, the last ones.

        Its forward pass takes ``main_grads``, one of each. Before the first call, which checks parity, they are zero.
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
    def of(
        cls, name: str, side: str, call: Call, leaves: Callable[[Inputs], Tensors] | None = None, **more: Any
    ) -> Variant:
        """Return the variant whose forward pass is ``call`` and whose backward pass is autograd's.

        ``leaves`` returns the tensors to differentiate, by default the leaves of the inputs; ``more`` are other fields.
        """

        def both(inputs: Inputs, **how: Any) -> list[torch.Tensor]:
            return with_gradients(partial(call, **how), inputs, None if leaves is None else leaves(inputs))

        return cls(name=name, side=side, runs={FORWARD: call, BOTH: both}, **more)

    @classmethod
    def candidates(cls, op: str, options: Options, call: Callable[..., Any], **needs: Any) -> Iterator[Variant]:
        """Yield our variants: every backend of ``op`` but stock's module, with the reason for those that cannot run here.

        ``call`` computes the output from a backend's function and the inputs; ``needs`` are further requirements of the
        backend, or replacements, as in a request.
        """
        for candidate in backends.own_candidates():
            if candidate.op != op or candidate.name == backends.STOCK:
                continue
            if reason := obstacle(candidate, options, **needs):
                yield cls.missing(candidate.name, reason, OURS)
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


def obstacle(candidate: backends.Candidate, options: Options, **needs: Any) -> str:
    """Return why a backend cannot run here, or does not cover device, dtype and ``needs``; empty if it can."""
    present = candidate.present()
    lacking = candidate.support.lacking({"device": options.device, "dtype": options.dtype, **needs})
    reason = lacking if present.ok else present.reason
    return f"not here: {reason}" if reason else ""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The work that no implementation can avoid.

    Attributes:
        operations: floating-point operations, from :mod:`megacpp_mcore.model.flops`.
        moved: bytes that have to be read or written once.
        precision: the fastest one for the operations, of :data:`megacpp_mcore.model.flops.peaks.PRECISIONS`.
    """

    operations: int
    moved: int
    precision: str

    @classmethod
    def pair(cls, work: Work, forward_bytes: int, both_bytes: int, dtype: str) -> dict[str, Floor]:
        """Return the floors of a forward pass, and of forward and backward together."""
        return {
            FORWARD: cls(operations=work.forward, moved=forward_bytes, precision=PRECISIONS[dtype]),
            BOTH: cls(operations=work.training, moved=both_bytes, precision=PRECISIONS[dtype]),
        }


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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One benchmark at one size.

    Attributes:
        inputs: of every variant.
        variants: in the order in which they run.
        works: the pieces of work to check and time, each with its floor.
        check: runs a variant on a piece of work and the inputs, within its context, and judges parity.
        stock: the peer that ours are compared with; empty: the fastest correct one.
        shape: sizes for the table, where they are not just those requested.
    """

    inputs: Any
    variants: Sequence[Variant]
    works: Mapping[str, Floor]
    check: Callable[[Variant, str, Any], Result]
    stock: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)


def with_gradients(call: Call, inputs: Inputs, leaves: Tensors | None = None) -> list[torch.Tensor]:
    """Return the outputs of ``call``, and the gradients of ``leaves``, by default the inputs' leaves."""
    made, wanted = call(inputs), list(inputs.leaves.values() if leaves is None else leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    gradients = torch.autograd.grad(
        outputs, wanted, list(inputs.cotangents.values()), allow_unused=True, materialize_grads=True
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
