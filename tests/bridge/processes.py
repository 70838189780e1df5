"""How the tests of Bridge start a Python: in the repository's root, with one thread and without the caller's MEGACPP_CONFIG."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forks

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"
PATIENCE_S = 900
CLI, RUNNER = "megacpp_mcore.commands.cli", "megacpp_mcore.nemo_recipes.run"


def run(
    python: Path, *words: str, folder: Path = ROOT, megatron: bool = True, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m WORDS`` in ``folder`` with ``environment`` added to the caller's; expect exit status ``status``.

    It has Megatron and Bridge already; ``megatron=False``: it imports them itself, as a user's does.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MEGACPP_CONFIG"}
    env = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    how = {"cwd": folder, "env": env, "timeout": PATIENCE_S, "python": str(python), "megatron": megatron}
    done = forks.run(["-m", *words], **how)
    assert done.returncode == status, (done.stdout + done.stderr)[-6000:]
    return done


def answer(python: Path, *words: str, **how: Any) -> Any:
    """Return the JSON in the last line that :func:`run` prints."""
    return json.loads(run(python, *words, **how).stdout.splitlines()[-1])


def outcomes(python: Path, module: str, commands: Sequence[Sequence[object]], **how: Any) -> list[tuple[int, str, list[str]]]:
    """Run the commands of a module, :data:`CLI` or :data:`RUNNER`, in one process: status, output and patches left of each."""
    return answer(python, "tests.bridge.commands", module, json.dumps([list(map(str, words)) for words in commands]), **how)
