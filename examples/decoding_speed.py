"""Measures how fast an exported model decodes greedily, token by token and with drafts of its multi-token prediction.

    python examples/decoding_speed.py exported --device cuda --dtype bfloat16 --drafts 1 2 3

Needs transformers. Prints tokens/s, the drafts accepted, and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Decode each prompt in every way twice, and time the second run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of `megacpp-mcore checkpoint export`")
    parser.add_argument("--prompt", nargs="+", default=["def ", "import os\n", "class Reader:\n    "])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--drafts", type=int, nargs="+", help="of a call, one or more to try (default: mtp_depth)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.folder, trust_remote_code=True, dtype=args.dtype)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder, trust_remote_code=True)
    prompts = [tokenizer(prompt, return_tensors="pt").to(args.device) for prompt in args.prompt]
    plain: list[Any] = []
    for drafts in (0, *(args.drafts or [model.config.mtp_depth])):
        seconds, generated, same, accepted, drafted = 0.0, 0, 0, 0, 0
        for number, prompt in enumerate(prompts):
            for _ in range(2):
                counts: dict[str, int] = {"accepted": 0, "drafted": 0}
                more: Any = {"custom_generate": type(model).speculate, "drafts": drafts, "counts": counts} if drafts else {}
                start = time.perf_counter()
                options = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None}
                tokens = model.generate(**prompt, **options, **more)[0].tolist()  # tolist() waits for the device
                elapsed = time.perf_counter() - start
            if not drafts:
                plain.append(tokens)
            seconds, generated = seconds + elapsed, generated + args.tokens
            same += tokens == plain[number]
            accepted, drafted = accepted + counts["accepted"], drafted + counts["drafted"]
        share = f"; {accepted} of {drafted} drafts accepted; same tokens for {same} of {len(prompts)} prompts"
        print(f"{drafts} drafts a call: {generated / seconds:.1f} tokens/s{share if drafts else ''}", flush=True)


if __name__ == "__main__":
    main()
