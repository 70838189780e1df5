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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import alive, files, goodput, loop
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.listener import Listener, Superseded
from megacpp_mcore.observe.steps import Step
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


def end(recorder: goodput.Recorder) -> None:
    recorder.on_end(None)
    recorder.on_over()


GIVEN = {"loss_dict": {}, "grad_norm": None, "learning_rate": None, "skipped_iter": 0}


class Heard(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.failures: list[Exception] = []
        self.ends = self.models = 0

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self.models += 1

    def on_step(self, step: Step) -> None:
        self.steps.append(step.step)

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        assert failed is self  # so that each lets go of what it has
        self.failures.append(error)

    def on_end(self, error: BaseException | None) -> None:
        self.ends += 1


def deaths(run: Path) -> list[bool]:
    """Of every start, whether it noted that the one before it had died."""
    lines = [json.loads(line) for line in goodput.rank_file(run, 0).read_text().splitlines()]
    return ["died" in line for line in lines if "began" in line]


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


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
            with pytest.raises(
                DataError, match=rf"rank_00000\.jsonl: {who}, .* folders of its own, by --save and by --observe"
            ):
                record(tmp_path)
        assert file.read_text() == before
        end(goodput.Recorder(tmp_path, 1, Clock(), heartbeat_s=3600))

        process.kill()  # the one that it forked lives on
        process.wait()
        end(record(tmp_path))
    assert deaths(tmp_path) == [False, True]


def test_a_finished_run_may_go_on(tmp_path: Path) -> None:
    end(record(tmp_path))
    with recording(tmp_path):
        assert goodput.read(tmp_path)[0].starts == 2


def stopped(process: subprocess.Popen[str]) -> None:
    """Let it stand still, as under a debugger, in a paused container, or on a machine that hangs."""
    process.send_signal(signal.SIGSTOP)
    while alive._stat(process.pid)[0] != "T":
        time.sleep(0.01)


def test_a_process_of_this_host_that_runs_is_alive_however_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heart is a thread, which gets no turn while the interpreter is held."""
    monkeypatch.setattr(alive, "SILENCE_S", 0.2)
    with recording(tmp_path, heartbeat_s=600):
        monkeypatch.setattr(alive, "LONGEST_WAIT_S", 0.3)
        began = time.monotonic()
        with pytest.raises(DataError, match="which is silent and runs, records there"):
            record(tmp_path)
        assert 0.3 <= time.monotonic() - began < 20


def test_one_that_began_and_has_not_written_yet_is_refused_by_its_signs(tmp_path: Path) -> None:
    """The file says that the last start has ended; the lock is held all the same."""
    end(record(tmp_path))
    with recording(tmp_path):
        claim = alive.Claim(goodput.rank_file(tmp_path, 0), 0.05)
        with pytest.raises(DataError, match="another process records there"):
            claim.settle(alive.Writer())
        claim.release()


def test_what_holds_the_lock_and_hangs_prevents_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it gives way when it wakes up: the mark is another's. The lock is the second one's as soon as it is free."""
    monkeypatch.setattr(alive, "SILENCE_S", 0.5)
    with recording(tmp_path) as process:
        stopped(process)
        before = time.monotonic()
        recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.05)
        assert time.monotonic() - before >= 0.5
        said = f"another process holds it .*, and process {process.pid} on .* gave no sign of life for 0.[56] s"
        assert re.search(said, caplog.text)
        assert deaths(tmp_path) == [False, True]
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        process.kill()
        process.wait()
        wait_for(lambda: recorder._claim._output is not None)
        with pytest.raises(DataError, match="this process records there"):
            record(tmp_path)
        end(recorder)
    assert deaths(tmp_path) == [False, True]


