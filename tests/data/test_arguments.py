"""Datasets named on a stock command line are found, and checked before training."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from megacpp_mcore.data.arguments import cache_words, dataset_prefixes, verify_arguments
from megacpp_mcore.data.manifest import adopt
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.tokenizer import ByteTokenizer, tokenizer_words
from megacpp_mcore.errors import DataError
from megacpp_mcore.model import preset
from tests.data.hugging_face import save_words
from tests.errors import raises
from tests.patches.test_sample_indices import builder_of

BYTES = ByteTokenizer().stock_flags()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "a short document"}\n' * 600)  # each share of Megatron's default split gets some
    prepare([str(source)], str(tmp_path / "set"))
    return str(tmp_path / "set")


def test_prefixes_are_found_and_the_last_of_a_flag_counts() -> None:
    words = "--data-path 0.3 one 0.7 two --seed 1 --valid-data-path=three --test-data-path one"
    assert dataset_prefixes(words.split()) == ["one", "two", "three"]
    assert dataset_prefixes(["--data-path", "old", "--data-path", "new"]) == ["new"]
    assert verify_arguments(["--mock-data"]) == "data: none named"


def test_datasets_in_an_object_store_are_refused() -> None:
    with raises(DataError, "s3://bucket/two", "file system"):
        verify_arguments(["--data-path", "0.5", "s3://bucket/two", "0.5", "one", *BYTES])


BLENDS = [
    ["2024"],
    ["2024", "one"],
    ["one", "2024", "two", "2025"],
    ["2024", "2025", "2026"],
    ["1e3", "2024", "1e-3", "7"],
    ["one", "two"],
    [" one ", "two", "three"],
]


@pytest.mark.parametrize("blend", BLENDS)
def test_prefixes_are_told_from_weights_as_stock_does(blend: list[str], tmp_path: Path) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    stock, _ = get_blend_from_list(blend)
    assert dataset_prefixes(["--data-path", *blend, "--seed", "1"]) == stock
    (tmp_path / "list").write_text("\n".join(blend))
    assert dataset_prefixes(["--data-args-path", str(tmp_path / "list")]) == [prefix.strip() for prefix in stock]
    (tmp_path / "splits").write_text(json.dumps({"train": blend, "valid": None, "test": "5 last"}))
    assert dataset_prefixes([f"--per-split-data-args-path={tmp_path / 'splits'}"]) == [*stock, "last"]


NONE = b'{"train": null, "valid": null, "test": null}'


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data-path --split 100,0,0", "--data-path"),
        ("--data-path= --mock-data", "--data-path"),
        ("--train-data-path --valid-data-path A", "--train-data-path"),
        ("--data-args-path NOTHING --split 98,2,0", "NOTHING"),
        ("--per-split-data-args-path LACKING", "LACKING, valid"),
    ],
)
def test_what_names_no_dataset_is_refused(words: str, named: str, tmp_path: Path) -> None:
    """Where stock ends in "not enough values to unpack"."""
    (tmp_path / "NOTHING").write_text("\n")
    (tmp_path / "LACKING").write_text('{"train": "A", "valid": [], "test": null}')
    paths = {name: str(tmp_path / name) for name in ("NOTHING", "LACKING")}
    with raises(DataError, *(paths.get(word, word) for word in named.split(", ")), "--mock-data"):
        verify_arguments([paths.get(word, word) for word in words.split()])


@pytest.mark.parametrize("content", [None, b"[", b"[1]", b'{"train": "a", "valid": "b"}', b'{"train": 3}', b"\xff", NONE])
def test_a_file_of_datasets_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "splits").write_bytes(content)
    with raises(DataError, tmp_path / "splits"):
        verify_arguments(["--per-split-data-args-path", str(tmp_path / "splits")])
    if content in (None, b"\xff"):
        with raises(DataError, tmp_path / "splits"):
            verify_arguments(["--data-args-path", str(tmp_path / "splits")])


@pytest.fixture
def two(prefix: str, tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "other.jsonl").write_text('{"text": "another document, in words of its own"}\n' * 10)
    prepare([str(tmp_path / "other.jsonl")], str(tmp_path / "other"))
    return prefix, str(tmp_path / "other")


FORMS = {
    "blend": "--data-path 1 A 3 B --split 90,10,0",
    "unweighted blend": "--data-path A B --split 90,10",
    "blend in a file": "--data-args-path F --split 90,10,0",
    "a dataset a split": "--train-data-path A --valid-data-path B",
    "a blend a split": "--train-data-path 1 A 3 B --valid-data-path B",
    "blends a split in a file": "--per-split-data-args-path S",
}


def named(words: str, two: tuple[str, str], folder: Path) -> list[str]:
    """``words`` with the prefixes A and B, and F and S, files in ``folder`` that list both."""
    (folder / "blend").write_text(f"0.25 {two[0]}\n0.75 {two[1]}\n")
    splits = {"train": ["1", two[0], "3", two[1]], "valid": two[1], "test": None}
    (folder / "splits.json").write_text(json.dumps(splits))
    paths = {"A": two[0], "B": two[1], "F": str(folder / "blend"), "S": str(folder / "splits.json")}
    return [*(paths.get(word, word) for word in words.split()), *BYTES]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_is_verified_and_says_which_dataset_is_damaged(two: tuple[str, str], tmp_path: Path, form: str) -> None:
    words = named(form, two, tmp_path)
    assert verify_arguments(words) == f"data: {two[0]}, {two[1]} verified against their manifests"
    for prefix in two:
        whole = Path(prefix + ".bin").read_bytes()
        Path(prefix + ".bin").write_bytes(whole[:-2] + b"\7\0")
        with pytest.raises(DataError, match=f"{prefix}[.]bin"):
            verify_arguments(words)
        Path(prefix + ".bin").write_bytes(whole)
    os.unlink(two[1] + ".idx")
    with pytest.raises(DataError, match=f"{two[1]}[.]idx: No such file"):
        verify_arguments(words)


BAD_FORMS: dict[str, tuple[str, list[object]]] = {
    "whole and split": ("--data-path A --valid-data-path B", ["--data-path", "--valid-data-path"]),
    "list and file": ("--data-path A --data-args-path F", ["--data-path", "--data-args-path"]),
    "list and made up": ("--data-path A --mock-data", ["--data-path", "--mock-data"]),
    "shares of splits": ("--train-data-path A --split 90,10,0", ["--split 90,10,0", "--train-data-path"]),
    "no shares": ("--data-args-path F", ["--data-args-path", "--split"]),
    "negative share": ("--data-path A --split -98,2,0", ["'-98,2,0'"]),
    "no share": ("--data-path A --split 0,0,0", ["'0,0,0'"]),
    "other separator": ("--data-path A --split 98;2", ["'98;2'"]),
    "negative weight": ("--data-path -1 A 2 B", ["weight '-1'"]),
    "zero weight": ("--data-path 1 A 0 B", ["weight '0'"]),
    "weight of nothing": ("--data-path 1 A nan B", ["weight 'nan'"]),
    "no weight": ("--data-path 0.3 A two B", ["--data-path", "'two'"]),
}


SHARES = {  # A has 600 documents, B 10
    "default of stock": ("--data-path B", "validation"),
    "a blend": ("--data-path 1 A 3 B --split 90,8,2", "test"),
    "a weight for one": ("--data-path 1 B --split 99,1,0", "validation"),
    "a file": ("--data-args-path F --split 98,2,0", "validation"),
    "training": ("--data-path B --split 1,99,0", "training"),
    "no shares of any": ("--data-path B B --split 98,2,0", "validation"),
    "the first lacks it": ("--data-path 1 B 1 A --split 969,30,1", "validation"),
    "another one has it": ("--data-path B A --split 969,30,1", None),
    "every share has one": ("--data-path B --split 80,10,10", None),
}


SETS = {
    "no training": (
        "--data-path A --split 0,100,0 --eval-iters 1",
        ["training set", "--split 0,100,0", "--skip-train"],
    ),
    "none named": ("--valid-data-path A --eval-iters 1", ["training set", "--train-data-path"]),
    "no training wanted": ("--valid-data-path A --eval-iters 1 --skip-train", []),
    "a split without": ("--data-path A --split 100,0,0 --eval-iters 10", ["--split 100,0,0", "--eval-iters 10"]),
    "stock's number": ("--data-path A --split 100", ["--split 100", "--eval-iters 100"]),
    "named training": ("--train-data-path A --eval-iters 1", ["--eval-iters 1", "--valid-data-path"]),
    "the whole of none": (
        "--train-data-path A --test-data-path B --full-validation --eval-iters 0",
        ["--full-validation"],
    ),
    "none asked for": ("--data-path A --split 100,0,0 --eval-iters 0", []),
    "named validation": ("--train-data-path A --valid-data-path B --eval-iters 1", []),
}


REFUSED = {name: (words, ["set, and", *values] if values else []) for name, (words, values) in SETS.items()}
REFUSED |= {name: (words, ["other", 10, f"for {share}"] if share else []) for name, (words, share) in SHARES.items()}
REFUSED |= BAD_FORMS


@pytest.mark.parametrize(("words", "values"), REFUSED.values(), ids=REFUSED.keys())
def test_forms_that_stock_refuses_or_reads_otherwise_and_shares_or_sets_of_nothing_are_refused(
    two: tuple[str, str], tmp_path: Path, words: str, values: list[object]
) -> None:
    """Where stock ends at once, with status 0, or at the first evaluation, in "'NoneType' object is not an iterator"."""
    given = named(words, two, tmp_path)
    if not values:
        assert verify_arguments(given).startswith("data: ")
        return
    with raises(DataError, *values):
        verify_arguments(given)


NULL = "--tokenizer-type NullTokenizer --vocab-size"


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (f"{NULL} 260 --null-tokenizer-eod-id 0", "end-of-document", [256, 0]),
        (f"{NULL} 260", "end-of-document", [256, 259]),  # Megatron's default
        (f"{NULL} 100 --null-tokenizer-eod-id 256", "vocabulary", [260, 100]),
        (f"{NULL} abc", "", ["--vocab-size", "'abc'"]),
        # Padding does not move the default end of document.
        (f"{NULL} 384 --padded-vocab-size 384", "end-of-document", [383]),
        (f"{NULL} 257 --padded-vocab-size 258", "vocabulary", [260, 258]),
        (f"{NULL} 257 --padded-vocab-size 384", "", []),
    ],
)
def test_another_vocabulary_or_end_of_document_is_refused(prefix: str, words: str, code: str, values: list[object]) -> None:
    given = ["--data-path", prefix, *words.split()]
    if not values:
        assert "verified" in verify_arguments(given)
        return
    with raises(DataError, *values, code=code):
        verify_arguments(given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face tokenizer of 300 words, whose last is the end of document."""
    words = {"document": 0, "short": 1, "a": 2} | {f"w{n}": n for n in range(3, 300)}
    return save_words(tmp_path / "hf", words, eos_token="w299")


