"""Runs of several processes, one of which is killed: the others have to end by themselves, and a restart has to go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megacpp_mcore.checkpoints.integrity import MANIFEST
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import read_scalars
from tests.saved import tensors_in

PROCESSES, STEPS, SAVED_EVERY = 4, 8, 3
WORDS = ("--save-interval", str(SAVED_EVERY), "--deterministic-mode", "--lr-warmup-iters", "1")


class Job:
    """Processes as torchrun starts them, but with nobody who would end them together."""

    def __init__(self, folder: Path, name: str, words: Sequence[str], device: str, **environment: str) -> None:
        self.record, self.saved = folder / f"{name} observe", folder / name
        self._output = folder / f"{name} output"
        command = [*f"-m megacpp_mcore launch --verbose --device {device} --observe".split(), str(self.record), "--"]
        self._words = [*command, *words, *WORDS, "--save", str(self.saved), "--load", str(self.saved)]
        self._environment = {"NCCL_ALGO": "Ring"} | environment

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Within, the processes go on with the last checkpoint of before, if there is one; none of them is left behind."""
        self.ranks = forks.start_ranks(self._words, [self._output] * PROCESSES, **self._environment)
        try:
            yield
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()

    def wait(self, timeout: float) -> list[int]:
        """The status of each process."""
        until = time.monotonic() + timeout
        return [rank.wait(max(0.0, until - time.monotonic())) for rank in self.ranks]

    def finish(self) -> None:
        """Start the processes, and have them all end well."""
        with self.started():
            assert self.wait(forks.PATIENCE_S) == [0] * PROCESSES, self.said()

    def unfinished(self, shards: int = 0) -> list[str]:
        """The checkpoints that no manifest has completed, if so many files of tensors are there."""
        folders = [path for path in self.saved.glob("iter_*") if not (path / MANIFEST).exists()]
        return [path.name for path in folders if len(list(path.glob("*.distcp"))) >= shards]

    def kill(self, victim: int, step: int, timeout: float, *, later_s: float = 0.0, shards: int | None = None) -> None:
        """Start the processes, kill one after ``step``, and have the others end with an error within ``timeout``.

        That is ``later_s`` after it, or in the next save, as soon as so many files of tensors are there.
        """
        with self.started():
            self._wait_until(lambda: self.record.exists() and any(one.step >= step for one in read_steps(self.record)))
            if shards is not None:
                self._wait_until(lambda: self.unfinished(shards), every_s=0.001)
            time.sleep(later_s)
            os.killpg(self.ranks[victim].pid, signal.SIGKILL)
            statuses = self.wait(timeout)
            assert statuses[victim] == -signal.SIGKILL
            assert 0 not in statuses, self.said()

    def _wait_until(self, holds: Callable[[], object], every_s: float = 0.05) -> None:
        def there() -> object:
            assert {rank.poll() for rank in self.ranks} == {None}, self.said()
            return holds()

        forks.wait_until(there, self.said, every_s=every_s)

    def said(self) -> str:
        """The end of what all processes printed."""
        return self._output.read_text(errors="replace")[-6000:]


def check_a_killed_run(whole: Job, job: Job, seed: int, timeout: float) -> None:
    """Fail unless ``job``, killed where ``seed`` says and started again, leaves what ``whole`` did, bit for bit.

    With an odd seed it is killed in a save, with others anywhere.
    """
    draw = random.Random(seed)
    victim, step, later_s = draw.randrange(PROCESSES), draw.randrange(1, STEPS), draw.random() / 2
    if seed % 2:
        job.kill(victim, step, timeout, shards=seed // 2 % PROCESSES)
        assert job.unfinished()
    else:
        job.kill(victim, step, timeout, later_s=later_s)
    job.finish()
    assert not job.unfinished()
    expected = read_scalars(whole.record)
    assert len(expected["lm loss"]) == STEPS
    assert read_scalars(job.record) == expected
    last = f"iter_{STEPS:07d}"
    assert_same_bytes(tensors_in(whole.saved / last), tensors_in(job.saved / last))
