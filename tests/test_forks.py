"""The process that forks, where it has ended and another worker of pytest comes to ask it."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from tests import forks


def test_who_asks_a_process_that_has_ended_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not wait for one that would read the pipe."""
    monkeypatch.setattr(forks, "_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(forks, "_LIBRARIES", ("no_such_library",))
    folder, requests = forks.server.__wrapped__(sys.executable, None)
    (unread := select.poll()).register(requests, 0)
    assert unread.poll(60_000)
    with pytest.raises(AssertionError, match="No module named 'no_such_library'"):
        forks.server.__wrapped__(sys.executable, None)
    os.close(requests)
    assert folder.parent == tmp_path
