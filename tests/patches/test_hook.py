"""The hook: patches applied as modules are imported; on throw-away modules, and in hooked copies of real trees."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megacpp_mcore
from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.hook import Hook
from megacpp_mcore.patches.machinery.record import Edit, Patch
from megacpp_mcore.patches.machinery.registry import Registry, default, fingerprint
from megacpp_mcore.patches.machinery.sources import SourceTree
from megacpp_mcore.patches.machinery.symbols import Refusal, digest
from tests.trees import HOOKED, WORDS, commit, copy_modules, copy_sources, git, wheel_root

ROOT = Path(__file__).parents[2]
NAME = "mtp-shared-block"
FILE = "/somewhere/megatron/core/__init__.py"

Modules = Callable[..., list[str]]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Modules]:
    """Write modules ``a="source", …`` of a fresh package, where ``PKG`` stands for its name; returns their full names."""
    package = f"hooked_{os.getpid()}_{id(request)}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**sources: str) -> list[str]:
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source).replace("PKG", package))
        importlib.invalidate_caches()
        return [f"{package}.{name}" for name in sources]

    before = list(sys.meta_path)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    left = [finder for finder in sys.meta_path if finder not in before]
    sys.meta_path[:] = before
    # A hook stays, and must then be idle.
    assert [finder for finder in left if not isinstance(finder, Hook) or finder._awaited()] == []


def adding(amount: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + amount

        return replacement

    return make


def patch(name: str, *targets: str, make: Callable[[Any], Any] | None = None, **fields: Any) -> Patch:
    """A patch of the modules as they are on the disk; nothing is imported."""
    tree = SourceTree(tuple(map(Path, sys.path)))
    known, separate = fields.pop("fingerprint", None), fields.pop("separate", ())
    edits = tuple(
        Edit(
            target=t,
            fingerprints={"0.19.2": known or digest(tree.texts(t)[0])},
            make=make or adding(100),
            separate=t in separate,
        )
        for t in targets
    )
    return Patch(**{"name": name, "edits": edits, "megatron_versions": ">=0.19,<0.20", **WORDS, **fields})


def hook_of(*patches: Patch) -> tuple[Registry, Callable[..., None]]:
    registry = Registry(patches, version=lambda: "0.19.2")
    hook = Hook(registry)

    def install(*names: str, **fields: Any) -> None:
        hook.install(
            FILE, names, **{"version": megacpp_mcore.__version__, "seal": registry.seal(names), **fields}
        )  # fmt: skip

    return registry, install


def states(registry: Registry) -> dict[str, str]:
    return {row["name"]: row["state"] for row in registry.status()}


ONE = "def f(x):\n    return x + 1\n"
USER = "from PKG.a import f\n\ndef use(x):\n    return f(x)\n"


# --- when it applies ---------------------------------------------------------------------------------------------------


def test_a_patch_waits_for_all_its_modules(modules: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, user, other = modules(a=ONE, b=ONE, user=USER, other="x = 1\n")
    registry, install = hook_of(patch("both", f"{a}:f", f"{b}:f"))
    install("both")
    assert a not in sys.modules
    (row,) = json.loads(json.dumps(registry.status()))
    assert (row["state"], row["waits_for"], row["hook"], row["fingerprints"]) == ("armed", [a, b], FILE, {})
    importlib.import_module(other)
    assert importlib.import_module(user).use(1) == 2
    (row,) = registry.status()
    assert (row["state"], row["waits_for"]) == ("armed", [b])
    second = importlib.import_module(b)
    (row,) = registry.status()
    assert (row["state"], row["waits_for"], row["hook"]) == ("applied", [], FILE)
    assert row["fingerprints"] == {target: fingerprint(target) for target in (f"{a}:f", f"{b}:f")}
    assert sys.modules[user].use(1) == 102
    assert sys.modules[user].f is sys.modules[a].f
    registry.verify()
    assert (
        f"patch both applied to {a}:f, {b}:f (megatron-core 0.19.2) by the hook in {FILE}\n" in capsys.readouterr().err
    )
    assert registry.revert() == ("both",)
    assert (second.f(1), sys.modules[user].use(1)) == (2, 2)


def test_what_is_imported_already_is_patched_at_once(modules: Modules) -> None:
    a, user = modules(a=ONE, user=USER)
    use = importlib.import_module(user)
    registry, install = hook_of(patch("one", f"{a}:f"))
    install("one")
    assert states(registry) == {"one": "applied"}
    assert use.use(1) == 102
    registry.revert()


def test_who_imports_by_name_while_the_import_goes_on_gets_the_replacement(modules: Modules) -> None:
    """Modules a and b import each other: b takes f from an a that is not finished."""
    a, b = modules(
        a=ONE + "from PKG.b import g\n",
        b="from PKG.a import f\n\ndef g(x):\n    return f(x) * 2\n",
    )
    registry, install = hook_of(patch("f", f"{a}:f"), patch("g", f"{b}:g", make=adding(1000)))
    install("f", "g")
    importlib.import_module(a)
    assert states(registry) == {"f": "applied", "g": "applied"}
    assert sys.modules[b].f is sys.modules[a].f
    assert sys.modules[a].g is sys.modules[b].g
    assert sys.modules[a].g(1) == 102 * 2 + 1000
    registry.verify()
    registry.revert()
    assert sys.modules[a].g(1) == 4


def test_the_module_keeps_its_own_loader_and_can_be_read_and_reloaded(modules: Modules) -> None:
    (a,) = modules(a="LOADER = (__loader__, __spec__.loader)\n" + ONE)
    registry, install = hook_of(patch("one", f"{a}:f"))
    install("one")
    module = importlib.import_module(a)
    assert module.f(1) == 102
    assert module.__spec__ is not None
    loader = module.__spec__.loader
    assert type(loader) is importlib.machinery.SourceFileLoader
    assert module.__loader__ is loader is module.LOADER[0] is module.LOADER[1]
    assert "exec_module" not in vars(loader)
    assert inspect.getsource(module.f) == ONE
    registry.revert()
    assert importlib.reload(module).f(1) == 2
    assert sys.modules[a] is module


def test_a_reload_of_a_patched_module_is_seen(modules: Modules) -> None:
    (a,) = modules(a=ONE)
    registry, install = hook_of(patch("one", f"{a}:f"))
    install("one")
    importlib.reload(importlib.import_module(a))
    assert states(registry) == {"one": "lost"}
    with pytest.raises(PatchError, match="imported anew"):
        install("one")


def test_a_reload_of_a_module_with_a_patched_method_is_seen(modules: Modules) -> None:
    """In a patch that still waits for a module, too: its rest is not put beside a part that is gone."""
    base, gpt, hybrid = modules(base=ONE, gpt="class Model:\n    def f(self, x):\n        return x + 1\n", hybrid=ONE)
    targets = [f"{gpt}:Model.f", f"{hybrid}:f"]
    registry, install = hook_of(patch("models", f"{base}:f", *targets, separate=targets))
    install("models")
    importlib.import_module(base)
    model = importlib.import_module(gpt)
    patched_model = model.Model
    assert patched_model().f(1) == 102
    importlib.reload(model)
    assert model.Model().f(1) == 2
    assert states(registry) == {"models": "lost"}
    for again in (lambda: install("models"), registry.verify, registry.revert):
        with pytest.raises(PatchError, match=r"Model\.f, which meanwhile holds something else"):
            again()
    with pytest.raises(PatchError) as failed:
        importlib.import_module(hybrid)
    for words in (
        "as a reload cannot be undone, start the process anew",
        "The patches models are in place, if only in part",
        "do not go on in this process",
    ):
        assert words in str(failed.value)
    assert (states(registry), sys.modules[base].f(1)) == ({"models": "lost"}, 102)
    assert importlib.import_module(hybrid).f(1) == 2
    with pytest.raises(PatchError, match="start the process anew"):
        registry.revert()
    model.Model = patched_model  # who kept it can put it back
    assert registry.revert() == ("models",)
    assert sys.modules[base].f(1) == 2


def test_a_requirement_is_waited_for(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(patch("on-b", f"{a}:f", requires=("b",)), patch("b", f"{b}:f"))
    with pytest.raises(PatchError, match="on-b requires b: name it as well"):
        install("on-b")
    install("on-b", "b")
    importlib.import_module(a)
    assert states(registry) == {"on-b": "armed", "b": "armed"}
    importlib.import_module(b)
    assert states(registry) == {"on-b": "applied", "b": "applied"}
    registry.revert()


def for_two_models(base: str, *models: str, **fields: Any) -> Patch:
    """A patch of a base and of two models, either of which may never be imported."""
    targets = [f"{model}:f" for model in models]
    return patch("models", f"{base}:f", *targets, separate=targets, **fields)


@pytest.mark.parametrize("first", [0, 1])
def test_separate_edits_are_applied_as_their_modules_come(
    modules: Modules, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    base, *models = modules(base=ONE, gpt="from PKG import base\n" + ONE, hybrid="from PKG import base\n" + ONE)
    registry, install = hook_of(for_two_models(base, *models))
    install("models")
    one, other = models[first], models[1 - first]
    assert importlib.import_module(base).f(1) == 2  # without a model there is nothing to do
    (row,) = registry.status()
    assert (row["state"], row["waits_for"]) == ("armed", models)
    assert importlib.import_module(one).f(1) == 102
    assert sys.modules[base].f(1) == 102
    assert other not in sys.modules
    (row,) = registry.status()
    assert (row["state"], row["waits_for"]) == ("applied", [other])
    assert set(row["fingerprints"]) == {f"{base}:f", f"{one}:f"}
    registry.verify()
    install("models")
    patched = sys.modules[base].f
    assert importlib.import_module(other).f(1) == 102
    assert sys.modules[base].f is patched
    (row,) = registry.status()
    assert (row["state"], row["waits_for"], len(row["fingerprints"])) == ("applied", [], 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megacpp-mcore: patch models")]
    assert [line.partition(" (")[0].partition(" to ")[2] for line in lines] == [
        ", ".join(f"{name}:f" for name in (base, *models) if name != other), f"{other}:f"
    ]  # fmt: skip
    registry.revert()
    assert [sys.modules[name].f(1) for name in (base, *models)] == [2, 2, 2]


def test_what_is_in_place_in_part_can_be_completed_and_reverted(modules: Modules) -> None:
    base, *models = modules(base=ONE, gpt=ONE, hybrid=ONE)
    early, late = modules(early=ONE, late=ONE)
    needing = [
        patch("on-it-early", f"{early}:f", requires=("models",)),
        patch("on-it-late", f"{late}:f", requires=("models",)),
    ]
    registry, install = hook_of(for_two_models(base, *models), *needing)
    install("models", "on-it-early", "on-it-late")
    importlib.import_module(base)
    importlib.import_module(early)
    assert set(states(registry).values()) == {"armed"}
    importlib.import_module(models[0])
    assert states(registry) == {"models": "applied", "on-it-early": "applied", "on-it-late": "armed"}
    importlib.import_module(late)  # what it requires is in place, if only for one model
    assert set(states(registry).values()) == {"applied"}
    assert models[1] not in sys.modules
    applied = registry.apply(["models"])  # by name it is put in place whole, which imports what it takes
    assert set(applied.applied + applied.already) == {"models"}
    assert sys.modules[models[1]].f(1) == 102
    assert registry.apply(["models"]).already == ("models",)
    assert set(registry.revert()) == {"models", "on-it-early", "on-it-late"}
    for name in (base, early, late, *models):
        assert sys.modules[name].f(1) == 2
    del sys.modules[models[1]], sys.modules[models[0]]
    install("models")
    importlib.import_module(models[0])
    assert sys.modules[base].f(1) == 102
    assert registry.revert(["models"]) == ("models",)
    assert importlib.import_module(models[1]).f(1) == 2  # and is awaited no more


def test_what_is_in_place_in_part_is_completed_without_what_it_required(
    modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """Taking a requirement out warns; the module that comes later dies of it no more than those that are in use."""
    base, gpt, hybrid, other = modules(base=ONE, gpt=ONE, hybrid=ONE, other=ONE)
    registry, install = hook_of(for_two_models(base, gpt, hybrid, requires=("other",)), patch("other", f"{other}:f"))
    install("models", "other")
    for name in (other, base, gpt):
        importlib.import_module(name)
    assert set(states(registry).values()) == {"applied"}
    assert registry.revert(["other"]) == ("other",)
    assert "models is still applied but requires other" in caplog.text
    assert importlib.import_module(hybrid).f(1) == 102
    assert [sys.modules[name].f(1) for name in (base, gpt, other)] == [102, 102, 2]
    assert registry.revert() == ("models",)
    with pytest.raises(PatchError, match="models requires other: name it as well"):
        registry.apply(["models"])


def test_what_is_in_place_in_part_keeps_the_rest_of_its_targets(modules: Modules) -> None:
    base, gpt, hybrid = modules(base=ONE, gpt=ONE, hybrid=ONE)
    registry, install = hook_of(for_two_models(base, gpt, hybrid), patch("same", f"{hybrid}:f"))
    install("models")
    importlib.import_module(base)
    importlib.import_module(gpt)
    assert states(registry) == {"models": "applied", "same": "not applied"}
    with pytest.raises(PatchError, match=rf"same: {hybrid}:f is to be changed by the armed patch models$"):
        registry.apply(["same"])
    assert hybrid not in sys.modules  # the refusal came before an import could have completed the other patch
    assert importlib.import_module(hybrid).f(1) == 102
    registry.revert()


def test_a_later_part_that_fails_takes_the_earlier_one_back(modules: Modules) -> None:
    base, gpt, hybrid = modules(base=ONE, gpt=ONE, hybrid=ONE)
    registry, install = hook_of(for_two_models(base, gpt, hybrid))
    install("models")
    importlib.import_module(base)
    importlib.import_module(gpt)
    assert sys.modules[gpt].f(1) == 102
    modules(hybrid=ONE.replace("x + 1", "x + 2"))
    with pytest.raises(PatchError, match=r"models: the source of .* reverted: models$"):
        importlib.import_module(hybrid)
    assert [sys.modules[name].f(1) for name in (base, gpt)] == [2, 2]
    assert states(registry) == {"models": "not applied"}
    assert importlib.import_module(hybrid).f(1) == 3


def test_separate_edits_are_all_checked_before_the_first(modules: Modules) -> None:
    base, gpt, hybrid = modules(base=ONE, gpt=ONE, hybrid=ONE)
    one = for_two_models(base, gpt, hybrid)
    modules(hybrid=ONE.replace("x + 1", "x + 2"))
    registry, install = hook_of(one)
    with pytest.raises(PatchError, match=rf"models: the source of {hybrid}:f"):
        install("models")
    importlib.import_module(base)
    assert importlib.import_module(gpt).f(1) == 2
    assert states(registry) == {"models": "not applied"}


def test_twice_is_once_and_others_may_come_first(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f"))
    registry.apply(["a"])
    install("a", "b")
    install("a", "b")
    assert states(registry) == {"a": "applied", "b": "armed"}
    # Somebody asks for what is only armed: importing b applies it, which is what was asked for.
    applied = registry.apply(["a", "b"])
    assert set(applied.applied + applied.already) == {"a", "b"}
    assert (sys.modules[a].f(1), sys.modules[b].f(1)) == (102, 102)
    registry.verify()
    registry.revert()
    assert (sys.modules[a].f(1), sys.modules[b].f(1)) == (2, 2)


def test_an_armed_patch_can_be_reverted(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f"))
    install("a", "b")
    assert registry.revert(["a"]) == ()
    assert states(registry) == {"a": "not applied", "b": "armed"}
    assert importlib.import_module(a).f(1) == 2
    assert registry.revert() == ()
    assert importlib.import_module(b).f(1) == 2


def test_what_is_armed_is_taken(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(
        patch("a", f"{a}:f"), patch("same", f"{a}:f"), patch("not-a", f"{b}:f", conflicts=("a",)),
        patch("on-a", f"{b}:f", requires=("a",)),
    )  # fmt: skip
    install("a")
    for name, words in (("not-a", "conflicts with a"), ("on-a", "requires a")):
        with pytest.raises(PatchError, match=words):
            registry.apply([name])
    # Refused before the target is looked at: that would import it, and so apply the armed patch.
    with pytest.raises(PatchError, match=rf"same: {a}:f is to be changed by the armed patch a$"):
        registry.apply(["same"])
    assert a not in sys.modules
    assert states(registry)["a"] == "armed"
    importlib.import_module(a)
    with pytest.raises(PatchError, match=rf"same: {a}:f is already changed by an applied patch$"):
        registry.apply(["same"])
    registry.revert()


def test_imports_made_by_a_plan_are_seen(modules: Modules) -> None:
    """Building one replacement imports a module that another patch waits for: that one is applied inside of the plan."""
    a, b = modules(a=ONE, b=ONE)
    calls: list[int] = []

    def make(original: Any) -> Any:
        calls.append(importlib.import_module(b).f(1))
        return adding(100)(original)

    registry, install = hook_of(patch("a", f"{a}:f", make=make), patch("b", f"{b}:f"))
    install("b")
    assert registry.apply(["a"]).applied == ("a",)
    assert states(registry) == {"a": "applied", "b": "applied"}
    assert calls == [102, 102]  # planned anew, since something had changed
    registry.verify()
    registry.revert()


def test_two_threads_that_import_a_module_each(modules: Modules) -> None:
    barrier = threading.Barrier(2)
    wait = "import sys\nsys.modules['PKG.meet'].barrier.wait(30)\n"
    meet, a, b = modules(meet="", a=ONE + wait, b=ONE + wait)
    importlib.import_module(meet).barrier = barrier  # type: ignore[attr-defined]
    registry, install = hook_of(patch("both", f"{a}:f", f"{b}:f"))
    install("both")
    threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert states(registry) == {"both": "applied"}
    assert (sys.modules[a].f(1), sys.modules[b].f(1)) == (102, 102)
    registry.revert()


def test_a_thread_that_applies_and_one_that_imports_do_not_wait_for_each_other(modules: Modules) -> None:
    """One thread is planning (its plan imports slow), while the other is inside of the import of slow, and then patches."""
    a, slow, meet = modules(
        a=ONE, slow=ONE + "import sys\nm = sys.modules['PKG.meet']\nm.inside.set()\nassert m.go.wait(30)\n", meet=""
    )
    events: Any = importlib.import_module(meet)
    events.inside, events.go = threading.Event(), threading.Event()

    def make(original: Any) -> Any:
        events.go.set()
        importlib.import_module(slow)
        return adding(100)(original)

    registry, install = hook_of(patch("a", f"{a}:f", make=make), patch("slow", f"{slow}:f"))
    install("slow")
    threads = [threading.Thread(target=importlib.import_module, args=(slow,), daemon=True)]
    threads[0].start()
    assert events.inside.wait(30)
    threads.append(threading.Thread(target=registry.apply, args=(["a"],), daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert states(registry) == {"a": "applied", "slow": "applied"}
    registry.revert()


# --- when it refuses ---------------------------------------------------------------------------------------------------


def test_every_problem_is_found_before_anything_is_imported_or_changed(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(
        patch("fine", f"{a}:f"),
        patch("changed", f"{b}:f", fingerprint="0" * 64),
        patch("late", f"{b}:f", megatron_versions=">=0.20"),
    )
    with pytest.raises(PatchError) as caught:
        install("fine", "changed", "late")
    for words in (
        f"no patch of the hook in {FILE} was applied, 2 problems",
        "changed: the source of",
        "late: it is for",
    ):
        assert words in str(caught.value)
    assert states(registry) == dict.fromkeys(("fine", "changed", "late"), "not applied")
    assert not {a, b} & set(sys.modules)
    for names, words in ((["fine", "unheard"], "no patch 'unheard'"), (["gone"], "no patch 'gone'")):
        with pytest.raises(PatchError, match=words):
            install(*names, seal="0" * 16) if "unheard" in names else install(*names)


def test_patches_that_cannot_go_together(modules: Modules) -> None:
    a, b = modules(a="class C:\n    def m(self):\n        return 1\n", b=ONE)
    registry, install = hook_of(
        patch("class", f"{a}:C"), patch("method", f"{a}:C.m"), patch("not-class", f"{b}:f", conflicts=("class",))
    )
    with pytest.raises(PatchError) as caught:
        install("class", "method", "not-class")
    assert f"method and class both change {a}:C.m or a part of it" in str(caught.value)
    assert "not-class conflicts with class" in str(caught.value)
    assert set(states(registry).values()) == {"not applied"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "0.0.9"}, "was written by megacpp-mcore 0.0.9, and .* is imported"),
        ({"seal": "0" * 16}, "was written by another copy of megacpp-mcore .*, whose patches differ"),
    ],
)
def test_another_copy(modules: Modules, fields: dict[str, str], words: str) -> None:
    (a,) = modules(a=ONE)
    registry, install = hook_of(patch("one", f"{a}:f"))
    with pytest.raises(PatchError, match=words):
        install("one", **fields)
    assert states(registry) == {"one": "not applied"}


def test_a_half_imported_target_is_refused(modules: Modules) -> None:
    a, holder, *_ = modules(a="import PKG.core\n" + ONE, holder="", core="import PKG.holder\nPKG.holder.install()\n")
    registry, install = hook_of(patch("one", f"{a}:f"))
    importlib.import_module(holder).install = lambda: install("one")  # type: ignore[attr-defined]
    with pytest.raises(PatchError, match=rf"one: {a} is still being imported.* put `import megatron.core` before that"):
        importlib.import_module(a)
    assert states(registry) == {"one": "not applied"}


def test_a_failure_while_importing_takes_everything_back(modules: Modules) -> None:
    a, b, c = modules(a=ONE, b=ONE, c=ONE)

    def broken(original: Any) -> Any:
        raise RuntimeError("no kernel")

    registry, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f", make=broken), patch("c", f"{c}:f"))
    install("a", "b", "c")
    first = importlib.import_module(a)
    assert first.f(1) == 102
    with pytest.raises(PatchError, match=r"no kernel.* the patches that the hook had applied were reverted: a$"):
        importlib.import_module(b)
    assert b not in sys.modules
    assert first.f(1) == 2
    assert set(states(registry).values()) == {"not applied"}
    assert (importlib.import_module(b).f(1), importlib.import_module(c).f(1)) == (2, 2)


def test_a_failure_leaves_what_somebody_applied_after_a_revert(modules: Modules) -> None:
    """The hook takes back what it applied, and only while that is its own."""

    def broken(original: Any) -> Any:
        raise RuntimeError("no kernel")

    a, b, c = modules(a=ONE, b=ONE, c=ONE)
    registry, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f", make=broken), patch("c", f"{c}:f"))
    install("a", "b", "c")
    for name in (a, c):
        importlib.import_module(name)
    assert registry.revert(["a"]) == ("a",)
    assert registry.apply(["a"]).applied == ("a",)
    with pytest.raises(PatchError, match=r"the patches that the hook had applied were reverted: c$"):
        importlib.import_module(b)
    assert states(registry) == {"a": "applied", "b": "not applied", "c": "not applied"}
    assert [sys.modules[name].f(1) for name in (a, c)] == [102, 2]
    registry.revert()


def test_the_end_of_a_process_tells_what_never_came(modules: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the models of separate edits one would have done, and one that came is enough."""
    base, gpt, hybrid, other, early = modules(base=ONE, gpt=ONE, hybrid=ONE, other=ONE, early=ONE)
    registry = Registry(
        [
            for_two_models(base, gpt, hybrid),
            patch("other", f"{other}:f", f"{early}:f"),
            patch("needing", f"{early}:f", requires=("models",)),
        ],
        version=lambda: "0.19.2",
    )
    hook = Hook(registry)

    def told() -> list[str]:
        capsys.readouterr()
        hook._tell_what_never_came()
        return [line.partition("megacpp-mcore: patch ")[2] for line in capsys.readouterr().err.splitlines()]

    def install(*names: str) -> None:
        hook.install(FILE, names, version=megacpp_mcore.__version__, seal=registry.seal(names))

    never = "was NOT applied; never imported in this process:"
    install("models")
    assert told() == [f"models {never} {base}, {gpt}, {hybrid}"]
    importlib.import_module(base)
    assert told() == [f"models {never} {gpt}, {hybrid}"]
    install("needing")
    importlib.import_module(early)
    assert told() == [f"models {never} {gpt}, {hybrid}", "needing was NOT applied; what it requires waits, too"]
    importlib.import_module(gpt)
    assert hybrid not in sys.modules
    assert set(registry.pending) == {"models"}
    assert told() == []
    registry.revert()
    install("other")
    assert told() == [f"other {never} {other}"]
    registry.revert()


