"""Datasets named on a stock command line are found, and checked before training."""

from pathlib import Path

import pytest

from megacpp_mcore import launcher
from megacpp_mcore.data.arguments import dataset_prefixes, verify_arguments
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import DataError
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.recipe_command import tokenizer_words


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    source = tmp_path / "text.txt"
    source.write_text("a short document\n" * 200)
    prepare([str(source)], str(tmp_path / "set"))
    return str(tmp_path / "set")


def test_prefixes_of_blends_and_splits() -> None:
    words = [
        "--data-path",
        "0.3",
        "one",
        "0.7",
        "two",
        "--seed",
        "1",
        "--valid-data-path=three",
        "--test-data-path",
        "one",
    ]
    assert dataset_prefixes(words) == ["one", "two", "three"]


def test_the_last_flag_counts() -> None:
    assert dataset_prefixes(["--data-path", "old", "--data-path", "new"]) == ["new"]


def test_a_whole_dataset_is_verified(prefix: str) -> None:
    words = ["--data-path", prefix, *tokenizer_words(preset("nam56r_tiny"))]
    assert verify_arguments(words) == f"data: {prefix} verified against its manifest"


def test_what_is_not_read_is_said() -> None:
    assert verify_arguments(["--mock-data"]) == "data: none named"
    assert "not verified (--data-args-path" in verify_arguments(["--data-args-path", "file"])


def test_another_vocabulary_or_end_of_document_is_refused(prefix: str) -> None:
    words = ["--data-path", prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size"]
    for other in (["260", "--null-tokenizer-eod-id", "0"], ["260"]):  # the second means 259, Megatron's default
        with pytest.raises(DataError, match="256"):
            verify_arguments([*words, *other])
    with pytest.raises(DataError, match="100"):
        verify_arguments([*words, "100", "--null-tokenizer-eod-id", "256"])


def test_ids_of_a_wider_model_take_the_end_of_document_from_the_manifest(prefix: str) -> None:
    words = tokenizer_words(preset("nam56r_quarter"), data=prefix)
    assert words[-2:] == ("--null-tokenizer-eod-id", "256")
    verify_arguments(["--data-path", prefix, *words])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_launch_on_a_damaged_dataset_stops_before_megatron(prefix: str, suffix: str) -> None:
    path = Path(prefix + suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        data=("--data-path", prefix),
        tokenizer=tokenizer_words(preset("nam56r_tiny")),
    )
    words = lower(preset("nam56r_tiny"), Layout(), training)
    with pytest.raises(DataError, match=str(path)):
        launcher.launch(words, device="cpu")
