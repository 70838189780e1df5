"""Programs that are killed: whatever they started holds their output open until it ends, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import tiny_run

END_S = 60
"""In which whatever a process has started has to be gone."""


@contextlib.contextmanager
def started(words: Sequence[str], until: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed ``until``, in a session of its own, nothing of which is left in the end."""
    path = os.pathsep.join(filter(None, (str(tiny_run.ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None
    try:
        lines = []
        for line in program.stdout:
            lines.append(line)
            if until in line:
                break
        assert until in "".join(lines[-1:]), f"it ended before it printed {until!r}: {''.join(lines)[-3000:]}"
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that nobody has reaped yet runs no more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
