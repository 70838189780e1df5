"""The A/M/E/R pattern grammar: parsing, tiling, DSA and index-cache roles, splitting into pipeline chunks; pure Python.

Grammar (``|`` marks a pipeline-stage boundary, ``/`` starts the pattern of one multi-token-prediction depth)::

    pattern  = stage *( "|" stage ) *( "/" 1*letter )
    stage    = 1*letter
    letter   = of one of the families

Layer numbers are 1-based everywhere, as in Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.families.attention_family import FULL_ATTENTION as FULL_ATTENTION
from megacpp_mcore.model.families.attention_family import FULL_INDEX, ROLES, SHARED_INDEX
from megacpp_mcore.model.families.attention_family import SPARSE as SPARSE
from megacpp_mcore.model.families.attention_family import WINDOWED as WINDOWED

_LETTERS = ", ".join(FAMILIES)
_ALLOWED = f"{_LETTERS}, '|' (pipeline-stage boundary) and '/' (start of an MTP pattern)"


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: the letters of each pipeline stage (one entry without ``|``), and a pattern per MTP depth."""

    stages: tuple[str, ...]
    mtp: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "|".join(self.stages) + "".join("/" + part for part in self.mtp)

    @property
    def staged(self) -> bool:
        """Whether the pattern marks pipeline stages (which turns tiling off)."""
        return len(self.stages) > 1

    def layers(self, depth: int) -> str:
        """Return the letters of all ``depth`` trunk layers.

        A pattern without ``|`` is tiled by ``i % len(pattern)``; with ``|`` its length must equal the depth.

        Raises:
            PatternError: the depth is not positive, or a staged pattern's length differs from it.
        """
        letters = "".join(self.stages)
        if depth < 1:
            raise PatternError(f"pattern {str(self)!r}: the depth is {depth}; give a positive number of layers")
        if self.staged and len(letters) != depth:
            raise PatternError(
                f"pattern {str(self)!r} marks stages with '|' and holds {len(letters)} layers, the depth is {depth}; "
                f"write all {depth} layers, or drop the '|' to have the pattern tiled"
            )
        return "".join(letters[i % len(letters)] for i in range(depth))


def parse(text: str) -> Pattern:
    """Parse ``text``; ``str(parse(text)) == text`` for every legal text.

    Raises:
        PatternError: names the offending character, its 1-based position, and what is allowed there.
    """
    if not isinstance(text, str):
        raise PatternError(f"a pattern is a string of {_ALLOWED}; found {type(text).__name__}")
    if not text:
        raise PatternError(f"the pattern is empty; allowed are {_ALLOWED}")
    in_mtp = False
    for position, character in enumerate(text, start=1):
        where = f"pattern {text!r}: character {character!r} at position {position}"
        if character in FAMILIES:
            continue
        if character not in "|/":
            raise PatternError(f"{where} is not known; allowed are {_ALLOWED}")
        if position == 1 or text[position - 2] in "|/":
            raise PatternError(f"{where} closes an empty part; write at least one of {_LETTERS} before it")
        if position == len(text):
            raise PatternError(f"{where} opens an empty part; write at least one of {_LETTERS} after it")
        if character == "|" and in_mtp:
            raise PatternError(f"{where} is inside an MTP pattern; stage boundaries come before the first '/'")
        in_mtp = in_mtp or character == "/"
    trunk, *mtp = text.split("/")
    return Pattern(stages=tuple(trunk.split("|")), mtp=tuple(mtp))


