"""Reports of the audited count: tables by family, MFU and HFU against named peaks; no torch.

*Model FLOPs* are those the mathematics requires; MFU (model FLOPs utilisation) counts only them. *Hardware FLOPs* add
activation recompute; HFU counts those. Both terms: PaLM (arXiv 2204.02311), appendix B.

Utilisation is a ratio of times: the floor, the time at peak rate in each precision, over the step's time,

    floor = Σ over precisions (FLOPs of the precision / peak of the precision) / devices,    MFU = floor / step time.

With one precision it is the usual FLOPs / (time × peak). FP8 work is measured against the FP8 peak, so that an FP8 run does
not look better through the lower BF16 peak. Work in a slower precision than the model's dtype (the fp32 router, a recurrence
in fp32) is measured against the peak of the model's dtype: being slow never makes a run look better.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from megacpp_mcore.model import Model
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.families.base import Work
from megacpp_mcore.model.families.mamba_family import wide_inputs
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops.count import NAMES, Families, Step
from megacpp_mcore.model.flops.peaks import Peak
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.model.precision import PrecisionPlan, expert_layers

_NONE = Step(1, (), Families(), ())


def by_precision(
    model: Model,
    step: Step,
    plan: PrecisionPlan,
    *,
    tf32: bool = False,
    experts: Collection[int] = (),
    scoped: Collection[int] = (),
    projected: Collection[int] = (),
    gradient: bool = True,
    predicted: Collection[str] = (),
) -> dict[str, Families]:
    """Split ``step``, or its recomputed work, by the precision whose peak applies; the parts sum to the whole.

    Args:
        plan: the run's precision.
        tf32: whether fp32 matrix products may run on tensor cores (``torch.backends.cuda.matmul.allow_tf32``).
        experts: the numbers of layers whose routed experts run in FP8, where ``plan`` does not name them.
        scoped: those of layers in FP8 scopes (:mod:`megacpp_mcore.te.fp8_scopes`).
        projected: those of M layers whose wide input projections run in FP8.
        gradient: whether the products for these weights' gradients do, too.
        predicted: the kinds of MTP's work, of ``dense_ffn`` and ``mtp_projection``, that do.
    """
    usual = "tf32" if plan.model_dtype == "fp32" and tf32 else plan.model_dtype
    experts = expert_layers(model) if plan.kernel_fp8 == "experts" else experts
    if not (experts or scoped or projected or predicted):
        return {usual: step.families}
    numbered = list(enumerate(step.layers, start=1))
    routed = [Families(routed_experts=part.routed_experts) for number, part in numbered if number in experts]
    dense = [_scoped(model, step.tokens, number, part) for number, part in numbered if number in scoped]
    work = wide_inputs(step.tokens, model.hidden_size, model.mamba3, gradient=gradient) if projected else Work(0)
    inputs = [
        Families(mamba_projections=Work(min(wide.forward, work.forward), min(wide.backward, work.backward)))
        for wide in (part.mamba_projections for number, part in numbered if number in projected)
    ]
    mtp = Families(**{name: getattr(step.families, name) for name in predicted})
    fp8 = reduce(add, [*routed, *dense, *inputs], mtp)
    rest = {name: _less(getattr(step.families, name), getattr(fp8, name)) for name in NAMES}
    return {"fp8": fp8, usual: Families(**rest)}


def _scoped(model: Model, tokens: int, number: int, part: Families) -> Families:
    """Count the work of one layer that its FP8 scope contains; recomputed work outside of it is not counted."""
    family = FAMILIES[model.layers[number - 1]]
    if family.scoped is None:
        return Families()
    name, outside = family.scoped(model.shape, model.roles[number - 1], tokens, *model.sizes(family))
    return Families(**{name: _less(getattr(part, name), outside)})


def _less(work: Work, other: Work) -> Work:
    return Work(max(0, work.forward - other.forward), max(0, work.backward - other.backward))


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """How well a step used its devices.

    Attributes:
        model_flops: model FLOPs of the step over all devices, by precision.
        hardware_flops: the same including recompute.
        peaks: the peak of each precision.
    """

    step_time_s: float
    devices: int
    model_flops: Mapping[str, int]
    hardware_flops: Mapping[str, int]
    peaks: Mapping[str, Peak]

    @property
    def reason(self) -> str | None:
        """Why there is no utilisation; None if there is."""
        return next((peak.reason for peak in self.peaks.values() if peak.reason), None)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 1 at the peak; None without a peak."""
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: like :attr:`mfu`, including recompute."""
        return self._share(self.hardware_flops)

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s of one device, over all precisions."""
        return sum(self.model_flops.values()) / self.step_time_s / self.devices / 1e12

    def _share(self, work: Mapping[str, int]) -> float | None:
        seconds = 0.0
        for precision, count in work.items():
            rate = self.peaks[precision].flops_per_s
            if rate is None:
                return None
            seconds += count / rate
        return seconds / self.devices / self.step_time_s


