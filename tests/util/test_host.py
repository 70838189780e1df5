"""Processes that end with the one that started them."""

from __future__ import annotations

import signal

import pytest

from tests import forks

ENDING = """
import multiprocessing, os, types
from megacpp_mcore.util.host import end_with_the_parent
multiprocessing.parent_process = lambda: {parent}
end_with_the_parent()
print("goes on", flush=True)"""


@pytest.mark.parametrize(
    ("parent", "status", "says"),
    [
        ("None", 0, "goes on\n"),
        ("types.SimpleNamespace(pid=os.getppid())", 0, "goes on\n"),
        # One that was killed while this process imported: another is its parent by now.
        ("types.SimpleNamespace(pid=os.getpid())", -signal.SIGKILL, ""),
    ],
)
def test_a_process_ends_whose_parent_is_gone(parent: str, status: int, says: str) -> None:
    ended = forks.run(["-c", ENDING.format(parent=parent)])
    assert (ended.returncode, ended.stdout) == (status, says), ended.stderr
