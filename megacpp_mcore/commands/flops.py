"""The options and the output of ``megacpp-mcore recipe flops NAME``; no torch."""

from __future__ import annotations

import argparse
import dataclasses
import json

from megacpp_mcore.model import Model
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops import report as flops_report
from megacpp_mcore.model.flops.recompute import MODULES, Recomputation, recomputed
from megacpp_mcore.model.training import Recompute

_FAMILIES = tuple(each.name for each in dataclasses.fields(Recompute))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``recipe flops``; recompute is spelled as in Megatron and in our file."""
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence (default: the model's)")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"), help="as in Megatron")
    parser.add_argument("--recompute-method", choices=("uniform", "block"), help="as in Megatron")
    parser.add_argument("--recompute-num-layers", type=int, metavar="N", help="as in Megatron, of one pipeline stage")
    parser.add_argument("--recompute-modules", nargs="+", choices=MODULES, metavar="NAME", help="as in Megatron")
    parser.add_argument(
        "--recompute", nargs="+", choices=_FAMILIES, default=[], metavar="FAMILY", help=f"ours: {', '.join(_FAMILIES)}"
    )
    parser.add_argument("--json", action="store_true", help="the counts of one sequence as JSON, as receipts keep them")


def printed(model: Model, args: argparse.Namespace) -> str:
    """What the command prints about ``model``.

    Raises:
        ModelError: a length below 1, or recompute settings that no run can have.
    """
    how = Recomputation.of_run(args, Recompute(**dict.fromkeys(args.recompute, True)))
    if not args.json:
        return flops_report.page(model, how, seq_length=args.seq_length)
    step = flops.step(model, seq_length=args.seq_length)
    return json.dumps(flops_report.record(step, recomputed(model, step, how)), indent=2)
