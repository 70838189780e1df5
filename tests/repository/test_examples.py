"""Every script of examples/ that is meant for a shell, run by one, on the CPU: it trains what it says it trains."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore import settings
from megacpp_mcore.model import preset
from megacpp_mcore.observe.steps import read_steps

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = re.compile(r"(?:^step |iteration +)(\d+)/ *3 .*?loss:? (\S+)", re.MULTILINE)
PARAMETERS = re.compile(r"number of parameters on .*: (\d+)")


def run(name: str, tmp_path: Path, **variables: str) -> str:
    """What the example and Megatron print; ``megacpp-mcore`` is this clone's, all that it writes is under ``tmp_path``."""
    tool = tmp_path / "megacpp-mcore"
    verbose = '[ "$1" != launch ] || set -- launch --verbose "${@:2}"'
    tool.write_text(f'#!/bin/bash\n{verbose}\nexec {shlex.quote(sys.executable)} -W ignore -m megacpp_mcore "$@"\n')
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **variables}
    environment.pop(settings.VARIABLE, None)
    command = [str(EXAMPLES / name), str(tmp_path / "made here")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def check_losses(printed: str) -> None:
    steps = STEPS.findall(printed)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert float(steps[-1][1]) < float(steps[0][1])


def test_every_shell_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    scripts = list(EXAMPLES.glob("*.sh"))
    assert len(scripts) >= 4
    for path in scripts:
        assert f'"{path.name}"' in tests, path
        assert os.access(path, os.X_OK), path
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkout_spec(megatron_lm: Path, tmp_path: Path) -> None:
    printed = run("checkout_spec.sh", tmp_path, MEGATRON_LM=str(megatron_lm))
    assert f"script {megatron_lm / 'pretrain_hybrid.py'} | spec megacpp_mcore.nam56r_tiny | device cpu" in printed
    check_losses(printed)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_patch_only(tmp_path: Path) -> None:
    printed = run("patch_only.sh", tmp_path)
    assert printed.count("spec none (stock GPT)") == 2
    assert re.findall(r"patches: (.*)", printed) == ["dataset-helpers", "dataset-helpers, linear-cross-entropy"]
    stock, patched = (read_steps(tmp_path / "made here" / run) for run in ("stock", "patched"))
    assert len(stock) == 3
    for first, second in zip(stock, patched, strict=True):
        assert first.losses["lm loss"] == pytest.approx(second.losses["lm loss"], rel=1e-6)
    assert stock[-1].losses["lm loss"] < stock[0].losses["lm loss"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_own_pattern(tmp_path: Path) -> None:
    printed = run("own_pattern.sh", tmp_path)
    assert '"layers": "AMEAMAR"' in printed
    total, _ = re.findall(r'"total": (\d+)', printed)  # parameters, and the bytes of all states
    padding = 3 * 4 * 128  # Megatron counts the empty rows too: 4 in the in-projection of each M and R, 128 wide
    assert [int(count) - padding for count in PARAMETERS.findall(printed)] == [int(total)]
    check_losses(printed)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_block_family(tmp_path: Path) -> None:
    printed = run("block_family.sh", tmp_path)
    model = preset("nam56r_tiny")
    hidden, taps, layers = model.hidden_size, 8, model.layers.count("R")
    of_a_convolution = hidden + 3 * hidden * hidden + hidden * (taps + 1)
    kept = sum(count for part, count in model.parameters().items() if part != "R")
    padding = model.layers.count("M") * 4 * hidden  # as above
    assert PARAMETERS.findall(printed) == [str(kept + layers * of_a_convolution + padding)]
    check_losses(printed)
