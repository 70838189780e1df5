"""The page of ``report html``: one self-contained file about a run, or several side by side. No torch.

``page.html`` is its Jinja2 template, which escapes all that comes from files. matplotlib (the extra ``report``) draws
curves as SVG in the page's own colours, light and dark, for a wide window and for a phone; without it they are tables.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import io
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events, goodput, receipts
from megacpp_mcore.observe.clock import OF_A_STEP, Phase
from megacpp_mcore.observe.events import Start, Step
from megacpp_mcore.observe.goodput import CLASSES, DOWN, LOST, PRODUCTIVE, Goodput
from megacpp_mcore.observe.live import Metrics, metrics_of
from megacpp_mcore.observe.receipts import schema
from megacpp_mcore.observe.receipts.assemble import tokens_of
from megacpp_mcore.observe.receipts.claims import Comparison, arithmetic, compare
from megacpp_mcore.observe.steps import kept

MOST_RUNS = 6
"""Runs of one page: columns that can be read."""
_MOST_RANKS = 12
"""Ranks with a bar of their own, the slowest first."""
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
}
_ORDER = (
    Phase.STARTUP,
    Phase.LOAD,
    Phase.IDLE,
    Phase.EVALUATION,
    Phase.SAVE,
    Phase.PROFILE,
    Phase.COMPILE,
    Phase.JIT,
    Phase.DATA,
    Phase.STEP,
)
"""The order of the phases of one line, which has only their sums: what follows a step comes before the next one."""


@dataclass(frozen=True)
class Level:
    """A horizontal line at ``y`` with a word."""

    y: float
    text: str


@dataclass(frozen=True)
class Addition:
    """What a page says beyond what the run recorded.

    Attributes:
        title: the page's heading; empty: the run's name.
        lead: a sentence below it.
        figures: figure and label of further tiles, which come first.
        levels: horizontal lines in the plot of the losses, in nats.
        loss_note: a sentence below that plot.
        tables: title, head and rows of further tables.
    """

    title: str = ""
    lead: str = ""
    figures: Sequence[tuple[str, str]] = ()
    levels: Sequence[Level] = ()
    loss_note: str = ""
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()


def html(runs: Sequence[str | os.PathLike[str]], addition: Addition = Addition()) -> str:
    """The page about ``runs``, each the folder of a run, or a receipt.

    Args:
        runs: at least one; the first is what the others are compared with.
        addition: what is added, to the page of a single run.

    Raises:
        DataError: there is no run or too many, a run has no receipt, or a file is damaged.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise DataError(f"{len(runs)} runs for one page; expected 1 to {MOST_RUNS}")
    found = [read(run) for run in runs]
    if len({run.name for run in found}) < len(found):
        words = [f"{os.fspath(path)} ({number})" for number, path in enumerate(runs, 1)]
        found = [dataclasses.replace(run, name=word) for run, word in zip(found, words, strict=True)]
    title = addition.title or (found[0].name if len(found) == 1 else "Runs: " + ", ".join(run.name for run in found))
    alone = len(found) == 1
    return _template().render(
        title=title,
        alone=alone,
        runs=[_Shown(run, addition if alone else Addition()) for run in found],
        fields=[(label, _cells(found, one)) for label, one in schema.labelled(found[0].values)],
        comparisons=[_compared(found[0], run) for run in found[1:]],
        addition=addition,
        classes=CLASSES,
        words=CLASS_WORDS,
    )


@functools.cache
def _template() -> jinja2.Template:
    """The template, of this folder: no file that a run leaves is one."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


# --- What is read of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
        name: what the page calls it.
        receipt: its receipt; ``values`` the same by path.
        ranks: its starts by rank; empty where only a receipt is there.
        goodput: by rank, likewise.
        metrics: the logged steps.
        missing: why there is nothing but the receipt.
    """

    name: str
    receipt: Mapping[str, Any]
    values: Mapping[str, Any]
    ranks: Mapping[int, Sequence[Start]] = field(default_factory=dict)
    goodput: Mapping[int, Goodput] = field(default_factory=dict)
    metrics: Sequence[Metrics] = ()
    missing: str = ""

    @functools.cached_property
    def starts(self) -> list[list[Step]]:
        """The steps of each start, repeated ones too."""
        found = sorted((one.number, rank, one) for rank, starts in self.ranks.items() for one in starts if one.steps)
        return [list(one.steps) for _, _, one in found]

    @functools.cached_property
    def kept(self) -> list[Step]:
        """The steps that the run's present state rests on, ascending."""
        return kept([step for start in self.starts for step in start])


