"""``megacpp-mcore report show|compare|goodput|profile|html|fields``: prints and compares recorded runs; imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events, goodput, receipts
from megacpp_mcore.observe.profile import table
from megacpp_mcore.observe.receipts import fields
from megacpp_mcore.observe.receipts.assemble import RECEIPT
from megacpp_mcore.observe.receipts.claims import KEYS, NOISE, NOISE_IN_GRAPHS, compare
from megacpp_mcore.observe.receipts.fields import DISQUALIFIERS, RUNNING, flatten, in_words, labelled, why_unknown
from megacpp_mcore.util import flags, text

REFUSED = 1
"""The exit status of a comparison that allows no claim."""

SILENT_S = 60.0
"""Seconds without a heartbeat after which a process was probably killed, if several were due meanwhile."""
BEATS = 5
"""Number of missing heartbeats required for that."""

_GENERATOR = '<meta name="generator" content="megacpp-mcore report html">'
"""Near the beginning of a page."""


def add_parser(subparsers: Any) -> None:
    """Add ``report`` to the command line."""
    parser = subparsers.add_parser("report", help="receipts of runs: show one, compare two, or where the time went")
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="the receipt of a run")
    show.add_argument("receipt", metavar="RUN", help="the folder of a run, or a receipt")
    claim = "what may be claimed about the speed of two runs; exit status 1 if nothing"
    comparing = actions.add_parser("compare", help=claim)
    comparing.add_argument("first", metavar="A", help="the baseline: the folder of a run, or a receipt")
    comparing.add_argument("second", metavar="B", help="the run to compare with it")
    for option, metavar, words in (
        ("--varies", "KEY", f"the one intended difference: {', '.join(KEYS)}"),
        ("--declare", "NAME", f"a disqualifier that both carry, to be stated in the claim: {', '.join(DISQUALIFIERS)}"),
    ):
        comparing.add_argument(option, action="append", default=[], metavar=metavar, help=words)
    usual = f"default: {100 * NOISE:.0f}, in CUDA graphs {100 * NOISE_IN_GRAPHS:.0f}"
    noise = f"run-to-run spread in %%, if measured ({usual})"
    comparing.add_argument("--noise", type=float, metavar="PERCENT", help=noise)
    where = actions.add_parser("goodput", help="how every rank spent its wall time")
    where.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    profile = actions.add_parser("profile", help="the tables of rank 0's profiles")
    profile.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    page = actions.add_parser("html", help="one self-contained page about a run")
    page.add_argument("run_or_receipt", metavar="RUN", help="the folder of a run, or a receipt")
    page.add_argument(
        "--output",
        type=partial(flags.output, replaced=_GENERATOR),
        metavar="FILE",
        default="report.html",
        help="where it is written (%(default)s); an earlier page is replaced",
    )
    actions.add_parser("fields", help="every field of a receipt: its kind and meaning, as a Markdown table")
    for action in (show, comparing, where):
        action.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Run ``report`` and return the exit status.

    Raises:
        DataError: there is no receipt, it is damaged, or a word is not known.
    """
    if args.action == "fields":
        print(fields.table())
    elif args.action == "profile":
        print("\n".join(table.pages(_resolve(args.run_folder, run_only=True))), end="")
    elif args.action == "html":
        from megacpp_mcore.commands import report_page

        events.replace(Path(args.output), report_page.html(_resolve(args.run_or_receipt)))
        print(f"page: {args.output}")
    else:
        return {"show": _show, "compare": _compare, "goodput": _goodput}[args.action](args)
    return 0


def _resolve(word: str, *, run_only: bool = False) -> Path:
    """Resolve a command-line path to a run's folder or, unless ``run_only``, a receipt."""
    place, expected = Path(word), "the folder of a run that was observed" + ("" if run_only else ", or a receipt")
    if not word:
        raise DataError(f"an empty path was given; expected {expected}")
    if not place.exists():
        raise DataError(f"{word} does not exist; expected {expected}")
    if place.is_file() and run_only:
        raise DataError(f"{word} is a file; expected {expected}, probably {place.parent}")
    if place.is_dir() and not (place / RECEIPT).exists() and not any(place.glob("start_*")):
        near = sorted({file.parents[1] for depth in ("*", "*/*") for file in place.glob(f"{depth}/start_*/rank_*.jsonl")})
        meant = f"; did you mean {' or '.join(map(str, near[:3]))}?" if near else ""
        raise DataError(f"{word} is not a recorded run; expected {expected}{meant}")
    return place


