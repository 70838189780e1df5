"""Scores a checkpoint on held-out text: bits per byte, and perplexity per token.

:mod:`megacpp_mcore.launch.heldout` defines how the text is split into windows. Ends of documents are predicted as well; their
nats are counted with the bytes (see :mod:`megacpp_mcore.data.score`). Model class, checkpoint format and loss are stock
Megatron's; replicas, of any tensor and expert parallelism, share the windows. A script for the launcher, which
``megacpp-mcore score`` starts.
"""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from megacpp_mcore.observe import events
from megacpp_mcore.util import console, flags


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to those of a parser, Megatron's or the command's."""
    add = parser.add_argument_group("score").add_argument
    add("--heldout", required=True, metavar="PREFIX", help="dataset of the model's tokenizer to score on")
    add("--tokens", type=flags.positive, metavar="N", help="its first N tokens only (default: all)")
    add("--batch", type=flags.positive, default=8, metavar="W", help="windows at a time, of a replica (default: 8)")
    add("--output", type=flags.output, metavar="FILE", help="JSON file for the result")
    return parser


def main() -> None:
    """Score with the options in ``sys.argv``."""
    import torch
    from megatron.core import parallel_state

    from megacpp_mcore.data.score import byte_counts, entropy  # imports numpy
    from megacpp_mcore.launch.heldout import cut_windows, load_model, parsed, read_heldout, score_windows, tokenizer_of

    args = parsed(add_options)
    tokenizer = tokenizer_of(args)
    tokens_N, manifest = read_heldout(args.heldout, args.tokens, tokenizer)
    windows = cut_windows(tokens_N, args.seq_length)
    model = load_model(args, in_replicas=True)
    began, is_first = time.monotonic(), torch.distributed.get_rank() == 0
    group = parallel_state.get_data_parallel_group()
    replica = {"replica": group.rank(), "replicas": group.size()}
    reached = score_windows(model, windows, args.batch, progress=is_first, **replica)
    counted = torch.tensor([reached.nats, reached.bytes], dtype=torch.float64, device=next(model.parameters()).device)
    torch.distributed.all_reduce(counted, group=group)
    reached.nats, reached.bytes = float(counted[0]), int(counted[1])
    if not is_first:
        return
    predicted: Any = windows.labels_WS[windows.mask_WS]
    if tokenizer.kind != "byte":
        whole = manifest.text_bytes if len(tokens_N) == manifest.tokens else None
        known = tokenizer.bytes_of(tokens_N.tolist()) if whole is None else whole
        reached.bytes = known - tokenizer.bytes_of(tokens_N[:1].tolist())
    unigram = entropy(byte_counts(predicted)) if tokenizer.kind == "byte" else None
    score = {
        "bits_per_byte": reached.value,
        "perplexity": math.exp(reached.nats / predicted.size),  # comparable only between models of one tokenizer
        "unigram_bits_per_byte": unigram,  # the entropy of the same bytes without context
        "bytes": reached.bytes,
        "tokens": predicted.size,
        "step": args.iteration,
        "seconds": time.monotonic() - began,
    }
    of_unigram = "" if unigram is None else f" (unigram {unigram:.6f})"
    console.say(
        f"held-out bits per byte {reached.value:.6f}{of_unigram}; perplexity {score['perplexity']:.6f} per token; "
        f"step {args.iteration}, {predicted.size} tokens, {reached.bytes} bytes"
    )
    if args.output is not None:
        events.replace(Path(args.output), json.dumps(score, indent=1) + "\n")


if __name__ == "__main__":
    main()
