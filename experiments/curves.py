"""Plot the losses of an experiment's arms by tokens and by seconds, from the table of ``experiments.train --curves``.

    cd experiments/results
    python -m experiments.curves twins_curves_h200.csv twins.svg --rows twins_h200.csv

A line is the mean of an arm's seeds; the area around it spans their extremes. With ``--rows``, the table of the runs, seconds
are those of the arm's fastest run, at its median step: where runs shared a card, their own clocks include each other's work.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

AXES = (("tokens", "tokens, millions", 1e6), ("seconds", "seconds", 1.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("plot", type=Path, help="an .svg to write")
    parser.add_argument("--rows", type=Path, help="the table of the runs, for the seconds of a step")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--from-step", type=int, default=50, help="leave out earlier points")
    args = parser.parse_args(argv)
    points: dict[str, dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    with args.table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (not args.arms or row["arm"] in args.arms) and int(row["step"]) >= args.from_step:
                points[row["arm"]][int(row["step"])].append(row)
    if not points:
        parser.error(f"{args.table} has no point from step {args.from_step} on; expected rows of experiments.train --curves")
    if args.rows:
        with args.rows.open(newline="", encoding="utf-8") as file:
            runs = list(csv.DictReader(file))
        for arm, by_step in points.items():
            times = [float(row["step_ms"]) for row in runs if row["arm"] == arm and row["step_ms"]]
            if not times:
                parser.error(f"{args.rows} has no step_ms of {arm}; expected the table of the same runs")
            for step, rows in by_step.items():
                for row in rows:
                    row["seconds"] = str(step * min(times) / 1e3)
    draw(points, args.plot)
    return 0


@contextlib.contextmanager
def figure_of(panels: int, plot: Path, *, salt: str, **shared: Any) -> Iterator[Sequence[Any]]:
    """Yield axes side by side to draw on, then write them to ``plot``, with the same bytes for the same drawing."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        subplots = figure.subplots(1, panels, **shared)
        for axes in subplots:
            axes.grid(linewidth=0.4, alpha=0.5)
            axes.spines[["top", "right"]].set_visible(False)
        yield subplots
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    plot.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", svg.getvalue()), encoding="utf-8")  # hundredths of a point suffice


def draw(points: dict[str, dict[int, list[dict[str, str]]]], plot: Path) -> None:
    """Draw ``points``, by arm and step the rows of all seeds."""
    with figure_of(len(AXES), plot, salt="twins", sharey=True) as panels:
        for axes, (column, label, per) in zip(panels, AXES, strict=True):
            for arm, by_step in points.items():
                at = [statistics.fmean(float(row[column]) for row in rows) / per for rows in by_step.values()]
                losses = [[float(row["loss"]) for row in rows] for rows in by_step.values()]
                (line,) = axes.plot(at, [statistics.fmean(seeds) for seeds in losses], linewidth=1.4, label=arm)
                lowest, highest = ([end(seeds) for seeds in losses] for end in (min, max))
                axes.fill_between(at, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
            axes.set_xlabel(label)
        panels[0].set_ylabel("training loss, nats a token")
        panels[-1].legend(frameon=False)


if __name__ == "__main__":
    raise SystemExit(main())