def read(path: str | os.PathLike[str]) -> RunData:
    """The run in a folder, or of a receipt.

    Raises:
        DataError: there is no receipt, or it is damaged.
    """
    place = Path(path)
    receipt = receipts.read(place)
    values = schema.flatten(receipt)
    whole = place.resolve()
    name = whole.parent.name if place.is_file() else whole.name
    if whole.name == "observe":
        name = f"{whole.parent.name}/{name}"
    try:
        if place.is_file():
            raise DataError("only the receipt is here, not the folder of the run")
        ranks = events.read(place)
        return RunData(name, receipt, values, ranks, goodput.of_starts(ranks), metrics_of(ranks))
    except DataError as error:
        return RunData(name, receipt, values, missing=str(error))


@dataclass(frozen=True)
class Span:
    """A stretch of wall time in one class of :data:`~megacpp_mcore.observe.goodput.CLASSES`, in nanoseconds since the epoch."""

    begin: int
    end: int
    kind: str


def timeline(starts: Sequence[Start]) -> Iterator[Span]:
    """One rank's wall time in order, without gaps but for pauses between starts that follow no death."""
    for start, before, after_death, repeated_from in reversed(goodput.in_context(starts)):
        at = start.began_ns
        if before is not None and after_death and at > before.ended_ns:
            yield Span(before.ended_ns, at, DOWN)
        for span in start.spans:
            for phase in _ORDER:
                spent = span.phases.get(phase, 0)
                kind = goodput.class_of(phase, after_death)
                if phase is Phase.STEP and span.step is not None:
                    kind = LOST if goodput.is_repeated(span.step, repeated_from) else PRODUCTIVE
                if spent:
                    yield Span(at, at + spent, kind)
                at += spent
        if start.ended_ns > at:
            yield Span(at, start.ended_ns, LOST if start.done else goodput.class_of(Phase.STARTUP, after_death))


# --- Words and rows ---------------------------------------------------------------------------------------------------


def class_label(name: str) -> str:
    """A class of time in words, with its name, by which ``report goodput`` and receipts call it."""
    words = CLASS_WORDS[name]
    return words if words == name else f"{words} [{name}]"


