"""What a benchmark is made of: inputs, the variants that are compared on them, floors."""

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
from megacpp_mcore.backends.candidates import grouped_fp8_candidates
from megacpp_mcore.bench.measure import Captured
from megacpp_mcore.bench.registry import OURS, PEER, Options
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
        cotangents: the gradients of the outputs, by the outputs' names.
        fixed: all else that a variant is called with.
    """

    leaves: Mapping[str, torch.Tensor]
    cotangents: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What forward and backward give: the outputs, then the gradient of each leaf."""
        return (*self.cotangents, *(f"d{name}" for name in self.leaves))

    def in_double(self) -> Inputs:
        """The same numbers in float64; what is fixed stays as it is."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        return dataclasses.replace(
            self, leaves=leaves, cotangents={name: given.double() for name, given in self.cotangents.items()}
        )


Call = Callable[[Inputs], Any]
"""A forward pass: from the inputs to its one output, or to a tuple of them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of what a problem asks for.

    Attributes:
        name: how the table calls it.
        side: ours, a peer, or a bound, which is timed and compared with nothing.
        runs: by name of the work, what is timed; it gives one tensor or several, outputs first.
        results: brings what ``runs`` give into the order and layout of the truth; not timed.
        around: what has to be in place around every run, such as a patch.
        absent: why it cannot run here; then ``runs`` is empty.
        truth: the truth where it has another one than the problem, because it does other work; no speed-up is over it then.
        limit: the largest error of a row, where it has another one than the problem.
        is_reference: whether the truth is made by this very program, so that their agreement proves nothing.
        is_captured: whether ``runs`` are replays of CUDA graphs: they take no memory of their own, and are compared with
            other replays alone.
    """

    name: str
    side: str
    runs: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    results: Callable[[Tensors], Tensors] = list
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    absent: str = ""
    truth: Mapping[str, torch.Tensor] | None = None
    limit: float | None = None
    is_reference: bool = False
    is_captured: bool = False

    def captured(self) -> Variant:
        """This one as CUDA graphs, a graph a piece of work: what the device takes, and no time of the host."""
        runs = {work: Captured(run) for work, run in self.runs.items()}
        name, opening, rest = self.name.partition(" (")
        return dataclasses.replace(self, name=f"{name}, CUDA graph{opening}{rest}", runs=runs, is_captured=True)

    def deterministic(self) -> Variant:
        """This one as Megatron's ``--deterministic-mode`` runs it."""
        return dataclasses.replace(self, name=f"{self.name}, deterministic", around=_deterministic_algorithms)

    @classmethod
    def missing(cls, name: str, reason: str, side: str = PEER) -> Variant:
        """One that cannot run here."""
        return cls(name=name, side=side, absent=reason)

    @classmethod
    def of(
        cls, name: str, side: str, call: Call, leaves: Callable[[Inputs], Tensors] | None = None, **more: Any
    ) -> Variant:
        """The one whose forward pass is ``call`` and whose backward pass is autograd's.

        Args:
            name: of the variant.
            side: of the variant.
            call: the forward pass.
            leaves: what is differentiated; by default the leaves of the inputs.
            more: other fields of the variant.
        """

        def both(inputs: Inputs) -> list[torch.Tensor]:
            return with_gradients(call, inputs, None if leaves is None else leaves(inputs))

        return cls(name=name, side=side, runs={FORWARD: call, BOTH: both}, **more)

    @classmethod
    def candidates(cls, op: str, options: Options, call: Callable[..., Any], **needs: Any) -> Iterator[Variant]:
        """Ours: every backend of ``op`` but stock's module, those that cannot run here with the reason.

        Args:
            op: an op of the dispatcher.
            options: device and dtype.
            call: from a backend's function and the inputs to the output.
            needs: what the backend has to cover besides, or instead, as in a request.

        Raises:
            BenchmarkError: no backend of that op is known.
        """
        every = (*backends.own_candidates(), *grouped_fp8_candidates())
        known = [one for one in every if one.op == op and one.name != backends.STOCK]
        if not known:
            raise BenchmarkError(f"op {op!r} has no backend; name what is measured in the benchmark itself")
        for candidate in known:
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
    """Why a backend cannot run here, or does not cover device, dtype and ``needs``; empty if it can."""
    present = candidate.present()
    lacking = candidate.support.lacking({"device": options.device, "dtype": options.dtype, **needs})
    reason = lacking if present.ok else present.reason
    return f"not here: {reason}" if reason else ""


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

    @classmethod
    def pair(cls, work: Work, forward_bytes: int, both_bytes: int, dtype: str) -> dict[str, Floor]:
        """Those of a forward pass, and of forward and backward together."""
        return {
            FORWARD: cls(operations=work.forward, moved=forward_bytes, precision=PRECISIONS[dtype]),
            BOTH: cls(operations=work.training, moved=both_bytes, precision=PRECISIONS[dtype]),
        }


@dataclass(frozen=True)
class Result:
    """What became of one variant in one piece of work.

    Attributes:
        right: whether it computes the right thing; None where that could not be checked, or would prove nothing.
        parity: the same in words.
        errors: the worst row of each of its results.
        ms: milliseconds, as the median of ``repeats`` calls; None where there is no time, and ``note`` says why.
        peak: bytes, None where they are not counted.
    """

    right: bool | None
    parity: str
    errors: Mapping[str, float] = field(default_factory=dict)
    ms: float | None = None
    peak: int | None = None
    repeats: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One benchmark at one size.

    Attributes:
        inputs: what every variant gets.
        variants: in the order in which they run.
        works: what is checked and timed, and its floor.
        check: runs a variant on a piece of work and the inputs, in what is around it, and decides about parity.
        stock: the peer that ours are compared with; empty: the fastest one that is right.
        computed: bytes of peak memory counted by hand, by variant and work.
        shape: sizes as the table gives them, where they are not those asked for alone.
    """

    inputs: Any
    variants: Sequence[Variant]
    works: Mapping[str, Floor]
    check: Callable[[Variant, str, Any], Result]
    stock: str = ""
    computed: Mapping[tuple[str, str], int] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)


def with_gradients(call: Call, inputs: Inputs, leaves: Tensors | None = None) -> list[torch.Tensor]:
    """The outputs of ``call``, and the gradients of ``leaves``, by default of the inputs' own."""
    made, wanted = call(inputs), list(inputs.leaves.values() if leaves is None else leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    gradients = torch.autograd.grad(
        outputs, wanted, list(inputs.cotangents.values()), allow_unused=True, materialize_grads=True
    )
    return [*(output.detach() for output in outputs), *gradients]


class Draw:
    """Random numbers of one device and dtype, the same for the same seed."""

    def __init__(self, options: Options, seed: int = 1) -> None:
        self.device, self.dtype = options.device, getattr(torch, options.dtype)
        self.generator = torch.Generator(options.device).manual_seed(seed)
        self.itemsize = int(self.dtype.itemsize)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed, times ``scale``."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return (numbers * scale).to(self.dtype if dtype is None else dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Uniform, from 0 on."""
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def leaves(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """``tensors`` as leaves that get gradients."""
        return {name: tensor.requires_grad_() for name, tensor in tensors.items()}
