"""Charts as HTML and inline SVG. No torch.

The SVG of a plot is stretched to whatever room there is, and all text beside it is HTML, so that lines and letters keep
their size on a phone and on a wide screen. Coordinates are thousandths of the plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_MOST_POINTS = 800
"""Points of a curve; of more, the lowest and the highest of each of half as many stretches are drawn."""
_MOST_BANDS = 300
"""Bands of a plot; of more, the widest are drawn."""
_LEAST_RANGE = 1e-290
"""What is apart by less is one value: a step between ticks could not be told from 0."""
_LEAST_BAND = 2.0
"""The least width of a band, thousandths."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A curve.

    Attributes:
        label: its name in the legend; curves of one name have one entry.
        style: class of its colour, ``c1`` to ``c6``.
        points: ascending in x; a value that is no number is left out.
        faint: whether it is drawn as something past.
    """

    label: str
    style: str
    points: Sequence[Point]
    faint: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis in the colour of ``kind``, with a tooltip."""

    begin: float
    end: float
    kind: str
    title: str


@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x`` with a word."""

    x: float
    text: str


@dataclass(frozen=True)
class Level:
    """A horizontal line at ``y`` with a word."""

    y: float
    text: str


class Axis:
    """From values to thousandths, with round ticks; ``whole``: at whole numbers only."""

    def __init__(
        self, low: float, high: float, *, ticks: int, unit: str = "", log: bool = False, whole: bool = False
    ) -> None:
        self.unit, self.log = unit, log
        if log:
            self.low, self.high = math.log10(low), math.log10(high)
            self.low, self.high = (self.low, self.high) if self.high > self.low else (self.low - 0.5, self.high + 0.5)
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            self.ticks = [10.0**each for each in exponents]
            return
        if not high - low > _LEAST_RANGE:
            largest = max(abs(low), abs(high))
            room = 0.05 * (largest if largest > _LEAST_RANGE else 1)
            low, high = min(low, high) - room, max(low, high) + room
        self.low, self.high = low, high
        step = _round_step(max((high - low) / ticks, 1.0 if whole else 0.0))
        first = math.ceil(low / step - 1e-9)
        self.ticks = [step * each for each in range(first, math.floor(high / step + 1e-9) + 1)]

    def at(self, value: float) -> float:
        """Where ``value`` is, from 0 to 1000; what lies outside is put on the edge."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return min(1000.0, max(0.0, (value - self.low) / (self.high - self.low) * 1000))

    def labels(self) -> Iterator[tuple[float, str]]:
        """Where each tick is, and its text."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else (abs(self.ticks[0]) if self.ticks else 1)
        for tick in self.ticks:
            yield self.at(tick), short(tick, step) + self.unit


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def short(value: float, step: float = 0.0) -> str:
    """A number for an axis, with as many decimals as a ``step`` needs."""
    size = abs(value)
    if size >= 1e4:
        for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.4g}{letter}"
    if value and size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if 0 < step < 1 else 0
    return f"{value:,.{decimals}f}"


def plot(
    name: str,
    summary: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    *,
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    levels: Sequence[Level] = (),
    small: bool = False,
) -> str:
    """A plot; ``name`` is its ``data-part``, ``summary`` says in words what it shows."""
    shown, hidden = _widest(bands)
    drawn = [*(_band(band, x) for band in shown), *_grid(y), *(_mark(mark, x) for mark in marks)]
    drawn += [_level(level, y) for level in levels]
    drawn += [_path(curve, x, y) for curve in sorted(curves, key=lambda each: not each.faint)]
    words = [_tag(mark, x) for mark in marks] + [_level_tag(level, y) for level in levels]
    notes = f'<p class="dim">{hidden} shorter stretches are not drawn.</p>' if hidden else ""
    return (
        f'<div class="plot{" small" if small else ""}" data-part="{escape(name)}">'
        f'<div class="yaxis" aria-hidden="true">{"".join(_y_labels(y))}</div>'
        f'<div class="area"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(summary)}">{"".join(drawn)}</svg>{"".join(words)}</div>'
        f'<div class="xaxis" aria-hidden="true">{"".join(_x_labels(x))}</div></div>{notes}'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colour classes with their words."""
    found = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{found}</ul>' if found else ""