def clock(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"


@dataclass(frozen=True)
class Bar:
    """A bar of parts, each of a class, a share of the room, and words; and the figure beside it."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    figure: str


@dataclass(frozen=True)
class Row:
    """A row about a backend; ``off``: it does not run as it was asked for, or slower than what is there."""

    off: bool
    op: str
    layers: str
    requested: str
    observed: str
    why: str

    @property
    def sign(self) -> str:
        """What is off."""
        return "" if not self.off else "≠ " if self.requested not in ("auto", self.observed) else "slower: "


class _Shown:
    """What the template shows of one run."""

    def __init__(self, run: RunData, addition: Addition) -> None:
        self.run, self.values, self.addition = run, run.values, addition
        self.name, self.missing = run.name, run.missing
        self.disqualifiers, self.status = self.values["disqualifiers"], self.values["status"]
        self.failed = self.status not in (events.FINISHED, schema.RUNNING)

    def why(self, path: str) -> str:
        """Why a field is not known."""
        return schema.why_unknown(path, self.values["unknown"]) or "it is not known"

    def about(self) -> str:
        """One line: what ran, on what, when and how often it was started, and when the receipt was made."""
        values = self.values
        devices, parameters = values["parallelism.world_size"], values["model.parameters"]
        starts = max((len(one) for one in self.run.ranks.values()), default=0)
        began = min((one[0].began_ns for one in self.run.ranks.values()), default=None)
        words = [
            values["model.name"] or "a model that is not this package's",
            f"{len(values['model.layers'])} layers" if values["model.layers"] else None,
            f"{_short(parameters)} parameters" if parameters else None,
            f"{devices} × {values['device'] or 'an unknown device'}" if devices else values["device"],
            values["lane"],
            f"started {_utc(began)}" if began is not None else None,
            f"{starts} starts" if starts > 1 else None,
            f"receipt put together {values['written_at']}",
        ]
        return " · ".join(str(word) for word in words if word)

    def tiles(self) -> list[tuple[str, str]]:
        """Figure and label of the main figures."""
        forms: tuple[tuple[str, Callable[[Any], str], str], ...] = (
            ("throughput.tokens_per_s", lambda rate: f"{rate:,.0f}", "tokens/s at the median step"),
            ("throughput.mfu", lambda share: f"{100 * share:.1f} %", "MFU"),
            ("goodput", lambda one: f"{100 * one['goodput']:.1f} %", "goodput of the slowest rank"),
            ("step_time.p50_s", clock, "median step time"),
            ("loss.last", lambda loss: f"{loss:.4g}", "last loss, nats a token"),
            ("memory.allocated_peak_bytes", schema.size, f"peak memory, {self.values['memory.kind'] or 'allocated'}"),
        )
        found = list(self.addition.figures)
        for path, form, label in forms:
            value = self.values[path]
            lacking = f"{label}: {self.why(path).partition(';')[0]}"
            found.append((form(value), label) if value is not None else ("–", lacking))
        return found

    def loss(self) -> Markup | None:
        """The losses of the heads by step, what was lost to a restart faint, and every restart marked."""
        run = self.run
        names = [name for name in _loss_names(run.kept) if name == "lm loss" or name.startswith("mtp_")]
        still = {id(step) for step in run.kept}
        curves = []
        for number, name in enumerate(names[:6], 1):
            words = "next token" if name == "lm loss" else f"MTP depth {name[4:-5]}"
            curves.append(_Curve(words, f"c{number}", _points(run.kept, name)))
            for start in run.starts:
                lost = [step for step in start if id(step) not in still]
                curves.append(_Curve("", f"c{number}", _points(lost, name), faint=True))
        marks = [(float(start[0].resumed_at), f"resumed at {start[0].resumed_at}") for start in run.starts[1:]]
        return _chart("loss-plot", "loss by step", curves, marks=marks, levels=self.addition.levels)

    def loss_note(self) -> str:
        """What the plot of the losses leaves to say."""
        run = self.run
        bad = [step.step for step in run.kept if step.skipped or not all(map(math.isfinite, step.losses.values()))]
        repeated = sum(map(len, run.starts)) - len(run.kept)
        notes = []
        if repeated:
            notes.append(f"{repeated} step{'s were' if repeated > 1 else ' was'} done again after a restart (faint).")
        if bad:
            notes.append(f"{len(bad)} steps were skipped or have a loss that is no number, the first is step {bad[0]}.")
        return " ".join([*notes, self.addition.loss_note])

    def time(self) -> Markup | None:
        """Tokens per second over the wall time, with what else the time went to behind it."""
        if not self.run.goodput:
            return None
        starts = self.run.ranks[self.slowest]
        began, wall_s = starts[0].began_ns, (max(one.ended_ns for one in starts) - starts[0].began_ns) / 1e9
        factor, unit = (1.0, "s") if wall_s < 180 else (60.0, "min") if wall_s < 3 * 3600 else (3600.0, "h")
        scale = 1e9 * factor
        tokens = tokens_of(list({step.step: step for start in self.run.starts for step in start}.values()))
        curves: list[_Curve] = []
        for start in starts:
            spans = [(span, sum(span.phases.get(phase, 0) for phase in OF_A_STEP)) for span in start.spans]
            rates = [((span.at - began) / scale, tokens[span.step] / spent * 1e9) for span, spent in spans
                     if span.step in tokens and spent]  # fmt: skip
            curves.append(_Curve("tokens/s" if not curves else "", "c1", rates))
        marks = [((one.began_ns - began) / scale, "restarted" + ("" if one.resumed_at is None else
                  f" from step {one.resumed_at}")) for one in starts[1:]]  # fmt: skip
        least = wall_s * 1e9 / 500  # of what every step has a little of
        bands = [((one.begin - began) / scale, (one.end - began) / scale, one.kind) for one in timeline(starts)
                 if one.kind != PRODUCTIVE and (one.kind not in ("data", "idle") or one.end - one.begin > least)]  # fmt: skip
        self.bands = [kind for kind in CLASSES if any(band[2] == kind for band in bands)]
        end = wall_s / factor
        return _chart(
            "time-plot", f"tokens per second over {clock(wall_s)}", curves, marks=marks, bands=bands, unit=unit, end=end
        )

    @functools.cached_property
    def slowest(self) -> int:
        """The rank with the least goodput."""
        return goodput.slowest(self.run.goodput)

    def goodput(self) -> tuple[list[Bar], list[tuple[str, str, str, str]], str, Sequence[str]] | None:
        """A bar a rank, the rows of the classes, a sentence about them, and what is doubtful."""
        ranks = self.run.goodput
        if not ranks:
            return None
        worst = ranks[self.slowest]
        bars = []
        for rank in sorted(ranks, key=lambda one: (ranks[one].share, one))[:_MOST_RANKS]:
            one, mark = ranks[rank], ", slowest" if rank == self.slowest and len(ranks) > 1 else ""
            parts = [(name, spent / max(1, one.wall_ns), f"{class_label(name)}: {clock(spent / 1e9)}")
                     for name, spent in one.nanoseconds.items() if spent]  # fmt: skip
            bars.append(Bar(f"rank {rank}{mark}", parts, f"{one.share:.1%}"))
        rows = [(name, class_label(name), clock(spent / 1e9), f"{spent / max(1, worst.wall_ns):.1%}")
                for name, spent in worst.nanoseconds.items()]  # fmt: skip
        more = f" {len(ranks) - _MOST_RANKS} ranks with more are not shown." if len(ranks) > _MOST_RANKS else ""
        about = (
            f"{clock(worst.wall_ns / 1e9)} of wall time of rank {self.slowest}, {worst.starts} "
            f"start{'s' * (worst.starts > 1)}, {worst.steps} steps kept, {worst.steps_lost} lost. The parts sum to the whole."
        )
        return bars, rows, about + more, worst.notes

    def shares(self) -> list[Bar]:
        """The share of each family."""
        groups = sorted((self.values["shares.groups"] or {}).items(), key=lambda one: -one[1])
        most = max((share for _, share in groups), default=1.0)
        return [
            Bar(FAMILY_WORDS.get(name, name), [("c2" if not index else "c1", share / most, name)], f"{share:.1%}")
            for index, (name, share) in enumerate(groups)
            if share > 0
        ]

    def memory(self) -> list[Bar]:
        """Peaks by rank."""
        ranks, reserved = self.values["memory.ranks"], self.values["memory.reserved_peak_bytes"]
        if not ranks or reserved is None:
            return []
        top = max(reserved, *ranks, 1)
        numbers = self.values["ranks.found"] if len(self.values["ranks.found"]) == len(ranks) else range(len(ranks))
        found = sorted(zip(numbers, ranks, strict=True), key=lambda one: -one[1])[:_MOST_RANKS]
        bars = [Bar(f"rank {rank}", [("c1", peak / top, "allocated")], schema.size(peak)) for rank, peak in found]
        return [*bars, Bar("reserved", [("c1 soft", reserved / top, "reserved")], schema.size(reserved))]

    def backends(self) -> tuple[list[Row], list[Row]]:
        """Ops, what is off first with the parts that are; and the parts of layers that are as asked for."""
        rows: defaultdict[tuple[bool, str, str, str, str], list[Any]] = defaultdict(list)
        for one in self.values["backends"] or ():
            off = bool(one["slower_than_best"] or one["requested"] not in ("auto", one["observed"]))
            rows[off, one["op"], one["requested"], one["observed"], one["reason"]].append(schema.layer_of(one))
        found = [Row(off, op, schema.spans(layers), *rest) for (off, op, *rest), layers in rows.items()]
        parts = [
            Row(one["requested"] == "transformer_engine" != one["observed"] and arithmetic(one["part"]), one["part"],
                schema.spans(one["layers"]), one["requested"], one["observed"], one["implementation"])
            for one in self.values["parts"] or ()
        ]  # fmt: skip
        ordered = sorted([*found, *(part for part in parts if part.off)], key=lambda row: not row.off)
        return ordered, [part for part in parts if not part.off]

    def by_step(self) -> list[tuple[str, Markup]]:
        """A small plot of everything else that is known by step."""
        steps, metrics = self.run.kept, self.run.metrics
        others = [name for name in _loss_names(steps) if name != "lm loss" and not name.startswith("mtp_")]
        columns: list[tuple[str, Sequence[Any], Callable[[Any], float | None]]] = [
            ("gradient norm", steps, lambda one: one.grad_norm),
            ("learning rate", steps, lambda one: one.learning_rate),
            *((name, steps, functools.partial(lambda name, one: one.losses.get(name), name)) for name in others),
            ("MFU, %", metrics, lambda one: _percent(one.mfu)),
            ("dropped assignments, %", metrics, lambda one: _percent(one.dropped_share)),
            ("overlap of neighbouring indexers, %", metrics, lambda one: _percent(one.index_overlap)),
            ("routing entropy, % (100 is even)", metrics, lambda one: _percent(one.routing_entropy)),
            ("allocated memory, GiB", metrics, lambda one: one.memory_allocated_bytes / 2**30),
            ("reserved memory, GiB", metrics, lambda one: one.memory_reserved_bytes / 2**30),
        ]
        if all(one.memory_allocated_bytes == one.memory_reserved_bytes for one in metrics):
            columns.pop()
        marks = [(float(start[0].resumed_at), "") for start in self.run.starts[1:]]
        found: list[tuple[str, Markup]] = []
        for title, rows, value in columns:
            points = [(float(row.step), one) for row in rows if (one := value(row)) is not None and math.isfinite(one)]
            if len(points) > 1:
                drawn = _chart(
                    f"by-step-{len(found)}", f"{title} by step", [_Curve("", "c1", points)], marks=marks, small=True
                )
                found += [(title, drawn)] if drawn is not None else []
        return found

    def notes(self) -> list[tuple[str, str]]:
        """What could not be judged, every field that is not known, with the reasons, and the notes."""
        values = self.values
        return [
            *((f"not judged: {one['name']}", one["reason"]) for one in values["unjudged"]),
            *((path, reason) for path, reason in values["unknown"].items()),
            *(("note", note) for note in values["notes"]),
        ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _loss_names(steps: Sequence[Step]) -> list[str]:
    """The losses' names, next token first."""
    return sorted({name for step in steps for name in step.losses}, key=lambda name: (name != "lm loss", name))


def _points(steps: Sequence[Step], name: str) -> list[tuple[float, float]]:
    return [(float(step.step), step.losses[name]) for step in steps if math.isfinite(step.losses.get(name, math.nan))]


def _short(count: float) -> str:
    """A count with a letter for thousands, millions and billions."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            return f"{count / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{count:,.0f}"


def _utc(since_epoch_ns: int) -> str:
    """UTC in whole seconds, as receipts have it."""
    return datetime.datetime.fromtimestamp(since_epoch_ns // 10**9, datetime.UTC).isoformat(timespec="seconds")


def _cells(runs: Sequence[RunData], one: schema.Field) -> list[tuple[str, bool]]:
    """The value of a field in every run, and whether it is known."""
    texts = [(schema.in_words(run.values, one), schema.why_unknown(one.path, run.values["unknown"])) for run in runs]
    return [(f"not known: {why}", False) if text is None else (text, True) for text, why in texts]


# --- Comparisons ------------------------------------------------------------------------------------------------------


def _compared(first: RunData, second: RunData) -> dict[str, Any]:
    """The checklist of two runs, the claim or why there is none, and the command that allows one."""
    found = compare(first.receipt, second.receipt)
    lines = [(line.same, line.describe((first.name, second.name))) for line in found.lines if not line.same]
    shown = {f"{line.question} {line.describe()}" for line in found.lines}
    return {
        "title": f"May {second.name} be compared with {first.name}?",
        "names": "" if (first.name, second.name) == ("A", "B") else f"A is {first.name}, B is {second.name}; ",
        "found": found,
        "same": ", ".join(line.key.replace("_", " ") for line in found.lines if line.same) or "nothing",
        "lines": [*lines, *((False, refusal) for refusal in found.refusals if refusal not in shown)],
        "command": "" if found.claim is not None else _declaring(first.receipt, second.receipt, found),
    }


def _declaring(first: Mapping[str, Any], second: Mapping[str, Any], refused: Comparison) -> str:
    """The command that allows a claim by declaring what differs, and what both are disqualified by; empty: none does."""
    one, other = ({each["name"] for each in receipt["disqualifiers"]} for receipt in (first, second))
    both = [name for name in schema.DISQUALIFIERS if name in one & other]
    for varies in ([], *([line.key] for line in refused.lines if line.same is False)):
        if compare(first, second, varies, both).claim is not None:
            options = [("--varies", key) for key in varies] + [("--declare", name) for name in both]
            return shlex.join(
                ["megacpp-mcore", "report", "compare", "A", "B", *(word for pair in options for word in pair)]
            )
    return ""


# --- Charts -----------------------------------------------------------------------------------------------------------

_COLOURS = (*(f"c{number}" for number in range(1, 7)), *CLASSES, "ink", "dim", "line")
_INKS = {name: f"#0bad{index:02x}" for index, name in enumerate(_COLOURS)}
"""A colour that nothing else has for each of the page's, in whose place the page's own is put in the SVG."""
_MOST_POINTS = 800
"""Points of a curve; of more, the lowest and the highest of each of half as many stretches are drawn."""
_MOST_BANDS = 300
"""Stretches of other time behind a plot; of more, the widest are drawn."""


@dataclass(frozen=True)
class _Curve:
    """A curve: its name in the legend (empty: none), its colour, its points, and whether it is drawn as something past."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


def _chart(
    part: str,
    summary: str,
    curves: Sequence[_Curve],
    *,
    small: bool = False,
    **looks: Any,
) -> Markup | None:
    """A plot for every width of the window, or a table without matplotlib; None without a point.

    Args:
        part: its ``data-part``.
        summary: what it shows, in words.
        curves: what is drawn.
        small: whether it is one of many.
        looks: as of :func:`_svg`.
    """
    curves = [_Curve(one.label, one.colour, _thin(one.points), one.faint) for one in curves if one.points]
    if not curves:
        return None
    if not can_draw():
        return _as_table(part, curves)
    sizes = (("both", 250, 118),) if small else (("wide", 560, 262), ("narrow", 340, 240))
    drawn = []
    for name, width, height in sizes:
        svg = _svg(curves, (width, height), small=small, **looks)
        words = Markup('<svg class="{}" role="img" aria-label="{}"').format(name, summary)
        drawn.append(words + Markup(svg.removeprefix("<svg")))
    labels = [(one.colour, one.label) for one in curves if one.label]
    entries = Markup("").join(Markup('<li><i class="{}"></i>{}</li>').format(*one) for one in labels)
    legend = Markup('<ul class="legend">{}</ul>').format(entries) if entries else Markup("")
    return Markup('<div class="plot" data-part="{}">{}</div>{}').format(part, Markup("").join(drawn), legend)


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def _svg(
    curves: Sequence[_Curve],
    size: tuple[int, int],
    *,
    small: bool,
    marks: Sequence[tuple[float, str]] = (),
    levels: Sequence[Level] = (),
    bands: Sequence[tuple[float, float, str]] = (),
    unit: str = "",
    end: float | None = None,
) -> str:
    """A plot of ``size`` (pixels).

    Args:
        curves: what is drawn.
        size: of it.
        small: whether it is one of many.
        marks: vertical lines at x, each with a word.
        levels: horizontal lines.
        bands: stretches of the x axis and the class of time each of them is in.
        unit: of the x axis; empty: steps, which are whole.
        end: where the x axis ends, and that the y axis begins at 0; None: both as the points have it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rules: Any = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "page",
        "font.size": 10.5,
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(rules):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        for begin, stop, kind in sorted(bands, key=lambda band: band[0] - band[1])[:_MOST_BANDS]:
            axes.axvspan(begin, max(stop, begin + (end or 0) / 500), color=_INKS[kind], alpha=0.42, linewidth=0)
        for one in curves:
            style: dict[str, Any] = {"linestyle": (0, (3, 3)), "alpha": 0.45} if one.faint else {}
            is_dot = len(one.points) == 1  # a line of no length, whose ends are round
            style |= {"linewidth": 5 if is_dot else 1.7, "solid_capstyle": "round"}
            points = [*one.points, *one.points] if is_dot else one.points
            axes.plot(*zip(*points, strict=True), color=_INKS[one.colour], **style)
        values = sorted([y for one in curves for _, y in one.points] + [level.y for level in levels])
        if end is None and values[0] > 0 and values[-1] > 20 * values[len(values) // 2]:
            axes.set_yscale("log")
        elif end is not None:
            axes.set_ylim(0, 1.12 * values[-1] or 1)
        else:
            room = 0.06 * (values[-1] - values[0]) or 0.05 * abs(values[0]) or 1.0
            axes.set_ylim(values[0] - room, values[-1] + (2 if marks else 1) * room)
        steps = [x for one in curves for x, _ in one.points]
        low, high = (0.0, end) if end is not None else (min(steps), max(steps))
        axes.set_xlim(low, high if high > low else low + 1)
        axes.xaxis.set_major_locator(MaxNLocator(3 if small else 6, integer=not unit))
        for x, text in marks:
            axes.axvline(x, color=_INKS["ink"], linewidth=1, linestyle=(0, (2, 3)))
            at, side = (4, "left") if x < low + 0.6 * (high - low) else (-4, "right")
            axes.annotate(text, (x, 1), (at, -2), xycoords=("data", "axes fraction"), textcoords="offset points", ha=side,
                          va="top", color=_INKS["ink"], fontsize=9.5)  # fmt: skip
        for level in levels:
            axes.axhline(level.y, color=_INKS["dim"], linewidth=1, linestyle=(0, (6, 4)))
            axes.annotate(level.text, (1, level.y), (-3, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                          ha="right", color=_INKS["dim"], fontsize=9.5)  # fmt: skip
        axes.grid(axis="y", color=_INKS["line"], linewidth=0.8)
        axes.set_axisbelow(True)
        for edge in axes.spines.values():
            edge.set_visible(False)
        axes.tick_params(length=0, colors=_INKS["dim"])
        axes.tick_params(which="minor", length=0, labelleft=False)
        axes.set_xlabel("" if small else f"wall time, {unit}" if unit else "step", color=_INKS["dim"])
        axes.yaxis.set_major_formatter(lambda value, _: _short(value) if abs(value) >= 1e4 else f"{value:.6g}")
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _of_the_page(stream.getvalue())


def _of_the_page(svg: str) -> str:
    """An SVG file as a part of the page: no addresses, the page's colours and font, and as wide as there is room."""
    gone = r"<metadata>.*?</metadata>|<defs>\s*<(?:style|clipPath).*?</defs>"
    svg = re.sub(gone, "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", svg)
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    for name, ink in _INKS.items():
        svg = svg.replace(ink, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return points
    buckets = _MOST_POINTS // 2
    found = []
    for index in range(buckets):
        stretch = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        found += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return found


def _as_table(part: str, curves: Sequence[_Curve]) -> Markup:
    """Up to twelve points of every curve, evenly spaced, the first and the last among them."""
    row = Markup('<tr><td>{}</td><td class="number">{:.4g}</td><td class="number">{:.4g}</td></tr>')
    rows = []
    for one in curves:
        count = min(12, len(one.points))
        places = sorted({round(index * (len(one.points) - 1) / max(1, count - 1)) for index in range(count)})
        rows += [row.format(one.label, *one.points[place]) for place in places]
    return Markup('<table data-part="{}"><tbody>{}</tbody></table>').format(part, Markup("").join(rows))
