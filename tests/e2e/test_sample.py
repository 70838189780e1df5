"""`sample` and `score`: with a model of known output, and with a checkpoint as a user runs them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.commands import cli
from megacpp_mcore.data.tokenizer import BYTE_EOD_ID, ByteTokenizer
from megacpp_mcore.errors import DataError
from megacpp_mcore.launch import launcher, sampling, schedule_search, scoring
from megacpp_mcore.launch.heldout import tokenizer_of
from megacpp_mcore.model import Layout
from megacpp_mcore.util import console
from tests import tiny_run
from tests.data.hugging_face import save_words
from tests.distributed import runs
from tests.errors import raises


class Counting(torch.nn.Module):
    """The byte after b is b + 1, and after 'z' the document ends; it refuses rows that are not the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows = 0

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None, **options: Any) -> torch.Tensor:
        context = options["inference_context"]
        assert context.sequence_len_offset == self.rows
        assert positions[0].tolist() == list(range(self.rows, self.rows + tokens.shape[1]))
        self.rows += tokens.shape[1]
        last = int(tokens[0, -1])
        logits = torch.full((1, 1, 260), -50.0)
        logits[0, 0, 259] = 90.0  # of the vocabulary's padding
        logits[0, 0, BYTE_EOD_ID if last == ord("z") else last + 1] = 50.0
        return logits


SETTINGS = {"seed": 1, "vocabulary": BYTE_EOD_ID + 1, "end": BYTE_EOD_ID}


