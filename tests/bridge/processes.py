"""How the tests of Bridge start a Python: from the repository's root on, one thread, nothing of the caller's MEGACPP_CONFIG."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"


def run(python: Path, *words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS`` in ``folder``, with ``environment`` beside the caller's."""
    inherited = {name: value for name, value in os.environ.items() if name != "MEGACPP_CONFIG"}
    return subprocess.run(
        [str(python), "-W", "ignore", "-m", *words],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
