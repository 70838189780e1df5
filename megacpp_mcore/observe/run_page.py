"""One self-contained HTML page about a training run: loss curve, score, speed, model; needs no network and no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megacpp_mcore.model import Model
from megacpp_mcore.observe.steps import Step

# The drawing's own units; small enough that its text stays readable on a phone, which shows it at about 0.8.
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 34, 40
_MOST_GRIDLINES = 8
_CURVES = (("lm loss", "next token"), ("mtp_1 loss", "the token after it (MTP)"))
_FAMILIES = {"A": "attention (MLA; DSA with index cache)", "M": "Mamba-3", "E": "experts (MoE)", "R": "M²RNN"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #5c6370; --line: #d4d8de; --paper: #ffffff; --one: #1f5fbf;
  --two: #b35c00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --dim: #9aa3ae; --line: #3a4049; --paper: #15181c; --one: #7ab0ff; --two: #f0a64e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.4rem; margin: 0.5rem 0; } h2 { font-size: 1.1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; } .dim { color: var(--dim); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.75rem; margin: 1rem 0; }
.figures div { border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.figures b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--dim); font: 13px system-ui, sans-serif; }
.grid { stroke: var(--line); } .mark { stroke: var(--dim); stroke-dasharray: 3 3; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.one { stroke: var(--one); } .two { stroke: var(--two); } text.one { fill: var(--one); stroke: none; }
text.two { fill: var(--two); stroke: none; } .level { stroke: var(--ink); stroke-dasharray: 7 4; }
table { border-collapse: collapse; width: 100%; } th { font-weight: 600; text-align: left; }
td, th { padding: 0.3rem 0.5rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the page tells.

    Attributes:
        steps: the run's steps without repeats, ascending.
        killed_after: the last step before the run was killed.
        resumed_at: the step whose checkpoint it went on from.
        repeat: what became of comparing the steps that ran twice, one sentence.
        device: what it ran on, in words.
        tokens_per_second: median over the steps.
        bits_per_byte: the held-out score, and ``unigram_bits_per_byte`` of the same ``heldout_bytes``.
        versions: name to version.
    """

    model: Model
    steps: Sequence[Step]
    killed_after: int
    resumed_at: int
    repeat: str
    device: str
    tokens_per_second: float
    bits_per_byte: float
    unigram_bits_per_byte: float
    heldout_bytes: int
    versions: Mapping[str, str]


def render(run: Run) -> str:
    """The page as HTML text."""
    last = run.steps[-1]
    under = 100 * (1 - run.bits_per_byte / run.unigram_bits_per_byte)
    direction = "under" if under >= 0 else "over"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.model.name)}: {last.step} steps</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(run.model.name)}, {last.step} steps of stock Megatron on {escape(run.device)}</h1>
