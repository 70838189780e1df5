"""The parts of the page about one run; each is HTML, and all that comes from files is escaped. No torch."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.goodput import CLASSES, PRODUCTIVE, Goodput
from megacpp_mcore.observe.page.charts import (
    Axis,
    Band,
    Curve,
    Level,
    Mark,
    Point,
    axis_of,
    finite,
    legend,
    plot,
    short,
    stack,
)
from megacpp_mcore.observe.page.data import RunData
from megacpp_mcore.observe.receipts.disqualify import arithmetic
from megacpp_mcore.observe.receipts.schema import FINISHED, RUNNING, dominant, why_unknown

CURVE_STYLES = ("c1", "c2", "c3", "c4", "c5", "c6")
MOST_RANKS = 12
"""Ranks with a goodput bar of their own, the slowest first."""

_OF_EVERY_STEP = ("data", "idle")
"""Classes that every step has a little of: drawn only where they can be seen at their true width."""

CLASS_WORDS: Mapping[str, str] = {
    "productive": "productive steps",
    "startup": "start-up",
    "checkpoint_load": "checkpoint load",
    "compile": "compilation and autotune",
    "jit": "Triton kernels' compilation",
    "data": "waiting for data",
    "checkpoint_save": "checkpoint save",
    "evaluation": "evaluation",
    "profile": "the profiler, outside of steps",
    "idle": "between steps",
    "recovery": "recovery (start-up after a death)",
    "lost_steps": "lost steps (done again, or interrupted)",
    "down": "down",
}
FAMILY_WORDS: Mapping[str, str] = {
    "attention": "attention (A)",
    "mamba": "Mamba (M)",
    "recurrent": "recurrent (R)",
    "expert": "experts (E)",
    "dense_ffn": "dense FFN, MTP projection",
    "head": "embedding and head",
    "mtp": "MTP",
}


# --- Words ------------------------------------------------------------------------------------------------------------


def class_label(name: str) -> str:
    """A class of time in words, with its name, by which ``report goodput`` and receipts call it."""
    words = CLASS_WORDS[name]
    return words if words == name else f"{words} [{name}]"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def clock(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"


def unknown(run: RunData, path: str) -> str:
    """Why a field is not known."""
    return why_unknown(path, run.values["unknown"]) or "it is not known"


def section(part: str, title: str, content: str, about: str = "") -> str:
    """A box with a heading; ``part`` is its name for whoever looks for it."""
    below = f'<p class="dim">{about}</p>' if about else ""
    return f'<section data-part="{part}"><h3>{escape(title)}</h3>{below}{content}</section>'


def absent(part: str, title: str, why: str) -> str:
    """A box for what is not there, with the reason."""
    return section(part, title, f'<p class="dim">Not here: {escape(why)}.</p>')


# --- The head of a run ------------------------------------------------------------------------------------------------


def pill(run: RunData) -> str:
    """How the run ended."""
    status = run.values["status"]
    style = {FINISHED: "", RUNNING: " warn"}.get(status, " bad")
    text = "running, or killed" if status == RUNNING else status
    return f'<span class="pill{style}">{escape(text)}</span>'


def about(run: RunData) -> str:
    """One line: what ran, on what, when and how often it was started; and when the receipt was made, for a folder just now."""
    values = run.values
    name = values["model.name"] or "a model that is not this package's"
    layers = f"{len(values['model.layers'])} layers" if values["model.layers"] else None
    parameters = f"{short(values['model.parameters'])} parameters" if values["model.parameters"] else None
    devices = values["parallelism.world_size"]
    where = f"{devices} × {values['device'] or 'an unknown device'}" if devices else values["device"]
    starts = max((found.starts for found in run.ranks.values()), default=0)
    again = f"{starts} starts" if starts > 1 else None
    began = None if run.timeline is None else f"started {_time(run.timeline.began_ns)}"
    made = f"receipt put together {values['written_at']}"
    words = [name, layers, parameters, where, values["lane"], began, again, made]
    return f'<p class="dim">{escape(" · ".join(str(word) for word in words if word))}</p>'


def _time(since_epoch_ns: int) -> str:
    """UTC in whole seconds, as receipts have it."""
    return datetime.datetime.fromtimestamp(since_epoch_ns // 10**9, datetime.UTC).isoformat(timespec="seconds")


def alerts(run: RunData) -> str:
    """What speaks against the run's speed, and how it ended, first of all."""
    values = run.values
    lines = [f"<li><b>{escape(one['name'])}</b>: {escape(one['evidence'])}</li>" for one in values["disqualifiers"]]
    if values["status"] not in (FINISHED, RUNNING):
        lines.insert(0, f"<li><b>ended by {escape(values['status'])}</b>: its figures are those up to then</li>")
    if not lines:
        return ""
    title = "Do not use this run's speed" if values["disqualifiers"] else "This run did not finish"
    return f'<div class="alerts" role="alert" data-part="disqualifiers"><h3>{title}</h3><ul>{"".join(lines)}</ul></div>'


