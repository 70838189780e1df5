"""`report`: what its arguments may name, and the messages for anything else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.commands.report import BEATS
from megacpp_mcore.observe.events import FINISHED
from megacpp_mcore.observe.receipts.fields import FIELDS, RUNNING
from tests.observe.recorded import at, write_start

RECEIPT = Path(__file__).parents[2] / "examples" / "receipts" / "nam56r_quarter_h200_bf16.json"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with checkpoints and the record of their run."""
    write_start(tmp_path / "checkpoints" / "observe", 1, 0, at(3, {"startup": 3}, how="finished"))
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("action", ["show", "goodput", "html"])
def test_a_folder_without_a_run_names_the_one_that_was_meant(
    action: str, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", action, str(checkpoints)]) == 2
    error = capsys.readouterr().err
    assert f"{checkpoints} is not a recorded run; expected the folder of a run that was observed" in error
    assert f"did you mean {checkpoints / 'observe'}?" in error
    assert cli.main(["report", action, str(checkpoints.parent)]) == 2
    assert f"did you mean {checkpoints / 'observe'}?" in capsys.readouterr().err


def test_goodput_needs_the_whole_run(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "goodput", str(RECEIPT)]) == 2
    assert re.search(rf"{RECEIPT} is a file; expected .*, probably {RECEIPT.parent}", capsys.readouterr().err)
    assert cli.main(["report", "goodput", str(checkpoints / "observe")]) == 0
    assert capsys.readouterr().out == "rank 0: 0.0% of 3.0 s productive; startup 3.0 s\n"
    assert cli.main(["report", "goodput", "--json", str(checkpoints / "observe")]) == 0
    assert json.loads(capsys.readouterr().out)["0"]["seconds"]["startup"] == 3.0


def of_ranks(run: Path, silent_s: Mapping[int, float], ended: tuple[int, ...] = (), beat_s: float = 1.0) -> Path:
    """Write the folder of a run whose ranks sent their last heartbeat that many seconds ago."""
    for rank, seconds in silent_s.items():
        last = at(time.time() - seconds, {}, **({"how": FINISHED} if rank in ended else {}))
        write_start(run, 1, rank, last, began=0, world_size=len(silent_s), heartbeat_s=beat_s)
    return run


def shown(place: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["report", "show", str(place)]) == 0
    return capsys.readouterr().out.splitlines()


KILLED = "it was probably killed: a live process leaves one every"


@pytest.mark.parametrize(
    ("silent_s", "ended", "beat_s", "line"),
    [
        ({0: 1}, (), 1, r"\d s ago"),
        ({0: 600}, (), 1, f"10 min ago; {KILLED} 1 s .*"),
        ({0: 1, 1: 7200, 2: 2 * 86400}, (2,), 1, f"2 h ago, of rank 1, the longest silent of 2; {KILLED} .*"),
        ({0: (BEATS - 0.5) * 1000}, (), 1000, r"75 min ago"),
        ({0: (BEATS + 0.5) * 1000}, (), 1000, f"92 min ago; {KILLED} 1000 s .*"),
    ],
)
def test_a_live_run_is_told_from_a_killed_one(
    tmp_path: Path, silent_s: dict[int, float], ended: tuple[int, ...], beat_s: float, line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = of_ranks(tmp_path, silent_s, ended, beat_s)
    status, alive, *_ = shown(run, capsys)
    assert cli.main(["report", "show", "--json", str(run)]) == 0
    assert [*status.split(), json.loads(capsys.readouterr().out)["status"]] == ["status", *2 * [RUNNING]]
    assert re.fullmatch(f"last sign of life {line}", alive)


def test_the_memory_of_a_process_is_called_that_and_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = json.loads(RECEIPT.read_text(encoding="utf-8"))
    labels = ("peak allocated", "peak reserved", "peak resident set")
    allocated, reserved = (receipt["memory"][f"{name}_peak_bytes"] for name in ("allocated", "reserved"))
    assert [line for line in shown(RECEIPT, capsys) if line.startswith(labels)] == [
        f"peak allocated    {allocated / 1e9:.3g} GB",
        f"peak reserved     {reserved / 1e9:.3g} GB",
    ]
    receipt["memory"] |= {"kind": "resident set", "allocated_peak_bytes": 123456, "reserved_peak_bytes": 123456}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    lines = shown(tmp_path / "receipt.json", capsys)
    assert [line for line in lines if line.startswith(labels)] == ["peak resident set 123 kB"]


def test_fields_prints_every_field_of_a_receipt(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "fields"]) == 0
    printed = capsys.readouterr().out
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == [field.path for field in FIELDS]
