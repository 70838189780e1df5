"""``megacpp-mcore compat``: compares a Megatron checkout with what this package builds on, without importing it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacpp_mcore import versions
from megacpp_mcore.commands import trial
from megacpp_mcore.model.training import GPT, HYBRID

STEPS = 3
TIMEOUT = 600
"""Seconds for the steps of one model class."""
TOLERANCE = 1e-3
"""Relative: rounding differs between CPUs by less; a different model is further off."""
FIGURES = {
    "lm loss": (6.097632, 6.098476, 5.491178),
    "mtp_1 loss": (6.080987, 6.092325, 5.829654),
    "indexer loss": (1.498690e-4, 1.581253e-4, 1.432061e-4),
    "grad norm": (1.400721, 1.383224, 1.304774),
}
"""Figures of nam56r_tiny on Megatron's mock data, step by step, with 0.19.2 and either model class."""


def add_parser(subparsers: Any) -> None:
    """Add ``compat`` to the command line."""
    words = "compare a Megatron checkout with the sources that patches and layers were written for; changes nothing"
    statuses = "Exit status: 0 fits, 1 fingerprints to add, 2 code to review (or a wrong request), 3 broken."
    parser = subparsers.add_parser("compat", help=words, description=words, epilog=statuses)
    add = parser.add_argument
    add("--checkout", metavar="DIR", required=True, help="the root of a Megatron-LM checkout")
    tag = f"the tag to compare with (default: {versions.CHECKOUT_TAG}, or the installed Megatron)"
    add("--since", metavar="TAG", help=tag)
    training = f"also train {STEPS} steps of nam56r_tiny on the CPU, of both model classes"
    add("--run", action="store_true", dest="train", help=training)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--write", action="store_true", help="print fingerprints to paste into the patches' records")


def run(args: argparse.Namespace) -> int:
    """Print the comparison and return the exit status."""
    from megacpp_mcore.patches.machinery import drift
    from megacpp_mcore.patches.machinery.checkout import Checkout

    report = drift.examine(Checkout(args.checkout), args.since)
    report["runs"] = {}
    if args.train:
        report["runs"] = {model_class: _trained(Path(report["root"]), model_class) for model_class in (GPT, HYBRID)}
        if any(report["runs"].values()):
            report |= {"status": len(drift.VERDICTS) - 1, "verdict": drift.VERDICTS[-1]}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_fingerprints(report) if args.write else _text(report)))
    return report["status"]


def _trained(root: Path, model_class: str) -> list[str]:
    """Train with the Megatron in ``root``; returns which figures differ from those recorded, or how the run ended."""
    steps, problems = trial.train(STEPS, timeout_s=TIMEOUT, model_class=model_class, first_on_path=[str(root)])
    return problems or [
        f"{name} of step {number} is {figures.get(name)}, expected {expected}"
        for name, values in FIGURES.items()
        for number, (figures, expected) in enumerate(zip(steps, values, strict=True), 1)
        if not math.isclose(figures.get(name, math.nan), expected, rel_tol=TOLERANCE)
    ]


def _text(report: dict[str, Any]) -> Iterator[str]:
    yield f"megatron-core {report['megatron_core']} in {report['root']}"
    if report["head"]:
        yield f"HEAD is {report['head']}"
    yield f"compared with {', '.join(report['compared_with']) or 'nothing'}"
    yield from (f"note: {note}" for note in report["notes"])
    targets = [target for patch in report["patches"] for target in patch["targets"]]
    for patch in report["patches"]:
        yield f"{patch['name']}: {patch['verdict']}"
        for target in patch["targets"]:
            if target["state"] != "equal":
                yield f"  {target['target']}: {_change(target)}"
                yield from (f"    {commit}" for commit in target["commits"])
        merged = ((number, commit) for number, commit in patch["upstream_merged"].items() if commit)
        yield from (f"  {number} is merged, is the patch still needed? {commit}" for number, commit in merged)
    yield f"targets: {len(targets)}, equal {sum(target['state'] == 'equal' for target in targets)}"
    symbols = report["symbols"]
    changed = [row for row in symbols["changed"] if row["parameters"] or row["state"] == "gone"]
    bodies = sum(row["state"] == "code" for row in symbols["changed"] if row not in changed)
    yield f"imported by name: {symbols['known']}, with another body {bodies}"
    yield from (f"  {row['symbol']}: {_change(row)} ({', '.join(row['files'])})" for row in changed)
    for name in ("flags", "fields"):
        usage = report[name]
        yield f"{name} used: {usage['known']}, gone: {', '.join(usage['gone']) or 'none'}"
    for model_class, problems in report["runs"].items():
        yield f"{STEPS} steps of {model_class}: {'as recorded' if not problems else 'not as recorded'}"
        yield from (f"  {problem}" for problem in problems)
    yield f"verdict: {report['verdict']}"


def _change(row: dict[str, Any]) -> str:
    parameters = f", parameters {' '.join(row['parameters'])}" if row["parameters"] else ""
    return f"{row['state']}{parameters}"


def _fingerprints(report: dict[str, Any]) -> Iterator[str]:
    """Yield the second argument of ``Edit`` for every target with another source, and what to review first."""
    for patch in report["patches"]:
        for target in (target for target in patch["targets"] if target["state"] != "equal"):
            yield f"# {patch['name']}, {target['target']}: {_change(target)}"
            yield "\n".join(["(", *(f'    "{fingerprint}",' for fingerprint in target["fingerprints"]), "),"])
    yield f"# megatron-core {report['megatron_core']}: {report['verdict']}"
