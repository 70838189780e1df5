"""The runner of Megatron's own tests, on a small tree in place of a checkout: outcomes of ranks, patches, hangs, the table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.upstream import run as upstream
from tests.upstream.run import STOCK, Run, compare, write

CONFTEST = """
from tests.test_utils.python_scripts.download_unit_tests_dataset import download_and_extract_asset

download_and_extract_asset(assets_dir=None)
"""
TESTS = """
import os, pathlib, pytest, time
from megatron.core.transformer.spec_utils import import_module

def test_always():
    pathlib.Path("left").touch()

def test_on_rank_0():
    assert os.environ["RANK"] == "0"

@pytest.mark.parametrize("here", [True, False])
def test_skips(here):
    if here:
        pytest.skip("not here")

def test_stock_only():
    assert not hasattr(import_module, "__wrapped__"), "patched"

def test_patched_only():
    assert hasattr(import_module, "__wrapped__")

@pytest.fixture
def torn():
    yield
    raise ValueError("in teardown")

def test_fails_late(torn):
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    (folder.parent / "test_utils" / "python_scripts").mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import no_such_module\n")
    return tmp_path / "checkout"


def contents(tree: Path) -> list[Path]:
    return sorted(path for path in tree.rglob("*") if "__pycache__" not in path.parts)


def carry_out(arm: str, gpus: int, tree: Path, *files: str, timeout: float = 120) -> Run:
    return Run(arm, gpus).carry_out(tree, files, tree.parent / "work", "", timeout)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_outcomes_of_ranks_with_and_without_a_patch(tree: Path) -> None:
    before = contents(tree)
    stock, patched = carry_out("stock", 2, tree, "test_some.py"), carry_out("spec-import", 1, tree, "test_some.py")
    assert (stock.ended, patched.ended) == ("finished", "finished")
    names = ("always", "on_rank_0", "skips[True]", "skips[False]", "stock_only", "patched_only", "fails_late")
    outcomes = ("passed", "failed", "skipped", "passed", "passed", "failed", "failed")
    assert stock.tests == {f"test_some.py::test_{name}": outcome for name, outcome in zip(names, outcomes, strict=True)}
    assert stock.reasons["test_some.py::test_skips[True]"] == "Skipped: not here"
    assert stock.reasons["test_some.py::test_fails_late"] == "ValueError: in teardown"
    runs = [Run(arm, 1, tests=stock.tests) for arm in STOCK]
    assert compare(runs, patched) == {
        "lost": ["test_some.py::test_stock_only"],
        "gained": ["test_some.py::test_on_rank_0", "test_some.py::test_patched_only"],
    }
    assert contents(tree) == before, "nothing is written into the checkout"


@pytest.mark.exhaustive
def test_what_cannot_be_imported_is_named(tree: Path) -> None:
    found = carry_out("stock", 1, tree, "test_some.py", "test_broken.py")
    assert found.ended.startswith("not collected: tests/unit_tests/test_broken.py: ")
    assert "No module named 'no_such_module'" in found.ended


def test_the_table_names_lost_and_gained_and_unsteady(tmp_path: Path) -> None:
    def run(arm: str, *passed: str, ended: str = "finished") -> Run:
        return Run(arm, 1, ended, 1.0, dict.fromkeys("abcd", "failed") | dict.fromkeys(passed, "passed"))

    stock = [run("stock", "a", "b", "c"), run("stock 2", "a", "b"), run("stock 3", "a", "b")]
    table = tmp_path / "table.csv"

    def rows(*runs: Run) -> tuple[bool, list[tuple[str, ...]]]:
        clean = write(table, runs, {"commit": "1234567"})
        with table.open(newline="") as file:
            return clean, [
                tuple(row[name] for name in ("arm", "passed", "lost", "gained", "unsteady", "tests"))
                for row in csv.DictReader(file)
            ]

    assert rows(*stock[:2], run("all", "a")) == (True, []), "nothing is compared before stock's third run"
    ours = [("stock", "3", "", "", "1", "unsteady c")] + [(name, "2", "", "", "1", "unsteady c") for name in STOCK[1:]]
    assert rows(*stock, run("all", "a", "b", "d")) == (True, [*ours, ("all", "3", "0", "1", "", "gained d")])
    assert rows(*stock, run("all", "b", "c")) == (False, [*ours, ("all", "2", "1", "0", "", "lost a")])
    assert not rows(*stock, run("all", "a", "b", ended="status -9"))[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_with_all_patches_no_test_that_needs_no_gpu_is_lost(megatron_lm: Path, tmp_path: Path) -> None:
    """Of the files that can be imported without Transformer Engine and pytest-mock."""
    others = {f"transformer/test_{name}.py" for name in ("multi_latent_attention", "spec_customization")}
    others |= {"pipeline_parallel/test_schedules.py", "dist_checkpointing/test_optimizer.py"}
    files = [file for file in upstream.FILES if file not in others]
    stock, patched = (Run(arm, 1).carry_out(megatron_lm, files, tmp_path, "", 300) for arm in ("stock", "all"))
    assert (stock.ended, patched.ended) == ("finished", "finished")
    assert len(stock.passed) > 120
    assert compare([Run(arm, 1, tests=stock.tests) for arm in STOCK], patched) == {"lost": [], "gained": []}
