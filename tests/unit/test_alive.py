"""Two processes and one file: who lives is refused the other, who is dead or hangs prevents nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import alive, goodput
from megacpp_mcore.observe.clock import Clock
from tests.unit.tiny_run import ROOT

HOLDER = r"""
import os, sys, time
from megacpp_mcore.observe import goodput
from megacpp_mcore.observe.clock import Clock
alive = goodput.Recorder(sys.argv[1], 0, Clock(), heartbeat_s=float(sys.argv[2])).path.with_suffix(".alive")
while not (alive.exists() and alive.stat().st_size):
    time.sleep(0.01)
child = os.fork()
os.write(1, b"child\n" if not child else b"parent\n")
time.sleep(600)
"""
"""A process that records, and one that it forked, which may outlive it as a checkpoint's worker does."""


@contextlib.contextmanager
def recording(run: Path, heartbeat_s: float = 0.05) -> Iterator[subprocess.Popen[str]]:
    """Another process that records rank 0."""
    command = [sys.executable, "-c", HOLDER, str(run), str(heartbeat_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"child\n", "parent\n"}
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record(run: Path) -> goodput.Recorder:
    """One of this process; how long it waits for another is that one's to say."""
    return goodput.Recorder(run, 0, Clock(), heartbeat_s=3600)


def deaths(run: Path) -> list[bool]:
    """Of every start, whether it noted that the one before it had died."""
    lines = [json.loads(line) for line in goodput.rank_file(run, 0).read_text().splitlines()]
    return ["died" in line for line in lines if "began" in line]


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def lockf(output: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)


def test_a_second_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path, 0)
    with recording(tmp_path) as process:
        before = file.read_text()
        who = f"process {process.pid} on {socket.gethostname()} records there"
        for _ in range(2):
            with pytest.raises(DataError, match=rf"rank_00000\.jsonl: {who}; .*another folder with --observe DIR"):
                record(tmp_path)
        assert file.read_text() == before
        goodput.Recorder(tmp_path, 1, Clock(), heartbeat_s=3600).on_end(None)

        process.kill()  # the one that it forked lives on
        process.wait()
        record(tmp_path).on_end(None)
    assert deaths(tmp_path) == [False, True]


def test_a_finished_run_may_go_on(tmp_path: Path) -> None:
    record(tmp_path).on_end(None)
    with recording(tmp_path):
        assert goodput.read(tmp_path)[0].starts == 2


def test_one_that_began_and_has_not_written_yet_is_refused_by_its_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says that the last start has ended; the lock is held all the same."""
    record(tmp_path).on_end(None)
    monkeypatch.setattr(goodput, "_last_writer", lambda _: alive.Writer("another process", True, 0.05))
    with recording(tmp_path), pytest.raises(DataError, match="another process records there"):
        record(tmp_path)


def test_what_holds_the_lock_and_hangs_prevents_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recording(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        recorder = record(tmp_path)
        assert time.monotonic() - before >= 0.05 * alive.BEATS
        said = f"another process holds it .*, and process {process.pid} on .* gave no sign of life for 0.2 s"
        assert re.search(said, caplog.text)
        recorder.on_end(None)
    assert deaths(tmp_path) == [False, True]


def test_the_lock_of_one_that_dies_meanwhile_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recording(tmp_path, heartbeat_s=20) as process:
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
        recorder = record(tmp_path)
        assert killer.wait() == 0
        assert "not locked" not in caplog.text
        recorder.on_end(None)
    assert deaths(tmp_path) == [False, True]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_without_locks_a_sign_of_life_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    with recording(tmp_path) as process:
        no_locks(monkeypatch, number)
        with pytest.raises(DataError, match=rf"process {process.pid} on .* records there"):
            record(tmp_path)
    record(tmp_path).on_end(None)  # at once after its death, as a restart comes
    said = f"{os.strerror(number)}, and process {process.pid} on {socket.gethostname()} gave no sign of life for 0.2 s"
    assert said in caplog.text
    before = time.monotonic()
    record(tmp_path).on_end(None)  # what has ended has no sign to be waited for
    assert time.monotonic() - before < 5
    assert f"{os.strerror(number)}; what is recorded there is not locked" in caplog.text
    assert goodput.read(tmp_path)[0].starts == 3


def test_a_process_has_one_recorder_of_a_file(tmp_path: Path) -> None:
    """The kernel would grant it a second lock, and drop both with the end of one."""
    first = record(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for run in (tmp_path, tmp_path / "link"):
        with pytest.raises(DataError, match="this process records there"):
            record(run)
    first.on_end(None)
    with recording(tmp_path):
        assert goodput.read(tmp_path)[0].starts == 2


def test_what_cannot_be_recorded_leaves_no_lock_behind(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path, 0)
    file.parent.mkdir()
    file.write_text("no JSON\n")
    with pytest.raises(DataError, match="line 1: not what a run writes"):
        record(tmp_path)
    file.unlink()
    record(tmp_path).on_end(None)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "goodput").write_text("")
    with pytest.raises(DataError, match="goodput: File exists; expected a folder that can be written to"):
        record(tmp_path)
