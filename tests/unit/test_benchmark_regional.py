"""The benchmark of regional compile: which runs it makes, and what it reads out of one."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import regional
from megacpp_mcore import config
from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.observe.steps import Step


def step(number: int, seconds: float, loss: float) -> Step:
    return Step(number, 0, seconds, 8, {"lm loss": loss}, 1.0, 1e-3, False)


def test_the_plain_run_comes_first_and_twice_and_each_other_once() -> None:
    args = regional.arguments(["--compile", "regional", "off", "--recompute", "none", "m"])
    found = regional.cases("dense", args)
    assert [(case.compile, case.recompute, case.again) for case in found] == [
        ("off", "none", False), ("off", "none", True), ("regional", "none", False), ("regional", "m", False),
        ("off", "m", False),
    ]  # fmt: skip
    assert len({case.label for case in found}) == 5
    alone = regional.cases("quarter", regional.arguments(["--compile", "regional"]))
    assert [case.compile for case in alone] == ["off", "off", "regional"]


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_its_files_are_ones_that_a_run_reads(tmp_path: Path, size: str) -> None:
    for lane in regional.LANES:
        case = regional.Case(lane, "regional", "experts", "anomaly_detection")
        file = tmp_path / "megacpp.yaml"
        file.write_text(yaml.safe_dump(case.settings(size)))
        read = config.load(file)
        assert ("E" in read.model.layers) == (lane == "quarter")
        assert (read.compile, read.recompute.on, read.experimental_taxes.on) == (
            "regional", ("experts",), ("anomaly_detection",)
        )  # fmt: skip


def test_a_row_is_read_out_of_log_and_steps() -> None:
    args = regional.arguments(["--steps", "4", "--warmup", "2", "--device", "cpu", "--global-batch-size", "2"])
    model = with_overrides(preset("nam56r_tiny"), {"seq_length": 100})
    log = "megacpp-mcore: compile warm-up: explicit, before step 1: layers 1 (norm): 12.5 s\nmax allocated: 7.50 | x"
    steps = [step(1, 130.0, 3.0), step(2, 131.0, 2.0), step(3, 131.5, 1.0), step(4, 132.0, 0.5)]
    case = regional.Case("dense", "regional", "none", "none")
    row = regional.row(args, case, model, 100.0, log, steps, None)
    assert set(row) | {"tolerance", "agrees"} == set(regional.COLUMNS)
    assert (row["warm_up_s"], row["first_step_s"], row["median_step_ms"], row["tokens_per_s"]) == (
        "12.5",
        30.0,
        500.0,
        400,
    )
    assert (row["max_allocated_mib"], row["largest_loss_difference"]) == ("7.50", 0.0)
    other = [*steps[:3], step(4, 132.0, 0.6)]
    assert regional.row(args, case, model, 100.0, log, steps, other)["largest_loss_difference"] == pytest.approx(0.1)


@pytest.mark.parametrize(("compiled", "status", "agrees"), [(2.14, 0, "yes"), (2.16, 1, "no")])
def test_a_row_is_compared_with_one_and_a_half_times_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: float, status: int, agrees: str
) -> None:
    """The plain run parts from itself by 0.1."""
    losses = {"dense-off-none-none": 2.0, "dense-off-none-none-again": 2.1, "dense-regional-none-none": compiled}

    def train(
        args: argparse.Namespace, case: regional.Case, reference: list[Step] | None
    ) -> tuple[dict[str, Any], list[Step]]:
        steps = [step(number, float(number), losses[case.label]) for number in (1, 2)]
        model = preset("nam56r_tiny")
        return regional.row(args, case, model, 0.0, "", steps, reference), steps

    monkeypatch.setattr(regional, "measure", train)
    output = tmp_path / "rows.csv"
    words = ["--lane", "dense", "--device", "cpu", "--steps", "2", "--warmup", "1", "--output", str(output)]
    assert regional.main(words) == status
    rows = list(csv.DictReader(output.open()))
    assert [row["agrees"] for row in rows] == ["yes", "yes", agrees]


def test_no_steady_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        regional.arguments(["--steps", "5", "--warmup", "5"])
    assert "expected 1 to 4" in capsys.readouterr().err
