"""Samples text from a checkpoint of a byte model, token by token.

    megacpp-mcore launch -- examples/sample.py --prompt TEXT --sample-tokens N --load CHECKPOINTS MODEL-ARGUMENTS

Every layer caches earlier tokens in Megatron's static inference context: attention its keys, M and R their states. Model class
and checkpoint format are stock Megatron's, checked with megatron-core 0.19.2; one process.

Shapes: B batch (1), S rows of one call, V vocabulary.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import torch

from megacpp_mcore.data.tokenizer import BYTE_EOD_ID
from megacpp_mcore.errors import DataError
from megacpp_mcore.launch.heldout import load_model
from megacpp_mcore.util import console


def generate(model: Any, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Up to ``count`` bytes after ``prompt``, until the model ends the document.

    Args:
        model: a GPTModel in evaluation mode.
        prompt: at least one byte.
        count: how many tokens at most.
        temperature: divides the logits; 0 selects the likeliest byte.
        seed: for sampling.

    Raises:
        DataError: the prompt is empty.
    """
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    if not prompt:
        raise DataError("the prompt is empty; expected at least one byte to continue from")
    device = next(model.parameters()).device
    context = StaticInferenceContext(1, len(prompt) + count)
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        first = context.sequence_len_offset
        positions_BS = torch.arange(first, first + tokens_BS.shape[1], device=device)[None]
        with torch.no_grad(), InferenceMode.active():
            logits_BSV = model(tokens_BS, positions_BS, None, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset += tokens_BS.shape[1]
        logits_V = logits_BSV[0, -1, : BYTE_EOD_ID + 1].float().cpu()
        if temperature:
            token = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
        else:
            token = int(logits_V.argmax())
        if token == BYTE_EOD_ID:
            return
        yield token
        tokens_BS = torch.tensor([[token]], device=device)


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to Megatron's."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    group.add_argument("--sample-tokens", type=int, default=200, metavar="N", help="bytes at most (default: 200)")
    group.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest byte (default: 0.8)")
    return parser


def main() -> None:
    """Sample according to ``sys.argv``; the text is printed last, on lines of its own."""
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(add_options, args_defaults={"no_load_optim": True, "no_load_rng": True})
    if args.tokenizer_type != "NullTokenizer" or args.null_tokenizer_eod_id != BYTE_EOD_ID:
        raise DataError(
            f"the model's tokens are those of --tokenizer-type {args.tokenizer_type} --tokenizer-model {args.tokenizer_model}; "
            "expected a byte model's (`data prepare` without --tokenizer), as this script prints bytes as text"
        )
    model = load_model(args)
    prompt = args.prompt.encode()
    sample = bytes(generate(model, prompt, args.sample_tokens, args.temperature, args.seed))
    console.say((prompt + sample).decode(errors="replace"))


if __name__ == "__main__":
    main()
