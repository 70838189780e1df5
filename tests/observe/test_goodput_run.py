"""The goodput of a real run that stalls, saves, is killed and goes on: each part in its class, and their sum the wall time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe.steps import read_steps

ROOT = Path(__file__).parents[2]
SMALLER = {"seq_length": 32, "dsa": {"topk": 8}}
STEPS, SAVED, STALL_S, PAUSE_S, WITHIN_S = 7, 4, 3.0, 2.0, 1.0
"""``WITHIN_S`` is what a busy machine may add to a time; stall and pause are much longer."""


def start(folder: Path, stalls_at: int) -> subprocess.Popen[str]:
    model = with_overrides(preset("nam56r_tiny"), SMALLER)
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        train_iters=STEPS,
        micro_batch_size=1,
        global_batch_size=1,
        data=("--mock-data",),
        tokenizer=tokenizer_words(model),
        extra=("--save", str(folder / "saved"), "--load", str(folder / "saved"), "--save-interval", str(SAVED)),
    )
    settings = folder / "megacpp.yaml"
    content = {"model": "nam56r_tiny", "overrides": SMALLER, "observability": {"heartbeat_s": 0.02}}
    settings.write_text(yaml.safe_dump(content))
    words = lower(model, Layout(), training)
    command = ["-W", "ignore", "-m", "tests.observe.stalled", str(stalls_at), str(STALL_S), str(folder / "saves")]
    log = (folder / "log").open("a")
    return subprocess.Popen(
        [sys.executable, *command, "--", *words],
        cwd=ROOT,
        env=os.environ
        | {
            plugin_config.VARIABLE: str(settings),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))),
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    until = time.monotonic() + 240
    while not (run.exists() and any(one.step >= step for one in read_steps(run))):
        assert process.poll() is None, (run.parents[1] / "log").read_text()[-4000:]
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_stall_a_checkpoint_a_death_and_a_restart(tmp_path: Path) -> None:
    run = tmp_path / "saved" / "observe"
    process = start(tmp_path, stalls_at=1)
    wait_for_step(process, run, SAVED + 1)
    os.killpg(process.pid, signal.SIGKILL)  # with Megatron's checkpoint worker, which would outlive it
    died_ns = time.time_ns()
    process.wait()
    before = goodput.read(run)[0]
    assert before.steps == len(read_steps(run))

    time.sleep(PAUSE_S)
    again = start(tmp_path, stalls_at=-1)
    assert again.wait() == 0, (tmp_path / "log").read_text()[-4000:]
    found = goodput.read(run)[0]
    seconds = {name: spent / 1e9 for name, spent in found.nanoseconds.items()}

    first, second = events.read(run)[0]
    assert (first.how, second.how) == (None, events.FINISHED)
    assert found.wall_ns == second.ended_ns - first.began_ns
    assert sum(found.nanoseconds.values()) == found.wall_ns

    saves = [float(line) for line in (tmp_path / "saves").read_text().split()]
    assert len(saves) == 2
    assert sum(saves) <= seconds["checkpoint_save"] < sum(saves) + WITHIN_S
    assert STALL_S <= seconds["data"] < STALL_S + WITHIN_S
    assert abs(seconds["down"] - (second.began_ns - died_ns) / 1e9) < WITHIN_S
    assert (found.starts, found.steps, found.steps_lost) == (2, STEPS, before.steps - SAVED)

    repeated = sum(span.phases["step"] for span in first.spans if (span.step or 0) > SAVED)
    assert found.nanoseconds["lost_steps"] == repeated + first.ended_ns - first.spans[-1].at
    assert abs(first.ended_ns - died_ns) / 1e9 < WITHIN_S
    assert seconds["recovery"] > 0.5
    assert seconds["checkpoint_load"] > 0
    assert seconds["startup"] > 0.5
    assert [step.step for step in read_steps(run)][-1] == STEPS
