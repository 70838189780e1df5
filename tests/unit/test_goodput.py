"""Goodput: every nanosecond of a run in one class, across deaths and restarts."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import alive, goodput
from megacpp_mcore.observe.clock import Clock, Phase, process_age_ns
from megacpp_mcore.observe.goodput import DOWN, LOST, PRODUCTIVE, RECOVERY
from megacpp_mcore.observe.steps import Step

SECOND = 1_000_000_000


class Time:
    """A clock's nanoseconds, which a test moves."""

    def __init__(self) -> None:
        self.ns = 7

    def __call__(self) -> int:
        return self.ns

    def go(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def step(number: int, resumed_at: int = 0) -> Step:
    return Step(number, resumed_at, 0.0, 8, {"lm loss": 1.0}, 1.0, 1e-3, False)


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
    assert clock.phase is Phase.JIT
    clock.leave(Phase.STEP)
    clock.leave(Phase.JIT)
    assert clock.phase is Phase.IDLE
    time.go(2)
    assert clock.take() == {Phase.JIT: SECOND, Phase.IDLE: 2 * SECOND}


def test_the_age_of_this_process_is_known() -> None:
    began = process_age_ns()
    assert 0 < began < 3600 * SECOND
    assert process_age_ns() >= began


def write(path: Path, *lines: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def at(second: float, phases: dict[str, float], **more: object) -> dict[str, object]:
    spent = {name: round(value * SECOND) for name, value in phases.items()}
    return {"at": round(second * SECOND), "phases": spent, **more}


def test_a_death_and_a_restart(tmp_path: Path) -> None:
    """Begun at 100 s; 4 steps, a checkpoint after the second; killed at 116.5 in the fifth; at 120 it goes on from step 2."""
    file = goodput.rank_file(tmp_path, 0)
    write(
        file,
        {"began": 100 * SECOND},
        at(105, {"startup": 5}),
        at(107, {"step": 2}, step=1, resumed_at=0),
        at(109, {"step": 1, "data": 1}, step=2, resumed_at=0),
        at(112, {"checkpoint_save": 1, "step": 2}, step=3, resumed_at=0),
        at(114, {"step": 2}, step=4, resumed_at=0),
        {"began": 120 * SECOND, "died": round(116.5 * SECOND)},
        at(123, {"startup": 2, "checkpoint_load": 1}),
        at(125, {"step": 2}, step=3, resumed_at=2),
        at(127.5, {"step": 2, "idle": 0.5}, step=4, resumed_at=2),
        at(128, {"idle": 0.25, "step": 0.25}, how="ValueError"),
    )
    found = goodput.read(tmp_path)[0]
    seconds = {name: spent / SECOND for name, spent in found.nanoseconds.items() if spent}
    assert seconds == {
        "startup": 5, PRODUCTIVE: 2 + 1 + 2 + 2, "data": 1, "checkpoint_save": 1, LOST: 2 + 2 + 2.5 + 0.25, DOWN: 3.5,
        RECOVERY: 2, "checkpoint_load": 1, "idle": 0.75,
    }  # fmt: skip
    assert found.wall_ns == 28 * SECOND
    assert (found.starts, found.steps, found.steps_lost) == (2, 4, 2)
    assert found.share == 7 / 28


def test_a_pause_after_a_finished_start_is_none_of_the_run(tmp_path: Path) -> None:
    write(
        goodput.rank_file(tmp_path, 0),
        {"began": 100 * SECOND},
        at(105, {"startup": 4, "step": 1}, step=1, resumed_at=0),
        at(106, {"idle": 1}, how="finished"),
        {"began": 500 * SECOND},
        at(503, {"startup": 2, "step": 1}, step=2, resumed_at=1),
        at(503, {}, how="finished"),
    )
    found = goodput.read(tmp_path)[0]
    assert {name: spent / SECOND for name, spent in found.nanoseconds.items() if spent} == {
        "startup": 6, PRODUCTIVE: 2, "idle": 1,
    }  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_a_start_that_never_trained_is_no_death_and_undoes_none(tmp_path: Path, trained: bool) -> None:
    """A mistyped word, put right a minute later; with ``trained``, after a run that an error had ended."""
    first = [at(105, {"startup": 4, "step": 1}, step=1, resumed_at=0), at(106, {"idle": 1}, how="ValueError")]
    write(
        goodput.rank_file(tmp_path, 0),
        *([{"began": 100 * SECOND}, *first] if trained else []),
        {"began": 110 * SECOND},
        at(112, {"startup": 2}, how="SystemExit"),
        {"began": 172 * SECOND},
        at(175, {"startup": 2, "step": 1}, step=2, resumed_at=1),
        at(175, {}, how="finished"),
    )
    found = goodput.read(tmp_path)[0].nanoseconds
    assert found[DOWN] == ((4 + 60) * SECOND if trained else 0)
    assert found[RECOVERY] == (4 * SECOND if trained else 0)
    assert found["startup"] == 4 * SECOND


@pytest.mark.parametrize(("steps", "name"), [(0, "startup"), (1, LOST)])
def test_a_run_that_is_dead_ends_with_its_last_sign_of_life(tmp_path: Path, steps: int, name: str) -> None:
    file = goodput.rank_file(tmp_path, 0)
    lines = [at(101, {"step": 1}, step=1, resumed_at=0)] * steps
    write(file, {"began": 100 * SECOND}, *lines)
    os.utime(file, ns=(109 * SECOND, 109 * SECOND))
    found = goodput.read(tmp_path)[0]
    assert (found.wall_ns, found.nanoseconds[name]) == (9 * SECOND, (9 - steps) * SECOND)


def test_the_recorder_writes_what_is_read(tmp_path: Path) -> None:
    """Two starts, the first killed: its heart stops, and the second notes when."""
    time = Time()
    clock = Clock(now=time)
    time.go(2)
    first = goodput.Recorder(tmp_path, 3, clock, heartbeat_s=0.02)
    clock.become(Phase.IDLE)
    with clock.within(Phase.STEP):
        time.go(1)
    first.on_step(step(1))
    assert first.so_far().nanoseconds[PRODUCTIVE] == SECOND
    first.on_over()
    began = goodput.read(tmp_path)[3]
    assert (began.starts, began.steps) == (1, 1)

    clock = Clock(now=time)
    second = goodput.Recorder(tmp_path, 3, clock, heartbeat_s=0.02)
    clock.become(Phase.IDLE)
    with clock.within(Phase.STEP):
        time.go(1.5)
    second.on_step(step(1))
    live = second.so_far()
    second.on_end(None)
    second.on_over()
    found = goodput.read(tmp_path)[3]
    assert found.nanoseconds == live.nanoseconds
    assert (found.nanoseconds[PRODUCTIVE], found.starts, found.steps, found.steps_lost) == (SECOND * 3 // 2, 2, 1, 1)
    assert found.nanoseconds[LOST] >= SECOND
    assert found.nanoseconds["startup"] == 2 * SECOND
    record = found.record()
    assert sum(record["seconds"].values()) == pytest.approx(record["wall_s"])


def test_a_living_process_says_so(tmp_path: Path) -> None:
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.01)
    os.utime(recorder.path, ns=(0, 0))
    waited = threading.Event()
    for _ in range(500):
        if recorder.path.stat().st_mtime_ns:
            break
        waited.wait(0.01)
    assert recorder.path.stat().st_mtime_ns > 0
    recorder.on_end(KeyboardInterrupt())
    recorder.on_over()
    assert json.loads(recorder.path.read_text().splitlines()[-1])["how"] == "KeyboardInterrupt"


def test_a_copied_folder_keeps_the_time_of_death(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path / "run", 0)
    write(file, {"began": 100 * SECOND}, at(101, {"step": 1}, step=1, resumed_at=0))
    file.with_suffix(".alive").write_text(f"{109 * SECOND:020d}\n")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    assert goodput.read(tmp_path / "copy")[0].wall_ns == 9 * SECOND
    copied = goodput.rank_file(tmp_path / "copy", 0)
    assert alive.last_alive_ns(copied) == 109 * SECOND
    for text in ("", "no number\n"):  # killed before the first one
        copied.with_suffix(".alive").write_text(text)
        os.utime(copied, ns=(107 * SECOND, 107 * SECOND))
        assert goodput.read(tmp_path / "copy")[0].wall_ns == 7 * SECOND


def test_a_heart_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats, beaten, say_alive = [0], threading.Event(), alive.say_alive

    def sometimes(file: Path) -> None:
        beats[0] += 1
        if beats[0] in (2, 3):
            raise OSError(5, "Input/output error")
        say_alive(file)
        if beats[0] > 3:
            beaten.set()

    monkeypatch.setattr(alive, "say_alive", sometimes)
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.001)
    assert beaten.wait(30)
    began = recorder._start.began_ns
    recorder.on_end(None)
    recorder.on_over()
    assert caplog.text.count("no sign of life could be left there: Input/output error") == 1
    assert alive.last_alive_ns(recorder.path) >= began


def test_a_full_disk_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = goodput.rank_file(tmp_path, 0)
    file.parent.mkdir()
    file.symlink_to("/dev/full")
    time = Time()
    clock = Clock(now=time)
    recorder = goodput.Recorder(tmp_path, 0, clock, heartbeat_s=0.02)
    with clock.within(Phase.STEP):
        time.go(1)
    recorder.on_step(step(1))
    recorder.on_end(None)
    recorder.on_over()
    assert recorder.so_far().nanoseconds[PRODUCTIVE] == SECOND
    assert caplog.text.count("No space left on device; this process records nothing more there") == 1


@pytest.mark.parametrize("first_torn", [False, True])
def test_a_start_after_a_torn_line_goes_on(tmp_path: Path, first_torn: bool, caplog: pytest.LogCaptureFixture) -> None:
    file = goodput.rank_file(tmp_path, 0)
    write(file, {"began": 100 * SECOND}, at(102, {"step": 1, "idle": 1}, step=1, resumed_at=0))
    text = file.read_text()
    file.write_text('{"beg' if first_torn else text + '{"at": 103, "pha')
    assert goodput.read(tmp_path)[0].steps == (0 if first_torn else 1)
    assert "not completed; it is left out" in caplog.text
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=0.02)
    recorder.on_step(step(2, resumed_at=1))
    recorder.on_end(None)
    recorder.on_over()
    assert all(json.loads(line) for line in file.read_text().splitlines())
    found = goodput.read(tmp_path)[0]
    assert (found.starts, found.steps) == ((1, 1) if first_torn else (2, 2))