def finite(points: Sequence[Point]) -> list[Point]:
    """The points whose value is a number."""
    return [point for point in points if math.isfinite(point[1])]


def axis_of(values: Sequence[float], *, ticks: int, zero: bool = False, unit: str = "") -> Axis:
    """The y axis of some values; logarithmic where a few of them would flatten all the others."""
    found = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low, high = found[0], found[-1]
    median = found[len(found) // 2]
    if not zero and low > 0 and high > 20 * median:
        return Axis(low * 0.8, high * 1.25, ticks=ticks, unit=unit, log=True)
    if zero:
        return Axis(min(0.0, low), high * 1.08 or 1.0, ticks=ticks, unit=unit)
    room = 0.06 * (high - low)
    return Axis(low - room, high + room, ticks=ticks, unit=unit)


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= _MOST_POINTS:
        return points
    buckets = _MOST_POINTS // 2
    kept = []
    for index in range(buckets):
        part = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _path(curve: Curve, x: Axis, y: Axis) -> str:
    points = _thin(finite(curve.points))
    if not points:
        return ""
    places = [f"{x.at(one):.1f} {1000 - y.at(value):.1f}" for one, value in points]
    dot = " dot" if len(places) == 1 else ""
    line = f"M{places[0]}h.01" if len(places) == 1 else "M" + "L".join(places)
    return f'<path class="curve {curve.style}{" faint" if curve.faint else ""}{dot}" d="{line}"/>'


def _widest(bands: Sequence[Band]) -> tuple[list[Band], int]:
    kept = sorted(bands, key=lambda band: band.begin - band.end)[:_MOST_BANDS]
    return sorted(kept, key=lambda band: band.begin), len(bands) - len(kept)


def _band(band: Band, x: Axis) -> str:
    begin, end = x.at(band.begin), x.at(band.end)
    width = max(_LEAST_BAND, end - begin)
    return (
        f'<rect class="band {band.kind}" x="{begin:.1f}" y="0" width="{width:.1f}" height="1000">'
        f"<title>{escape(band.title)}</title></rect>"
    )


def _grid(y: Axis) -> Iterator[str]:
    for place, _ in y.labels():
        yield f'<path class="grid" d="M0 {1000 - place:.1f}H1000"/>'


def _mark(mark: Mark, x: Axis) -> str:
    return f'<path class="mark" d="M{x.at(mark.x):.1f} 0V1000"/>'


def _level(level: Level, y: Axis) -> str:
    return f'<path class="level" d="M0 {1000 - y.at(level.y):.1f}H1000"/>'


def _tag(mark: Mark, x: Axis) -> str:
    """The word of a mark, on the side where there is room."""
    place = x.at(mark.x) / 10
    side = f"left:{place:.2f}%" if place < 60 else f"right:{100 - place:.2f}%"
    return f'<span class="tag" style="{side}">{escape(mark.text)}</span>'


def _level_tag(level: Level, y: Axis) -> str:
    return f'<span class="tag leveltag" style="bottom:{y.at(level.y) / 10:.2f}%">{escape(level.text)}</span>'


def _y_labels(y: Axis) -> Iterator[str]:
    for place, text in y.labels():
        yield f'<span style="bottom:{place / 10:.2f}%">{escape(text)}</span>'


def _x_labels(x: Axis) -> Iterator[str]:
    for place, text in x.labels():
        edge = " first" if place < 40 else " last" if place > 960 else ""
        yield f'<span class="tick{edge}" style="left:{place / 10:.2f}%">{escape(text)}</span>'


def stack(parts: Sequence[tuple[str, float, str]], total: float) -> str:
    """One bar of parts: class, amount and tooltip of each."""
    return "".join(
        f'<i class="{style}" style="width:{100 * amount / total:.3f}%" title="{escape(title)}"></i>'
        for style, amount, title in parts
        if amount > 0
    )
