"""Rules for the whole tree: forbidden words, name collisions and imports."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megacpp_mcore

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"build", "dist", "runs", "__pycache__"}
PATHS = {**os.environ, "PYTHONPATH": str(ROOT)}


def files(*suffixes: str) -> list[Path]:
    """Every file of the tree with one of these suffixes, each once (neither symlinks nor hidden folders are followed)."""
    paths = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in LEFT_OUT and not name.startswith(".") and "egg-info" not in name]
        paths += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
    return [path for path in paths if not path.is_symlink()]


# What ruff has no rule for; each written in two parts, so that this file does not hold them.
FORBIDDEN = [
    r"weights_only\s*=\s*" + "False", r"allow_pickle\s*=\s*" + "True", r"pytest\.skip" + r"\(\s*\)",
    r"\bx" + "fail", r"\bfl" + r"aky\b", r"if " + r"False:",
]  # fmt: skip
# In an article the name of what is forbidden may be mentioned; in code it may not.
CODE = (".py", ".sh", ".cu", ".cpp")


def test_forbidden_words() -> None:
    expression = re.compile("|".join(FORBIDDEN))
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(*CODE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if expression.search(line)
    ]
    assert hits == []


def test_the_map_of_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.(?:py|md|yaml))`", text.partition("## Where things are")[2].partition("\n## ")[0])
    assert len(named) > 40
    assert [file for file in named if not any((ROOT / top / file).is_file() for top in ("", "megacpp_mcore"))] == []


def test_large_files_are_those_that_the_guard_leaves_out() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][-1]["hooks"]
    kinds = (".py", ".md", ".csv", ".txt", ".json", ".svg", ".yaml", ".html", ".sh")
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in files(*kinds)}
    large = {name for name, size in sizes.items() if size > 64 * 1024}
    assert large == {name for name in sizes if re.search(hooks[0]["exclude"], name)}


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    changelog = re.search(r"^## \[([\d.]+)\]", text, re.MULTILINE)
    assert changelog is not None
    assert citation["version"] == changelog[1] == megacpp_mcore.__version__
    assert text.count("\n") <= 120  # by theme, a line each; numbers are in the results


@pytest.mark.parametrize("folder", ["layer_specs", "patches", "nemo_recipes"])
def test_mounted_folders_are_symlinks_that_refuse_their_bare_name(folder: str) -> None:
    mount = ROOT / "megacpp_mcore" / folder
    assert mount.resolve() == ROOT / folder
    for name, status in ((f"megacpp_mcore.{folder}", 0), (folder, 1)):
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, cwd=ROOT, env=PATHS, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert f"ImportError: this folder was imported as '{folder}'; its name is 'megacpp_mcore.{folder}'" in done.stderr


def test_these_import_neither_torch_nor_megatron() -> None:
    """Import what an error, a report or a printed command needs, in one Python."""
    modules = [
        "errors", "model", "model.pattern", "model.hybrid", "model.flops", "settings", "arguments.lowering", "backends",
        "patches.machinery.registry", "policy", "observe.receipts", "observe.profile.table", "launch.launcher",
        "commands.report_page", "commands.cli", "commands.doctor", "commands.recipe", "commands.report",
    ]  # fmt: skip
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module("megacpp_mcore." + name)
    print(name, [heavy for heavy in ("torch", "megatron", "numpy") if heavy in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], env=PATHS, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} []" for name in modules]


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'nam57'.* __version__, nam56r, nam56r_hybrid"):
        megacpp_mcore.nam57  # noqa: B018
    assert "nam56r" in dir(megacpp_mcore)


def test_a_file_is_known_by_its_name() -> None:
    """Outside of ``ops/<op>/``, but for ``run``: the description of one, and the program that users of nemo-run type."""
    rooms = ("megacpp_mcore", "layer_specs", "patches", "nemo_recipes")
    paths = (file.relative_to(ROOT) for room in rooms for file in (ROOT / room).rglob("*.py"))  # follows no link
    stems = collections.Counter(path.stem for path in paths if not re.match(r"megacpp_mcore/ops/\w+/", path.as_posix()))
    twice = {stem for stem, times in stems.items() if times > 1 and not stem.startswith("__")}
    assert twice == {"run"}
