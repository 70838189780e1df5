"""One process of a real run on the CPU lane with all that is shown of it: ``python page_run.py RUN CONSOLE ARGUMENTS``.

FATE is that of ``receipt_run``: ``kill`` ends the run in step 4, ``fall-back`` gives an op a better backend that covers
nothing, ``profile`` profiles steps 5 and 6, ``writers`` keeps what Megatron's writers for TensorBoard and W&B are given.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from megacpp_mcore.observe.events import Listener, Log
from megacpp_mcore.observe.goodput import Recorder
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.live import Live
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.profile import Profiler
from megacpp_mcore.observe.receipts import ReceiptWriter
from megacpp_mcore.observe.routing import Routing
from tests import tiny_run
from tests.observe.receipt_run import FATE, Faulty, add_better_backend, observed


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
    def others(
        log: Log, recorder: Recorder, routes: Routing, indices: IndexOverlap, receipt: ReceiptWriter
    ) -> list[Listener]:
        found: list[Listener] = [Faulty(), *([Writers(run)] if "writers" in FATE else [])]
        if "profile" in FATE:
            found.append(Profiler(Path(run), log.rank, 5, 6, clock=log.clock))
        if log.rank == log.world_size - 1:
            found.append(Live(recorder, Loop(), facts=receipt.facts, routes=routes, indices=indices, console=console))
        return found

    if "fall-back" in FATE:
        add_better_backend()
    observed(run, words, others)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
