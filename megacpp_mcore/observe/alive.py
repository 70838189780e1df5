"""Who records in a file: a lock, signs of life where locks tell nothing, and a mark for those who wake up. No torch.

Two living trainings must never record in one folder, and recording must never prevent a training. The lock of the file system
alone gives neither: a process that hangs holds it, a server may not know that its client is dead, and some file systems have
none or grant it to every host.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.config import LONGEST_BEAT_S
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import kinds

logger = logging.getLogger(__name__)
BEATS = 5
"""Beats without a sign of life after which a process that holds no lock is taken for dead."""
SILENCE_S = 30.0
"""The same of one that holds the lock, in seconds at least: the server says that it lives."""
LONGEST_WAIT_S = 60.0
"""Seconds that a start waits for signs of life at most."""
_POLL_S = 0.05
_GONE = frozenset(("", "Z", "X"))
"""What :meth:`Writer.state` says of a process that writes nothing any more."""
_RUNS = frozenset("RSI")
"""States in proc_pid_stat(5) of a process that is neither stopped nor dead, and waits for no device that may not answer."""
_HELD: dict[Path, int] = {}
"""The lock files that a process holds: a second lock of the same process would be granted, and its end would drop both."""


def last_alive_ns(file: Path) -> int:
    """When the process that writes a rank's file was last alive, in nanoseconds since the epoch.

    It is the number in the file beside, which a copy of the folder keeps; or, in a folder without, when ``file`` was last
    written to.

    Raises:
        DataError: the number is no time, or neither of the files can be read.
    """
    beside = alive_file(file)
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


def alive_file(file: Path) -> Path:
    """Where the signs of life of the process that writes ``file`` are."""
    return file.with_suffix(".alive")


def say_alive(file: Path) -> None:
    """Write the time beside ``file``, over the one before, which is as long: no reader meets half of one.

    Raises:
        OSError: the file system does not let it.
    """
    os.utime(file)  # for readers of the modification time, and where there is no room for one more file
    output = os.open(alive_file(file), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(output, b"%020d\n" % time.time_ns(), 0)
    finally:
        os.close(output)


class Heart:
    """Leaves a sign of life beside a file every ``seconds``, from a thread, until it is stopped or the file is another's.

    Args:
        claim: the right to the file.
        seconds: between two signs.
    """

    def __init__(self, claim: Claim, seconds: float) -> None:
        self._claim, self._seconds = claim, seconds
        self._over = threading.Event()
        self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            logger.warning("%s: no signs of life are left there: %s", claim.file, error)

    def stop(self) -> None:
        """Leave no further sign; a file system that does not answer is not waited for."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def owns(self) -> bool:
        """Whether the file is this process's still; looked up where a beat is overdue, as after a pause of the process."""
        if time.monotonic() - self._beaten > 2 * self._seconds:
            self._claim.look()
        return not self._claim.lost

    def _beat(self) -> None:
        failed = False
        while not (self._claim.lost or self._over.is_set()):
            began = time.monotonic()  # a pause in what follows must not count as a beat in time
            try:
                self._claim.look()
                self._claim.retry()
                if not self._claim.lost:
                    say_alive(self._claim.file)
                failed = False
            except OSError as error:  # a file system that is away for a while
                if not failed:
                    logger.warning("%s: no sign of life could be left there: %s", self._claim.file, error.strerror)
                failed = True
            self._beaten = began
            self._over.wait(self._seconds)