def test_a_tokenizer_that_changed_is_noticed(prefix: str, folder: Path, tmp_path: Path) -> None:
    prepare([str(tmp_path / "text.jsonl")], str(tmp_path / "words"), tokenizer=str(folder))
    words = ["--data-path", str(tmp_path / "words"), "--tokenizer-type", "HuggingFaceTokenizer"]
    words += ["--tokenizer-model", str(folder)]
    verify_arguments(words)
    verify_arguments(words, 300)
    with raises(DataError, folder, "300", "299"):
        verify_arguments(words, 299)
    content = (folder / "tokenizer.json").read_text()
    swapped = content.replace('"document": 0', '"document": 1').replace('"short": 1', '"short": 0')
    swapped = swapped.replace('"document":0', '"document":1').replace('"short":1', '"short":0')
    assert swapped != content
    (folder / "tokenizer.json").write_text(swapped)
    with raises(DataError, "words.bin", "huggingface", code="tokenizer"):
        verify_arguments(words)
    (tmp_path / "words.manifest.json").unlink()
    adopt(str(tmp_path / "words"), vocab_size=300, eod_id=299)  # it does not say which tokenizer made it
    verify_arguments(words)


def test_bytes_and_words_are_not_taken_for_each_other(prefix: str, folder: Path, tmp_path: Path) -> None:
    prepare([str(tmp_path / "text.jsonl")], str(tmp_path / "words"), tokenizer=str(folder))
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    for data, tokenizer, kind in ((prefix, words, "byte"), (str(tmp_path / "words"), BYTES, "huggingface")):
        with raises(DataError, data, kind, code="tokenizer"):
            verify_arguments(["--data-path", data, *tokenizer])
    null = f"{NULL} 300 --null-tokenizer-eod-id 299".split()
    verify_arguments(["--data-path", str(tmp_path / "words"), *null])  # ids as they are, whatever made them


