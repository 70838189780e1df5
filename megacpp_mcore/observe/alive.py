"""How a process says that it lives and records: the time, written beside its file again and again, and a lock. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import kinds

logger = logging.getLogger(__name__)
BEATS = 5
"""Beats without a sign of life after which a process is taken for dead."""
LONGEST_WAIT_S = 60.0
"""Seconds that a start waits for signs of life at most."""
_POLL_S = 0.05
_HELD: dict[Path, int] = {}
"""The lock files that a process holds: a second lock of the same process would be granted, and its end would drop both."""


def last_alive_ns(file: Path) -> int:
    """When the process that writes a rank's file was last alive, in nanoseconds since the epoch.

    It is the number in the file beside, which a copy of the folder keeps; or, in a folder without, when ``file`` was last
    written to.

    Raises:
        DataError: the number is no time, or neither of the files can be read.
    """
    beside = _alive_file(file)
    try:
        said = int(beside.read_text(encoding="ascii")) if beside.is_file() else None
    except (OSError, ValueError):  # none yet: the process was killed before the first one
        said = None
    if said is None:
        try:
            return file.stat().st_mtime_ns
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; expected what a rank wrote") from error
    if not kinds.NANOSECONDS.accepts(said):
        raise DataError(
            f"{beside} is {said}; expected nanoseconds since the epoch: delete it, and the time at which {file.name} was last "
            "written to counts instead"
        )
    return said


def _alive_file(file: Path) -> Path:
    return file.with_suffix(".alive")


def say_alive(file: Path) -> None:
    """Write the time beside ``file``, over the one before, which is as long: no reader meets half of one.

    Raises:
        OSError: the file system does not let it.
    """
    os.utime(file)  # for readers of the modification time, and where there is no room for one more file
    output = os.open(_alive_file(file), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(output, b"%020d\n" % time.time_ns(), 0)
    finally:
        os.close(output)


class Heart:
    """Leaves a sign of life beside ``file`` every ``seconds``, from a thread, until it is stopped."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Leave no further sign."""
        self._over.set()

    def _beat(self) -> None:
        failed = False
        while True:
            try:
                say_alive(self._file)
                failed = False
            except OSError as error:  # a file system that is away for a while
                if not failed:
                    logger.warning("%s: no sign of life could be left there: %s", self._file, error.strerror)
                failed = True
            if self._over.wait(self._seconds):
                return


@dataclass(frozen=True)
class Writer:
    """The process that wrote to a rank's file last, as the file tells.

    Attributes:
        who: it, in words.
        ended: whether it said how it ended.
        heartbeat_s: seconds between its signs of life; None where it does not say.
    """

    who: str
    ended: bool
    heartbeat_s: float | None


class Lock:
    """The right to record in a rank's file.

    The lock is the process's (:manpage:`fcntl(2)`): the kernel drops it when that dies, and no child that was forked and
    outlives it has it, as one of :manpage:`flock(2)` would. It ends with the first closing of the lock file in this process,
    which is why it is no file that anything else opens.

    Where it cannot be had, because another process holds it or the file system has none, signs of life decide: if the file gets
    one within :data:`BEATS` beats, it is in use. If not, what holds the lock hangs, or the client that held it is dead and its
    server does not know; then a warning says that the run is recorded without a lock, for recording must not prevent training.

    Args:
        file: the rank's file; it need not be there yet.
        heartbeat_s: seconds between this process's signs of life, which the other's are taken for where it does not say.
        last: reads what wrote to the file last; called only where the lock cannot be had.

    Raises:
        DataError: another process records there, or this one does already; or what ``last`` raises.
    """

    def __init__(self, file: Path, heartbeat_s: float, last: Callable[[], Writer]) -> None:
        self._file, self._path = file, file.with_suffix(".lock").resolve()
        self._heartbeat_s, self._last = heartbeat_s, last
        if _HELD.get(self._path) == os.getpid():
            raise _in_use(file, "this process")
        self._output = self._take()
        _HELD[self._path] = os.getpid()

    def release(self) -> None:
        """Let others record there."""
        output, self._output = self._output, None
        if _HELD.get(self._path) == os.getpid():
            del _HELD[self._path]
        if output is not None:
            os.close(output)

    def _take(self) -> int | None:
        try:
            return _locked(self._path)
        except BlockingIOError as error:
            reason, watched = f"another process holds it ({error.strerror})", True
        except OSError as error:
            reason, watched = error.strerror or repr(error), False
        last = self._last()
        if watched or not last.ended:
            return self._watch(last, reason)
        logger.warning("%s: %s; what is recorded there is not locked", self._path, reason)
        return None

    def _watch(self, last: Writer, reason: str) -> int | None:
        """Wait for a sign of life, which is refused, or for the lock."""
        wait_s = min(BEATS * (last.heartbeat_s or self._heartbeat_s), LONGEST_WAIT_S)
        before, until = _sign(self._file), time.monotonic() + wait_s
        while True:
            if _sign(self._file) != before:
                raise _in_use(self._file, last.who)
            with contextlib.suppress(OSError):
                return _locked(self._path)
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_S)
        logger.warning(
            "%s: %s, and %s gave no sign of life for %.1f s; the run is recorded, and not locked",
            self._path,
            reason,
            last.who,
            wait_s,
        )
        return None


def _locked(path: Path) -> int:
    """The lock file, opened and locked.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: it cannot be opened, or there are no locks.
    """
    output = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError as error:  # the other number that fcntl(2) allows
        os.close(output)
        raise BlockingIOError(error.errno, error.strerror) from error
    except OSError:
        os.close(output)
        raise
    return output


def _sign(file: Path) -> tuple[bytes | None, int | None]:
    """What a sign of life changes; files are opened, for a network file system then asks its server."""
    said, changed_ns = None, None
    with contextlib.suppress(OSError):
        said = _alive_file(file).read_bytes()
    with contextlib.suppress(OSError), file.open("rb") as stream:
        changed_ns = os.fstat(stream.fileno()).st_mtime_ns
    return said, changed_ns


def _in_use(file: Path, who: str) -> DataError:
    return DataError(
        f"{file}: {who} records there; expected that nobody does: wait for it, or name another folder with --observe DIR"
    )
