"""Tokenizers against the stock Megatron tokenizers that their flags build."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.data.tokenizer import BYTE_PAD_ID, END, ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, train
from megacpp_mcore.errors import DataError
from tests.data.hugging_face import save_words
from tests.errors import raises


def build_stock(flags: list[str]):
    """Parse ``flags`` with Megatron's own tokenizer arguments and build its tokenizer."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    args = _add_tokenizer_args(argparse.ArgumentParser()).parse_args(flags)
    args.rank, args.tensor_model_parallel_size, args.make_vocab_size_divisible_by = 0, 1, 128
    return build_tokenizer(args), args


def save_hf_folder(folder: Path, eos: object = "<eos>") -> Path:
    """Write a word-level tokenizer with one added special token."""
    words = {"<unk>": 0, "hello": 1, "world": 2, "ß": 3}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    return save_words(folder, words, ["<eos>"], eos_token=eos, **names)


def test_stock_byte_flags_give_our_vocabulary_and_end_of_document():
    ours = ByteTokenizer()
    stock, args = build_stock(ours.stock_flags())
    assert (stock.vocab_size, stock.eod, stock.pad) == (ours.vocab_size, ours.eod_id, BYTE_PAD_ID) == (260, 256, 258)
    assert args.padded_vocab_size == 384


def test_hugging_face_ids_and_end_of_document(tmp_path):
    environment = dict(os.environ)
    tokenizer = load_tokenizer(str(save_hf_folder(tmp_path / "hf")))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.encode("hello ß there".encode()).tolist() == [1, 3, 0]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (5, 4)
    assert dict(os.environ) == environment


def test_a_saved_truncation_and_padding_are_not_applied(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    path = str(save_hf_folder(tmp_path / "hf") / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(path)
    saved.enable_truncation(2)
    saved.enable_padding(length=8, pad_id=0, pad_token="<unk>")
    saved.save(path)
    tokenizer = HuggingFaceTokenizer(tmp_path / "hf")
    assert tokenizer.encode(b"hello world hello").tolist() == [1, 2, 1]
    assert tokenizer.encode(b"world").tolist() == [2]


def test_hugging_face_agrees_with_stock(tmp_path):
    pytest.importorskip("transformers", reason="stock's HuggingFaceTokenizer needs transformers, which is not installed")
    tokenizer = load_tokenizer(str(save_hf_folder(tmp_path / "hf")))
    stock, _ = build_stock(tokenizer.stock_flags())
    assert (stock.vocab_size, stock.eod) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert stock.tokenize("hello world") == tokenizer.encode(b"hello world").tolist()


@pytest.mark.parametrize("largest", [6, 65_541])
def test_ids_that_are_not_below_the_number_of_tokens_are_refused(tmp_path, largest):
    folder = save_hf_folder(tmp_path / "hf")
    body = json.loads((folder / "tokenizer.json").read_text())
    body["model"]["vocab"]["late"] = largest
    (folder / "tokenizer.json").write_text(json.dumps(body))
    with raises(DataError, "6 tokens", largest, "below 6"):
        HuggingFaceTokenizer(folder)


def test_hugging_face_damage_is_named(tmp_path):
    folder = tmp_path / "hf"
    for eos in (None, "</s>", 3):
        with raises(DataError, f"eos_token is {eos!r}"):
            HuggingFaceTokenizer(save_hf_folder(folder, eos))
    for name, content in (("tokenizer_config.json", "["), ("tokenizer.json", "{}"), ("tokenizer.json", None)):
        (folder / name).write_text(content or "")
        if content is None:
            (folder / name).unlink()
        with pytest.raises(DataError, match=re.escape(name)):
            HuggingFaceTokenizer(folder)
    with pytest.raises(DataError, match="'some-organisation/some-model'"):
        load_tokenizer("some-organisation/some-model")


def test_a_trained_tokenizer_gives_every_text_back_and_knows_its_corpus(tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    lines = [json.dumps({"code": f"for (int i = {n}; i < size; ++i)\n\tsum += values[i];\n"}) for n in range(50)]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    folder = str(tmp_path / "made" / "bpe")
    words = ["data", "tokenizer", str(tmp_path / "code.jsonl"), "--json-key", "code", "--output", folder]
    words += ["--vocab-size", "300"]
    assert cli.main(words) == 0
    assert f"{folder}: 300 ids; 0 ends a document" in capsys.readouterr().out
    made = load_tokenizer(folder)
    assert (made.vocab_size, made.eod_id, made.token_id(END), made.added_around_text()) == (300, 0, 0, 0)
    known, other = "values[i] += size;", "ümläut \t 漢字\r\n \x00"
    assert len(made.encode(known.encode())) < len(known) / 2
    for text in (known, other, " leading", ""):
        ids = made.encode(text.encode()).tolist()
        assert made.text(ids) == text
        assert made.bytes_of(ids) == len(text.encode())
    known, other = (made.encode(text.encode()).tolist() for text in ("ab ", "ü"))
    assert made.bytes_of([0, *known, 0, *other, 0]) == len("ab ü".encode())
    assert cli.main(words) == 2
    assert f"{folder} exists" in capsys.readouterr().err
    other = str(tmp_path / "other")
    for size, values in ((257, ["257", "more than 257"]), (0, ["0", "more than 257"])):
        with raises(DataError, *values):
            train([tmp_path / "code.jsonl"], other, size, json_key="code")
    with raises(DataError, "'code', a str", "--json-key"):
        train([tmp_path / "code.jsonl"], other, 300)
    (tmp_path / "empty.txt").touch()
    with raises(DataError, tmp_path / "empty.txt"):
        train([tmp_path / "empty.txt"], other, 300)
    assert not Path(other).exists()
    words[-3:] = [other, "--vocab-size", "9999"]
    assert cli.main(words) == 0
    assert re.search(rf"{other}: \d{{3}} ids in place of 9999", capsys.readouterr().out)


def test_bytes_of_specials(tmp_path: Path) -> None:
    """An end of document is no text, whether it is said to be special; other specials are spelled in the text."""
    vocabulary = {"<unk>": 0, "one": 1, "<end>": 2, "two": 3}
    made = load_tokenizer(str(save_words(tmp_path / "words", vocabulary, ["<sep>"], eos_token="<end>")))
    assert made.encode(b"one <sep> two").tolist() == [1, 4, 3]
    assert made.bytes_of([1, 4, 3]) == len(b"one <sep> two")
    assert made.bytes_of([1, 3, 2, 3, 2, 2, 1]) == len(b"one two") + len(b"two") + len(b"one")


def test_bytes_as_text():
    ids = [*"ü!".encode(), 256, 258]
    assert ByteTokenizer().text(ids) == "ü!"
    assert ByteTokenizer().bytes_of(ids) == 3