def tiles(run: RunData, more: Sequence[tuple[str, str]] = ()) -> str:
    """The main figures; ``more`` are figure and label of further ones, which come first."""
    values = run.values
    figures: list[tuple[str, str]] = list(more)

    def add(path: str, form: Callable[[Any], str], label: str) -> None:
        value = values[path]
        figures.append(
            (form(value), label) if value is not None else ("–", f"{label}: {unknown(run, path).partition(';')[0]}")
        )

    add("throughput.tokens_per_s", lambda rate: f"{rate:,.0f}", "tokens/s at the median step")
    add("throughput.mfu", lambda share: f"{100 * share:.1f} %", "MFU")
    add("goodput", lambda found: f"{100 * found['goodput']:.1f} %", "goodput of the slowest rank")
    add("step_time.p50_s", clock, "median step time")
    add("loss.last", lambda loss: f"{loss:.4g}", "last loss, nats a token")
    add("memory.allocated_peak_bytes", size, f"peak memory, {values['memory.kind'] or 'allocated'}")
    cells = "".join(f"<div><b>{escape(figure)}</b>{escape(label)}</div>" for figure, label in figures)
    return f'<div class="tiles" data-part="figures">{cells}</div>'


# --- Losses and the rest by step --------------------------------------------------------------------------------------


def loss(run: RunData, levels: Sequence[Level] = ()) -> str:
    """The losses of the heads by step, what was lost to a restart faint, and every restart marked."""
    title = "Loss"
    if not run.steps:
        return absent("loss", title, run.missing.get("loss", "no step was recorded"))
    kept = run.kept()
    names = [name for name in _loss_names(kept) if name == "lm loss" or name.startswith("mtp_")]
    if not names:
        return absent("loss", title, "no step has an lm loss")
    curves = [
        curve for name, style in zip(names, CURVE_STYLES, strict=False) for curve in _loss_curves(run, name, style)
    ]
    values = [value for curve in curves for _, value in finite(curve.points)] + [level.y for level in levels]
    x = Axis(min(step.step for step in kept), max(step.step for step in kept), ticks=6, whole=True)
    y = axis_of(values, ticks=5)
    marks = [Mark(start[0].resumed_at, f"resumed at {start[0].resumed_at}") for start in run.starts()[1:]]
    first, last = (step.losses.get("lm loss", math.nan) for step in (kept[0], kept[-1]))
    summary = f"loss from {first:.3g} to {last:.3g} over steps {kept[0].step} to {kept[-1].step}"
    words = {"lm loss": "next token"} | {name: f"MTP depth {name[4:-5]}" for name in names if name != "lm loss"}
    entries = [(style, words.get(name, name)) for name, style in zip(names, CURVE_STYLES, strict=False)]
    drawing = plot("loss-plot", summary, x, y, curves, marks=marks, levels=levels)
    scale = ", logarithmic" if y.log else ""
    return section(
        "loss", title, drawing + legend(entries) + _loss_notes(run), f"Nats a token in training, by step{scale}."
    )


def _loss_names(steps: Sequence[Any]) -> list[str]:
    """The losses' names, next token first."""
    return sorted({name for step in steps for name in step.losses}, key=lambda name: (name != "lm loss", name))


def _loss_curves(run: RunData, name: str, style: str) -> Iterator[Curve]:
    """The curve of what was kept, and of each start the steps that a later one did again."""
    kept = {id(step) for step in run.kept()}
    yield Curve(name, style, [(step.step, step.losses.get(name, math.nan)) for step in run.kept()])
    for start in run.starts():
        again = [step for step in start if id(step) not in kept]
        if again:
            yield Curve(name, style, [(step.step, step.losses.get(name, math.nan)) for step in again], faint=True)


def _loss_notes(run: RunData) -> str:
    kept = run.kept()
    bad = [step.step for step in kept if step.skipped or not all(map(math.isfinite, step.losses.values()))]
    notes = []
    if len(run.steps) > len(kept):
        repeated = len(run.steps) - len(kept)
        notes.append(f"{repeated} step{'s were' if repeated > 1 else ' was'} done again after a restart (faint).")
    if bad:
        notes.append(f"{len(bad)} steps were skipped or have a loss that is no number, the first is step {bad[0]}.")
    return f'<p class="dim">{escape(" ".join(notes))}</p>' if notes else ""


