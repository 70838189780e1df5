"""Triton's kernels on a CPU: its interpreter in a process of its own, as Triton has to be imported for it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests import forks
from tests.ops.interpreted import PROGRAMS


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_parity(name: str) -> None:
    done = forks.run(["-m", "tests.ops.interpreted", name], timeout=900, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