def attention_roles(layers: str, schedule: str) -> tuple[str | None, ...]:
    """Return the role of every layer: ``-``, ``W``, ``F`` or ``S`` for an A layer, None for the others.

    ``schedule`` has one character per A layer of ``layers`` (see :data:`ROLES`), and is tiled over them if shorter.

    Raises:
        PatternError: unknown character, a schedule longer than the number of A layers, or a Shared layer without a Full layer
            below it.
    """
    if not schedule:
        raise PatternError(f"the DSA schedule is empty; give one of {', '.join(ROLES)} for each A layer")
    for position, character in enumerate(schedule, start=1):
        if character not in ROLES:
            raise PatternError(
                f"DSA schedule {schedule!r}: character {character!r} at position {position} is not known; allowed are "
                + ", ".join(f"{role!r} ({meaning})" for role, meaning in ROLES.items())
            )
    count = layers.count("A")
    if count and len(schedule) > count:
        raise PatternError(
            f"DSA schedule {schedule!r} has {len(schedule)} entries, but the pattern has {count} A layers; "
            "give one entry an A layer, or a shorter schedule that is tiled"
        )
    roles: list[str | None] = []
    ordinal, seen_full = 0, False
    for number, letter in enumerate(layers, start=1):
        if letter != "A":
            roles.append(None)
            continue
        role = schedule[ordinal % len(schedule)]
        if role == SHARED_INDEX and not seen_full:
            raise PatternError(
                f"DSA schedule {schedule!r}: layer {number} is Shared ('S') with no Full ('F') layer below it; "
                "make the first sparse layer Full"
            )
        seen_full = seen_full or role == FULL_INDEX
        roles.append(role)
        ordinal += 1
    return tuple(roles)


def source_layers(roles: Sequence[str | None]) -> dict[int, int]:
    """Map a Shared layer's number to the number of the Full layer whose indices it uses (the nearest below); 1-based.

    Raises:
        PatternError: a Shared layer has no Full layer below it.
    """
    sources: dict[int, int] = {}
    full = None
    for number, role in enumerate(roles, start=1):
        if role == FULL_INDEX:
            full = number
        elif role == SHARED_INDEX:
            if full is None:
                raise PatternError(f"layer {number} is Shared ('S') with no Full ('F') layer below it")
            sources[number] = full
    return sources


def promoted_schedule(roles: Sequence[str | None], chunks: Sequence[range]) -> tuple[str, tuple[int, ...]]:
    """Return the schedule that is valid if each of ``chunks`` (1-based layer numbers) is a separate model chunk.

    A Shared layer that is the first sparse layer of its chunk becomes Full: indices are not passed between chunks.

    Returns:
        The whole schedule, one character per A layer, and the numbers of the promoted layers (empty: nothing to do).
    """
    promoted = []
    for chunk in chunks:
        sparse = [number for number in chunk if roles[number - 1] in SPARSE]
        if sparse and roles[sparse[0] - 1] == SHARED_INDEX:
            promoted.append(sparse[0])
    schedule = "".join(
        FULL_INDEX if number in promoted else role for number, role in enumerate(roles, start=1) if role is not None
    )
    return schedule, tuple(promoted)


def check_chunks(name: str, roles: Sequence[str | None], chunks: Sequence[range], setting: str = "dsa.schedule: {}") -> None:
    """Refuse a layout in which the first sparse layer of a model chunk would be Shared.

    ``setting`` is how the settings file has a schedule, ``{}``.

    Raises:
        ModelError: names the layers and the promoted schedule to adopt.
    """
    schedule, promoted = promoted_schedule(roles, chunks)
    if promoted:
        spans = ", ".join(f"{chunk.start}–{chunk.stop - 1}" for chunk in chunks if len(chunk))
        raise ModelError(
            f"{name}: with model chunks {spans}, the first sparse layer of a chunk would be Shared: "
            f"layer{'s' if len(promoted) > 1 else ''} {', '.join(map(str, promoted))}. Indices do not travel between "
            f"chunks; adopt the promoted schedule {schedule!r} (it is part of the model: set {setting.format(schedule)} in the "
            "file MEGACPP_CONFIG names, for every layout of this model), or choose another layout"
        )


def uniform_chunks(depth: int, pipeline: int, virtual: int = 1) -> tuple[range, ...]:
    """Return the layer numbers of each model chunk if ``depth`` layers are split evenly, in layer order.

    Raises:
        ModelError: they cannot be split evenly.
    """
    parts = pipeline * virtual
    if parts < 1 or depth % parts:
        raise ModelError(
            f"{depth} layers do not split evenly over {pipeline} pipeline stages × {virtual} virtual stages; choose "
            f"stages that divide {depth}, or mark the stages in the pattern with '|'"
        )
    size = depth // parts
    return tuple(range(1 + i * size, 1 + (i + 1) * size) for i in range(parts))
