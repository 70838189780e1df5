"""The definition of NAM56R: one tree of frozen dataclasses, its presets, and every check that needs no torch.

A :class:`Model` defines the mathematics, independently of the machine; a :class:`Layout` says how it is sharded over
processes. ``check_layout`` checks their combination before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model import parameters
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families import FAMILIES, Family, mamba_family, recurrent_family
from megacpp_mcore.model.families.attention_family import ATTENTION, DSA, FULL_ATTENTION, MLA, WINDOWED, YaRN
from megacpp_mcore.model.families.base import Shape, divides, not_negative, positive
from megacpp_mcore.model.families.experts_family import MoE
from megacpp_mcore.model.families.mamba_family import Mamba3
from megacpp_mcore.model.families.recurrent_family import M2RNN
from megacpp_mcore.util import schema
from megacpp_mcore.util.nearest import nearest, nearest_number


@dataclass(frozen=True, kw_only=True)
class MTP:
    """Multi-token prediction with one shared block (FastMTP arXiv 2509.18362; DeepSeek-V3 arXiv 2412.19437).

    Depth k's loss has weight ``loss_scale * loss_decay**(k-1) / sum_j loss_decay**(j-1)``; depth 0 turns MTP off.
    ``attention``: ``-`` or ``W``, the role of its block, as for an A layer in a DSA schedule.
    """

    depth: int = 2
    loss_scale: float = 0.3
    loss_decay: float = 0.6
    attention: str = FULL_ATTENTION

    def __post_init__(self) -> None:
        not_negative(self, "depth", "loss_scale")
        if self.attention not in (FULL_ATTENTION, WINDOWED):
            raise ModelError(
                f"MTP.attention is {self.attention!r}; expected {FULL_ATTENTION!r} (every key) or {WINDOWED!r} (a window)"
            )
        if not 0 < self.loss_decay <= 1:
            raise ModelError(f"MTP.loss_decay is {self.loss_decay}; expected more than 0 and at most 1")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each depth's mean loss in the total loss."""
        powers = [self.loss_decay**k for k in range(self.depth)]
        return tuple(self.loss_scale * power / sum(powers) for power in powers)


