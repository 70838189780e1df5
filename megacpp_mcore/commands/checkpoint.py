"""``megacpp-mcore checkpoint schedule``: a checkpoint rewritten for another DSA schedule; imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` to the command line."""
    parser = subparsers.add_parser("checkpoint", help="rewrite a checkpoint for another DSA schedule")
    actions = parser.add_subparsers(dest="checkpoint_action", required=True, metavar="ACTION")
    words = "write OLD for another DSA schedule to NEW: F layers become S, or S layers F; OLD stays as it is"
    schedule = actions.add_parser("schedule", help=words, description=words)
    old = "the folder of --save, for its latest checkpoint, or one iter_… in it"
    schedule.add_argument("old", metavar="OLD", help=old)
    schedule.add_argument("new", metavar="NEW", help="a folder that does not exist yet, for --load")
    schedule.add_argument("--model", required=True, help="a preset, or the model of the file that MEGACPP_CONFIG names")
    schedule.add_argument("--schedule", required=True, help="one of - F S for each A layer, tiled: -FSFF")


def run(args: argparse.Namespace) -> int:
    """Carry out ``checkpoint``; returns the exit status."""
    from megacpp_mcore.checkpoints.schedule import reschedule
    from megacpp_mcore.commands.recipe import chosen_model

    done = reschedule(Path(args.old), Path(args.new), chosen_model(args.model)[0], args.schedule)
    shared = ", ".join(map(str, done.became_shared)) or "none"
    full = ", ".join(f"{layer} (as {source})" for layer, source in done.became_full.items()) or "none"
    print(f"{done.folder}: layers that became Shared: {shared}; that became Full: {full}")
    print(f"its definition (MEGACPP_CONFIG) needs, under overrides: dsa: {{schedule: '{args.schedule}'}}")
    return 0