def test_a_target_that_changed_between_check_and_import(modules: Modules) -> None:
    a, b = modules(a=ONE, b=ONE)
    registry, install = hook_of(patch("a", f"{a}:f"), patch("b", f"{b}:f"))
    install("a", "b")
    importlib.import_module(a)
    modules(b=ONE.replace("x + 1", "x + 2"))
    with pytest.raises(PatchError, match=r"b: the source of .* has SHA-256 .*reverted: a"):
        importlib.import_module(b)
    assert sys.modules[a].f(1) == 2
    assert set(states(registry).values()) == {"not applied"}


def test_an_import_that_fails_leaves_the_patch_waiting(modules: Modules) -> None:
    (a,) = modules(a=ONE + "raise ImportError('not today')\n")
    registry, install = hook_of(patch("one", f"{a}:f"))
    install("one")
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module(a)
    assert states(registry) == {"one": "armed"}
    modules(a=ONE + "# another day, and another size\n")
    assert importlib.import_module(a).f(1) == 102
    registry.revert()


def test_a_loader_that_cannot_be_watched_is_refused(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = modules(a=ONE)
    registry, install = hook_of(patch("one", f"{a}:f"))

    class Loader:
        __slots__ = ()

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, Loader()) if name == a else None  # type: ignore[arg-type]

    install("one")
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Finder, *sys.meta_path[1:]])
    with pytest.raises(PatchError, match="whose work cannot be watched"):
        importlib.import_module(a)
    monkeypatch.undo()
    registry.revert()


