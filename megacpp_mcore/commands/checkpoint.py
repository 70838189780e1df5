"""``megacpp-mcore checkpoint convert OLD NEW``: a checkpoint of 0.1.0 in the layout of this version; imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` to the command line."""
    parser = subparsers.add_parser("checkpoint", help="bring a checkpoint of megacpp-mcore 0.1.0 into today's layout")
    actions = parser.add_subparsers(dest="checkpoint_action", required=True, metavar="ACTION")
    words = "write OLD, parameters and optimizer state, in today's layout to NEW; OLD stays as it is"
    convert = actions.add_parser("convert", help=words, description=words)
    convert.add_argument(
        "old", metavar="OLD", help="the folder of --save, for its latest checkpoint, or one iter_… in it"
    )
    convert.add_argument("new", metavar="NEW", help="a folder that is not there yet, for --load")


def run(args: argparse.Namespace) -> int:
    """Carry out ``checkpoint``; returns the exit status."""
    from megacpp_mcore.checkpoints import convert as checkpoint_convert

    done = checkpoint_convert.convert(Path(args.old), Path(args.new))
    print(f"{done.folder}: {done.layers} M and R layers, {done.tensors} tensors changed")
    print("its definition (MEGACPP_CONFIG) needs, under overrides: mamba3: {out_norm: false}")
    return 0
