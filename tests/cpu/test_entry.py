"""``python -m megacpp_mcore.cpu``: scripts and modules that know nothing of the lane run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch, beside
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
assert __name__ == "__main__", __name__
print(sys.argv[1:], torch.cuda.is_available(), torch.zeros(2, device="cuda").cuda().device, os.environ["WORLD_SIZE"])
sys.exit(7)
"""
TEST = """
import torch

def test_on_the_lane():
    assert torch.cuda.current_device() == 0
    assert torch.ones(2, device="cuda:0").device.type == "cpu"
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])))
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "megacpp_mcore.cpu", *words]
    environment = plain | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def test_a_script_gets_its_arguments_its_folder_and_a_device(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("")
    done = run(tmp_path, "scripts/script.py", "--lr", "1")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (7, ["['--lr', '1'] True cpu 1"]), done.stderr


def test_a_module_such_as_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_lane.py").write_text(TEST)
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lane.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("words", [(), ("none.py",), ("-m",)])
def test_what_is_no_script_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: found ")
