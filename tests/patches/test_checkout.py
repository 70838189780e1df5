"""A hooked checkout: bytes in and out, every refusal, deaths in the middle, two at once; on copies of the real trees."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore.errors import CheckoutError, PatchError
from megacpp_mcore.patches.machinery import git as git_module
from megacpp_mcore.patches.machinery import hook_line
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.hook_line import HookLine
from megacpp_mcore.patches.machinery.registry import Registry, default
from tests.trees import HOOKED, commit, copy_modules, edit, git, link_copy, patch_of, snapshot, wheel_root

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


def three(root: Path) -> Registry:
    return Registry([patch_of(root, name, target) for name, target in TARGETS.items()])


def clean(root: Path) -> bool:
    return git(root, "status", "--porcelain") == ""


IMPORT_PROBLEMS = Checkout._import_problems


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python is started at each change to see whether it finds this package."""
    monkeypatch.setattr(Checkout, "_import_problems", lambda self: [])


# --- in and out --------------------------------------------------------------------------------------------------------


def test_apply_twice_is_once_and_revert_is_identity(root: Path) -> None:
    before = snapshot(root)
    assert Checkout(root).unfit() == []
    names = [patch.name for patch in default().patches]
    assert Checkout(root).apply(names).hooked == tuple(names)
    Checkout(root).revert()
    assert snapshot(root) == before
    (root / HOOKED).chmod(0o664)
    lm = Checkout(root)
    assert [row["state"] for row in lm.status([NAME])] == ["not applied"]
    outcome = lm.apply([NAME])
    assert (outcome.changed, outcome.unchanged, outcome.hooked, outcome.notices) == ((NAME,), (), (NAME,), ())
    once = snapshot(root)
    (line,) = once[HOOKED].removeprefix(before[HOOKED]).splitlines()
    assert line.startswith(b'__import__("megacpp_mcore.patches.hook"')
    assert hashlib.sha256(before[HOOKED]).hexdigest().encode() in line
    assert {name for name in once if once[name] != before.get(name)} == {HOOKED}
    assert (root / HOOKED).stat().st_mode & 0o777 == 0o664
    assert git(root, "status", "--porcelain") == f" M {HOOKED}\n"
    again = lm.apply([NAME, NAME])
    assert (again.changed, again.unchanged) == ((), (NAME,))
    assert snapshot(root) == once
    assert [row["state"] for row in lm.status([NAME])] == ["applied"]
    assert lm.verify() == lm.verify([NAME]) == (NAME,)
    assert lm.revert().changed == (NAME,)
    assert snapshot(root) == before
    assert (root / HOOKED).stat().st_mode & 0o777 == 0o664
    assert clean(root)
    assert lm.revert().changed == lm.revert([NAME]).changed == ()
    with pytest.raises(PatchError, match=r"__init__.py has no hook line: no patch is applied"):
        lm.verify()


def test_apply_adds_and_revert_takes_away(tree: Path) -> None:
    lm, before = Checkout(tree, three(tree)), snapshot(tree)
    for order in itertools.permutations(TARGETS):
        lm.apply([*TARGETS])
        for index, name in enumerate(order):
            assert lm.revert([name]).hooked == tuple(n for n in TARGETS if n not in order[: index + 1])
        assert snapshot(tree) == before
    lm.apply(["timers"])
    outcome = lm.apply(["identity", "timers"])
    assert (outcome.changed, outcome.unchanged, outcome.hooked) == (("identity",), ("timers",), ("timers", "identity"))
    assert lm.verify() == ("timers", "identity")
    assert (tree / HOOKED).read_bytes().count(b"megacpp_mcore") == 1
    reverted = lm.revert(["timers", "builder"])
    assert (reverted.changed, reverted.unchanged, reverted.hooked) == (("timers",), ("builder",), ("identity",))
    assert lm.verify() == ("identity",)


