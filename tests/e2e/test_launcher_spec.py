"""The launcher: unmodified ``pretrain_gpt.py`` with the one word of ``--spec`` trains what the wheel's loop does with two."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megacpp_mcore.data.corpus import find_stdlib_sources
from tests.e2e.test_data import BARE, LOSSES, STEPS, python, words
from tests.trees import HOOKED, commit, copy_sources, git, link_copy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real dataset: some files of the standard library, prepared by the command a user runs."""
    folder = tmp_path_factory.mktemp("entry_points")
    files = [str(source.path) for source in find_stdlib_sources()[:20]]
    assert _run("data", "prepare", *files, "--output", str(folder / "text")).returncode == 0
    return folder / "text"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "megacpp_mcore", *words)


def _words(data: Path) -> list[str]:
    return words("--data-path", str(data), "--split", "100,0,0")


def _losses(data: Path, script: list[str], spec: list[str]) -> list[str]:
    arguments = _words(data)
    arguments[arguments.index("--spec") + 1 :] = spec
    done = _run("launch", "--verbose", "--device", "cpu", "--", *script, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = LOSSES.findall(done.stdout)
    assert len(found) == STEPS
    return found


@pytest.fixture(scope="module")
def wheel(data: Path) -> list[str]:
    """What the wheel's own loop trains."""
    return _losses(data, [], ["megacpp_mcore", "nam56r_tiny"])


@pytest.mark.checkout
@pytest.mark.slow
def test_the_one_word_on_the_stock_script_trains_what_two_on_the_wheel_do(
    data: Path, wheel: list[str], megatron_lm: Path
) -> None:
    script = [str(megatron_lm / "pretrain_gpt.py")]
    assert _losses(data, script, ["megacpp_mcore.nam56r_tiny"]) == wheel
    assert "mtp_1 loss" in wheel[0]
    assert "indexer loss" in wheel[0]


@pytest.mark.checkout
@pytest.mark.slow
def test_a_patched_checkout_takes_the_one_word_itself_and_is_clean_again(
    data: Path, wheel: list[str], megatron_lm: Path, tmp_path: Path
) -> None:
    """``patch apply --checkout``, then the checkout's own script without the launcher, then ``patch revert``."""
    checkout = link_copy(copy_sources(megatron_lm, tmp_path / "original"), tmp_path / "Megatron-LM")
    for file in megatron_lm.glob("*.py"):
        (checkout / file.name).write_bytes(file.read_bytes())
    shutil.copy(megatron_lm / "megatron" / "core" / "datasets" / "helpers.cpp", checkout / "megatron/core/datasets")
    commit(checkout)
    assert _run("patch", "apply", "--checkout", str(checkout), "spec-import", "dataset-helpers").returncode == 0
    assert git(checkout, "status", "--porcelain").splitlines() == [f" M {HOOKED}"]

    arguments = _words(data)
    arguments[arguments.index("--spec") + 1 :] = ["megacpp_mcore.nam56r_tiny"]
    done = python("-c", BARE, str(checkout / "pretrain_gpt.py"), *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "patch spec-import applied" in done.stdout + done.stderr
    assert done.stdout.count("megacpp-mcore: launch policy of a script that `megacpp-mcore launch` did not start") == 1
    assert LOSSES.findall(done.stdout) == wheel

    assert _run("patch", "revert", "--checkout", str(checkout)).returncode == 0
    assert git(checkout, "status", "--porcelain") == ""
