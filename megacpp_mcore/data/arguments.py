"""Finds the datasets in a stock command line and checks them against their manifests before a run starts; no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megacpp_mcore.data.files import require_readable
from megacpp_mcore.data.fim import find_tokens
from megacpp_mcore.data.index_cache import remove_stale
from megacpp_mcore.data.manifest import verify_for_training
from megacpp_mcore.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from megacpp_mcore.errors import DataError

SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
DATA_FLAGS = ("--data-path", *SPLIT_FLAGS)
"""Flags whose values are prefixes, or weights and prefixes by turns."""
_FORMS = (("--data-path",), ("--data-args-path",), SPLIT_FLAGS, ("--per-split-data-args-path",))
"""The ways to name datasets, of which Megatron takes one: the first two are cut by ``--split``, the others are cut."""

FIM_TOKENS = {
    "--fim-prefix-token": "<fim_prefix>",
    "--fim-middle-token": "<fim_middle>",
    "--fim-suffix-token": "<fim_suffix>",
    "--fim-pad-token": "<fim_pad>",
    "--fim-eod-token": "<|endoftext|>",
}
"""Flags of Megatron's fill-in-the-middle dataset that name tokens, with their defaults (megatron-core 0.19.2)."""

_FIM_RATES = {"--fim-rate": "0.5", "--fim-spm-rate": "0.5", "--fim-fragment-rate": None}
"""The flags of its probabilities, with their defaults (megatron-core 0.19.2); the last one is for ``--fim-split-sample``."""

_UNBOUNDED = 2**31  # where only Megatron's own tokenizer knows its size, the ids are bounded by the manifest alone


class Blend(NamedTuple):
    """The datasets that a command line names in one place.

    Attributes:
        flag: the one of :data:`DATA_FLAGS` that would name them, also where a file lists them.
        where: the flag or the file, for people.
        words: prefixes, or weights and prefixes by turns, as they were written.
    """

    flag: str
    where: str
    words: Sequence[str]

    def datasets(self) -> list[tuple[str, float | None]]:
        """Each prefix and its weight, as stock tells them apart; None where there are no weights.

        Weights are what an even number of words begins with, every other one, if they are numbers (megatron-core 0.19.2,
        ``core/datasets/utils.py``, ``get_blend_from_list``); so a prefix may read as a number.

        Raises:
            DataError: a list of weights and prefixes that stock cannot take.
        """
        words = self.words
        numbers = [_is_number(word) for word in words[::2]]
        if len(words) % 2 or not any(numbers):
            return [(prefix.strip(), None) for prefix in words]
        if not all(numbers):
            raise DataError(
                f"{self.where}: {words[2 * numbers.index(False)]!r} stands where other datasets have their weight; expected "
                "WEIGHT PREFIX WEIGHT PREFIX …, or prefixes alone"
            )
        _check_weights(self.where, words)
        return [(prefix.strip(), float(weight)) for weight, prefix in zip(words[::2], words[1::2], strict=True)]


class TrainingTokenizer(NamedTuple):
    """What a stock command line says of its tokenizer; None is what only Megatron will know."""

    vocab_size: int
    eod_id: int | None
    checksum: str | None


def verify_arguments(arguments: Sequence[str]) -> str:
    """Check how ``arguments`` (Megatron's) name datasets, and each of those, and return the line that says what was checked.

    Megatron's cached indices that are older than the dataset they index are removed, and the line says so.

    Raises:
        DataError: naming the file, what was found, what was expected.
    """
    prefixes = dataset_prefixes(arguments)
    if not prefixes:
        return "data: none named"
    _check_forms(arguments)
    note = check_fim(arguments)
    tokenizer = _find_tokenizer(arguments)
    verify_for_training(
        prefixes,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        tokenizer_checksum=tokenizer.checksum,
        full=True,
    )
    removed = remove_stale(prefixes, _value(arguments, "--data-cache-path"))
    line = f"data: {', '.join(prefixes)} verified against {'its manifest' if len(prefixes) == 1 else 'their manifests'}"
    line += f"; {note}" if note else ""
    return f"{line}; removed cached indices older than the data: {', '.join(removed)}" if removed else line


