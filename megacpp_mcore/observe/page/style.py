"""The look of the page: light and dark, from a phone's width up. No torch."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf8; --card: #ffffff; --ink: #1d2024; --dim: #666c75;
  --line: #e3e1dc; --soft: #f1efea; --bad: #b3261e; --bad-soft: #fceeec; --good: #14746f; --warn: #8a5a00;
  --warn-soft: #fbf3e0; --c1: #1f5fbf; --c2: #b35c00; --c3: #14746f; --c4: #8e3b8a; --c5: #7a6a00; --c6: #5b5f66;
  --productive: #2f8f83; --startup: #9aa3b2; --checkpoint_load: #6f8fc9; --compile: #8d6cc4; --jit: #b79ae0;
  --data: #e8a13a; --checkpoint_save: #3f7fd0; --evaluation: #58b4cf; --profile: #d36ba6; --idle: #cfd3da;
  --recovery: #c98b6b; --lost_steps: #cf4a40; --down: #3c4048; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #131518; --card: #1a1d21; --ink: #e8e9eb; --dim: #9aa1ab; --line: #2d3238; --soft: #22262b;
    --bad: #ff8a80; --bad-soft: #3a1f1e; --good: #5cc4b8; --warn: #f0bd62; --warn-soft: #33290f; --c1: #7db2ff;
    --c2: #f2a65a; --c3: #5cc4b8; --c4: #d993d5; --c5: #d3c25a; --c6: #b4b9c1; --productive: #3da496;
    --startup: #6b7482; --idle: #474d56; --down: #9a9fa8; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 0.35rem; font-weight: 650; }
h2 { font-size: 1.45rem; line-height: 1.25; letter-spacing: -0.01em; margin: 3rem 0 0.35rem; font-weight: 650; }
h3 { font-size: 1.02rem; margin: 0 0 0.15rem; font-weight: 620; }
p { margin: 0.3rem 0; max-width: 48rem; }
.dim, figcaption { color: var(--dim); font-size: 0.875rem; }
code { font: 0.85em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
header .dim { font-size: 0.95rem; max-width: none; }
section { margin-top: 1.5rem; padding: 1.25rem 1.4rem 1.35rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 0.75rem; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1.5rem;
  margin-top: 1.5rem; align-items: stretch; }
.pair section { margin: 0; }
.column { display: flex; flex-direction: column; gap: 1.5rem; min-width: 0; }
.column section { flex: 1 1 auto; }
.pill { display: inline-block; padding: 0.05rem 0.6rem; border-radius: 1rem; font-size: 0.8rem; font-weight: 600;
  border: 1px solid currentColor; color: var(--good); vertical-align: 0.2em; letter-spacing: 0; }
.pill.bad { color: var(--bad); }
.pill.warn { color: var(--warn); }
.alerts { margin-top: 1.5rem; padding: 1rem 1.4rem; border: 1px solid var(--bad); border-left-width: 0.4rem;
  border-radius: 0.75rem; background: var(--bad-soft); }
.alerts h3 { color: var(--bad); }
.alerts ul { margin: 0.4rem 0 0; padding: 0; list-style: none; }
.alerts li { margin: 0.35rem 0; max-width: 60rem; }
.alerts b { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin-top: 1.5rem; background: var(--line);
  border: 1px solid var(--line); border-radius: 0.75rem; overflow: hidden; }
.tiles div { background: var(--card); padding: 0.85rem 1.1rem 0.9rem; font-size: 0.84rem; line-height: 1.35;
  color: var(--dim); flex: 1 1 9.5rem; }
.tiles b { display: block; color: var(--ink); font-size: 1.6rem; line-height: 1.25; font-weight: 560;
  letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.tiles b small { font-size: 0.6em; color: var(--dim); }
.plot { display: grid; grid-template: 15rem 1.4rem / 3.4rem 1fr; margin-top: 0.9rem; }
.plot.small { grid-template: 6.5rem 1.3rem / 3.4rem 1fr; }
.area { position: relative; min-width: 0; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.yaxis, .xaxis { position: relative; color: var(--dim); font-size: 0.75rem; line-height: 1;
  font-variant-numeric: tabular-nums; }
.xaxis { grid-column: 2; }
.yaxis span { position: absolute; right: 0.55rem; transform: translateY(50%); white-space: nowrap; }
.xaxis span { position: absolute; top: 0.5rem; transform: translateX(-50%); white-space: nowrap; }
.xaxis .first { transform: none; }
.xaxis .last { transform: translateX(-100%); }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--line); stroke-width: 1; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
.level { stroke: var(--dim); stroke-dasharray: 6 4; }
.curve { stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.curve.faint { opacity: 0.4; stroke-dasharray: 3 4; }
.curve.dot { stroke-width: 6; }
path.c1 { stroke: var(--c1); }
path.c2 { stroke: var(--c2); }
path.c3 { stroke: var(--c3); }
path.c4 { stroke: var(--c4); }
path.c5 { stroke: var(--c5); }
path.c6 { stroke: var(--c6); }
i.c1 { background: var(--c1); }
i.c2 { background: var(--c2); }
i.c3 { background: var(--c3); }
i.c4 { background: var(--c4); }
i.c5 { background: var(--c5); }
i.c6 { background: var(--c6); }
.tag { position: absolute; top: 0; padding: 0 0.35rem; font-size: 0.75rem; line-height: 1.35; color: var(--ink);
  background: color-mix(in srgb, var(--card) 82%, transparent); white-space: nowrap; }
.leveltag { top: auto; right: 0; color: var(--dim); }
.band { opacity: 0.42; }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1.1rem; margin: 0.5rem 0 0; padding: 0; list-style: none;
  font-size: 0.84rem; color: var(--dim); }
.legend i { display: inline-block; width: 0.75rem; height: 0.75rem; border-radius: 0.2rem; margin-right: 0.4rem;
  vertical-align: -0.06rem; }
.swatch { display: inline-block; width: 0.75rem; height: 0.75rem; border-radius: 0.2rem; margin-right: 0.55rem;
  vertical-align: -0.06rem; }
tr.none { color: var(--dim); }
.classes td { padding-top: 0.22rem; padding-bottom: 0.22rem; }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: 0.4rem 0.8rem; align-items: center;
  margin-top: 0.9rem; font-size: 0.9rem; }
.bars > span { font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.bars > span:nth-child(3n) { text-align: right; }
.bar { display: flex; height: 1.35rem; border-radius: 0.3rem; overflow: hidden; background: var(--soft);
  min-width: 0; }
.bar i { display: block; }
.bar.tall { height: 2rem; }
.share i { background: var(--c1); }
.share.first i { background: var(--c2); }
.memory .allocated { background: var(--c1); }
.memory .reserved { background: color-mix(in srgb, var(--c1) 32%, transparent); }
.multiples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr));
  gap: 1.1rem 1.5rem; margin-top: 1.2rem; }
.multiples > div { min-width: 0; }
.multiples h4 { margin: 0; font-size: 0.84rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; margin-top: 0.7rem; line-height: 1.4; }
th { font-weight: 600; text-align: left; }
thead th { color: var(--dim); font-size: 0.8rem; font-weight: 600; }
td, th { padding: 0.4rem 0.9rem 0.4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:last-child, th:last-child { padding-right: 0; }
tbody tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.off { background: var(--bad-soft); }
tr.off > * { color: var(--bad); }
tr.off td:first-child { box-shadow: inset 0.2rem 0 var(--bad); }
.backends td:first-child, .backends th:first-child { padding-left: 0.7rem; }
.backends td:not(:nth-child(2)):not(:last-child) { white-space: nowrap; }
.verdict { color: var(--bad); font-weight: 650; }
.side { table-layout: fixed; }
.side tbody th { color: var(--dim); font-weight: 500; }
.side .differs td { font-weight: 620; }
.side .differs th::after { content: " ≠"; color: var(--warn); font-weight: 700; }
.side td { font-variant-numeric: tabular-nums; }
.why { color: var(--dim); font-size: 0.84rem; font-weight: 400; }
details { margin-top: 1.5rem; border: 1px solid var(--line); border-radius: 0.75rem; background: var(--card);
  padding: 0.9rem 1.4rem; }
section details { margin-top: 0.9rem; padding: 0.5rem 0.9rem; }
summary { cursor: pointer; font-weight: 600; }
.check { margin: 0.7rem 0 0; padding: 0; list-style: none; font-size: 0.9rem; }
.check li { padding: 0.2rem 0 0.2rem 1.5rem; text-indent: -1.5rem; }
.check li::before { content: "="; display: inline-block; width: 1.5rem; text-indent: 0; color: var(--good);
  font-weight: 700; }
.check .no::before { content: "≠"; color: var(--bad); }
.check .unknown::before { content: "?"; color: var(--warn); }
footer { margin-top: 2.5rem; }
@media (max-width: 40rem) {
  body { padding: 1.4rem 0.9rem 3rem; }
  h1 { font-size: 1.5rem; }
  section { padding: 1rem 0.95rem; }
  .pair { gap: 1rem; }
  .plot { grid-template: 12.5rem 1.4rem / 2.9rem 1fr; }
  .plot.small { grid-template: 6.5rem 1.3rem / 2.9rem 1fr; }
  .tiles div { flex-basis: 8.6rem; padding: 0.7rem 0.85rem; }
  .tiles b { font-size: 1.35rem; }
  .stacked thead { display: none; }
  .stacked tr { display: grid; grid-template-columns: repeat(var(--columns, 2), minmax(0, 1fr)); gap: 0.1rem 0.9rem;
    padding: 0.55rem 0; border-bottom: 1px solid var(--line); }
  .stacked tr:last-child { border-bottom: 0; }
  .stacked td, .stacked th { border: 0; padding: 0; }
  .backends td:not(:nth-child(2)):not(:last-child) { white-space: normal; }
  .stacked .wide { grid-column: 1 / -1; }
  .stacked td[data-label]::before { content: attr(data-label); display: block; color: var(--dim);
    font-size: 0.75rem; font-weight: 500; }
  .stacked tr.off { padding-left: 0.7rem; padding-right: 0.7rem; box-shadow: inset 0.2rem 0 var(--bad); }
  .stacked tr.off td:first-child { box-shadow: none; }
  .backends td:first-child { padding-left: 0; }
}
@media print {
  body { max-width: none; padding: 0; }
  section { break-inside: avoid; }
}
"""

KINDS = (
    "productive",
    "startup",
    "checkpoint_load",
    "compile",
    "jit",
    "data",
    "checkpoint_save",
    "evaluation",
    "profile",
    "idle",
    "recovery",
    "lost_steps",
    "down",
)
"""The classes of time that have a colour of their own."""


def style() -> str:
    """The whole style sheet."""
    colours = "\n".join(
        f"i.{kind} {{ background: var(--{kind}); }} rect.{kind} {{ fill: var(--{kind}); }}" for kind in KINDS
    )
    return STYLE + colours
