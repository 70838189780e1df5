"""``megacpp-mcore patch``: what its actions print, return and refuse (patches/test_checkout.py: what they do to a tree)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.errors import CheckoutError
from megacpp_mcore.patches.machinery.registry import default
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from tests.trees import HOOKED, commit, copy_modules, edit, git, link_copy, snapshot, wheel_root

ROOT = Path(__file__).parents[2]
NAME = "mtp-shared-block"
VERSION = SourceTree((wheel_root(),)).version()
NAMES = [patch.name for patch in default().patches]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = {module for patch in default().patches for module in patch.modules}
    return copy_modules(wheel_root(), tmp_path_factory.mktemp("wheel"), modules)


@pytest.fixture
def tree(whole: Path, tmp_path: Path) -> Path:
    return link_copy(whole, tmp_path / "lm")


def test_the_whole_round(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def patch(*words: str) -> list[str]:
        assert cli.main(["patch", *words, "--checkout", str(tree)]) == 0
        return capsys.readouterr().out.splitlines()

    before, version = snapshot(tree), VERSION
    head = f"{tree} (megatron-core {version}) is hooked for: "
    assert patch("status", NAME) == [f"megatron-core {version} in {tree}", f"{NAME}: not applied"]
    exported = tmp_path / "hook.patch"
    exported.write_text("\n".join(patch("export", NAME)) + "\n")
    assert patch("apply", NAME) == [f"{NAME}: applied", f"{head}{NAME}"]
    applied = snapshot(tree)
    assert patch("apply", NAME) == [f"{NAME}: applied already", "nothing was changed", f"{head}{NAME}"]
    assert patch("status", NAME)[1:] == [f"{NAME}: applied"]
    assert patch("verify") == [f"{tree} is hooked as it should be, for: {NAME}"]
    assert "\n".join(patch("export")) + "\n" == exported.read_text()
    assert patch("revert", NAME) == [f"{NAME}: reverted", f"{head}no patch"]
    assert snapshot(tree) == before
    assert patch("revert", NAME) == [f"{NAME}: not applied", "nothing was changed", f"{head}no patch"]
    assert patch("revert") == ["nothing was changed", f"{head}no patch"]
    assert git(tree, "status", "--porcelain") == ""
    git(tree, "apply", str(exported))
    assert snapshot(tree) == applied


def test_status_with_a_diff_and_as_json(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tree / "megatron/training/models/gpt.py"
    edit(file, file.read_bytes().replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))
    assert cli.main(["patch", "status", "--checkout", str(tree)]) == 0
    shown = capsys.readouterr().out
    assert f"{NAME}: target changed: the source of megatron.training.models.gpt:mtp_block_spec" in shown
    assert "\n-def mtp_block_spec(\n+def mtp_block_spec(  # an edit\n" in shown
    assert cli.main(["patch", "status", "--json", "--checkout", str(tree)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] for name, row in rows.items()} == {
        **dict.fromkeys(NAMES, "not applied"),
        NAME: "target changed",
    }


def test_dirty_is_refused_unless_allowed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tree / "megatron/core/package_info.py"
    edit(file, file.read_bytes() + b"# a note\n")
    words = ["patch", "apply", NAME, "--checkout", str(tree)]
    assert cli.main(words) == 2
    assert "is dirty: megatron/core/package_info.py" in capsys.readouterr().err
    assert cli.main([*words, "--allow-dirty"]) == 0
    assert "note: patched as it is, with modified files: megatron/core/package_info.py" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "revert", "export"])
def test_without_a_checkout(
    action: str, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setenv("MEGATRON_LM", str(tree))
    before = snapshot(tree)
    assert cli.main(["patch", action, NAME]) == 2
    shown = capsys.readouterr().err
    for words in (
        "give --checkout DIR (MEGATRON_LM is not used",
        "launch --patch NAME",
        "megacpp_mcore.patches.apply(",
    ):
        assert words in shown
    assert snapshot(tree) == before


def test_the_installed_megatron(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["patch", "status", NAME]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"megatron-core {VERSION} in {wheel_root()}"
    assert rest == [f"{NAME}: not applied"]
    assert cli.main(["patch", "verify"]) == 0
    assert "the patches fit megatron-core" in capsys.readouterr().out
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "megatron").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["patch", "status"]) == 2
    assert "megatron-core is not installed here" in capsys.readouterr().err
    with pytest.raises(CheckoutError, match="install megatron-core"):
        default().apply([NAME])


def test_a_hooked_tree_on_the_path_is_the_installed_one(tree: Path) -> None:
    assert cli.main(["patch", "apply", NAME, "--checkout", str(tree)]) == 0
    command = [sys.executable, "-m", "megacpp_mcore", "patch"]
    environment = {"PYTHONPATH": f"{tree}:{ROOT}", "PATH": "/usr/bin:/bin"}

    def patch(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd="/", env=environment, capture_output=True, text=True, check=False)

    assert patch("verify").stdout.startswith(f"{tree} is hooked as it should be")
    file = tree / "megatron/training/models/gpt.py"
    edit(file, file.read_bytes().replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))
    (tree / HOOKED).write_text("")
    commit(tree)
    done = patch("verify", NAME)
    assert done.returncode == 2
    assert f"error: not every patch fits megatron-core {VERSION}: {NAME}: the source of" in done.stderr


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["patch", "list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    assert cli.main(["patch", "list", NAME, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == NAME
    assert {"fixes", "source", "seam", "leaves_alone", "retire_when", "cost", "gain", "targets"} <= set(row)
    assert cli.main(["patch", "list", "mtp-shard-block"]) == 2
    assert "did you mean 'mtp-shared-block'" in capsys.readouterr().err


def test_files_are_read_and_nothing_heavy_is_imported(tree: Path) -> None:
    code = f"""
import sys
from megacpp_mcore.commands import cli
for action in ("apply", "status", "verify", "revert"):
    assert cli.main(["patch", action, {NAME!r}, "--checkout", {str(tree)!r}]) == 0
heavy = [name for name in ("torch", "numpy", "megatron.core", "megatron") if name in sys.modules]
print("heavy:", heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_page_of_the_patches_is_the_registrys(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of a record: megacpp-mcore patch list --markdown > docs/patches.md"""
    assert cli.main(["patch", "list", "--markdown"]) == 0
    assert capsys.readouterr().out == (Path(__file__).parents[2] / "docs" / "patches.md").read_text(encoding="utf-8")
