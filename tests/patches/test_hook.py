"""The hook: patches applied as modules are imported; on throw-away modules, and in hooked copies of real trees."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megacpp_mcore
from megacpp_mcore.errors import CheckoutError, PatchError
from megacpp_mcore.patches.machinery import registry as machinery
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.record import Patch
from megacpp_mcore.patches.machinery.registry import Registry, default, fingerprint
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import Refusal
from tests import forks
from tests.errors import raises
from tests.patches.throwaway import ONE, USER, VERSION, Modules, adding, patch, registry, states
from tests.trees import HOOKED, commit, copy_modules, copy_sources, git, wheel_root

ROOT = Path(__file__).parents[2]
NAME = "mtp-shared-block"
FILE = "/somewhere/megatron/core/__init__.py"
CHANGED = ONE.replace("x + 1", "x + 2")


def hook_of(*patches: Patch) -> tuple[Registry, Callable[..., None]]:
    reg = registry(*patches)

    def install(*names: str, **fields: Any) -> None:
        reg.install(FILE, names, **{"version": megacpp_mcore.__version__, **fields})

    return reg, install


def load(*names: str) -> list[int]:
    """Import modules and call ``f(1)`` of each: 2 is stock's, 102 a patch's."""
    return [importlib.import_module(name).f(1) for name in names]


def test_each_edit_is_applied_when_its_module_has_run(modules: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, user, other = modules(a=ONE, b=ONE, user=USER, other="x = 1\n")
    reg, install = hook_of(patch("both", f"{a}:f", f"{b}:f"))
    install("both")
    assert a not in sys.modules
    (row,) = json.loads(json.dumps(reg.status()))
    assert (row["state"], row["waits_for"], row["hook"], row["fingerprints"]) == ("armed", [a, b], FILE, {})
    importlib.import_module(other)
    assert importlib.import_module(user).use(1) == 102
    (row,) = reg.status()
    assert (row["state"], row["waits_for"], list(row["fingerprints"])) == ("applied", [b], [f"{a}:f"])
    install("both")  # twice is once
    assert load(a, b) == [102, 102]
    (row,) = reg.status()
    assert (row["state"], row["waits_for"], row["hook"]) == ("applied", [], FILE)
    assert row["fingerprints"] == {target: fingerprint(target) for target in (f"{a}:f", f"{b}:f")}
    assert sys.modules[user].f is sys.modules[a].f
    reg.verify()
    lines = [line for line in capsys.readouterr().err.splitlines() if "patch both" in line]
    by = f"(megatron-core {VERSION}) by the hook in {FILE}"
    assert lines == [f"megacpp-mcore: patch both applied to {name}:f {by}" for name in (a, b)]
    assert reg.revert() == ("both",)
    assert (load(a, b), sys.modules[user].use(1)) == ([2, 2], 2)


def test_who_imports_by_name_while_the_import_goes_on_gets_the_replacement(modules: Modules) -> None:
    """Modules a and b import each other: b takes f from an a that is not finished."""
    a, b = modules(
        a=ONE + "from PKG.b import g\n", b="from PKG.a import f\n\ndef g(x):\n    return f(x) * 2\n"
    )  # fmt: skip
    reg, install = hook_of(patch("f", f"{a}:f"), patch("g", f"{b}:g", make=adding(1000)))
    install("f", "g")
    importlib.import_module(a)
    assert states(reg) == {"f": "applied", "g": "applied"}
    assert sys.modules[b].f is sys.modules[a].f
    assert sys.modules[a].g is sys.modules[b].g
    assert sys.modules[a].g(1) == 102 * 2 + 1000
    reg.verify()
    reg.revert()
    assert sys.modules[a].g(1) == 4


def test_a_thread_that_patches_waits_for_no_other_threads_import(modules: Modules) -> None:
    """Which may wait for it: with its module's lock held, to patch that module."""
    meet, a, b = modules(meet="", a=ONE + "import sys\nsys.modules['PKG.meet'].has_run.set()\n", b=ONE)
    has_run = importlib.import_module(meet).has_run = threading.Event()  # type: ignore[attr-defined]
    reg, install = hook_of(patch("both", f"{a}:f", f"{b}:f"))
    install("both")
    other = threading.Thread(target=importlib.import_module, args=(a,), daemon=True)

    def one() -> None:
        with machinery._LOCK:
            other.start()
            assert has_run.wait(30)
            time.sleep(0.2)  # until it waits for the lock
            importlib.import_module(b)

    first = threading.Thread(target=one, daemon=True)
    first.start()
    for thread in (first, other):
        thread.join(30)
        assert not thread.is_alive()
    assert load(a, b) == [102, 102]
    reg.revert()


