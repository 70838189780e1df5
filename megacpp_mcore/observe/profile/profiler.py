"""Profiles some steps of a run: where their time went, by block family and phase.

The listener opens torch's profiler and the ranges of :mod:`megacpp_mcore.observe.profile.ranges` when the first step begins
and closes both after the last one; outside of the window it costs nothing. Then it reads the profiler's raw events
(:mod:`megacpp_mcore.observe.profile.trace`), says of each where it belongs (:mod:`megacpp_mcore.observe.profile.attribution`)
and writes ``RUN/profile/<first>-<last>/table.json`` and ``table.txt``. No torch at import.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import DataError, LaunchError
from megacpp_mcore.observe.clock import Clock, Phase, compilation_timed
from megacpp_mcore.observe.events import Listener, replace
from megacpp_mcore.observe.profile import table as tables
from megacpp_mcore.observe.profile import trace as traces
from megacpp_mcore.observe.profile.table import DEVICE_TIME, Table
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.settings import PROFILE_TOOLS

if TYPE_CHECKING:
    from megacpp_mcore.observe.events import Step

logger = logging.getLogger(__name__)

FOLDER = "profile"
SCHEMA = 1
INTERNAL, EXTERNAL = PROFILE_TOOLS


def on_gpu() -> bool:
    """Whether this process trains on a GPU, and not in the CPU lane, which answers for one."""
    import torch

    from megacpp_mcore import cpu

    in_lane = cpu.answers_here()
    return torch.cuda.is_available() and not in_lane


def check_device(tool: str) -> None:
    """Refuse a tool that has nothing to profile here.

    Raises:
        LaunchError: it is :data:`EXTERNAL`, and this process trains on a CPU.
    """
    if tool == EXTERNAL and not on_gpu():
        raise LaunchError(
            "the profiler is external, and that is for a GPU, but this run is on a CPU; profile it with --profile-tool torch"
        )


class Profiler(Listener):
    """Profiles the steps ``first`` to ``last`` of this rank.

    Args:
        run: the run's folder.
        rank: of this process; another one than 0 has a folder of its own in the profile's (``rank_00003``).
        first, last: the window, 1-based. A run that is resumed inside of it profiles the rest.
        tool: one of :data:`~megacpp_mcore.settings.PROFILE_TOOLS`.
        trace: whether ``trace.json.gz`` is written, too, for a trace viewer. It is large: about 300 bytes an event before and
            20 after compression.
        routing: the listener that counts tokens by expert, for the sparse work; None: it is not counted.
        trigger: what asked for the profile, for receipts.
        clock: the process's, on which opening the window and making its tables is :attr:`Phase.PROFILE`; None: nobody asks.

    Raises:
        LaunchError: an unknown tool, or one for a GPU on a CPU.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        first: int,
        last: int,
        *,
        tool: str = INTERNAL,
        trace: bool = False,
        routing: Routing | None = None,
        trigger: str = "observability.profile",
        clock: Clock | None = None,
    ) -> None:
        if tool not in PROFILE_TOOLS:
            raise LaunchError(f"the profiler is {tool!r}; expected {' or '.join(PROFILE_TOOLS)}")
        check_device(tool)
        self._folder = Path(run) / FOLDER
        self._rank = rank
        self._first, self._last = first, last
        self._tool = tool
        self._trace = trace
        self._routing = routing
        self._trigger = trigger
        self._clock = clock or Clock()
        self._chunks: Sequence[Any] = ()
        self._optimizer: Any = None
        self._window: _Window | None = None
        self._steps_before = 0
        self._done = False

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Keep what will be hooked."""
        self._chunks, self._optimizer = chunks, optimizer

    def on_step_begin(self, number: int) -> None:
        """Open the window at its first step, and the range of each step in it."""
        if self._window is None and not self._done and self._first <= number <= self._last:
            with self._clock.within(Phase.PROFILE):
                self._window = _Window(
                    number, self._chunks, self._optimizer, self._tool, self._loads(), self._steps_before
                )
        if self._window is not None:
            self._window.begin(number)
        self._steps_before += 1

    def on_step(self, step: Step) -> None:
        """Close the range of the step, and the window after its last one; this waits for the device."""
        if self._window is None:
            return
        self._window.end(step.step)
        if step.step >= self._last:
            self._finish()

    def on_end(self, error: BaseException | None) -> None:
        """Take away what is open; a run that ended early has a profile of the steps that it did."""
        if self._window is not None and error is None and self._window.complete:
            self._finish()
        elif self._window is not None:
            self._drop()
        elif not self._done and error is None:
            logger.warning("profile: the run had none of the steps %d to %d", self._first, self._last)

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """Take away what is open if it is this one that failed."""
        if failed is self:
            self._drop()

    def _drop(self) -> None:
        """Close the window, if one is open, and write nothing."""
        window, self._window = self._window, None
        if window is not None:
            with self._clock.within(Phase.PROFILE):
                window.close()

    def _loads(self) -> dict[str, Any]:
        if self._routing is None:
            return {}
        self._routing.read()
        return tables.loads(self._routing.record())

    def _finish(self) -> None:
        """Close the window and write what it saw, in a phase of its own: it is no part of the run's steps."""
        with self._clock.within(Phase.PROFILE):
            self._close_and_write()  # a function, so that its millions of records are freed in that phase, too

    def _close_and_write(self) -> None:
        window = self._window
        if window is None:
            return
        self._window, self._done = None, True
        window.close()
        if self._tool == EXTERNAL:
            logger.info(
                "profile: steps %d to %d were marked for the profiler around this run", window.first, window.last
            )
            return
        began = time.monotonic()
        with _without_collection():
            found = tables.table(traces.read(window.events()))
        folder = self._folder / f"{window.first}-{window.last}"
        if self._rank:
            folder /= f"rank_{self._rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror}; expected a folder for the profile") from error
        record = self._record(window, found) | {"read_s": round(time.monotonic() - began, 3)}
        replace(folder / "table.json", json.dumps(record, indent=1) + "\n")
        replace(folder / "table.txt", tables.page(record))
        if self._trace:
            window.save(folder / "trace.json.gz")
        if record["problem"]:
            logger.warning("profile: %s", record["problem"])
        logger.info("profile: %s", folder / "table.txt")

    def _record(self, window: _Window, found: Table) -> dict[str, Any]:
        phase, why = window.phase()
        problem = None
        if window.device is not None and found.unit != DEVICE_TIME:
            problem = (
                "no kernel was recorded on a device that torch uses: the times are those of the host; see whether this process "
                "may use CUPTI (another profiler may hold it)"
            )
        return {
            "schema": SCHEMA,
            "trigger": self._trigger,
            "rank": self._rank,
            "steps": [window.first, window.last],
            "phase": phase,
            "phase_why": why,
            "device": window.device or "CPU",
            "problem": problem,
            **found.record(),
            "sparse_work": self._sparse_work(window),
            "tensor_pipes": "not measured: no counters",
            "graph_recaptures": found.graphs if window.device is not None else None,
            "events": window.count,
        }

    def _sparse_work(self, window: _Window) -> dict[str, Any]:
        if self._routing is None:
            return {"why": "the run's routing is not counted"}
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        modules = [module for chunk in self._chunks for module in chunk.modules()]
        return tables.sparse_work(
            window.loads,
            self._loads(),
            tables.Padding.of_run(self._chunks[0].config, modules),
            micro_batches=get_num_microbatches() * (window.last - window.first + 1),
        )


