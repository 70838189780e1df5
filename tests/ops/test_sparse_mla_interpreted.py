"""Sparse MLA's kernels on a CPU: Triton's interpreter in a process of its own, as Triton has to be imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("case", ["whole", "halves", "many_heads"])
def test_parity_with_fp64(case: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.sparse_mla_interpreted", case]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
