"""Finds the datasets in a stock command line and checks them against their manifests before a run starts; no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megacpp_mcore.data import fim
from megacpp_mcore.data.manifest import load_manifest, verify_for_training
from megacpp_mcore.data.readable import refuse_remote, require_readable
from megacpp_mcore.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, fitting
from megacpp_mcore.errors import DataError
from megacpp_mcore.util import flags

SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
DATA_FLAGS = ("--data-path", *SPLIT_FLAGS)
"""Flags that take prefixes, or alternating weights and prefixes."""
_FORMS = (("--data-path",), ("--data-args-path",), SPLIT_FLAGS, ("--per-split-data-args-path",))
"""The ways to name datasets, of which Megatron accepts one: the first two are split by ``--split``, the others already are."""

_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's, with only --data-path
_DEFAULT_EVAL_ITERS = "100"
_SHARES = ("training", "validation", "test")

_UNBOUNDED = 2**31  # if only Megatron's own tokenizer knows its size, the ids are bounded only by the manifest


class Blend(NamedTuple):
    """The datasets that a command line names in one place.

    Attributes:
        flag: the one of :data:`DATA_FLAGS` that would name them, also where a file lists them.
        where: the flag or the file, for people.
        words: prefixes, or alternating weights and prefixes, as they were written.
    """

    flag: str
    where: str
    words: Sequence[str]

    def datasets(self) -> list[tuple[str, float | None]]:
        """Return each prefix and its weight, parsed as stock does; the weight is None where there are no weights.

        Words are weights and prefixes if their number is even and every other one, from the first, is a number (megatron-core
        0.19.2, ``core/datasets/utils.py``, ``get_blend_from_list``); so a prefix may read as a number.

        Raises:
            DataError: a list of weights and prefixes that stock cannot use, or weights that no blend can have.
        """
        weights, prefixes = self.words[::2], [prefix.strip() for prefix in self.words[1::2]]
        numbers = [_number(word) for word in weights]
        if len(self.words) % 2 or all(number is None for number in numbers):
            return [(prefix.strip(), None) for prefix in self.words]
        for word, number, prefix in zip(weights, numbers, prefixes, strict=True):
            if number is None:
                raise DataError(
                    f"{self.where}: found {word!r} where a weight is expected; expected "
                    "WEIGHT PREFIX WEIGHT PREFIX …, or only prefixes"
                )
            if not 0 < number < math.inf and len(prefixes) > 1:  # with a single dataset, its weight means nothing
                raise DataError(
                    f"{self.where}: the weight {word!r} of {prefix!r} is not a positive number; expected the share of each "
                    "dataset, such as 0.7, and only datasets to train on"
                )
        return list(zip(prefixes, numbers, strict=True))


def bridge_words(dataset: Any) -> list[str]:
    """Return the words with which a stock command line names the datasets of Megatron-Bridge's ``dataset``.

    ``blend`` comes before ``data_path``, as in Bridge (0.6.2, ``GPTDatasetConfig.finalize``, which derives the first from the
    second). ``blend_per_split`` is kept together with either of them: :func:`verify_arguments` refuses both, as Megatron does.
    """
    path, blend = getattr(dataset, "data_path", None), getattr(dataset, "blend", None)
    written = path.split() if isinstance(path, str) else [str(word) for word in path or ()]
    words = ["--data-path", *(_blend_words(*blend) if blend else written)] if blend or written else []
    words += ["--split", str(dataset.split)] if words and getattr(dataset, "split", None) else []
    for flag, one in zip(SPLIT_FLAGS, getattr(dataset, "blend_per_split", None) or (), strict=False):
        words += [flag, *_blend_words(*one)] if one else []
    return words


def _blend_words(prefixes: Sequence[str], weights: Sequence[float] | None) -> list[str]:
    """Return prefixes, or alternating weights and prefixes."""
    if not weights or len(prefixes) == 1:
        return list(prefixes)
    shares = (str(weight).removesuffix(".0") for weight in weights)
    return [word for pair in zip(shares, prefixes, strict=True) for word in pair]


def verify_arguments(arguments: Sequence[str], vocab_size: int | None = None) -> str:
    """Check how Megatron's ``arguments`` name datasets, and each dataset; return the line that says what was checked.

    ``vocab_size`` is the model's, for a tokenizer may not use the ids that pad it; None: not known.

    Raises:
        DataError: names the file, what was found, what was expected.
    """
    prefixes, given = dataset_prefixes(arguments), flags.read(arguments)
    if not prefixes:
        return "data: none named"
    refuse_remote(*prefixes)
    _check_forms(given)
    kind, folder = flags.first(given, "--tokenizer-type"), flags.first(given, "--tokenizer-model")
    tokenizer = fitting(folder, vocab_size) if folder and kind == "HuggingFaceTokenizer" else None
    note = fim.check(given, tokenizer)
    embedded, eod_id, checksum = _vocabulary(given, tokenizer)
    verify_for_training(prefixes, vocab_size=embedded, eod_id=eod_id, tokenizer_checksum=checksum)
    for blend in (named := blends(arguments)):
        if blend.flag not in SPLIT_FLAGS:
            _check_shares(blend.datasets(), flags.first(given, "--split") or _DEFAULT_SPLIT)
    _check_sets(named, given)
    line = f"data: {', '.join(prefixes)} verified against {'its manifest' if len(prefixes) == 1 else 'their manifests'}"
    return f"{line}; {note}" if note else line


def cache_words(arguments: Sequence[str]) -> list[str]:
    """Return the words after ``arguments`` by which stock caches its sample indices; none without datasets.

    Stock names a cache after the dataset's path and the run's settings, not after its contents (megatron-core 0.19.2,
    ``core/datasets/gpt_dataset.py``), and reads whatever has that name: after a dataset is replaced at its path, training
    would continue with the old one's document indices. So the folder is named after the manifests; old ones are never removed.
    It lies in the folder of ``--data-cache-path``, by default next to the first dataset, as in stock.

    Raises:
        DataError: a manifest is missing or damaged.
    """
    prefixes = dataset_prefixes(arguments)
    if not prefixes:
        return []
    given = flags.first(flags.read(arguments), "--data-cache-path")
    digests = sorted({load_manifest(prefix).digest for prefix in prefixes})
    name = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    return ["--data-cache-path", os.path.join(given or os.path.join(prefixes[0], "cache"), name)]


def dataset_prefixes(arguments: Sequence[str]) -> list[str]:
    """Return every dataset prefix in Megatron's ``arguments``, each once, in order, without blend weights.

    Raises:
        DataError: a list of weights and prefixes that stock cannot use, or a file of such a list that cannot be read.
    """
    return list(dict.fromkeys(prefix for blend in blends(arguments) for prefix, _ in blend.datasets()))


def blends(arguments: Sequence[str]) -> list[Blend]:
    """Return every blend that Megatron's ``arguments`` name, those in files of blends included.

    Raises:
        DataError: a file of blends cannot be read, or a flag or a file names no dataset.
    """
    given = flags.read(arguments)
    blends = [Blend(flag, flag, given[flag]) for flag in DATA_FLAGS if flag in given]
    if path := flags.first(given, "--data-args-path"):
        blends.append(Blend("--data-path", path, _read(path).split()))
    if path := flags.first(given, "--per-split-data-args-path"):
        blends += _read_splits(path)
    if empty := [blend.where for blend in blends if not any(map(str.strip, blend.words))]:
        raise DataError(
            f"no dataset is named by {' and '.join(empty)}; expected the prefix that `megacpp-mcore data prepare` printed, "
            "which an unset variable of a shell leaves out; for made-up tokens, pass only --mock-data"
        )
    return blends


def _check_forms(given: flags.Flags) -> None:
    """Reject datasets named in two ways, and a ``--split`` that stock rejects or misreads."""
    named = ["/".join(flag for flag in form if given.get(flag)) for form in _FORMS]
    if len(forms := [form for form in (*named, *{"--mock-data"}.intersection(given)) if form]) > 1:
        raise DataError(
            f"datasets are given by {' and by '.join(forms)}; expected only one of them: Megatron ignores or rejects the rest"
        )
    split = flags.first(given, "--split")
    if split is not None and (named[2] or named[3]):
        raise DataError(f"--split {split} conflicts with {forms[0]}: its datasets are already split; remove it")
    if split is None and named[1]:
        raise DataError("--data-args-path names datasets to be split, without --split; expected one, such as 98,2,0")
    shares = [] if split is None else _shares(split)
    if split is not None and (len(shares) > 3 or None in shares or not any(shares)):
        raise DataError(
            f"--split is {split!r}; expected up to three shares (training, validation, test) of 0 or more, not all 0, "
            "separated by commas, such as 98,2,0"
        )


def _check_sets(named: Sequence[Blend], given: flags.Flags) -> None:
    """Reject training or evaluation without data: stock exits at once with status 0, or with a TypeError when it evaluates."""
    iterations = flags.first(given, "--eval-iters") or _DEFAULT_EVAL_ITERS
    option = "--full-validation" if "--full-validation" in given else f"--eval-iters {iterations}"
    split, is_split = flags.first(given, "--split") or _DEFAULT_SPLIT, named[0].flag not in SPLIT_FLAGS
    has = _shares(split) if is_split else [float(any(one.flag == flag for one in named)) for flag in SPLIT_FLAGS]
    reason = f"--split {split} leaves it no share" if is_split else "no dataset is named for it"
    if "--skip-train" not in given and not any(has[:1]):
        instead = "a first share, such as --split 98,2,0" if is_split else f"{SPLIT_FLAGS[0]} PREFIX"
        raise DataError(f"the run trains on the training set, and {reason}; expected {instead}, or --skip-train")
    if ("--full-validation" in given or _number(iterations)) and not any(has[1:2]):
        instead = "a second share, such as --split 98,2,0" if is_split else f"{SPLIT_FLAGS[1]} PREFIX"
        raise DataError(f"{option} evaluates on the validation set, and {reason}; expected {instead}, or --eval-iters 0")


def _shares(text: str) -> list[float | None]:
    return [_number(share) if re.fullmatch(r"\s*[\d.]+\s*", share) else None for share in text.split(",")]


def _check_shares(datasets: Sequence[tuple[str, float | None]], split: str) -> None:
    """Reject a share of a split that gets no documents: Megatron would count its epochs forever.

    Bounds are rounded as in megatron-core 0.19.2, ``core/datasets/blended_megatron_dataset_builder.py``. In a blend without
    weights, where Megatron does not count epochs, a dataset may lack a share that another one has.
    """
    shares = [share or 0.0 for share in _shares(split)]
    bounds = [0.0, *itertools.accumulate(share / sum(shares) for share in shares)]
    documents = {prefix: load_manifest(prefix).documents for prefix, _ in datasets}
    for name, share, (first, last) in zip(_SHARES, shares, itertools.pairwise(bounds), strict=False):
        empty = [each for each, count in documents.items() if share and round(first * count) == round(last * count)]
        is_needed = len(documents) == 1 or datasets[0][1] is not None
        if empty and (is_needed or len(empty) == len(documents)):
            raise DataError(
                f"{empty[0]} has {documents[empty[0]]} documents, of which --split {split} leaves none for {name}; expected "
                f"at least one, or Megatron waits forever: set that share to 0, such as --split 100,0,0, enlarge it, or "
                f"name the datasets of each share ({', '.join(SPLIT_FLAGS)})"
            )


def _read(path: str) -> str:
    try:
        with require_readable(path), open(path, encoding="utf-8") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {error}; expected a text file that lists datasets") from error


def _read_splits(path: str) -> list[Blend]:
    """Return the blends of a file of ``--per-split-data-args-path``."""
    expected = "expected a JSON object with keys train, valid and test, each with a list, or a text, of datasets"
    try:
        body = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: {error}; {expected}") from error
    splits = ("train", "valid", "test")
    is_whole = isinstance(body, dict) and all(isinstance(body.get(split, 0), str | list | None) for split in splits)
    if not is_whole or not any(map(body.get, splits)):
        raise DataError(f"{path}: found {json.dumps(body)[:200]}; {expected}")
    lists = [each.split() if isinstance(each, str) else each for each in map(body.get, splits)]
    places = zip(SPLIT_FLAGS, splits, lists, strict=True)
    return [Blend(flag, f"{path}, {split}", list(map(str, each))) for flag, split, each in places if each is not None]


def _vocabulary(given: flags.Flags, tokenizer: HuggingFaceTokenizer | None) -> tuple[int, int | None, str | None]:
    """Return vocabulary size, end-of-document id and checksum of the run's tokenizer; None if only Megatron knows them."""
    if tokenizer is not None:
        return tokenizer.vocab_size, tokenizer.eod_id, tokenizer.checksum()
    named, padded = (flags.whole(given, flag, DataError) for flag in ("--vocab-size", "--padded-vocab-size"))
    embedded = next((size for size in (padded, named) if size is not None), _UNBOUNDED)
    if flags.first(given, "--tokenizer-type") != "NullTokenizer":
        return embedded, None, None
    eod_id = flags.whole(given, "--null-tokenizer-eod-id", DataError)
    if eod_id is None and named is not None:
        eod_id = named - 1  # stock's default; padding does not change it
    is_byte = flags.read(ByteTokenizer().stock_flags()).items() <= given.items()
    return embedded, eod_id, ByteTokenizer().checksum() if is_byte else None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
