"""What one run adds to a model: machine, precision, data and optimizer. Pure Python."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import precision
from megacpp_mcore.model.families import FAMILIES, mixers_first
from megacpp_mcore.model.precision import PrecisionPlan
from megacpp_mcore.util.nearest import nearest

GPT, HYBRID = "gpt", "hybrid"
"""The model classes: Megatron's GPTModel under ``pretrain_gpt.py``, its HybridModel under ``pretrain_hybrid.py``."""
DEFAULT_MODEL_CLASS = HYBRID
"""The class of runs that name none; upstream fixes only critical bugs of GPTModel."""


MTP_MLP = "mtp"
"""Recompute of the MTP block's feed-forward part, in chunks of tokens; whole layers may be recomputed around it."""
MTP_MLP_TOKENS = 8192
"""Tokens of a rank in such a chunk."""
RECOMPUTED = (*(family.recompute for family in mixers_first() if family.recompute), MTP_MLP)
"""What ``recompute`` of the settings file may name: families, by what is recomputed of them, and :data:`MTP_MLP`."""


class _Recompute:
    @property
    def on(self) -> tuple[str, ...]:
        """The names of the families that are on."""
        return tuple(name for name in RECOMPUTED if getattr(self, name))

    def check(self, granularity: str | None, modules: Collection[str]) -> None:
        """Refuse a family that Megatron's own recompute repeats already, in whole or in part.

        Raises:
            ModelError: names both.
        """
        twice = [name for name in self.on if name != MTP_MLP]
        if twice and granularity == "full":
            raise ModelError(
                f"recompute asks for {', '.join(twice)}, and --recompute-granularity full recomputes whole layers; remove "
                "one of them"
            )
        repeated = {family.recompute: family.repeated_by for family in FAMILIES.values()} | {MTP_MLP: {"mlp"}}
        for name in self.on if granularity == "selective" else ():
            if twice := sorted(repeated[name] & set(modules)):
                raise ModelError(
                    f"recompute asks for {name}, and --recompute-modules {' '.join(twice)} for a part of it; remove one of them"
                )


if TYPE_CHECKING:

    class Recompute(_Recompute):
        """Families whose activations the backward pass recomputes, by :data:`RECOMPUTED`; each is off unless listed."""

        def __init__(self, **on: bool) -> None: ...

        def __getattr__(self, name: str) -> bool: ...
else:
    _FIELDS = [(name, bool, False) for name in RECOMPUTED]
    Recompute = make_dataclass("Recompute", _FIELDS, bases=(_Recompute,), frozen=True, kw_only=True, module=__name__)


OF_MEGATRON = ("adam", "sgd")
"""Megatron's own optimizers; all others are of the package emerging-optimizers, and run without the distributed optimizer."""
BY_MUON = ("muon", "adaptive_muon")
"""Optimizers whose updates of matrices :data:`MUON_SCALE` multiplies."""
OPTIMIZERS = (*OF_MEGATRON, *BY_MUON, "soap", "lion")
"""Words of ``--optimizer``, without ``dist_muon``, which is ``muon`` with ``--use-distributed-optimizer``."""
MUON_SCALE = 0.2
"""What Muon's updates, of spectral norm 1, are multiplied by besides the root of a matrix's longer side (arXiv 2502.16982)."""
_FIELD = "Training."


