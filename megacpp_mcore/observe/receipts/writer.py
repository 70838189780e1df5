"""A run's receipt while it trains: every rank writes what it knows to its log, and rank 0 assembles the receipt at the end.

Nothing is exchanged between ranks. No torch at import.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import observed
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.events import Listener, Log, Step
from megacpp_mcore.observe.receipts import facts as of_run
from megacpp_mcore.observe.receipts.assemble import write

if TYPE_CHECKING:
    from megacpp_mcore.observe.indices import IndexOverlap
    from megacpp_mcore.observe.loop import Loop
    from megacpp_mcore.observe.routing import Routing
    from megacpp_mcore.policy import LaunchPolicy
    from megacpp_mcore.settings import PluginConfig

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long rank 0 waits in the end for the last lines of others, so that the receipt does not call them running."""


class ReceiptWriter(Listener):
    """Writes this rank's facts when the model stands, now and then, and at the end; rank 0 then assembles the receipt.

    It has to be the last of the listeners: at the end it reads what the others wrote.

    Args:
        log: the process's log.
        settings: the file that ``MEGACPP_CONFIG`` names, where the run's spec is one of ours.
        launched: the launch policy.
        routes: what counts the experts' tokens; it reads the device, and this asks for what it has read.
        indices: what samples the indices of Full layers, likewise.
        loop: the loop that trains.
        every_s: seconds between two writings at least; a file system may be slow, and this must not be felt.
    """

    def __init__(
        self,
        log: Log,
        *,
        settings: PluginConfig | None,
        launched: LaunchPolicy,
        routes: Routing,
        indices: IndexOverlap,
        loop: Loop,
        every_s: float = 30.0,
    ) -> None:
        self._log, self._every_s = log, every_s
        self._settings, self._routes, self._indices, self._loop = settings, routes, indices, loop
        self._written = -math.inf
        self.facts = of_run.at_start(launched)
        """What is known of the run by field, and why other fields are not known."""
        self._chunks: Sequence[Any] = ()
        self._failed: list[str] = []
        # The files in the caches of this host, before anything of this run compiles, its warm-up included.
        self._caches = of_run.cache_files() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        observed.forget()  # of a run before in this process
        self._write_facts()

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Learn what the model and Megatron's arguments say, and write it."""
        self._chunks = chunks
        self.facts.attempt("model", lambda found: of_run.of_model(found, chunks, self._settings, self._loop))
        self.facts.attempt("backends", lambda found: of_run.of_objects(found, chunks, optimizer))
        self._write_facts()

    def on_step(self, step: Step) -> None:
        """Write what changes, if it is time; after the first step at once, for only then this start has something to lose."""
        if time.monotonic() - self._written >= self._every_s:
            self._write()

    def on_failure(self, what: str) -> None:
        """Note it, so that nobody takes what is missing for what there was."""
        self._failed.append(what)
        self._log.write(facts={"failed": self._failed})

    def on_end(self, error: BaseException | None) -> None:
        """Write what is known in the end; on rank 0, assemble the receipt from what there is."""
        self._write()
        if self._caches is not None:
            now = of_run.cache_files()
            added = {name: max(0, now[name] - count) for name, count in self._caches.items()}
            self._log.write(facts={"cache.files": self._caches, "cache.added": added})
        if self._log.rank == 0:
            if error is None:  # the others may hang after an error
                _await([self._log.path.with_name(f"rank_{rank:05d}.jsonl") for rank in range(1, self._log.world_size)])
            try:
                write(self._log.run)
            except DataError as problem:
                logger.error("the receipt was not written: %s", problem)
        self._chunks = ()

    def _write_facts(self) -> None:
        self._log.write(facts={**self.facts.values, "unknown": self.facts.unknown})

    def _write(self) -> None:
        """Write what has changed since the model stood: memory, the experts' tokens, and what patches run."""
        self._written = time.monotonic()
        # What patches do shows only as they do it, and what graphs hold once they have been captured.
        known: dict[str, Any] = {
            "noted": [*observed.notes(), *of_run.graphs(self._chunks)],
            "routing": self._routes.record(),
            "indexer.overlap": self._indices.by_pair,
        }
        if self._chunks:
            try:
                known |= of_run.memory(self._chunks)
            except Exception as error:  # after another error the device may not answer, and the last peaks stay
                self._failed.append(f"the peaks of the memory are those of an earlier reading: {error!r}"[:500])
                known["failed"] = self._failed
            known |= of_run.fp8()
        self._log.write(facts=known)


def _await(files: Iterable[Path]) -> None:
    """Give the other ranks a few seconds to write how they ended; one whose file is elsewhere is not waited for."""
    until, waiting = time.monotonic() + PATIENCE_S, [file for file in files if file.is_file()]
    while time.monotonic() < until and (waiting := [file for file in waiting if not _has_ended(file)]):
        time.sleep(0.05)


def _has_ended(file: Path) -> bool:
    """Whether a rank has written how it ended, and what it knows then."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 2**20))
        end = stream.read().rpartition(b'"how": ')
    return bool(end[1]) and b'"facts": {"noted"' in end[2]
