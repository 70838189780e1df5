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
from megacpp_mcore.util import schema
from megacpp_mcore.util.nearest import nearest, nearest_number


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 < value < math.inf:  # NaN fails this as well
            raise ModelError(f"{type(owner).__name__}.{name} is {value}; expected a positive, finite number")


def _not_negative(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ModelError(f"{type(owner).__name__}.{name} is {value}; expected 0 (off) or more, and finite")


def _divides(what: str, number: int, by: str, divisor: int, *, fixed: bool = False) -> None:
    """Refuse a ``number`` that is no multiple of ``divisor``; ``fixed``: only the number can be changed."""
    if number % divisor:
        if fixed:
            fitting = f"multiple is {nearest_number(number, range(divisor, number + divisor, divisor))}"
        else:
            divisors = (each for each in range(1, number + 1) if number % each == 0)
            fitting = f"divisor is {nearest_number(divisor, divisors)}"
        raise ModelError(f"{what} ({number}) is not a multiple of {by} ({divisor}); the nearest {fitting}")


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), plain rotary embedding, both latents normed."""

    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_head_dim: int = 64
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 64

    def __post_init__(self) -> None:
        _positive(self, *(f.name for f in dataclasses.fields(self)))
        _divides("MLA.qk_pos_emb_head_dim", self.qk_pos_emb_head_dim, "2, for rotary pairs", 2, fixed=True)


OWN, SERVED = "own", "served"
"""The attention a DSA indexer learns from: that of its own layer, or of all layers that it serves."""


@dataclass(frozen=True, kw_only=True)
class DSA:
    """DeepSeek sparse attention (DeepSeek-V3.2 report) with an index cache (arXiv 2603.12201).

    Attributes:
        schedule: one character per A layer, tiled: ``-`` full MLA, ``F`` runs the indexer, ``S`` reuses its indices.
        topk: number of keys that a query attends to.
        loss_coeff: weight of the indexer's KL loss.
        distill: the attention an indexer is trained against: ``served``, the mean over its own layer and the Shared layers it
            serves (multi-layer distillation), or ``own``, its own layer only. Without Shared layers these are the same.
        warmup_steps: initial steps in which sparse layers attend to every causal key, and the indexer of a Full layer learns
            that attention (DeepSeek-V3.2 report, dense warm-up); 0: none.
    """

    schedule: str = "-FSS"
    indexer_heads: int = 32
    indexer_head_dim: int = 64
    topk: int = 256
    loss_coeff: float = 1e-3
    distill: str = SERVED
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _positive(self, "indexer_heads", "indexer_head_dim", "topk")
        _not_negative(self, "loss_coeff", "warmup_steps")
        if self.distill not in (OWN, SERVED):
            raise ModelError(
                f"DSA.distill is {self.distill!r}; expected {SERVED} (the indexer of an F layer learns from it and its S "
                f"layers) or {OWN} (from the F layer alone)"
            )


@dataclass(frozen=True, kw_only=True)
class Mamba3:
    """Mamba-3 mixer (arXiv 2603.15569; behaviour of mamba-ssm 2.3.2.post1 ``modules/mamba3.py``).

    Attributes:
        mimo_rank: rank R of the MIMO recurrence; 1 is SISO.
        chunk: tokens of a chunk in the reference, with which FLOPs are counted; the kernels have chunks of 64 / R.
        rope_fraction: fraction of the state that RoPE rotates.
        a_floor: the decay rate A is at most ``-a_floor``.
        out_norm: RMSNorm of each head between the scan and the output projection; False is the default of mamba-ssm's module,
            which writes more to the residual stream than all other layers together (docs/model.md).
        decay_activation: activation that makes the raw decay positive: ``softplus``, or ``heavy_tail`` as in newest upstream.
    """

    expand: int = 2
    head_dim: int = 64
    groups: int = 8
    state: int = 64
    mimo_rank: int = 4
    chunk: int = 16
    rope_fraction: float = 0.5
    a_floor: float = 1e-4
    out_norm: bool = True
    decay_activation: str = "softplus"

    def __post_init__(self) -> None:
        _positive(self, "expand", "head_dim", "groups", "state", "mimo_rank", "chunk", "a_floor")
        if self.rope_fraction not in (0.5, 1.0):
            raise ModelError(f"Mamba3.rope_fraction is {self.rope_fraction}; expected 0.5 or 1.0")
        if self.decay_activation not in ("softplus", "heavy_tail"):
            raise ModelError(f"Mamba3.decay_activation is {self.decay_activation!r}; expected softplus or heavy_tail")
        _divides("Mamba3.state", self.state, "4, for rotated pairs of half the state", 4, fixed=True)

    @property
    def angles(self) -> int:
        """Rotation angles per token: pairs of rotated state entries."""
        return int(self.state * self.rope_fraction) // 2


@dataclass(frozen=True, kw_only=True)
class M2RNN:
    """M²RNN mixer (arXiv 2603.14360): a matrix-valued non-linear recurrence with one shared query/key head.

    Attributes:
        heads: None uses ``hidden_size // 80`` rounded down to a multiple of 4.
        checkpoint_every: tokens between states saved for the backward pass.
    """

    key_dim: int = 64
    value_dim: int = 16
    conv_kernel: int = 4
    heads: int | None = None
    checkpoint_every: int = 64

    def __post_init__(self) -> None:
        _positive(self, "key_dim", "value_dim", "conv_kernel", "checkpoint_every")
        if self.heads is not None:
            _positive(self, "heads")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts: sigmoid scores, renormalised top-k weights, expert-bias balancing, dropless, GELU.

    Attributes:
        bias_update_rate: change of an expert's bias per step. DeepSeek-V3's 1e-3 needs some hundred steps to overcome the
            differences between scores, and leaves experts in deep layers idle meanwhile (docs/model.md).
    """

    experts: int = 16
    topk: int = 4
    ffn_hidden_size: int = 896
    shared_ffn_hidden_size: int = 1024
    bias_update_rate: float = 1e-2
    sequence_aux_loss_coeff: float = 1e-4
    z_loss_coeff: float = 1e-3

    def __post_init__(self) -> None:
        _positive(self, "experts", "topk", "ffn_hidden_size", "shared_ffn_hidden_size")
        _not_negative(self, "bias_update_rate", "sequence_aux_loss_coeff", "z_loss_coeff")
        if self.topk > self.experts:
            raise ModelError(f"MoE.topk is {self.topk} but there are {self.experts} experts; lower topk")