# --- the files say what the modules do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "megatron.core.transformer.transformer_layer",
        "megatron.core.transformer.multi_token_prediction",
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.utils",
    ],
)
def test_every_symbol_reads_the_same_without_being_imported(module: str) -> None:
    """The fingerprint of the file's text is that of the imported symbol, for all that real modules define."""
    imported = importlib.import_module(module)
    tree, compared = SourceTree((Path(sys.modules["megatron.core"].__file__ or "").parents[2],)), 0
    for name, value in vars(imported).items():
        members = {name: value}
        if isinstance(value, type) and value.__module__ == module:
            members |= {f"{name}.{inner}": member for inner, member in vars(value).items() if callable(member)}
        for path, member in members.items():
            if getattr(member, "__module__", None) != module or not hasattr(member, "__qualname__"):
                continue
            try:
                imported_digest = fingerprint(f"{module}:{path}")
            except PatchError:
                continue  # made by a dataclass or an enum: there is no source
            if inspect.unwrap(member).__qualname__ != path:
                continue  # a function under another name
            assert imported_digest in [digest(text) for text in tree.texts(f"{module}:{path}")], path
            compared += 1
    assert compared > 15


def test_definitions_under_conditions_data_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_bytes(
        b"try:\r\n    import nothing\r\nexcept ImportError:\r\n    @str\r\n    def f():\r\n        return 1\r\nelse:\r\n"
        b"    def f():\r\n        return 2\r\nTABLE = {\r\n    'a': 1}\r\n"
        b"class C:\r\n    size: int = 3\r\n    def m(self): return 1"
    )
    tree = SourceTree((tmp_path,))
    assert tree.texts("thing:f") == ["    @str\n    def f():\n        return 1\n", "    def f():\n        return 2\n"]
    assert tree.texts("thing:TABLE") == ["TABLE = {\n    'a': 1}"]
    assert tree.texts("thing:C.size") == ["size: int = 3"]
    assert tree.texts("thing:C.m") == ["    def m(self): return 1\n"]
    for target, words in (
        ("thing:g", "thing defines no g"),
        ("thing:C.n", "thing.C defines no n"),
        ("thing:D.m", "has no class D"),
        ("other.thing:f", "no file of the module other.thing"),
    ):
        with pytest.raises(Refusal, match=words) as caught:
            tree.texts(target)
        assert caught.value.state == "target not found"
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(Refusal, match="cannot be read as Python") as caught:
        tree.texts("broken:f")
    assert caught.value.state == "target changed"


