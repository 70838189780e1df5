"""The receipts in examples/receipts: valid, of real runs, and shown as their page says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.receipts import schema as receipt_schema

FOLDER = Path(__file__).parents[2] / "examples" / "receipts"
RECEIPTS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_committed_receipt_is_one_of_a_real_run(path: Path) -> None:
    receipt = receipts.read(path)
    receipt_schema.validate(receipt)
    assert (receipt["status"], receipt["device"], receipt["data"]["kind"]) == ("finished", "NVIDIA H200", "real")
    assert receipt["disqualifiers"] == []
    assert receipt["step_time"]["n"] >= 30
    assert receipt["loss"]["last"] < receipt["loss"]["first"] / 2
    ops = {row["op"] for row in receipt["backends"]}
    assert ops >= {"mla", "sparse_mla", "mamba3", "m2rnn", "experts", "linear", "loss"}


def test_the_command_of_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("megacpp-mcore ")]
    assert [cli.main(words) for words in commands] == [0]
    assert "NVIDIA H200" in capsys.readouterr().out
