"""What Megatron's fill-in-the-middle dataset asks of a tokenizer and does not check; no torch.

GPTFIMDataset (megatron-core 0.19.2, ``megatron/training/datasets/fim_dataset.py``) cuts the text between two ends of document
at two random characters, tokenizes the three parts anew and puts them in another order between tokens that mark them. A token
that the tokenizer does not know becomes its unknown token, or none, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp_mcore.data.tokenizer import HuggingFaceTokenizer
from megacpp_mcore.errors import DataError

_END = "--fim-eod-token"


def find_tokens(
    tokenizer: HuggingFaceTokenizer, named: Mapping[str, str], split_sample: str | None = None
) -> dict[str, int]:
    """Return the ids of the tokens that the dataset puts between the parts of a document.

    Args:
        tokenizer: of the run.
        named: token by the flag that names it, ``--fim-eod-token`` among them.
        split_sample: token that separates the parts of a sample to be cut one by one (``--fim-split-sample``).

    Raises:
        DataError: a token that the tokenizer does not know, two that are one, an end of document that is not the
            tokenizer's, or a tokenizer that puts tokens of its own around every text, and so around every part.
    """
    wanted = dict(named) | ({} if split_sample is None else {"--fim-split-sample": split_sample})
    ids = {flag: tokenizer.token_id(token) for flag, token in wanted.items()}
    unknown = [f"{flag} {wanted[flag]}" for flag, found in ids.items() if found is None]
    if unknown:
        raise DataError(
            f"{tokenizer.folder} has no token for {', '.join(unknown)}; expected one token for each: name tokens that it "
            "has, or add them to the tokenizer, and prepare the dataset with it"
        )
    found = {flag: number for flag, number in ids.items() if number is not None}
    first: dict[int, str] = {}
    for flag, number in found.items():
        if first.setdefault(number, flag) != flag:
            raise DataError(
                f"{first[number]} and {flag} both name {wanted[flag]!r}; expected a token of its own for each, or the model "
                "could not tell them apart"
            )
    if found[_END] != tokenizer.eod_id:
        raise DataError(
            f"{_END} {wanted[_END]} is id {found[_END]}, and documents end with the eos_token of {tokenizer.folder}, id "
            f"{tokenizer.eod_id}; expected the same, or parts of several documents would be put in one order: name that token"
        )
    around = tokenizer.added_around_text()
    if around:
        raise DataError(
            f"{tokenizer.folder} puts {around} tokens of its own around every text, and Megatron would have it do so with "
            "every part of a document; expected a tokenizer whose post-processor adds none"
        )
    return {wanted[flag]: number for flag, number in found.items()}
