"""Goodput: every nanosecond of a run in one class, across deaths and restarts."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Log
from megacpp_mcore.observe.goodput import CLASSES, DOWN, LOST, PRODUCTIVE, RECOVERY
from tests.observe.recorded import SECOND, a_step, at, stepped, write_start


class Time:
    """A clock's nanoseconds, which a test moves."""

    def __init__(self) -> None:
        self.ns = 7

    def __call__(self) -> int:
        return self.ns

    def go(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def test_the_innermost_phase_has_the_time_and_the_parts_sum_to_the_whole() -> None:
    time = Time()
    clock = Clock(now=time, age_ns=3 * SECOND)
    time.go(1)
    with clock.within(Phase.LOAD):
        time.go(2)
    clock.become(Phase.IDLE)
    with clock.within(Phase.STEP):
        time.go(1)
        with clock.within(Phase.DATA):
            time.go(0.5)
        time.go(1)
    time.go(0.25)
    assert clock.take() == {
        Phase.STARTUP: 4 * SECOND, Phase.LOAD: 2 * SECOND, Phase.STEP: 2 * SECOND, Phase.DATA: SECOND // 2,
        Phase.IDLE: SECOND // 4,
    }  # fmt: skip
    assert clock.elapsed_ns() == round(8.75 * SECOND)
    time.go(1)
    assert clock.take() == {Phase.IDLE: SECOND}


def test_a_phase_that_another_thread_did_not_leave_ends_with_what_it_was_in() -> None:
    time = Time()
    clock = Clock(now=time)
    clock.become(Phase.IDLE)
    clock.enter(Phase.STEP)
    thread = threading.Thread(target=clock.enter, args=(Phase.JIT,))
    thread.start()
    thread.join()
    time.go(1)
    clock.leave(Phase.STEP)
    clock.leave(Phase.JIT)
    time.go(2)
    assert clock.take() == {Phase.JIT: SECOND, Phase.IDLE: 2 * SECOND}


def test_the_age_of_a_process_is_known_to_the_kernel_s_tick() -> None:
    """The start time lies between the times before and after the launch; psutil's may be off by half a second."""
    code = "from megacpp_mcore.observe.clock import process_age_ns as age; from time import time; "
    code += "print(time() - age() / 1e9, -age() / 1e9 + time())"  # the machine may do something else in between
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        after = time.time()
        earliest, latest = map(float, process.communicate()[0].split())
    assert before - 0.05 < latest
    assert earliest < after + 0.05


def record(
    run: Path, time: Time, steps: int, resumed_at: int = 0, how: BaseException | str | None = None
) -> goodput.Goodput | None:
    """Record a start with one step a second, killed if ``how`` is a text; return the goodput it shows last, if any."""
    log = Log(run, 3, 4, Clock(now=time), heartbeat_s=60)
    recorder = goodput.Recorder(log, with_losses=True)
    time.go(2)
    log.clock.become(Phase.IDLE)
    for number in range(resumed_at + 1, resumed_at + steps + 1):
        with log.clock.within(Phase.STEP):
            time.go(1)
        recorder.on_step(a_step(number, resumed_at=resumed_at))
    if not isinstance(how, str):
        recorder.on_end(how)
    log.close()
    return recorder.so_far(resumed_at) if steps else None


def test_the_recorder_writes_what_is_read_and_shows_the_same_so_far(tmp_path: Path) -> None:
    time = Time()
    for steps, resumed_at, how in (
        (5, 0, None),
        (4, 3, "killed"),
        (0, 0, SystemExit(2)),
        (3, 5, ValueError()),
        (2, 7, None),
    ):
        shown = record(tmp_path, time, steps, resumed_at, how)
        totals = goodput.of_rank(events.read(tmp_path)[3])
        assert shown is None or shown.nanoseconds == totals.nanoseconds
    assert (totals.starts, totals.steps, totals.steps_lost) == (5, 9, 5)
    assert totals.nanoseconds[PRODUCTIVE] == 9 * SECOND
    record_of = totals.record()
    assert sum(record_of["seconds"].values()) == pytest.approx(record_of["wall_s"])


def test_the_slowest_rank_is_the_one_the_others_wait_for(tmp_path: Path) -> None:
    for rank, waited in ((0, 0.0), (1, 2.0), (10, 1.0)):
        write_start(tmp_path, 1, rank, stepped(10, 1, 10 - waited, data=waited), at(10, {}, how="finished"), world_size=11)
    write_start(tmp_path, 1, 4, world_size=11)
    ranks = {rank: goodput.of_rank(starts) for rank, starts in events.read(tmp_path).items()}
    assert goodput.slowest_first(ranks) == [1, 10, 0, 4]
    assert [ranks[rank].share for rank in (0, 1, 4, 10)] == [1.0, 0.8, 0.0, 0.9]


class Model:
    """Simulates starts second by second, and classifies every second afterwards."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.starts: list[dict[str, Any]] = []
        now, saved = 1000, 0
        for _ in range(self.random.randint(1, 6)):
            start = self.live(now, self.random.choice([saved, saved, max(0, saved - 2), 0]))
            self.starts.append(start)
            if start["steps"]:
                saved = self.random.randint(start["from"], start["steps"][-1])
            now = start["ended"] + self.random.randint(0, 50)

    def live(self, now: int, saved: int) -> dict[str, Any]:
        """The seconds of one start: what each was spent on, and the step that it was of (None: of none that ended)."""
        seconds: list[tuple[str, int | None]] = [("startup", None)] * self.random.randint(0, 5)
        lines, steps, reported = [at(now + len(seconds), {"startup": len(seconds)})], [], len(seconds)
        for number in range(saved + 1, saved + 1 + self.random.choice([0, 0, 1, 3, 8])):
            phases = ["step", *self.random.choices(["data", "idle", "jit", "checkpoint_save", "step"], k=3)]
            seconds += [(phase, number) for phase in phases]
            lines.append(at(now + len(seconds), Counter(phases), step=number, resumed_at=saved))
            steps.append(number)
            reported = len(seconds)
        rest = self.random.choices(["idle", "evaluation", "step"], k=self.random.randint(0, 4))
        how = self.random.choice([None, None, "finished", "ValueError"])
        seconds += [(phase, None) for phase in rest]
        if how is None:  # nobody knows what the time was spent on in which it was killed
            seconds[reported:] = [("unknown", None)] * len(rest)
            lines.append(at(now + len(seconds)))
        else:
            lines.append(at(now + len(seconds), Counter(rest), how=how))
        return {"began": now, "ended": now + len(seconds), "seconds": seconds, "lines": lines, "steps": steps,
                "from": saved, "how": how}  # fmt: skip

    def classes(self) -> Counter[str]:
        """Seconds by class, one after another."""
        seconds: Counter[str] = Counter()
        dead_since: int | None = None  # when the last start died whose lost work is not yet recovered
        for index, start in enumerate(self.starts):
            died = dead_since is not None
            if died and index:
                seconds[DOWN] += start["began"] - self.starts[index - 1]["ended"]
            undone = min((later["from"] for later in self.starts[index + 1 :] if later["steps"]), default=10**9)
            for phase, number in start["seconds"]:
                if phase == "step":
                    seconds[PRODUCTIVE if number is not None and number <= undone else LOST] += 1
                elif phase == "unknown" and start["steps"]:
                    seconds[LOST] += 1
                elif phase in ("startup", "unknown"):
                    seconds[RECOVERY if died else "startup"] += 1
                else:
                    seconds[phase] += 1
            if start["how"] is None or (start["how"] == "ValueError" and start["steps"]):
                dead_since = start["ended"]
            elif start["how"] == "finished":
                dead_since = None
        return seconds


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_every_second_is_in_the_class_that_a_model_of_single_seconds_puts_it_in(seed: int) -> None:
    model = Model(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number, start in enumerate(model.starts, 1):
            write_start(Path(folder), number, 0, *start["lines"], began=start["began"])
        starts = events.read(folder)[0]
    totals = goodput.of_rank(starts)
    spans = list(goodput.timeline(starts))
    assert all(before.end <= after.begin for before, after in itertools.pairwise(spans))
    expected = model.classes()
    assert totals.nanoseconds == {name: expected[name] * SECOND for name in CLASSES}
    assert totals.steps + totals.steps_lost == sum(len(start["steps"]) for start in model.starts)