class _Window:
    """The open window: hooks, profiler, and a clock of its own for what is compiled in it."""

    def __init__(
        self,
        first: int,
        chunks: Sequence[Any],
        optimizer: Any,
        tool: str,
        loads: Mapping[str, Any],
        steps_before: int,
    ) -> None:
        import torch

        from megacpp_mcore.observe.profile.ranges import Ranges, named

        on_device = on_gpu()
        self.device = torch.cuda.get_device_name() if on_device else None
        self.first = self.last = first
        self.loads = loads
        self.count = 0
        self._complete: set[int] = set()
        self._steps_before = steps_before
        self._clock = Clock()
        self._compiled: dict[Phase, int] = {}
        self._ranges = Ranges(nvtx=on_device, recorded=tool == INTERNAL)
        self._profiler: Any = None
        with contextlib.ExitStack() as stack:
            if tool == EXTERNAL:
                torch.cuda.profiler.start()
                stack.callback(torch.cuda.profiler.stop)
                stack.callback(torch.cuda.synchronize)
            else:
                self._profiler = torch.autograd.profiler.profile(
                    use_kineto=True, use_cpu=True, use_device="cuda" if on_device else None
                )
                stack.enter_context(self._profiler)
            stack.enter_context(compilation_timed(self._clock))
            stack.enter_context(named(self._ranges, chunks, optimizer))
            self._stack = stack.pop_all()

    @property
    def complete(self) -> bool:
        """Whether a step of the window was done to its end."""
        return bool(self._complete)

    def begin(self, number: int) -> None:
        """Step ``number`` begins."""
        self._ranges.open(f"{traces.STEP}/{number}")

    def end(self, number: int) -> None:
        """Step ``number`` has ended."""
        self._ranges.close(f"{traces.STEP}/{number}")
        self._complete.add(number)
        self.last = number

    def close(self) -> None:
        """Take the hooks away and stop the profiler, after the device has done what it was given."""
        self._ranges.close_all()
        self._stack.close()
        self._compiled = self._clock.take()

    def phase(self) -> tuple[str, str]:
        """Whether the window shows a run that has warmed up, and how that is known."""
        seconds = sum(self._compiled.get(phase, 0) for phase in (Phase.COMPILE, Phase.JIT)) / 1e9
        if seconds:
            return "warm-up", f"{seconds:.1f} s of it were compilation"
        if not self._steps_before:
            return "warm-up", f"step {self.first} is the first of this process"
        return "steady", f"nothing was compiled, {self._steps_before} steps of this process came before"

    def events(self) -> Sequence[Any]:
        """The profiler's raw events."""
        found: Sequence[Any] = self._profiler.kineto_results.events()
        self.count = len(found)
        return found

    def save(self, path: Path) -> None:
        """Write the events as a compressed file for a trace viewer."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            plain = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(Path(folder) / "trace.json.gz", "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            (Path(folder) / "trace.json.gz").replace(path)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Millions of records are made, none of them in cycles: looking for garbage among them would take most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