LINE = HookLine(("one", "two-three"), "1.2.3", "0123456789abcdef", "0" * 64)
PIECES = st.lists(
    st.one_of(
        st.sampled_from([b"\n", b"\r\n", b"\r", b"", b"#", b"x = 1", b"'''", b"\\", b"\x0c", b"\xef\xbb\xbf"]),
        st.binary(),
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(PIECES)
def test_taking_apart_undoes_adding(content: bytes) -> None:
    hooked = hook_line.add(content, LINE)
    assert hooked != content
    taken = hook_line.take_apart(hooked)
    assert (taken.without, taken.hook, taken.last) == (content, LINE, True)
    assert hook_line.take_apart(content).hook is None


@settings(max_examples=100, deadline=None)
@given(PIECES, st.sampled_from([b"y = 2\n", b"\n", b"y\r\n"]), st.sampled_from([b"a = 0\n", b""]))
def test_only_our_line_goes_from_a_file_that_was_edited(content: bytes, after: bytes, before: bytes) -> None:
    content += b"\n"
    taken = hook_line.take_apart(before + hook_line.add(content, LINE) + after)
    assert (taken.without, taken.hook, taken.last) == (before + content + after, LINE, False)


CONTENTS = {
    "newline": b"x = 1\ny = 2\n",
    "none": b"x = 1\ny = 2",
    "crlf": b"x = 1\r\ny = 2\r\n",
    "crlf, none": b"x = 1\r\ny = 2",
    "cr": b"x = 1\ry = 2\r",
    "empty": b"",
    "one line": b"x = 1",
    "comment": b"x = 1\n# the end",
    "long": b"".join(b"x = %d\n" % i for i in range(20)),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_export_is_what_apply_does(tree: Path, tmp_path: Path, content: bytes) -> None:
    edit(tree / HOOKED, content)
    commit(tree)
    lm = Checkout(tree, three(tree))
    exported = lm.export(["timers", "identity"])
    assert (tree / HOOKED).read_bytes() == content
    lm.apply(["timers", "identity"])
    applied = (tree / HOOKED).read_bytes()
    assert applied != content
    assert lm.export() == exported
    lm.revert()
    assert (tree / HOOKED).read_bytes() == content
    git(tree, "apply", "--whitespace=nowarn", "-", given=exported)
    assert (tree / HOOKED).read_bytes() == applied
    assert lm.verify() == ("timers", "identity")
    git(tree, "apply", "-R", "--whitespace=nowarn", "-", given=exported)
    assert (tree / HOOKED).read_bytes() == content
    assert clean(tree)
    with pytest.raises(PatchError, match="nothing to export"):
        lm.export()


@pytest.mark.parametrize("content", [b"x = (1,\n", b"x = '''\n", b"x = \\\n", b"x = 1\n\\", b"x = 1\x00\n"])
def test_a_file_that_a_line_cannot_follow_is_refused(tree: Path, content: bytes) -> None:
    edit(tree / HOOKED, content)
    commit(tree)
    with pytest.raises(PatchError, match=r"__init__.py is not Python that a line can be added to"):
        Checkout(tree, three(tree)).apply(["timers"])
    assert (tree / HOOKED).read_bytes() == content


# --- refusals ----------------------------------------------------------------------------------------------------------


def changed_target(root: Path) -> None:
    file = root / "megatron/training/models/gpt.py"
    content = file.read_bytes()
    assert content.count(b"def mtp_block_spec(\n") == 1
    edit(file, content.replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))


def test_an_unknown_fingerprint_names_the_patch_and_changes_nothing(root: Path) -> None:
    lm = Checkout(root)
    changed_target(root)
    before = snapshot(root)
    with pytest.raises(
        PatchError, match=rf"{NAME}: the source of megatron.training.models.gpt:mtp_block_spec .* SHA-256"
    ):
        lm.apply([NAME], allow_dirty=True)
    with pytest.raises(PatchError, match=NAME):
        lm.export([NAME])
    assert snapshot(root) == before


def test_status_shows_what_changed(root: Path) -> None:
    changed_target(root)

    def found() -> dict[str, Any]:
        (row,) = json.loads(json.dumps(Checkout(root).status([NAME])))
        assert (row["state"], row["hooked"]) == ("target changed", False)
        (target,) = row["targets"]
        assert target["target"] == "megatron.training.models.gpt:mtp_block_spec"
        return target

    diff = found()["diff"]
    assert "-def mtp_block_spec(\n+def mtp_block_spec(  # an edit\n" in diff
    assert diff.startswith("diff --git a/megatron/training/models/gpt.py b/megatron/training/models/gpt.py\n")
    commit(root)
    nothing = found()
    assert (nothing["diff"], "the last commit" in nothing["no_diff"]) == (None, True)
    shutil.rmtree(root / ".git")
    nothing = found()
    assert (nothing["diff"], "git" in nothing["no_diff"]) == (None, True)


def with_version(root: Path, minor: str) -> None:
    file = root / "megatron/core/package_info.py"
    edit(file, file.read_bytes().replace(b"MINOR = 19", f"MINOR = {minor}".encode()))


def test_versions(tree: Path) -> None:
    registry = Registry(
        [
            patch_of(tree, "old", TARGETS["timers"], megatron_versions=">=0.19,<0.20"),
            patch_of(tree, "done", TARGETS["identity"], superseded_in=">=0.20"),
            patch_of(tree, "wide", TARGETS["builder"], megatron_versions=">=0.19"),
            patch_of(tree, "gone", "megatron.core.utils:divide", megatron_versions=">=0.19"),
        ]
    )
    utils = tree / "megatron/core/utils.py"
    edit(utils, utils.read_bytes().replace(b"def divide(", b"def split("))
    with_version(tree, "20")
    commit(tree)
    lm = Checkout(tree, registry)
    states = {row["name"]: row["state"] for row in lm.status()}
    assert states == {
        "old": "version not supported", "done": "superseded upstream", "wide": "not applied", "gone": "target not found"
    }  # fmt: skip
    before = snapshot(tree)
    with pytest.raises(PatchError) as caught:
        lm.apply(["old", "done", "wide", "gone"])
    for words in (
        "3 problems",
        "old: it is for megatron-core >=0.19,<0.20, and 0.20.",
        "done: megatron-core 0.20.",
        "(superseded in >=0.20); leave the patch out",
        "gone: megatron.core.utils:divide was not found: megatron.core.utils defines no divide",
    ):
        assert words in str(caught.value)
    assert snapshot(tree) == before
    assert [problem.partition(":")[0] for problem in lm.unfit()] == ["old", "gone"]
    with_version(tree, "int('20')")
    edit(tree / "megatron/core/package_info.py", b"MAJOR = 0\nMINOR = int('20')\nPATCH = 1\n")
    with pytest.raises(PatchError, match=r"package_info.py does not say which version this is .* MAJOR, MINOR"):
        Checkout(tree, registry)


def test_folders_that_cannot_be_patched(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "megatron").mkdir(parents=True)
    for folder, words in (
        (tmp_path / "nowhere", "nowhere is not a folder"),
        (tmp_path / "other", "other is not a Megatron-LM checkout: there is no megatron/core/__init__.py"),
        (tree / "megatron" / "core", rf"did you mean {tree}\?"),
    ):
        with pytest.raises(CheckoutError, match=words):
            Checkout(folder)
    before = snapshot(tree)
    (tree / "megatron_core-0.19.2.dist-info").mkdir()
    with pytest.raises(PatchError, match=r"megatron_core-0\.19\.2\.dist-info"):
        Checkout(tree).apply([NAME])
    assert snapshot(tree) == before


def test_a_folder_that_cannot_be_written_to_is_left_as_it_is(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    lm, before = Checkout(tree, three(tree)), snapshot(tree)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as context:
            context.setattr(os, name, full)
            with pytest.raises(PatchError, match=rf"{tree} cannot be written to .*No space left on device"):
                lm.apply(["timers"])
        assert snapshot(tree) == before
    lm.apply(["timers"])
    hooked = snapshot(tree)
    monkeypatch.setattr(git_module, "lock_file", full)
    with pytest.raises(PatchError, match="No space left on device"):
        lm.revert()
    assert snapshot(tree) == hooked


def test_dirty(tree: Path) -> None:
    """Below megatron/ it is refused, staged or not; elsewhere it is told; untracked files and our own line do not count."""
    (tree / "pretrain_gpt.py").write_text("x = 1\n")
    commit(tree)
    lm = Checkout(tree, three(tree))
    (tree / "untracked.py").write_text("x = 1\n")
    index = (tree / ".git/index").read_bytes()
    assert lm.apply(["identity"]).notices == ()
    lm.status()
    assert (tree / ".git/index").read_bytes() == index  # which plain `git diff` refreshes
    edit(tree / "pretrain_gpt.py", b"x = 2\n")
    elsewhere = "modified outside of megatron/, where no patch acts: pretrain_gpt.py"
    assert lm.apply(["timers"]).notices == (elsewhere,)
    timers = tree / "megatron/core/timers.py"
    edit(timers, timers.read_bytes() + b"\n# a note\n")
    before = snapshot(tree)
    for staged in (False, True):
        if staged:
            git(tree, "add", str(timers))
        with pytest.raises(PatchError, match=r"is dirty: megatron/core/timers.py differ .*--allow-dirty"):
            lm.apply(["builder"])
        assert snapshot(tree) == before
    outcome = lm.apply(["builder"], allow_dirty=True)
    assert outcome.notices == (elsewhere, "patched as it is, with modified files: megatron/core/timers.py")
    lm.revert()
    assert set(git(tree, "diff", "HEAD", "--name-only").split()) == {"megatron/core/timers.py", "pretrain_gpt.py"}


@pytest.mark.parametrize("where", ["after", "before", "moved"])
def test_the_hooked_file_edited(tree: Path, where: str) -> None:
    lm, plain = Checkout(tree, three(tree)), (tree / HOOKED).read_bytes()
    lm.apply(["identity", "timers"])
    content = (tree / HOOKED).read_bytes()
    *head, line = content.splitlines(keepends=True)
    edited = {
        "after": content + b"x = 1\n",
        "before": b"x = 1\n" + content,
        "moved": b"".join([head[0], line, *head[1:]]),
    }
    rest = {"after": plain + b"x = 1\n", "before": b"x = 1\n" + plain, "moved": plain}
    edit(tree / HOOKED, edited[where])
    says = "not the last one any more" if where == "moved" else "was edited since it was hooked"
    with pytest.raises(PatchError, match=says):
        lm.verify()
    if where != "moved":
        with pytest.raises(PatchError, match=rf"is dirty: {HOOKED}"):
            lm.apply(["builder"])
        assert lm.apply(["builder"], allow_dirty=True).hooked == ("identity", "timers", "builder")
        lm.revert(["builder"])
        edit(tree / HOOKED, edited[where])
    for names in (["timers"], None):
        assert ["otherwise edited" in notice for notice in lm.revert(names).notices] == [True] * (where != "moved")
    assert (tree / HOOKED).read_bytes() == rest[where]


def test_git_that_is_missing_silent_or_around_the_checkout(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = Checkout(tree, three(tree))
    with monkeypatch.context() as context:  # as git answers about another user's folder
        refusal = mock.Mock(side_effect=git_module.GitUnavailable("fatal: detected dubious ownership in repository"))
        context.setattr(git_module, "modified", refusal)
        with pytest.raises(PatchError, match=r"dubious ownership.*--allow-dirty"):
            lm.apply(["timers"])
        (notice,) = lm.apply(["timers"], allow_dirty=True).notices
        assert "dubious ownership" in notice
        lm.revert()
    shutil.rmtree(tree / ".git")
    git(tree.parent, "init", "-q")
    commit(tree.parent)
    assert lm.apply(["timers"]).notices == ()
    edit(tree / "megatron/core/timers.py", (tree / "megatron/core/timers.py").read_bytes() + b"x = 1\n")
    with pytest.raises(PatchError, match=r"is dirty: megatron/core/timers.py"):
        lm.apply(["identity"])
    monkeypatch.setenv("PATH", "")
    (notice,) = lm.apply(["identity"]).notices
    assert "git cannot be run" in notice
    edit(tree / HOOKED, (tree / HOOKED).read_bytes() + b"x = 1\n")
    with pytest.raises(PatchError, match=rf"is dirty: {HOOKED}"):
        lm.apply(["builder"])


def rewritten(tree: Path, **fields: Any) -> None:
    content = hook_line.take_apart((tree / HOOKED).read_bytes())
    assert content.hook is not None
    line = HookLine(**{**vars(content.hook), **fields})
    edit(tree / HOOKED, hook_line.add(content.without, line))


@pytest.mark.parametrize(
    "fields",
    [{"version": "0.0.9"}, {"seal": "0" * 16}, {"names": ("timers", "unheard-of")}],
    ids=["version", "seal", "names"],
)
def test_hooked_by_another_copy(tree: Path, fields: dict[str, Any]) -> None:
    lm, before = Checkout(tree, three(tree)), snapshot(tree)
    lm.apply(["timers", "identity"])
    rewritten(tree, **fields)
    hooked = snapshot(tree)
    for change in (
        lambda: lm.apply(["builder"]),
        lambda: lm.apply(["timers"]),
        lambda: lm.revert(["timers"]),
        lm.verify,
    ):
        with pytest.raises(
            PatchError, match=r"already hooked by another copy, megacpp-mcore .* patch revert --checkout"
        ):
            change()
    assert snapshot(tree) == hooked
    states = {row["name"]: row["state"] for row in lm.status()}
    named = fields.get("names", ("timers", "identity"))
    assert {name for name, state in states.items() if state == "hooked by another copy"} == set(named)
    lm.revert()
    assert snapshot(tree) == before


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
def test_a_damaged_line(tree: Path, damage: Callable[[bytes], bytes]) -> None:
    lm = Checkout(tree, three(tree))
    lm.apply(["timers"])
    content = (tree / HOOKED).read_bytes()
    line = content.splitlines()[-1]
    edit(tree / HOOKED, content.replace(line, damage(line)))
    damaged = snapshot(tree)
    number = len(content.splitlines())
    for change in (lambda: lm.apply(["identity"]), lm.revert, lm.verify, lm.status, lambda: lm.export(["timers"])):
        with pytest.raises(
            PatchError, match=rf"__init__.py: the hook line .* is damaged \(line {number}.*git checkout --"
        ):
            change()
    assert snapshot(tree) == damaged


def test_names_conflicts_and_requirements(tree: Path) -> None:
    """As in a process (test_registry.py); and a patch that another one on the line requires is not taken out."""
    not_timers = patch_of(tree, "not-timers", TARGETS["identity"], conflicts=("timers",))
    on_timers = patch_of(tree, "on-timers", TARGETS["builder"], requires=("timers",))
    lm = Checkout(tree, Registry([patch_of(tree, "timers", TARGETS["timers"]), not_timers, on_timers]))
    before = snapshot(tree)
    for names, words in (
        (["timer"], "there is no patch 'timer'; did you mean 'timers'"),
        ([], "no patch was named; there are: timers, not-timers"),
        (["timers", "not-timers"], "not-timers conflicts with timers: choose one of them"),
        (["on-timers"], "on-timers requires timers: name it as well"),
    ):
        with pytest.raises(PatchError, match=words):
            lm.apply(names)
    assert snapshot(tree) == before
    lm.apply(["timers", "on-timers"])
    hooked = snapshot(tree)
    with pytest.raises(PatchError, match="on-timers requires timers"):
        lm.revert(["timers"])
    with pytest.raises(PatchError, match="not-timers is not applied"):
        lm.verify(["not-timers"])
    assert snapshot(tree) == hooked


def test_whether_the_package_can_be_imported_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkout, "_import_problems", IMPORT_PROBLEMS)
    lm = Checkout(tree, three(tree))
    (tree / "megacpp_mcore.py").write_text("__version__ = '9'\n")  # a module of that name, first on the path
    says = rf"a Python started in {tree} cannot import megacpp_mcore \(ModuleNotFoundError"
    (notice,) = lm.apply(["identity"]).notices
    assert re.search(says, notice)
    with pytest.raises(PatchError, match=says):
        lm.verify()
    (tree / "megacpp_mcore.py").unlink()
    assert lm.verify() == ("identity",)


# --- deaths and company ------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process, which leaves without cleaning up; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


STEPS = ["fchmod", "fsync", "utime", "replace"]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_death_at_every_step_leaves_either_state(tree: Path, step: str, when: str) -> None:
    lm = Checkout(tree, three(tree))
    old = (tree / HOOKED).read_bytes()
    lm.apply(["timers"])
    new = (tree / HOOKED).read_bytes()
    stock = getattr(os, step)
    future = time.time() + 1000  # so that every time has to be set by hand, which is one of the steps
    os.utime(tree / HOOKED, (future, future))

    def dying(*args: Any, **options: Any) -> Any:
        if when == "after":
            stock(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    for change, before, after in ((lm.revert, new, old), (lambda: lm.apply(["timers"]), old, new)):

        def die(change: Callable[[], Any] = change) -> None:
            setattr(os, step, dying)
            change()

        _, status = os.waitpid(in_child(die), 0)
        assert os.WIFSIGNALED(status), "the step was never reached"
        assert (tree / HOOKED).read_bytes() == (after if (step, when) == ("replace", "after") else before)
        assert (len(leftovers(tree)) == 1) == ((step, when) != ("replace", "after"))
        assert git(tree, "status", "--porcelain") in ("", f" M {HOOKED}\n")
        change()
        assert (tree / HOOKED).read_bytes() == after
        assert leftovers(tree) == []


def leftovers(tree: Path) -> list[Path]:
    return [path for path in (tree / "megatron/core").iterdir() if "megacpp" in path.name]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_processes_apply_at_once(tree: Path) -> None:
    """Each adds its own patch to the line; without the lock one would write over what another has just written."""
    names = [*TARGETS]
    lm = Checkout(tree, three(tree))
    for _ in range(3):
        barrier = multiprocessing.get_context("fork").Barrier(len(names))

        def work(name: str, barrier: Any = barrier) -> None:
            Checkout(tree, lm.registry)
            barrier.wait(30)
            lm.apply([name])

        children = [in_child(lambda name=name: work(name)) for name in names]  # type: ignore[misc]
        for child in children:
            os.waitpid(child, 0)
        assert set(lm.verify()) == set(names)
        lm.revert()