def test_modules_are_found_as_the_import_system_finds_them(tmp_path: Path) -> None:
    for name in (
        "one/space/early.py",
        "two/space/late.py",
        "one/space/pkg/x.py",
        "two/space/pkg/__init__.py",
        "two/space/pkg/y.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    tree = SourceTree((tmp_path / "one", tmp_path / "two"))
    code = f"""
import sys, importlib
sys.path[:0] = [{str(tmp_path / "one")!r}, {str(tmp_path / "two")!r}]
for name in ("space.early", "space.late", "space.pkg", "space.pkg.y"):
    print(importlib.import_module(name).__file__)
try:
    importlib.import_module("space.pkg.x")
except ModuleNotFoundError:
    print("none")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [str(tree.file(name)) for name in ("space.early", "space.late", "space.pkg", "space.pkg.y")]
    assert ours == found[:4]
    assert found[4] == "none"
    with pytest.raises(Refusal):
        tree.file("space.pkg.x")


# --- real trees, hooked, in a Python of their own ----------------------------------------------------------------------


def python(root: Path, code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": "0",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *words],
        cwd=root, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


HARMLESS = """
    import functools, json, sys
    from megacpp_mcore.patches.machinery import registry
    from megacpp_mcore.patches.mtp_shared_block import PATCH
    TARGET = "megatron.core.transformer.identity_op:IdentityOp.forward"

    def make(original):
        return functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))

    def harmless(root):
        from megacpp_mcore.patches.machinery.sources import SourceTree
        from megacpp_mcore.patches.machinery.symbols import digest
        tree = SourceTree((root,))
        print_ = digest(tree.texts(TARGET)[0])
        words = dict.fromkeys(("fixes", "source", "seam", "leaves_alone", "retire_when"), "for a test")
        edit = registry.Edit(target=TARGET, fingerprints={tree.version(): print_}, make=make)
        return registry.Patch(name="harmless", megatron_versions=">=0.19,<0.20", edits=(edit,), **words)

    import pathlib
    mine = registry.Registry([PATCH, harmless(pathlib.Path.cwd())])
    registry.default = lambda: mine
