"""Triton's kernels on a CPU: its interpreter in a process of its own, as Triton has to be imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.ops.interpreted import PROGRAMS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_parity(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.interpreted", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
