"""Another DSA schedule for a checkpoint: whose indexers go and come, and that training goes on with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.commands import cli
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe.steps import read_steps
from tests import tiny_run
from tests.saved import tensors_in, write

INDEXER = "decoder.layers.{}.self_attention.core_attention.indexer.linear_wk.weight"
OTHER = "decoder.layers.4.self_attention.linear_proj.weight"


def save(folder: Path, *layers: int) -> Path:
    """A checkpoint with an indexer in ``layers`` (1-based), whose values are the layer's number, and Adam's mean of each."""
    tensors = {OTHER: torch.ones(2, 3)}
    for layer in layers:
        name = INDEXER.format(layer - 1)
        tensors[name] = torch.full((2, 3), float(layer))
        tensors[f"optimizer.state.exp_avg.{name}"] = torch.full((2, 3), layer / 10)
    write(folder / "iter_0000030", tensors)
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    return folder


def command(folder: Path, schedule: str) -> list[str]:
    words = ["checkpoint", "schedule", str(folder / "old"), str(folder / "new"), "--model", "nam56r_tiny"]
    return [*words, f"--schedule={schedule}"]


@pytest.mark.parametrize(
    ("before", "schedule", "after", "says"),
    [
        ((5,), "-FF", {5: 5.0, 9: 5.0}, "became Shared: none; that became Full: 9 (as 5)"),
        ((5, 9), "-FS", {5: 5.0}, "became Shared: 9; that became Full: none"),
        ((5,), "-FS", {5: 5.0}, "became Shared: none; that became Full: none"),
    ],
)
def test_indexers_go_and_come(
    before: tuple[int, ...],
    schedule: str,
    after: dict[int, float],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path / "old", *before)
    assert cli.main(command(tmp_path, schedule)) == 0
    assert says in capsys.readouterr().out
    found = tensors_in(tmp_path / "new" / "iter_0000030")
    expected = {OTHER: 1.0}
    for layer, value in after.items():
        name = INDEXER.format(layer - 1)
        expected |= {name: value, f"optimizer.state.exp_avg.{name}": value / 10}
    assert {name: float(tensor.unique()) for name, tensor in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("before", "schedule", "says"),
    [
        ((9,), "-FF", "layer 5 is to become Full and no layer before it has an indexer"),
        (
            (1, 5),
            "-FF",
            "has an indexer in layer 1 and nam56r_tiny with the schedule -FF has no sparse attention there",
        ),
        ((5, 29), "-FF", "has an indexer in layer 29 and nam56r_tiny with the schedule -FF ends before it"),
        ((), "-FF", "has no DSA indexer"),
        ((5,), "-SF", "layer 5 is Shared"),
    ],
)
def test_what_cannot_be_is_refused(
    before: tuple[int, ...], schedule: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "old", *before)
    assert cli.main(command(tmp_path, schedule)) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def words_of(prefix: Path, schedule: str) -> list[str]:
    model = with_overrides(preset("nam56r_tiny"), {"dsa": {"schedule": schedule, "topk": 512}})
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        data=("--data-path", str(prefix), "--split", "100,0,0"),
        tokenizer=tokenizer_words(model),
        global_batch_size=2,
        train_iters=4,
    )
    return list(lower(model, Layout(), training))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "second"), [("-FS", "-FF"), ("-FF", "-FS")])
def test_training_goes_on(first: str, second: str, tmp_path: Path) -> None:
    """Optimizer state included; the losses of the next step are those of the schedule before, but for the selections."""
    (prefix,) = prepare([Path(cli.__file__)], str(tmp_path / "text"))
    steps = {}
    for schedule, load in ((first, None), (first, "old"), (second, "new")):
        (tmp_path / "config.yaml").write_text(
            f"model: nam56r_tiny\noverrides: {{dsa: {{schedule: '{schedule}', topk: 512}}}}\n"
        )
        words = words_of(prefix, schedule)
        words += ["--exit-interval", "2"] if load is None else []
        words += ["--load", str(tmp_path / load)] if load else ["--save", str(tmp_path / "old"), "--save-interval", "2"]
        record = tmp_path / f"{load}.jsonl"
        launch = ("megacpp_mcore", "launch", "--device", "cpu", "--no-observe", "--record-steps", str(record), "--")
        output = tiny_run.start(launch, words, tmp_path).finish()
        assert re.search(r"iteration +\d+/", output)
        steps[load] = {step.step: step.losses["lm loss"] for step in read_steps(record)}
        if load is None:
            assert cli.main(command(tmp_path, second)) == 0
    assert list(steps["new"]) == list(steps["old"]) == [3, 4]
    assert steps["new"] == pytest.approx(steps["old"], rel=1e-5)  # every key is selected, whoever selects
