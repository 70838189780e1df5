"""The benchmark of the doors: what it calls the same, and what it refuses."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import doors
from megacpp_mcore.recipes import Recipe

SAME = doors.Trained(7, [4.0, 3.0, 2.0], [9.0, 5.0, 5.0])


def trained(losses: list[float], parameters: int = 7) -> doors.Trained:
    return doors.Trained(parameters, losses, [9.0, 5.0, 4.0])


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark, with what each door would have trained; its status and its rows."""

    def run(made: list[doors.Trained], *words: str) -> tuple[int, list[dict[str, str]]]:
        recipes: list[Recipe] = []

        def train(door: str, number: int, chosen: Recipe, args: argparse.Namespace) -> doors.Trained:
            recipes.append(chosen)
            return made[number]

        table = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        monkeypatch.setattr(doors, "_train", train)
        monkeypatch.setattr(doors, "device_name", lambda kind: kind)
        command = ["--data", "x", "--steps", "3", "--warmup", "1", "--output", str(table), *words]
        monkeypatch.setattr(sys, "argv", ["doors", *command])
        status = doors.main()
        assert all(("--deterministic-mode" in one.training.extra) == ("--deterministic" in words) for one in recipes)
        with table.open() as file:
            return status, list(csv.DictReader(file))

    return run


def test_another_loss_is_another_training_unless_noise_explains_it(main: Any) -> None:
    status, rows = main([SAME, SAME, SAME, trained([4.0, 3.0, 2.0])])
    assert (status, [row["door"] for row in rows]) == (0, ["cli", "cli", "hybrid", "bridge"])
    assert (rows[3]["of_first"], rows[3]["tolerance"]) == ("1.111", "1.0e-05")
    assert main([SAME, SAME, SAME, trained([4.0, 3.0, 2.001])])[0] == 1
    noisy = trained([4.0, 3.0, 2.002])
    status, rows = main([SAME, noisy, SAME, trained([4.0, 3.0, 2.001])])
    assert (status, rows[3]["worst_difference"], rows[3]["tolerance"]) == (0, "5.0e-04", "1.5e-03")


def test_other_parameters_are_another_model(main: Any) -> None:
    assert main([SAME, SAME, SAME, trained(SAME.losses, parameters=8)])[0] == 1


def test_in_deterministic_mode_nothing_is_noise(main: Any) -> None:
    assert main([SAME] * 4, "--deterministic")[0] == 0
    last_bit = trained([4.0, 3.0, 2.0000000000000004])
    assert main([SAME, SAME, SAME, last_bit], "--deterministic")[0] == 1
    assert main([SAME, last_bit, SAME, SAME], "--deterministic")[0] == 1


def test_a_loss_that_is_no_number_ends_it(main: Any) -> None:
    with pytest.raises(SystemExit, match="reached a loss that is no number"):
        main([SAME, trained([4.0, float("nan"), 2.0]), SAME, SAME])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--doors", "cli", "hybrid"], "expected cli twice"),
        (["--warmup", "3"], "--warmup is 3; expected 0 to 2"),
        (
            ["--precision", "bf16_fp8_experts"],
            "which the Bridge recipe nam56r_quarter_pretrain_1gpu_h200_bf16 is not told",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    main: Any, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([SAME] * 4, *words)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_without_the_bridge_door_any_precision_will_do(main: Any) -> None:
    status, rows = main([SAME, SAME], "--precision", "bf16_fp8_experts", "--doors", "cli", "cli")
    assert (status, rows[0]["precision"]) == (0, "bf16_fp8_experts")
