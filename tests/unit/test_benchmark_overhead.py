"""The benchmark of what recording costs: which blocks it observes, what it compares, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import overhead
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.observe.steps import read_steps

ROOT = Path(__file__).parents[2]


def test_an_observed_block_is_compared_with_its_neighbours() -> None:
    blocks = {0: [100.0, 102.0], 1: [104.0, 104.0], 2: [106.0, 108.0], 3: [109.0, 111.0], 4: [112.0, 114.0]}
    plain, seen, overheads = overhead.compared(blocks)
    assert (plain, seen) == (pytest.approx((101 + 107 + 113) / 3), 107.0)
    assert overheads == [0.0, 0.0]  # the machine grew slower, recording cost nothing
    slower = {block: [time * (1.5 if block % 2 else 1.0) for time in times] for block, times in blocks.items()}
    assert overhead.compared(slower)[2] == pytest.approx([0.5, 0.5])


def test_the_error_is_that_of_the_comparisons() -> None:
    draw = random.Random(1)

    def made() -> dict[int, list[float]]:  # a machine that grows slower by 0.5 % a block, and blocks that spread by 1 %
        return {block: [100.0 + block / 2 + draw.gauss(0, 1)] for block in range(9)}

    runs = [made() for _ in range(2000)]
    spread = statistics.stdev(statistics.fmean(overhead.compared(run)[2]) for run in runs)
    said = math.sqrt(statistics.fmean(overhead.standard_error(run) ** 2 for run in runs))
    assert said == pytest.approx(spread, rel=0.1)


def test_one_training_is_observed_now_and_then(tmp_path: Path) -> None:
    data = tmp_path / "text"
    prepare([str(source.path) for source in find_stdlib_sources()[:16]], str(data))
    runs, table = tmp_path / "runs", tmp_path / "overhead.csv"
    size = ["--warmup", "2", "--block", "4", "--observed-blocks", "3", "--global-batch-size", "1"]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.overhead",
        "--recipe",
        "nam56r_tiny_pretrain_1cpu_fp32",
    ]
    done = subprocess.run(
        [*command, "--data", str(data), *size, "--runs", str(runs), "--output", str(table)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-4000:]  # 1: too much, or too noisy, here
    # Steps 1 and 2 before; blocks of 4 from step 3; observed are the second, the fourth and the sixth.
    assert sorted(run.name for run in runs.iterdir()) == ["block_1", "block_3", "block_5"]
    assert [step.step for step in read_steps(runs / "block_1" / "steps.jsonl")] == [7, 8, 9, 10]
    assert [step.step for step in read_steps(runs / "block_3" / "steps.jsonl")] == [15, 16, 17, 18]
    for run in runs.iterdir():
        receipt = json.loads((run / "receipt.json").read_text())
        assert receipt["status"] == "finished"
        assert receipt["routing"]["layers"]
    (row,) = csv.DictReader(table.open())
    assert float(row["overhead"]) == pytest.approx(float(row["observed_ms"]) / float(row["plain_ms"]) - 1, abs=0.5)
    assert 0 < float(row["standard_error"]) < 1
    assert 0 < float(row["listeners_ms"]) < 0.5 * float(row["observed_ms"])
    assert done.returncode == (float(row["overhead"]) + 2 * float(row["standard_error"]) > overhead.LIMIT)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--block", "2"], ["--observed-blocks", "2"], ["--warmup", "0"]):
        with pytest.raises(SystemExit) as refused:
            overhead.arguments(["--data", "x", "--runs", str(tmp_path), *words])
        assert refused.value.code == 2
        assert "expected more than 2 steps a block" in capsys.readouterr().err
