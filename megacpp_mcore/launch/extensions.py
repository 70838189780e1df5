"""Stale locks of PyTorch's extension builds: taken away where the builder is known to be dead, named everywhere else.

``torch.utils.cpp_extension`` (2.11) locks a build by creating the file ``lock``, which it holds open, and waits without end
while the file exists; a killed process leaves it. Megatron builds one such extension in training: where it recomputes outputs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megacpp_mcore.util.stand_in import stand_in

_OF_ONE_HOST = ("ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in linux/proc_ns.h


@contextlib.contextmanager
def stale_locks_removed() -> Iterator[None]:
    """For the duration, an extension is built despite a dead process's lock, and a lock that is waited for is named."""
    from torch.utils.file_baton import FileBaton

    def try_acquire(stock: Callable[[Any], bool], baton: Any) -> bool:
        if stock(baton):
            return True
        lock = Path(baton.lock_file_path)
        with contextlib.suppress(FileNotFoundError):  # released since
            age = f"the lock of a PyTorch extension, {time.time() - lock.stat().st_mtime:.0f} s old"
            if not is_abandoned(lock):
                return stock(baton)
            if _sees_all_holders(lock):
                with _locked(lock.parent):  # another rank may just have done the same
                    if is_abandoned(lock):
                        lock.unlink()
                        print(
                            f"megacpp-mcore: {lock}, {age}, was left by a process that has ended; removed", flush=True
                        )
                    return stock(baton)
            todo = "no process here holds it: delete it if none of another host or container does"
            print(f"megacpp-mcore: waiting for {lock}, {age}; {todo}", flush=True)
        return stock(baton)

    with contextlib.ExitStack() as stack:
        stand_in(stack, FileBaton, "try_acquire", try_acquire)
        yield


def is_abandoned(lock: Path) -> bool:
    """Whether ``lock`` exists and no visible process holds it; its holder closes it first, and then removes it.

    Raises:
        FileNotFoundError: it does not exist any more.
    """
    if _is_open(lock):
        return False
    time.sleep(1.0)
    lock.stat()
    return not _is_open(lock)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the kernel's lock of a folder, which ends with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sees_all_holders(file: Path) -> bool:
    """Whether any process that could hold ``file`` open is visible in ``/proc``: not those of other hosts and containers."""
    status, kind = file.stat(), ""
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = mount.split()
        if fields[2] == device:
            kind = fields[fields.index("-") + 1]
    if status.st_uid != os.geteuid():  # whose open files can be read
        return False
    if os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE:
        return kind in _OF_ONE_HOST
    return kind == "overlay" and status.st_dev == os.stat("/").st_dev  # a container's own


def _is_open(file: Path) -> bool:
    """Whether a visible process has ``file`` open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed, or ended, since
            if os.readlink(link).endswith(f"/{file.name}") and os.path.samefile(link, file):
                return True
    return False
