"""One self-contained HTML page about one run, or several side by side; needs no network, no script and no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.page import parts as page_parts
from megacpp_mcore.observe.page import side_by_side as page_receipts
from megacpp_mcore.observe.page.charts import Level
from megacpp_mcore.observe.page.data import RunData, read
from megacpp_mcore.observe.page.style import style

MOST_RUNS = 6
"""Runs of one page: as many as there are colours, and columns that can be read."""


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
    found = _named([read(run) for run in runs], runs)
    if len(found) == 1:
        (run,) = found
        title = addition.title or run.name
        return _document(title, _head(run, title, addition) + _body(run, addition) + _receipt(run))
    title = "Runs: " + ", ".join(run.name for run in found)
    parts = [f'<header><h1>{escape(title)}</h1><p class="dim">{len(found)} runs side by side</p></header>']
    parts += [_alerts_of(run) for run in found]
    parts += [page_receipts.overlay(found)]
    parts += [page_receipts.comparison(found[0], run) for run in found[1:]]
    parts += [
        page_parts.section("receipts", "Receipts side by side", page_receipts.table(found), "What differs is marked ≠.")
    ]
    for run in found:
        parts.append(f"<article><h2>{escape(run.name)} {page_parts.pill(run)}</h2>{page_parts.about(run)}")
        parts.append(_body(run, Addition()) + page_receipts.unjudged(run) + "</article>")
    return _document(title, "".join(parts))


def _named(found: Sequence[RunData], paths: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    """The runs, each with a name of its own: where two have the same, the paths as they were given."""
    names = [run.name for run in found]
    if len(set(names)) == len(names):
        return list(found)
    words = [os.fspath(path) for path in paths]
    words = words if len(set(words)) == len(words) else [f"{word} ({number})" for number, word in enumerate(words, 1)]
    return [_renamed(run, word) for run, word in zip(found, words, strict=True)]


def _renamed(run: RunData, name: str) -> RunData:
    return RunData(**{**vars(run), "name": name})


def _document(title: str, body: str) -> str:
    """A page that may load nothing: what it shows is in it."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style()}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _head(run: RunData, title: str, addition: Addition) -> str:
    lead = f"<p>{escape(addition.lead)}</p>" if addition.lead else ""
    return f"<header><h1>{escape(title)} {page_parts.pill(run)}</h1>{page_parts.about(run)}{lead}</header>"


def _alerts_of(run: RunData) -> str:
    """The alerts of one run of several, with its name."""
    found = page_parts.alerts(run)
    return found.replace("<h3>", f"<h3>{escape(run.name)}: ", 1) if found else ""


def _body(run: RunData, addition: Addition) -> str:
    """All parts about one run but its receipt."""
    loss = page_parts.loss(run, addition.levels)
    if addition.loss_note:
        loss = loss.removesuffix("</section>") + f'<p class="dim">{escape(addition.loss_note)}</p></section>'
    parts = [
        page_parts.alerts(run),
        page_parts.tiles(run, addition.figures),
        f'<div class="pair">{loss}{page_parts.throughput(run)}</div>',
        f'<div class="pair">{page_parts.goodput_bars(run)}<div class="column">{page_parts.shares(run)}'
        f"{page_parts.memory(run)}</div></div>",
        page_parts.backends(run),
        page_parts.multiples(run),
        *(_table(*each) for each in addition.tables),
    ]
    return "".join(parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of words and numbers: all columns but the first are numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        first, *others = (escape(cell) for cell in cells)
        return f"<tr><{tag}>{first}</{tag}>{''.join(f'<{tag} class="number">{cell}</{tag}>' for cell in others)}</tr>"

    body = "".join(line("td", row) for row in rows)
    content = f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
    return page_parts.section("addition", title, content)


def _receipt(run: RunData) -> str:
    return (
        f'<details data-part="receipts"><summary>Receipt</summary>{page_receipts.table([run])}</details>'
        f"{page_receipts.unjudged(run)}"
    )
