"""A hooked checkout: bytes in and out, every refusal, deaths in the middle, two at once; on copies of the real trees."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_mcore import __version__
from megacpp_mcore.errors import CheckoutError, PatchError
from megacpp_mcore.patches.machinery import drift, hook_line
from megacpp_mcore.patches.machinery import git as git_module
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.hook_line import Content
from megacpp_mcore.patches.machinery.registry import Registry, default
from megacpp_mcore.patches.machinery.symbols import Refusal
from tests.errors import raises
from tests.trees import HOOKED, commit, copy_modules, edit, git, link_copy, patch_of, snapshot, wheel_root

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

NAME = "mtp-shared-block"
# Small files, so that checking them takes no time.
TARGETS = {
    "identity": "megatron.core.transformer.identity_op:IdentityOp.forward",
    "timers": "megatron.core.timers:Timers.log",
    "builder": "megatron.core.transformer.spec_utils:build_module",
}


def modules() -> set[str]:
    """Every module that a patch here, or one of the package, is about."""
    ours = {module for patch in default().patches for module in patch.modules}
    return ours | {target.partition(":")[0] for target in TARGETS.values()} | {"megatron.core.utils"}


@pytest.fixture(scope="session")
def wheel_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_modules(wheel_root(), tmp_path_factory.mktemp("wheel"), modules())


@pytest.fixture(scope="session")
def checkout_copy(tmp_path_factory: pytest.TempPathFactory, megatron_lm: Path) -> Path:
    return copy_modules(megatron_lm, tmp_path_factory.mktemp("checkout"), modules())


@pytest.fixture(params=["wheel", pytest.param("checkout", marks=pytest.mark.checkout)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of each real tree."""
    return link_copy(request.getfixturevalue(f"{request.param}_copy"), tmp_path / "lm")


@pytest.fixture
def tree(wheel_copy: Path, tmp_path: Path) -> Path:
    """A copy of one real tree, where which one does not matter."""
    return link_copy(wheel_copy, tmp_path / "lm")


@pytest.fixture
def lm(tree: Path) -> Checkout:
    """The same with a patch of each of :data:`TARGETS`."""
    return Checkout(tree, Registry([patch_of(tree, name, target) for name, target in TARGETS.items()]))


def refuses(root: Path, values: list[str], *changes: Callable[[], object], code: str = "") -> None:
    """Check that each of ``changes`` raises an error with this code and these values, and changes no file."""
    before = snapshot(root)
    for change in changes:
        with raises(PatchError, *values, code=code):
            change()
        assert snapshot(root) == before


