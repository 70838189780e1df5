"""How the tests of Bridge start a Python: in the repository's root, with one thread and without the caller's MEGACPP_CONFIG."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests import forks

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"
PATIENCE_S = 900


def run(
    python: Path, *words: str, folder: Path = ROOT, fork: bool = True, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m WORDS`` in ``folder`` with ``environment`` added to the caller's; expect exit status ``status``.

    ``fork=False``: a Python of its own, where libraries read ``environment`` as they are imported, or where the import itself
    is what is tested.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MEGACPP_CONFIG"}
    env = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    if fork:
        done = forks.run(["-m", *words], cwd=folder, env=env, timeout=PATIENCE_S, python=str(python))
    else:
        command, how = [str(python), "-W", "ignore", "-m", *words], {"capture_output": True, "text": True}
        done = subprocess.run(command, cwd=folder, env=env, check=False, timeout=PATIENCE_S, **how)
    assert done.returncode == status, (done.stdout + done.stderr)[-6000:]
    return done


def answer(python: Path, *words: str, **how: Any) -> Any:
    """Return the JSON in the last line that :func:`run` prints."""
    return json.loads(run(python, *words, **how).stdout.splitlines()[-1])
