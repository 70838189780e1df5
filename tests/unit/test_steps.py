"""Recorded steps: reading a file that grows, and comparing two recordings."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.steps import Step, StepReader, StepRecorder, compare, kept, read_steps


def step(number: int, loss: float = 2.0, **changes: object) -> Step:
    values = {
        "step": number,
        "resumed_at": 0,
        "time_s": 100.0 + number,
        "tokens": 2048 * number,
        "losses": {"lm loss": loss, "mtp_1 loss": 3.0},
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "skipped": False,
    }
    return Step(**{**values, **changes})  # type: ignore[arg-type]


def line(one: Step) -> str:
    return json.dumps(asdict(one)) + "\n"


def test_a_growing_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    reader = StepReader(path)
    assert reader.read_new() == []
    second = line(step(2, 1 / 3))
    path.write_text(line(step(1)) + second[:20])
    assert reader.read_new() == [step(1)]
    assert reader.read_new() == []
    path.write_text(line(step(1)) + second)
    assert reader.read_new() == [step(2, 1 / 3)]
    assert read_steps(path) == [step(1), step(2, 1 / 3)]


@pytest.mark.parametrize("damage", ["no JSON", "[]", "7", '{"step": 1}', '{"step": 1, "other": 2}'])
@pytest.mark.parametrize("after", ["", line(step(3)), line(step(1))])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str, after: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1)) + damage + "\n" + after)
    with pytest.raises(DataError, match=r"steps\.jsonl, line 2: not the record of a step"):
        read_steps(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected a file of steps"):
        read_steps(tmp_path / "steps.jsonl")


@pytest.mark.parametrize("end", ["", "\n", "\n" + line(step(2, resumed_at=1)), "\n" + line(step(1))])
def test_a_line_cut_short_at_the_end_of_a_start_is_left_out(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1)) + line(step(2))[:-9] + end)
    assert read_steps(path) == [step(1), *(Step(**json.loads(one)) for one in end.splitlines() if one)]
    assert "steps.jsonl, line 2: " in caplog.text


def test_a_line_cut_short_inside_of_a_start_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1)) + line(step(2))[:-9] + "\n" + line(step(3)))
    with pytest.raises(DataError, match=r"steps\.jsonl, line 2: .*cut short, and the same start goes on"):
        read_steps(path)
    reader = StepReader(path)
    path.write_text(line(step(1)) + line(step(2))[:-9] + "\n")
    assert reader.read_new() == [step(1)]
    with path.open("a") as stream:
        stream.write(line(step(3)))
    with pytest.raises(DataError, match=r"steps\.jsonl, line 2"):
        reader.read_new()


@pytest.mark.parametrize("torn", [line(step(2))[:-9], "{", "\0\0\0", '{"step": 2\0\0'])
def test_the_next_start_takes_a_torn_line_away(tmp_path: Path, torn: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1)) + torn)
    silent = StepRecorder(path)  # another rank, which opens the file and writes nothing
    assert path.read_text() == line(step(1)) + torn
    silent.on_end(None)
    recorder = StepRecorder(path)
    recorder.on_step(step(2, resumed_at=1))
    recorder.on_step(step(3, resumed_at=1))
    recorder.on_end(None)
    assert path.read_text() == line(step(1)) + line(step(2, resumed_at=1)) + line(step(3, resumed_at=1))
    assert f"whose {len(torn)} bytes are taken away" in caplog.text


@pytest.mark.parametrize("kept_text", ["a text of its own", line(step(1)).rstrip("\n")])
def test_what_is_no_torn_line_is_kept(tmp_path: Path, kept_text: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(kept_text)
    recorder = StepRecorder(path)
    recorder.on_step(step(2))
    recorder.on_end(None)
    assert path.read_text() == kept_text + "\n" + line(step(2))


def test_a_full_disk_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    path.symlink_to("/dev/full")
    recorder = StepRecorder(path)
    for number in (1, 2, 3):
        recorder.on_step(step(number))
    recorder.on_end(None)
    assert caplog.text.count("No space left on device; this process records nothing more there") == 1


def test_a_write_cut_short_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    recorder.on_step(step(1))
    whole = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda output, content: whole(output, content[:20]))
        recorder.on_step(step(2))
    recorder.on_step(step(3))
    assert path.read_text() == line(step(1)) + line(step(2))[:20]
    assert read_steps(path) == [step(1)]
    assert "20 of" in caplog.text


def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a file that can be appended to"):
        StepRecorder(tmp_path)


@pytest.mark.parametrize(
    ("recorded", "left"),
    [
        ([], []),
        ([(1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0), (3, 0)]),
        # gone on from 2: 3, 4 and 5 are undone, of which it has only done the first again
        ([(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 2)], [(1, 0), (2, 0), (3, 2)]),
        # twice from the same checkpoint, and then from one before that
        ([(1, 0), (2, 0), (3, 2), (4, 2), (3, 2)], [(1, 0), (2, 0), (3, 2)]),
        ([(1, 0), (2, 0), (3, 2), (4, 2), (2, 1), (3, 1)], [(1, 0), (2, 1), (3, 1)]),
        # anew
        ([(1, 0), (2, 0), (3, 0), (1, 0)], [(1, 0)]),
        # steps that the log interval left out
        ([(1, 0), (10, 0), (20, 0), (11, 10)], [(1, 0), (10, 0), (11, 10)]),
        ([(1, 0), (10, 0), (15, 0), (20, 10)], [(1, 0), (10, 0), (20, 10)]),
    ],
)
def test_what_a_restart_rolled_back_is_gone(recorded: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    found = kept([step(number, resumed_at=resumed_at) for number, resumed_at in recorded])
    assert [(one.step, one.resumed_at) for one in found] == left


def test_equal_steps_are_equal() -> None:
    found = compare([step(1), step(2), step(3, 0.1 + 0.2)], [step(2), step(3, 0.1 + 0.2), step(4)])
    assert found.equal
    assert found.steps == (2, 3)
    assert found.largest == 0
    assert found.names == ("grad norm", "learning rate", "lm loss", "mtp_1 loss")


def test_the_last_bit_counts_and_the_first_differing_step_is_named() -> None:
    before = [step(1), step(2), step(3)]
    found = compare(before, [step(1), step(2, math.nextafter(2.0, 3)), step(3, 2.5)])
    assert not found.equal
    assert found.first_difference == (2, "lm loss")
    assert found.largest == 0.5
    assert compare(before, [step(1), step(2, grad_norm=1.25)]).first_difference == (2, "grad norm")


def test_what_only_one_has_and_what_is_no_number_differ() -> None:
    assert compare([step(1)], [step(1, losses={"lm loss": 2.0})]).first_difference == (1, "mtp_1 loss")
    assert compare([step(1, math.nan)], [step(1, math.nan)]).first_difference == (1, "lm loss")
    assert compare([step(1, grad_norm=None)], [step(1)]).first_difference == (1, "grad norm")


@pytest.mark.parametrize("second", [step(2, math.nan), step(2, losses={}), step(2, losses={"mtp_1 loss": 3.0})])
def test_a_loss_that_is_lost_is_the_largest_difference(second: Step) -> None:
    for found in (compare([step(1), step(2)], [step(1), second]), compare([step(1), second], [step(1), step(2)])):
        assert math.isnan(found.largest)
        assert found.first_difference == (2, "lm loss")


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(DataError, match="no step in common among steps 1 to 2 and steps 3 to 3"):
        compare([step(1), step(2)], [step(3)])
    with pytest.raises(DataError, match="no steps"):
        compare([], [step(3)])
