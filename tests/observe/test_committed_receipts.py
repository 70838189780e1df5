"""The receipts in examples/receipts: valid, of real runs, and shown as their page says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.model.recipes import recipe
from megacpp_mcore.observe import receipts
from megacpp_mcore.util import text

FOLDER = Path(__file__).parents[2] / "examples" / "receipts"
RECEIPTS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_committed_receipt_is_one_of_a_real_run(path: Path) -> None:
    receipt = receipts.read(path)
    assert path.read_text(encoding="utf-8") == text.dumps(receipt) + "\n"
    assert (receipt["status"], receipt["data"]["kind"]) == ("finished", "real")
    assert receipt["device"].startswith("NVIDIA H100" if "h100" in path.stem else "NVIDIA H200")
    assert receipt["disqualifiers"] == []
    assert receipt["step_time"]["n"] >= 30
    assert receipt["loss"]["last"] < receipt["loss"]["first"] / 2
    ops = {row["op"] for row in receipt["backends"]}
    assert ops >= {"mla", "sparse_mla", "mamba3", "m2rnn", "experts", "linear", "loss"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_pretrain_*.json")), ids=lambda path: path.stem)
def test_a_recipe_trained_what_it_says_today(path: Path) -> None:
    spec, receipt = recipe(path.stem), receipts.read(path)
    training, batch = spec.run.training, receipt["batch"]
    assert receipt["model"]["definition"] == json.loads(json.dumps(spec.model.record()))
    assert receipt["parallelism"]["expert"] == spec.run.layout.expert
    assert (receipt["parallelism"]["data"], batch["micro_batch_size"], batch["global_batch_size"]) == (
        spec.processes,
        training.micro_batch_size,
        training.global_batch_size,
    )
    assert any(row["op"] == "cuda_graph" for row in receipt["backends"]) == training.cuda_graphs


def test_the_command_of_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("megacpp-mcore ")]
    assert [cli.main(words) for words in commands] == [0]
    assert "NVIDIA H200" in capsys.readouterr().out
