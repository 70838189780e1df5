"""What is recorded of a run, and where: chooses its folder and the listeners that write there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe import clock as clocks
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Listener, Log
from megacpp_mcore.observe.goodput import Recorder
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.live import Live
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.profile.profiler import FamilyRanges, Profiler
from megacpp_mcore.observe.receipts import ReceiptWriter
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.ops import builds
from megacpp_mcore.policy import LaunchPolicy
from megacpp_mcore.settings import Observability, PluginConfig, parse_steps
from megacpp_mcore.util import flags

FOLDER = "observe"
"""Name of the run's folder inside the one for checkpoints."""


@dataclass(frozen=True)
class Observation:
    """What is recorded of a run: its folder (None: nothing) and where that choice comes from, its settings, and how."""

    folder: Path | None
    why: str
    settings: PluginConfig | None
    details: Observability

    def describe(self) -> str:
        """Return the line to print at the start of the run."""
        if self.folder is None:
            where = "nothing is recorded"
        elif any(self.folder.glob("start_*")):
            where = f"the run continues in {self.folder}, which holds an earlier start; steps that it repeats are lost there"
        else:
            where = f"the run is recorded in {self.folder}"
        return f"observe: {where} ({self.why})"


def choose(
    arguments: Sequence[str],
    *,
    observe: str | None = None,
    no_observe: bool = False,
    profile: str | None = None,
    settings: PluginConfig | None = None,
) -> Observation:
    """Choose where a run with Megatron's ``arguments`` is recorded: in ``observe``, or else with the checkpoints that it saves.

    Raises:
        LaunchError: a folder was named together with ``no_observe``; its path is empty; or a profile was requested without a
            folder, of no steps, or of steps that the run does not have.
    """
    details = settings.observability if settings is not None else Observability()
    profile = details.profile if profile is None else profile
    details = dataclasses.replace(details, profile=profile)
    if no_observe and observe is not None:
        raise LaunchError(f"--observe {observe} and --no-observe were both given; leave one of them out")
    if observe == "":
        raise LaunchError("--observe was given an empty path; expected one, or leave the option out")
    words = flags.read(arguments)
    saved = flags.first(words, "--save")
    if no_observe:
        folder, why = None, "--no-observe"
    elif observe is not None:
        folder, why = Path(observe), "--observe"
    elif not details.enabled:
        folder, why = None, "observability.enabled is false"
    elif saved:
        folder, why = Path(saved) / FOLDER, "next to its checkpoints; --observe names another folder"
    else:
        folder, why = None, "it saves no checkpoint; --observe DIR names a folder"
    if profile is not None:
        first, _ = parse_steps(profile)
        last = flags.whole(words, "--train-iters", LaunchError)
        if last is not None and first > last:
            raise LaunchError(
                f"steps {profile} are to be profiled, but the run ends with step {last} (--train-iters); name steps that it has"
            )
        if folder is None:
            raise LaunchError(f"steps {profile} are to be profiled, and nothing is recorded ({why}); add --observe DIR")
    return Observation(folder, why, settings, details)


@contextlib.contextmanager
def observed(chosen: Observation, launched: LaunchPolicy, trained_by: Loop | None = None) -> Iterator[None]:
    """Record this process's run as ``chosen`` says until the context ends; ``trained_by``: by default, Megatron's loop.

    Raises:
        DataError: the folder cannot be written to, or holds something else.
        LaunchError: this Megatron lacks the functions through which a run is observed.
    """
    if chosen.folder is None:
        yield
        return
    rank, world_size, details = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), chosen.details
    is_last = rank == world_size - 1
    clock, loop = Clock(age_ns=clocks.process_age_ns()), trained_by or Loop()
    with contextlib.closing(Log(chosen.folder, rank, world_size, clock, heartbeat_s=details.heartbeat_s)) as log:
        recorder = Recorder(log, with_losses=is_last)
        routes, indices = Routing(details.interval), IndexOverlap(details.interval)
        receipt = ReceiptWriter(log, settings=chosen.settings, launched=launched, routes=routes, indices=indices, loop=loop)
        listeners: list[Listener] = [recorder, routes, indices, FamilyRanges(loop, rank)]
        if details.profile is not None:  # on every rank: families differ by stage, and experts by rank
            first, last = parse_steps(details.profile)
            listeners.append(Profiler(log.run, rank, first, last, clock, trace=details.profile_trace))
        if is_last:
            listeners.append(Live(recorder, receipt, details.console))
        listeners.append(receipt)  # last, as it reads what the others have written
        with contextlib.ExitStack() as stack:
            stack.enter_context(loop.observing(clock, listeners))
            stack.enter_context(clocks.compilation_timed(clock))
            if rank == 0 and importlib.util.find_spec("triton") is not None:
                stack.enter_context(builds.recorded(log.path.with_name(builds.FILE)))
            yield