def record(step: Step, again: Step = _NONE) -> dict[str, Any]:
    """Return the receipt's record of a step with recomputed work ``again``; counts are exact integers for the whole step."""
    total = step.total.training
    return {
        "counting": "one multiply-add is two operations; contractions only; backward included",
        "tokens": step.tokens,
        "model_flops": total,
        "recomputed_flops": again.total.training,
        "hardware_flops": total + again.total.training,
        "model_flops_per_token": step.training_per_token,
        "families": _parts({name: (getattr(step.families, name), getattr(again.families, name)) for name in NAMES}, total),
        "mtp_depths": list(_parts(_depths(step, again), total).values()),
    }


def _parts(parts: Mapping[str, tuple[Work, Work]], total: int) -> dict[str, dict[str, Any]]:
    """Return each part's work, its recomputed work, and its share of all model FLOPs."""
    return {
        name: {
            "forward": work.forward,
            "backward": work.backward,
            "recomputed": more.training,
            "share": work.training / total,
        }
        for name, (work, more) in parts.items()
    }


def _depths(step: Step, again: Step) -> dict[str, tuple[Work, Work]]:
    """Return each MTP depth, head included; ``again`` has as many, or none if nothing is recomputed."""
    more = again.mtp or (Families(),) * len(step.mtp)
    pairs = enumerate(zip(step.mtp, more, strict=True), start=1)
    return {f"mtp depth {depth}": (part.total, repeated.total) for depth, (part, repeated) in pairs}


def table(step: Step, again: Step = _NONE) -> str:
    """Format one line per trunk family, one per MTP depth, then the total, per token; shares are of model FLOPs."""
    rows = {name: (getattr(step.trunk, name), getattr(again.trunk, name)) for name in NAMES}
    rows = {name: both for name, both in rows.items() if both[0].training or name == "embedding"}
    rows |= _depths(step, again) | {"total": (step.total, again.total)}
    lines = [f"{'MFLOP a token':24}{'forward':>12}{'backward':>12}{'recomputed':>12}{'share':>8}"]
    for name, (work, more) in rows.items():
        figures = (figure / step.tokens / 1e6 for figure in (work.forward, work.backward, more.training))
        columns = "".join(f"{figure:12.2f}" for figure in figures)
        lines.append(f"{name.replace('_', ' '):24}{columns}{work.training / step.total.training:8.1%}")
    return "\n".join(lines)


def page(model: Model, how: Recomputation | None = None, *, seq_length: int | None = None) -> str:
    """Format the output of ``megacpp-mcore recipe flops`` for one sequence of ``model``, and for recompute as ``how``."""
    how = how or Recomputation()
    step = flops.step(model, seq_length=seq_length)
    again = recomputed(model, step, how)
    return "\n".join(
        [
            f"{model.name}, one sequence of {step.tokens} tokens, recompute: {how}",
            "",
            table(step, again),
            "",
            f"model FLOPs (MFU): {_gflop(step, step.total.training)} GFLOP a token of training, nothing recomputed",
            f"hardware FLOPs (HFU): {_gflop(step, step.total.training + again.total.training)}, recompute included",
            "embedding: a look-up, no matrix product; element-wise work is not counted",
        ]
    )


def _gflop(step: Step, count: int) -> str:
    return f"{count / step.tokens / 1e9:.3f}"