@dataclass(frozen=True, kw_only=True)
class Initialization:
    """The standard deviations of initial weights (docs/model.md, "The start").

    Attributes:
        std: of every matrix, as in Megatron, divided by √(2 · depth) in those that write to the residual stream; None: by
            fan-in, 1 / √(columns), divided likewise.
        embedding_std: of the embedding.
        head_gain: factor on the output head; only with ``std`` None.
    """

    std: float | None = None
    embedding_std: float = 1.0
    head_gain: float = 0.5

    def __post_init__(self) -> None:
        positive(self, "embedding_std", "head_gain")
        if self.std is not None:
            positive(self, "std")
            if self.head_gain != 1.0:
                raise ModelError(
                    f"Initialization.head_gain is {self.head_gain} with std {self.std}; it scales the rule by fan-in, set it "
                    "to 1.0, or std to None"
                )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is sharded over processes: tensor, pipeline, virtual-pipeline, expert, sequence and context parallelism."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    context: int = 1

    def __post_init__(self) -> None:
        positive(self, "tensor", "pipeline", "virtual", "expert", "context")
        if self.virtual > 1 and self.pipeline == 1:
            raise ModelError("virtual pipeline stages need more than one pipeline stage; raise pipeline, or drop virtual")
        if self.sequence_parallel and self.tensor == 1:
            raise ModelError("sequence parallelism needs tensor parallelism; raise tensor, or drop sequence_parallel")

    @property
    def processes(self) -> int:
        """The least number of processes: every run uses a multiple of it."""
        return math.lcm(self.tensor * self.context, self.expert) * self.pipeline

    def replicas(self, processes: int) -> int:
        """Count data-parallel replicas among ``processes``: each has micro-batches of its own."""
        return processes // (self.tensor * self.context * self.pipeline)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A hybrid model of A, E, M and R layers; immutable, every value is checked on construction."""

    name: str
    pattern: str
    depth: int
    hidden_size: int
    heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    mla: MLA = field(default_factory=MLA)
    dsa: DSA = field(default_factory=DSA)
    mamba3: Mamba3 = field(default_factory=Mamba3)
    m2rnn: M2RNN = field(default_factory=M2RNN)
    moe: MoE = field(default_factory=MoE)
    mtp: MTP = field(default_factory=MTP)
    rope_theta: float = 500_000.0
    start: Initialization = field(default_factory=Initialization)
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        positive(self, "depth", "hidden_size", "heads", "ffn_hidden_size", "vocab_size", "seq_length", "rope_theta")
        positive(self, "norm_eps")
        divides("hidden_size", self.hidden_size, "heads", self.heads)  # Megatron asserts it
        if self.rope_theta != int(self.rope_theta):
            raise ModelError(f"{self.name}: rope_theta is {self.rope_theta}; Megatron's --rotary-base takes whole numbers")
        yarn = self.mla.yarn
        if yarn and self.seq_length > (reach := yarn.rotary_scaling_factor * yarn.original_max_position_embeddings):
            raise ModelError(
                f"{self.name}: seq_length is {self.seq_length}, and YaRN reaches {reach:g}; the nearest "
                f"mla.yarn.rotary_scaling_factor is {self.seq_length / yarn.original_max_position_embeddings:g}"
            )
        parsed = grammar.parse(self.pattern)
        if parsed.mtp and (set(parsed.mtp) != {ATTENTION.letter} or len(parsed.mtp) != self.mtp.depth):
            raise PatternError(
                f"{self.name}: the MTP part of {self.pattern!r} is {'/'.join(parsed.mtp)!r}, but the model has "
                f"{self.mtp.depth} MTP depths of one shared A block; write {'/A' * self.mtp.depth!r} or leave it out"
            )
        _ = self.roles  # parses the pattern against the depth, and the schedule against the pattern
        for family in self.families:
            family.check(self.shape, *self.sizes(family))

    @cached_property
    def layers(self) -> str:
        """The letter of each trunk layer, ``depth`` of them."""
        return grammar.parse(self.pattern).layers(self.depth)

    @cached_property
    def roles(self) -> tuple[str | None, ...]:
        """Each layer's attention role (``-``, ``W``, ``F``, ``S``), None for layers of other families."""
        return grammar.attention_roles(self.layers, self.dsa.schedule)

    def window(self, role: str | None) -> int | None:
        """Return how many keys before its own a query of that role sees; None: not limited by a window."""
        return self.mla.window_size if role == WINDOWED else None

    def record(self) -> dict[str, Any]:
        """Return the definition as plain values: without windows and YaRN where no layer has one."""
        values = dataclasses.asdict(self)
        if WINDOWED not in (*self.roles, self.shape.mtp_role):
            del values["mla"]["window_size"], values["mtp"]["attention"]
        if not self.mla.yarn:
            del values["mla"]["yarn"]
        return values

    @cached_property
    def shape(self) -> Shape:
        """What its families share."""
        mtp_role = self.mtp.attention if self.mtp.depth else None
        return Shape(self.name, self.hidden_size, self.heads, self.layers, self.roles, mtp_role)

    @property
    def families(self) -> list[Family]:
        """The families of its layers, and of the MTP block, which is an A layer."""
        used = self.layers + ATTENTION.letter * bool(self.mtp.depth)
        return [family for family in FAMILIES.values() if family.letter in used]

    def sizes(self, family: Family) -> tuple[Any, ...]:
        """Return the family's own sizes, as its functions take them."""
        return tuple(getattr(self, name) for name in family.fields)

    @property
    def mamba_inner(self) -> int:
        """Width of the Mamba-3 mixer's inner stream."""
        return mamba_family.inner_width(self.hidden_size, self.mamba3)

    @property
    def mamba_heads(self) -> int:
        """Mamba-3 heads."""
        return mamba_family.heads_of(self.hidden_size, self.mamba3)

    @property
    def recurrent_heads(self) -> int:
        """M²RNN heads."""
        return recurrent_family.heads_of(self.hidden_size, self.m2rnn)

    def layer_numbers(self, letter: str) -> tuple[int, ...]:
        """Return 1-based numbers of the layers of one family."""
        return tuple(number for number, layer in enumerate(self.layers, start=1) if layer == letter)

    def chunks(self, layout: Layout) -> tuple[range, ...]:
        """Return the 1-based layer numbers of each model chunk (pipeline or virtual stage), in layer order.

        Raises:
            ModelError: the layers cannot be split that way.
        """
        stages = grammar.parse(self.pattern).stages
        if len(stages) == 1:
            return grammar.uniform_chunks(self.depth, layout.pipeline, layout.virtual)
        if len(stages) != layout.pipeline * layout.virtual:
            raise ModelError(
                f"{self.name}: the pattern marks {len(stages)} stages, but the layout has {layout.pipeline} pipeline × "
                f"{layout.virtual} virtual stages; make them equal"
            )
        ends = [sum(map(len, stages[: i + 1])) for i in range(len(stages))]
        return tuple(range(end - len(stage) + 1, end + 1) for stage, end in zip(stages, ends, strict=True))

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that does not fit this model.

        Raises:
            ModelError: names the size that is not divisible, or the promoted DSA schedule that the layout needs.
        """
        self.check_divisible(layout)
        grammar.check_chunks(self.name, self.roles, self.chunks(layout))

    def check_divisible(self, layout: Layout) -> None:
        """Refuse tensor, expert, sequence or context parallelism by which its sizes are not divisible; ignores pipeline stages.

        Raises:
            ModelError: names the size that is not divisible.
        """
        tensor = layout.tensor
        divides(f"{self.name}: attention heads", self.heads, "tensor parallelism", tensor)
        if self.mtp.depth:
            divides(f"{self.name}: dense FFN width", self.ffn_hidden_size, "tensor parallelism", tensor)
            divides(f"{self.name}: hidden size", self.hidden_size, "tensor parallelism", tensor)
        for family in self.families:
            family.check_layout(self.shape, tensor, layout.expert, *self.sizes(family))
        if tensor > 1 and not layout.sequence_parallel and ATTENTION in self.families:
            # In megatron-core 0.19 absorbed MLA refuses this, and full MLA trains its latent norms and projections wrongly.
            raise ModelError(
                f"{self.name}: MLA under tensor parallelism ({tensor}) needs sequence parallelism; add --sequence-parallel"
            )
        if layout.sequence_parallel:
            divides(f"{self.name}: sequence length", self.seq_length, "tensor parallelism", tensor)
        if layout.context > 1:
            if why := self._why_not_over(tensor, layout.context):
                fitting = (ranks for ranks in range(1, self.heads + 1) if not self._why_not_over(tensor, ranks))
                raise ModelError(
                    f"{self.name}: context parallelism is {layout.context}, and {why}; the nearest that fits every layer is "
                    f"{nearest_number(layout.context, fitting)}"
                )
            # Two chunks a rank, and their rows over its tensor-parallel ranks.
            chunks = layout.context * math.lcm(2, tensor if layout.sequence_parallel else 1)
            what = "the chunks of its context-parallel ranks"
            divides(f"{self.name}: sequence length", self.seq_length, what, chunks, fixed=True)

    def _why_not_over(self, tensor: int, context: int) -> str:
        """Return why ``context`` ranks cannot share a sequence; empty if they can."""
        reasons = (family.no_context(self.shape, tensor, context, *self.sizes(family)) for family in self.families)
        return next(filter(None, reasons), "")

    def vocab_size_padded(self, tensor: int, divisible_by: int = 128) -> int:
        """Return the vocabulary after Megatron's padding to a multiple of ``divisible_by * tensor``."""
        return math.ceil(self.vocab_size / (divisible_by * tensor)) * divisible_by * tensor

    def parameters(self) -> dict[str, int]:
        """Count parameters by part: each letter, ``mtp`` (shared block), ``embedding``, ``head``, ``norm``."""
        return {part: count.total for part, count in parameters.by_part(self).items()}


