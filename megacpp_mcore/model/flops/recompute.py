"""FLOPs that activation recompute adds to the count of :mod:`megacpp_mcore.model.flops`; no torch.

Model FLOPs plus these are hardware FLOPs. Source: megatron-core 0.19.2 ``core/recompute.py`` (full),
``transformer/{attention,multi_latent_attention,transformer_layer,multi_token_prediction}.py``, ``transformer/moe`` and
``experimental_attention_variant/absorbed_mla.py`` (selective); :mod:`megacpp_mcore.layer_specs.layer_plan` (ours, by family).
Checked with ``torch.utils.flop_counter`` on models built by stock Megatron with each setting
(tests/model/test_flops_recompute.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Model
from megacpp_mcore.model.families import FAMILIES, attention_family
from megacpp_mcore.model.families.base import Work
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops.count import NAMES, Families, Step
from megacpp_mcore.model.training import MTP_MLP, Recompute

MODULES = ("core_attn", "mla_up_proj", "mlp", "moe", "shared_experts", "moe_act", "layernorm")
"""The ``--recompute-modules`` that apply to an A/M/E/R model; the last two repeat element-wise work, which counts 0."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The recompute settings of a run.

    Attributes:
        granularity: Megatron's ``--recompute-granularity``: ``full``, ``selective``, or None.
        method: of full recompute, ``uniform`` (every layer and MTP depth) or ``block`` (the first layers of each chunk;
            Megatron leaves MTP out).
        num_layers: layers per unit (``uniform``, where it does not affect the count) or per chunk (``block``).
        modules: of selective recompute, names of :data:`MODULES`.
        own: our own recompute, from the file named by ``MEGACPP_CONFIG``.

    Raises:
        ModelError: settings that Megatron refuses, or that conflict with our own recompute.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    own: Recompute = field(default_factory=Recompute)

    def __post_init__(self) -> None:
        if self.granularity not in (None, "full", "selective"):
            raise ModelError(f"recompute granularity is {self.granularity!r}; expected full, selective, or none")
        if self.granularity == "full":
            if self.method not in ("uniform", "block"):
                raise ModelError(f"the method of full recompute is {self.method!r}; expected uniform or block")
            if self.num_layers is None or self.num_layers < 1:
                raise ModelError(f"full recompute of {self.num_layers} layers; expected recompute_num_layers of 1 or more")
        unknown = [name for name in self.modules if name not in MODULES]
        if self.granularity == "selective" and unknown:
            raise ModelError(f"recompute modules {', '.join(unknown)} are not known; known: {', '.join(MODULES)}")
        self.own.check(self.granularity, self.modules)

    @classmethod
    def of_run(cls, source: Any, own: Recompute | None = None) -> Recomputation:
        """Return the settings in Megatron's arguments or TransformerConfig ``source``, and ``own`` from the run's file."""
        granularity = source.recompute_granularity
        chosen = source.recompute_modules
        modules = ("core_attn",) if chosen is None else tuple(chosen)  # Megatron's own default
        return cls(
            granularity=granularity,
            method=source.recompute_method if granularity == "full" else None,
            num_layers=source.recompute_num_layers if granularity == "full" else None,
            modules=modules if granularity == "selective" else (),
            own=own or Recompute(),
        )

    def __str__(self) -> str:
        words = []
        if self.granularity == "full":
            words.append(f"full, {self.method} {self.num_layers}")
        if self.modules:
            words.append(f"selective {', '.join(self.modules)}")
        if self.own.on:
            words.append(f"ours {', '.join(self.own.on)}")
        return "; ".join(words) or "none"


def recomputed(model: Model, counted: Step, how: Recomputation, chunks: Sequence[range] | None = None) -> Step:
    """Count the recomputed work of ``counted``, a step of ``model``, under ``how``, all of it as ``forward`` work.

    ``chunks`` are the 1-based layer numbers of each pipeline or virtual stage, for ``block``; None: a single stage.

    Raises:
        ModelError: MTP under ``uniform`` with more than one layer per unit, which Megatron refuses.
    """

    def again(part: Families) -> Families:
        return _forward(model, counted.tokens, part, ("dense_ffn",) if MTP_MLP in how.own.on else ())

    if how.granularity != "full":
        layers = tuple(
            _repeated_work(model, part, counted.tokens, role, how)
            for part, role in zip(counted.layers, model.roles, strict=True)
        )
        mtp = tuple(_repeated_work(model, part, counted.tokens, model.mtp.attention, how) + again(part) for part in counted.mtp)
        return Step(counted.tokens, layers, Families(), mtp)
    repeated = set(range(1, model.depth + 1))
    if how.method == "block":
        repeated = {number for chunk in chunks or [range(1, model.depth + 1)] for number in chunk[: how.num_layers]}
    elif model.mtp.depth and how.num_layers != 1:
        raise ModelError(
            f"uniform recompute of units of {how.num_layers} layers with multi-token prediction; Megatron takes 1 there"
        )
    tokens = counted.tokens
    layers = tuple(
        _forward(model, tokens, part, NAMES) if number in repeated else Families()
        for number, part in enumerate(counted.layers, start=1)
    )
    depth = _BUT_HEAD if how.method == "uniform" else ()
    return Step(tokens, layers, Families(), tuple(_forward(model, tokens, part, depth) + again(part) for part in counted.mtp))


_BUT_HEAD = tuple(name for name in NAMES if name != "head")


def _forward(model: Model, tokens: int, part: Families, names: Sequence[str]) -> Families:
    """Count forward work of the families ``names`` in ``part``, without the key selection, which is not recomputed.

    A recomputed Full layer reuses its first selection. Its indexer's projections are recomputed for the indexer's gradient.
    """
    works = {name: Work(getattr(part, name).forward) for name in names}
    if works.get("indexer", Work()).forward:
        works["indexer"] = Work(flops.indexer_projections(model, tokens) if model.dsa.loss_coeff else 0)
    return Families(**works)


def _repeated_work(model: Model, part: Families, tokens: int, role: str | None, how: Recomputation) -> Families:
    """Count work of one layer or MTP depth recomputed by Megatron's modules and our families."""
    forward = partial(_forward, model, tokens, part)
    works = [forward(family.recomputed) for family in FAMILIES.values() if family.recompute in how.own.on]
    if "core_attn" in how.modules:  # our core attention contains the indexer and the value up-projection
        works.append(forward(("attention_core", "indexer")))
        if role in attention_family.SPARSE:
            up = attention_family.mla_value_up_projection(tokens, model.heads, model.mla)
            works.append(Families(attention_projections=Work(up.forward)))
    if "mla_up_proj" in how.modules and role is not None:
        absorbed = role in attention_family.SPARSE
        up = attention_family.mla_up_projections(tokens, model.heads, model.mla, absorbed=absorbed)
        works.append(Families(attention_projections=Work(up.forward)))
    if "mlp" in how.modules:
        works.append(forward(("dense_ffn",)))
    if "moe" in how.modules:
        works.append(forward(("router", "routed_experts", "shared_experts")))
    if "shared_experts" in how.modules:  # counted again with moe: nested checkpoints
        works.append(forward(("shared_experts",)))
    return reduce(add, works, Families())
