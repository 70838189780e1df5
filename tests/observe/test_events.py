"""The file that every rank of every start writes: what is in it whatever happens, and what is read of one that is damaged."""

from __future__ import annotations

import json
import math
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
from megacpp_mcore.observe.events import Log, replace
from tests.observe.recorded import SECOND, append, at, file_of, stepped, with_loss, write_start
from tests.tiny_run import ROOT

RECORDER = """
import sys, time
from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.clock import Clock, Phase, process_age_ns
from megacpp_mcore.observe.events import Log, Step
clock = Clock(age_ns=process_age_ns())
log = Log(sys.argv[1], 0, 1, clock, heartbeat_s=0.01)
recorder = goodput.Recorder(log, with_losses=True)
until, number = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < until:
    number += 1
    with clock.within(Phase.STEP):
        time.sleep(0.0005)
    recorder.on_step(Step(number, 0, 0.0, 8 * number, {"lm loss": 1 / number}, 1.0, 1e-3, False))
    print(number, flush=True)
recorder.on_end(None)
log.close()
assert "torch" not in sys.modules
"""


def start_recorder(run: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RECORDER, str(run), str(seconds)]
    return subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def test_a_process_killed_at_any_moment_leaves_all_but_the_line_it_was_writing(tmp_path: Path) -> None:
    """Twenty times: every step that was reported done is there, and every file but its last line is whole."""
    moments = random.Random(15)
    for number in range(1, 21):
        process = start_recorder(tmp_path, 60)
        assert process.stdout is not None
        reported = [int(process.stdout.readline())]
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        killed_ns = time.time_ns()
        reported += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        *whole, _ = file_of(tmp_path, number).read_bytes().split(b"\n")
        assert all(json.loads(line) for line in whole)
        (start,) = events.read_file(file_of(tmp_path, number), number, 0)
        steps = [step.step for step in start.steps]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) - 1 <= reported[-1] <= len(steps)
        assert start.how is None
        assert abs(killed_ns - start.ended_ns) < SECOND
    assert goodput.read(tmp_path)[0].starts == 20
    assert goodput.read(tmp_path)[0].notes == ()


def test_twenty_recorders_at_once_all_end_and_are_reported(tmp_path: Path) -> None:
    """Nobody waits for another, nobody is refused, and nobody writes to another's file; a receipt is disqualified."""
    from megacpp_mcore.observe import receipts

    processes = [start_recorder(tmp_path, 6) for _ in range(20)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 20
    starts = events.read(tmp_path)[0]
    assert [start.number for start in starts] == list(range(1, 21))
    assert {start.how for start in starts} == {events.FINISHED}
    assert all([step.step for step in start.steps] == list(range(1, start.done + 1)) for start in starts)
    both = events.overlaps(starts)
    assert len(both) > 1
    (note,) = goodput.read(tmp_path)[0].notes
    assert all(start.name in note for start in both)
    (evidence,) = (
        one["evidence"] for one in receipts.read(tmp_path)["disqualifiers"] if one["name"] == "overlapping starts"
    )
    assert all(start.name in evidence for start in both)


def test_a_start_never_opens_the_file_of_another(tmp_path: Path) -> None:
    first = Log(tmp_path, 3, 8, Clock(), heartbeat_s=60)
    second = Log(tmp_path, 3, 8, Clock(), heartbeat_s=60)
    other = Log(tmp_path, 4, 8, Clock(), heartbeat_s=60)
    assert [log.path for log in (first, second, other)] == [
        file_of(tmp_path, 1, 3), file_of(tmp_path, 2, 3), file_of(tmp_path, 1, 4),
    ]  # fmt: skip
    for log in (first, second, other):
        log.close()
    file_of(tmp_path, 1, 3).unlink()  # a folder that somebody tidied up
    third = Log(tmp_path, 3, 8, Clock(), heartbeat_s=60)
    assert third.path == file_of(tmp_path, 3, 3)
    third.close()


def test_a_heartbeat_is_a_line_where_nothing_else_is_written(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("written", [None, 20])
def test_a_full_disk_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: int | None
) -> None:
    log = Log(tmp_path, 0, 1, Clock(), heartbeat_s=60)
    log.write(x=1)
    whole = os.write

    def full(output: int, content: bytes) -> int:
        if written is None:
            raise OSError(28, "No space left on device")
        return whole(output, content[:written])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log.write(x=2)
    log.write(x=3)
    log.close()
    (start,) = events.read(tmp_path)[0]
    assert start.ended_ns >= start.began_ns
    assert len(log.path.read_bytes().split(b"\n")) == 3
    assert caplog.text.count("this process records nothing more there") == 1
    assert ("20 of" if written else "No space left on device") in caplog.text


@pytest.mark.parametrize("place", ["run", "run/start_1"])
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("")
    if place == "run":
        with pytest.raises(
            DataError, match=r"run/start_1/rank_00000\.jsonl: .*expected a folder that can be written to"
        ):
            Log(tmp_path / "run", 0, 1, Clock())
    else:
        log = Log(tmp_path / "run", 0, 1, Clock())
        assert log.path == file_of(tmp_path / "run", 2)
        log.close()


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (at(2, {"step": -5}), r"phases\[step\] is -5000000000 \(int\)"),
        (at(2, {"sleep": 5}), r"a key of phases is 'sleep' \(str\)"),
        (at(2, {}, step="2", resumed_at=0), r"step is '2' \(str\)"),
        (stepped(2, 1), "step is 1 after 1"),
        ({"at": 10**20}, "at is 1000"),
        ({"phases": {}}, "it has no at"),
        (with_loss(stepped(2, 2)) | {"grad_norm": "much"}, r"grad_norm is 'much' \(str\)"),
        (with_loss(stepped(2, 2)) | {"losses": {"lm loss": None}}, r"losses\[lm loss\] is None"),
        (with_loss(stepped(2, 2)) | {"tokens": math.inf}, "tokens is inf"),
        ({"at": 5, "facts": []}, r"facts is \[\] \(list\)"),
    ],
)
def test_a_line_that_is_damaged_is_named_with_its_value(tmp_path: Path, line: dict[str, Any], named: str) -> None:
    path = write_start(tmp_path, 1, 0, with_loss(stepped(1, 1)), line, stepped(3, 3))
    with pytest.raises(DataError, match=rf"{path}, line 3: .*{named}"):
        events.read(tmp_path)
    damaged: list[tuple[int, DataError]] = []
    write_start(tmp_path, 1, 1)
    assert list(events.read(tmp_path, damaged)) == [1]
    ((rank, error),) = damaged
    assert (rank, "line 3" in str(error)) == (0, True)