_PATTERN = "AEMEAEMEAEMR"
_NAM56R = Model(
    name="nam56r",
    pattern=_PATTERN,
    depth=52,
    hidden_size=3584,
    heads=56,
    ffn_hidden_size=18944,
    vocab_size=65_536,
    seq_length=4096,
)
_TINY = Model(
    name="nam56r_tiny",
    pattern=_PATTERN,
    depth=12,
    hidden_size=128,
    heads=4,
    ffn_hidden_size=512,
    vocab_size=260,
    seq_length=256,
    mla=MLA(q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=16),
    dsa=DSA(schedule="-FS", indexer_heads=2, indexer_head_dim=16, topk=32),
    mamba3=Mamba3(head_dim=16, groups=2, state=16, mimo_rank=2, chunk=16),
    m2rnn=M2RNN(key_dim=16, value_dim=8, heads=4),
    moe=MoE(experts=4, topk=2, ffn_hidden_size=128, shared_ffn_hidden_size=128),
    mtp=MTP(depth=1),
)


def _long(model: Model, seq_length: int) -> Model:
    """Return ``model`` for rows of ``seq_length``: quadratic attention gets windows of the model's own length.

    A query sees every key that it saw in ``model``, and checkpoints of ``model`` fit: no parameter differs.
    """
    factor, original = seq_length / model.seq_length, model.seq_length
    yarn = YaRN(rotary_scaling_factor=factor, original_max_position_embeddings=original)
    return dataclasses.replace(
        model,
        name=f"{model.name}_long",
        seq_length=seq_length,
        mla=dataclasses.replace(model.mla, window_size=original - 1, yarn=yarn),
        dsa=dataclasses.replace(model.dsa, schedule=model.dsa.schedule.replace(FULL_ATTENTION, WINDOWED)),
        mtp=dataclasses.replace(model.mtp, attention=WINDOWED),
    )