def identity() -> dict[str, str | int]:
    """By what others know this process: its pid, of which kernel (boot, and namespace of pids) that is one, and its birth."""
    found: dict[str, str | int] = {"host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found |= {"kernel": _kernel() or "", "born": _stat(os.getpid())[1]}
    return found


def _kernel() -> str | None:
    """The boot of this kernel, and the namespace in which it numbers this process; None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, int]:
    """State and time of birth (clock ticks since the boot) of a process: fields 3 and 22 of proc_pid_stat(5)."""
    # What comes after the name, which may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


@dataclass(frozen=True)
class Writer:
    """The process that wrote to a rank's file last, as the file tells.

    Attributes:
        ended: whether it said how it ended; True where there was none.
        host, pid: where it ran, and as what; None where it does not say.
        heartbeat_s: seconds between its signs of life; None where it does not say.
        kernel, born: which kernel ``pid`` is a number of, and when it was given, as :func:`identity` says.
    """

    ended: bool = True
    host: str | None = None
    pid: int | None = None
    heartbeat_s: float | None = None
    kernel: str | None = None
    born: int | None = None

    @property
    def who(self) -> str:
        """It, in words."""
        known = self.host is not None and self.pid is not None
        return f"process {self.pid} on {self.host}" if known else "another process"

    def state(self) -> str | None:
        """Its state as this kernel has it: a letter, empty where it is gone or this very process, None where it is not known.

        A host's name is not asked for: containers may share one, and so may the pods before and after a failure.
        """
        if self.pid is None or self.kernel is None or self.kernel != _kernel():
            return None
        if self.pid == os.getpid():
            return ""
        try:
            state, born = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except (OSError, ValueError, IndexError):
            return None
        return state if born == self.born else ""


class Claim:
    """The right to record in a rank's file: first asked for, then settled, once it is known who wrote there last.

    - The lock is the process's (:manpage:`fcntl(2)`): the kernel drops it when that dies, and no child that was forked and
      outlives it has it, as one of :manpage:`flock(2)` would. It ends with the first closing of the lock file in this
      process, which is why it is no file that anything else opens.
    - Where another process has the lock, or the last one has not said how it ended and is not known to be dead, the start
      waits for a sign of life and is refused if there is one. A process of this host that runs, however silent, is alive.
    - Who goes on leaves its mark in a file beside. One that hung and wakes up finds another's there, and records no more.
      Without a lock, the mark is looked at once more before the start is done, for two may begin at once.
    - What could not be locked is tried again at every beat.

    Args:
        file: the rank's file; it need not be there yet.
        heartbeat_s: seconds between this process's signs of life, which the other's are taken for where it does not say.

    Raises:
        DataError: this process records there already.
    """

    def __init__(self, file: Path, heartbeat_s: float) -> None:
        self.file, self.lost = file, False
        self._path = file.with_suffix(".lock").resolve()
        self._heartbeat_s = heartbeat_s
        self._mark, self._marked = uuid.uuid4().hex, False
        self._before, self._asked = _sign(file), time.monotonic()
        self._output: int | None = None
        self._changing, self._released = threading.Lock(), False
        self._reason, self._blocked = "", False
        if _HELD.get(self._path) == os.getpid():
            raise _in_use(file, "this process")
        _HELD[self._path] = os.getpid()
        self._try()

    def settle(self, last: Writer) -> bool:
        """Make sure that nobody else records there, for which this may wait; then leave a mark.

        Args:
            last: who wrote there last.

        Returns:
            Whether the file may have changed since ``last`` was read.

        Raises:
            DataError: somebody does.
        """
        doubtful = self._blocked or not (last.ended or last.state() in _GONE)
        doubtful = doubtful or _changed(self._before, _sign(self.file))
        if doubtful:
            self._watch(last)
        elif self._output is None:
            logger.warning("%s: %s; what is recorded there is not locked", self._path, self._reason)
        with contextlib.suppress(OSError):
            self._owner_file().write_text(self._mark, encoding="ascii")
            self._marked = True
        if self._output is None:
            time.sleep(min(self._heartbeat_s, LONGEST_BEAT_S))
            self.look()
            if self.lost:
                raise _in_use(self.file, "another process that began at the same time")
        return doubtful

    def look(self) -> None:
        """See whether another process has left its mark meanwhile."""
        try:
            found = self._owner_file().read_text(encoding="ascii")
        except (OSError, ValueError):
            return
        if self._marked and len(found) == len(self._mark) and found != self._mark:
            self.lost = True

    def retry(self) -> None:
        """Try again for a lock that could not be had; a server that is away may keep this waiting."""
        if self._output is not None or self.lost or self._released:
            return
        try:
            output = _locked(self._path)
        except OSError:
            return
        with self._changing:
            if not self._released:
                self._output, output = output, -1
        if output != -1:  # it was let go meanwhile
            os.close(output)

    def release(self) -> None:
        """Let others record there, once and for all."""
        with self._changing:  # a beat that is under way must not keep a lock that it gets now
            output, self._output, self._released = self._output, None, True
        if _HELD.get(self._path) == os.getpid():
            del _HELD[self._path]
        if output is not None:
            os.close(output)

    def _owner_file(self) -> Path:
        return self.file.with_suffix(".owner")

    def _try(self) -> None:
        try:
            self._output = _locked(self._path)
            self._blocked = False
        except BlockingIOError as error:
            self._reason, self._blocked = f"another process holds it ({error.strerror})", True
        except OSError as error:
            self._reason, self._blocked = error.strerror or repr(error), False

    def _watch(self, last: Writer) -> None:
        """Wait for a sign of life, which is refused, or for the lock of a process that ends."""
        beat_s = last.heartbeat_s or self._heartbeat_s
        wait_s = min(max(BEATS * beat_s, SILENCE_S if self._blocked else 0.0), LONGEST_WAIT_S)
        was_blocked = self._blocked
        while True:
            if was_blocked and not self._blocked and self._output is not None:
                return  # who held the lock has died, or said how it ended
            sign = _sign(self.file)
            if _changed(self._before, sign):
                raise _in_use(self.file, last.who)
            self._before = tuple(old if old is not None else new for old, new in zip(self._before, sign, strict=True))
            state = last.state()
            if not self._blocked and not last.ended and state in _GONE:
                break
            if time.monotonic() >= self._asked + wait_s:
                if self._blocked and state in _RUNS:
                    raise _in_use(self.file, f"{last.who}, which is silent and runs,")
                break
            time.sleep(min(max(_POLL_S, beat_s / 4), 1.0))
            if self._output is None:
                self._try()
        if self._output is None:
            logger.warning(
                "%s: %s, and %s gave no sign of life for %.1f s; the run is recorded, and not locked",
                self._path,
                self._reason,
                last.who,
                time.monotonic() - self._asked,
            )


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


def _changed(before: Sequence[bytes | int | None], sign: Sequence[bytes | int | None]) -> bool:
    """Whether there was a sign of life between two looks; what could not be read tells nothing."""
    return any(None not in pair and pair[0] != pair[1] for pair in zip(before, sign, strict=True))


def _sign(file: Path) -> tuple[bytes | int | None, ...]:
    """What a sign of life changes; None where it cannot be read. Opened, for a network file system then asks its server."""
    found: list[bytes | int | None] = [None, None]
    try:
        found[0] = alive_file(file).read_bytes()
    except FileNotFoundError:
        found[0] = b""
    except OSError:
        pass
    try:
        with file.open("rb") as stream:
            found[1] = os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        found[1] = 0
    except OSError:
        pass
    return tuple(found)


def _in_use(file: Path, who: str) -> DataError:
    return DataError(
        f"{file}: {who} records there, for a training that goes on; expected that nobody does: wait for it or end it, or give "
        "this one folders of its own, by --save and by --observe"
    )