def multiples(run: RunData) -> str:
    """A small plot of everything else that is known by step, and why what was logged is not among them."""
    found, lacking = [*_of_steps(run), *_of_metrics(run)], run.missing.get("metrics")
    if not found:
        return absent("by-step", "By step", lacking) if lacking else ""
    note = f'<p class="dim">The logged steps are not here: {escape(lacking)}.</p>' if lacking else ""
    marks = [Mark(start[0].resumed_at, "") for start in run.starts()[1:]]
    plots = []
    for index, (title, points, form) in enumerate(found):
        points = finite(points)
        x = Axis(points[0][0], points[-1][0], ticks=3, whole=True)
        y = axis_of([value for _, value in points], ticks=3, unit=" %" if form == "%" else "")
        summary = f"{title} from {points[0][1]:.3g} to {points[-1][1]:.3g}"
        body = plot(f"by-step-{index}", summary, x, y, [Curve(title, "c1", points)], marks=marks, small=True)
        plots.append(f"<div><h4>{escape(title)}</h4>{body}</div>")
    return section("by-step", "By step", f'<div class="multiples">{"".join(plots)}</div>{note}')


_Series = tuple[str, list[Point], str]


def _of_steps(run: RunData) -> Iterator[_Series]:
    kept = run.kept()
    others = [name for name in _loss_names(kept) if name != "lm loss" and not name.startswith("mtp_")]
    columns: list[tuple[str, Callable[[Any], float | None]]] = [
        ("gradient norm", lambda step: step.grad_norm),
        ("learning rate", lambda step: step.learning_rate),
        *((name, lambda step, name=name: step.losses.get(name)) for name in others),
    ]
    yield from _series(kept, columns, "")


def _of_metrics(run: RunData) -> Iterator[_Series]:
    def percent(name: str) -> Callable[[Any], float | None]:
        return lambda one: None if getattr(one, name) is None else 100 * getattr(one, name)

    shares: list[tuple[str, Callable[[Any], float | None]]] = [
        ("MFU", percent("mfu")),
        ("dropped assignments", percent("dropped_share")),
        ("overlap of neighbouring indexers", percent("index_overlap")),
        ("routing entropy (100 % is even)", percent("routing_entropy")),
    ]
    yield from _series(run.metrics, shares, "%")
    gib: list[tuple[str, Callable[[Any], float | None]]] = [
        ("allocated memory, GiB", lambda one: one.memory_allocated_bytes / 2**30),
        ("reserved memory, GiB", lambda one: one.memory_reserved_bytes / 2**30),
    ]
    same = all(one.memory_allocated_bytes == one.memory_reserved_bytes for one in run.metrics)
    yield from _series(run.metrics, gib[:1] if same else gib, "")


def _series(
    rows: Sequence[Any], columns: Sequence[tuple[str, Callable[[Any], float | None]]], form: str
) -> Iterator[_Series]:
    """The columns that have two values or more."""
    for title, value in columns:
        found = [(row.step, value(row)) for row in rows]
        points = finite([(float(step), one) for step, one in found if one is not None])
        if len(points) > 1:
            yield title, points, form


# --- Time -------------------------------------------------------------------------------------------------------------


def throughput(run: RunData) -> str:
    """Tokens per second over the wall time, with what else the time went to behind it."""
    title = "Tokens per second over time"
    line = run.timeline
    if line is None or not line.spans:
        return absent("time", title, run.missing.get("time", "no time was recorded"))
    factor, unit = (1.0, "s") if line.wall_s < 180 else (60.0, "min") if line.wall_s < 3 * 3600 else (3600.0, "h")
    other = [span for span in line.spans if span.kind != PRODUCTIVE]
    shown = [
        span for span in other if span.kind not in _OF_EVERY_STEP or span.end_s - span.begin_s >= line.wall_s / 500
    ]
    bands = [Band(span.begin_s / factor, span.end_s / factor, span.kind, _span_words(span)) for span in shown]
    short_ones = ", but for the shortest waits" if len(shown) < len(other) else ""
    by_start: defaultdict[int, list[Point]] = defaultdict(list)
    for rate in line.rates:
        by_start[rate.start].append((rate.at_s / factor, rate.tokens_per_s))
    curves = [Curve("tokens/s", "c1", points) for points in by_start.values()]
    marks = [
        Mark(at / factor, "restarted" if resumed is None else f"restarted from step {resumed}")
        for at, resumed in line.restarts
    ]
    x = Axis(0.0, line.wall_s / factor, ticks=6, unit=f" {unit}")
    y = axis_of([rate.tokens_per_s for rate in line.rates], ticks=5, zero=True)
    kinds = [kind for kind in CLASSES if any(band.kind == kind for band in bands)]
    seen = [(kind, class_label(kind)) for kind in kinds]
    summary = f"tokens per second over {clock(line.wall_s)} of wall time, {len(line.restarts)} restarts"
    drawing = plot("time-plot", summary, x, y, curves, bands=bands, marks=marks)
    return section(
        "time", title, drawing + legend([("c1", "tokens/s"), *seen]),
        f"Rank {line.rank}, wall time of all starts. Coloured: time that was not a productive step{short_ones}.",
    )  # fmt: skip


