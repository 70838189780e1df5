"""``megacpp-mcore sample``: text from a checkpoint; imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from megacpp_mcore.launch import launcher, sampling
from megacpp_mcore.launch import plan as launch_plan


def add_parser(subparsers: Any) -> None:
    """Add ``sample`` to the command line."""
    parser = subparsers.add_parser(
        "sample",
        help="text from a checkpoint",
        usage="megacpp-mcore sample [OPTIONS] --prompt TEXT -- MODEL-ARGUMENTS --load CHECKPOINTS",
    )
    parser.add_argument("--device", choices=launch_plan.DEVICES, default="auto", help="as of `launch`")
    sampling.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out ``sample``; returns the exit status."""
    return launcher.launch_script(sampling.__file__, args, "prompt", "tokens", "temperature")
