"""``megacpp-mcore score``: bits per byte and perplexity of a checkpoint; imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from megacpp_mcore.launch import launcher, scoring
from megacpp_mcore.launch import plan as launch_plan


def add_parser(subparsers: Any) -> None:
    """Add ``score`` to the command line."""
    parser = subparsers.add_parser(
        "score",
        help="bits per byte and perplexity of a checkpoint",
        usage="megacpp-mcore score [OPTIONS] --heldout PREFIX -- MODEL-ARGUMENTS --load CHECKPOINTS",
    )
    parser.add_argument("--device", choices=launch_plan.DEVICES, default="auto", help="as of `launch`")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to start (default: 1)")
    scoring.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out ``score``; returns the exit status."""
    return launcher.launch_script(scoring.__file__, args, "heldout", "tokens", "batch", "output")
