"""The file that every rank of every start writes: what is in it whatever happens, and what is read of one that is damaged."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Log, Start, replace
from megacpp_mcore.observe.steps import kept, read_steps
from tests.lanes import exhaustive_but
from tests.observe.recorded import SECOND, a_step, append, at, file_of, stepped, with_loss, write_start
from tests.tiny_run import ROOT

RECORDER = """
import select, sys, time
from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.clock import Clock, Phase, process_age_ns
from megacpp_mcore.observe.events import Log, Step
clock = Clock(age_ns=process_age_ns())
log = Log(sys.argv[1], 0, 1, clock, heartbeat_s=0.01)
recorder = goodput.Recorder(log, with_losses=True)
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    with clock.within(Phase.STEP):
        time.sleep(0.0005)
    recorder.on_step(Step(number, 0, 0.0, 8 * number, {"lm loss": 1 / number}, 1.0, 1e-3, False))
    print(number, flush=True)
recorder.on_end(None)
log.close()
assert "torch" not in sys.modules
"""


def start_recorder(run: Path) -> subprocess.Popen[str]:
    """Start a process that records until its input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", RECORDER, str(run)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("times", exhaustive_but([3, 20], 3))
def test_a_process_killed_at_any_moment_leaves_all_but_the_line_it_was_writing(tmp_path: Path, times: int) -> None:
    """Every step reported as done is recorded, and every file is complete except for its last line."""
    moments = random.Random(15)
    for number in range(1, times + 1):
        process = start_recorder(tmp_path)
        assert process.stdout is not None
        reported = [int(process.stdout.readline())]
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        killed_ns = time.time_ns()
        reported += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        *complete, _ = file_of(tmp_path, number).read_bytes().split(b"\n")
        assert all(json.loads(line) for line in complete)
        start = events.read(tmp_path)[0][-1]
        steps = [step.step for step in start.steps]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) - 1 <= reported[-1] <= len(steps)
        assert start.how is None
        assert abs(killed_ns - start.ended_ns) < 10 * SECOND  # a busy machine may let it wait for its turn
    assert goodput.of_rank(events.read(tmp_path)[0]).starts == times
    assert events.overlap(events.read(tmp_path)) == ""


def test_a_start_never_opens_the_file_of_another(tmp_path: Path) -> None:
    logs = [Log(tmp_path, rank, 8, Clock(), heartbeat_s=60) for rank in (3, 3, 4)]
    assert [log.path for log in logs] == [file_of(tmp_path, 1, 3), file_of(tmp_path, 2, 3), file_of(tmp_path, 1, 4)]
    file_of(tmp_path, 1, 3).unlink()  # a folder that somebody tidied up
    (tmp_path / "start_3").write_text("")  # and something else of that name
    logs.append(Log(tmp_path, 3, 8, Clock(), heartbeat_s=60))
    assert logs[-1].path == file_of(tmp_path, 4, 3)
    for log in logs:
        log.close()
    with pytest.raises(DataError, match=str(file_of(tmp_path / "start_3", 1, 3))):
        Log(tmp_path / "start_3", 3, 8, Clock())


def test_a_heartbeat_is_a_line_with_nothing_but_its_time(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, 1, Clock(), heartbeat_s=0.02)
    until = time.monotonic() + 30
    while len(log.path.read_text().splitlines()) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [list(line) for line in lines[1:4]] == [["at"]] * 3
    ages = [line["at"] - lines[0]["began"] for line in lines[1:]]
    assert ages == sorted(ages)
    time.sleep(0.1)
    assert len(log.path.read_text().splitlines()) == len(lines)