def _show(args: argparse.Namespace) -> int:
    place = _resolve(args.receipt)
    receipt = receipts.read(place)
    if args.json:
        print(text.dumps(receipt))
        return 0
    status, *others = describe(receipt)
    is_running = receipt["status"] == RUNNING and any(place.glob("start_*"))
    alive = [sign_of_life(place, time.time_ns())] if is_running else []
    print("\n".join([status, *alive, *others]))
    return 0


def _compare(args: argparse.Namespace) -> int:
    first, second = (receipts.read(_resolve(word)) for word in (args.first, args.second))
    noise = None if args.noise is None else args.noise / 100
    verdict = compare(first, second, args.varies, args.declare, noise=noise)
    print(json.dumps(dataclasses.asdict(verdict), indent=1, ensure_ascii=False) if args.json else verdict.describe())
    return 0 if verdict.claim is not None else REFUSED


def _goodput(args: argparse.Namespace) -> int:
    ranks: dict[int, goodput.Goodput] = {}
    folder = _resolve(args.run_folder, run_only=True)
    starts = events.read(folder, lambda rank, of: ranks.update({rank: goodput.of_rank(of)}))
    if args.json:
        print(json.dumps({rank: wall_time.record() for rank, wall_time in ranks.items()}, indent=1))
        return 0
    slowest, *_ = goodput.slowest_first(ranks)
    for rank, wall_time in ranks.items():
        record = wall_time.record()
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items() if seconds)
        mark = ", the slowest" if rank == slowest and len(ranks) > 1 else ""
        print(f"rank {rank}{mark}: {record['goodput']:.1%} of {record['wall_s']:.1f} s productive; {spent}")
    if overlap := events.overlap(starts):
        print(overlap)
    return 0


def sign_of_life(run: Path, now_ns: int) -> str:
    """Format the age of the last heartbeat, which tells a live run from a killed one: both have status ``running``."""
    label = f"{'last sign of life':18}"
    living = {p.rank: p for p in events.grouped(events.read(run, lambda *_: None))[-1] if p.how is None}
    if not living:
        return f"{label}none: no rank is still running"
    rank = min(living, key=lambda number: living[number].ended_ns)
    seconds, heartbeat_s = max(0, now_ns - living[rank].ended_ns) / 1e9, living[rank].heartbeat_s
    which = f", of rank {rank}, the longest silent of {len(living)}" if len(living) > 1 else ""
    words = f"{label}{_age(seconds)} ago{which}"
    if seconds <= max(SILENT_S, BEATS * heartbeat_s):
        return words
    return f"{words}; it was probably killed: a live process leaves one every {heartbeat_s:g} s (observability.heartbeat_s)"


def _age(seconds: float) -> str:
    """Format an age in the largest unit of which there are at least two; another host's clock may be ahead of this one's."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def describe(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yield the main figures of a receipt as lines for people, its disqualifiers, and the unknown values."""
    values = flatten(receipt)
    for label, field in labelled(values, shown=True):
        text = in_words(values, field)
        why = why_unknown(field.path, values["unknown"])
        yield f"{label:18}{text if text is not None else f'not known: {why}'}"
    yield from (f"{'note':18}{note}" for note in values["notes"])
    carried = [f"{'DISQUALIFIED':18}{entry['name']}: {entry['evidence']}" for entry in values["disqualifiers"]]
    yield from carried or [f"{'disqualified by':18}nothing"]
    yield from (f"{'not judged':18}{entry['name']}: {entry['reason']}" for entry in values["unjudged"])
    unknown: dict[str, list[str]] = {}
    for path, reason in values["unknown"].items():
        unknown.setdefault(reason, []).append(path)
    yield from (f"{'not known':18}{', '.join(paths)}: {reason}" for reason, paths in unknown.items())
