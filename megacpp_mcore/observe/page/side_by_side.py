"""Receipts on the page: the fields of one or several side by side, and the checklist of a comparison. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from megacpp_mcore.observe.page.charts import Axis, Curve, axis_of, legend, plot
from megacpp_mcore.observe.page.data import RunData
from megacpp_mcore.observe.page.parts import CURVE_STYLES, clock, layer_of, section, size, spans, unknown
from megacpp_mcore.observe.receipts.comparison import Comparison, compare
from megacpp_mcore.observe.receipts.schema import DISQUALIFIERS, dominant, why_unknown


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items()) or "none"
    return str(value)


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _backends(records: Sequence[Mapping[str, Any]]) -> str:
    chosen: dict[tuple[str, str, str], list[Any]] = {}
    for one in records:
        chosen.setdefault((one["op"], one["requested"], one["observed"]), []).append(layer_of(one))
    words = [f"{op} {asked} → {got} ({spans(layers)})" for (op, asked, got), layers in sorted(chosen.items())]
    return "; ".join(words) or "none of this package"


def _names(records: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(one["name"] for one in records) or "none"


_Form = Callable[[Any], str]
_FIELDS: tuple[tuple[str, str, _Form], ...] = (
    ("status", "status", _plain),
    ("model", "model.name", _plain),
    ("pattern", "pattern", _plain),
    ("parameters", "model.parameters", _count),
    ("device", "device", _plain),
    ("lane", "lane", _plain),
    ("processes", "parallelism.world_size", _plain),
    ("tensor / pipeline / expert / context", "parallelism", _plain),
    ("sequence", "batch.sequence_length", _count),
    ("documents", "batch.documents", _plain),
    ("global batch, sequences", "batch.global_batch_size", _count),
    ("tokens a step", "batch.effective_tokens", _count),
    ("data", "data.kind", _plain),
    ("data checksum", "data.checksum", lambda text: text[:12]),
    ("model dtype", "precision.model_dtype", _plain),
    ("FP8 kernels", "precision.kernel_fp8", _plain),
    ("recompute", "recompute", _plain),
    ("compile", "compile.mode", _plain),
    ("compile warm-up", "compile_warmup", _plain),
    ("cache", "cache.state", _plain),
    ("steps measured", "step_time.n", _count),
    ("median step time", "step_time.p50_s", clock),
    ("99th percentile", "step_time.p99_s", clock),
    ("tokens/s", "throughput.tokens_per_s", _count),
    ("TFLOP/s a device", "throughput.tflops_per_s_per_device", _plain),
    ("MFU", "throughput.mfu", _share),
    ("goodput", "goodput", lambda found: _share(found["goodput"])),
    ("dominant cost", "dominant_cost", _plain),
    ("attention's share", "attention_share", _share),
    ("kind of memory", "memory.kind", _plain),
    ("peak memory, allocated", "memory.allocated_peak_bytes", size),
    ("peak memory, reserved", "memory.reserved_peak_bytes", size),
    ("routing entropy", "routing.entropy", _plain),
    ("dropped assignments", "routing.dropped_tokens", _count),
    ("first loss", "loss.first", _plain),
    ("last loss", "loss.last", _plain),
    ("backends", "backends", _backends),
    ("patches", "patches", _names),
    ("disqualifiers", "disqualifiers", _names),
    ("versions", "versions", _plain),
    ("commit", "commit", lambda text: text[:12] + text[40:]),
)


def table(runs: Sequence[RunData]) -> str:
    """The receipts' main fields, a column a run; what differs is marked."""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = []
    for label, path, form in _FIELDS:
        texts = [_text(run, path, form) for run in runs]
        differs = ' class="differs"' if len(set(texts)) > 1 else ""
        cells = "".join(
            f"<td{f' data-label={chr(34)}{escape(run.name)}{chr(34)}' if len(runs) > 1 else ''}>{text}</td>"
            for run, text in zip(runs, texts, strict=True)
        )
        rows.append(f'<tr{differs}><th class="wide">{escape(label)}</th>{cells}</tr>')
    columns = min(3, len(runs))
    return (
        f'<table class="side stacked" style="--columns:{columns}"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _text(run: RunData, path: str, form: _Form) -> str:
    """A field as escaped HTML."""
    if path == "parallelism":
        sizes = [run.values[f"parallelism.{name}"] for name in ("tensor", "pipeline", "expert", "context")]
        return escape(" / ".join("?" if one is None else str(one) for one in sizes))
    value = run.values[path]
    if value is None:
        return f'<span class="why">not known: {escape(unknown(run, path))}</span>'
    return escape(dominant(run.values) if path == "dominant_cost" else form(value))


def unjudged(run: RunData) -> str:
    """What could not be judged, and every field that is not known, with the reasons; folded."""
    lines = [(f"not judged: {one['name']}", one["reason"]) for one in run.values["unjudged"]]
    lines += [(path, why_unknown(path, run.values["unknown"]) or "") for path in run.values["unknown"]]
    lines += [("note", note) for note in run.values["notes"]]
    if not lines:
        return ""
    items = "".join(f"<tr><th>{escape(name)}</th><td>{escape(why)}</td></tr>" for name, why in lines)
    return f"<details><summary>Not known, and notes ({len(lines)})</summary><table><tbody>{items}</tbody></table></details>"


def comparison(first: RunData, second: RunData) -> str:
    """The checklist of two runs, and the claim or why there is none."""
    found = compare(first.receipt, second.receipt)
    names = (first.name, second.name)
    same = [line.key.replace("_", " ") for line in found.lines if line.same]
    items = [f"<li>The same: {escape(', '.join(same) or 'nothing')}.</li>"]
    items += [
        f'<li class="{"unknown" if line.same is None else "no"}">{escape(line.describe(names))}</li>'
        for line in found.lines
        if not line.same
    ]
    asked = {f"{line.question} {line.describe()}" for line in found.lines}
    items += [f'<li class="no">{escape(reason)}</li>' for reason in found.refusals if reason not in asked]
    which = f"{found.steps}." if names == ("A", "B") else f"A is {names[0]}, B is {names[1]}; {found.steps}."
    verdict = (
        f'<span class="pill">claim</span> {escape(found.claim)}. <span class="dim">{escape(which)}</span>'
        if found.claim is not None
        else f'<span class="pill bad">no claim</span> <span class="dim">{escape(which)}</span>'
    )
    command = "" if found.claim is not None else _declaring(first.receipt, second.receipt, found)
    if command:
        verdict += f" There is a claim where that is declared: <code>{escape(command)}</code>."
    title = f"May {names[1]} be compared with {names[0]}?"
    return section("comparison", title, f'<p>{verdict}</p><ul class="check">{"".join(items)}</ul>')


def _declaring(first: Mapping[str, Any], second: Mapping[str, Any], refused: Comparison) -> str:
    """The command that allows a claim by declaring what differs, and what both are disqualified by; empty: none does."""
    one, other = ({each["name"] for each in receipt["disqualifiers"]} for receipt in (first, second))
    both = [name for name in DISQUALIFIERS if name in one & other]
    for varies in ([], *([line.key] for line in refused.lines if line.same is False)):
        if compare(first, second, varies, both).claim is not None:
            options = [("--varies", key) for key in varies] + [("--declare", name) for name in both]
            return shlex.join(
                ["megacpp-mcore", "report", "compare", "A", "B", *(word for pair in options for word in pair)]
            )
    return ""


def overlay(runs: Sequence[RunData]) -> str:
    """The losses of several runs in one plot."""
    known = [(run, style) for run, style in zip(runs, CURVE_STYLES, strict=False) if run.steps]
    curves = [
        Curve(run.name, style, [(step.step, step.losses["lm loss"]) for step in run.kept() if "lm loss" in step.losses])
        for run, style in known
    ]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    points = [point for curve in curves for point in curve.points]
    x = Axis(min(step for step, _ in points), max(step for step, _ in points), ticks=6, whole=True)
    y = axis_of([value for _, value in points], ticks=5)
    drawing = plot("overlay-plot", f"the losses of {len(curves)} runs", x, y, curves)
    more = f" The first {len(CURVE_STYLES)} runs." if len(runs) > len(CURVE_STYLES) else ""
    return section(
        "overlay", "Loss, all runs", drawing + legend([(curve.style, curve.label) for curve in curves]),
        f"Nats a token in training, by step.{more}",
    )  # fmt: skip