@pytest.mark.parametrize("text", ["no JSON", "[]", '"', "[" * 100_000 + "]" * 100_000, '{"began": 1}', '{"at": 3}'])
def test_a_first_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = write_start(tmp_path, 1, 0)
    path.write_text(text + "\n")
    with pytest.raises(DataError, match=rf"{path}, line 1: "):
        events.read(tmp_path)


def test_a_torn_last_line_is_not_there(tmp_path: Path) -> None:
    path = write_start(tmp_path, 1, 0, stepped(1, 1))
    for torn in ('{"at": 3', "\0\0\0", '{"at": 3}'):
        path.write_text(path.read_text().rpartition("\n")[0] + "\n" + torn)
        (start,) = events.read(tmp_path)[0]
        assert (start.done, start.ended_ns) == (1, SECOND)
    path.write_text('{"beg')
    assert events.read(tmp_path) == {}


def test_names_and_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the folder of a run that was observed"):
        events.read(tmp_path)
    (tmp_path / "goodput").mkdir()
    with pytest.raises(DataError, match=r"an older version recorded it, whose receipt\.json can be named"):
        events.read(tmp_path)
    path = write_start(tmp_path, 1, 0)
    odd = path.with_name("rank_x.jsonl")
    odd.write_text("")
    with pytest.raises(DataError, match=r"rank_x\.jsonl names no start and rank"):
        events.read(tmp_path)
    odd.unlink()
    os.mkfifo(path.with_name("rank_00005.jsonl"))
    with pytest.raises(DataError, match=r"rank_00005\.jsonl is no regular file"):
        events.read(tmp_path)
    path.with_name("rank_00005.jsonl").unlink()
    path.rename(path.with_name("rank_00007.jsonl"))
    with pytest.raises(DataError, match="rank is 0; expected the one in the name of the file"):
        events.read(tmp_path)


def test_the_processes_of_a_start_are_those_that_were_there_together(tmp_path: Path) -> None:
    """Four ranks, then two (whose files are in the next folder), then four, whose numbers differ."""
    for rank in range(4):
        write_start(tmp_path, 1, rank, at(10), began=rank / 10, world_size=4)
    for rank in range(2):
        write_start(tmp_path, 2, rank, at(30), began=20 + rank / 10, world_size=2)
    for rank in range(4):
        write_start(tmp_path, 3 if rank < 2 else 2, rank, at(50), began=40 - rank / 10, world_size=4)
    groups = events.grouped(events.read(tmp_path))
    assert [[one.rank for one in group] for group in groups] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert [group[0].ended_ns // SECOND for group in groups] == [10, 30, 50]
    append(file_of(tmp_path, 1, 0), at(45))
    assert [one.name for one in events.overlaps(events.read(tmp_path)[0])] == ["start_1", "start_2", "start_3"]
    assert events.overlaps(events.read(tmp_path)[1]) == []


def test_times_ahead_of_this_machine_s_clock_are_doubtful(tmp_path: Path) -> None:
    ahead_s = time.time() + 3600
    write_start(tmp_path, 1, 0, at(ahead_s), began=ahead_s - 5)
    (note,) = goodput.read(tmp_path)[0].notes
    assert note.startswith("start_1 ends 3")
    assert "ahead of the clock of this machine" in note


# --- Files that are replaced ------------------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("first", "second"):  # the link leads to nothing at first
        replace(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("name", ["", "pipe", "folder", "loop", "file/below", "nowhere/file"])
def test_what_cannot_be_written_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("as it was")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="expected"):
        replace(tmp_path / name if name else Path(), "text")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "as it was"
