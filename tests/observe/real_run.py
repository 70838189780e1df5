"""A launch on the CPU lane with all that is recorded of it: ``python real_run.py RUN ARGUMENTS``.

ARGUMENTS are Megatron's. FATE holds words: ``error`` or ``kill`` end the run in step 4, in which with ``fault`` a listener
fails. ``fall-back`` gives mamba3 a better backend that covers no head dimension of a small model. ``patched`` applies
linear-cross-entropy, which notes what it runs; ``profile`` profiles steps 5 and 6; ``writers`` keeps what Megatron's writers
for TensorBoard and W&B are given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore import backends
from megacpp_mcore.backends import candidates
from megacpp_mcore.commands import cli
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Hooked, Listener, Step
from megacpp_mcore.observe.loop import Loop
from tests import tiny_run

INTERVAL = 2
FATE = os.environ.get("FATE", "").split()


def start(run: Path, data: Path, steps: int, *extra: str, fate: str = "", **more: str) -> tiny_run.Running:
    """Start one process that trains ``steps`` steps on the corpus in ``data`` and records them in folder ``run``."""
    more = {"A_SECRET": "not for a receipt"} | more
    return tiny_run.start(("tests.observe.real_run", str(run)), tiny_run.words(data, steps, *extra), data, fate, **more)


def end_in_step_4() -> None:
    """Make Megatron's ``train_step`` raise an error or be killed in step 4, depending on ``fate``."""
    from megatron.training import get_args, training

    stock = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        if get_args().curr_iteration + 1 == 4:
            if "kill" in FATE:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("as the test asked for")
        return stock(*args, **kwargs)

    training.train_step = train_step


class Faulty(Listener):
    """Fails in step 4, where a listener is to fail."""

    def on_step(self, step: Step) -> None:
        """Raise."""
        if step.step == 4 and "fault" in FATE:
            raise LookupError("a listener's own error\nand its details")


class Writers(Listener):
    """Stand where Megatron keeps its writers; at the end, write all that they were given to RUN/scalars.json."""

    def __init__(self, run: str) -> None:
        self._path = Path(run) / "scalars.json"
        self._given: list[tuple[str, str, float, int]] = []

    def on_model(self, chunks: Any, optimizer: Any) -> None:
        """Take the two places."""
        from megatron.training import global_vars

        global_vars._GLOBAL_TENSORBOARD_WRITER = mock.Mock(add_scalar=self._add_scalar)
        global_vars._GLOBAL_WANDB_WRITER = mock.Mock(log=self._log)

    def on_end(self, error: BaseException | None) -> None:
        """Write."""
        self._path.write_text(json.dumps(self._given))

    def _add_scalar(self, tag: str, value: Any, step: int) -> None:
        self._given.append(("tensorboard", tag, float(value), step))

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._given += [("wandb", tag, float(value), step) for tag, value in values.items()]


def add_better_backend() -> None:
    """Register a fast mamba3 backend that cannot run here."""
    own = candidates.own_candidates
    wide = backends.Support(dims={"head_dim": backends.Dim(multiple_of=1024)})
    kernel = backends.Candidate(name="kernel", op="mamba3", speed=backends.Speed.KERNEL, load=lambda: print, support=wide)
    candidates.own_candidates = lambda: (*own(), kernel)


def main(run: str, words: list[str]) -> int:
    if "fall-back" in FATE:
        add_better_backend()
    if {"error", "kill"}.intersection(FATE):
        end_in_step_4()
    observing = Loop.observing

    def watched(loop: Loop, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """Observe with these listeners before the receipt's, and look at the device every two steps."""
        *others, receipt = listeners
        for listener in others:
            if isinstance(listener, Hooked):
                listener.interval = INTERVAL
        return observing(loop, clock, [*others, Faulty(), *([Writers(run)] if "writers" in FATE else []), receipt])

    options = ["--verbose", "--device", "cpu", "--observe", run]
    options += ["--profile", "5-6"] if "profile" in FATE else []
    options += ["--patch", "linear-cross-entropy"] if "patched" in FATE else []
    with mock.patch.object(Loop, "observing", watched):
        return cli.main(["launch", *options, "--", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
