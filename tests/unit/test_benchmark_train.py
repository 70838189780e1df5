"""benchmarks.train: what it reads from a stock log, and what it refuses before training."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import train
from megacpp_mcore.bench import measure

WORDS = ["nam56r_tiny", "--data", "x", "--steps", "2", "--warmup", "1"]
# Lines as megatron-core 0.19.2 prints them.
LOG = """
 [2026-11-20 10:00:00.000] iteration        1/       2 | consumed samples:            8 \
| elapsed time per iteration (ms): 900.5 | learning rate: 4.0E-03 | global batch size: 8 \
| lm loss: 6.023711E+00 | mtp_1 loss: 6.1E+00 | loss scale: 1.0 \
| grad norm: 4.000 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.50 | max allocated: 200.25 | reserved: 250.00 | max reserved: 300.00
 [2026-11-20 10:00:01.000] iteration        2/       2 | consumed samples:           16 \
| elapsed time per iteration (ms): 200.0 | learning rate: 4.0E-03 | global batch size: 8 \
| lm loss: 3.5E+00 | mtp_1 loss: 3.9E+00 | loss scale: 1.0 \
| grad norm: 0.921 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.50 | max allocated: 210.25 | reserved: 250.00 | max reserved: 310.00
"""


def test_the_figures_are_those_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "device_name", lambda kind: "a GPU")
    args = train.arguments([*WORDS, "--global-batch-size", "8"])
    found = train.figures(args, 256, LOG)
    assert found["median_step_ms"] == 200.0
    assert found["tokens_per_s"] == 8 * 256 * 5
    assert (found["max_allocated_mib"], found["max_reserved_mib"]) == ("210.25", "310.00")
    assert (found["first_loss"], found["last_loss"], found["last_grad_norm"]) == (6.023711, 3.5, 0.921)
    monkeypatch.setenv("MEGACPP_COMMIT", "abc1234")
    row = {**found, **measure.versions("transformer-engine", "transformer_engine_torch", "triton")}
    for _ in range(2):
        measure.Table(tmp_path / "t.csv", train.COLUMNS).append(row)
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [one["commit"] for one in rows] == ["abc1234"] * 2
    assert rows[0]["tokens_per_s"] == "10240"


def test_a_log_that_lacks_something_is_no_result() -> None:
    args = train.arguments(WORDS)
    with pytest.raises(SystemExit, match="holds 1 steps, expected 2"):
        train.figures(args, 256, LOG.replace("iteration        2/", "iter 2/"))
    with pytest.raises(SystemExit, match="reports memory 1 times, expected once a step"):
        train.figures(args, 256, LOG.replace("max allocated: 210.25", ""))


def test_wrong_arguments_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "other.csv"
    table.write_text("a,b\n1,2\n")
    for words, says in (
        ([*WORDS, "--warmup", "2"], "--warmup is 2; expected 0 to 1"),
        ([*WORDS, "--output", str(table)], "has the columns ['a,b']"),
    ):
        with pytest.raises(SystemExit):
            train.arguments(words)
        assert says in capsys.readouterr().err