def test_a_reload_is_patched_anew_and_is_nothing_to_others(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    reg, install = hook_of(patch("first", f"{a}:f"), patch("second", f"{b}:f"))
    install("first", "second")
    importlib.reload(importlib.import_module(a))
    assert states(reg) == {"first": "applied", "second": "armed"}
    assert load(a, b) == [102, 102]
    importlib.reload(sys.modules[b])
    assert load(a, b) == [102, 102]
    assert reg.revert() == ("first", "second")
    assert load(a, b) == [2, 2]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_class_that_was_defined_anew_has_lost_its_patch(is_new: bool, modules: Modules) -> None:
    """The class that it replaced, of the module as it was, still has it."""
    (a,) = modules(a="class C:\n    def m(self, x):\n        return x + 1\n")
    reg, _ = hook_of(patch("first", f"{a}:C.m"))
    reg.apply(["first"])
    module = sys.modules.pop(a) if is_new else importlib.reload(sys.modules[a])
    assert importlib.import_module(a).C().m(1) == 2
    assert (sys.modules[a] is not module) == is_new
    assert states(reg) == {"first": "lost"}
    with raises(PatchError, f"{a}:C.m", code="not-in-place"):
        reg.verify()


def test_other_finders_and_loaders(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Python passes over; one loader for all modules, as of pytest; and a module that runs outside sys.modules."""
    a, other = modules(a=ONE, other="x = 1\n")

    class Shared(importlib.machinery.PathFinder):
        def create_module(self, spec: Any) -> None:
            return None

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
            spec = super().find_spec(name, path) if name in (a, other) else None
            return spec and importlib.util.spec_from_file_location(name, spec.origin, loader=self)

        def exec_module(self, module: Any) -> None:
            importlib.machinery.SourceFileLoader(module.__name__, module.__file__).exec_module(module)

    reg, install = hook_of(patch("first", f"{a}:f"))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [object(), Shared(), *sys.meta_path])
        install("first")
        importlib.util.find_spec(a)
        importlib.import_module(other)
        assert a not in sys.modules
        spec: Any = importlib.util.find_spec(a)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert states(reg) == {"first": "armed"}
        assert load(a) == [102]
        reg.verify()


def test_what_was_missed_is_patched_at_the_next_chance(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is there without the hook having seen it: another finder stood in front, or Ctrl-C came between."""
    a, b = modules(a=ONE, b=ONE)
    reg, install = hook_of(patch("first", f"{a}:f"), patch("second", f"{b}:f"))
    install("first", "second")
    with monkeypatch.context() as other:
        other.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not reg])
        assert load(a) == [2]
    assert states(reg) == {"first": "armed", "second": "armed"}
    assert load(b, a) == [102, 102]
    assert states(reg) == {"first": "applied", "second": "applied"}


