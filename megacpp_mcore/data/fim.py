"""Requirements of Megatron's fill-in-the-middle dataset on command line and tokenizer, which it does not check; no torch.

GPTFIMDataset (megatron-core 0.19.2, ``megatron/training/datasets/fim_dataset.py``) cuts the text between two ends of document
at two random characters, tokenizes the three parts separately and reorders them between tokens that mark them. A token
that the tokenizer does not know silently becomes its unknown token, or none.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp_mcore.data.tokenizer import HuggingFaceTokenizer
from megacpp_mcore.errors import DataError
from megacpp_mcore.util import flags

_END, _SPLIT = "--fim-eod-token", "--fim-split-sample"
TOKENS = {
    "--fim-prefix-token": "<fim_prefix>",
    "--fim-middle-token": "<fim_middle>",
    "--fim-suffix-token": "<fim_suffix>",
    "--fim-pad-token": "<fim_pad>",
    _END: "<|endoftext|>",
}
"""Flags that name tokens, with their defaults (megatron-core 0.19.2)."""


def check(given: flags.Flags, tokenizer: HuggingFaceTokenizer | None) -> str | None:
    """Check the requirements of ``--fim-data``, and return a line about its tokens; None without the flag.

    The run's ``tokenizer`` is None if it cannot be read here.

    Raises:
        DataError: stock would stop at it, ignore it, or cut up documents other than the dataset's.
    """
    if "--fim-data" not in given:
        return None
    if "--dataloader-inter-document-masking" in given:
        raise DataError(
            "--fim-data conflicts with --dataloader-inter-document-masking: its dataset does not say where documents end; "
            "leave one of them out"
        )
    kind = flags.first(given, "--tokenizer-type")
    if kind == "NullTokenizer":
        raise DataError(
            "--fim-data splits text, which the tokenizer NullTokenizer (also used for bytes) does not know; expected "
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR with the five "
            "tokens that --fim-prefix-token … --fim-eod-token name, and a dataset prepared with it"
        )
    if tokenizer is None:
        return f"the tokens of --fim-data are not checked: the tokenizer {kind} cannot be read here"
    named = {flag: flags.first(given, flag) or default for flag, default in TOKENS.items()}
    if separator := flags.first(given, _SPLIT):
        named[_SPLIT] = separator
    return "FIM tokens " + ", ".join(f"{token} = {id_}" for token, id_ in _find(tokenizer, named).items())


def _find(tokenizer: HuggingFaceTokenizer, named: Mapping[str, str]) -> dict[str, int]:
    """Return, by token, the ids of the tokens that the dataset inserts between the parts of a document."""
    ids = {flag: id_ for flag, token in named.items() if (id_ := tokenizer.token_id(token)) is not None}
    if unknown := [f"{flag} {token}" for flag, token in named.items() if flag not in ids]:
        raise DataError(
            f"{tokenizer.folder} has no token for {', '.join(unknown)}; expected one token for each: name tokens that it "
            "has, or add them to the tokenizer, and prepare the dataset with it"
        )
    first: dict[int, str] = {}
    for flag, id_ in ids.items():
        if first.setdefault(id_, flag) != flag:
            raise DataError(
                f"{first[id_]} and {flag} both name {named[flag]!r}; expected a token of its own for each, or the model "
                "could not tell them apart"
            )
    if ids[_END] != tokenizer.eod_id:
        raise DataError(
            f"{_END} {named[_END]} is id {ids[_END]}, and documents end with the eos_token of {tokenizer.folder}, id "
            f"{tokenizer.eod_id}; expected the same, or parts of several documents would be put in one order: name that token"
        )
    if around := tokenizer.added_around_text():
        raise DataError(
            f"{tokenizer.folder} puts {around} tokens of its own around every text, and Megatron would have it do so with "
            "every part of a document; expected a tokenizer whose post-processor adds none"
        )
    return {named[flag]: id_ for flag, id_ in ids.items()}