def _span_words(span: Any) -> str:
    return f"{class_label(span.kind)}: {clock(span.end_s - span.begin_s)}"


def goodput_bars(run: RunData) -> str:
    """What the wall time of every rank went to."""
    title = "Goodput"
    if not run.ranks:
        return absent("goodput", title, run.missing.get("goodput", "no time was recorded"))
    slowest = goodput.slowest(run.ranks)
    order = sorted(run.ranks, key=lambda rank: (run.ranks[rank].share, rank))
    rows = []
    for rank in order[:MOST_RANKS]:
        found = run.ranks[rank]
        mark = ", slowest" if rank == slowest and len(run.ranks) > 1 else ""
        rows.append(
            f'<span>rank {rank}{mark}</span><span class="bar tall">{_bar(found)}</span><span>{found.share:.1%}</span>'
        )
    worst = run.ranks[slowest]
    more = f'<p class="dim">and {len(order) - MOST_RANKS} ranks with more.</p>' if len(order) > MOST_RANKS else ""
    table = "".join(
        f'<tr{"" if spent else ' class="none"'}><td><i class="swatch {name}"></i>{escape(class_label(name))}</td>'
        f'<td class="number">{clock(spent / 1e9)}</td><td class="number">{spent / max(1, worst.wall_ns):.1%}</td></tr>'
        for name, spent in worst.nanoseconds.items()
    )
    doubts = "".join(f'<p class="dim">{escape(note)}.</p>' for note in worst.notes)
    about_it = (
        f"{clock(worst.wall_ns / 1e9)} of wall time of rank {slowest}, {worst.starts} start{'s' * (worst.starts > 1)}, "
        f"{worst.steps} steps kept, {worst.steps_lost} lost. The parts sum to the whole."
    )
    return section(
        "goodput", title,
        f'<div class="bars" data-part="goodput-bar">{"".join(rows)}</div>{more}{doubts}'
        f'<table class="classes"><tbody>{table}</tbody></table>',
        about_it,
    )  # fmt: skip


def _bar(found: Goodput) -> str:
    parts = [
        (name, float(spent), f"{class_label(name)}: {clock(spent / 1e9)}") for name, spent in found.nanoseconds.items()
    ]
    return stack(parts, max(1, found.wall_ns))


# --- Work and memory --------------------------------------------------------------------------------------------------


def shares(run: RunData) -> str:
    """The share of each family, and what it is a share of."""
    title = "Where a step goes"
    groups = run.values["shares.groups"]
    if not groups:
        return absent("shares", title, unknown(run, "shares.groups"))
    rows = []
    ordered = sorted(((name, share) for name, share in groups.items() if share > 0), key=lambda one: -one[1])
    most = ordered[0][1] if ordered else 1.0
    for index, (name, share) in enumerate(ordered):
        bar = f'<i style="width:{100 * share / most:.2f}%"></i>'
        rows.append(
            f'<span>{escape(FAMILY_WORDS.get(name, name))}</span><span class="bar share{" first" if not index else ""}">{bar}'
            f"</span><span>{share:.1%}</span>"
        )
    return section(
        "shares",
        title,
        f'<div class="bars">{"".join(rows)}</div>',
        f"From the {escape(run.values['shares.source'])}. Largest: {escape(dominant(run.values))}.",
    )


def memory(run: RunData) -> str:
    """Peaks by rank."""
    title = "Memory"
    values = run.values
    ranks, reserved = values["memory.ranks"], values["memory.reserved_peak_bytes"]
    if not ranks or reserved is None:
        return absent("memory", title, unknown(run, "memory.ranks"))
    top = max(reserved, *ranks, 1)
    worst = sorted(range(len(ranks)), key=lambda index: -ranks[index])[:MOST_RANKS]
    numbers = values["ranks.found"] if len(values["ranks.found"]) == len(ranks) else range(len(ranks))
    rows = [_memory_row(f"rank {numbers[index]}", ranks[index], top, "allocated") for index in worst]
    rows.append(_memory_row("reserved", reserved, top, "reserved"))
    more = f" The {MOST_RANKS} ranks with the most of {len(ranks)}." if len(ranks) > MOST_RANKS else ""
    kind = escape(values["memory.kind"] or "an unknown kind")
    return section(
        "memory", title, f'<div class="bars">{"".join(rows)}</div>',
        f"Allocated peak of each rank, and the largest reserved one; measured: {kind}.{more}",
    )  # fmt: skip