def samples_of_the_first(prefixes: list[str], cache: str) -> int:
    """Have stock build, or find in its cache, the indices of a blend; the samples of its first dataset, of a document each."""
    blend = (prefixes, [1.0] * len(prefixes))
    return len(builder_of(cache, [4, 0, 0], blend=blend, split="1,0,0").build()[0].datasets[0].document_index)


def replace_dataset(prefix: str, documents: int) -> None:
    folder = Path(prefix).parent / "texts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(f"document {number:03d}")
    prepare([str(folder)], prefix, overwrite=True)


def test_a_cache_is_of_one_content_and_none_is_removed(prefix: str, tmp_path: Path) -> None:
    """Where a dataset is replaced at its path, also by files that are older than its cache, stock indexes the new one."""
    other = str(tmp_path / "other")
    replace_dataset(other, 6)
    replace_dataset(prefix, 4)
    words = ["--data-path", "1", prefix, "1", other, "--data-cache-path", str(tmp_path / "cache")]
    first = cache_words(words)[1]
    assert first == cache_words(["--data-path", other, prefix, "--data-cache-path", str(tmp_path / "cache")])[1]
    assert Path(first).parent == tmp_path / "cache"
    assert samples_of_the_first([prefix, other], first) == 4
    cached = sorted(Path(first).iterdir())
    assert cached

    (tmp_path / "elsewhere").mkdir()
    replace_dataset(str(tmp_path / "elsewhere" / "new"), 40)
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(f"{tmp_path / 'elsewhere' / 'new'}{suffix}", prefix + suffix)
        os.utime(prefix + suffix, (time.time() - 3600, time.time() - 3600))
    assert samples_of_the_first([prefix, other], first) == 4, "stock goes by the path alone"
    second = cache_words(words)[1]
    assert second != first
    assert samples_of_the_first([prefix, other], second) == 40
    assert sorted(Path(first).iterdir()) == cached


