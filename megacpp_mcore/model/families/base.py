"""A family of layers: its record, and the building blocks of its functions. Pure Python; imports no model.

A family's functions take a :class:`Shape` and its own sizes (the parts of a model named by :attr:`Family.fields`), not a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import ModelError
from megacpp_mcore.util.nearest import nearest_number


def positive(owner: object, *names: str) -> None:
    """Refuse fields that are not positive and finite."""
    for name in names:
        value = getattr(owner, name)
        if not 0 < value < math.inf:  # NaN fails this as well
            raise ModelError(f"{type(owner).__name__}.{name} is {value}; expected a positive, finite number")


def not_negative(owner: object, *names: str) -> None:
    """Refuse fields that are negative or infinite."""
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ModelError(f"{type(owner).__name__}.{name} is {value}; expected 0 (off) or more, and finite")


def divides(what: str, number: int, by: str, divisor: int, *, fixed: bool = False) -> None:
    """Refuse a ``number`` that is not a multiple of ``divisor``; ``fixed``: only the number can be changed."""
    if number % divisor:
        if fixed:
            fitting = f"multiple is {nearest_number(number, range(divisor, number + divisor, divisor))}"
        else:
            divisors = (candidate for candidate in range(1, number + 1) if number % candidate == 0)
            fitting = f"divisor is {nearest_number(divisor, divisors)}"
        raise ModelError(f"{what} ({number}) is not a multiple of {by} ({divisor}); the nearest {fitting}")


def not_shared(what: str, number: int, tensor: int, context: int) -> str:
    """Return why ``number`` heads cannot be split over tensor and context parallelism; empty if they can."""
    number //= tensor
    of_ranks = " of a tensor-parallel rank" if tensor > 1 else ""
    return f"{number} {what}{of_ranks} are not a multiple of it" if number % context else ""


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a part of a model.

    Attributes:
        tensor: those sharded over tensor parallelism.
        expert: those of routed experts, sharded over expert parallelism.
        whole: those replicated on every rank of a stage. They include MLA's down-projections to its latents, as with
            Transformer Engine; ``--transformer-impl local`` shards these as well.
    """

    tensor: int = 0
    expert: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.tensor + self.expert + self.whole

    def __add__(self, other: Count) -> Count:
        return Count(tensor=self.tensor + other.tensor, expert=self.expert + other.expert, whole=self.whole + other.whole)


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward pass and of the corresponding backward pass."""

    forward: int = 0
    backward: int = 0

    @property
    def training(self) -> int:
        """Forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class Batch:
    """``rows`` rows of ``length`` tokens, over which scans run; pairs of their documents: causal, in top-k, in a window."""

    rows: int
    length: int
    causal_pairs: int
    selected_pairs: int
    windowed_pairs: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.length


def causal_pairs(sequence: int) -> int:
    """Count the pairs of one causal sequence: S(S+1)/2."""
    return sequence * (sequence + 1) // 2


def selected_pairs(sequence: int, topk: int) -> int:
    """Count pairs of one causal sequence if each query keeps ``topk`` keys: the sum over rows of min(i+1, topk)."""
    kept = min(topk, sequence)
    return causal_pairs(kept) + (sequence - kept) * kept


def product(multiply_adds: int) -> Work:
    """Count a contraction of that many multiply-adds, with gradients for both operands."""
    return Work(2 * multiply_adds, 4 * multiply_adds)


def feed_forward(tokens: int, hidden: int, width: int) -> Work:
    """Count an MLP of two matrices; for experts, ``tokens`` are the routed ones."""
    return product(tokens * hidden * width * 2)


@dataclass(frozen=True)
class Argument:
    """One stock argument that a model requires.

    Attributes:
        words: command-line words; empty if Megatron's default is the right value.
        field: the field of Megatron's configuration that the argument sets, and that must be as ``expected``.
        remedy: what to change on the command line otherwise.
    """

    words: tuple[str, ...]
    field: str
    expected: Any
    remedy: str

    @property
    def flag(self) -> str:
        """The flag that sets the field: the first of the words, or what the remedy names last."""
        return self.words[0] if self.words else self.remedy.split()[-1]


def option(flag: str, value: Any, field: str | None = None) -> Argument:
    """Require a flag with a value."""
    words = (flag, str(value))
    return Argument(words, field or flag[2:].replace("-", "_"), value, " ".join(words))