def _memory_row(name: str, amount: int, top: int, kind: str) -> str:
    bar = f'<span class="bar memory"><i class="{kind}" style="width:{100 * amount / top:.2f}%"></i></span>'
    return f"<span>{name}</span>{bar}<span>{size(amount)}</span>"


# --- Backends ---------------------------------------------------------------------------------------------------------


def backends(run: RunData) -> str:
    """Which function every op really calls, what does not run as it was asked for in red."""
    title = "Backends: requested and observed"
    if run.values["backends"] is None:
        return absent("backends", title, unknown(run, "backends"))
    rows = [*_backend_rows(run.values)]
    parts = [*_part_rows(run.values)]
    off = [row for row in rows if row[0]]
    off_parts, as_asked = [row for row in parts if row[0]], [row for row in parts if not row[0]]
    verdict = (
        f'<span class="verdict">{len(off) + len(off_parts)} not as requested, or slower than what is there.</span>'
        if off or off_parts
        else "Everything runs as it was asked for, and nothing slower than what is there."
    )
    ordered = [*off, *off_parts, *(row for row in rows if not row[0])]
    if not ordered and not as_asked:
        return absent("backends", title, "no layer asked for a backend")
    more = (
        f"<details><summary>{len(as_asked)} parts of layers by class</summary>{_backend_table(as_asked)}</details>"
        if as_asked
        else ""
    )
    return section("backends", title, (_backend_table(ordered) if ordered else "") + more, verdict)


_Row = tuple[bool, str, str, str, str, str]
_OF_THE_RUN = ("loss", "optimizer", "sdpa")
"""Ops that no layer has; MTP blocks have no layer number either."""


def _backend_rows(values: Mapping[str, Any]) -> Iterator[_Row]:
    """Whether it is off, then the cells; layers with the same answer are one row."""
    together: defaultdict[tuple[str, ...], list[Any]] = defaultdict(list)
    slower: dict[tuple[str, ...], bool] = {}
    for one in values["backends"]:
        key = tuple(one[name] for name in ("op", "requested", "observed", "reason"))
        together[key].append(layer_of(one))
        slower[key] = slower.get(key, False) or one["slower_than_best"]
    for key, layers in together.items():
        op, requested, observed, reason = key
        off = slower[key] or requested not in ("auto", observed)
        yield off, op, spans(layers), requested, observed, reason


def _part_rows(values: Mapping[str, Any]) -> Iterator[_Row]:
    for one in values["parts"] or ():
        off = one["requested"] == "transformer_engine" != one["observed"] and arithmetic(one["part"])
        yield off, one["part"], spans(one["layers"]), one["requested"], one["observed"], one["implementation"]


def _backend_table(rows: Sequence[_Row]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("op or part", "layers", "requested", "observed", "why"))
    body = "".join(_backend_row(*row) for row in rows)
    return f'<table class="backends stacked"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _backend_row(off: bool, op: str, layers: str, requested: str, observed: str, reason: str) -> str:
    differs = requested not in ("auto", observed)
    sign = "≠ " if off and differs else "slower: " if off else ""
    cells = (
        f'<td class="wide"><b>{escape(op)}</b></td><td class="wide" data-label="layers">{escape(layers)}</td>'
        f'<td data-label="requested">{escape(requested)}</td>'
        f'<td data-label="observed">{sign}{escape(observed)}</td><td class="wide why">{escape(reason)}</td>'
    )
    return f'<tr class="off">{cells}</tr>' if off else f"<tr>{cells}</tr>"


def layer_of(record: Mapping[str, Any]) -> int | str:
    """Where a record about a backend belongs: a layer's number, ``run`` for what is there once, else ``mtp``."""
    if record["layer"] is not None:
        return int(record["layer"])
    return "run" if record["op"] in _OF_THE_RUN else "mtp"


def spans(layers: Sequence[Any]) -> str:
    """Layers as ranges: ``1–3, 5, mtp``."""
    numbers = sorted({layer for layer in layers if isinstance(layer, int)})
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = [f"{first}–{last}" if last > first else str(first) for first, last in found]
    return ", ".join([*words, *sorted({str(layer) for layer in layers if not isinstance(layer, int)})])
