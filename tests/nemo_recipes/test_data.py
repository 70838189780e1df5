"""The datasets that a Bridge recipe names, in whichever of its fields, are the ones that are checked before it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore.data.arguments import dataset_prefixes, verify_arguments
from megacpp_mcore.errors import DataError
from megacpp_mcore.nemo_recipes.run import data_words
from tests.errors import raises


def config(**dataset: Any) -> Any:
    return SimpleNamespace(
        dataset=SimpleNamespace(**dataset),
        validation=SimpleNamespace(eval_iters=0),
        tokenizer=SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=260, null_tokenizer_eod_id=256),
    )


@pytest.mark.parametrize(
    ("dataset", "words", "prefixes"),
    [
        ({"data_path": "one"}, "--data-path one", "one"),
        ({"data_path": ["0.3", "one", "0.7", "two"]}, "--data-path 0.3 one 0.7 two", "one two"),
        ({"blend": (["one"], None)}, "--data-path one", "one"),
        ({"data_path": "one", "split": "98,2,0"}, "--data-path one --split 98,2,0", "one"),
        ({"blend": (["one", "two"], [3, 7]), "data_path": "other"}, "--data-path 3 one 7 two", "one two"),
        # What Bridge makes of data_path when it is about to train.
        ({"blend": (["one", "two"], [3.0, 7.0]), "data_path": "3 one 7 two"}, "--data-path 3 one 7 two", "one two"),
        ({"blend": (["one"], None), "data_path": ["one"]}, "--data-path one", "one"),
        ({"blend": (["one", "two"], None)}, "--data-path one two", "one two"),
        (
            {"blend_per_split": [(["one"], None), None, (["two", "three"], [1, 2])]},
            "--train-data-path one --test-data-path 1 two 2 three", "one two three",
        ),
    ],
)  # fmt: skip
def test_each_way_to_name_them(dataset: dict[str, Any], words: str, prefixes: str) -> None:
    arguments = data_words(config(**dataset))
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 260 --null-tokenizer-eod-id 256"
    assert arguments == f"{words} --eval-iters 0 {tokenizer}".split()
    assert dataset_prefixes(arguments) == prefixes.split()


def test_two_ways_at_once_are_refused() -> None:
    words = data_words(config(data_path="one", blend_per_split=[(["two"], None), None, None]))
    with raises(DataError, "--data-path", "--train-data-path"):
        verify_arguments(words)


def test_none_is_refused() -> None:
    for dataset in ({}, {"data_path": None, "blend": None}, {"blend_per_split": [None, None, None]}):
        with pytest.raises(DataError, match="real text"):
            data_words(config(**dataset))
