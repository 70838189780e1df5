"""``megacpp-mcore sample|score|advise``: query a trained checkpoint, each by a script; imports no torch."""

from __future__ import annotations

import argparse
from functools import partial
from types import ModuleType
from typing import Any

from megacpp_mcore.launch import launcher, sampling, schedule_search, scoring
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.util import console


def add_parsers(subparsers: Any) -> None:
    """Add these commands to the command line."""
    text = "text from a checkpoint"
    _add(subparsers, "sample", sampling, "--prompt TEXT", help=text).set_defaults(run=_sample)
    words = "bits per byte and perplexity of a checkpoint"
    score = _add(subparsers, "score", scoring, "--heldout PREFIX", help=words)
    score.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to start (default: 1)")
    advise = subparsers.add_parser("advise", help="what a trained model says about its own schedule")
    actions = advise.add_subparsers(dest="advise_action", required=True, metavar="ACTION")
    words = "search for the DSA schedule with the fewest indexers whose held-out loss matches the trained one"
    applied = f"{words}; `checkpoint schedule` applies it"
    _add(actions, "index-cache", schedule_search, "--heldout PREFIX", help=words, description=applied)


def _sample(args: argparse.Namespace) -> int:
    """Run ``sample``, with the text alone on stdout."""
    with console.text_alone():
        return launcher.launch_script(sampling, args)


def _add(subparsers: Any, name: str, script: ModuleType, needs: str, **texts: str) -> Any:
    """Add a command that launches ``script`` with the script's own options."""
    usage = f"%(prog)s [OPTIONS] {needs} -- MODEL-ARGUMENTS --load CHECKPOINTS"
    parser: argparse.ArgumentParser = subparsers.add_parser(name, usage=usage, **texts)
    parser.add_argument("--device", choices=launch_plan.DEVICES, default="auto", help="as of `launch`")
    script.add_options(parser)
    parser.set_defaults(run=partial(launcher.launch_script, script))
    return parser