def switch(flag: str, field: str, expected: bool) -> Argument:
    """Require a flag without a value."""
    return Argument((flag,), field, expected, flag)


def absent(flag: str, field: str, expected: Any) -> Argument:
    """Require that a flag is left out."""
    return Argument((), field, expected, f"without {flag}")


@dataclass(frozen=True)
class Shape:
    """What families of one model share: its name, hidden size, heads, letters, and attention roles, MTP's block included."""

    name: str
    hidden_size: int
    heads: int
    layers: str
    roles: tuple[str | None, ...]
    mtp_role: str | None = None


@dataclass(frozen=True)
class Slot:
    """The layer slot of one symbol of a hybrid pattern.

    Attributes:
        attribute: the field of Megatron's ``HybridStackSubmodules``; None if the block is built without one.
        stock: Megatron's meaning of the symbol.
        native: True if the layer is what Megatron means by the symbol, with whichever kernels; False if our mixer occupies
            the slot of another layer type.
    """

    symbol: str
    attribute: str | None
    stock: str
    native: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of layers; each function takes the :class:`Shape` and the family's own sizes, in the order of ``fields``.

    Attributes:
        letter: its letter in a pattern.
        name: what it is, for messages.
        part: its name in tables of parts.
        group: its group in receipts.
        fields: the fields of a model that hold its sizes.
        is_mixer: whether it takes a layer's attention slot; otherwise it is a feed-forward part.
        slots: its slots in HybridModel.
        parameters: ``(shape, role, *sizes)`` to the parameters of a layer with an attention role (None but in A layers).
        works: names of its work in the FLOP count.
        work: ``(shape, role, batch, *sizes)`` to the work of a layer, by those names.
        check: ``(shape, *sizes)``; raises ModelError where they do not go together.
        check_layout: ``(shape, tensor, expert, *sizes)``; raises ModelError where a layer cannot be sharded so.
        no_context: ``(shape, tensor, context, *sizes)`` to why a layer cannot share a sequence over that many ranks; empty if
            it can.
        arguments: ``(shape, *sizes)`` to the stock arguments of a model with such layers.
        without: those of a model without such layers.
        in_fp32: what it computes in fp32, whatever the precision of the run.
        without_tf32: what it computes in fp32 without products that TF32 reaches.
        kept: ``(shape, role, *sizes)`` to the bytes a token, in 16 bits, that a layer keeps for its backward pass besides its
            input and the normed one: those that its recompute leaves out, and the others.
        recompute: its name under ``recompute`` in the settings file; empty without.
        recomputed: the names of the work that it repeats.
        repeated_by: Megatron's ``--recompute-modules`` that repeat it, or a part of it, too.
        fp8: the option of :class:`megacpp_mcore.te.fp8_scopes.FP8` for its dense products; empty without.
        scoped: ``(shape, role, tokens, *sizes)`` to the name of the work in that scope, and the part of it that stays outside.
        card: ``(shape, *sizes)`` to its rows in the model card.
        papers: for the model card: the layers, what they are, the paper's name, its number on arXiv.
    """

    letter: str
    name: str
    part: str
    group: str
    fields: tuple[str, ...] = ()
    is_mixer: bool = True
    slots: tuple[Slot, ...] = ()
    parameters: Callable[..., Count]
    works: tuple[str, ...]
    work: Callable[..., dict[str, Work]]
    check: Callable[..., None] = lambda *_: None
    check_layout: Callable[..., None] = lambda *_: None
    no_context: Callable[..., str] = lambda _, __, context, *___: (
        "a family of its layers cannot share a sequence" if context > 1 else ""
    )
    arguments: Callable[..., Sequence[Argument]] = lambda *_: ()
    without: Sequence[Argument] = ()
    in_fp32: str = ""
    without_tf32: str = ""
    kept: Callable[..., tuple[int, int]] = lambda shape, *_: (16 * shape.hidden_size, 0)
    recompute: str = ""
    recomputed: tuple[str, ...] = ()
    repeated_by: frozenset[str] = frozenset()
    fp8: str = ""
    scoped: Callable[..., tuple[str, Work]] | None = None
    card: Callable[..., Mapping[str, str]] = lambda *_: {}
    papers: tuple[tuple[str, str, str, str], ...] = ()
