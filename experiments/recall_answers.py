"""The script with which :mod:`experiments.recall` queries a checkpoint for the answers of drawn rows; for the launcher.

Shape legend: L tokens of a row, V vocabulary, padded.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

from experiments.recall import counted, row


def _add_options(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--recall-rows", type=int, required=True)
    parser.add_argument("--recall-seed", type=int, required=True)
    parser.add_argument("--recall-output", type=Path, required=True)
    return parser


def main() -> None:
    """Draw rows as the arguments say, and write how many answers are right."""
    import torch

    from megacpp_mcore.launch.heldout import load_model, parsed

    args = parsed(_add_options)
    model, items, is_right = load_model(args), [], []
    device = next(model.parameters()).device
    for number in range(args.recall_rows):
        tokens_L, row_items = row(args.seq_length, args.vocab_size, args.recall_seed, number)
        tokens_1L = torch.from_numpy(tokens_L.astype("int64"))[None].to(device)
        positions_1L = torch.arange(args.seq_length, device=device)[None]
        with torch.no_grad():
            logits_1LV = model(tokens_1L, positions_1L, None, runtime_gather_output=True)
        next_L = logits_1LV[0].argmax(-1).cpu().numpy()
        items += row_items
        for item in row_items:
            answer = slice(item.query, item.query + item.answer)
            is_right.append(bool((next_L[answer] == tokens_L[1:][answer]).all()))
    answers = {"step": args.iteration, "counts": counted(items, is_right)}
    args.recall_output.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
