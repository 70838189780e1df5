"""One process of a real run on the CPU lane with all that is recorded of it: ``python real_run.py RUN ARGUMENTS``.

ARGUMENTS are Megatron's. FATE holds words: ``error`` or ``kill`` end the run in step 4, in which with ``fault`` a listener
fails. ``fall-back`` gives mamba3 a better backend that covers no head dimension of a small model. ``patched`` applies
linear-cross-entropy, which notes what it runs; ``profile`` profiles steps 5 and 6; ``writers`` keeps what Megatron's writers
for TensorBoard and W&B are given.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megacpp_mcore import backends, policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.read import read
from megacpp_mcore.backends import candidates
from megacpp_mcore.launch import process
from megacpp_mcore.model import preset
from megacpp_mcore.observe import recording as observation
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Listener, Step
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.util.stand_in import process_environment
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
        if get_args().curr_iteration + 1 == 4 and "error" in FATE:
            raise ArithmeticError("as the test asked for")
        if get_args().curr_iteration + 1 == 4 and "kill" in FATE:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*args, **kwargs)

    training.train_step = train_step


class Faulty(Listener):
    """Fails in step 4, where a listener is to fail."""

    def on_step(self, step: Step) -> None:
        """Raise."""
        if step.step == 4 and "fault" in FATE:
            raise LookupError("a listener's own error\nand its details")


class Writers(Listener):
    """Stand where Megatron keeps its writers, and write all that they are given to RUN/scalars.jsonl."""

    def __init__(self, run: str) -> None:
        self.config: dict[str, Any] = {}
        self._path = Path(run) / "scalars.jsonl"

    def on_model(self, chunks: Any, optimizer: Any) -> None:
        """Take the two places."""
        from megatron.training import global_vars

        global_vars._GLOBAL_TENSORBOARD_WRITER = self
        global_vars._GLOBAL_WANDB_WRITER = self

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """As TensorBoard's writer."""
        self._write("tensorboard", tag, value, step)

    def finish(self) -> None:
        """As W&B's run, at the end."""

    def add_text(self, tag: str, text: str, global_step: int | None = None) -> None:
        """As TensorBoard's writer, of the run's arguments."""

    def flush(self) -> None:
        """As TensorBoard's writer."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """As W&B's run."""
        for tag, value in values.items():
            self._write("wandb", tag, value, step)

    def _write(self, writer: str, tag: str, value: Any, step: int) -> None:
        record = {"writer": writer, "tag": tag, "value": float(value), "step": step}
        with self._path.open("a", encoding="utf-8") as output:
            output.write(json.dumps(record) + "\n")


def add_better_backend() -> None:
    """Register a fast mamba3 backend that cannot run here."""
    own = candidates.own_candidates
    wide = backends.Support(dims={"head_dim": backends.Dim(multiple_of=1024)})
    kernel = backends.Candidate(
        name="kernel", op="mamba3", speed=backends.Speed.KERNEL, load=lambda: print, support=wide
    )
    candidates.own_candidates = lambda: (*own(), kernel)


def main(run: str, words: list[str]) -> None:
    if "fall-back" in FATE:
        add_better_backend()

    class Watched(Loop):
        """The loop with these listeners before the receipt's."""

        def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
            *others, receipt = listeners
            return super().observing(
                clock, [*others, Faulty(), *([Writers(run)] if "writers" in FATE else []), receipt]
            )

    with process_environment():
        sys.argv = ["run", *words]
        settings = plugin_config.from_environment()
        model = settings.model if settings else preset("nam56r_tiny")
        processes = int(os.environ["WORLD_SIZE"])
        about = read(words, device="cpu", processes=processes, model=model, settings=settings)
        launched = policy.resolve(about, environment=os.environ)
        chosen = observation.choose(words, observe=run, profile="5-6" if "profile" in FATE else None, settings=settings)
        chosen = dataclasses.replace(chosen, details=dataclasses.replace(chosen.details, interval=INTERVAL))
        patches = [
            "dataset-helpers",
            "spec-import",
            "hybrid-flops",
            *(["linear-cross-entropy"] if "patched" in FATE else []),
        ]
        with policy.announced(), process.children_end_with_it(), process.cpu_lane():
            registry.default().apply(patches)
            end_in_step_4()
            with observation.observed(chosen, launched, Watched()):
                runpy.run_module("megacpp_mcore.launch.pretrain", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
