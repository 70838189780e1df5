"""``megacpp-mcore compat`` on small seeded trees: which changes it distinguishes, and the exit status of each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacpp_mcore import versions
from megacpp_mcore.commands import cli
from megacpp_mcore.commands import compat as command
from megacpp_mcore.errors import CheckoutError
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.patches import watched
from megacpp_mcore.patches.machinery import checkout as checkout_module
from megacpp_mcore.patches.machinery import drift
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.registry import Registry
from megacpp_mcore.patches.machinery.symbols import Refusal, digest
from tests import forks
from tests.errors import raises
from tests.trees import commit, git, patch_of, snapshot, wheel_root

TAG = versions.CHECKOUT_TAG
FILES = {
    "core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 1\n",
    "core/__init__.py": "from .layers import Layer as Plain\nLIMIT = 4\n",
    "core/layers.py": '''
        class Layer:
            """A layer."""

            def __init__(self, config, name=None):
                self.config = config

            def forward(self, x):
                """Run."""
                return x + 1  # one


        def scale(x, by):
            return x * by


        def called(x):
            return x
    ''',
    "bridge/__init__.py": "nothing = 1\n",  # of another distribution
    "training/arguments.py": '''
        def add(parser):
            parser.add_argument("--num-layers", type=int)


        class TransformerConfig:
            hidden_size: int
            use_bias: bool = True
    ''',
}  # fmt: skip
FORWARD, SCALE = "megatron.core.layers:Layer.forward", "megatron.core.layers:scale"
CALLED = "megatron.core.layers:called"
PACKAGE = """
    from megatron.core import LIMIT, Plain, layers
    from megatron.core.layers import scale
    from megatron.bridge import nothing
    FLAGS = ["--num-layers", "--hidden-size 8", "--no-use-bias", "--ours"]
    def read(config, args): return config.hidden_size, getattr(args, "use_bias"), config.ours
    def build(config): return Plain(config, "by place")
"""
Seed = Callable[[str, str, str], None]
Report = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron of three files, tagged."""
    root = tmp_path_factory.mktemp("tagged")
    for name, text in FILES.items():
        file = root / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip())
    git(root, "init", "-q", "--template=")
    commit(root)
    git(root, "tag", TAG)
    return root


