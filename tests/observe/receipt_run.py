"""One process of a real run on the CPU lane with a receipt: ``python receipt_run.py RUN ARGUMENTS``, the rest for Megatron.

FATE holds words: ``error`` or ``kill`` end the run in step 4, in which with ``fault`` a listener fails. ``fall-back`` gives
mamba3 a better backend that covers no head dimension of a small model, ``no-triton`` gives it one that requires Triton, which
has no driver without a GPU. ``patched`` applies linear-cross-entropy, which notes what it runs.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megacpp_mcore import backends, policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.backends import candidates, probes
from megacpp_mcore.launch import process
from megacpp_mcore.model import preset
from megacpp_mcore.observe import goodput, loop
from megacpp_mcore.observe.clock import Clock, compilation_timed, process_age_ns
from megacpp_mcore.observe.events import Listener, Log, Step
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.receipts import ReceiptWriter
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.patches.machinery import registry

INTERVAL = 2
FATE = os.environ.get("FATE", "").split()


def end_in_step_4() -> None:
    """Let Megatron's ``train_step`` raise an error in step 4, or be killed, if that is the fate."""
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


def add_better_backend() -> None:
    """Let mamba3 have a backend that is fast and cannot run here."""
    own = candidates.own_candidates
    wide = backends.Support(dims={"head_dim": backends.Dim(multiple_of=1024)})
    kernel = backends.Candidate(
        name="kernel",
        op="mamba3",
        speed=backends.Speed.KERNEL,
        load=lambda: print,
        support=wide if "fall-back" in FATE else backends.Support(),
        requires=(probes.TRITON,) if "no-triton" in FATE else (),
    )
    candidates.own_candidates = lambda: (*own(), kernel)


Others = Callable[[Log, goodput.Recorder, Routing, IndexOverlap, ReceiptWriter], Sequence[Listener]]


def observed(run: str, words: list[str], others: Others, *patches: str) -> None:
    """Train with Megatron's arguments ``words``, recorded in folder ``run``; ``others`` listen between routing and receipt."""
    with process.process_environment():
        sys.argv = ["run", *words]
        settings = plugin_config.from_environment()
        model = settings.model if settings else preset("nam56r_tiny")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        about = policy.Run.from_arguments(words, device="cpu", world_size=world_size, model=model)
        launched = policy.resolve(about, settings=settings, environment=os.environ)
        with policy.said(), process.cpu_lane():
            registry.default().apply(["dataset-helpers", "spec-import", "hybrid-flops", *patches])
            clock = Clock(age_ns=process_age_ns())
            log = Log(run, rank, world_size, clock)
            routes, indices = Routing(INTERVAL), IndexOverlap(INTERVAL)
            recorder = goodput.Recorder(log, with_losses=rank == world_size - 1)
            receipt = ReceiptWriter(
                log, settings=settings, launched=launched, routes=routes, indices=indices, every_s=0
            )
            listeners = [recorder, routes, indices, *others(log, recorder, routes, indices, receipt), receipt]
            end_in_step_4()
            with contextlib.closing(log), compilation_timed(clock), loop.Loop().observing(clock, listeners):
                runpy.run_module("megacpp_mcore.launch.pretrain", run_name="__main__")


def main(run: str, words: list[str]) -> None:
    if {"fall-back", "no-triton"} & set(FATE):
        add_better_backend()
    observed(run, words, lambda *_: [Faulty()], *(["linear-cross-entropy"] if "patched" in FATE else []))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