@dataclass(frozen=True, kw_only=True)
class MTP:
    """Multi-token prediction with one shared block (FastMTP arXiv 2509.18362; DeepSeek-V3 arXiv 2412.19437).

    Depth k's loss has weight ``loss_scale * loss_decay**(k-1) / sum_j loss_decay**(j-1)``; depth 0 turns MTP off.
    """

    depth: int = 2
    loss_scale: float = 0.3
    loss_decay: float = 0.6

    def __post_init__(self) -> None:
        _not_negative(self, "depth", "loss_scale")
        if not 0 < self.loss_decay <= 1:
            raise ModelError(f"MTP.loss_decay is {self.loss_decay}; expected more than 0 and at most 1")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each depth's mean loss in the total loss."""
        powers = [self.loss_decay**k for k in range(self.depth)]
        return tuple(self.loss_scale * power / sum(powers) for power in powers)


@dataclass(frozen=True, kw_only=True)
class Start:
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
        _positive(self, "embedding_std", "head_gain")
        if self.std is not None:
            _positive(self, "std")
            if self.head_gain != 1.0:
                raise ModelError(
                    f"Start.head_gain is {self.head_gain} beside std {self.std}; it is a factor on the rule by fan-in, set it "
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
        _positive(self, "tensor", "pipeline", "virtual", "expert", "context")
        if self.virtual > 1 and self.pipeline == 1:
            raise ModelError(
                "virtual pipeline stages need more than one pipeline stage; raise pipeline, or drop virtual"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ModelError("sequence parallelism needs tensor parallelism; raise tensor, or drop sequence_parallel")

    @property
    def processes(self) -> int:
        """The least number of processes: every run uses a multiple of it."""
        return math.lcm(self.tensor * self.context, self.expert) * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Model:
    """A hybrid model of A, M, E and R layers; immutable, every value is checked on construction."""

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
    start: Start = field(default_factory=Start)
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, "depth", "hidden_size", "heads", "ffn_hidden_size", "vocab_size", "seq_length", "rope_theta")
        _positive(self, "norm_eps")
        if self.rope_theta != int(self.rope_theta):
            raise ModelError(
                f"{self.name}: rope_theta is {self.rope_theta}; Megatron's --rotary-base takes whole numbers"
            )
        parsed = grammar.parse(self.pattern)
        if parsed.mtp and (set(parsed.mtp) != {"A"} or len(parsed.mtp) != self.mtp.depth):
            raise PatternError(
                f"{self.name}: the MTP part of {self.pattern!r} is {'/'.join(parsed.mtp)!r}, but the model has "
                f"{self.mtp.depth} MTP depths of one shared A block; write {'/A' * self.mtp.depth!r} or leave it out"
            )
        _ = self.roles  # parses the pattern against the depth, and the schedule against the pattern
        if "M" in self.layers:
            _divides(f"{self.name}: Mamba-3 inner width", self.mamba_inner, "Mamba3.head_dim", self.mamba3.head_dim)
            _divides(f"{self.name}: Mamba-3 heads", self.mamba_heads, "Mamba3.groups", self.mamba3.groups)
        if self.dsa.indexer_head_dim < self.mla.qk_pos_emb_head_dim:
            raise ModelError(
                f"{self.name}: DSA.indexer_head_dim is {self.dsa.indexer_head_dim}, less than the rotary "
                f"part MLA.qk_pos_emb_head_dim ({self.mla.qk_pos_emb_head_dim}) that it has to hold; raise it"
            )
        if "R" in self.layers and self.recurrent_heads < 1:
            raise ModelError(
                f"{self.name}: hidden_size {self.hidden_size} gives no M²RNN head (hidden_size // 80, down to a "
                "multiple of 4); set m2rnn.heads"
            )

    @cached_property
    def layers(self) -> str:
        """The letter of each trunk layer, ``depth`` of them."""
        return grammar.parse(self.pattern).layers(self.depth)

    @cached_property
    def roles(self) -> tuple[str | None, ...]:
        """Each layer's attention role (``-``, ``F``, ``S``), None for layers of other families."""
        return grammar.attention_roles(self.layers, self.dsa.schedule)

    @property
    def mamba_inner(self) -> int:
        """Width of the Mamba-3 mixer's inner stream."""
        return self.mamba3.expand * self.hidden_size

    @property
    def mamba_heads(self) -> int:
        """Mamba-3 heads."""
        return self.mamba_inner // self.mamba3.head_dim

    @property
    def recurrent_heads(self) -> int:
        """M²RNN heads."""
        return self.m2rnn.heads if self.m2rnn.heads is not None else self.hidden_size // 80 // 4 * 4

    def layer_numbers(self, letter: str) -> tuple[int, ...]:
        """1-based numbers of the layers of one family."""
        return tuple(number for number, found in enumerate(self.layers, start=1) if found == letter)

    def chunks(self, layout: Layout) -> tuple[range, ...]:
        """The 1-based layer numbers of each model chunk (pipeline or virtual stage), in layer order.

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
        self.check_cut(layout)
        grammar.check_chunks(self.name, self.roles, self.chunks(layout))

    def check_cut(self, layout: Layout) -> None:
        """Refuse tensor, expert or sequence parallelism by which this model's sizes are not divisible; ignores pipeline stages.

        Raises:
            ModelError: names the size that is not divisible.
        """
        tensor = layout.tensor
        if layout.context > 1:
            raise ModelError(
                f"{self.name}: context parallelism is {layout.context}; no block family of this model can cut a sequence over "
                "ranks yet, leave --context-parallel-size at 1"
            )
        _divides(f"{self.name}: attention heads", self.heads, "tensor parallelism", tensor)
        if self.mtp.depth:
            _divides(f"{self.name}: dense FFN width", self.ffn_hidden_size, "tensor parallelism", tensor)
            _divides(f"{self.name}: hidden size", self.hidden_size, "tensor parallelism", tensor)
        if "M" in self.layers:
            _divides(f"{self.name}: Mamba-3 heads", self.mamba_heads, "tensor parallelism", tensor)
            _divides(f"{self.name}: Mamba-3 groups", self.mamba3.groups, "tensor parallelism", tensor)
        if "R" in self.layers:
            _divides(f"{self.name}: M²RNN heads", self.recurrent_heads, "tensor parallelism", tensor)
        if "E" in self.layers:
            _divides(f"{self.name}: experts", self.moe.experts, "expert parallelism", layout.expert)
            shared = self.moe.shared_ffn_hidden_size
            _divides(f"{self.name}: shared expert width", shared, "tensor parallelism", tensor)
        if tensor > 1 and not layout.sequence_parallel and ("A" in self.layers or self.mtp.depth):
            # In megatron-core 0.19 absorbed MLA refuses this, and full MLA trains its latent norms and projections wrongly.
            raise ModelError(
                f"{self.name}: MLA under tensor parallelism ({tensor}) needs sequence parallelism; add --sequence-parallel"
            )
        if layout.sequence_parallel:
            _divides(f"{self.name}: sequence length", self.seq_length, "tensor parallelism", tensor)

    def vocab_size_padded(self, tensor: int, divisible_by: int = 128) -> int:
        """The vocabulary after Megatron's padding to a multiple of ``divisible_by * tensor``."""
        return math.ceil(self.vocab_size / (divisible_by * tensor)) * divisible_by * tensor

    def parameters(self) -> dict[str, int]:
        """Parameters by part: ``A``, ``M``, ``E``, ``R``, ``mtp`` (shared block), ``embedding``, ``head``, ``norm``."""
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
    )
}
PRESETS: Mapping[str, Model] = MappingProxyType(_PRESETS)
"""The models that this package defines, by name."""


def preset(name: str) -> Model:
    """The preset called ``name``.

    Raises:
        ModelError: unknown name; the message suggests the nearest names.
    """
    if name not in PRESETS:
        raise ModelError(f"there is no model {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def with_overrides(model: Model, overrides: Mapping[str, Any], where: str = "model") -> Model:
    """``model`` with values replaced, e.g. ``{"depth": 12, "dsa": {"schedule": "-FF"}}``.

    Raises:
        ModelError: a key is unknown (nearest names are suggested), or a value has the wrong type.
    """
    try:
        return schema.replace(model, overrides, where)
    except schema.SchemaError as error:
        raise ModelError(str(error)) from error
