"""Triton's kernels on a CPU: its interpreter in a process of its own, as Triton has to be imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "grouped_mlp": ("even", "lone", "halves", "blocks", "fp8"),
    "indexer": ("rows", "pieces", "gradient"),
    "linear_cross_entropy": ("",),
    "m2rnn": ("whole", "parts"),
    "mamba3": ("mimo", "mimo_documents", "rank_2", "siso", "siso_documents"),
    "router": ("",),
    "mla_projection": ("whole", "halves"),
    "sparse_mla": ("whole", "halves", "many_heads"),
}
"""The cases of ``tests/ops/<op>_interpreted.py``."""


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, cases in PROGRAMS.items() for case in cases])
def test_parity(op: str, case: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.interpreter", op, case]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