def test_a_torn_line_is_left_out_before_a_start_only(tmp_path: Path) -> None:
    file = goodput.rank_file(tmp_path, 0)
    write(file, {"began": 100 * SECOND}, at(102, {"step": 2}, step=1, resumed_at=0))
    text = file.read_text()
    file.write_text(f'{text}{{"at": 103\n{text}')
    assert goodput.read(tmp_path)[0].starts == 2
    file.write_text(f'{text}{{"at": 103\n{text.splitlines()[1].replace('"step": 1,', '"step": 2,')}\n')
    with pytest.raises(DataError, match=r"rank_00000.jsonl, line 3: not what a run writes"):
        goodput.read(tmp_path)


def test_earlier_starts_are_gone_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what so_far says is what is read, before and after it is known where this start went on from."""
    file = goodput.rank_file(tmp_path, 0)
    write(
        file,
        {"began": 100 * SECOND},
        *(at(100 + number, {"step": 1}, step=number, resumed_at=0) for number in range(1, 5)),
        at(104, {}, how="ValueError"),
        {"began": 110 * SECOND},
        *(at(108 + number, {"step": 1}, step=number, resumed_at=2) for number in range(3, 8)),
        at(115, {}, how="ValueError"),
    )
    time = Time()
    recorder = goodput.Recorder(tmp_path, 0, Clock(now=time), heartbeat_s=0.02)
    assert (recorder.so_far().steps, recorder.so_far().steps_lost) == (7, 2)
    time.go(1)
    recorder.on_step(step(5, resumed_at=4))
    assert (recorder.so_far().steps, recorder.so_far().steps_lost) == (5, 5)

    counted: list[int] = []
    lost = goodput._Start.lost

    def counting(start: goodput._Start, repeated_from: int | None) -> tuple[int, int]:
        counted.append(1)
        return lost(start, repeated_from)

    monkeypatch.setattr(goodput._Start, "lost", counting)
    for number in (6, 7):
        recorder.on_step(step(number, resumed_at=4))
        recorder.so_far()
    assert len(counted) == 2  # this start, twice
    recorder.on_end(None)
    recorder.on_over()
    assert recorder.so_far() == goodput.read(tmp_path)[0]


def test_the_slowest_rank_is_the_one_the_others_wait_for(tmp_path: Path) -> None:
    for rank, waited in ((0, 0.0), (1, 2.0), (10, 1.0)):
        phases = {"step": 10 - waited, "data": waited}
        write(
            goodput.rank_file(tmp_path, rank),
            {"began": 0},
            at(10, phases, step=1, resumed_at=0),
            at(10, {}, how="finished"),
        )
    ranks = goodput.read(tmp_path)
    assert goodput.slowest(ranks) == 1
    assert [ranks[rank].share for rank in (0, 1, 10)] == [1.0, 0.8, 0.9]


@pytest.mark.parametrize("text", ['{"at": 3}\n', "no JSON\n", '{"began": 1}\n{"at": 2, "phases": [1]}\n', "[]\n"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    file = goodput.rank_file(tmp_path, 0)
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(DataError, match=r"rank_00000.jsonl, line \d: not what a run writes"):
        goodput.read(tmp_path)


def test_a_folder_without_any_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the folder of a run that was observed"):
        goodput.read(tmp_path)
