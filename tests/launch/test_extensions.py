"""Locks of PyTorch's extension builds: a dead process's is taken away, a live one's is waited for."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils.file_baton import FileBaton

from megacpp_mcore import cpu
from megacpp_mcore.launch import extensions, launcher

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "share_storage_ext"
    folder.mkdir()
    return folder / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[tuple[Any, Any]]:
    """A process that holds the lock, as one that builds, and the event that has it released."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()

    def hold() -> None:
        with extensions.stale_locks_removed():
            baton = FileBaton(str(lock))
            assert baton.try_acquire()
            held.set()
            release.wait(60)
            baton.release()

    process = context.Process(target=hold)
    process.start()
    assert held.wait(60)
    yield process, release
    process.kill()
    process.join()


def test_a_dead_processs_lock_is_taken_away(lock: Path, holder: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    process, _ = holder
    process.kill()
    process.join()
    assert not FileBaton(str(lock)).try_acquire()  # and wait() has no end
    os.utime(lock, (0, time.time() - 3600))
    with extensions.stale_locks_removed():
        baton = FileBaton(str(lock))
        assert baton.try_acquire()
        assert lock.exists()
        baton.release()
    assert f"{lock}, the lock of a PyTorch extension, 3600 s old, was left" in capsys.readouterr().out


def test_a_live_processs_lock_is_waited_for(lock: Path, holder: tuple[Any, Any]) -> None:
    process, release = holder
    with extensions.stale_locks_removed():
        assert not FileBaton(str(lock)).try_acquire()
        assert lock.exists()
        release.set()
        process.join(60)
        assert process.exitcode == 0
        assert FileBaton(str(lock)).try_acquire()


def test_one_of_several_ranks_gets_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank is slow between seeing that the lock is a dead process's and removing it: it is another's by then."""
    lock.write_bytes(extensions._MARK)
    same = os.path.samestat
    monkeypatch.setattr(os.path, "samestat", lambda one, other: (same(one, other), time.sleep(0.2))[0])
    batons = [FileBaton(str(lock)) for _ in range(2)]
    got: list[bool] = []
    with extensions.stale_locks_removed():
        threads = [threading.Thread(target=lambda baton=baton: got.append(baton.try_acquire())) for baton in batons]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == [False, True]


def test_the_file_of_a_lock_that_was_just_removed_is_not_taken_for_the_new_one(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.write_bytes(extensions._MARK)
    flock, taken = extensions.fcntl.flock, []

    def slow(file: Any, operation: int) -> None:
        if not taken:  # another rank removes it and holds its own
            taken.append(FileBaton(str(lock)))
            lock.unlink()
            assert taken[0].try_acquire()
        flock(file, operation)

    monkeypatch.setattr(extensions.fcntl, "flock", slow)
    with extensions.stale_locks_removed():
        assert not FileBaton(str(lock)).try_acquire()
    assert lock.exists()


def test_it_is_in_place_in_a_launch(lock: Path, tmp_path: Path) -> None:
    lock.write_bytes(extensions._MARK)
    script = tmp_path / "builds.py"
    script.write_text(f"from torch.utils.file_baton import FileBaton\nassert FileBaton({str(lock)!r}).try_acquire()\n")
    words = [word for words in cpu.lane.REQUIRED_ARGUMENTS for word in words]
    assert launcher.launch([str(script), *words], device="cpu") == 0
    assert not FileBaton(str(lock)).try_acquire()  # as before


def test_a_lock_of_another_program_is_named_and_stays(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its process has ended cannot be known: it may be of another host or container."""
    lock.touch()
    with extensions.stale_locks_removed():
        assert not FileBaton(str(lock)).try_acquire()
    assert lock.exists()
    assert f"waiting for {lock}, the lock of a PyTorch extension, 0 s old" in capsys.readouterr().out


def test_a_file_system_without_locks(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions.fcntl, "flock", mock.Mock(side_effect=OSError("not supported")))
    with extensions.stale_locks_removed():
        assert FileBaton(str(lock)).try_acquire()
        assert not FileBaton(str(lock)).try_acquire()
    assert lock.read_bytes() == b""
