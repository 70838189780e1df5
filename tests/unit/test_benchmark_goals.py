"""Benchmarks of patches: a run that misses the goal says so and fails; on figures made up here and on a small real run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dsa_indexer_memory, mla_core_attention

ROOT = Path(__file__).parents[2]


def arguments(monkeypatch: pytest.MonkeyPatch, benchmark: Any, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    return benchmark._arguments()


def test_a_goal_holds_at_the_default_size_and_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mla = mla_core_attention
    assert arguments(monkeypatch, mla).goal == 4
    for other in (("--heads", "8"), ("--length", "1024"), ("--dtype", "float32"), ("--device", "cpu")):
        assert arguments(monkeypatch, mla, *other).goal is None
        assert arguments(monkeypatch, mla, *other, "--goal", "3").goal == 3
    indexer = dsa_indexer_memory
    args = arguments(monkeypatch, indexer)
    assert (args.goal, args.goal_lengths) == (20, [16384])
    assert set(args.goal_lengths) <= set(args.sq)
    assert arguments(monkeypatch, indexer, "--heads", "8").goal is None
    assert arguments(monkeypatch, indexer, "--device", "cpu").goal is None
    args = arguments(monkeypatch, indexer, "--sq", "512", "--heads", "8", "--goal", "5")
    assert (args.goal, args.goal_lengths) == (5, [512])


def test_a_memory_goal_on_the_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(monkeypatch, dsa_indexer_memory, "--device", "cpu", "--goal", "5")
    assert ended.value.code == 2
    assert "--goal is about peak memory, which is measured with --device cuda" in capsys.readouterr().err


def test_a_speed_up_below_the_goal_is_missed() -> None:
    missed = mla_core_attention._missed
    assert missed(4.0, {"ms": 16.0}, {"ms": 4.0}) == ""
    line = missed(4.0, {"ms": 16.0}, {"ms": 5.0})
    assert line == "GOAL MISSED: forward and backward 3.20x as fast as stock, expected 4x"
    assert missed(None, {"ms": 16.0}, {"ms": 5.0}) == ""
    assert missed(4.0, {"ms": 16.0}, {}) == ""  # parity failed, which ends the run with 1 by itself


def rows(sq: int, theirs: int | str, ours: int | str) -> list[dict[str, Any]]:
    common = {"sq": sq, "work": "loss", "loss": "sparse", "computed_bytes": 1000}
    return [common | {"who": "stock", "peak_bytes": theirs}, common | {"who": "patched", "peak_bytes": ours}]


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (2000, 100, None),
        (2000, 101, "101 bytes, expected at least 20x less than 2000"),
        ("out of memory", 50, None),
        ("out of memory", 51, "51 bytes, expected at least 20x less than 1000"),
        ("out of memory", "out of memory", "out of memory bytes, expected"),
    ],
)
def test_memory_above_the_goal_is_missed(theirs: int | str, ours: int | str, words: str | None) -> None:
    found = dsa_indexer_memory.missed([*rows(4096, 2, 2), *rows(16384, theirs, ours)], 20.0, [16384])
    assert len(found) == (words is not None)
    assert all(line.startswith("GOAL MISSED: sq 16384, loss, loss sparse: ") and str(words) in line for line in found)
    assert dsa_indexer_memory.missed(rows(16384, theirs, ours), None, [16384]) == []


@pytest.mark.parametrize(("goal", "code"), [("1e9", 1), ("1e-9", 0)])
def test_a_run_ends_with_what_the_goal_says(tmp_path: Path, goal: str, code: int) -> None:
    size = (
        "--heads 2 --qk-width 16 --v-width 8 --batch 1 --length 64 --dtype float32 --warmup 0 --repeats 1 --buffers 1"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.mla_core_attention", *size.split(), "--device", "cpu",
         "--goal", goal, "--output", str(tmp_path / "rows.csv")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("GOAL MISSED: forward and backward" in done.stdout) == bool(code)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3  # the figures are kept all the same
