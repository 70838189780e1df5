"""One process of four is killed in the middle of a run: the others end by themselves, and a restart goes on bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from megacpp_mcore.model import Layout
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import ROOT, Laboratory, read_scalars
from tests.saved import tensors_in

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

LAYOUT = Layout(pipeline=2, expert=2)
PROCESSES, STEPS, SAVED_EVERY = 4, 8, 3
TIMEOUT_S = 60
"""In which the others have to end. They find a closed connection at once; Megatron's own timeout is ten minutes."""


class Job:
    """Four processes as torchrun starts them, but with nobody who would end them together."""

    def __init__(self, laboratory: Laboratory, name: str) -> None:
        self.record = laboratory.folder / f"{name} observe"
        self.saved = laboratory.folder / name
        self._output = laboratory.folder / f"{name} output"
        words = laboratory._words(LAYOUT, STEPS, 1e-3)
        words += ["--save", str(self.saved), "--load", str(self.saved), "--save-interval", str(SAVED_EVERY)]
        words += ["--deterministic-mode", "--lr-warmup-iters", "1"]
        self._words = ["-m", "megacpp_mcore", "launch", "--device", "cpu", "--observe", str(self.record), "--", *words]
        self._config = laboratory.config
        self.ranks: Sequence[forks.Program] = ()

    def start(self) -> None:
        """Start the processes; the last checkpoint of before, if there is one, is gone on with."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        shared = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "MEGACPP_CONFIG": self._config, "NCCL_ALGO": "Ring"}
        shared |= {
            "WORLD_SIZE": PROCESSES,
            "LOCAL_WORLD_SIZE": PROCESSES,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        environments = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(PROCESSES)]
        self.ranks = [
            forks.start(self._words, self._output, env=os.environ | {name: str(value) for name, value in one.items()})
            for one in environments
        ]

    def wait(self, timeout: float) -> list[int]:
        """The status of each process."""
        until = time.monotonic() + timeout
        return [rank.wait(max(0.0, until - time.monotonic())) for rank in self.ranks]

    def reach(self, step: int) -> None:
        """Wait until ``step`` is recorded."""
        until = time.monotonic() + 240
        while not (self.record.exists() and any(one.step >= step for one in read_steps(self.record))):
            assert {rank.poll() for rank in self.ranks} == {None}, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.01)

    def said(self) -> str:
        """The end of what all processes printed."""
        return self._output.read_text(errors="replace")[-6000:]

    def end(self) -> None:
        """Leave no process behind, whatever has happened."""
        for rank in self.ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("killed")
    yield Laboratory(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def whole(laboratory: Laboratory) -> Job:
    """A run that nothing happens to."""
    job = Job(laboratory, "whole")
    job.start()
    try:
        assert job.wait(300) == [0] * PROCESSES, job.said()
    finally:
        job.end()
    return job


@pytest.mark.parametrize("seed", range(5))
def test_the_others_end_and_a_restart_goes_on_bit_for_bit(laboratory: Laboratory, whole: Job, seed: int) -> None:
    draw = random.Random(seed)
    victim, step = draw.randrange(PROCESSES), draw.randrange(1, STEPS)
    job = Job(laboratory, f"killed {seed}")
    try:
        job.start()
        job.reach(step)
        time.sleep(draw.random() / 2)  # anywhere in the step, or in a save
        os.killpg(job.ranks[victim].pid, signal.SIGKILL)
        statuses = job.wait(TIMEOUT_S)
        assert statuses[victim] == -signal.SIGKILL
        assert 0 not in statuses, job.said()
        job.start()
        assert job.wait(300) == [0] * PROCESSES, job.said()
    finally:
        job.end()
    scalars, expected = read_scalars(job.record), read_scalars(whole.record)
    assert len(expected["lm loss"]) == STEPS
    assert scalars == expected
    last = f"iter_{STEPS:07d}"
    assert_same_bytes(tensors_in(whole.saved / last), tensors_in(job.saved / last))