"""
APPLY = (
    HARMLESS
    + """
    from megacpp_mcore.patches.machinery.checkout import Checkout
    print(Checkout(".", mine).apply(["mtp-shared-block", "harmless"]).hooked)
"""
)
# megatron.training imports megatron.core from its own inside, and the hook then finds it half imported.
INSIDE_OUT = "import megatron.training.models.gpt as gpt, megatron.core; armed = None"
CORE_FIRST = """import megatron.core
    armed = {row["name"]: [row["state"], row["waits_for"]] for row in mine.status()}
    import megatron.training.models.gpt as gpt"""
SHOW = (
    HARMLESS
    + """
    IMPORTS
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction
    mine.verify()
    print(json.dumps({
        "file": megatron.core.__file__,
        "armed": armed,
        "states": {row["name"]: [row["state"], row["hook"]] for row in mine.status()},
        "wrapped": [hasattr(value, "__wrapped__") for value in
                    (gpt.mtp_block_spec, IdentityOp.forward, gpt_model.process_mtp_loss)],
        "same": gpt_model.process_mtp_loss is multi_token_prediction.process_mtp_loss,
        "again": mine.apply(["mtp-shared-block"]).already,
    }))
"""
)


@pytest.mark.parametrize("imports", [INSIDE_OUT, CORE_FIRST], ids=["inside out", "core first"])
def test_a_hooked_tree_patches_whoever_imports_it(imports: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The wheel's files by one order of imports, the checkout's (where there is one) by the other."""
    source = wheel_root()
    if imports is CORE_FIRST and os.environ.get("MEGATRON_LM"):
        source = request.getfixturevalue("megatron_lm")
    root = copy_sources(source, tmp_path / "lm")
    assert python(root, APPLY).stdout.splitlines() == ["('mtp-shared-block', 'harmless')"]
    hooked_file = str(root / HOOKED)
    done = python(root, SHOW.replace("IMPORTS", imports))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["file"] == hooked_file
    if imports is CORE_FIRST:
        state, waits_for = found["armed"][NAME]
        assert state == "armed"
        assert "megatron.training.models.gpt" in waits_for
        assert found["armed"]["harmless"] == ["applied", []]
    assert found["states"] == {NAME: ["applied", hooked_file], "harmless": ["applied", hooked_file]}
    assert found["wrapped"] == [True, True, True]
    assert found["same"]
    assert found["again"] == [NAME]
    lines = [line for line in done.stderr.splitlines() if line.startswith("megacpp-mcore: patch ")]
    assert sorted(line.split()[2] for line in lines) == ["harmless", NAME]
    git(root, "checkout", "--", HOOKED)
    assert git(root, "status", "--porcelain") == ""


