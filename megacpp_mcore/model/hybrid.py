"""NAM56R on Megatron's HybridModel: A/M/E/R patterns to hybrid patterns and back, and what implements each symbol; no torch.

The part of the hybrid pattern grammar that NAM56R uses (megatron-core 0.19,
``core/models/hybrid/hybrid_layer_allocation.py``)::

    pattern = stage *( "|" stage ) *( "/" "+-" )
    stage   = 1*symbol
    symbol  = "+" / "D" / "M" / "E" / "G"

An A layer is ``+`` (full MLA) or ``D`` (sparse). A hybrid pattern cannot express which sparse layers are Full and which are
Shared: the model's DSA schedule does. The A of an MTP depth is full MLA and a dense feed-forward part, ``+-``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacpp_mcore.errors import PatternError
from megacpp_mcore.model import Layout, Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.pattern import FULL_ATTENTION, Pattern

FULL_MLA, SPARSE_MLA = "+", "D"
MTP_BLOCK = "+-"
"""The hybrid pattern of one MTP depth: full MLA, then a dense feed-forward layer."""


@dataclass(frozen=True)
class Slot:
    """The layer slot of one symbol of a hybrid pattern.

    Attributes:
        symbol: the symbol.
        letter: the NAM56R block it hosts.
        attribute: the field of Megatron's ``HybridStackSubmodules``; None if the block is built without one.
        stock: Megatron's meaning of the symbol.
        native: True if the layer is what Megatron means by the symbol, with whichever kernels; False if our mixer occupies
            the slot of another layer type.
        why: the reason, human-readable.
    """

    symbol: str
    letter: str
    attribute: str | None
    stock: str
    native: bool
    why: str


SLOTS = (
    Slot(
        FULL_MLA,
        "A",
        "mla_layer",
        "multi-head latent attention",
        True,
        "stock MLASelfAttention; the core attention is ours, as stock's takes no unequal head widths without "
        "Transformer Engine",
    ),
    Slot(
        SPARSE_MLA,
        "A",
        "dsa_layer",
        "DeepSeek sparse attention",
        True,
        "stock AbsorbedMLASelfAttention and DSAIndexer; the core attention is ours, with the index cache between Full and "
        "Shared layers, which one spec a slot cannot tell apart: they are told apart by layer number",
    ),
    Slot(
        "M",
        "M",
        "mamba_layer",
        "Mamba-2",
        False,
        "Mamba-3 takes the slot of Mamba-2, as a TransformerLayer: stock has no Mamba-3 mixer",
    ),
    Slot(
        "E", "E", "moe_layer", "mixture of experts", True, "stock MoELayer; its router and its routed experts are ours"
    ),
    Slot(
        "G",
        "R",
        "gdn_layer",
        "gated delta net",
        False,
        "M²RNN takes the slot of the gated delta net, as a TransformerLayer: stock has no M²RNN, and no symbol is free",
    ),
    Slot(
        MTP_BLOCK,
        "A",
        None,
        "multi-head latent attention, then a dense feed-forward layer",
        True,
        "the shared MTP block, one TransformerLayer of stock MLA and stock MLP: the same computation as two layers, under "
        "the names that the GPT host has",
    ),
)
"""All symbols that NAM56R uses; :data:`MTP_BLOCK` consists of two of them, only in the MTP part."""

_TRUNK = {slot.symbol: slot for slot in SLOTS if slot.symbol != MTP_BLOCK}
_SYMBOLS = {slot.letter: slot.symbol for slot in SLOTS if slot.letter != "A"}
_REFUSED = {
    "*": "stock attention, which NAM56R does not have: its attention is '+' (full MLA) or 'D' (sparse MLA)",
    "-": f"a dense feed-forward layer, which NAM56R has in an MTP depth ({MTP_BLOCK!r}) only",
    "A": "an attention layer of a NAM56R pattern; a hybrid pattern writes '+' (full MLA) or 'D' (sparse MLA)",
    "R": "an M²RNN layer of a NAM56R pattern; a hybrid pattern writes 'G'",
}
_ALLOWED = (
    "+ (full MLA), D (sparse MLA), M (Mamba-3), E (experts), G (M²RNN), '|' (pipeline-stage boundary) and "
    f"'/{MTP_BLOCK}' (an MTP depth)"
)


@dataclass(frozen=True)
class Translation:
    """A hybrid pattern parsed as a NAM56R model.

    Attributes:
        pattern: stages and MTP depths in A/M/E/R, with every layer written out (a hybrid pattern is never tiled).
        sparse: 1-based numbers of the A layers with sparse attention, Full and Shared alike.
    """

    pattern: Pattern
    sparse: tuple[int, ...]

    @property
    def layers(self) -> str:
        """The letter of each trunk layer."""
        return "".join(self.pattern.stages)

    @property
    def chunks(self) -> tuple[range, ...]:
        """The 1-based layer numbers of each stage."""
        found, first = [], 1
        for stage in self.pattern.stages:
            found.append(range(first, first + len(stage)))
            first += len(stage)
        return tuple(found)


def to_hybrid(pattern: Pattern, roles: Sequence[str | None]) -> str:
    """The hybrid pattern of ``pattern``, an untiled pattern whose layers have the attention ``roles``.

    ``from_hybrid(to_hybrid(pattern, roles))`` is ``pattern`` and the layers whose role is not full attention.

    Raises:
        PatternError: the roles do not match the layers, or an MTP depth is not a single A.
    """
    letters = "".join(pattern.stages)
    if len(roles) != len(letters):
        raise PatternError(
            f"pattern {str(pattern)!r} has {len(letters)} layers, but there are attention roles for {len(roles)}; give one "
            "a layer"
        )
    symbols = [
        _symbol(number, letter, role) for number, (letter, role) in enumerate(zip(letters, roles, strict=True), start=1)
    ]
    for depth, part in enumerate(pattern.mtp, start=1):
        if part != "A":
            raise PatternError(
                f"pattern {str(pattern)!r}: MTP depth {depth} is {part!r}; HybridModel hosts a depth of one A ({MTP_BLOCK!r})"
            )
    stages = ["".join(symbols[chunk.start - 1 : chunk.stop - 1]) for chunk in Translation(pattern, ()).chunks]
    return "|".join(stages) + f"/{MTP_BLOCK}" * len(pattern.mtp)


def _symbol(number: int, letter: str, role: str | None) -> str:
    if letter not in grammar.LETTERS or (role is None) != (letter != "A") or role not in (None, *grammar.ROLES):
        raise PatternError(
            f"layer {number} is {letter!r} with the attention role {role!r}; expected one of {', '.join(grammar.LETTERS)}, "
            f"a role ({', '.join(grammar.ROLES)}) for an A, and None for all others"
        )
    if letter != "A":
        return _SYMBOLS[letter]
    return FULL_MLA if role == FULL_ATTENTION else SPARSE_MLA


def from_hybrid(text: str) -> Translation:
    """Parse the hybrid pattern ``text`` of a NAM56R model.

    Stricter than Megatron, which accepts empty stages and ignores an MTP part without symbols.

    Raises:
        PatternError: names the offending symbol, its 1-based position, and what is allowed.
    """
    if not isinstance(text, str) or not text:
        raise PatternError(f"a hybrid pattern is a text of {_ALLOWED}; found {text!r}")
    trunk, *depths = text.split("/")
    stages = trunk.split("|")
    position = 1
    for stage in stages:
        _check_stage(text, stage, position)
        position += len(stage) + 1
    for depth in depths:
        if depth != MTP_BLOCK:
            raise PatternError(
                f"hybrid pattern {text!r}: the MTP depth at position {position} is {depth!r}; NAM56R's is {MTP_BLOCK!r}, "
                "full MLA and a dense feed-forward layer"
            )
        position += len(depth) + 1
    symbols = "".join(stages)
    return Translation(
        Pattern(
            stages=tuple("".join(_TRUNK[symbol].letter for symbol in stage) for stage in stages),
            mtp=("A",) * len(depths),
        ),
        tuple(number for number, symbol in enumerate(symbols, start=1) if symbol == SPARSE_MLA),
    )


def _check_stage(text: str, stage: str, position: int) -> None:
    """Refuse an empty stage, and symbols that NAM56R does not use; ``position`` is that of its first symbol."""
    if not stage:
        raise PatternError(
            f"hybrid pattern {text!r}: the pipeline stage at position {position} is empty; write at least one layer there"
        )
    for offset, symbol in enumerate(stage):
        if symbol not in _TRUNK:
            meaning = f"is {_REFUSED[symbol]}" if symbol in _REFUSED else "is not known"
            raise PatternError(
                f"hybrid pattern {text!r}: {symbol!r} at position {position + offset} {meaning}; allowed are {_ALLOWED}"
            )


@dataclass(frozen=True)
class Plan:
    """How a model maps to HybridModel; immutable.

    Attributes:
        model: the model.
        text: the hybrid pattern, with the pipeline stages of the layout and the MTP depths.
        slots: the symbols in ``text``, in the order of :data:`SLOTS`, each native or ours, and why.
    """

    model: Model
    text: str
    slots: tuple[Slot, ...]

    @property
    def symbols(self) -> str:
        """The symbol of each trunk layer."""
        return self.text.partition("/")[0].replace("|", "")

    def describe(self) -> tuple[str, ...]:
        """One line per symbol: how many layers, native or ours, and why."""
        counts = {slot.symbol: self.symbols.count(slot.symbol) for slot in self.slots}
        counts[MTP_BLOCK] = self.model.mtp.depth
        return tuple(
            f"{slot.symbol} ×{counts[slot.symbol]} ({slot.letter}, Megatron's {slot.stock}): "
            f"{'native' if slot.native else 'ours'}: {slot.why}"
            for slot in self.slots
        )


def plan(model: Model, layout: Layout | None = None) -> Plan:
    """The plan of ``model`` under ``layout`` (default: one stage).

    Raises:
        ModelError: the layers cannot be split that way.
    """
    chunks = model.chunks(layout or Layout()) if layout or not grammar.parse(model.pattern).staged else _own(model)
    stages = tuple(model.layers[chunk.start - 1 : chunk.stop - 1] for chunk in chunks)
    text = to_hybrid(Pattern(stages, ("A",) * model.mtp.depth), model.roles)
    used = set(text.partition("/")[0]) | ({MTP_BLOCK} if model.mtp.depth else set())
    return Plan(model, text, tuple(slot for slot in SLOTS if slot.symbol in used))


def _own(model: Model) -> tuple[range, ...]:
    """The stages marked in the model's own pattern."""
    return Translation(grammar.parse(model.pattern), ()).chunks


