"""Scores a checkpoint on held-out text, in bits per byte.

    megacpp-mcore launch -- examples/score_heldout.py --heldout PREFIX --score-output FILE --load CHECKPOINTS \
        MODEL-ARGUMENTS

megacpp_mcore.launch.heldout defines how the text is split. Ends of documents are predicted as well; their nats are counted
with the bytes (see megacpp_mcore.data.score). Model class, checkpoint format and loss are stock Megatron's.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path

from megacpp_mcore.data.score import byte_counts, entropy
from megacpp_mcore.launch.heldout import cut_windows, load_model, read_heldout, score_windows
from megacpp_mcore.util import console
from megacpp_mcore.util.files import replace


@dataclass(frozen=True)
class Score:
    """A model's score and the unigram entropy of the same bytes, both in bits per byte."""

    bits_per_byte: float
    unigram_bits_per_byte: float
    bytes: int
    tokens: int
    step: int
    seconds: float


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to Megatron's."""
    group = parser.add_argument_group("held-out score")
    group.add_argument("--heldout", required=True, metavar="PREFIX", help="byte dataset to score on")
    group.add_argument("--score-output", required=True, metavar="FILE", help="JSON file for the result")
    group.add_argument("--score-tokens", type=int, default=0, metavar="N", help="first N tokens only (default: all)")
    group.add_argument("--score-batch", type=int, default=32, metavar="W", help="windows at a time (default: 32)")
    return parser


def main() -> None:
    """Score according to ``sys.argv``."""
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(add_options, args_defaults={"no_load_optim": True, "no_load_rng": True})
    windows = cut_windows(read_heldout(args.heldout, args.score_tokens), args.seq_length)
    model = load_model(args)
    began = time.monotonic()
    reached = score_windows(model, windows, args.score_batch)
    predicted = windows.labels_WS[windows.mask_WS]
    score = Score(
        bits_per_byte=reached.value,
        unigram_bits_per_byte=entropy(byte_counts(predicted)),
        bytes=reached.bytes,
        tokens=predicted.size,
        step=args.iteration,
        seconds=time.monotonic() - began,
    )
    replace(Path(args.score_output), json.dumps(asdict(score), indent=1).encode() + b"\n")
    console.say(f"held-out bits per byte {score.bits_per_byte:.6f}; unigram {score.unigram_bits_per_byte:.6f}")


if __name__ == "__main__":
    main()