def check_optimizer(name: str, *, precision_aware: bool = False) -> None:
    """Refuse an optimizer that does not exist, and moments other than fp32 for one that does not support them.

    Raises:
        ModelError: names the nearest optimizers, or what to leave out.
    """
    if name not in OPTIMIZERS:
        suggestions = [muon for muon in BY_MUON if name == f"dist_{muon}"]
        raise ModelError(f"{_FIELD}optimizer is {name!r}; {nearest(name, OPTIMIZERS, suggestions)}")
    if precision_aware and name != "adam":
        raise ModelError(
            f"the optimizer {name} does not support --use-precision-aware-optimizer, which only Adam does; remove one of "
            "the two, or use a recipe with moments in fp32 (of nam56r any but that for one H100)"
        )


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Report refused fields of a :class:`Training` by the user's names: field to flag, option or key."""
    try:
        yield
    except ModelError as error:
        field = str(error).removeprefix(_FIELD).partition(" ")[0]
        if not str(error).startswith(_FIELD):
            raise
        raise ModelError(str(error).replace(_FIELD + field, names.get(field, field), 1)) from None


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training plan: machine, precision, data and optimizer of one run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        precision: a name of :data:`megacpp_mcore.model.precision.PLANS`: ``bf16``, ``fp32``, or ``bf16_te_fp8_experts``.
        transformer_impl: ``transformer_engine`` or ``local`` (Megatron's PyTorch layers); the CPU lane is always local.
        data: words of the data arguments, e.g. ``("--data-path", "corpus/train")``.
        tokenizer: words of the tokenizer arguments.
        processes: of the whole run, one per GPU; at least as many as the layout needs are used.
        cuda_graphs: layers are captured in CUDA graphs and replayed, where that has been measured: Transformer Engine's
            layers in bf16, by Adam, in pipelines without tensor or expert parallelism; elsewhere, and under Megatron-Bridge,
            it is left out.
        train_iters: steps. The learning rate rises over :attr:`warm_up_steps`, then decays to :attr:`min_lr` (cosine).
        optimizer: ``adam``, which the memory estimates are for, or another of :data:`OPTIMIZERS`: ``muon`` trains matrices by
            Muon, at the updates' size of AdamW and so at its learning rate, and all else by AdamW.
        weight_decay, adam_beta2, clip_grad: AdamW's, and the largest norm of all gradients.
        extra: further stock words, appended unchanged; what they set of the execution applies.
    """

    device: str = "cuda"
    precision: str = "bf16"
    transformer_impl: str = "transformer_engine"
    data: tuple[str, ...] = ()
    tokenizer: tuple[str, ...] = ()
    micro_batch_size: int = 1
    global_batch_size: int = 8
    processes: int = 1
    cuda_graphs: bool = False
    train_iters: int = 1000
    optimizer: str = "adam"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    seed: int = 1234
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in (
            ("device", ("cuda", "cpu")),
            ("precision", tuple(precision.PLANS)),
            ("transformer_impl", ("transformer_engine", "local")),
        ):
            if getattr(self, name) not in allowed:
                raise ModelError(f"{_FIELD}{name} is {getattr(self, name)!r}; expected {' or '.join(allowed)}")
        check_optimizer(self.optimizer)
        for name in ("micro_batch_size", "global_batch_size", "processes", "train_iters", "seed"):
            if getattr(self, name) < 1:
                raise ModelError(f"{_FIELD}{name} is {getattr(self, name)}; expected 1 or more")
        if self.seed >= 2**32:  # the limit of numpy's generators, which shuffle Megatron's datasets
            raise ModelError(f"{_FIELD}seed is {self.seed}; expected less than 2**32")
        for name in ("learning_rate", "weight_decay", "adam_beta2", "clip_grad"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ModelError(f"{_FIELD}{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        if self.adam_beta2 >= 1:
            raise ModelError(f"{_FIELD}adam_beta2 is {self.adam_beta2}; expected less than 1")
        if self.device == "cpu" and self.transformer_impl != "local":
            raise ModelError("the CPU lane has no Transformer Engine; set transformer_impl to local")
        if self.plan.file is not None and self.transformer_impl != "transformer_engine":
            raise ModelError(
                f"precision {self.precision} runs the experts in FP8 by Transformer Engine's grouped GEMM, and "
                f"{'the CPU lane' if self.device == 'cpu' else 'transformer_impl local'} has none; use bf16"
            )

    @property
    def plan(self) -> PrecisionPlan:
        """The plan named by :attr:`precision`."""
        return precision.PLANS[self.precision]

    @property
    def min_lr(self) -> float:
        """The learning rate at the end, as it is written on a command line."""
        return float(f"{self.learning_rate / 10:g}")

    @property
    def warm_up_steps(self) -> int:
        """Learning-rate warm-up steps: a tenth of the run, but at least 50, or half of a run shorter than 100.

        Gradients start at ten times their size 50 steps later (``nam56r_quarter``: 58, then 6), while Adam's second moment,
        with a memory of 20 steps, still averages few of them: a warm-up of 2 steps, a tenth of 20, would make the largest
        updates right there.
        """
        return max(self.train_iters // 10, min(50, self.train_iters // 2))