def test_an_import_that_did_not_end_leaves_its_patch_to_the_next(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once all is in place, and Python drops the module."""
    a, b = modules(a=ONE, b=ONE)
    reg, install = hook_of(patch("both", f"{a}:f", f"{b}:f"))
    install("both")
    with monkeypatch.context() as interrupted:
        interrupted.setattr(machinery, "announce", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            load(a)
    assert a not in sys.modules
    assert load(a, b) == [102, 102]
    assert states(reg) == {"both": "applied"}
    reg.verify()
    assert reg.revert() == ("both",)
    assert load(a, b) == [2, 2]


def test_the_version_is_that_of_when_it_was_applied(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = modules(a=ONE)
    reg, _ = hook_of(patch("first", f"{a}:f"))
    reg.apply(["first"])
    monkeypatch.setattr(SourceTree, "version", lambda _: pytest.fail("read again"))
    (row,) = reg.status()
    assert row["megatron_core"] == VERSION
    assert reg.apply([]) == ()


def test_every_problem_is_found_before_anything_is_imported_or_changed(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    reg, install = hook_of(
        patch("fine", f"{a}:f"),
        patch("changed", f"{b}:f", fingerprints=("0" * 64,)),
        patch("late", f"{b}:f", fingerprints=("1" * 64,)),
    )
    with raises(PatchError, FILE, "2 problems", "changed", f"{b}:f", "late", "1" * 64):
        install("fine", "changed", "late")
    assert set(states(reg).values()) == {"not applied"}
    assert not {a, b} & set(sys.modules)
    with raises(PatchError, "'unheard'", code="unknown"):
        install("fine", "unheard")


def test_a_half_imported_target_is_refused(modules: Modules) -> None:
    a, holder, *_ = modules(a="import PKG.core\n" + ONE, holder="", core="import PKG.holder\nPKG.holder.install()\n")
    reg, install = hook_of(patch("one", f"{a}:f"))
    importlib.import_module(holder).install = lambda: install("one")  # type: ignore[attr-defined]
    with raises(PatchError, f"one: {a}", "`import megatron.core`"):
        importlib.import_module(a)
    assert states(reg) == {"one": "not applied"}


def test_a_file_that_changed_since_fails_its_import_and_takes_back_what_is_the_hooks(modules: Modules) -> None:
    a, b, c = modules(a=ONE, b=ONE, c=ONE)
    reg, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f"), patch("c", f"{c}:f"))
    install("a", "b", "c")
    assert load(a, c) == [102, 102]
    assert reg.revert(["a"]) == ("a",)
    assert reg.apply(["a"]) == ("a",)  # somebody's own, from here on
    modules(b=CHANGED)
    with pytest.raises(PatchError, match=r"b: .* SHA-256 .*: c$"):
        importlib.import_module(b)
    assert b not in sys.modules
    assert states(reg) == {"a": "applied", "b": "not applied", "c": "not applied"}
    assert load(a, b, c) == [102, 3, 2]
    reg.revert()


def test_definitions_under_conditions_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thing.py").write_bytes(
        b"try:\r\n    import nothing\r\nexcept ImportError:\r\n    @str\r\n    def f():\r\n        return 1\r\nelse:\r\n"
        b"    def f():\r\n        return 2\r\nclass C:\r\n    def m(self): return 1"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    tree = SourceTree((Path(),))  # the working directory, as "" is on the path
    with pytest.raises(Refusal):
        tree.texts("thing:f")
    monkeypatch.chdir(tmp_path)
    assert tree.texts("thing:f") == ["    @str\n    def f():\n        return 1\n", "    def f():\n        return 2\n"]
    assert tree.texts("thing:C.m") == ["    def m(self): return 1\n"]
    for target, value, state in (
        ("thing:g", "thing:g", "target not found"),
        ("thing:C.n", "thing:C.n", "target not found"),
        ("thing:D.m", "class D", "target not found"),
        ("other.thing:f", "other.thing", "target not found"),
        ("broken:f", "broken", "target changed"),
    ):
        with raises(Refusal, value, code=state.replace(" ", "-")) as caught:
            tree.texts(target)
        assert caught.value.state == state


def test_an_editable_install_is_found(tmp_path: Path) -> None:
    """Its finder gives ``megatron`` a path that is not a directory, and sys.path lacks the tree."""
    core = tmp_path / "tree" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 9\nMINOR = 8\nPATCH = 7\n")
    code = f"""
import importlib.util, sys
from megacpp_mcore.patches.machinery.source_tree import SourceTree
sys.path[:] = [one for one in sys.path if not one.endswith("site-packages")]
class Editable:
    def find_spec(name, path=None, target=None):
        if name == "megatron":
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return importlib.util.spec_from_file_location(name, {str(core / "__init__.py")!r}) if name == "megatron.core" else None
sys.meta_path += [Editable, object()]
print(SourceTree.of_process().version(), "megatron" in sys.modules)
import megatron.core
sys.meta_path.remove(Editable)
print(SourceTree.of_process().version())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["9.8.7", "False", "9.8.7"], done.stderr


def test_another_package_of_that_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    with raises(CheckoutError, "megatron-core is not installed", tmp_path / "megatron"):
        SourceTree.of_process()


def python(root: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]), "CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    return forks.run(["-c", textwrap.dedent(code), *words], cwd=root, **settings)