def dataset_prefixes(arguments: Sequence[str]) -> list[str]:
    """Every dataset prefix in Megatron's ``arguments``, each once, in order; blend weights are left out.

    Raises:
        DataError: a list of weights and prefixes that stock cannot take, or a file of such a list that cannot be read.
    """
    return list(dict.fromkeys(prefix for blend in blends(arguments) for prefix, _ in blend.datasets()))


def blends(arguments: Sequence[str]) -> list[Blend]:
    """Every blend that Megatron's ``arguments`` name, those in files of blends included.

    Raises:
        DataError: a file of blends that cannot be read.
    """
    found = [Blend(flag, flag, _values(arguments, flag)) for flag in DATA_FLAGS]
    if path := _value(arguments, "--data-args-path"):
        found.append(Blend("--data-path", path, _read(path).split()))
    if path := _value(arguments, "--per-split-data-args-path"):
        found += _read_splits(path)
    return [blend for blend in found if blend.words]


def _check_weights(where: str, words: Sequence[str]) -> None:
    """Refuse weights that no blend can have; where there is one dataset, its weight means nothing."""
    wrong = [word for word in words[::2] if not 0 < float(word) < math.inf]
    if wrong and len(words) > 2:
        raise DataError(
            f"{where}: the weight {wrong[0]!r} of {words[words.index(wrong[0]) + 1].strip()!r} is no positive number; expected "
            "the share of each dataset, such as 0.7, and only datasets that are to be seen"
        )


def _check_forms(arguments: Sequence[str]) -> None:
    """Refuse datasets that are named in two ways, and a ``--split`` that stock refuses or reads as another."""
    named = [[flag for flag in form if _values(arguments, flag)] for form in _FORMS]
    given = [flags for flags in named if flags]
    if len(given) > 1:
        raise DataError(
            f"datasets are named by {' and by '.join('/'.join(flags) for flags in given)}; expected one way, since Megatron "
            "takes one and is silent about, or stops at, the other: leave out the rest"
        )
    split = _value(arguments, "--split")
    if split is not None and (named[2] or named[3]):
        raise DataError(
            f"--split {split} was given with {'/'.join(named[2] or named[3])}, whose datasets are split already; leave out "
            "--split, or name the whole dataset by --data-path"
        )
    if split is None and named[1]:
        raise DataError(
            "--data-args-path names datasets to be split, and there is no --split; expected the shares of training, validation "
            "and test, such as --split 98,2,0"
        )
    if split is not None and not _is_split(split):
        raise DataError(
            f"--split is {split!r}; expected up to three shares (training, validation, test) of 0 or more, not all 0, "
            "separated by commas, such as 98,2,0"
        )


def _is_split(text: str) -> bool:
    shares = text.split(",")
    numbers = [float(share) for share in shares if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", share)]
    return len(numbers) == len(shares) <= 3 and sum(numbers) > 0


def _read(path: str) -> str:
    try:
        with require_readable(path), open(path, encoding="utf-8") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {error}; expected a text file that lists datasets") from error


def _read_splits(path: str) -> list[Blend]:
    """Return the blends of a file of ``--per-split-data-args-path``."""
    expected = "expected a JSON object whose keys train, valid and test each hold a list, or a text, of datasets"
    try:
        body = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}; {expected}") from error
    splits = ("train", "valid", "test")
    if not isinstance(body, dict) or not all(isinstance(body.get(split, 0), str | list | None) for split in splits):
        raise DataError(f"{path}: found {json.dumps(body)[:200]}; {expected}")
    return [
        Blend(flag, f"{path}, {split}", _words(body[split])) for flag, split in zip(SPLIT_FLAGS, splits, strict=True)
    ]


def _words(blend: str | list[Any] | None) -> list[str]:
    return blend.split() if isinstance(blend, str) else [str(word) for word in blend or ()]


