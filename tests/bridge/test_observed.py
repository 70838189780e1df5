"""Recorded runs through Megatron-Bridge: one that is killed and resumes, and what cannot be recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megacpp_mcore.observe import events, goodput, receipts
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.bridge.processes import ROOT, TINY, answer

STEPS, SAVED, WITHIN_S = 4, 2, 1.0


def start(python: Path, corpus: str, folder: Path, steps: int = STEPS) -> subprocess.Popen[str]:
    """Start the tiny recipe, resuming if there is a checkpoint; its record is saved with the checkpoints."""
    settings = folder / "settings.yaml"
    settings.write_text("model: nam56r_tiny\nobservability: {heartbeat_s: 0.02}\n")
    saved = folder / "saved"
    words = [
        "--recipe", TINY, f"dataset.data_path={corpus}", f"train.train_iters={steps}", f"checkpoint.save={saved}",
        f"checkpoint.load={saved}", f"checkpoint.save_interval={SAVED}", "checkpoint.exit_on_missing_checkpoint=false",
        "train.global_batch_size=2",
    ]  # fmt: skip
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [str(python), "-W", "ignore", "-m", "megacpp_mcore.nemo_recipes.run", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(settings)},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    steps = folder / "saved" / "observe"

    def there() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        return steps.exists() and any(recorded.step >= step for recorded in read_steps(steps))

    forks.wait_until(there, (folder / "log").read_text)


@pytest.mark.exhaustive
def test_a_killed_run_counts_its_recovery_and_what_it_lost(bridge_python: Path, corpus: str, tmp_path: Path) -> None:
    observed = tmp_path / "saved" / "observe"
    process = start(bridge_python, corpus, tmp_path)
    wait_for_step(process, tmp_path, SAVED + 1)
    process.send_signal(signal.SIGKILL)
    died_ns = time.time_ns()
    process.wait()
    before = goodput.of_rank(events.read(observed)[0])
    again = start(bridge_python, corpus, tmp_path)
    assert again.wait() == 0, (tmp_path / "log").read_text()[-4000:]

    totals = goodput.of_rank(events.read(observed)[0])
    first, second = events.read(observed)[0]
    assert sum(totals.nanoseconds.values()) == totals.wall_ns == second.ended_ns - first.began_ns
    assert (totals.starts, totals.steps, totals.steps_lost) == (2, STEPS, before.steps - SAVED)
    seconds = {name: spent / 1e9 for name, spent in totals.nanoseconds.items()}
    assert abs(seconds["down"] - (second.began_ns - died_ns) / 1e9) < WITHIN_S
    assert min(seconds["recovery"], seconds["startup"]) > 0.5
    assert min(seconds[name] for name in ("lost_steps", "checkpoint_load", "checkpoint_save")) > 0

    steps = read_steps(observed)
    assert [step.step for step in steps if step.resumed_at] == list(range(SAVED + 1, STEPS + 1))
    once, twice = (step for step in steps if step.step == SAVED + 1)
    assert (once.resumed_at, twice.resumed_at) == (0, SAVED)
    assert once.values() == twice.values()
    receipt = receipts.read(observed)
    assert receipt["status"] == "finished"
    assert receipt["goodput"]["starts"] == 2


@pytest.mark.exhaustive
def test_a_run_that_sigterm_ends_saves_and_is_stopped(bridge_python: Path, corpus: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    process = start(bridge_python, corpus, tmp_path, steps=1000)
    wait_for_step(process, tmp_path, 1)
    process.terminate()
    assert process.wait() == 0, (tmp_path / "log").read_text()[-4000:]
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    receipt = receipts.read(saved / "observe")
    assert (receipt["status"], read_steps(saved / "observe")[-1].step) == ("stopped", last)
    assert receipt["notes"] == ["stopped: exiting program after receiving SIGTERM."]


def test_a_function_of_bridges_loop_that_is_gone_is_named(bridge_python: Path) -> None:
    """And nothing stays replaced; what else cannot be recorded is in test_recipes.py."""
    gone = answer(bridge_python, "tests.bridge.unobserved")
    assert len(gone) == 10
    for name, (message, restored) in gone.items():
        assert f"has no {name.partition(':')[2]}, which recording a run needs" in message
        assert restored
