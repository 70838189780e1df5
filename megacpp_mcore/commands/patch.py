"""``megacpp-mcore patch list|status|apply|revert|verify|export``: the patch set, and patched checkouts; imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import PatchError

if TYPE_CHECKING:
    from megacpp_mcore.patches.machinery.checkout import Checkout, Outcome
    from megacpp_mcore.patches.machinery.record import Patch

_ACTIONS = {
    "list": "name every patch and what it fixes",
    "status": "check every patch against a checkout, or the installed Megatron; changes nothing",
    "apply": "add patches to a checkout's hook line",
    "revert": "take patches (by default all) out of a checkout's hook line",
    "verify": "fail unless the hook line is right and its patches fit; for the installed Megatron, unless the patches fit",
    "export": "print the change of `apply` as a patch for `git apply`",
}
_WITHOUT_CHECKOUT = ("list", "status", "verify")


def add_parser(subparsers: Any) -> None:
    """Add ``patch`` to the command line."""
    parser = subparsers.add_parser("patch", help="the patches: list, check, and put them into a checkout")
    actions = parser.add_subparsers(dest="patch_action", required=True, metavar="ACTION")
    for name, words in _ACTIONS.items():
        action = actions.add_parser(name, help=words, description=words)
        action.add_argument("names", nargs="*", metavar="NAME", help="patches (see `patch list`)")
        if name in ("list", "status"):
            action.add_argument("--json", action="store_true", help="print JSON")
        if name == "list":
            action.add_argument("--markdown", action="store_true", help="print the page docs/patches.md")
        if name != "list":
            action.add_argument("--checkout", metavar="DIR", help="the root of a Megatron-LM checkout")
        if name == "apply":
            action.add_argument(
                "--allow-dirty", action="store_true", help="go on although files below megatron/ were modified"
            )
        if name == "export":
            action.add_argument("--output", metavar="FILE", help="write to FILE instead of standard output")


def run(args: argparse.Namespace) -> int:
    """Carry out ``patch``; returns the exit status."""
    if args.patch_action == "list":
        _list(args)
        return 0
    checkout = _checkout(args)
    names: Sequence[str] | None = args.names or None
    if args.patch_action == "status":
        _status(checkout, names, args.json)
    elif args.patch_action == "apply":
        _tell(checkout, checkout.apply(args.names, allow_dirty=args.allow_dirty), "applied", "applied already")
    elif args.patch_action == "revert":
        _tell(checkout, checkout.revert(names), "reverted", "not applied")
    elif args.patch_action == "verify":
        _verify(checkout, names, installed=args.checkout is None)
    else:
        _export(checkout.export(names), args.output)
    return 0


def _checkout(args: argparse.Namespace) -> Checkout:
    from megacpp_mcore.patches.machinery.checkout import Checkout

    if args.checkout is not None:
        return Checkout(args.checkout)
    if args.patch_action in _WITHOUT_CHECKOUT:
        return Checkout.installed()
    aside = " (MEGATRON_LM is not taken for this: name the folder)" if os.environ.get("MEGATRON_LM") else ""
    raise PatchError(
        f"`patch {args.patch_action}` is about a checkout, and none was named; give --checkout DIR{aside}. "
        "To patch a process and no file: `megacpp-mcore launch --patch NAME … -- …`, or in Python "
        "megacpp_mcore.patches.apply([...])"
    )


def _list(args: argparse.Namespace) -> None:
    from megacpp_mcore.patches.machinery.registry import default

    registry = default()
    patches = registry.select(args.names) if args.names else registry.patches
    if args.json:
        print(json.dumps([patch.describe() for patch in patches], indent=2))
    elif args.markdown:
        print(_page(patches), end="")
    else:
        print("\n".join(f"{patch.name}: {patch.fixes}" for patch in patches) or "there are no patches")


def _page(patches: Sequence[Patch]) -> str:
    """``docs/patches.md``: a table of all, then what each does not touch and when it goes."""
    lines = [
        "# The patches",
        "",
        "Written by `megacpp-mcore patch list --markdown` from the records in `patches/`; do not edit it by hand.",
        "",
        "| patch | fixes | megatron-core | cost | gain, as measured |",
        "|---|---|---|---|---|",
    ]
    for patch in patches:
        cells = (f"`{patch.name}`", patch.fixes, patch.megatron_versions, patch.cost, patch.gain)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for patch in patches:
        targets = ", ".join(f"`{edit.target}`" for edit in patch.edits)
        lines += ["", f"## {patch.name}", "", f"- Source: {patch.source}", f"- Targets: {targets}"]
        lines += [
            f"- Why there: {patch.seam}",
            f"- Leaves alone: {patch.leaves_alone}",
            f"- Goes when: {patch.retire_when}",
        ]
    return "\n".join(lines) + "\n"


def _status(checkout: Checkout, names: Sequence[str] | None, as_json: bool) -> None:
    rows = checkout.status(names)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"megatron-core {checkout.version} in {checkout.root}")
    for row in rows:
        print(f"{row['name']}: {row['state']}{': ' if row['reason'] else ''}{row['reason']}")
        for target in row["targets"]:
            print(target["diff"] or f"  no diff of {target['target']}: {target['no_diff']}")


def _tell(checkout: Checkout, outcome: Outcome, done: str, left: str) -> None:
    for notice in outcome.notices:
        print(f"note: {notice}", file=sys.stderr)
    for names, words in ((outcome.changed, done), (outcome.unchanged, left)):
        if names:
            print(f"{', '.join(names)}: {words}")
    if not outcome.changed:
        print("nothing was changed")
    print(
        f"{checkout.root} (megatron-core {checkout.version}) is hooked for: {', '.join(outcome.hooked) or 'no patch'}"
    )


def _verify(checkout: Checkout, names: Sequence[str] | None, *, installed: bool) -> None:
    if installed and checkout.content().hook is None:
        if problems := checkout.unfit(names):
            from megacpp_mcore.patches.machinery.registry import listing

            raise PatchError(listing(f"not every patch fits megatron-core {checkout.version}", problems))
        print(f"the patches fit megatron-core {checkout.version} in {checkout.root}; none is hooked into its files")
    else:
        print(f"{checkout.root} is hooked as it should be, for: {', '.join(checkout.verify(names))}")


def _export(patch: bytes, output: str | None) -> None:
    if output is None:
        sys.stdout.buffer.write(patch)
        return
    try:
        Path(output).write_bytes(patch)
    except OSError as error:
        raise PatchError(f"the patch cannot be written to {output}: {error}") from error
