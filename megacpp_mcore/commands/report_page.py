"""The page of ``report html``: one self-contained file about a run. No torch.

``report_page.html`` is its Jinja2 template, which escapes everything read from files. matplotlib (the extra ``report``) draws
curves as SVG in the page's own colours, light and dark, for a wide window and for a phone; without it there are none.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from megacpp_mcore.observe import events, goodput, receipts
from megacpp_mcore.observe.clock import OF_A_STEP
from megacpp_mcore.observe.events import Start
from megacpp_mcore.observe.goodput import CLASSES, PRODUCTIVE, Goodput
from megacpp_mcore.observe.live import metrics_of
from megacpp_mcore.observe.receipts import fields
from megacpp_mcore.observe.receipts.assemble import tokens_of
from megacpp_mcore.observe.steps import kept, recorded, standing
from megacpp_mcore.util import text


def html(path: str | os.PathLike[str]) -> str:
    """Return the page about the run in a folder, or of a receipt.

    Raises:
        DataError: there is no receipt, or it is damaged.
    """
    run = read(path)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"clock": text.duration, "size": text.size, "short": text.short, "utc": text.utc}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(run=run, fields=fields.labelled(run.values), classes=CLASSES, in_words=fields.in_words)


def read(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, or of a receipt.

    Raises:
        DataError: there is no receipt, or it is damaged.
    """
    place = Path(path)
    resolved = place.resolve()
    name = resolved.parent.name if place.is_file() else resolved.name
    name = f"{resolved.parent.name}/{name}" if resolved.name == "observe" else name
    spent: dict[int, Goodput] = {}
    ranks = events.read(place, lambda rank, starts: spent.update({rank: goodput.of_rank(starts)}), may_be_empty=True)
    return Run(name, place, receipts.read(place), ranks, spent)


_OF_METRICS = {
    "MFU, %": ("mfu", 100.0),
    "dropped assignments, %": ("dropped_share", 100.0),
    "overlap of neighbouring indexers, %": ("index_overlap", 100.0),
    "routing entropy, % (100 is even)": ("routing_entropy", 100.0),
    "allocated memory, GB": ("memory_allocated_bytes", 1e-9),
    "reserved memory, GB": ("memory_reserved_bytes", 1e-9),
}
"""Plotted metrics (of :data:`~megacpp_mcore.observe.live.SCALARS`), each with its factor."""