@pytest.mark.parametrize(
    ("prompt", "count", "expected"), [(b"ab", 3, b"cde"), (b"x", 9, b"yz"), (b"z", 9, b""), (b"a", 0, b"")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_follow_one_another_until_the_document_ends(
    prompt: bytes, count: int, expected: bytes, temperature: float
) -> None:
    tokens = sampling.generate(Counting(), list(prompt), count, temperature=temperature, **SETTINGS)
    assert bytes(tokens) == expected


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="prompt"):
        list(sampling.generate(SimpleNamespace(), [], 1, temperature=0.0, **SETTINGS))


def test_more_tokens_than_learned_positions_are_refused() -> None:
    def most(tokens: int | None, kind: str = "learned_absolute", prompt: int = 10) -> int:
        asked = {"tokens": tokens, "position_embedding_type": kind, "max_position_embeddings": 16}
        return sampling.most_tokens(SimpleNamespace(**asked), prompt)

    assert most(7) == most(None) == 7  # the last of which is at no position
    assert (most(99, "rope"), most(None, "rope"), most(None, prompt=16)) == (99, sampling.TOKENS, 1)
    with raises(DataError, "--tokens is 8", "at most 7", "16"):
        most(8)
    with raises(DataError, "17 tokens", "16 positions", "shorter"):
        most(None, prompt=17)


def test_the_text_is_alone_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def script(*_: object) -> int:
        console.say("the policy")
        with console.redirected(tmp_path / "log"):
            console.say("a line")
            console.say("text", is_text=True)
        return 0

    monkeypatch.setattr(launcher, "launch_script", script)
    assert cli.main(["sample", "--", "--load", "saved"]) == 0
    assert capsys.readouterr() == ("text\n", "the policy\na line\n")


def test_text_comes_in_whole_characters() -> None:
    prompt, rest = b"a\xc3", b"\xbc\xe6\xbc\xa2b\xff"
    parts = list(sampling.streamed(list(prompt), rest, ByteTokenizer().text))
    assert parts == ["a", "ü", "漢", "b", "\ufffd"]


def test_the_tokenizer_is_that_of_the_run(tmp_path: Path) -> None:
    def of(kind: str, model: object = None, eod: int | None = None) -> Any:
        return tokenizer_of(SimpleNamespace(tokenizer_type=kind, tokenizer_model=model, null_tokenizer_eod_id=eod))

    folder = save_words(tmp_path / "words", {"<unk>": 0, "one": 1}, ["<eos>"], eos_token="<eos>")
    assert of("NullTokenizer", eod=BYTE_EOD_ID).kind == "byte"
    assert of("HuggingFaceTokenizer", str(folder)).eod_id == 2
    for kind, eod in (("NullTokenizer", 1), ("GPT2BPETokenizer", None)):
        with raises(DataError, f"--tokenizer-type {kind} --tokenizer-model a folder"):
            of(kind, "a folder", eod)


@pytest.mark.parametrize(
    ("words", "script", "options"),
    [
        ("sample --prompt=-y --tokens 3", sampling, "--prompt=-y --tokens=3 --temperature=0.8"),
        ("score --heldout text --nproc 2", scoring, "--heldout=text --batch=8"),
        (
            "advise index-cache --heldout text --tokens 9", schedule_search,
            "--heldout=text --tokens=9 --batch=8 --tolerance=0.001",
        ),
    ],
)  # fmt: skip
def test_a_command_is_a_launch(words: str, script: Any, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(launcher, "launch", lambda *args, **more: launched.append((args, more)) or 0)
    assert cli.main([*words.split(), "--device", "cpu", "--", "--load", "x"]) == 0
    (((command,), more),) = launched
    assert command == [script.__file__, "--load", "x", "--skip-train", *options.split()]
    assert (more["device"], more["recording"]) == ("cpu", launcher.Recording(no_observe=True))
    assert more["nproc"] == (2 if "--nproc" in words else 1)


ADVISE = "advise index-cache --heldout text"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("sample --tokens 0", "whole number, 1 or more"),
        ("score --heldout x --batch -1", "whole number, 1 or more"),
        (f"{ADVISE} --tokens -5", "whole number, 1 or more"),
        (f"{ADVISE} --batch two", "whole number, 1 or more"),
        (f"{ADVISE} --tolerance -1", "finite number, 0 or more"),
        (f"{ADVISE} --tolerance nan", "finite number, 0 or more"),
        (f"{ADVISE} --tolerance much", "finite number, 0 or more"),
    ],
)
def test_numbers_are_checked_at_once(words: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--", "--load", "x"])
    assert f"found {words.split()[-1]!r}, expected a {kind}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_is_sampled_from_and_scored(data: Path, tmp_path: Path) -> None:
    saved, file = str(tmp_path / "saved"), tmp_path / "score.json"
    launch = ("megacpp_mcore", "launch", "--device", "cpu", "--no-observe", "--")
    words = tiny_run.words(data, 2)
    tiny_run.start(launch, [*words, "--save", saved, "--save-interval", "2"], data).finish()
    sample = ("megacpp_mcore", "sample", "--device", "cpu", "--prompt", "def f", "--tokens", "20", "--")
    trained = ((), ("--finetune",))  # the words of a run that began from another's weights, too
    printed = [tiny_run.start(sample, ["--load", saved, *more, *words], data).finish() for more in trained]
    samples = [text[text.index("\ndef f") :] for text in printed]
    assert samples[0] == samples[1]
    assert len(samples[0]) > len("\ndef f\n")
    score = (
        "megacpp_mcore",
        "score",
        "--device",
        "cpu",
        "--heldout",
        str(data / "text"),
        "--tokens",
        "200",
        "--batch",
        "1",
    )
    output = tiny_run.start((*score, "--output", str(file), "--"), ["--load", saved, *words], data).finish()
    scores = json.loads(file.read_text())
    file.unlink()
    assert f"bits per byte {scores['bits_per_byte']:.6f} (unigram {scores['unigram_bits_per_byte']:.6f})" in output
    assert (scores["tokens"], scores["bytes"], scores["step"]) == (199, 199, 2)
    assert scores["perplexity"] == pytest.approx(2 ** scores["bits_per_byte"])
    assert 0 < math.log(scores["perplexity"]) < 7
    split, stages = Layout(tensor=2, sequence_parallel=True, expert=2), Layout(pipeline=2)
    in_two = (*score, "--nproc", "2", "--output", str(file), "--")
    for layout in (None, Layout(expert=2), split):
        tiny_run.start(in_two, ["--load", saved, *tiny_run.words(data, 2, layout=layout)], data).finish()
        again = json.loads(file.read_text())
        file.unlink()
        assert again | {"seconds": 0} == pytest.approx(scores | {"seconds": 0}, rel=1e-6), layout
    for layout, what in ((stages, "pipeline stages"), (Layout(context=2), "context-parallel ranks")):
        refused = tiny_run.words(data, 2, layout=layout)
        assert f"2 {what}; expected 1" in tiny_run.start(in_two, ["--load", saved, *refused], data).finish(2)
    for layout in (split, stages):
        converted = tmp_path / str(layout.pipeline)
        without = "--no-load-optim --no-load-rng --no-save-optim --ckpt-convert-format torch_dist --ckpt-convert-save"
        more = ["--load", saved, *without.split(), str(converted)]
        status, printed = runs.launch(["--", *tiny_run.words(data, 3, *more, layout=layout)], data / "config.yaml", 2)
        assert status == 0, printed[-3000:]
        load = ["--load", str(converted / "torch_dist"), *words]
        tiny_run.start((*score, "--output", str(file), "--"), load, data).finish()
        assert json.loads(file.read_text()) | {"seconds": 0} == pytest.approx(scores | {"seconds": 0}, rel=1e-9)
        file.unlink()