class Full(io.FileIO):
    """A file on a disk with room for some bytes."""

    room = 30

    def write(self, content: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = super().write(content[: self.room]) or 0
        self.room -= written
        return written


@pytest.mark.parametrize(("first", "why"), [(21, "9 of 21"), (30, "No space left")])
def test_a_full_disk_ends_the_recording_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, why: str
) -> None:
    """The line that did not fit stays truncated, and nothing is written after it, even once there is room again."""
    log = Log(tmp_path, 0, 1, Clock(), heartbeat_s=60)
    log._file.close()
    size, log._file = log.path.stat().st_size, (stream := Full(log.path, "ab"))
    for wanted in (first, 21, 21):
        log.write(7, x="-" * (wanted - len('{"at": 7, "x": ""}\n')))
        stream.room += 100 * bool(caplog.text)
    log.close()
    assert log.path.stat().st_size == size + 30
    assert caplog.text.count(f"{log.path}: ") == caplog.text.count(why) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("no JSON", "JSONDecodeError"),
        ("[]", "AttributeError"),
        (at(2, {}, step=2), "KeyError: 'resumed_at'"),
    ],
)
def test_a_line_that_is_damaged_is_named_with_its_number(tmp_path: Path, line: Any, named: str) -> None:
    path = write_start(tmp_path, 1, 0, with_loss(stepped(1, 1)))
    path.write_text(path.read_text() + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    append(path, stepped(3, 3))
    with pytest.raises(DataError, match=rf"{path}, line 3: .*\({named}"):
        events.read(tmp_path)


def test_a_torn_last_line_is_not_there_and_neither_is_what_no_rank_wrote(tmp_path: Path) -> None:
    path = write_start(tmp_path, 1, 0, stepped(1, 1))
    path.with_name("rank_x.jsonl").write_text("?\n")
    for torn in ('{"at": 3', "\0\0\0", '{"at": 3}'):
        path.write_text(path.read_text().rpartition("\n")[0] + "\n" + torn)
        (start,) = events.read(tmp_path)[0]
        assert (start.done, start.ended_ns) == ([1], SECOND)
    path.write_text('{"beg')
    for run in (tmp_path, tmp_path / "nowhere"):
        assert events.read(run, may_be_empty=True) == {}
        with pytest.raises(DataError, match=f"{run} "):
            events.read(run)


def test_the_processes_of_a_start_are_those_that_were_there_together(tmp_path: Path) -> None:
    """Four ranks, then two (whose files are in the next folder), then four, whose numbers differ."""
    for rank in range(4):
        write_start(tmp_path, 1, rank, at(10), began=rank / 10, world_size=4)
    for rank in range(2):
        write_start(tmp_path, 2, rank, at(30), began=20 + rank / 10, world_size=2)
    for rank in range(4):
        write_start(tmp_path, 3 if rank < 2 else 2, rank, at(50), began=40 - rank / 10, world_size=4)
    groups = events.grouped(events.read(tmp_path))
    assert [[start.rank for start in group] for group in groups] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert [group[0].ended_ns // SECOND for group in groups] == [10, 30, 50]
    append(file_of(tmp_path, 1, 0), at(45))
    assert [start.name for start in events.overlaps(events.read(tmp_path)[0])] == ["start_1", "start_2", "start_3"]
    assert events.overlaps(events.read(tmp_path)[1]) == []


@pytest.mark.parametrize("name", ["pipe", "folder", "file/below", "nowhere/file", "link"])
def test_what_cannot_be_written_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    (tmp_path / "file").write_text("as it was")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=str(tmp_path / name)):
        replace(tmp_path / name, "text")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "as it was"


def test_the_steps_of_a_run_are_those_that_its_last_ranks_wrote(tmp_path: Path) -> None:
    """Two starts, of which the second had fewer processes; read while it grows, and torn."""
    assert read_steps(tmp_path) == []
    for rank in (0, 1):
        steps = [stepped(number, number) for number in (1, 2)]
        write_start(tmp_path, 1, rank, *(map(with_loss, steps) if rank else steps), at(3), world_size=2)
    assert [step.step for step in read_steps(tmp_path)] == [1, 2]
    path = write_start(tmp_path, 2, 0, with_loss(stepped(12, 2, resumed_at=1), 1.5), began=10)
    with path.open("a") as stream:
        stream.write('{"at": 3, "losses"')
    *_, last = recorded = read_steps(tmp_path)
    assert [step.step for step in recorded] == [1, 2, 2]
    assert (last.resumed_at, last.losses) == (1, {"lm loss": 1.5})
    with pytest.raises(DataError, match=str(tmp_path / "nowhere")):
        read_steps(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("recorded", "left"),
    [
        ([], []),
        ([(0, [1, 2, 3])], [(1, 0), (2, 0), (3, 0)]),
        # resumed from 2: 3, 4 and 5 are rolled back, and only 3 was repeated
        ([(0, [1, 2, 3, 4, 5]), (2, [3])], [(1, 0), (2, 0), (3, 2)]),
        # twice from the same checkpoint, and then from one before that
        ([(0, [1, 2]), (2, [3, 4]), (2, [3])], [(1, 0), (2, 0), (3, 2)]),
        ([(0, [1, 2]), (2, [3, 4]), (1, [2, 3])], [(1, 0), (2, 1), (3, 1)]),
        # started over
        ([(0, [1, 2, 3]), (0, [1])], [(1, 0)]),
        # steps that the log interval left out
        ([(0, [1, 10, 20]), (10, [11])], [(1, 0), (10, 0), (11, 10)]),
        ([(0, [1, 10, 15]), (10, [20])], [(1, 0), (10, 0), (20, 10)]),
    ],
)
def test_what_a_restart_rolled_back_is_gone(recorded: list[tuple[int, list[int]]], left: list[tuple[int, int]]) -> None:
    starts = [
        Start(1, 0, 1, 0, resumed_at=resumed_at, steps=[a_step(number, resumed_at=resumed_at) for number in numbers])
        for resumed_at, numbers in recorded
    ]
    assert [(step.step, step.resumed_at) for step in kept(starts)] == left