@pytest.fixture
def tree(tagged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; a package that uses it; and no installed Megatron to compare with."""
    root, package = shutil.copytree(tagged, tmp_path / "lm"), tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.setattr(drift.megacpp_mcore, "__file__", str(package / "__init__.py"))
    registry = Registry([patch_of(root, "one", FORWARD, upstream=(7, 8)), patch_of(root, "two", SCALE)])
    monkeypatch.setattr(checkout_module, "default", lambda: registry)
    monkeypatch.setattr(watched, "SOURCES", {CALLED: patch_of(root, "watched", CALLED).edits[0].fingerprints})
    monkeypatch.setattr(Checkout, "installed", mock.Mock(side_effect=CheckoutError("none")))
    return root


@pytest.fixture
def seed(tree: Path) -> Iterator[Seed]:
    """Replace a text in a file of the tree, and commit."""

    def replace(name: str, old: str, new: str) -> None:
        file = tree / "megatron" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        git(tree, "commit", "-qam", f"{old.strip()} becomes {new.strip()} (#7)")

    return replace


@pytest.fixture
def report(tree: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """What the command, which has to end with ``status``, prints as JSON of the tree, or of another; that stays as it is."""

    def run(status: int, *words: str, root: Path = tree) -> dict[str, Any]:
        before = snapshot(root)
        assert cli.main(["compat", "--checkout", str(root), "--json", *words]) == status
        assert snapshot(root) == before
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (printed["status"], printed["verdict"]) == (status, drift.VERDICTS[status])
        return printed

    return run


def test_the_tree_that_it_was_written_for_fits(report: Report) -> None:
    checked = report(0)
    assert {patch["name"]: patch["verdict"] for patch in checked["patches"]} == dict.fromkeys(
        ("one", "two", "not patched"), "fits"
    )
    assert checked["symbols"] == {"known": 4, "changed": []}
    assert checked["flags"] == {"known": 3, "gone": []}
    assert checked["fields"] == {"known": 2, "gone": []}
    assert (checked["compared_with"], checked["notes"]) == ([TAG], [])


@pytest.mark.parametrize(
    ("old", "new", "status", "state", "parameters"),
    [
        ("  # one", "", 1, "comments only", []),
        ('"""Run."""', '"""Runs."""', 1, "comments only", []),
        ("x + 1", "x + 2", 2, "code", []),
        ("forward(self, x)", "forward(self, y, *, x)", 2, "code", ["+y", "~x"]),
        ("forward(self, x)", "forward(self, *x)", 2, "code", ["+*x=…", "-x"]),
        ("def forward", "def run", 3, "gone", []),
    ],
)
def test_changes_of_a_target_are_told_apart(
    old: str, new: str, status: int, state: str, parameters: list[str],
    tree: Path, seed: Seed, report: Report, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seed("core/layers.py", old, new)
    seed("core/layers.py", '"""A layer."""', '"""A class of layers."""')
    first, second, watched = report(status)["patches"]
    (target,) = first["targets"]
    assert (first["verdict"], second["verdict"], watched["verdict"]) == (drift.VERDICTS[status], "fits", "fits")
    assert (target["state"], target["parameters"]) == (state, parameters)
    (changed,) = target["commits"]
    assert changed.endswith(f"{old.strip()} becomes {new.strip()} (#7)")
    (merged, other) = first["upstream_merged"].values()
    assert merged is not None
    assert other is None
    assert cli.main(["compat", "--checkout", str(tree)]) == status
    text = capsys.readouterr().out
    assert f"\n  {FORWARD}: {state}" in text
    assert f"\n    {changed}\n" in text
    assert "\n  #7 is merged" in text
    assert cli.main(["compat", "--checkout", str(tree), "--write"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"# one, {FORWARD}: {state}")
    digests = Registry([patch_of(tree, "new", FORWARD)]).patches[0].edits[0].fingerprints if state != "gone" else ()
    accepted = [line.strip(' ",') for line in lines if line.startswith("    ")]
    assert accepted[1:] == list(digests)
    assert len(accepted[0]) == len(digest(""))


def test_fingerprints_of_several_sources(tree: Path, seed: Seed, report: Report) -> None:
    seed("core/package_info.py", "MINOR = 19", "MINOR = 20")
    seed("core/layers.py", "x * by", "by * x")
    checked = report(2)
    (target,) = checked["patches"][1]["targets"]
    assert checked["megatron_core"] == "0.20.1"
    assert f"2 commits after {git(tree, 'rev-parse', TAG)[:10]}" in checked["head"]
    registry = checkout_module.default()
    (edit,) = registry.patches[1].edits
    object.__setattr__(edit, "fingerprints", tuple(target["fingerprints"]))
    assert report(0)["patches"][1]["verdict"] == "fits"
    object.__setattr__(edit, "fingerprints", ("0" * 64,))
    object.__setattr__(edit, "until", tuple(target["fingerprints"][1:]))
    assert report(0)["patches"][1]["verdict"] == "fits"
    object.__setattr__(edit, "until", ())
    assert report(2)["patches"][1]["targets"][0]["state"] == "changed"


@pytest.mark.parametrize(
    ("name", "old", "new", "status", "key", "expected"),
    [
        ("core/layers.py", "name=None", "name=None, *, group=None, **more", 0, "symbols", ["+group=…", "+**more=…"]),
        ("core/layers.py", "name=None", "group, name=None", 2, "symbols", ["+group", "~name"]),
        ("core/layers.py", "name=None", "group=0, name=None", 2, "symbols", ["+group=…", "~name"]),
        ("core/layers.py", "name=None", "*, name=None", 2, "symbols", ["~name"]),
        ("core/layers.py", "name=None", "*, name", 2, "symbols", ["+name", "~name"]),
        ("core/layers.py", ", name=None", "", 2, "symbols", ["-name"]),
        ("core/layers.py", "self.config = config", "self.settings = config", 0, "symbols", []),
        ("core/__init__.py", "Layer as Plain", "Layer", 3, "symbols", "megatron.core:Plain"),
        ("core/__init__.py", "LIMIT", "BOUND", 3, "symbols", "megatron.core:LIMIT"),
        ("training/arguments.py", "--num-layers", "--layers", 3, "flags", ["--num-layers"]),
        ("training/arguments.py", "hidden_size", "width", 3, "fields", ["hidden_size"]),
        ("training/arguments.py", "hidden_size", "width", 3, "flags", ["--hidden-size"]),
    ],
)
def test_changes_of_what_the_package_names(
    name: str, old: str, new: str, status: int, key: str, expected: Any, seed: Seed, report: Report
) -> None:
    seed(name, old, new)
    checked = report(status)
    assert [patch["verdict"] for patch in checked["patches"][:2]] == ["fits", "fits"]
    if key != "symbols":
        assert checked[key]["gone"] == expected
        return
    (row,) = checked[key]["changed"]
    assert expected == (row["symbol"] if status == 3 else row["parameters"])
    assert row["files"] == ["__init__.py"]


def test_functions_that_no_patch_replaces_are_watched(seed: Seed, report: Report) -> None:
    seed("core/layers.py", "called(x)", "called(x, y)")
    *patches, watched = report(2)["patches"]
    assert [patch["verdict"] for patch in patches] == ["fits", "fits"]
    assert (watched["name"], watched["verdict"]) == ("not patched", "code to review")
    assert [(row["target"], row["parameters"]) for row in watched["targets"]] == [(CALLED, ["+y"])]


def test_a_reverted_pull_request_is_not_merged(tree: Path, seed: Seed, report: Report) -> None:
    seed("core/layers.py", "  # one", "  # two")
    assert report(1)["patches"][0]["upstream_merged"]["#7"] is not None
    git(tree, "commit", "-q", "--allow-empty", "-m", 'Revert "one becomes two (#7)" (#9)')
    assert report(1)["patches"][0]["upstream_merged"] == {"#7": None, "#8": None}


def test_edits_that_are_not_committed(tree: Path, report: Report) -> None:
    file = tree / "megatron/core/layers.py"
    file.write_text(file.read_text().replace("x + 1", "x + 2"))
    assert report(2)["patches"][0]["targets"][0]["commits"] == ["not committed"]


def test_trees_that_cannot_be_compared(
    tree: Path, seed: Seed, report: Report, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seed("core/layers.py", "  # one", "")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-tags", tree.as_uri(), str(shallow))
    git(tree, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--filter=blob:none", tree.as_uri(), "partial")
    for folder, since, code, values in (
        (tmp_path / "partial", TAG, "no-tag", ["partial", git(tree, "rev-parse", TAG)[:10], "without --filter"]),
        (shallow, TAG, "no-tag", ["shallow clone", TAG, "fetch --unshallow"]),
        (tree, "core_v9", "no-tag", ["a clone without core_v9"]),
        (tree, "--output=x", "no-tag", ["--output=x"]),
        (tmp_path, None, "no-checkout", [str(tmp_path), "megatron/core/__init__.py"]),
    ):
        with raises(CheckoutError, *values, code=code):
            drift.examine(Checkout(folder), since)
    assert cli.main(["compat", "--checkout", str(shallow), "--since", TAG]) == 2
    assert capsys.readouterr().out == ""
    # Without a tag that somebody asked for: fingerprints alone, and said so. What is installed is the tree itself.
    monkeypatch.setattr(Checkout, "installed", lambda: Checkout(shallow))
    checked = report(2, root=shallow)
    assert checked["patches"][0]["targets"][0]["state"] == "changed"
    assert any("shallow clone" in note for note in checked["notes"])
    assert checked["compared_with"] == []
    git(shallow, "fetch", "-q", "--depth", "1", "origin", "tag", TAG)
    checked = report(1, root=shallow)
    assert checked["patches"][0]["targets"][0]["state"] == "comments only"
    assert any("no commit in common" in note for note in checked["notes"])
    (tree / "megatron/training/arguments.py").write_text("class Config(:\n")
    with raises(Refusal, "megatron.training.arguments", code="target-changed"):
        drift.examine(Checkout(tree))


def test_a_run_that_does_not_end_well_is_broken(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.trial, "subprocess", forks.trial())
    checked = report(3, "--run")
    assert [patch["verdict"] for patch in checked["patches"]] == ["fits"] * 3
    for model_class in (GPT, HYBRID):
        lines = checked["runs"][model_class]
        assert lines[0].startswith("ended with status ")
        assert "is not one that this run's patches were written for" in lines[1]  # the tree has three files


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_class", [GPT, HYBRID])
def test_a_run_has_to_give_the_recorded_figures(model_class: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.FIGURES["grad norm"]
    monkeypatch.setitem(command.FIGURES, "grad norm", (1.0, command.FIGURES["grad norm"][1], 1.0))
    (tmp_path / "megatron").symlink_to(wheel_root() / "megatron")  # alone: beside it may be older packages than here
    problems = command._trained(tmp_path, model_class)
    assert [problem.partition(" is ")[0] for problem in problems] == ["grad norm of step 1", "grad norm of step 3"]


@pytest.mark.checkout
def test_the_checkout_fits_and_nothing_is_imported(megatron_lm: Path) -> None:
    code = "import sys; from megacpp_mcore.commands import cli; status = cli.main(sys.argv[1:]); "
    code += "print(status, sorted({'torch', 'megatron.core', 'megatron.training'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, "compat", "--checkout", str(megatron_lm)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=forks.PATIENCE_S, check=True)
    assert done.stdout.splitlines()[-2:] == ["verdict: fits", "0 []"]