@dataclass
class Run:
    """One run, and what the template shows of it; the starts of ``ranks`` have no spans."""

    name: str
    place: Path
    receipt: Mapping[str, Any]
    ranks: Mapping[int, Sequence[Start]]
    spent: Mapping[int, Goodput]

    def __post_init__(self) -> None:
        self.values = fields.flatten(self.receipt)
        self.failed = self.values["status"] not in (*events.IN_ORDER, fields.RUNNING)
        self.starts = recorded(self.ranks)
        self.done, self.kept = [step for start in self.starts for step in start.steps], kept(self.starts)
        self.resumed = [float(start.steps[0].resumed_at) for start in self.starts[1:]]
        losses = {name for step in self.kept for name in step.losses}
        self.losses = sorted(losses, key=lambda name: (name != "lm loss", name))
        self.slowest_first = [(rank, self.spent[rank]) for rank in goodput.slowest_first(self.spent)]
        ranks, peaks = self.values["ranks.found"], self.values["memory.ranks"] or []
        numbers = ranks if len(ranks) == len(peaks) else range(len(peaks))
        self.peaks = sorted(zip(numbers, peaks, strict=True), key=lambda peak: -peak[1])
        self.missing = "no step was recorded"
        if not self.ranks:
            self.missing = "only the receipt is here, not the folder of the run"
        elif not can_draw():
            self.missing = "matplotlib is not installed, the extra `report` of this package"

    def why(self, path: str) -> str:
        """Return why a field is not known."""
        return fields.why_unknown(path, self.values["unknown"]) or "it is not known"

    def loss(self) -> Markup | None:
        """Draw the losses of the heads by step; steps lost to a restart are faint, and every restart is marked."""
        names = [name for name in self.losses if name == "lm loss" or name.startswith("mtp_")]
        curves: list[_Curve] = []
        for number, name in enumerate(names[:6], 1):
            words = "next token" if name == "lm loss" else f"MTP depth {name[4:-5]}"
            curves.append(_Curve(words, f"c{number}", _finite((s.step, s.losses.get(name)) for s in self.kept)))
            for start, kept_to in standing(self.starts):
                lost = _finite((s.step, s.losses.get(name)) for s in start.steps if s.step > kept_to)
                curves.append(_Curve("", f"c{number}", lost, faint=True))
        marks = [(step, f"resumed at {step:.0f}") for step in self.resumed]
        return _chart("loss-plot", "loss by step", curves, marks=marks)

    def time(self) -> tuple[Markup | None, list[str]]:
        """Draw tokens per second over the wall time, other classes of time as bands behind it; name the classes shown."""
        if not self.spent:
            return None, []
        slowest, _ = self.slowest_first[0]
        starts = events.read(self.place, rank=slowest)[slowest]
        began, ended = starts[0].began_ns, max(start.ended_ns for start in starts)
        wall_s = (ended - began) / 1e9
        seconds, unit = (1, "s") if wall_s < 180 else (60, "min") if wall_s < 3 * 3600 else (3600, "h")

        def at(since_epoch_ns: int) -> float:
            return (since_epoch_ns - began) / 1e9 / seconds

        tokens = tokens_of(list({step.step: step for step in self.done}.values()))
        curves: list[_Curve] = []
        for start in starts:
            spans = [(span, span.total(OF_A_STEP)) for span in start.spans]
            rates = [(at(span.at), tokens[span.step] / ns * 1e9) for span, ns in spans if span.step in tokens and ns]
            curves.append(_Curve("" if curves else "tokens/s", "c1", rates))
        bands = [
            (at(stretch.begin), at(stretch.end), stretch.kind)
            for stretch in goodput.timeline(starts)
            if stretch.kind != PRODUCTIVE  # except what every step has a little of
            and (stretch.kind not in ("data", "idle") or stretch.end - stretch.begin > (ended - began) / 500)
        ]
        marks = [
            (at(start.began_ns), "restarted" if (step := start.resumed_at) is None else f"restarted from step {step}")
            for start in starts[1:]
        ]
        over = f"tokens per second over {text.duration(wall_s)}"
        drawn = _chart("time-plot", over, curves, marks=marks, bands=bands, unit=unit, end=at(ended))
        return drawn, [kind for kind in CLASSES if any(band[2] == kind for band in bands)]

    def backends(self) -> list[dict[str, Any]]:
        """Return the rows of ops, those that deviate first."""
        rows = [{**row, "is_off": fields.is_off(row)} for row in self.values["backends"] or ()]
        return sorted(rows, key=lambda row: not row["is_off"])

    def by_step(self) -> list[tuple[str, Markup]]:
        """Draw a small plot of every other metric that is known by step."""
        metrics = metrics_of(self.ranks)
        series = {
            "gradient norm": _finite((step.step, step.grad_norm) for step in self.kept),
            "learning rate": _finite((step.step, step.learning_rate) for step in self.kept),
        }
        for name in self.losses:
            if name != "lm loss" and not name.startswith("mtp_"):
                series[name] = _finite((step.step, step.losses.get(name)) for step in self.kept)
        for title, (name, scale) in _OF_METRICS.items():
            series[title] = _finite(((row["step"], row.get(name)) for row in metrics), scale)
        if series["allocated memory, GB"] == series["reserved memory, GB"]:
            del series["reserved memory, GB"]
        marks, plots = [(step, "") for step in self.resumed], []
        for number, (title, points) in enumerate(series.items()):
            curves = [_Curve("", "c1", points)] if len(points) > 1 else []
            if drawn := _chart(f"by-step-{number}", f"{title} by step", curves, marks=marks, small=True):
                plots.append((title, drawn))
        return plots


def _finite(points: Iterable[tuple[float, float | None]], scale: float = 1) -> list[tuple[float, float]]:
    return [(float(x), scale * y) for x, y in points if y is not None and math.isfinite(y)]


# --- Charts -----------------------------------------------------------------------------------------------------------

_COLOURS = (*(f"c{number}" for number in range(1, 7)), *CLASSES, "ink", "dim", "line")
_INKS = {name: f"#0bad{index:02x}" for index, name in enumerate(_COLOURS)}
"""A unique placeholder for each of the page's colours; the SVG's placeholders are replaced by the page's own."""


