"""Samples text from a checkpoint, token by token, and prints it as it comes.

Every layer caches earlier tokens in Megatron's static inference context: attention its keys, M and R their states. Model class
and checkpoint format are stock Megatron's, checked with megatron-core 0.19.2; one process. A script for the launcher, which
``megacpp-mcore sample`` starts.

Shapes: B batch (1), S rows of one call, V vocabulary.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.util import console, flags

TOKENS = 200
"""Tokens at most, unless told."""


def generate(
    model: Any, prompt: Sequence[int], count: int, *, temperature: float, seed: int, vocabulary: int, end: int
) -> Iterator[int]:
    """Yield up to ``count`` ids after those of ``prompt``, until the model ends the document.

    Args:
        model: a GPTModel or HybridModel in evaluation mode.
        temperature: divides the logits; 0 selects the likeliest id.
        vocabulary: number of logits that belong to ids; the rest pad the vocabulary.
        end: the id that ends a document.

    Raises:
        DataError: the prompt is empty.
    """
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    if not prompt:
        raise DataError("the prompt is empty; expected at least one token to continue from")
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
        logits_V = logits_BSV[0, -1, :vocabulary].float().cpu()
        if temperature:
            token = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
        else:
            token = int(logits_V.argmax())
        if token == end:
            return
        yield token
        tokens_BS = torch.tensor([[token]], device=device)


def most_tokens(args: Namespace, prompt: int) -> int:
    """Return how many tokens to add after ``prompt`` ones: :data:`TOKENS` at most by default, where positions have an end.

    Raises:
        DataError: there are fewer learned positions.
    """
    if args.position_embedding_type != "learned_absolute":
        return args.tokens or TOKENS
    positions = args.max_position_embeddings
    room = positions - prompt + 1  # the last token is not given to the model
    if room < 1:
        raise DataError(f"the prompt has {prompt} tokens, and the model has learned {positions} positions; give a shorter one")
    if (tokens := args.tokens or min(TOKENS, room)) > room:
        raise DataError(
            f"--tokens is {tokens}, after a prompt of {prompt}, and the model has learned {positions} positions; expected at "
            f"most {room}: give --tokens that, or a shorter prompt"
        )
    return tokens


def streamed(prompt: Sequence[int], ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of the prompt and its continuation in parts that never split a character."""
    known, shown = list(prompt), ""
    yield (shown := decode(known).rstrip("\ufffd"))
    for one in ids:
        known.append(one)
        text = decode(known)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield decode(known)[len(shown) :]


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to those of a parser, Megatron's or the command's."""
    add = parser.add_argument_group("sampling").add_argument
    add("--prompt", type=flags.utf8, default="def ", help="text to continue (default: 'def ')")
    add("--tokens", type=flags.positive, metavar="N", help=f"tokens at most (default: {TOKENS})")
    add("--temperature", type=flags.not_negative, default=0.8, help="0: the likeliest token (default: 0.8)")
    return parser


def main() -> None:
    """Sample with the options in ``sys.argv``; Megatron's ``--seed`` seeds the sampling."""
    from megacpp_mcore.launch.heldout import load_model, parsed, tokenizer_of

    args = parsed(add_options)
    tokenizer = tokenizer_of(args)
    prompt = tokenizer.encode(args.prompt.encode()).tolist()
    count = most_tokens(args, len(prompt))
    model = load_model(args)
    vocabulary = tokenizer.eod_id + 1 if tokenizer.kind == "byte" else tokenizer.vocab_size
    settings = {"temperature": args.temperature, "seed": args.seed, "vocabulary": vocabulary, "end": tokenizer.eod_id}
    for part in streamed(prompt, generate(model, prompt, count, **settings), tokenizer.text):
        console.say(part, end="", is_text=True)
    console.say("", is_text=True)


if __name__ == "__main__":
    main()
