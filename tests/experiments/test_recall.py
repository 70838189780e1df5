"""Needles and copies: what a row holds, what Megatron's samples are, and that a checkpoint is asked for the right answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments import recall, recall_answers
from megacpp_mcore.data.index import read_index
from megacpp_mcore.data.manifest import load_manifest
from megacpp_mcore.launch import heldout


@pytest.mark.parametrize(("length", "vocabulary"), [(256, 128), (4096, 1024)])
def test_every_answer_stands_once_in_reach_and_was_last_at_its_distance(length: int, vocabulary: int) -> None:
    tokens_L, items = recall.row(length, vocabulary, 1, 0)
    assert len(items) == length // 32 * (recall.TIMES - 1) + length // 128
    assert tokens_L[-1] == recall.EOD
    assert tokens_L[:-1].min() > recall.EOD
    assert tokens_L.max() < vocabulary
    for item in items:
        fact, query = (tokens_L[start : start + item.answer + 1] for start in (item.query - item.distance, item.query))
        assert np.array_equal(fact, query)
        before = np.flatnonzero(tokens_L[: item.query] == query[0])
        assert before[-1] == item.query - item.distance  # nothing nearer answers it
        assert item.distance >= recall.NEAREST
    assert len({item.query for item in items}) == len(items)
    again, others = recall.row(length, vocabulary, 1, 0)[0], recall.row(length, vocabulary, 1, 1)[0]
    assert np.array_equal(again, tokens_L)
    assert not np.array_equal(others, tokens_L)


def test_a_drill_is_a_few_needles_again_and_again() -> None:
    numbers = set[int]()
    for number in range(40):
        tokens_L = recall.drill(257, 128, 1, number)
        assert (len(tokens_L), tokens_L[-1]) == (257, recall.EOD)
        needles = {int(key): int(value) for key, value in tokens_L[:-1].reshape(-1, 2)}
        assert [needles[int(key)] for key in tokens_L[:-1:2]] == tokens_L[1:-1:2].tolist()
        assert recall.FILLERS <= min(needles) <= max(needles) < 64 <= min(needles.values()) <= max(needles.values()) < 128
        numbers.add(len(needles))
    assert 2 == min(numbers) < max(numbers) < recall.DRILLED
    assert np.array_equal(recall.drill(257, 128, 1, number), tokens_L)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=r" 4096 .* 160 .* 128 .* 32;"):
        recall.row(4096, 128, 1, 0)
    with pytest.raises(ValueError, match="256 to 32768 "):
        recall.row(128, 4096, 1, 0)


def test_a_dataset_has_a_document_a_row(tmp_path: Path) -> None:
    prefix = tmp_path / "rows" / "train"
    words = ["--length", "256", "--vocab-size", "128", "--rows", "3", "--drills", "2", "--seed", "5"]
    assert recall.main(["data", str(prefix), *words]) == 0
    index, manifest = read_index(str(prefix)), load_manifest(str(prefix))
    assert index.lengths_S.tolist() == [256] * 5
    assert manifest.tokenizer["vocab_size"] == 128
    assert manifest.tokenizer["eod_id"] == recall.EOD
    drills, rows = [recall.drill(256, 128, 5, n) for n in range(2)], [recall.row(256, 128, 5, n)[0] for n in range(3)]
    assert np.array_equal(index.open_tokens(), np.concatenate(drills + rows))


def test_answers_are_counted_by_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model predicts the token that last followed the current one, within 100 tokens."""

    class Model(torch.nn.Linear):
        def forward(self, tokens_1L: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            row = tokens_1L[0].tolist()
            logits_LV = torch.zeros(len(row), 128)
            for place, token in enumerate(row):
                for back in range(max(0, place - 100), place):
                    if row[back] == token:
                        logits_LV[place, row[back + 1]] = 1 + back
            return logits_LV[None]

    options = SimpleNamespace(
        seq_length=256, vocab_size=128, recall_rows=4, recall_seed=3, recall_output=tmp_path / "found", iteration=7
    )
    monkeypatch.setattr(heldout, "parsed", lambda _: options)
    monkeypatch.setattr(heldout, "load_model", lambda _: Model(1, 1))
    recall_answers.main()
    items = [item for number in range(4) for item in recall.row(256, 128, 3, number)[1]]
    answers = json.loads(options.recall_output.read_text())
    assert answers["step"] == 7
    (copies, needles) = answers["counts"]
    far = [item.distance for item in items if item.task == recall.NEEDLE]
    near = sum(distance <= 100 for distance in far)
    assert 0 < near < len(far)
    assert needles == [recall.NEEDLE, 16, 256, len(far), round(near / len(far), 4)]
    assert copies[:4] == [recall.COPY, 16, 256, len(items) - len(far)]
    assert recall.counted(items, [True] * len(items))[0][-1] == 1.0