class _Curve(NamedTuple):
    """A curve: its name in the legend (empty: none), its colour, its points, and whether it is drawn faint, as past."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


def _chart(part: str, summary: str, curves: Sequence[_Curve], *, small: bool = False, **looks: Any) -> Markup | None:
    """Draw a plot for every width of the window; None without points or without matplotlib."""
    curves = [curve for curve in curves if curve.points]
    if not curves or not can_draw():
        return None
    sizes = {"both": (250, 118)} if small else {"wide": (560, 262), "narrow": (340, 240)}
    opening, drawn = Markup('<svg class="{}" role="img" aria-label="{}"'), Markup("")
    for name, size in sizes.items():
        drawn += opening.format(name, summary) + Markup(_svg(curves, size, small=small, **looks))
    labels = [Markup('<li><i class="{}"></i>{}</li>').format(c.colour, c.label) for c in curves if c.label]
    legend = Markup('<ul class="legend">{}</ul>').format(Markup("").join(labels)) if labels else Markup("")
    return Markup('<div class="plot" data-part="{}">{}</div>{}').format(part, drawn, legend)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _svg(
    curves: Sequence[_Curve],
    size: tuple[int, int],
    *,
    small: bool,
    marks: Sequence[tuple[float, str]] = (),
    bands: Sequence[tuple[float, float, str]] = (),
    unit: str = "",
    end: float | None = None,
) -> str:
    """Draw a plot of ``size`` (pixels), without the first letters of its tag.

    Args:
        marks: vertical lines at x, each with a label.
        bands: stretches of the x axis, each with its class of time.
        unit: of the x axis; empty: steps, which are whole.
        end: where the x axis ends, with the y axis from 0; None: both axes fit the points.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rules: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "page", "font.size": 10.5}
    rules |= {"axes.unicode_minus": False, "path.simplify_threshold": 1.0}  # in pixels: drop points that cannot be seen
    note: Any = {"textcoords": "offset points", "fontsize": 9.5}
    steps, values = (sorted(point[axis] for curve in curves for point in curve.points) for axis in (0, 1))
    low, high = (0.0, end) if end is not None else (steps[0], steps[-1])
    with mpl.rc_context(rules):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        for begin, stop, kind in sorted(bands, key=lambda band: band[0] - band[1])[:300]:
            axes.axvspan(begin, max(stop, begin + high / 500), color=_INKS[kind], alpha=0.42, linewidth=0)
        for curve in curves:
            is_dot = len(curve.points) == 1  # a line of zero length with round ends
            style: dict[str, Any] = {"linestyle": (0, (3, 3)), "alpha": 0.45} if curve.faint else {}
            style |= {"linewidth": 5 if is_dot else 1.7, "solid_capstyle": "round"}
            axes.plot(*zip(*curve.points, *curve.points[:is_dot], strict=True), color=_INKS[curve.colour], **style)
        if end is None and values[0] > 0 and values[-1] > 20 * values[len(values) // 2]:
            axes.set_yscale("log")
        elif end is not None:
            axes.set_ylim(0, 1.12 * values[-1] or 1)
        else:
            room = 0.06 * (values[-1] - values[0]) or 0.05 * abs(values[0]) or 1.0
            axes.set_ylim(values[0] - room, values[-1] + (2 if marks else 1) * room)
        axes.set_xlim(low, high if high > low else low + 1)
        axes.xaxis.set_major_locator(MaxNLocator(3 if small else 6, integer=not unit))
        axes.yaxis.set_major_formatter(lambda value, _: text.short(value) if abs(value) >= 1e4 else f"{value:.6g}")
        for x, words in marks:
            axes.axvline(x, color=_INKS["ink"], linewidth=1, linestyle=(0, (2, 3)))
            at, side = (4, "left") if x < low + 0.6 * (high - low) else (-4, "right")
            place: Any = (x, 1), (at, -2), ("data", "axes fraction")
            axes.annotate(words, *place, ha=side, va="top", color=_INKS["ink"], **note)
        axes.grid(axis="y", color=_INKS["line"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, colors=_INKS["dim"])
        axes.tick_params(which="minor", length=0, labelleft=False)
        axes.set_xlabel("" if small else f"wall time, {unit}" if unit else "step", color=_INKS["dim"])
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    # A part of the page: no addresses, the page's colours and font, and as wide as there is room.
    gone = r"<metadata>.*?</metadata>|<defs>\s*<(?:style|clipPath).*?</defs>"
    svg = re.sub(gone, "", (made := stream.getvalue())[made.index("<svg") + 4 :], flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", svg)
    svg = re.sub(r'^[^>]*?(viewBox="[^"]*")[^>]*>', r" \1>", svg, count=1)
    svg = re.sub("#0bad[0-9a-f]{2}", lambda ink: f"var(--{_COLOURS[int(ink[0][5:], 16)]})", svg)
    return re.sub(r"\n\s*", "\n", svg)
