"""``megacpp-mcore compat``: compares a Megatron checkout with what this package builds on, without importing it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from megacpp_mcore import versions


def add_parser(subparsers: Any) -> None:
    """Add ``compat`` to the command line."""
    words = "compare a Megatron checkout with the sources that patches and layers were written for; changes nothing"
    statuses = "Exit status: 0 fits, 1 fingerprints to add, 2 code to review (or a wrong request), 3 broken."
    parser = subparsers.add_parser("compat", help=words, description=words, epilog=statuses)
    parser.add_argument("--checkout", metavar="DIR", required=True, help="the root of a Megatron-LM checkout")
    parser.add_argument(
        "--since",
        metavar="TAG",
        help=f"the tag to compare with (default: {versions.CHECKOUT_TAG}, or the installed Megatron)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--write", action="store_true", help="print fingerprints to paste into the patches' records")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; returns the exit status."""
    from megacpp_mcore.patches.machinery import compat
    from megacpp_mcore.patches.machinery.checkout import Checkout

    report = compat.examine(Checkout(args.checkout), args.since)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_fingerprints(report) if args.write else _text(report)))
    status: int = report["status"]
    return status


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
        found = report[name]
        yield f"{name} used: {found['known']}, gone: {', '.join(found['gone']) or 'none'}"
    yield f"verdict: {report['verdict']}"


def _change(row: dict[str, Any]) -> str:
    parameters = f", parameters {' '.join(row['parameters'])}" if row["parameters"] else ""
    return f"{row['state']}{parameters}"


def _fingerprints(report: dict[str, Any]) -> Iterator[str]:
    """Yield the second argument of ``Edit.of`` for every target with another source, and what to review first."""
    for patch in report["patches"]:
        for target in (target for target in patch["targets"] if target["state"] != "equal"):
            yield f"# {patch['name']}, {target['target']}: {_change(target)}"
            yield "\n".join(["(", *(f'    "{one}",' for one in target["fingerprints"]), "),"])
    yield f"# megatron-core {report['megatron_core']}: {report['verdict']}"
