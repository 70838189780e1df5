"""Datasets as real runs name them, trained on: blends, splits, packed rows; on the stock script and the wheel's loop."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import preset
from tests import forks, stock
from tests.trees import HOOKED, commit, copy_sources, git, link_copy

ROOT = Path(__file__).parents[2]
STEPS = 3
LOSSES = re.compile(r"lm loss: .*?grad norm: \S+")
_VALIDATION = re.compile(r"validation loss at iteration \d+ .*?lm loss value: \S+")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    files = [str(source.path) for source in find_stdlib_sources()[:16]]
    for name, part in (("first", files[:8]), ("second", files[8:])):
        prepare(part, str(folder / name))
    return str(folder / "first"), str(folder / "second")


def words(*data: str, extra: tuple[str, ...] = (), spec: Sequence[str] = ("megacpp_mcore", "nam56r_tiny")) -> list[str]:
    arguments = stock.words(preset("nam56r_tiny"), *extra, data=data, global_batch_size=2, train_iters=STEPS)
    at = arguments.index("--spec") + 1
    return [*arguments[:at], *spec, *arguments[at + 2 :]]


def python(*command: str) -> subprocess.CompletedProcess[str]:
    return forks.run(command, MEGACPP_CONFIG="", WHOLE_END="1")


def quiet(run: Path | None, *data: str, extra: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the console lines of a launch recorded in ``run``, or unrecorded, and the file with Megatron's output."""
    recording = ["--no-observe"] if run is None else ["--observe", str(run)]
    command = ["-m", "megacpp_mcore", "launch", "--device", "cpu", *recording, "--", *words(*data, extra=extra)]
    done = forks.run(command, megatron=True, MEGACPP_CONFIG="", WHOLE_END="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (named,) = re.findall(r"Megatron's output is in (\S+);", done.stdout)
    log = Path(named).read_text()
    if run is None:
        shutil.rmtree(Path(named).parent)
    else:
        assert Path(named).parent == run
    return done.stdout.splitlines(), log


def check_console(lines: Sequence[str], log: str) -> None:
    """A few lines, then one per step, with the same losses as Megatron's own lines in the file."""
    before = next(number for number, line in enumerate(lines) if line.startswith("iteration "))
    assert 10 < before <= 40
    first, *others = lines[before : before + STEPS]
    step, pace = r"iteration {8}\d/ {7}3 \| learning rate: \S+ \| lm loss: ", r" \| [0-9.]+ s/step \| 0:00:\d\d left \|"
    assert re.match(step, first)
    assert not re.search(pace, first)
    assert all(re.match(step, line) and re.search(pace + "$", line) for line in others)
    assert lines[before + STEPS :] == []
    assert "end of arguments" in log
    assert "CPU lane: torch.Tensor.record_stream" in log
    loss = re.search(r"iteration +1/ +3 .* lm loss: (\S+)", log)
    assert loss is not None
    assert f" lm loss: {loss[1]} |" in first


def launch(*data: str, script: Sequence[str] = (), **how: tuple[str, ...]) -> tuple[list[str], list[str], str]:
    """Losses of all steps, those of validation, and the line about the data."""
    command = [*script, *words(*data, **how)]
    done = python("-m", "megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--", *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("megacpp-mcore: data: ")]
    return LOSSES.findall(done.stdout), _VALIDATION.findall(done.stdout), line


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_blend_of_two_corpora_trains_however_it_is_named(corpora: tuple[str, str], tmp_path: Path) -> None:
    """The same blend on the command line and in a file gives the same run; another blend gives another."""
    first, second = corpora
    evaluated = ("--eval-iters", "1")
    (tmp_path / "blend").write_text(f"0.25 {first}\n0.75 {second}\n")
    listed = launch("--data-path", "1", first, "3", second, "--split", "80,20,0", extra=evaluated)
    in_file = launch("--data-args-path", str(tmp_path / "blend"), "--split", "80,20,0", extra=evaluated)
    assert len(listed[0]) == STEPS
    assert listed[1]
    assert listed[:2] == in_file[:2]
    assert listed[2] == in_file[2]
    assert listed[2].startswith(f"megacpp-mcore: data: {first}, {second} verified against their manifests; ")
    (tmp_path / "splits").write_text(json.dumps({"train": ["3", first, "1", second], "valid": second, "test": None}))
    other = launch("--per-split-data-args-path", str(tmp_path / "splits"), extra=evaluated)
    assert (len(other[0]), len(other[1])) == (STEPS, len(listed[1]))
    assert other[0] != listed[0]
    assert other[1] != listed[1]


BARE = """
import os, runpy, sys
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # which torchrun sets
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])  # first: the lane imports Megatron
from megacpp_mcore import cpu
lane = cpu.install()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A stock script without our launcher; on this machine it needs the CPU lane, and nothing else is brought."""
STOCK = BARE.replace("runpy.run", "from megacpp_mcore import patches; patches.apply(['dataset-helpers']); runpy.run")
"""The same where there is no compiler for the dataset helpers, either."""


def run_stock(script: Path, *data: str, extra: tuple[str, ...]) -> list[str]:
    done = python("-c", STOCK, str(script), *words(*data, extra=extra))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return LOSSES.findall(done.stdout)


@pytest.mark.checkout
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_stock_script_trains_on_packed_documents(megatron_lm: Path, tmp_path: Path) -> None:
    """Other losses than where documents see one another; the wheel's loop trains the same."""
    for number in range(200):
        (tmp_path / f"{number:03d}.txt").write_text(f"document {number}: " + "some words. " * (number % 7))
    prepare([str(tmp_path)], str(tmp_path / "short"))
    data = ("--data-path", str(tmp_path / "short"), "--split", "100,0,0")
    extra = ("--eod-mask-loss", "--micro-batch-size", "2")
    script = megatron_lm / "pretrain_gpt.py"
    together = run_stock(script, *data, extra=extra)
    apart = run_stock(script, *data, extra=(*extra, "--dataloader-inter-document-masking"))
    for losses in (together, apart):
        language = [float(re.findall(r"lm loss: (\S+)", line)[0]) for line in losses]
        assert len(language) == STEPS
        assert language[-1] < language[0] < 7
        assert all("mtp_1 loss" in line and "indexer loss" in line for line in losses)
    assert together[0] != apart[0]
    wheel, _, line = launch(*data, extra=(*extra, "--dataloader-inter-document-masking"))
    assert wheel == apart
    assert "verified against its manifest" in line


SPLIT: tuple[str, ...] = ("--split", "80,20,0")
EVALUATED = ("--eval-iters", "1")


@pytest.fixture(scope="module")
def recorded(corpora: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The console and the file of a run of the wheel's own loop."""
    return quiet(tmp_path_factory.mktemp("run"), "--data-path", corpora[0], *SPLIT, extra=EVALUATED)


@pytest.fixture(scope="module")
def wheel(recorded: tuple[list[str], str]) -> tuple[list[str], list[str]]:
    """Its training losses and validation results."""
    losses, validated = LOSSES.findall(recorded[1]), _VALIDATION.findall(recorded[1])
    assert len(losses) == STEPS
    assert validated
    assert "mtp_1 loss" in losses[0]
    assert "indexer loss" in losses[0]
    return losses, validated


@pytest.mark.slow
def test_a_launch_prints_few_lines_then_one_a_step(recorded: tuple[list[str], str]) -> None:
    check_console(*recorded)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_so_does_one_that_is_not_recorded(corpora: tuple[str, str]) -> None:
    check_console(*quiet(None, "--data-path", corpora[0], *SPLIT, extra=EVALUATED))


@pytest.mark.slow
def test_the_one_word_on_the_stock_script_trains_what_two_on_the_wheel_do(
    corpora: tuple[str, str], wheel: tuple[list[str], list[str]], megatron_lm: Path
) -> None:
    data, script = ("--data-path", corpora[0], *SPLIT), [str(megatron_lm / "pretrain_gpt.py")]
    assert launch(*data, script=script, spec=("megacpp_mcore.nam56r_tiny",), extra=EVALUATED)[:2] == wheel


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_patched_checkout_takes_the_one_word_itself_and_is_clean_again(
    corpora: tuple[str, str], wheel: tuple[list[str], list[str]], megatron_lm: Path, tmp_path: Path
) -> None:
    """``patch apply --checkout``, then the checkout's own script without the launcher, then ``patch revert``."""
    checkout = link_copy(copy_sources(megatron_lm, tmp_path / "original"), tmp_path / "Megatron-LM")
    for file in megatron_lm.glob("*.py"):
        (checkout / file.name).write_bytes(file.read_bytes())
    shutil.copy(megatron_lm / "megatron" / "core" / "datasets" / "helpers.cpp", checkout / "megatron/core/datasets")
    commit(checkout)
    assert cli.main(["patch", "apply", "--checkout", str(checkout), "spec-import", "dataset-helpers"]) == 0
    assert git(checkout, "status", "--porcelain").splitlines() == [f" M {HOOKED}"]

    arguments = words("--data-path", corpora[0], *SPLIT, extra=EVALUATED, spec=["megacpp_mcore.nam56r_tiny"])
    done = python("-c", BARE, str(checkout / "pretrain_gpt.py"), *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "patch spec-import applied" in done.stdout + done.stderr
    assert done.stdout.count("megacpp-mcore: launch policy of a script that `megacpp-mcore launch` did not start") == 1
    assert (LOSSES.findall(done.stdout), _VALIDATION.findall(done.stdout)) == wheel

    assert cli.main(["patch", "revert", "--checkout", str(checkout)]) == 0
    assert git(checkout, "status", "--porcelain") == ""