def test_who_wakes_up_and_finds_anothers_mark_records_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The recorder says so, and nobody of its process is told anything more, the end included."""
    recorder = record(tmp_path)
    file = goodput.rank_file(tmp_path, 0)
    other = Heard()
    told = loop.Told(Clock(), [recorder, other])
    with loop.replaced([], told, {}):
        told.tell_step(GIVEN, {}, 1, 8)
        file.with_suffix(".owner").write_text("0" * 32)
        told.tell_step(GIVEN, {}, 2, 16)  # no beat was overdue: the mark was not looked at
        recorder._heart._beaten -= 3 * 3600
        told.tell_step(GIVEN, {}, 3, 24)
        told.tell_step(GIVEN, {}, 4, 32)
    steps = [json.loads(line).get("step") for line in file.read_text().splitlines()]
    assert [number for number in steps if number is not None] == [1, 2]
    assert (other.steps, other.ends) == ([1, 2], 0)
    assert [type(error).__name__ for error in other.failures] == ["Superseded"]
    assert "took this one for dead while it stood still; this process records nothing more" in caplog.text
    end(record(tmp_path))  # its lock is free


def test_what_it_still_wrote_is_left_out(tmp_path: Path) -> None:
    """A line that was under way as the process was stopped: it names its start, which is not the last."""
    file = goodput.rank_file(tmp_path, 0)
    first = record(tmp_path)
    first.on_step(done(1))
    late = json.loads(file.read_text().splitlines()[-1]) | {"step": 2}
    first.on_over()
    second = record(tmp_path)
    second.on_step(done(2))
    with file.open("a") as stream:
        stream.write(json.dumps(late) + "\n" + json.dumps(late | {"how": "finished"}) + "\n")
    second.on_step(done(3))
    end(second)
    found = goodput.read(tmp_path)[0]
    assert (found.starts, found.steps, found.steps_lost, found.notes) == (2, 2, 1, ())
    end(record(tmp_path))
    assert not list(file.parent.glob("*damaged*"))


def done(number: int) -> Step:
    return Step(number, 0, 0.0, 8 * number, {}, None, None, False)


def test_a_beat_that_was_held_up_does_not_count_as_one_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause may catch the heart as it writes; its owner then looks at the mark before it writes itself."""
    held, on = threading.Event(), threading.Event()

    def slow(_: Path) -> None:
        held.set()
        on.wait(30)

    monkeypatch.setattr(alive, "say_alive", slow)
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.05)
    assert held.wait(30)
    goodput.rank_file(tmp_path, 0).with_suffix(".owner").write_text("0" * 32)
    time.sleep(0.2)
    on.set()
    with pytest.raises(Superseded):
        recorder.on_step(done(1))
    recorder.on_over()


def test_a_superseded_process_says_nothing_of_a_model(tmp_path: Path) -> None:
    recorder, other = record(tmp_path), Heard()
    goodput.rank_file(tmp_path, 0).with_suffix(".owner").write_text("0" * 32)
    recorder._heart._beaten -= 3 * 3600
    loop.Told(Clock(), [recorder, other]).tell_model([], None)
    assert other.models == 0
    assert recorder._claim._output is None


def test_the_folder_is_its_own_until_everybody_was_told_the_end(tmp_path: Path) -> None:
    class Last(Listener):
        def on_end(self, error: BaseException | None) -> None:
            with pytest.raises(DataError, match="this process records there"):
                record(tmp_path)

    told = loop.Told(Clock(), [record(tmp_path), Last()])
    told.end(None, None, None)
    end(record(tmp_path))


def test_a_lock_request_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it gets in the end is given back."""
    held, on, calls = threading.Event(), threading.Event(), [0]
    lockf = fcntl.lockf

    def away(output: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.ENOLCK, "no locks")
        held.set()
        on.wait(30)
        lockf(output, how)

    monkeypatch.setattr(fcntl, "lockf", away)
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.01)
    assert held.wait(30)
    before = time.monotonic()
    recorder.on_step(done(1))
    end(recorder)
    assert time.monotonic() - before < 5
    on.set()
    recorder._heart._thread.join(30)
    assert recorder._claim._output is None
    monkeypatch.undo()
    end(record(tmp_path))


KERNEL = {"kernel": alive._kernel(), "born": alive._stat(os.getpid())[1]}


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({}, None),  # of an older version
        ({"kernel": "another boot 4026531836", "born": 1}, None),
        (KERNEL | {"pid": 2**22 + 1}, ""),
        (KERNEL, ""),  # this process
    ],
)
def test_a_process_is_known_by_kernel_pid_and_birth(known: dict[str, Any], state: str | None) -> None:
    """Not by its host's name, which containers may share, nor by a number alone, which is given again."""
    assert alive.Writer(**({"host": socket.gethostname(), "pid": os.getpid()} | known)).state() == state


