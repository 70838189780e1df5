"""One process of a real run on the CPU lane with all that is shown of it: ``python page_run.py RUN CONSOLE ARGUMENTS``.

FATE is that of ``receipt_run``: ``kill`` ends the run in step 4, ``fall-back`` gives an op a better backend that covers
nothing, ``profile`` profiles steps 5 and 6, ``writers`` keeps what Megatron's writers for TensorBoard and W&B are given.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.launch import process
from megacpp_mcore.model import preset
from megacpp_mcore.observe import goodput, loop
from megacpp_mcore.observe.clock import Clock, compilation_timed, process_age_ns
from megacpp_mcore.observe.events import Listener, Log
from megacpp_mcore.observe.live import Live
from megacpp_mcore.observe.profile import Profiler
from megacpp_mcore.observe.receipts import ReceiptWriter
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.patches.machinery import registry
from tests import tiny_run
from tests.observe.receipt_run import FATE, INTERVAL, add_better_backend, end_in_step_4


def train(data: Path, run: Path, steps: int, *extra: str, fate: str = "", console: str = "progress") -> str:
    """Run one process to its end, which has to be the one that ``fate`` asks for; return what it printed."""
    run.mkdir(exist_ok=True)
    program = ("tests.observe.page_run", str(run), console)
    running = tiny_run.start(program, tiny_run.words(data, steps, *extra), data, fate)
    return running.finish(-signal.SIGKILL if "kill" in fate.split() else 0)


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


def main(run: str, console: str, words: list[str]) -> None:
    if "fall-back" in FATE:
        add_better_backend()
    with process.process_environment():
        sys.argv = ["run", *words]
        settings = plugin_config.from_environment()
        model = settings.model if settings else preset("nam56r_tiny")
        about = policy.Run.from_arguments(words, device="cpu", world_size=int(os.environ["WORLD_SIZE"]), model=model)
        launched = policy.resolve(about, settings=settings, environment=os.environ)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with policy.said(), process.cpu_lane():
            registry.default().apply(["dataset-helpers", "spec-import", "hybrid-flops"])
            trained_by = loop.Loop()
            clock = Clock(age_ns=process_age_ns())
            routes = Routing(INTERVAL)
            log = Log(run, rank, world, clock)
            recorder = goodput.Recorder(log, with_losses=rank == world - 1)
            listeners: list[Listener] = [recorder, routes]
            if "profile" in FATE:
                listeners.append(
                    Profiler(Path(run), rank, 5, 6, tool="torch", trace=False, routing=routes, clock=clock)
                )
            if "writers" in FATE:
                listeners.append(Writers(run))
            receipt = ReceiptWriter(
                log, settings=settings, launched=launched, routes=routes, loop=trained_by, every_s=0
            )
            if rank == world - 1:
                listeners.append(Live(recorder, trained_by, facts=receipt.facts, routes=routes, console=console))
            listeners.append(receipt)
            end_in_step_4()
            with contextlib.closing(log), compilation_timed(clock), trained_by.observing(clock, listeners):
                runpy.run_module("megacpp_mcore.launch.pretrain", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