# megatron.training imports megatron.core from its own inside, and the hook then finds it half imported.
INSIDE_OUT = "import megatron.training.models.gpt, megatron.core; armed = None"
CORE_FIRST = "import megatron.core; armed = look(); import megatron.training.models.gpt"
SHOW = """
    import json, sys
    def look():
        from megacpp_mcore import patches
        return {row["name"]: [row["state"], row["hook"], row["waits_for"]] for row in patches.status()}
    IMPORTS
    from megacpp_mcore import patches
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction
    model = look()
    import megatron.core.models.hybrid.hybrid_model, megatron.training.training
    import megatron.core.datasets.blended_dataset, megatron.core.datasets.gpt_dataset
    patches.verify()
    print(json.dumps({
        "file": megatron.core.__file__,
        "armed": armed,
        "model": model,
        "states": look(),
        "wrapped": hasattr(megatron.training.models.gpt.mtp_block_spec, "__wrapped__"),
        "same": gpt_model.process_mtp_loss is multi_token_prediction.process_mtp_loss,
        "reverted": patches.revert(),
    }))
"""


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(INSIDE_OUT, id="inside out", marks=pytest.mark.exhaustive),
        pytest.param(CORE_FIRST, id="core first"),
    ],
)
def test_a_hooked_tree_patches_whoever_imports_it(imports: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All patches, in the wheel's files by one order of imports, in the checkout's (where there is one) by the other."""
    source = wheel_root()
    if imports is CORE_FIRST and os.environ.get("MEGATRON_LM"):
        source = request.getfixturevalue("megatron_lm")
    root = copy_sources(source, tmp_path / "lm")
    names = [patch.name for patch in default().patches]
    Checkout(root).apply(names)
    done = python(root, SHOW.replace("IMPORTS", imports))
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    hooked_file = str(root / HOOKED)
    assert printed["file"] == hooked_file
    if imports is CORE_FIRST:
        assert printed["armed"]["hybrid-flops"] == ["armed", hooked_file, ["megatron.training.training"]]
    # One model is all that it takes, and the other one's part comes when that is imported.
    hybrid = "megatron.core.models.hybrid.hybrid_model"
    state, _, waits_for = printed["model"]["linear-cross-entropy"]
    assert state == "applied"
    assert set(waits_for) <= {hybrid}
    for name in names:
        state, file, waits_for = printed["states"][name]
        assert (state, file) == ("applied", hooked_file)
        # GPT and hybrid models do without LLaVA.
        assert set(waits_for) <= ({"megatron.core.models.multimodal.llava_model"} if name == "own-groups" else set())
    assert (printed["wrapped"], printed["same"], sorted(printed["reverted"])) == (True, True, sorted(names))
    assert f"megacpp-mcore: patch {NAME} applied to" in done.stderr
    assert "NOT applied" not in done.stderr
    git(root, "checkout", "--", HOOKED)
    assert git(root, "status", "--porcelain") == ""


@pytest.fixture
def hooked(tmp_path: Path) -> Path:
    """A hooked tree whose megatron.core imports next to nothing, so that importing it is quick."""
    root = copy_modules(wheel_root(), tmp_path / "lm", default().select([NAME])[0].modules)
    (root / HOOKED).write_text("from megatron.core.package_info import __version__\n")
    commit(root)
    Checkout(root).apply([NAME])
    return root


def test_megatron_core_alone_arms_and_imports_nothing_more(hooked: Path) -> None:
    code = """
        import json, sys
        import megatron.core
        from megacpp_mcore import patches
        rows = {row["name"]: row for row in patches.status()}
        print(json.dumps([rows["mtp-shared-block"], [name for name in sys.modules if name.startswith("megatron")]]))
    """
    done = python(hooked, code)
    assert done.returncode == 0, done.stderr[-3000:]
    row, imported = json.loads(done.stdout)
    assert (row["state"], row["hook"], row["fingerprints"]) == ("armed", str(hooked / HOOKED), {})
    assert row["waits_for"] == list(dict.fromkeys(target.partition(":")[0] for target in row["targets"]))
    assert set(imported) == {"megatron", "megatron.core", "megatron.core.package_info"}
    (line,) = (line for line in done.stderr.splitlines() if "torch/utils/cpp_extension.py" not in line)  # at the end
    assert f"patch {NAME} was NOT applied; never imported in this process: {', '.join(row['waits_for'])}" in line


@pytest.mark.parametrize("fault", ["no package", "an edited target"])
def test_what_keeps_the_hook_from_its_work_fails_the_import(hooked: Path, fault: str) -> None:
    code = "import megatron.core; print('imported')"
    if fault == "no package":
        code = f"import sys; sys.modules['megacpp_mcore'] = None; {code}"
        expected = [
            f'File "{hooked / HOOKED}", line 2',
            '__import__("megacpp_mcore.patches.hook"',
            "undo with: megacpp-mcore patch revert --checkout DIR",
            "ModuleNotFoundError",
        ]
    else:
        file = hooked / "megatron/training/models/gpt.py"
        file.write_bytes(file.read_bytes().replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))
        expected = [f"no patch of the hook in {hooked / HOOKED} was applied: {NAME}: the source of"]
    done = python(hooked, code)
    assert (done.returncode, done.stdout) == (1, "")
    assert [words for words in expected if words not in done.stderr] == []
