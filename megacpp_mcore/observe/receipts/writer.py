"""A run's receipt: every rank writes its own part as it goes, and the receipt is a pure function of the run's folder.

Nothing is exchanged between ranks. A part is replaced as a whole at each start, now and then, and when the run ends, also when
an error ends it; what SIGKILL leaves is the last one, which says ``running``. A start that ends without a step leaves the part
of the one before it. No torch at import, and none to assemble.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import observed
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.files import make_folder, replace
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.loop import Loop, StockLoop
from megacpp_mcore.observe.receipts.assembly import RECEIPT, now, part_file, read_part
from megacpp_mcore.observe.receipts.folder import write
from megacpp_mcore.observe.receipts.schema import FINISHED, RUNNING, SCHEMA
from megacpp_mcore.observe.receipts.window import WARM_UP_STEPS

if TYPE_CHECKING:
    from megacpp_mcore.config import PluginConfig
    from megacpp_mcore.observe.receipts.facts import Facts
    from megacpp_mcore.observe.routing import Routing
    from megacpp_mcore.observe.steps import Step
    from megacpp_mcore.policy import LaunchPolicy

logger = logging.getLogger(__name__)

_OF_A_PROCESS = re.compile(r"\.[0-9]+")
PATIENCE_S = 5.0
"""How long rank 0 waits in the end for the last parts of others."""


class ReceiptWriter(Listener):
    """Writes this rank's part now and then and at the end; rank 0 then assembles the receipt.

    It has to be the last of the listeners: at the end it reads what the others wrote.

    Args:
        run: the run's folder.
        rank: this process's rank.
        settings: the file that ``MEGACPP_CONFIG`` names, where the run's spec is one of ours.
        launched: the launch policy; None when the launcher did not start the run.
        routes: what counts the experts' tokens; it reads the device, and this asks for what it has read.
        loop: the loop that trains; None: stock Megatron's.
        every_s: seconds between two writings at least; a file system may be slow, and this must not be felt.
        warm_up_steps: steps at each start that the receipt does not measure.
        notes: what a reader should know.

    Raises:
        DataError: the folder cannot be made.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        rank: int,
        *,
        settings: PluginConfig | None = None,
        launched: LaunchPolicy | None = None,
        routes: Routing | None = None,
        loop: Loop | None = None,
        every_s: float = 30.0,
        warm_up_steps: int = WARM_UP_STEPS,
        notes: Sequence[str] = (),
    ) -> None:
        self.run = Path(run)
        self.rank = rank
        self.every_s = every_s
        self._written = -math.inf
        self._path = part_file(run, rank)
        self._settings, self._launched, self._routes = settings, launched, routes
        self._loop = loop or StockLoop()
        self._part: dict[str, Any] = {
            "schema": SCHEMA,
            "rank": rank,
            "warm_up_steps": warm_up_steps,
            "notes": list(notes),
            "failed": [],
            "steps": 0,
        }
        self._began_at = now()
        self._earlier: dict[str, Any] = {}
        self._deaf = False
        self._facts: Facts | None = None
        self._chunks: Sequence[Any] = ()
        self._caches = self._count_caches()
        self._warned = False
        observed.forget()  # of a run before in this process
        make_folder(self._path.parent)
        self._remove_leftovers()
        self._say_running()

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Learn what the model and Megatron's arguments say, and write it."""
        from megacpp_mcore.observe.receipts import facts as receipt_facts
        from megacpp_mcore.observe.receipts import modules as receipt_modules

        self._chunks = chunks
        facts = self._learn_start()
        facts.attempt("model", lambda found: receipt_facts.of_model(found, chunks, self._settings, self._loop))
        facts.attempt("backends", lambda _: self._part.update(local=receipt_modules.local(chunks, optimizer)))
        facts.attempt("routing", lambda _: self._part.update(moe=receipt_modules.moe(chunks)))
        self._write(RUNNING)

    def on_step(self, step: Step) -> None:
        """Write the part if it is time; after the first step at once, for only then this start has something to lose."""
        self._part["steps"] += 1
        self._part.pop("before", None)
        if self._part["steps"] == 1 or time.monotonic() - self._written >= self.every_s:
            self._write(RUNNING)

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """Note it, so that nobody takes what is missing for what there was; the next step writes it."""
        said = str(error).partition("\n")[0]
        self._part["failed"].append(
            f"{type(failed).__name__} failed in step {step} and recorded nothing more: {type(error).__name__}: {said}"
        )
        self._written = -math.inf
        self._deaf = self._deaf or failed is self

    def on_end(self, error: BaseException | None) -> None:
        """Write how it ended, or that it did without a step; on rank 0, assemble the receipt from what there is."""
        self._learn_start()
        how = FINISHED if error is None else type(error).__name__
        outlived = self._did_nothing()
        if outlived:
            self._leave_earlier(how)
        else:
            self._part.pop("before", None)
            self._write(how)
        if self.rank == 0:
            if error is None or outlived:  # of a run that trained, the others may hang after an error
                self._await_others()
            try:
                write(self.run)
            except DataError as problem:
                logger.error("the receipt was not written: %s", problem)
        self._chunks = ()

    def _did_nothing(self) -> bool:
        """Whether this start, which ends, has done no step, and an earlier one that came to a model has more to say of the run.

        Of two that came to a model and to no step, it is the later one that has.
        """
        if self._part["steps"] or self._deaf or not _knows_model(self._earlier):
            return False
        return not self._chunks or self._earlier.get("steps", 1) > 0  # an older part has no count

    def _leave_earlier(self, how: str) -> None:
        """Leave what an earlier start said of itself, and that this one came to nothing."""
        before = self._earlier.get("without_step", {"number": 0})
        said = {"began": self._began_at, "how": how, "number": before["number"] + 1}
        self._replace(self._earlier | {"without_step": said})

    def _await_others(self) -> None:
        """Give the other ranks a few seconds to end, so that the receipt does not call them running."""
        world_size = 1 if self._facts is None else self._facts.values["parallelism.world_size"]
        waiting = [part_file(self.run, rank) for rank in range(1, world_size)]
        until = time.monotonic() + PATIENCE_S
        while waiting and time.monotonic() < until:
            waiting = [path for path in waiting if _may_end(path)]
            if waiting:
                time.sleep(0.05)

    def _learn_start(self) -> Facts:
        if self._facts is None:
            from megacpp_mcore.observe.receipts import facts as receipt_facts

            self._facts = receipt_facts.at_start(self._settings, self._launched)
        return self._facts

    @staticmethod
    def _count_caches() -> dict[str, int] | None:
        """The files in the caches of this host, before anything of this run compiles, its warm-up included."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        from megacpp_mcore.observe.receipts import facts as receipt_facts

        return receipt_facts.cache_files()

    def _say_running(self) -> None:
        """Write that this rank runs; until there is a model, what an earlier start said of the run is all that is known.

        What it said is kept apart, too, until there is a step: this start may be killed, and the next one has to know.
        """
        if self._path.is_file():
            try:
                self._earlier = read_part(self._path)
            except DataError as problem:
                logger.warning("what an earlier start left of the receipt is not kept: %s", problem)
        self._earlier = self._earlier.get("before", self._earlier)
        if _knows_model(self._earlier):
            self._part["before"] = self._earlier
        known = dict(self._earlier)
        for name in ("cache", "without_step"):  # which are of a start that has ended
            known.pop(name, None)
        self._replace(known | self._part | {"status": RUNNING, "written_at": now()})

    def _remove_leftovers(self) -> None:
        """Remove what a process left of this rank that was killed as it wrote."""
        for path in (self._path, self.run / RECEIPT) if self.rank == 0 else (self._path,):
            for leftover in path.parent.glob(f".{path.name}.*"):
                if _OF_A_PROCESS.fullmatch(leftover.suffix):
                    with contextlib.suppress(OSError):
                        leftover.unlink()

    def _write(self, status: str) -> None:
        """Write what is known now."""
        from megacpp_mcore.observe.receipts import facts as receipt_facts

        self._written = time.monotonic()
        part = self._part | {"status": status, "written_at": now()}
        if self._facts is not None:
            part |= {"run": self._facts.values, "unknown": self._facts.unknown}
        if self._chunks:
            self._read_memory(part)
        part["noted"] = observed.notes()  # what patches do shows only as they do it
        if self._routes is not None:
            part["routing"] = self._routes.record()
        if self._caches is not None and status != RUNNING:
            files = receipt_facts.cache_files()
            part["cache"] = {
                "files": self._caches,
                "added": {name: max(0, files[name] - count) for name, count in self._caches.items()},
            }
        self._replace(part)

    def _read_memory(self, part: dict[str, Any]) -> None:
        """Put the peaks in; where an error ended the run the device may not answer, and then the last ones stay."""
        from megacpp_mcore.observe.receipts import modules as receipt_modules

        try:
            self._part["memory"] = part["memory"] = receipt_modules.memory(self._chunks)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            if "memory" in part:
                part["failed"] = [*part["failed"], f"the peaks of the memory are those of an earlier reading: {why}"]
            else:
                part["unknown"] = part.get("unknown", {}) | {"memory": why}

    def _replace(self, part: dict[str, Any]) -> None:
        """Replace the part; a full disk must not end training, so that it is said once and training goes on."""
        try:
            replace(self._path, json.dumps(part))
        except DataError as problem:
            if not self._warned:
                logger.warning("the run goes on without its receipt: %s", problem)
            self._warned = True


def _knows_model(part: Mapping[str, Any]) -> bool:
    """Whether a part tells of a model, and not only of the start of a process."""
    return "moe_enabled" in part.get("run", {})


def _may_end(path: Path) -> bool:
    """Whether a part is still to come, or to say that its rank has ended; a damaged one says nothing more."""
    try:
        return not path.is_file() or read_part(path)["status"] == RUNNING
    except DataError:
        return False
