"""``python -m megacpp_mcore.cpu``: scripts and modules that know nothing of the lane run on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megacpp_mcore import patches
from megacpp_mcore.cpu.__main__ import main
from tests import forks

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in a process that no launcher started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_script_gets_its_arguments_its_folder_and_a_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "scripts").mkdir()
    (folder / "scripts" / "script.py").write_text(SCRIPT)
    (folder / "scripts" / "beside.py").write_text("")
    try:
        with pytest.raises(SystemExit, match="7"):
            main(["scripts/script.py", "--lr", "1"])
    finally:
        patches.revert()
    assert capsys.readouterr().out.splitlines()[-1:] == ["['--lr', '1'] True cpu 1"]


def test_a_module_such_as_pytest(folder: Path) -> None:
    (folder / "test_lane.py").write_text(TEST)
    words = ("-m", "megacpp_mcore.cpu", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lane.py")
    done = forks.run(words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("words", [[], ["none.py"], ["-m"]])
def test_what_is_no_script_is_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: found "):
        main(words)