def test_the_cache_is_beside_the_first_dataset_unless_it_is_named(prefix: str) -> None:
    words = tokenizer_words(preset("nam56r_quarter"), data=prefix)  # of a wider model, the manifest's end of document
    assert words[-2:] == ("--null-tokenizer-eod-id", "256")
    verify_arguments(["--data-path", prefix, *words])
    (flag, folder) = cache_words(["--data-path", prefix])
    assert (flag, Path(folder).parent) == ("--data-cache-path", Path(prefix, "cache"))
    assert cache_words(["--mock-data"]) == []
    os.unlink(prefix + ".manifest.json")
    with pytest.raises(DataError, match=re.escape(prefix)):
        cache_words(["--data-path", prefix])


MARKS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")


@pytest.fixture
def fim_folder(tmp_path: Path) -> Path:
    """A Hugging Face tokenizer of bytes, with the tokens that Megatron's fill-in-the-middle dataset names by default."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *MARKS])
    (tmp_path / "fim").mkdir()
    tokenizer.save(str(tmp_path / "fim" / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<fim_pad>"}
    (tmp_path / "fim" / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "fim"


@pytest.fixture
def fim_words(fim_folder: Path, tmp_path: Path) -> list[str]:
    for number in range(8):
        (tmp_path / f"{number}.md").write_text(f"# document {number}\n" + "a sentence of the text, " * (number + 5))
    prepare([str(tmp_path / f"{number}.md") for number in range(8)], str(tmp_path / "set"), tokenizer=str(fim_folder))
    words = ["--data-path", str(tmp_path / "set"), "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    return [*words, str(fim_folder), "--split", "100,0,0", "--eval-iters", "0", "--fim-data"]


BAD_FIM = {
    "unknown token": ("--fim-middle-token <MID>", ["--fim-middle-token <MID>"]),
    "unknown separator": ("--fim-split-sample <file>", ["--fim-split-sample <file>"]),
    "one token twice": ("--fim-suffix-token=<fim_prefix>", ["--fim-prefix-token", "--fim-suffix-token"]),
    "another end": ("--fim-eod-token A", ["--fim-eod-token A", "id 256"]),
    "packed": ("--dataloader-inter-document-masking", ["--fim-data", "--dataloader-inter-document-masking"]),
    "bytes": (" ".join(BYTES), ["NullTokenizer"]),
}


@pytest.mark.parametrize(("extra", "values"), BAD_FIM.values(), ids=BAD_FIM.keys())
def test_what_fim_would_get_wrong_in_silence_is_refused(fim_words: list[str], extra: str, values: list[str]) -> None:
    ids = "<fim_prefix> = 257, <fim_middle> = 258, <fim_suffix> = 259, <fim_pad> = 260, <|endoftext|> = 256"
    assert f"; FIM tokens {ids}" in verify_arguments(fim_words)
    assert "FIM" not in verify_arguments(fim_words[:-1])
    with raises(DataError, *values):
        verify_arguments([*fim_words, *extra.split()])


def test_fim_of_a_tokenizer_that_adds_tokens_is_refused(fim_words: list[str], fim_folder: Path) -> None:
    content = json.loads((fim_folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
    template = {"single": [begin, text], "pair": [text, text], "special_tokens": special}
    content["post_processor"] = {"type": "TemplateProcessing"} | template
    (fim_folder / "tokenizer.json").write_text(json.dumps(content))
    Path(fim_words[1] + ".manifest.json").unlink()
    adopt(fim_words[1], vocab_size=261, eod_id=256)
    with raises(DataError, "1 tokens"):
        verify_arguments(fim_words)


def test_fim_of_a_tokenizer_that_is_not_read_here_is_said(prefix: str) -> None:
    words = ["--data-path", prefix, "--tokenizer-type", "SentencePieceTokenizer", "--vocab-size", "260", "--fim-data"]
    assert "--fim-data are not checked: the tokenizer" in verify_arguments(words)
