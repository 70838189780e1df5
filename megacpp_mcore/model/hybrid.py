"""NAM56R on Megatron's HybridModel: A/M/E/R patterns to hybrid patterns and back, and what implements each symbol; no torch.

The part of the hybrid pattern grammar that NAM56R uses (megatron-core 0.19,
``core/models/hybrid/hybrid_layer_allocation.py``)::

    pattern = stage *( "|" stage ) *( "/" "+-" )
    stage   = 1*symbol
    symbol  = "+" / "D" / "M" / "E" / "G"

An A layer is ``+`` (full MLA, or over a window) or ``D`` (sparse). A hybrid pattern cannot express which sparse layers are Full
and which are Shared: the model's DSA schedule does. The A of an MTP depth is full MLA and a dense feed-forward part, ``+-``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Layout, Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.families.attention_family import FULL_MLA, MTP_BLOCK, SPARSE, SPARSE_MLA
from megacpp_mcore.model.families.base import Slot


def slots() -> tuple[Slot, ...]:
    """Return the slots of all families; :data:`MTP_BLOCK` is two symbols of one, only in the MTP part."""
    family_slots = [slot for family in FAMILIES.values() for slot in family.slots]
    return tuple(sorted(family_slots, key=lambda slot: slot.symbol == MTP_BLOCK))


def chunks(text: str) -> tuple[range, ...]:
    """Return the 1-based layer numbers of each stage of a pattern, hybrid or not; MTP depths are left out."""
    ranges, first = [], 1
    for stage in text.partition("/")[0].split("|"):
        ranges.append(range(first, first + len(stage)))
        first += len(stage)
    return tuple(ranges)


@dataclass(frozen=True)
class Plan:
    """How a model maps to HybridModel; immutable.

    Attributes:
        text: the hybrid pattern, with the pipeline stages of the layout and the MTP depths.
        slots: the symbols in ``text``, in the order of :func:`slots`, each native or ours, and why.
    """

    model: Model
    text: str
    slots: tuple[Slot, ...]

    @property
    def symbols(self) -> str:
        """The symbol of each trunk layer."""
        return self.text.partition("/")[0].replace("|", "")

    def describe(self) -> tuple[str, ...]:
        """Return one line per symbol: how many layers, native or ours, and why."""
        counts = {slot.symbol: self.symbols.count(slot.symbol) for slot in self.slots}
        counts[MTP_BLOCK] = self.model.mtp.depth
        letters = {slot: family.letter for family in FAMILIES.values() for slot in family.slots}
        return tuple(
            f"{slot.symbol} ×{counts[slot.symbol]} ({letters[slot]}, Megatron's {slot.stock}): "
            f"{'native' if slot.native else 'ours'}: {slot.why}"
            for slot in self.slots
        )


def plan(model: Model, layout: Layout | None = None) -> Plan:
    """Plan ``model`` under ``layout`` (default: one stage).

    Raises:
        ModelError: the layers cannot be split that way.
    """
    is_staged = grammar.parse(model.pattern).staged
    stages = model.chunks(layout or Layout()) if layout or not is_staged else chunks(model.pattern)
    for letter in dict.fromkeys(model.layers):
        if not FAMILIES[letter].slots:
            raise ModelError(
                f"{model.name}: {letter} layers have no slot in HybridModel; train on GPTModel (--model-class gpt)"
            )
    symbols = [
        FAMILIES[letter].slots[0].symbol if role is None else SPARSE_MLA if role in SPARSE else FULL_MLA
        for letter, role in zip(model.layers, model.roles, strict=True)
    ]
    trunk = "|".join("".join(symbols[chunk.start - 1 : chunk.stop - 1]) for chunk in stages)
    used = {*symbols, *[MTP_BLOCK] * model.mtp.depth}
    return Plan(model, trunk + f"/{MTP_BLOCK}" * model.mtp.depth, tuple(slot for slot in slots() if slot.symbol in used))


def contradictions(model: Model, text: str | None) -> list[str]:
    """Name the contradiction between a run's hybrid pattern ``text`` and ``model``; an empty list without one.

    Stages are not compared, except that none may be empty: they belong to the layout and are checked with it.
    """
    own = plan(model).text
    trunk, _, depths = (text or "").partition("/")
    own_trunk, _, own_depths = own.partition("/")
    if all(trunk.split("|")) and (trunk.replace("|", ""), depths) == (own_trunk.replace("|", ""), own_depths):
        return []
    return [
        f"hybrid_layer_pattern: found {text!r}, expected {own!r} with '|' between pipeline stages, and no other symbol "
        f"(--hybrid-layer-pattern '{own}')"
    ]