def contradictions(model: Model, text: str | None) -> list[str]:
    """Every contradiction between a run's hybrid pattern ``text`` and ``model``, one sentence each.

    Stages are not compared: they belong to the layout and are checked with it.
    """
    where, remedy = (
        "hybrid_layer_pattern",
        f"--hybrid-layer-pattern '{plan(model).text}', with '|' between pipeline stages",
    )
    if text is None:
        return [f"{where}: not given, expected {plan(model).text!r} ({remedy})"]
    try:
        found = from_hybrid(text)
    except PatternError as error:
        return [f"{where}: {error} ({remedy})"]
    problems = []
    if found.layers != model.layers:
        problems.append(f"{where}: found layers {found.layers}, expected {model.layers} ({remedy})")
    else:
        sparse = tuple(number for number, role in enumerate(model.roles, start=1) if role not in (None, FULL_ATTENTION))
        if found.sparse != sparse:
            problems.append(
                f"{where}: found sparse attention (D) in layers {_numbers(found.sparse)}, expected {_numbers(sparse)} "
                f"({remedy})"
            )
    if len(found.pattern.mtp) != model.mtp.depth:
        problems.append(f"{where}: found {len(found.pattern.mtp)} MTP depths, expected {model.mtp.depth} ({remedy})")
    return problems


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