def test_another_process_with_the_number_is_none_of_ours(tmp_path: Path) -> None:
    name = "import ctypes, sys; ctypes.CDLL(None).prctl(15, 'обучение-модели'.encode()); print(flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()  # its name is cut within a character
    born = alive._stat(other.pid)[1]
    known = {"kernel": alive._kernel(), "pid": other.pid}
    assert alive.Writer(**known, born=born).state() in ("R", "S")
    assert alive.Writer(**known, born=born - 1).state() == ""
    other.kill()
    while alive._stat(other.pid)[0] != "Z":
        time.sleep(0.01)
    record_of = goodput.rank_file(tmp_path, 0)
    record_of.parent.mkdir()
    record_of.write_text(json.dumps({"began": 1, **known, "born": born, "heartbeat_s": 10}) + "\n")
    before = time.monotonic()
    end(record(tmp_path))  # a zombie is not waited for
    assert time.monotonic() - before < 5
    other.wait()


def test_what_is_no_damage_of_the_file_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sign of life that is none, and a file system that does not give the file for a while."""
    file = goodput.rank_file(tmp_path, 0)
    end(record(tmp_path))
    file.with_suffix(".alive").write_text("-5\n")
    end(record(tmp_path))
    assert "rank_00000.alive is -5" in caplog.text
    assert goodput.read(tmp_path)[0].starts == 2

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as changed:
        changed.setattr(files.LineReader, "read_all", stale)
        end(record(tmp_path))
    assert "this start goes on there without a knowledge of those before it" in caplog.text
    assert goodput.read(tmp_path)[0].starts == 3
    assert not list(file.parent.glob("*damaged*"))


def test_a_heart_sees_anothers_mark_and_stops(tmp_path: Path) -> None:
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.01)
    file = goodput.rank_file(tmp_path, 0)
    wait_for(file.with_suffix(".alive").exists)
    file.with_suffix(".owner").write_text("0" * 32)
    wait_for(lambda: recorder._claim.lost)
    with pytest.raises(Superseded):
        recorder.on_end(None)
    recorder.on_failure(recorder, Superseded(), 0)
    time.sleep(0.05)
    beaten = file.with_suffix(".alive").read_text()
    time.sleep(0.05)
    assert file.with_suffix(".alive").read_text() == beaten


def test_a_mark_that_could_not_be_left_takes_nothing_away(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path, 0)
    end(record(tmp_path))
    file.with_suffix(".owner").unlink()
    file.with_suffix(".owner").mkdir()
    recorder = record(tmp_path)
    file.with_suffix(".owner").rmdir()
    file.with_suffix(".owner").write_text("0" * 32)
    recorder._claim.look()
    end(recorder)
    assert goodput.read(tmp_path)[0].starts == 2


def test_the_lock_of_one_that_dies_meanwhile_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recording(tmp_path, heartbeat_s=2) as process:
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
        recorder = record(tmp_path)
        assert killer.wait() == 0
        assert "not locked" not in caplog.text
        end(recorder)
    assert deaths(tmp_path) == [False, True]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_without_locks_a_sign_of_life_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(alive, "LONGEST_BEAT_S", 0.01)
    with recording(tmp_path) as process:
        no_locks(monkeypatch, number)
        with pytest.raises(DataError, match=rf"process {process.pid} on .* records there"):
            record(tmp_path)
    for _ in range(2):  # at once after its death, as a restart comes; and of one that has ended
        before = time.monotonic()
        end(record(tmp_path))
        assert time.monotonic() - before < 5
    assert goodput.read(tmp_path)[0].starts == 3
    assert f"{os.strerror(number)}; what is recorded there is not locked" in caplog.text


def elsewhere(run: Path) -> None:
    """Let the last start have been on another host, of whose processes this one knows nothing."""
    file = goodput.rank_file(run, 0)
    text = file.read_text().replace(f'"host": "{socket.gethostname()}"', '"host": "another"')
    file.write_text(text.replace('"kernel": "', '"kernel": "of another host '))


@pytest.mark.parametrize("granted", [True, False])
def test_what_died_on_another_host_is_waited_for_a_few_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, granted: bool
) -> None:
    with recording(tmp_path):
        pass
    elsewhere(tmp_path)
    monkeypatch.setattr(alive, "LONGEST_BEAT_S", 0.01)
    if not granted:
        no_locks(monkeypatch)
    before = time.monotonic()
    end(record(tmp_path))
    assert 0.05 * alive.BEATS <= time.monotonic() - before < 5
    assert ("not locked" in caplog.text) is not granted
    assert deaths(tmp_path) == [False, True]


def test_a_lock_that_is_granted_to_every_host_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an NFS client that was told to keep locks to itself."""
    monkeypatch.setattr(fcntl, "lockf", lambda output, how: None)
    with recording(tmp_path), pytest.raises(DataError, match="records there"):
        record(tmp_path)


