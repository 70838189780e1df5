"""The page of ``report html``: one self-contained file about a run. No torch.

``report_page.html`` is its Jinja2 template, which escapes everything read from files. Curves are SVG that the template draws.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

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
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"clock": text.duration, "size": text.size, "short": text.short, "utc": text.utc}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(run=run, fields=fields.labelled(run.values), classes=CLASSES, in_words=fields.in_words)


def read(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, or of a receipt.

    Raises:
        DataError: there is no receipt, or it is damaged.
    """
    place = Path(path)
    whole = place.resolve()
    name = whole.parent.name if place.is_file() else whole.name
    name = f"{whole.parent.name}/{name}" if whole.name == "observe" else name
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
"""Metrics that are plotted (of :data:`~megacpp_mcore.observe.live.SCALARS`), and the factor for each."""


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
        found, peaks = self.values["ranks.found"], self.values["memory.ranks"] or []
        numbers = found if len(found) == len(peaks) else range(len(peaks))
        self.peaks = sorted(zip(numbers, peaks, strict=True), key=lambda one: -one[1])
        self.missing = "no step was recorded" if self.ranks else "only the receipt is here, not the folder of the run"

    def why(self, path: str) -> str:
        """Return why a field is not known."""
        return fields.why_unknown(path, self.values["unknown"]) or "it is not known"

    def loss(self) -> dict[str, Any] | None:
        """Draw the losses of the heads by step; steps lost to a restart are faint, and every restart is marked."""
        names = [name for name in self.losses if name == "lm loss" or name.startswith("mtp_")]
        curves: list[_Curve] = []
        for number, name in enumerate(names[:6], 1):
            words = "next token" if name == "lm loss" else f"MTP depth {name[4:-5]}"
            curves.append(_Curve(words, f"c{number}", _finite((one.step, one.losses.get(name)) for one in self.kept)))
            for start, kept_to in standing(self.starts):
                lost = _finite((one.step, one.losses.get(name)) for one in start.steps if one.step > kept_to)
                curves.append(_Curve("", f"c{number}", lost, faint=True))
        marks = [(step, f"resumed at {step:.0f}") for step in self.resumed]
        return _chart("loss-plot", "loss", curves, marks=marks)

    def time(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Tokens per second over the wall time, other classes of time as bands behind it; and the classes shown."""
        if not self.spent:
            return None, []
        slowest, _ = self.slowest_first[0]
        starts = events.read(self.place, rank=slowest)[slowest]
        began, ended = starts[0].began_ns, max(one.ended_ns for one in starts)
        wall_s = (ended - began) / 1e9
        seconds, unit = (1, "s") if wall_s < 180 else (60, "min") if wall_s < 3 * 3600 else (3600, "h")

        def at(since_epoch_ns: int) -> float:
            return (since_epoch_ns - began) / 1e9 / seconds

        tokens = tokens_of(list({step.step: step for step in self.done}.values()))
        curves: list[_Curve] = []
        for start in starts:
            spans = [(span, span.total(OF_A_STEP)) for span in start.spans]
            rates = [(at(one.at), tokens[one.step] / ns * 1e9) for one, ns in spans if one.step in tokens and ns]
            curves.append(_Curve("" if curves else "tokens/s", "c1", rates))
        bands = [
            (at(one.begin), at(one.end), one.kind)
            for one in goodput.timeline(starts)
            if one.kind != PRODUCTIVE  # except what every step has a little of
            and (one.kind not in ("data", "idle") or one.end - one.begin > (ended - began) / 500)
        ]
        marks = [
            (at(one.began_ns), "restarted" if (step := one.resumed_at) is None else f"restarted from step {step}")
            for one in starts[1:]
        ]
        over = f"tokens per second over {text.duration(wall_s)}"
        drawn = _chart("time-plot", over, curves, marks=marks, bands=bands, unit=unit, end=at(ended))
        return drawn, [kind for kind in CLASSES if any(band[2] == kind for band in bands)]

    def backends(self) -> list[dict[str, Any]]:
        """Return the rows of ops, those that deviate first."""
        rows = [{**row, "is_off": fields.is_off(row)} for row in self.values["backends"] or ()]
        return sorted(rows, key=lambda row: not row["is_off"])

    def by_step(self) -> list[dict[str, Any]]:
        """Draw a small plot of every other metric that is known by step."""
        metrics = metrics_of(self.ranks)
        series = {
            "gradient norm": _finite((one.step, one.grad_norm) for one in self.kept),
            "learning rate": _finite((one.step, one.learning_rate) for one in self.kept),
        }
        for name in self.losses:
            if name != "lm loss" and not name.startswith("mtp_"):
                series[name] = _finite((one.step, one.losses.get(name)) for one in self.kept)
        for title, (name, scale) in _OF_METRICS.items():
            series[title] = _finite(((one["step"], one.get(name)) for one in metrics), scale)
        if series["allocated memory, GB"] == series["reserved memory, GB"]:
            del series["reserved memory, GB"]
        marks = [(step, "") for step in self.resumed]
        return [
            drawn
            for number, (title, points) in enumerate(series.items())
            if len(points) > 1
            and (drawn := _chart(f"by-step-{number}", title, [_Curve("", "c1", points)], marks=marks))
        ]


def _finite(points: Iterable[tuple[float, float | None]], scale: float = 1) -> list[tuple[float, float]]:
    return [(float(x), scale * y) for x, y in points if y is not None and math.isfinite(y)]


# --- Charts -----------------------------------------------------------------------------------------------------------


class _Curve(NamedTuple):
    """A curve: its name in the legend (empty: none), its colour, its points, and whether it is drawn faint, as past."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


_Mark = tuple[float, str]
_Band = tuple[float, float, str]


def _chart(
    part: str,
    title: str,
    curves: Iterable[_Curve],
    *,
    marks: Sequence[_Mark] = (),
    bands: Sequence[_Band] = (),
    unit: str = "",
    end: float | None = None,
) -> dict[str, Any] | None:
    """Lay a plot out, in hundredths of its width from the left and of its height from the top; None without points.

    Args:
        part, title: its name in the page, and for people.
        curves: what is drawn; of many points only the lowest and the highest of each 400th of the width.
        marks, bands: vertical lines, each with a label, and stretches of the x axis, each with its class of time.
        unit: of the x axis; empty: steps, which are whole.
        end: where the x axis ends, the y axis then beginning at 0; None: both axes fit the points.
    """
    curves = [one for one in curves if one.points]
    if not curves:
        return None
    xs, ys = (sorted(point[axis] for one in curves for point in one.points) for axis in (0, 1))
    left, width = (0.0, end) if end is not None else (xs[0], xs[-1] - xs[0])
    is_log = end is None and ys[0] > 0 and ys[-1] > 20 * ys[len(ys) // 2]
    scale: Callable[[float], float] = math.log10 if is_log else float
    low, high = 0.0 if end is not None else scale(ys[0]), scale(ys[-1])
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room * (end is None), high + room * (2 if marks else 1)

    def x(value: float) -> float:
        return round(100 * (value - left) / (width or 1), 2)

    def y(value: float) -> float:
        return round(100 * (high - scale(value)) / (high - low), 2)

    def laid_out(one: _Curve) -> _Curve:
        found: list[tuple[float, float]] = []
        for _, column in itertools.groupby(((x(at), y(value)) for at, value in one.points), lambda at: int(4 * at[0])):
            ordered = sorted(column, key=lambda place: place[1])
            found += sorted({ordered[0], ordered[-1]})
        return one._replace(points=found)

    rows = [10**tick if is_log else tick for tick in _ticks(low, high, 4, is_whole=is_log)]
    areas = [(x(begin), max(x(stop) - x(begin), 0.2), kind) for begin, stop, kind in bands]
    return {
        "part": part, "title": title, "unit": f"wall time, {unit}" if unit else "step", "curves": list(map(laid_out, curves)),
        "rows": [(y(tick), text.short(tick) if abs(tick) >= 1e4 else f"{tick:.6g}") for tick in rows],
        "columns": [(x(tick), f"{tick:.6g}") for tick in _ticks(left, left + width, 5, is_whole=not unit)],
        "marks": [(x(at), text) for at, text in marks], "bands": sorted(areas, key=lambda area: -area[1])[:300],
    }  # fmt: skip


def _ticks(low: float, high: float, count: int, *, is_whole: bool) -> list[float]:
    """Return at most ``count`` + 1 round values from ``low`` to ``high``."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    step = max(1.0, round(step)) if is_whole else step
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