_PRESETS = {
    model.name: model
    for model in (
        _NAM56R,
        dataclasses.replace(
            _NAM56R,
            name="nam56r_h4096",
            hidden_size=4096,
            heads=32,
            ffn_hidden_size=21_504,
            mamba3=Mamba3(state=128),
        ),
        dataclasses.replace(_NAM56R, name="nam56r_quarter", depth=13),
        _TINY,
        dataclasses.replace(_NAM56R, name="nam52", pattern="AEME"),
        dataclasses.replace(_NAM56R, name="nam56r_wide", moe=MoE(experts=128)),
        _long(_NAM56R, 32_768),
        _long(_TINY, 1024),
    )
}
PRESETS: Mapping[str, Model] = MappingProxyType(_PRESETS)
"""The models that this package defines, by name."""
DEFAULT = _NAM56R.name
"""The preset of runs that name none."""


def preset(name: str) -> Model:
    """Return the preset called ``name``.

    Raises:
        ModelError: unknown name; the message suggests the nearest names.
    """
    if name not in PRESETS:
        raise ModelError(
            f"there is no model {name!r}; {nearest(name, PRESETS)}; define a model of your own in the settings file that "
            "MEGACPP_CONFIG names"
        )
    return PRESETS[name]


def with_overrides(model: Model, overrides: Mapping[str, Any], where: str = "model") -> Model:
    """Return ``model`` with values replaced, e.g. ``{"depth": 12, "dsa": {"schedule": "-FF"}}``.

    Raises:
        ModelError: a key is unknown (nearest names are suggested), or a value has the wrong type.
    """
    try:
        return schema.replace(model, overrides, where)
    except schema.SchemaError as error:
        raise ModelError(str(error)) from error