def _find_tokenizer(arguments: Sequence[str]) -> TrainingTokenizer:
    """What stock training will use, as far as the words tell."""
    kind, folder = _value(arguments, "--tokenizer-type"), _value(arguments, "--tokenizer-model")
    if kind == "HuggingFaceTokenizer" and folder:
        tokenizer = HuggingFaceTokenizer(folder)
        return TrainingTokenizer(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.checksum())
    named, padded = _number(arguments, "--vocab-size"), _number(arguments, "--padded-vocab-size")
    embedded = next((size for size in (padded, named) if size is not None), _UNBOUNDED)
    if kind != "NullTokenizer":
        return TrainingTokenizer(embedded, None, None)
    eod_id = _number(arguments, "--null-tokenizer-eod-id")
    if eod_id is None and named is not None:
        eod_id = named - 1  # stock's default; padding does not move it
    is_byte = all(_value(arguments, flag) == word for flag, word in _byte_flags().items())
    return TrainingTokenizer(embedded, eod_id, ByteTokenizer().checksum() if is_byte else None)


def check_fim(arguments: Sequence[str]) -> str | None:
    """Check what ``--fim-data`` needs, and return what there is to say of it; None without the flag.

    Raises:
        DataError: stock would stop at it, leave it out or cut up other documents than are there.
    """
    if "--fim-data" not in arguments:
        return None
    for flag, why in (
        ("--hybrid-layer-pattern", "pretrain_hybrid.py has no such dataset and would train without it, in silence"),
        ("--dataloader-inter-document-masking", "its dataset does not say where documents end"),
    ):
        if any(word.partition("=")[0] == flag for word in arguments):
            raise DataError(f"--fim-data was given with {flag}: {why}; leave one of them out")
    _check_fim_rates(arguments)
    kind, folder = _value(arguments, "--tokenizer-type"), _value(arguments, "--tokenizer-model")
    if kind == "NullTokenizer":
        raise DataError(
            "--fim-data was given with the tokenizer NullTokenizer (which stands for the byte tokenizer, too), but it cuts "
            "text, and Megatron's NullTokenizer knows none; expected --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            "DIR with the five tokens that --fim-prefix-token … --fim-eod-token name, and a dataset prepared with it"
        )
    if kind != "HuggingFaceTokenizer" or not folder:
        return f"the tokens of --fim-data are not checked, for want of a way to read the tokenizer {kind}"
    named = {flag: _value(arguments, flag) or default for flag, default in FIM_TOKENS.items()}
    ids = find_tokens(HuggingFaceTokenizer(folder), named, _value(arguments, "--fim-split-sample"))
    return "FIM tokens " + ", ".join(f"{token} = {ids[token]}" for token in ids)


def _check_fim_rates(arguments: Sequence[str]) -> None:
    """Refuse what stock stops at, when it starts (a rate of 0) or at a sample in the middle of training (all others)."""
    split = _value(arguments, "--fim-split-sample")
    for flag, default in _FIM_RATES.items():
        given = _values(arguments, flag)
        word = given[0] if given else default
        is_of_fragments = flag == "--fim-fragment-rate"
        if word is None and is_of_fragments:
            if split:
                raise DataError(
                    f"--fim-split-sample {split} was given without {flag}, and Megatron would stop at the first document that "
                    f"has that token; expected how often one of its parts is cut, such as {flag} 0.5"
                )
            continue
        if (
            word is None
            or not _is_number(word)
            or not 0 <= float(word) <= 1
            or (not float(word) and not is_of_fragments)
        ):
            raise DataError(
                f"{flag} is {word!r}; expected a probability {'from 0 to 1' if is_of_fragments else 'above 0 and up to 1'}, "
                f"such as {flag} 0.5"
            )


def _byte_flags() -> dict[str, str]:
    words = ByteTokenizer().stock_flags()
    return dict(zip(words[::2], words[1::2], strict=True))


def _number(arguments: Sequence[str], flag: str) -> int | None:
    word = _value(arguments, flag)
    try:
        return None if word is None else int(word)
    except ValueError as error:
        raise DataError(f"{flag} is {word!r}; expected an integer") from error


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The first word after the last ``flag``."""
    return next(iter(_values(arguments, flag)), None)


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
