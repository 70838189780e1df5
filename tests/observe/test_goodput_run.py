"""The goodput of a real run that stalls, saves, is killed and goes on: each part in its class, and their sum the wall time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe.steps import read_steps
from tests import stock, tiny_run

SETTINGS = "model: nam56r_tiny\noverrides: {seq_length: 32, dsa: {topk: 8}}\nobservability: {heartbeat_s: 0.02}\n"
STEPS, SAVED, STALL_S, PAUSE_S, WITHIN_S = 7, 4, 3.0, 2.0, 1.0
"""``WITHIN_S`` is what a busy machine may add to a time; stall and pause are much longer."""


def start(folder: Path, stalls_at: int) -> tiny_run.Running:
    (folder / "config.yaml").write_text(SETTINGS)
    model = with_overrides(preset("nam56r_tiny"), {"seq_length": 32, "dsa": {"topk": 8}})
    saved = str(folder / "saved")
    words = stock.words(model, "--save", saved, "--load", saved, "--save-interval", str(SAVED), train_iters=STEPS)
    program = ("tests.observe.stalled", str(stalls_at), str(STALL_S), str(folder / "saves"), "--")
    return tiny_run.start(program, words, folder)


@pytest.mark.exhaustive
def test_a_stall_a_checkpoint_a_death_and_a_restart(tmp_path: Path) -> None:
    run = tmp_path / "saved" / "observe"
    running = start(tmp_path, stalls_at=1)
    until = time.monotonic() + 240
    while not (run.exists() and any(one.step > SAVED for one in read_steps(run))):
        assert running.process.poll() is None, running.log.read_text()[-4000:]
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(running.process.pid, signal.SIGKILL)  # with Megatron's checkpoint worker, which would outlive it
    died_ns = time.time_ns()
    running.finish(-signal.SIGKILL)
    before = goodput.of_rank(events.read(run)[0])
    assert before.steps == len(read_steps(run))

    time.sleep(PAUSE_S)
    start(tmp_path, stalls_at=-1).finish()
    found = goodput.of_rank(events.read(run)[0])
    seconds = {name: spent / 1e9 for name, spent in found.nanoseconds.items()}

    first, second = events.read(run)[0]
    assert (first.how, second.how) == (None, events.FINISHED)
    assert found.wall_ns == second.ended_ns - first.began_ns

    saves = [float(line) for line in (tmp_path / "saves").read_text().split()]
    assert len(saves) == 2
    assert sum(saves) <= seconds["checkpoint_save"] < sum(saves) + WITHIN_S
    assert STALL_S <= seconds["data"] < STALL_S + WITHIN_S
    assert abs(seconds["down"] - (second.began_ns - died_ns) / 1e9) < WITHIN_S
    assert (found.starts, found.steps, found.steps_lost) == (2, STEPS, before.steps - SAVED)

    repeated = sum(span.phases["step"] for span in first.spans if (span.step or 0) > SAVED)
    assert found.nanoseconds["lost_steps"] == repeated + first.ended_ns - first.spans[-1].at
    assert abs(first.ended_ns - died_ns) / 1e9 < WITHIN_S
    assert min(seconds["recovery"], seconds["startup"]) > 0.5
    assert seconds["checkpoint_load"] > 0
    assert [step.step for step in read_steps(run)][-1] == STEPS
