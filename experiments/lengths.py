"""Plot tokens per second by row length, and each family's cost per token, from rows of ``experiments/long.yaml``.

    python -m experiments.lengths experiments/results/long_h200.csv docs/long.svg

An arm's name has its GPUs (none: one) and its length: ``two 64k context 2``. A run that was not profiled has no bar.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.curves import figure_of

GPUS = {"": 1, "two": 2, "four": 4}
ARM = re.compile(rf"({'|'.join(GPUS)}) ?(\d+)k ?(.*)")
LEAST = 0.01
"""Share of a step below which a family has no color of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("plot", type=Path, help="an .svg to write")
    args = parser.parse_args(argv)
    with args.table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["tokens_per_s"]]
    if not rows:
        parser.error(f"{args.table} has no row with a speed; expected rows of experiments/long.yaml")
    try:
        rows.sort(key=lambda row: (read_arm(row["arm"])[1], row["arm"]))
    except ValueError as error:
        parser.error(f"{args.table}: {error}")
    draw(rows, args.plot)
    return 0


def read_arm(arm: str) -> tuple[int, int, str]:
    """Return an arm's GPUs, the tokens of a row in thousands (of 1024), and the rest of its name.

    Raises:
        ValueError: the name has no length.
    """
    match = ARM.fullmatch(arm)
    if match is None:
        raise ValueError(f"the arm {arm!r} has no length; expected names such as 32k or 'two 64k context 2'")
    return GPUS[match[1]], int(match[2]), match[3]


def microseconds(row: Mapping[str, str]) -> dict[str, float]:
    """Return each family's GPU-microseconds per token, the smallest as ``other``; empty without a profile."""
    cells = dict(cell.split(":") for cell in row["probe"].split())
    spent = {
        name.removesuffix("_ms"): float(ms)
        for name, ms in cells.items()
        if name.endswith("_ms") and not name.endswith("_exposed_ms")
    }
    tokens, total = float(row["tokens_per_s"]) * float(row["step_ms"]) / 1e3, sum(spent.values())
    costs: dict[str, float] = defaultdict(float)
    for name, ms in sorted(spent.items(), key=lambda item: -item[1]):
        costs[name if ms >= LEAST * total else "other"] += ms * 1e3 * read_arm(row["arm"])[0] / tokens
    return dict(costs)


def draw(rows: Sequence[Mapping[str, str]], plot: Path) -> None:
    """Draw ``rows``, sorted by length."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        gpus, length, rest = read_arm(row["arm"])
        line = f"{gpus} GPU{'s' if gpus > 1 else ''}{rest and ', ' + rest}"
        lines[line].append((length, float(row["tokens_per_s"]) / gpus))
    lengths = sorted({read_arm(row["arm"])[1] for row in rows})
    with figure_of(2, plot, salt="long") as (left, right):
        for line, points in lines.items():
            left.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.4, label=line)
        left.set_xscale("log", base=2)
        left.set_xticks(lengths, labels=lengths)
        left.set_ylim(bottom=0)
        left.set_xlabel("tokens in a row, thousands")
        left.set_ylabel("tokens a second, a GPU")
        left.legend(frameon=False)
        costs = {row["arm"]: cost for row in rows if (cost := microseconds(row))}
        families = sorted({name for cost in costs.values() for name in cost}, key=lambda name: (name == "other", name))
        ends = [0.0] * len(costs)
        for name in families:
            parts = [cost.get(name, 0.0) for cost in costs.values()]
            right.barh(list(costs), parts, left=ends, label=name)
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        right.invert_yaxis()
        right.set_xlabel("GPU-microseconds a token")
        right.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


if __name__ == "__main__":
    raise SystemExit(main())
