"""Bits per byte: the unigram bound and the accounting of a model's loss."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from megacpp_mcore.data.manifest import adopt
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.score import BitsPerByte, unigram_bits_per_byte
from megacpp_mcore.errors import DataError
from tests.errors import raises


def prepare_texts(tmp_path, *texts: str) -> str:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    return prepare([tmp_path], str(tmp_path / "data"))[0]


@pytest.mark.parametrize(("texts", "bits"), [(["abcd" * 10, "abcd"], 2.0), (["aaaa", "a"], 0.0)])
def test_unigram_of_known_distributions(tmp_path, texts, bits):
    assert unigram_bits_per_byte(prepare_texts(tmp_path, *texts)) == pytest.approx(bits, abs=1e-12)


def test_unigram_counts_the_bytes_and_only_them(tmp_path):
    texts = ["Füße 漢字 — hello", "world\n" * 5, "x"]
    counts = Counter("".join(texts).encode())
    total = counts.total()
    expected = -sum(n / total * math.log2(n / total) for n in counts.values())
    assert unigram_bits_per_byte(prepare_texts(tmp_path, *texts)) == pytest.approx(expected, rel=1e-12)


def test_unigram_refuses_what_was_not_made_of_bytes(tmp_path):
    prefix = prepare_texts(tmp_path, "text")
    (tmp_path / "data.manifest.json").unlink()
    adopt(prefix, vocab_size=260, eod_id=256)
    with raises(DataError, "tokenizer None", "--tokenizer byte"):
        unigram_bits_per_byte(prefix)


@pytest.mark.parametrize(("nats", "bytes_"), [(math.nan, 1), (math.inf, 1), (-1.0, 1), (1.0, -1)])
def test_impossible_losses_are_refused(nats, bytes_):
    score = BitsPerByte()
    with raises(DataError, nats, bytes_):
        score.add(nats, bytes_)
    with raises(DataError, code="no-bytes"):
        _ = score.value
