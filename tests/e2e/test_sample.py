"""examples/sample.py: what a model that is known says, and a checkpoint as a user samples from it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.data.tokenizer import BYTE_EOD_ID
from megacpp_mcore.errors import DataError
from tests import tiny_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def sample() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("sample")


class Counting(torch.nn.Module):
    """The byte after b is b + 1, and after 'z' the document ends; it refuses rows that are not the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows = 0

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None, **given: Any) -> torch.Tensor:
        context = given["inference_context"]
        assert context.sequence_len_offset == self.rows
        assert positions[0].tolist() == list(range(self.rows, self.rows + tokens.shape[1]))
        self.rows += tokens.shape[1]
        last = int(tokens[0, -1])
        logits = torch.full((1, 1, 260), -50.0)
        logits[0, 0, 259] = 90.0  # of the vocabulary's padding
        logits[0, 0, BYTE_EOD_ID if last == ord("z") else last + 1] = 50.0
        return logits


@pytest.mark.parametrize(
    ("prompt", "count", "expected"), [(b"ab", 3, b"cde"), (b"x", 9, b"yz"), (b"z", 9, b""), (b"a", 0, b"")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_follow_one_another_until_the_document_ends(
    sample: ModuleType, prompt: bytes, count: int, expected: bytes, temperature: float
) -> None:
    assert bytes(sample.generate(Counting(), prompt, count, temperature, 1)) == expected


def test_an_empty_prompt_is_refused(sample: ModuleType) -> None:
    with pytest.raises(DataError, match="prompt"):
        list(sample.generate(SimpleNamespace(), b"", 1, 0.0, 1))


@pytest.mark.parametrize(
    "tokens",
    [("HuggingFaceTokenizer", 0), ("NullTokenizer", 1)],
    ids=["a tokenizer's", "ids with another end of document"],
)
def test_tokens_that_are_no_bytes_are_not_printed_as_text(
    sample: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, int]
) -> None:
    kind, eod = tokens
    args = SimpleNamespace(tokenizer_type=kind, tokenizer_model="a folder", null_tokenizer_eod_id=eod)
    monkeypatch.setattr("megatron.training.arguments.parse_and_validate_args", lambda *_, **__: args)
    with pytest.raises(DataError, match=f"--tokenizer-type {kind} --tokenizer-model a folder"):
        sample.main()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_is_sampled_from(tmp_path: Path) -> None:
    data = tiny_run.make_data(tmp_path)
    saved = str(tmp_path / "saved")
    launch = ("megacpp_mcore", "launch", "--device", "cpu", "--no-observe", "--")
    words = tiny_run.words(data, 2)
    tiny_run.start(launch, [*words, "--save", saved, "--save-interval", "2"], data).finish()
    command = [str(EXAMPLES / "sample.py"), "--prompt", "def f", "--sample-tokens", "20", "--load", saved, *words]
    printed = [tiny_run.start(launch, command, data).finish() for _ in range(2)]
    samples = [text[text.index("\ndef f") :].partition("INFO:")[0] for text in printed]
    assert samples[0] == samples[1]
    assert len(samples[0]) > len("\ndef f\n")
