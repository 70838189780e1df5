"""Finds the datasets in a stock command line and checks them against their manifests before a run starts; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_mcore.data.manifest import verify_for_training
from megacpp_mcore.data.tokenizer import load_tokenizer

DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Flags whose values are prefixes, or weights and prefixes by turns."""

INDIRECT_FLAGS = ("--data-args-path", "--per-split-data-args-path")
"""Flags that name a file of such values, which is not read here."""


def verify_arguments(arguments: Sequence[str]) -> str:
    """Check every dataset that ``arguments`` (Megatron's) name, and return the line that says what was checked.

    Raises:
        DataError: naming the file, what was found, what was expected.
    """
    prefixes = dataset_prefixes(arguments)
    if not prefixes:
        indirect = [flag for flag in INDIRECT_FLAGS if _values(arguments, flag)]
        return f"data: not verified ({', '.join(indirect)} is not read)" if indirect else "data: none named"
    vocab_size, eod_id = _vocabulary(arguments)
    verify_for_training(prefixes, vocab_size=vocab_size, eod_id=eod_id, full=True)
    return f"data: {', '.join(prefixes)} verified against {'its manifest' if len(prefixes) == 1 else 'their manifests'}"


def dataset_prefixes(arguments: Sequence[str]) -> list[str]:
    """Every dataset prefix in Megatron's ``arguments``, each once, in order; blend weights are left out."""
    named = [value for flag in DATA_FLAGS for value in _values(arguments, flag)]
    return list(dict.fromkeys(value for value in named if not _is_number(value)))


def _vocabulary(arguments: Sequence[str]) -> tuple[int, int | None]:
    """Vocabulary size and end-of-document id that stock training will use."""
    folder = _values(arguments, "--tokenizer-model")
    if folder and _values(arguments, "--tokenizer-type") == ["HuggingFaceTokenizer"]:
        tokenizer = load_tokenizer(folder[0])
        return tokenizer.vocab_size, tokenizer.eod_id
    sizes = _values(arguments, "--padded-vocab-size") or _values(arguments, "--vocab-size")
    if not sizes:
        return 2**31, None  # only Megatron's own tokenizer knows; the ids are then bounded by the manifest alone
    # NullTokenizer's end of document is its last id, unless it is told otherwise.
    eod = _values(arguments, "--null-tokenizer-eod-id") or [str(int(sizes[0]) - 1)]
    return int(sizes[0]), int(eod[0]) if _values(arguments, "--tokenizer-type") == ["NullTokenizer"] else None


def _values(arguments: Sequence[str], flag: str) -> list[str]:
    """The words after the last ``flag``, up to the next flag; ``--flag=value`` counts."""
    found: list[str] = []
    for index, word in enumerate(arguments):
        if word.startswith(flag + "="):
            found = [word.removeprefix(flag + "=")]
        elif word == flag:
            end = index + 1
            while end < len(arguments) and not arguments[end].startswith("--"):
                end += 1
            found = list(arguments[index + 1 : end])
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
