"""How the tests of Bridge start a Python: from the repository's root on, one thread, nothing of the caller's MEGACPP_CONFIG."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"
PATIENCE_S = 900


def run(
    python: Path, *words: str, folder: Path = ROOT, fork: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS`` in ``folder``, with ``environment`` beside the caller's.

    ``fork=False``: a Python of its own, where libraries read ``environment`` as they are imported, or where the import itself
    is what is tested.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MEGACPP_CONFIG"}
    env = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    if fork:
        return forks.run(["-m", *words], cwd=folder, env=env, timeout=PATIENCE_S, python=str(python))
    command = [str(python), "-W", "ignore", "-m", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
