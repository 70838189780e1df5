"""Held-out text: which tokens are predicted, and how they are counted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.score import byte_counts, entropy, unigram_bits_per_byte
from megacpp_mcore.errors import DataError
from megacpp_mcore.launch import heldout
from tests.errors import raises


class Unigram(torch.nn.Module):
    """A model that gives every token its share in ``tokens``, whatever is before it."""

    def __init__(self, tokens: np.ndarray) -> None:
        super().__init__()
        share = np.bincount(tokens, minlength=260) / tokens.size
        self.nats = torch.nn.Parameter(torch.from_numpy(-np.log(np.maximum(share, 1e-30))))

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, mask: None, labels: torch.Tensor) -> torch.Tensor:
        assert inputs.shape == positions.shape == labels.shape
        assert mask is None
        return self.nats[labels]


@given(st.integers(2, 300), st.integers(1, 40))
def test_every_token_but_the_first_is_a_label_once_after_its_predecessor(count: int, sequence: int) -> None:
    windows = heldout.cut_windows(np.arange(count), sequence)
    assert windows.inputs_WS.shape == windows.labels_WS.shape == windows.mask_WS.shape
    assert windows.inputs_WS.shape[1] == sequence
    assert windows.labels_WS[windows.mask_WS].tolist() == list(range(1, count))
    assert windows.inputs_WS[windows.mask_WS].tolist() == list(range(count - 1))
    # Only the end of the last window is padding.
    assert windows.mask_WS[:-1].all()
    assert windows.mask_WS[-1, 0]


def test_too_few_tokens() -> None:
    with raises(DataError, "1 tokens", 2):
        heldout.cut_windows(np.zeros(1, dtype=np.int64), 8)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_score_of_a_known_model(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.frombuffer(b"to be or not to be, that is the question", dtype=np.uint8).astype(np.int64)
    windows = heldout.cut_windows(tokens, 8)
    labels = tokens[1:]
    model = Unigram(labels)
    score = heldout.score_windows(model, windows, batch)
    assert score.bytes == len(labels)
    assert score.value == pytest.approx(entropy(byte_counts(labels)), rel=1e-12)
    assert f"of {len(windows.inputs_WS)} windows" in capsys.readouterr().out


@pytest.mark.parametrize(("batch", "replicas"), [(1, 2), (2, 2), (2, 4), (100, 3)])
def test_replicas_share_the_windows(batch: int, replicas: int) -> None:
    tokens = np.frombuffer(b"to be or not to be, that is the question", dtype=np.uint8).astype(np.int64)
    windows = heldout.cut_windows(tokens, 8)
    model, shapes = Unigram(tokens[1:]), []
    model.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    whole = heldout.score_windows(model, windows, 8)
    shapes.clear()
    parts = [heldout.score_windows(model, windows, batch, replica=one, replicas=replicas) for one in range(replicas)]
    assert sum(part.bytes for part in parts) == whole.bytes
    assert sum(part.nats for part in parts) == pytest.approx(whole.nats, rel=1e-12)
    # Whose experts wait for one another.
    assert len(set(shapes)) == 1
    assert len(shapes) % replicas == 0


def test_ends_of_documents_cost_nats_and_are_no_bytes(tmp_path: Path) -> None:
    for name, text in (("a", "abab" * 9), ("b", "baba" * 9)):
        (tmp_path / f"{name}.txt").write_text(text)
    (prefix,) = prepare([tmp_path], str(tmp_path / "data"))
    tokens, manifest = heldout.read_heldout(prefix, None)
    assert manifest.text_bytes == 72
    assert tokens.size == 74
    assert heldout.read_heldout(prefix, 5)[0].tolist() == tokens[:5].tolist()
    assert entropy(byte_counts(tokens)) == pytest.approx(unigram_bits_per_byte(prefix), rel=1e-12)
    windows = heldout.cut_windows(tokens, 16)
    score = heldout.score_windows(Unigram(tokens), windows, 4)
    assert score.bytes == 71
    # 71 bytes of share 36/74 each, and two ends of share 2/74.
    nats = 71 * math.log(74 / 36) + 2 * math.log(74 / 2)
    assert score.value == pytest.approx(nats / math.log(2) / 71, rel=1e-12)