<div class="figures">
<div><b>{run.bits_per_byte:.3f}</b>bits per byte, held out</div>
<div><b>{run.unigram_bits_per_byte:.3f}</b>unigram entropy of the same {run.heldout_bytes:,} bytes</div>
<div><b>{abs(under):.1f} %</b>{direction} the unigram entropy</div>
<div><b>{run.tokens_per_second:,.0f}</b>tokens per second (median)</div>
</div>
<h2>Loss</h2>
{_curve(run)}
<p class="dim">Nats per token in training. The dashed level is the unigram entropy of the held-out bytes, the least that a model
without context could reach on them.</p>
<p>Killed after step {run.killed_after}, resumed from the checkpoint of step {run.resumed_at}. {escape(run.repeat)}</p>
<h2>Model</h2>
{_model_table(run.model)}
<h2>Versions</h2>
{_table(("part", "version"), list(run.versions.items()))}
</body>
</html>
"""


# --- Tables -----------------------------------------------------------------------------------------------------------


def _model_table(model: Model) -> str:
    counts = model.parameters()
    rows = [
        (f"{letter}: {name}", str(model.layers.count(letter)), f"{counts[letter]:,}")
        for letter, name in _FAMILIES.items()
        if letter in model.layers
    ]
    if model.mtp.depth:
        rows.append(
            (f"MTP block, applied {model.mtp.depth} time{'s' * (model.mtp.depth > 1)}", "1", f"{counts['mtp']:,}")
        )
    rows.append(
        ("embedding, output layer, final norm", "", f"{sum(counts[k] for k in ('embedding', 'head', 'norm')):,}")
    )
    rows.append(("total", str(model.depth), f"{sum(counts.values()):,}"))
    about = f"Layers in order: {model.layers}. Hidden size {model.hidden_size}, sequence {model.seq_length} tokens."
    return _table(("family", "layers", "parameters"), rows) + f'\n<p class="dim">{escape(about)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        first, *others = (escape(cell) for cell in cells)
        return f"<tr><{tag}>{first}</{tag}>" + "".join(f'<{tag} class="number">{c}</{tag}>' for c in others) + "</tr>"

    return "\n".join(("<table>", line("th", head), *(line("td", row) for row in rows), "</table>"))


# --- The drawing ------------------------------------------------------------------------------------------------------


class _Scale:
    """From steps and nats to the drawing's units."""

    def __init__(self, last_step: int, top_nats: float) -> None:
        self.last_step, self.top_nats = max(last_step, 2), top_nats

    def x(self, step: float) -> float:
        return round(_LEFT + (step - 1) / (self.last_step - 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, nats: float) -> float:
        return round(_HEIGHT - _BOTTOM - nats / self.top_nats * (_HEIGHT - _TOP - _BOTTOM), 1)


def _curve(run: Run) -> str:
    curves = []
    for style, (name, label) in zip(("one", "two"), _CURVES, strict=True):
        points = [
            (step.step, step.losses[name]) for step in run.steps if math.isfinite(step.losses.get(name, math.nan))
        ]
        if points:
            curves.append((style, label, points))
    level = run.unigram_bits_per_byte * math.log(2)
    scale = _Scale(run.steps[-1].step, 1.05 * max([level, *(nats for _, _, points in curves for _, nats in points)]))
    parts = [*_axes(scale), *_marks(run, scale), _level(scale, level)]
    for index, (style, label, points) in enumerate(curves):
        path = " ".join(f"{scale.x(step)},{scale.y(nats)}" for step, nats in points)
        parts.append(f'<polyline class="curve {style}" points="{path}"/>')
        parts.append(f'<text class="{style}" x="{_LEFT + 110 * index}" y="14">— {escape(label)}</text>')
    summary = "no losses were recorded"
    if curves:
        nats = [value for _, value in curves[0][2]]
        summary = f"Loss over {run.steps[-1].step} steps, from {nats[0]:.2f} to {nats[-1]:.2f} nats"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{summary}">\n' + "\n".join(parts) + "\n</svg>"


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for nats in range(0, int(scale.top_nats) + 1, max(1, math.ceil(scale.top_nats / _MOST_GRIDLINES))):
        y = scale.y(nats)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{nats}</text>')
    for step in sorted({1, *(round(scale.last_step * quarter / 4) for quarter in (1, 2, 3, 4))}):
        x, anchor = scale.x(step), "end" if step == scale.last_step else "middle"
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="{anchor}">{step}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    return parts


def _marks(run: Run, scale: _Scale) -> list[str]:
    parts = []
    marks = ((run.resumed_at, "end", -5, f"resumed at {run.resumed_at}"), (run.killed_after, "start", 5, "killed"))
    for step, anchor, shift, text in marks:
        x = scale.x(step)
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x + shift}" y="{_TOP + 6}" text-anchor="{anchor}">{escape(text)}</text>')
    return parts


def _level(scale: _Scale, level: float) -> str:
    y = scale.y(level)
    return (
        f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>\n'
        f'<text x="{_WIDTH - _RIGHT}" y="{y - 5}" text-anchor="end">unigram</text>'
    )