ONE_MODEL = """
    import importlib, json, sys
    FIRST, SECOND = sys.argv[1:]
    importlib.import_module(FIRST)
    from megacpp_mcore import patches

    def look():
        (row,) = [row for row in patches.status() if row["name"] == "linear-cross-entropy"]
        held = {}
        for target in row["targets"]:
            module, _, path = target.partition(":")
            if module in sys.modules:
                holder, (*owners, name) = sys.modules[module], path.split(".")
                for owner in owners:
                    holder = vars(holder)[owner]
                held[module] = hasattr(vars(holder)[name], "__wrapped__")
        return [row["state"], row["waits_for"], held]

    one = look()
    importlib.import_module(SECOND)
    both = look()
    patches.verify()
    patches.revert()
    print(json.dumps([sys.modules["megatron.core"].__file__, one, both, look()]))
"""
MODELS = ("megatron.core.models.gpt.gpt_model", "megatron.core.models.hybrid.hybrid_model")
SHARED = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.models.common.language_module.language_module",
    "megatron.core.transformer.multi_token_prediction",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("models", [MODELS, MODELS[::-1]], ids=["GPTModel alone", "HybridModel alone"])
def test_linear_cross_entropy_comes_with_the_model_that_is_imported(
    models: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """GPTModel in a hooked copy of the checkout (where there is one), HybridModel in one of the wheel's files."""
    source = wheel_root()
    if models is MODELS and os.environ.get("MEGATRON_LM"):
        source = request.getfixturevalue("megatron_lm")
    root = copy_sources(source, tmp_path / "lm")
    Checkout(root).apply(["linear-cross-entropy"])
    ended = python(root, f"import {models[0]}, sys; print({models[1]!r} in sys.modules)")
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr[-3000:]
    assert "patch linear-cross-entropy applied to" in ended.stderr
    assert "NOT applied" not in ended.stderr  # one model is all that it takes
    done = python(root, ONE_MODEL, *models)
    assert done.returncode == 0, done.stderr[-3000:]
    file, one, both, reverted = json.loads(done.stdout.splitlines()[-1])
    assert file == str(root / HOOKED)
    assert one == ["applied", [models[1]], dict.fromkeys((models[0], *SHARED), True)]
    assert both == ["applied", [], dict.fromkeys((*models, *SHARED), True)]
    assert reverted == ["not applied", [], dict.fromkeys((*models, *SHARED), False)]


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
    (line,) = done.stderr.splitlines()  # at the end of the process
    assert f"patch {NAME} was NOT applied; never imported in this process: {', '.join(row['waits_for'])}" in line


def test_without_our_package_the_import_fails_and_shows_the_line(hooked: Path) -> None:
    done = python(hooked, "import sys; sys.modules['megacpp_mcore'] = None; import megatron.core; print('imported')")
    assert done.returncode == 1
    assert "imported" not in done.stdout
    assert f'File "{hooked / HOOKED}", line 2' in done.stderr
    assert '__import__("megacpp_mcore.patches.hook"' in done.stderr
    assert "# megacpp-mcore patch hook; " in done.stderr
    assert "undo with: megacpp-mcore patch revert --checkout DIR" in done.stderr
    assert "ModuleNotFoundError" in done.stderr


def test_a_target_edited_after_hooking_fails_the_import(hooked: Path) -> None:
    file = hooked / "megatron/training/models/gpt.py"
    file.write_bytes(file.read_bytes().replace(b"def mtp_block_spec(\n", b"def mtp_block_spec(  # an edit\n"))
    done = python(hooked, "import megatron.core; print('imported')")
    assert done.returncode == 1
    assert "imported" not in done.stdout
    assert f"PatchError: no patch of the hook in {hooked / HOOKED} was applied: {NAME}: the source of" in done.stderr
