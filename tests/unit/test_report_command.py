"""`report`: what a word of its command line may name, and what is said where it names something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacpp_mcore import cli

RECEIPT = Path(__file__).parents[2] / "examples" / "receipts" / "nam56r_quarter_h200_bf16.json"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder of checkpoints with what was recorded of their run beside them."""
    run = tmp_path / "checkpoints" / "observe"
    (run / "goodput").mkdir(parents=True)
    began = '{"began": 0, "host": "a", "pid": 1}\n{"at": 3000000000, "phases": {"startup": 3000000000}, "how": "finished"}\n'
    (run / "goodput" / "rank_00000.jsonl").write_text(began)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("action", ["show", "goodput", "html"])
def test_a_folder_without_a_run_names_the_one_that_was_meant(
    action: str, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", action, str(checkpoints)]) == 2
    error = capsys.readouterr().err
    assert f"{checkpoints} is no recorded run; expected the folder of a run that was observed" in error
    assert f"did you mean {checkpoints / 'observe'}?" in error
    assert cli.main(["report", action, str(checkpoints.parent)]) == 2
    assert f"did you mean {checkpoints / 'observe'}?" in capsys.readouterr().err


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "compare", str(RECEIPT), str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'x'} does not exist; expected the folder of a run that was observed, or a receipt" in error
    assert "Errno" not in error


def test_goodput_needs_the_whole_run(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "goodput", str(RECEIPT)]) == 2
    assert re.search(rf"{RECEIPT} is a file; expected .*, probably {RECEIPT.parent}", capsys.readouterr().err)
    assert cli.main(["report", "goodput", str(checkpoints / "observe")]) == 0
    assert capsys.readouterr().out == "rank 0: 0.0% of 3.0 s productive; startup 3.0 s\n"
