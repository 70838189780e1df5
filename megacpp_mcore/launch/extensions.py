"""Stale locks of PyTorch's extension builds: removed if a launch of this package left them, reported otherwise.

``torch.utils.cpp_extension`` (2.11) locks a build by creating the file ``lock``, and waits forever while it exists; a
killed process leaves it behind. Megatron builds one such extension in training, for output recompute.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_mcore.util import console
from megacpp_mcore.util.stand_in import stand_in

_MARK = b"held by flock"
"""Content of a lock that its holder also locked with flock, which on any host is released when the process ends."""


def stale_locks_removed() -> contextlib.AbstractContextManager[Any]:
    """Within the context, remove a dead process's lock on an extension build, and report a lock that is waited for."""
    from torch.utils.file_baton import FileBaton

    return stand_in(FileBaton, "try_acquire", _try_acquire)


def _try_acquire(stock: Callable[[Any], bool], baton: Any) -> bool:
    lock = Path(baton.lock_file_path)
    if stock(baton):
        with contextlib.suppress(OSError):  # a file system without such locks
            baton.kept = lock.open("r+b", buffering=0)
            fcntl.flock(baton.kept, fcntl.LOCK_EX)
            baton.kept.write(_MARK)
        return True
    try:
        age = f"the lock of a PyTorch extension, {time.time() - lock.stat().st_mtime:.0f} s old"
        with lock.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == _MARK and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                lock.unlink()
                console.say(f"megacpp-mcore: {lock}, {age}, was left by a process that has ended; removed")
                return _try_acquire(stock, baton)
    except FileNotFoundError:  # released since
        return stock(baton)
    except BlockingIOError:
        return False
    except OSError:
        pass
    console.say(f"megacpp-mcore: waiting for {lock}, {age}; if no other program builds it, delete it")
    return False
