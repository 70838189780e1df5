"""Profiles some steps of a run: time by block family and phase.

The listener opens torch's profiler and the ranges of :mod:`megacpp_mcore.observe.profile.ranges` when the first step begins,
and closes both after the last one; outside of the window it costs nothing. Then it reads the profiler's raw events, attributes
each (:mod:`megacpp_mcore.observe.profile.trace`) and writes ``RUN/profile/<first>-<last>/table.json`` and ``table.txt``. No
torch at import.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.observe.clock import Clock, Phase, compilation_timed
from megacpp_mcore.observe.events import Listener, Step, replace
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.profile import table as tables
from megacpp_mcore.observe.profile import trace as traces

logger = logging.getLogger(__name__)

SCHEMA = 1
_NO_KERNEL = (
    "no kernel was recorded on a device that torch uses: the times are those of the host; check that this process can use "
    "CUPTI (another profiler may hold it)"
)


class Profiler(Listener):
    """Profiles the steps ``first`` to ``last`` of this rank, 1-based; a run that resumes inside this window profiles the rest.

    Ranks other than 0 have a folder of their own in the profile's (``rank_00003``). Opening the window and making its tables
    count as :attr:`Phase.PROFILE`. ``trace`` also writes ``trace.json.gz`` for a trace viewer. It is large: about 300 bytes an
    event before and 20 after compression.
    """

    def __init__(self, run: Path, rank: int, first: int, last: int, clock: Clock, *, trace: bool = False) -> None:
        self._folder, self._rank = Path(run) / tables.FOLDER, rank
        self._first, self._last, self._trace, self._clock = first, last, trace, clock
        self._built: tuple[Sequence[Any], Any] = (), None
        self._window: _Window | None = None
        self._steps_before, self._done = 0, False

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Remember the chunks and the optimizer, which will be hooked."""
        self._built = chunks, optimizer

    def on_step_begin(self, number: int) -> None:
        """Open the window at its first step, and the range of each step in it."""
        if self._window is None and not self._done and self._first <= number <= self._last:
            with self._clock.within(Phase.PROFILE):
                self._window = _Window(number, *self._built)
        if self._window is None:
            self._steps_before += 1
        else:
            self._window.ranges.open(f"{traces.STEP}/{number}")

    def on_step(self, step: Step) -> None:
        """Close the step's range and, after its last step, the window, which waits for the device."""
        if self._window is not None:
            self._window.ranges.close(f"{traces.STEP}/{step.step}")
            self._window.last = step.step
            if step.step >= self._last:
                self._close()

    def on_end(self, error: BaseException | None) -> None:
        """Close an open window; a run that ended early has a profile of the steps that it completed."""
        if self._window is not None:
            self._close(write=error is None and self._window.last > 0)
        elif not self._done and error is None:
            logger.warning("profile: the run had none of the steps %d to %d", self._first, self._last)

    def _close(self, *, write: bool = True) -> None:
        """Close the window and write its tables, in a phase of its own, outside the run's steps."""
        window, self._window, self._done = self._window, None, True
        if window is not None:
            with self._clock.within(Phase.PROFILE):
                window.close()
                if write:
                    self._write(window)
                del window  # frees its millions of records within that phase

    def _write(self, window: _Window) -> None:
        folder = self._folder / f"{window.first}-{window.last}"
        if self._rank:
            folder /= f"rank_{self._rank:05d}"
        began = time.monotonic()
        events: Sequence[Any] = window.profiler.kineto_results.events()
        trace = traces.read(events)
        table = tables.table(trace)
        phase, why = "steady", f"nothing was compiled, {self._steps_before} steps of this process came before"
        if not self._steps_before:
            phase, why = "warm-up", f"step {window.first} is the first of this process"
        if window.compiled_s:
            phase, why = "warm-up", f"{window.compiled_s:.1f} s of it were compilation"
        record = {
            "schema": SCHEMA, "rank": self._rank, "steps": [window.first, window.last], "phase": phase, "phase_why": why,
            "device": window.device or tables.CPU,
            "problem": _NO_KERNEL if window.device is not None and not trace.kernels else None,
            **table, "events": len(events), "read_s": round(time.monotonic() - began, 3),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "table.json", json.dumps(record, indent=1) + "\n")
        replace(folder / "table.txt", tables.page(record))
        if self._trace:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                plain, packed = Path(scratch) / "trace.json", Path(scratch) / "trace.json.gz"
                window.profiler.export_chrome_trace(str(plain))
                with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                packed.replace(folder / packed.name)
        if record["problem"]:
            logger.warning("profile: %s", record["problem"])
        logger.info("profile: %s", folder / "table.txt")


class FamilyRanges(Listener):
    """Opens the ranges in the steps of Megatron's own ``--profile``: its ``emit_nvtx`` makes them NVTX ranges."""

    def __init__(self, loop: Loop, rank: int) -> None:
        self._loop, self._rank = loop, rank
        self._built: tuple[Sequence[Any], Any] = (), None
        self._steps = range(0)
        self._open = contextlib.ExitStack()

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Read which steps Megatron profiles."""
        args, self._built = self._loop.arguments(), (chunks, optimizer)
        if getattr(args, "profile", False) and (not args.profile_ranks or self._rank in args.profile_ranks):
            self._steps = range(args.profile_step_start + 1, args.profile_step_end + 1)

    def on_step_begin(self, number: int) -> None:
        """Open the ranges at the first of these steps."""
        if number in self._steps[:1]:
            from megacpp_mcore.observe.profile.ranges import Ranges, named

            self._open.enter_context(named(Ranges(), *self._built))

    def on_step(self, step: Step) -> None:
        """Close the ranges after the last step."""
        if step.step >= self._steps.stop - 1:
            self._open.close()

    def on_end(self, error: BaseException | None) -> None:
        """Close the ranges."""
        self._open.close()


class _Window:
    """The open window: hooks, profiler, and a clock of its own for compilation in it, whose seconds are known at its end.

    ``last`` is the last step completed in it (0: none); ``device`` is None on a CPU.
    """

    def __init__(self, first: int, chunks: Sequence[Any], optimizer: Any) -> None:
        import torch

        from megacpp_mcore import cpu
        from megacpp_mcore.observe.profile.ranges import Ranges, named

        on_device = torch.cuda.is_available() and not cpu.is_active()  # the CPU lane pretends to be a GPU
        self.first, self.last, self.compiled_s = first, 0, 0.0
        self.device = torch.cuda.get_device_name() if on_device else None
        self._clock, self.ranges = Clock(), Ranges()
        self.profiler: Any = torch.autograd.profiler.profile(
            use_kineto=True, use_cpu=True, use_device="cuda" if on_device else None
        )
        with contextlib.ExitStack() as stack:
            for context in (self.profiler, compilation_timed(self._clock), named(self.ranges, chunks, optimizer)):
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Remove the hooks and stop the profiler, after the device has finished its work."""
        self.ranges.close_all()
        self._stack.close()
        spent = self._clock.take()
        self.compiled_s = sum(spent.get(phase, 0) for phase in (Phase.COMPILE, Phase.JIT)) / 1e9
