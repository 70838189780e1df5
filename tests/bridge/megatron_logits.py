"""Adds the logits of Megatron's model from ``--load`` to the dict of tokens in ``--tokens FILE.pt``."""

from __future__ import annotations

from argparse import ArgumentParser

import torch

from megacpp_mcore.launch.heldout import load_model, parsed


def main() -> None:
    def more(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--tokens", required=True)
        return parser

    args = parsed(more)
    model, saved = load_model(args), torch.load(args.tokens)
    tokens = saved["tokens"].to(next(model.parameters()).device)
    positions, ahead = torch.arange(tokens.shape[1], device=tokens.device)[None], []
    model.mtp.register_forward_hook(lambda *call: ahead.append(call[-1]))
    with torch.no_grad():
        saved["logits"] = model(tokens, positions, None).cpu()
        model(tokens, positions, None, labels=tokens.roll(-1, 1))
        predicted = ahead[-1].chunk(2, dim=0)[1]
        saved["ahead"] = model.output_layer(predicted, weight=None)[0].transpose(0, 1).cpu()
    torch.save(saved, args.tokens)


if __name__ == "__main__":
    main()
