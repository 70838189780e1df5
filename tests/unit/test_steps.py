"""Recorded steps: reading a file that grows, and comparing two recordings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.steps import Step, StepReader, StepRecorder, compare, read_steps


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


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"step": 1}', '{"step": 1, "other": 2}'])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1)) + damage + "\n")
    with pytest.raises(DataError, match=r"steps\.jsonl, line 2: not the record of a step"):
        read_steps(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected a file of steps"):
        read_steps(tmp_path / "steps.jsonl")


def test_recording_refuses_to_continue_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(line(step(1))[:-5])
    with pytest.raises(DataError, match="ends in the middle of a line"):
        StepRecorder(path)
    with pytest.raises(DataError, match="expected a file that can be appended to"):
        StepRecorder(tmp_path)


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