def test_of_two_that_begin_at_once_without_locks_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find a run that has ended; whose mark stays goes on."""
    end(record(tmp_path))
    no_locks(monkeypatch)
    file = goodput.rank_file(tmp_path, 0)

    def other(_: float) -> None:
        file.with_suffix(".owner").write_text("0" * 32)

    claim = alive.Claim(file, 0.01)
    monkeypatch.setattr(alive.time, "sleep", other)
    with pytest.raises(DataError, match="another process that began at the same time records there"):
        claim.settle(alive.Writer())
    claim.release()


@pytest.mark.parametrize("part", [0, 1])
def test_what_cannot_be_read_for_a_moment_is_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A stale file handle, say; either of the two things that a sign changes is enough, and neither of them is none."""
    with recording(tmp_path):
        pass
    elsewhere(tmp_path)
    sign, calls = alive._sign, [0]

    def unsteady(file: Path) -> tuple[bytes | int | None, ...]:
        calls[0] += 1
        found = list(sign(file))
        if calls[0] in (1, 3):
            found[part] = None
        return tuple(found)

    monkeypatch.setattr(alive, "_sign", unsteady)
    end(record(tmp_path))
    assert calls[0] > 3


@pytest.mark.parametrize("part", [0, 1])
def test_either_change_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    with recording(tmp_path):
        pass
    elsewhere(tmp_path)
    sign, calls = alive._sign, [0]

    def changing(file: Path) -> tuple[bytes | int | None, ...]:
        calls[0] += 1
        found = list(sign(file))
        found[part] = calls[0]
        return tuple(found)

    monkeypatch.setattr(alive, "_sign", changing)
    with pytest.raises(DataError, match="on another records there"):
        record(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN])
def test_a_lock_that_cannot_be_had_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Both numbers say that another process holds it (fcntl(2))."""

    def lockf(output: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            alive._locked(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_has_one_recorder_of_a_file(tmp_path: Path) -> None:
    """The kernel would grant it a second lock, and drop both with the end of one."""
    first = record(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for run in (tmp_path, tmp_path / "link"):
        with pytest.raises(DataError, match="this process records there"):
            record(run)
    end(first)
    first._claim.look()  # a beat that was under way
    with recording(tmp_path):
        assert goodput.read(tmp_path)[0].starts == 2


def test_what_cannot_be_recorded_leaves_no_lock_behind(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path, 0)
    file.mkdir(parents=True)
    with pytest.raises(DataError, match="Is a directory"):
        record(tmp_path)
    file.rmdir()
    end(record(tmp_path))


def test_a_host_without_threads_to_spare_has_no_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    end(record(tmp_path))
    assert "no signs of life are left there: can't start new thread" in caplog.text
    assert goodput.read(tmp_path)[0].starts == 1


def test_a_damaged_file_is_put_aside_and_prevents_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = goodput.rank_file(tmp_path, 0)
    monkeypatch.setattr(alive, "LONGEST_WAIT_S", 0.1)
    for number in (1, 2):
        end(record(tmp_path))
        whole = file.read_text()
        file.write_text(whole + "no JSON\n" + whole)
        with pytest.raises(DataError, match="not what a run writes"):
            goodput.read(tmp_path)
        end(record(tmp_path))
        aside = file.with_suffix(f".damaged-{number}")
        assert aside.read_text() == whole + "no JSON\n" + whole
        assert f"it is put aside as {aside.name}, and this start begins a new one" in caplog.text
        found = goodput.read(tmp_path)[0]
        assert found.notes == (f"what was there before start 1 could not be read, and is put aside as {aside.name}",)
        assert found.starts == 1
        end(record(tmp_path))
        assert len(goodput.read(tmp_path)[0].notes) == 1


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "goodput").write_text("")
    with pytest.raises(DataError, match="goodput: File exists; expected a folder that can be written to"):
        record(tmp_path)
