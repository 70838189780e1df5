"""requirements/environment.py where there cannot be an environment: one plain message, and what to do, for each cause."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands before the standard library's venv on the script's path: its Python has no ensurepip, as on Debian.
VENV_WITHOUT_ENSUREPIP = """
import importlib.util, subprocess, sysconfig
spec = importlib.util.spec_from_file_location("stock_venv", sysconfig.get_path("stdlib") + "/venv/__init__.py")
stock_venv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock_venv)
class EnvBuilder(stock_venv.EnvBuilder):
    def _setup_pip(self, context):
        self._call_new_python(context, "-m", "split_off_ensurepip", stderr=subprocess.STDOUT)
def create(target, with_pip):
    EnvBuilder(with_pip=with_pip).create(target)
"""
# No file may hold a byte, as where a disk or a quota is full.
WITHOUT_ROOM = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The real script beside a lock file that asks for nothing, so that no network is needed."""
    (tmp_path / "demo.txt").write_text("# nothing\n")
    (tmp_path / "dev.txt").write_text("-r demo.txt\n")
    return Path(shutil.copy(ROOT / "requirements" / "environment.py", tmp_path))


def message(*command: str, without: tuple[str, ...] = (), **variables: str) -> str:
    """What a Python that fails says; it must have ended with status 1, with nothing on stdout and no traceback."""
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_python_without_ensurepip_is_not_blamed_on_pip(script: Path, tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text(VENV_WITHOUT_ENSUREPIP)
    said = message(str(script), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "No module named split_off_ensurepip" in said
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"install python{version}-venv (Debian, Ubuntu), or say make BASE_PYTHON=" in said
    assert "pip ended with" not in said
    assert list((tmp_path / "cache").glob("*/venv-*/finished")) == []


def test_a_home_that_is_no_folder(script: Path) -> None:
    said = message(str(script), without=("XDG_CACHE_HOME",), HOME="/dev/null")
    assert said.startswith("/dev/null/.cache/megacpp-mcore cannot be written to (")
    assert said.endswith("; set XDG_CACHE_HOME to a writable folder\n")


def test_no_room_for_the_environment(script: Path, tmp_path: Path) -> None:
    said = message("-c", WITHOUT_ROOM, str(script), XDG_CACHE_HOME=str(tmp_path))
    assert re.search(rf"^{tmp_path}/megacpp-mcore/venv-\w+ cannot be made \(.*File too large", said, re.MULTILINE)
    assert said.endswith("; make room there, or set XDG_CACHE_HOME to another writable folder\n")
