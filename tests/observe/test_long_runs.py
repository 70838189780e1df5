"""What reading the files of long runs of many ranks takes: one rank's steps at a time are in memory."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import report_page
from megacpp_mcore.observe import events, receipts
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Log
from megacpp_mcore.observe.receipts.assemble import assemble
from tests.observe.recorded import a_step, at, facts, file_of, receipt_writer, stepped, with_loss, write_start

STEP_S = 1.7
BACKEND = {
    "requested": "auto",
    "observed": "triton",
    "speed": "kernel",
    "slower_than_best": False,
    "reason": "the best",
}


def lines_of(rank: int, ranks: int, steps: int) -> Iterator[dict[str, Any]]:
    """What a rank of a run leaves: backends by layer, as every rank, its own steps, each with a heartbeat, and memory."""
    yield facts(backends=[{"op": f"op {op}", "layer": layer, **BACKEND} for layer in range(52) for op in range(10)])
    step_s = STEP_S + rank / 1e4
    for number in range(1, steps + 1):
        yield at((number - 0.5) * step_s)
        line = stepped(number * step_s, number, step_s - 0.003, idle=0.002, data=0.001)
        yield with_loss(line) if rank == ranks - 1 else line
        yield at(number * step_s, facts={"memory.allocated_peak_bytes": 10**11 + number})
    yield at(steps * step_s, {"idle": 0.1}, how="finished")


def peak_of(read: Callable[[], object]) -> int:
    """The bytes that ``read`` holds at most."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_steps_of_all_ranks(tmp_path: Path) -> None:
    for ranks in (2, 6):
        for rank in range(ranks):
            write_start(tmp_path / str(ranks), 1, rank, *lines_of(rank, ranks, 200), world_size=ranks)
    assert receipts.read(tmp_path / "6")["step_time"]["rank"] == 5
    a_rank = peak_of(lambda: events.read(tmp_path / "2")) // 2
    for read in (assemble, report_page.read, lambda run: events.read(run, lambda *_: None)):
        few, many = (peak_of(partial(read, tmp_path / ranks)) for ranks in ("2", "6"))
        assert many < few + 0.4 * a_rank, (read, few, many, a_rank)  # all steps of four more ranks are four times that


def test_facts_are_written_where_they_changed_and_more_rarely_as_a_run_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()  # seconds
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    clock = Clock()
    monkeypatch.setattr(clock, "age_ns", lambda: round((seconds := next(now)) and seconds * 1e9))
    log = Log(tmp_path, 0, 1, clock, heartbeat_s=3600)
    writer = receipt_writer(log, every_s=30.0)
    for number in range(1, 3001):
        writer.on_step(a_step(number))
    log.close()
    lines = [line for line in file_of(tmp_path).read_text().splitlines() if '"facts"' in line]
    assert sum('"noted"' in line for line in lines) == 1
    assert 40 < len(lines) < 130  # 20 until a twentieth of the run is 30 s, then one every twentieth
