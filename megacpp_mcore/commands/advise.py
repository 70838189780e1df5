"""``megacpp-mcore advise index-cache``: which DSA layers of a trained model may share indices; imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from megacpp_mcore.launch import launcher, schedule_search
from megacpp_mcore.launch import plan as launch_plan


def add_parser(subparsers: Any) -> None:
    """Add ``advise`` to the command line."""
    parser = subparsers.add_parser("advise", help="what a trained model says about its own schedule")
    actions = parser.add_subparsers(dest="advise_action", required=True, metavar="ACTION")
    words = "search for the DSA schedule with the fewest indexers whose held-out loss is that of the trained one"
    action = actions.add_parser(
        "index-cache",
        help=words,
        description=words + "; `checkpoint schedule` applies it",
        usage="megacpp-mcore advise index-cache [OPTIONS] --heldout PREFIX -- MODEL-ARGUMENTS --load CHECKPOINTS",
    )
    action.add_argument("--device", choices=launch_plan.DEVICES, default="auto", help="as of `launch`")
    schedule_search.add_options(action)


def run(args: argparse.Namespace) -> int:
    """Carry out ``advise``; returns the exit status."""
    return launcher.launch_script(schedule_search.__file__, args, "heldout", "tokens", "batch", "tolerance")