IMPORT_PROBLEMS = Checkout._import_problems


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python is started at each change to see whether it finds this package."""
    monkeypatch.setattr(Checkout, "_import_problems", lambda self: [])


def test_apply_twice_is_once_and_revert_is_identity(root: Path) -> None:
    before, lm = snapshot(root), Checkout(root)
    assert lm.unfit() == []
    names = [patch.name for patch in default().patches]
    assert lm.apply(names).hooked == tuple(names)
    lm.revert()
    assert snapshot(root) == before
    (root / HOOKED).chmod(0o664)
    assert [row["state"] for row in lm.status([NAME])] == ["not applied"]
    outcome = lm.apply([NAME])
    assert (outcome.changed, outcome.unchanged, outcome.hooked, outcome.notices) == ((NAME,), (), (NAME,), ())
    once = snapshot(root)
    (line,) = once[HOOKED].removeprefix(before[HOOKED]).splitlines()
    assert line.startswith(b'__import__("megacpp_mcore.patches.hook"')
    assert hashlib.sha256(before[HOOKED]).hexdigest().encode() in line
    assert {name for name in once if once[name] != before.get(name)} == {HOOKED}
    assert git(root, "status", "--porcelain") == f" M {HOOKED}\n"
    again = lm.apply([NAME, NAME])
    assert (again.changed, again.unchanged) == ((), (NAME,))
    assert snapshot(root) == once
    assert [row["state"] for row in lm.status([NAME])] == ["applied"]
    assert lm.verify() == lm.verify([NAME]) == (NAME,)
    assert lm.revert().changed == (NAME,)
    assert snapshot(root) == before
    assert (root / HOOKED).stat().st_mode & 0o777 == 0o664
    assert git(root, "status", "--porcelain") == ""
    assert lm.revert().changed == lm.revert([NAME]).changed == ()
    with raises(PatchError, "__init__.py", code="no-hook-line"):
        lm.verify()


def test_apply_adds_and_revert_takes_away(lm: Checkout) -> None:
    before = snapshot(lm.root)
    for order in itertools.permutations(TARGETS):
        lm.apply([*TARGETS])
        for index, name in enumerate(order):
            assert lm.revert([name]).hooked == tuple(n for n in TARGETS if n not in order[: index + 1])
        assert snapshot(lm.root) == before
    lm.apply(["timers"])
    outcome = lm.apply(["identity", "timers"])
    assert (outcome.changed, outcome.unchanged, outcome.hooked) == (("identity",), ("timers",), ("timers", "identity"))
    assert lm.verify() == ("timers", "identity")
    assert lm.file.read_bytes().count(b"megacpp_mcore") == 1
    reverted = lm.revert(["timers", "builder"])
    assert (reverted.changed, reverted.unchanged, reverted.hooked) == (("timers",), ("builder",), ("identity",))


LINE = ("one", "two-three"), "1.2.3", "0" * 64
LINES = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\r", b"#", b"x = 1", b"'''", b"\\", b"\x0c", b"\xef\xbb\xbf"]) | st.binary()
).map(lambda pieces: b"".join([*pieces, b"\n"]))


@given(LINES, st.just(b"") | LINES, st.just(b"") | LINES)
def test_only_our_line_goes_also_from_a_file_that_was_edited(content: bytes, before: bytes, after: bytes) -> None:
    assert hook_line.take_apart(content) == Content(content)
    taken = Content(before + content + after, *LINE)
    line = Content(b"", *LINE).whole()
    older = line.replace(b")  #", b', seal="0123456789abcdef")  #')  # of 0.1.0
    for hook in (line, older):
        assert hook_line.take_apart(before + content + hook + after) == taken
    assert Content(content, *LINE).whole() == content + line


def test_a_file_that_a_line_cannot_follow_is_refused(lm: Checkout) -> None:
    edit(lm.file, b"x = 1")
    commit(lm.root)
    refuses(lm.root, [HOOKED], lambda: lm.apply(["timers"]), code="no-newline")


def test_an_unknown_fingerprint_names_the_patch_and_changes_nothing(root: Path) -> None:
    """Status shows what changed, where git knows of another version."""
    file = root / "megatron/training/models/gpt.py"
    content = file.read_bytes()
    assert content.count(b"def mtp_block_spec(\n") == 1
    edit(file, content.replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))
    lm = Checkout(root)
    values = [NAME, "megatron.training.models.gpt:mtp_block_spec", "SHA-256"]
    refuses(root, values, lambda: lm.apply([NAME], allow_dirty=True), lambda: lm.export([NAME]))

    def diff() -> Any:
        (row,) = json.loads(json.dumps(lm.status([NAME])))
        assert (row["state"], row["hooked"]) == ("target changed", False)
        (target,) = row["targets"]
        assert target["target"] == "megatron.training.models.gpt:mtp_block_spec"
        return target["diff"]

    assert diff().startswith("diff --git a/megatron/training/models/gpt.py b/megatron/training/models/gpt.py\n")
    assert "-def mtp_block_spec(\n+def mtp_block_spec(  # an edit\n" in diff()
    commit(root)
    assert diff() is None
    shutil.rmtree(root / ".git")
    assert diff() is None


def test_sources_decide_and_not_versions(tree: Path) -> None:
    utils, info = tree / "megatron/core/utils.py", tree / "megatron/core/package_info.py"
    gone = patch_of(tree, "gone", "megatron.core.utils:divide", "megatron.core.utils:ensure_divisibility")
    registry = Registry([patch_of(tree, "same", TARGETS["builder"]), gone])
    edit(utils, utils.read_bytes().replace(b"def divide(", b"def split("))
    edit(info, info.read_bytes().replace(b"MINOR = 19", b"MINOR = 20"))
    commit(tree)
    lm = Checkout(tree, registry)
    assert {row["name"]: row["state"] for row in lm.status()} == {"same": "not applied", "gone": "target not found"}
    refuses(tree, ["gone: megatron.core.utils:divide"], lambda: lm.apply(["same", "gone"]))
    assert [problem.partition(":")[0] for problem in lm.unfit()] == ["gone"]
    assert lm.apply(["same"]).changed == ("same",)
    edit(info, b"MAJOR = 0\nMINOR = int('20')\nPATCH = 1\n")
    with raises(Refusal, "package_info.py", "MAJOR, MINOR", code="target-changed"):
        Checkout(tree, registry)


def test_folders_that_cannot_be_patched(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "megatron").mkdir(parents=True)
    for folder, code, values in (
        (tmp_path / "nowhere", "no-folder", ["nowhere"]),
        (tmp_path / "other", "no-checkout", ["other", "megatron/core/__init__.py"]),
        (tree / "megatron" / "core", "no-checkout", [f"{tree}?"]),
    ):
        with raises(CheckoutError, *values, code=code):
            Checkout(folder)
    (tree / "megatron_core-0.19.2.dist-info").mkdir()
    refuses(tree, ["megatron_core-0.19.2.dist-info"], lambda: Checkout(tree).apply([NAME]))


@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (os, "replace"), (fcntl, "flock")])
def test_a_folder_that_cannot_be_written_to(lm: Checkout, module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, name, full)
    refuses(lm.root, [str(lm.root), "No space left on device"], lambda: lm.apply(["timers"]))


def test_dirty(lm: Checkout) -> None:
    """Below megatron/ it is refused, staged or not; changes elsewhere, untracked files and our own line do not count."""
    script, timers = lm.root / "pretrain_gpt.py", lm.root / "megatron/core/timers.py"
    script.write_text("x = 1\n")
    commit(lm.root)
    (lm.root / "untracked.py").write_text("x = 1\n")
    index = (lm.root / ".git/index").read_bytes()
    assert lm.apply(["identity"]).notices == ()
    lm.status()
    assert (lm.root / ".git/index").read_bytes() == index  # which plain `git diff` refreshes
    edit(script, b"x = 2\n")
    assert lm.apply(["timers"]).notices == ()
    edit(timers, timers.read_bytes() + b"\n# a note\n")
    for staged in (False, True):
        if staged:
            git(lm.root, "add", str(timers))
        refuses(lm.root, ["megatron/core/timers.py", "--allow-dirty"], lambda: lm.apply(["builder"]), code="dirty")
    outcome = lm.apply(["builder"], allow_dirty=True)
    assert outcome.notices == ("patched as it is, with modified files: megatron/core/timers.py",)
    lm.revert()
    assert set(git(lm.root, "diff", "HEAD", "--name-only").split()) == {"megatron/core/timers.py", "pretrain_gpt.py"}


@pytest.mark.parametrize("traps", ["filter textconv fsmonitor hooks", "process external command", "promisor"])
def test_no_command_of_a_checkouts_own_configuration_runs(
    traps: str, lm: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkout from a stranger; the same commands by git alone spring each trap."""
    # What `compat` looks for in the checkout: little, as it is not what is tried here.
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from megatron.core import timers\n")
    monkeypatch.setattr(drift.megacpp_mcore, "__file__", str(tmp_path / "package/__init__.py"))
    timers, sprung = lm.root / "megatron/core/timers.py", tmp_path / "sprung"
    sprung.mkdir()
    ways = {
        "filter": {"filter.x.clean": "{}; cat", "filter.x.smudge": "{}; cat", "filter.x.required": "false"},
        "process": {"filter.x.process": "{}; cat"},
        "textconv": {"diff.x.textconv": "{}; cat <"},
        "external": {"diff.external": "{}; true"},
        "command": {"diff.x.command": "{}; true"},
        "fsmonitor": {"core.fsmonitor": "{}; false", "core.fsmonitorHookVersion": "2"},
        "hooks": {"core.hooksPath": str(tmp_path / "hooks")},
        "promisor": {
            "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
            "remote.origin.url": f"ext::sh -c touch% {sprung}/promisor", "protocol.ext.allow": "always",
        },
    }  # fmt: skip
    for trap in traps.split():
        for name, value in ways[trap].items():
            git(lm.root, "config", name, value.replace("{}", f"touch {sprung}/{trap}"))
    (lm.root / ".git/info").mkdir(exist_ok=True)
    (lm.root / ".git/info/attributes").write_text("* filter=x\n*.py diff=x\n__init__.py !diff\n")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/post-index-change").write_text(f"#!/bin/sh\ntouch {sprung}/hooks\n")
    (tmp_path / "hooks/post-index-change").chmod(0o755)
    os.utime(lm.file)
    os.utime(timers)
    source = timers.read_bytes().replace(b"def log(", b"def log(  # an edit\n")
    lm.status()
    for change in (lambda: lm.apply(["identity"]), lm.verify, lm.export, lambda: lm.apply(["builder"]), lm.revert):
        change()
    edit(timers, source)
    if traps == "promisor":
        blob = git(lm.root, "rev-parse", "HEAD:megatron/core/timers.py").strip()
        (lm.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (row,) = [row for row in Checkout(lm.root, lm.registry).status() if row["name"] == "timers"]
    (target,) = row["targets"]
    assert row["state"] == "target changed"
    assert (target["diff"] is None) == (traps == "promisor")
    refuses(lm.root, ["megatron/core/timers.py"], lambda: lm.apply(["identity"]), code="dirty")
    lm.apply(["identity"], allow_dirty=True)
    with contextlib.suppress(CheckoutError):  # as a partial clone lacks a file
        drift.examine(lm, "HEAD")
    assert list(sprung.iterdir()) == []
    for command in ("diff", "status"):
        with contextlib.suppress(subprocess.CalledProcessError):
            git(lm.root, command, *(["HEAD"] if command == "diff" else []))
    assert {path.name for path in sprung.iterdir()} == set(traps.split()), "a trap is none"


@pytest.mark.parametrize("change", ["line ends", "sparse", "link", "removed", "mode"])
def test_what_counts_as_modified(change: str, lm: Checkout) -> None:
    timers = lm.root / "megatron/core/timers.py"
    if change == "line ends":
        edit(timers, timers.read_bytes().replace(b"\n", b"\r\n"))
    elif change == "link":
        timers.rename(timers.with_name("elsewhere.py"))
        timers.symlink_to("elsewhere.py")
    elif change in ("sparse", "removed"):
        if change == "sparse":
            git(lm.root, "update-index", "--skip-worktree", "megatron/core/timers.py")
        timers.unlink()
    else:
        edit(timers, timers.read_bytes())  # of other trees, too, its mode would be
        timers.chmod(0o755)
    modified = git_module.modified(lm.root, HOOKED)
    assert modified == (["megatron/core/timers.py"] if change in ("link", "removed") else [])


@pytest.mark.parametrize("by_git", [True, False])
def test_the_hooked_file_edited(lm: Checkout, by_git: bool) -> None:
    """What git does not know the line does: the file's SHA-256 before it."""
    plain = lm.file.read_bytes()
    if not by_git:
        shutil.rmtree(lm.root / ".git")
    lm.apply(["identity", "timers"])
    edited = b"x = 1\n" + lm.file.read_bytes() + b"y = 2\n"
    edit(lm.file, edited)
    refuses(lm.root, [f"{HOOKED} was edited", "SHA-256"], lm.verify)
    refuses(lm.root, [HOOKED], lambda: lm.apply(["builder"]), code="dirty")
    assert lm.apply(["builder"], allow_dirty=True).hooked == ("identity", "timers", "builder")
    lm.revert(["builder"])
    edit(lm.file, edited)
    for names in (["timers"], None):
        (notice,) = lm.revert(names).notices
        assert "otherwise edited" in notice
    assert lm.file.read_bytes() == b"x = 1\n" + plain + b"y = 2\n"


def test_git_that_is_missing_or_around_the_checkout(lm: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = lm.root / "megatron/core/timers.py"
    shutil.rmtree(lm.root / ".git")
    git(lm.root.parent, "init", "-q")
    commit(lm.root.parent)
    assert lm.apply(["timers"]).notices == ()
    edit(timers, timers.read_bytes() + b"x = 1\n")
    refuses(lm.root, ["megatron/core/timers.py"], lambda: lm.apply(["identity"]), code="dirty")
    monkeypatch.setenv("PATH", "")
    (notice,) = lm.apply(["identity"]).notices
    assert "whether files were modified could not be checked: git cannot be run" in notice


@pytest.mark.parametrize(
    "fields",
    [{"version": "0.0.9"}, {"names": ("timers", "unheard-of")}],
    ids=["version", "names"],
)
def test_hooked_by_another_copy(lm: Checkout, fields: dict[str, Any]) -> None:
    before = snapshot(lm.root)
    lm.apply(["timers", "identity"])
    edit(lm.file, dataclasses.replace(lm.content(), **fields).whole())
    values = [HOOKED, f"megacpp-mcore {fields.get('version', __version__)}", "patch revert --checkout"]
    apply, revert = (lambda: lm.apply(["builder"])), (lambda: lm.revert(["timers"]))
    refuses(lm.root, values, apply, revert, lambda: lm.apply(["timers"]), lm.verify)
    names = {row["name"] for row in lm.status() if row["state"] == "hooked by another copy"}
    assert names == set(fields.get("names", ("timers", "identity")))
    lm.revert()
    assert snapshot(lm.root) == before


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda line: line[:-30],
    "a digit": lambda line: line.replace(b"SHA-256 without it ", b"SHA-256 without it g"),
    "indented": lambda line: b"    " + line,
    "commented out": lambda line: b"# " + line,
    "twice": lambda line: line + b"\n" + line,
    "no comment": lambda line: line.partition(b"  #")[0],
    "no call": lambda line: line.partition(b"  #")[2],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line(lm: Checkout, damage: Callable[[bytes], bytes]) -> None:
    lm.apply(["timers"])
    content = lm.file.read_bytes()
    lines = content.splitlines()
    edit(lm.file, content.replace(lines[-1], damage(lines[-1])))
    values = [HOOKED, f"line {len(lines)}", "git checkout --"]
    apply, export = (lambda: lm.apply(["identity"])), (lambda: lm.export(["timers"]))
    refuses(lm.root, values, apply, export, lm.revert, lm.verify, lm.status)


def test_names(lm: Checkout) -> None:
    """As in a process (test_registry.py)."""
    refuses(lm.root, ["'timer'", "'timers'"], lambda: lm.apply(["timer"]), code="unknown")
    refuses(lm.root, ["identity, timers, builder"], lambda: lm.apply([]), code="unnamed")
    refuses(lm.root, [], lm.export, code="nothing-to-export")
    lm.apply(["timers"])
    refuses(lm.root, ["builder"], lambda: lm.verify(["builder"]))


def test_whether_the_package_can_be_imported_is_told(lm: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkout, "_import_problems", IMPORT_PROBLEMS)
    other = lm.root / "megacpp_mcore.py"  # a module of that name, first on the path
    other.write_text("__version__ = '9'\n")
    values = [str(lm.root), "megacpp_mcore (ModuleNotFoundError"]
    (notice,) = lm.apply(["identity"]).notices
    assert all(value in notice for value in values)
    with raises(PatchError, *values):
        lm.verify()
    other.unlink()
    assert lm.verify() == ("identity",)


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process, which leaves without cleaning up; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "when"), [("fsync", "before"), ("replace", "before"), ("replace", "after")])
def test_death_in_the_middle_leaves_either_state(lm: Checkout, step: str, when: str) -> None:
    old = lm.file.read_bytes()
    lm.apply(["timers"])
    new, carried_out = lm.file.read_bytes(), getattr(os, step)

    def dying(*args: Any) -> None:
        if when == "after":
            carried_out(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def leftovers() -> list[Path]:
        return [path for path in lm.file.parent.iterdir() if "megacpp" in path.name]

    for change, before, after in ((lm.revert, new, old), (lambda: lm.apply(["timers"]), old, new)):
        with pytest.MonkeyPatch.context() as context:
            context.setattr(os, step, dying)
            _, status = os.waitpid(in_child(change), 0)
        assert os.WIFSIGNALED(status), "the step was never reached"
        assert lm.file.read_bytes() == (after if when == "after" else before)
        assert len(leftovers()) == (0 if when == "after" else 1)
        assert git(lm.root, "status", "--porcelain") in ("", f" M {HOOKED}\n")
        change()
        assert lm.file.read_bytes() == after
        assert leftovers() == []


def test_processes_apply_at_once(lm: Checkout) -> None:
    """Each adds its own patch to the line; without the lock one would write over what another has just written."""
    for _ in range(3):
        barrier = multiprocessing.get_context("fork").Barrier(len(TARGETS))

        def work(name: str, barrier: Any = barrier) -> None:
            barrier.wait(30)
            lm.apply([name])

        children = [in_child(lambda name=name: work(name)) for name in TARGETS]  # type: ignore[misc]
        for child in children:
            os.waitpid(child, 0)
        assert set(lm.verify()) == set(TARGETS)
        lm.revert()


def test_who_waited_for_a_file_that_git_replaced_waits_for_the_new_one(lm: Checkout) -> None:
    info = lm.root / "megatron" / "core" / "package_info.py"
    fresh = info.with_suffix(".new")
    fresh.write_bytes(info.read_bytes())
    begins = multiprocessing.get_context("fork").Event()
    child = in_child(lambda: begins.wait(30) and lm.apply(["timers"]))  # before the locks, which it would share
    with fresh.open("r+b") as later:
        fcntl.flock(later, fcntl.LOCK_EX)
        with lm._locked():
            begins.set()
            time.sleep(0.3)
            fresh.replace(info)
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert lm.content().names == ()
    os.waitpid(child, 0)
    assert lm.content().names == ("timers",)
