"""A run's receipt while it trains: every rank logs its facts, and rank 0 assembles the receipt at the end.

Nothing is exchanged between ranks. No torch at import.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.backends import built, observed
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.events import Listener, Log, Step
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.receipts import facts as of_run
from megacpp_mcore.observe.receipts.assemble import WARM_UP_STEPS, write
from megacpp_mcore.observe.receipts.fields import Facts
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.patches.hybrid_flops import packed_pairs
from megacpp_mcore.policy import LaunchPolicy
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.util.card import Samples

logger = logging.getLogger(__name__)

_RARELY = 1 / 20
"""Interval between two writes of the facts, as a share of the run so far: a killed run loses that much; files stay short."""
PATIENCE_S = 5.0
"""How long rank 0 waits at the end for the other ranks' last lines, so that the receipt does not report them as running."""


class ReceiptWriter(Listener):
    """Writes this rank's facts when the model is built, from time to time, and at the end; rank 0 then assembles the receipt.

    It must be the last of the listeners: at the end it reads what the others wrote.

    Args:
        settings: the file that ``MEGACPP_CONFIG`` names, where the run's spec is one of ours.
        routes, indices: listeners that read the device; this one takes their last reading.
        every_s: minimum seconds between two writes, so that a slow file system does not slow training.
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
        self._settings, self.routes, self.indices, self.loop = settings, routes, indices, loop
        self._written = -math.inf
        self._known: dict[str, Any] = {}
        """The last written values of facts that change."""
        self.facts = of_run.at_start(launched)
        """Known fields of the run, and why the others are unknown."""
        self._samples, self._steps = Samples(), 0
        self._chunks: Sequence[Any] = ()
        self._count: Callable[[Facts, tuple[int, ...]], None] = lambda facts, pairs: None
        self._pairs = [0, 0, 0, 0]
        """Attention pairs of packed documents (causal, kept by top-k, in a window), and the steps that had them."""
        self._failed: list[str] = []
        # Entries in this host's caches before anything of this run, its warm-up included, compiles.
        self._compiled = of_run.compiled() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        self._caches = self._compiled() if self._compiled is not None else {}
        observed.forget()  # observations of an earlier run in this process
        self._write_facts()

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Collect and write what the model and Megatron's arguments show."""
        self._chunks = chunks

        def learn(facts: Facts) -> None:
            self._count = of_run.of_model(facts, chunks, self._settings, self.loop)

        self.facts.attempt("model", learn)
        self.facts.attempt("backends", lambda facts: of_run.of_objects(facts, chunks, optimizer))
        self.facts.attempt("card", lambda facts: of_run.card(facts, chunks, self._samples))
        self._write_facts()

    def on_step(self, step: Step) -> None:
        """Write what changes, if it is due: after the first step, then less and less often."""
        self._steps += 1
        if self._steps == WARM_UP_STEPS:  # the window begins
            self._log.on_beat = self._samples.take
        if (pairs := packed_pairs()) is not None:
            self._pairs = [total + more for total, more in zip(self._pairs, (*pairs, 1), strict=True)]
        if time.monotonic() - self._written >= max(self._every_s, _RARELY * self._log.clock.age_ns() / 1e9):
            self._write()

    def on_failure(self, what: str) -> None:
        """Record the failure, so that missing data is not taken for an absence of events."""
        self._failed.append(what)
        self._log.write(facts={"failed": self._failed})

    def on_end(self, error: BaseException | None) -> None:
        """Write the final facts; on rank 0, assemble the receipt from what the ranks have written."""
        self._write()
        if self._compiled is not None:
            added = {name: max(0, count - self._caches[name]) for name, count in self._compiled().items()}
            self._log.write(facts={"cache.files": self._caches, "cache.added": added})
        self._log.write(recorded=True)
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
        """Write what has changed since the model was built: memory, the experts' tokens, and what patches run."""
        self._written = time.monotonic()
        # Patches note what they do only when they run, and graphs hold something only once captured.
        current: dict[str, Any] = {
            "noted": [*observed.notes(), *built.graphs(self._chunks)],
            "routing": self.routes.record(),
            "indexer.overlap": dict(self.indices.by_pair),
            **self._samples.record(),
        }
        *pairs, steps = self._pairs
        if steps:
            self.facts.attempt("flops", lambda facts: self._count(facts, tuple(number // steps for number in pairs)))
            current["flops"] = self.facts.values.get("flops")
        if self._chunks:
            try:
                current |= of_run.memory(self._chunks)
            except Exception as error:  # after another error the device may not answer; keep the last peaks
                self._failed.append(f"the memory peaks are from an earlier reading: {error!r}"[:500])
                current["failed"] = [*self._failed]
            current |= of_run.fp8()
        changed = {name: value for name, value in current.items() if self._known.get(name) != value}
        self._known |= changed
        self._log.write(facts=changed)


def _await(files: Iterable[Path]) -> None:
    """Wait a few seconds for the other ranks to write how they ended; ranks without a file here are skipped."""
    until, waiting = time.monotonic() + PATIENCE_S, [file for file in files if file.is_file()]
    while time.monotonic() < until and (waiting := [file for file in waiting if not _has_ended(file)]):
        time.sleep(0.05)


def _has_ended(file: Path) -> bool:
    """Return whether a rank has finished writing; only heartbeats may follow."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 2**12))
        return b'"recorded": true' in stream.read()
