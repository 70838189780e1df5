"""The patch registry, on throw-away modules and on real Megatron symbols."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.registry import (
    Applied,
    Edit,
    Patch,
    Registry,
    default,
    fingerprint,
    megatron_core_version,
)
from megacpp_mcore.patches.machinery.symbols import digest

HOST = """
    import functools

    LIMIT = 3
    TABLE = {"a": 1}

    def double(x):
        return 2 * x

    def triple(x):
        return 3 * x

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)
        return wrapper

    @logged
    def decorated(x):
        return x

    class Base:
        scale = 5

        def inherited(self):
            return "base"

    class Host(Base):
        factor = 7

        def method(self, x):
            return x + 1

        @staticmethod
        def static(x):
            return x + 2

        @classmethod
        def build(cls):
            return cls

        @property
        def size(self):
            return 10

        class Inner:
            def deep(self):
                return "deep"
"""
USER = "from {host} import double as renamed, triple, TABLE, Host\n\ndef use(x):\n    return renamed(x)\n"
Hosts = tuple[types.ModuleType, types.ModuleType]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """A module with something of every kind, and another one that imports from it by name."""
    host, user = f"patch_host_{os.getpid()}_{id(request)}", f"patch_user_{os.getpid()}_{id(request)}"
    (tmp_path / f"{host}.py").write_text(textwrap.dedent(HOST))
    (tmp_path / f"{user}.py").write_text(USER.format(host=host))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(host), importlib.import_module(user)
    for name in (host, user):
        sys.modules.pop(name, None)


def wrapping(add: int) -> Callable[[Any], Any]:
    """A factory of replacements that call the original and add to its result."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + add

        return replacement

    return make


def patch(name: str, *targets: str, make: Callable[[Any], Any] | None = None, **fields: Any) -> Patch:
    prints, separate = fields.pop("fingerprints", None), fields.pop("separate", ())
    edits = tuple(
        Edit(
            target=t,
            fingerprints=prints or {"0.19.2": fingerprint(t)},
            make=make or wrapping(100),
            separate=t in separate,
        )
        for t in targets
    )
    return record(name, edits, **fields)


def record(name: str, edits: tuple[Edit, ...], **fields: Any) -> Patch:
    words = dict.fromkeys(("fixes", "source", "seam", "leaves_alone", "retire_when"), "for a test")
    return Patch(name=name, edits=edits, **{"megatron_versions": ">=0.19,<0.20", **words, **fields})


def registry(*patches: Patch, version: str = "0.19.2") -> Registry:
    return Registry(patches, version=lambda: version)


def state(host: types.ModuleType, user: types.ModuleType) -> list[int]:
    """The identity of everything that a patch could have touched."""
    names = [*vars(host).values(), *vars(user).values(), *vars(host.Host).values(), *vars(host.Host.Inner).values()]
    return [id(value) for value in names]


def test_function_is_replaced_everywhere_and_restored(hosts: Hosts) -> None:
    host, user = hosts
    original, before = host.double, state(*hosts)
    reg = registry(patch("one", f"{host.__name__}:double"))
    assert reg.apply(["one"]).applied == ("one",)
    assert host.double(1) == 102
    assert user.renamed is host.double
    assert user.use(1) == 102
    assert host.double.__wrapped__ is original
    reg.verify()
    assert reg.revert(["one"]) == ("one",)
    assert host.double is original is user.renamed
    assert state(*hosts) == before
    assert reg.revert() == ()


def test_apply_twice_is_once(hosts: Hosts) -> None:
    host, _ = hosts
    reg = registry(patch("one", f"{host.__name__}:double"))
    reg.apply(["one"])
    replacement = host.double
    again = reg.apply(["one", "one"])
    assert (again.applied, again.already) == ((), ("one",))
    assert host.double is replacement
    assert host.double(1) == 102


@pytest.mark.parametrize(
    ("path", "call", "expected"),
    [
        ("Host.method", lambda host: host.Host().method(1), 102),
        ("Host.static", lambda host: host.Host.static(1), 103),
        ("Host.static", lambda host: host.Host().static(1), 103),
    ],
)
def test_methods(hosts: Hosts, path: str, call: Callable[[Any], int], expected: int) -> None:
    host, _ = hosts
    before, raw = state(*hosts), vars(host.Host)[path.split(".")[1]]
    reg = registry(patch("one", f"{host.__name__}:{path}"))
    reg.apply(["one"])
    assert call(host) == expected
    assert type(vars(host.Host)[path.split(".")[1]]) is type(raw)
    reg.revert()
    assert vars(host.Host)[path.split(".")[1]] is raw
    assert state(*hosts) == before


def test_class_method_property_inner_class_and_whole_class(hosts: Hosts) -> None:
    host, user = hosts
    before = state(*hosts)
    original_class = host.Host
    name = host.__name__

    def make_build(original: Any) -> Any:
        return lambda cls: (original(cls), "patched")

    def make_size(original: property) -> property:
        return property(lambda self: original.fget(self) + 1)  # type: ignore[misc]

    def make_class(original: type) -> type:
        return type("Host", (original,), {"method": lambda self, x: "new"})

    reg = registry(
        patch("build", f"{name}:Host.build", make=make_build),
        patch("size", f"{name}:Host.size", make=make_size),
        patch("deep", f"{name}:Host.Inner.deep", make=lambda original: lambda self: original(self) + "er"),
        patch("class", f"{name}:Host", make=make_class),
    )
    reg.apply(["build", "size", "deep"])
    assert host.Host.build() == (host.Host, "patched")
    assert host.Host().size == 11
    assert host.Host.Inner().deep() == "deeper"
    with pytest.raises(PatchError, match="already changed by an applied patch"):
        reg.apply(["class"])
    reg.revert()
    assert state(*hosts) == before
    with pytest.raises(PatchError, match=r"class and deep both change .* or a part of it"):
        reg.apply(["deep", "class"])
    reg.apply(["class"])
    assert user.Host is host.Host is not original_class
    assert host.Host().method(1) == "new"
    with pytest.raises(PatchError, match="already changed by an applied patch"):
        reg.apply(["build"])
    reg.revert()
    assert state(*hosts) == before


def test_data_attributes(hosts: Hosts) -> None:
    host, user = hosts
    before, name = state(*hosts), host.__name__
    reg = registry(
        patch("factor", f"{name}:Host.factor", make=lambda original: original + 1),
        patch("table", f"{name}:TABLE", make=lambda original: {**original, "b": 2}),
    )
    reg.apply(["factor", "table"])
    assert host.Host.factor == 8
    assert user.TABLE is host.TABLE == {"a": 1, "b": 2}
    reg.revert()
    assert state(*hosts) == before
    with pytest.raises(PatchError, match="plain int"):
        fingerprint(f"{name}:LIMIT")


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c"])))
def test_revert_in_any_order(hosts: Hosts, order: tuple[str, ...]) -> None:
    host, _ = hosts
    before, name = state(*hosts), host.__name__
    reg = registry(
        patch("a", f"{name}:double", f"{name}:Host.static"),
        patch("b", f"{name}:triple"),
        patch("c", f"{name}:Host.method"),
    )
    members = vars(host.Host)
    originals = {id(value) for value in (host.double, members["static"], host.triple, members["method"])}
    reg.apply(["c", "a", "b"])
    assert {old for new, old in zip(state(*hosts), before, strict=True) if new != old} == originals
    for index, chosen in enumerate(order):
        reg.revert([chosen])
        assert [row["state"] for row in reg.status()].count("applied") == 2 - index
    assert state(*hosts) == before


def test_two_problems_are_both_named_and_nothing_changes(hosts: Hosts) -> None:
    host, _ = hosts
    before, name = state(*hosts), host.__name__
    reg = registry(
        patch("fine", f"{name}:double"),
        patch("changed", f"{name}:triple", fingerprints={"0.19.2": "0" * 64}),
        patch("gone", f"{name}:quadruple", fingerprints={"0.19.2": "0" * 64}),
    )
    with pytest.raises(PatchError) as caught:
        reg.apply(["fine", "changed", "gone"])
    assert "changed: the source of" in str(caught.value)
    assert f"gone: {name}:quadruple was not found" in str(caught.value)
    assert state(*hosts) == before
    assert [row["state"] for row in reg.status()] == ["not applied"] * 3


def test_edited_copy_of_the_target_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    host, _ = hosts
    known = fingerprint(f"{host.__name__}:double")
    edited = f"{host.__name__}_edited"
    (tmp_path / f"{edited}.py").write_text(textwrap.dedent(HOST).replace("return 2 * x", "return x + x"))
    reg = registry(patch("one", f"{edited}:double", fingerprints={"0.19.2": known}))
    with pytest.raises(PatchError, match=r"one: the source of .* has SHA-256"):
        reg.apply(["one"])
    assert importlib.import_module(edited).double(3) == 6
    sys.modules.pop(edited)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "defines no nothing"),
        ("Missing.method", "there is no class Missing"),
        ("Host.inherited", "inherited from .*Base, name it there"),
    ],
)
def test_target_not_found(hosts: Hosts, path: str, words: str) -> None:
    host, _ = hosts
    with pytest.raises(PatchError, match=words):
        fingerprint(f"{host.__name__}:{path}")
    with pytest.raises(PatchError, match="importing no_such_module_at_all failed"):
        fingerprint(f"no_such_module_at_all:{path}")


def test_versions(hosts: Hosts) -> None:
    name = hosts[0].__name__
    one = patch("one", f"{name}:double")
    for version in ("0.18.4", "0.20.0", "0.20.0rc1", "not a version"):
        reg = registry(one, version=version)
        with pytest.raises(PatchError, match=f"it is for megatron-core >=0.19,<0.20, and|calls itself '{version}'"):
            reg.apply(["one"])
    done = patch("one", f"{name}:double", megatron_versions=">=0.19", superseded_in=">=0.20")
    reg = registry(done, version="0.20.1")
    with pytest.raises(PatchError, match=r"one: megatron-core 0.20.1 has this fix itself .* leave the patch out"):
        reg.apply(["one"])
    # In range, not listed, but the same source to the byte.
    for fitting in (registry(done, version="0.20.0rc1"), registry(one, version="0.19.3")):
        assert fitting.apply(["one"]).applied == ("one",)
        fitting.revert()
    # Listed with another source: another version's fingerprint does not help.
    other = {"0.19.1": "0" * 64, "0.19.2": fingerprint(f"{name}:double")}
    reg = registry(patch("one", f"{name}:double", fingerprints=other), version="0.19.1")
    with pytest.raises(PatchError, match=f"in megatron-core 0.19.1 has SHA-256 .*, expected {'0' * 64}: "):
        reg.apply(["one"])


def test_requires_and_conflicts(hosts: Hosts) -> None:
    name = hosts[0].__name__
    before = state(*hosts)
    reg = registry(
        patch("a", f"{name}:double"),
        patch("needs-a", f"{name}:triple", requires=("a",)),
        patch("not-a", f"{name}:Host.method", conflicts=("a",)),
        patch("same", f"{name}:double"),
    )
    with pytest.raises(PatchError, match="needs-a requires a: name it as well"):
        reg.apply(["needs-a"])
    with pytest.raises(PatchError, match="not-a conflicts with a"):
        reg.apply(["a", "not-a"])
    with pytest.raises(PatchError, match="same and a both change"):
        reg.apply(["a", "same"])
    assert state(*hosts) == before
    reg.apply(["needs-a", "a"])
    for name_of, words in (("not-a", "conflicts with a"), ("same", "already changed by")):
        with pytest.raises(PatchError, match=words):
            reg.apply([name_of])
    reg.revert()
    assert state(*hosts) == before


def test_a_module_that_was_imported_anew_is_noticed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = hosts
    before, name = state(*hosts), host.__name__
    reg = registry(patch("one", f"{name}:double"))
    reg.apply(["one"])
    with monkeypatch.context() as context:
        context.delitem(sys.modules, name)
        assert importlib.import_module(name).double(1) == 2
        assert [row["state"] for row in reg.status()] == ["lost"]
        with pytest.raises(PatchError, match=r"one was applied to .*the module was imported anew\); undo that first"):
            reg.apply(["one"])
    assert sys.modules[name] is host
    assert [row["state"] for row in reg.status()] == ["applied"]
    reg.revert()
    assert state(*hosts) == before


def test_a_method_that_a_reload_put_back_is_noticed(hosts: Hosts) -> None:
    """The module stays the same, and holds new classes; what was patched is the old one."""
    host, _ = hosts
    reg = registry(patch("one", f"{host.__name__}:Host.method"), patch("deep", f"{host.__name__}:Host.Inner.deep"))
    reg.apply(["one", "deep"])
    old = host.Host
    assert old().method(1) == 102
    assert [row["state"] for row in reg.status()] == ["applied", "applied"]
    assert importlib.reload(host) is host
    assert host.Host().method(1) == 2
    assert [row["state"] for row in reg.status()] == ["lost", "lost"]
    with pytest.raises(PatchError, match=r"Host\.method, which meanwhile holds something else"):
        reg.verify()
    for action in (reg.apply, reg.revert):
        with pytest.raises(PatchError, match=r"as a reload cannot be undone, start the process anew"):
            action(["one"])
    host.Host.Inner = old.Inner  # of this class it is the patched one, but the way there is not
    assert [row["state"] for row in reg.status()] == ["lost", "lost"]
    host.Host = old
    reg.verify()
    assert set(reg.revert()) == {"one", "deep"}
    assert old().method(1) == 2


def test_reverting_what_another_patch_requires_warns(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    name = hosts[0].__name__
    reg = registry(patch("a", f"{name}:double"), patch("needs-a", f"{name}:triple", requires=("a",)))
    reg.apply(["a", "needs-a"])
    reg.revert(["a"])
    assert "needs-a is still applied but requires a" in caplog.text
    reg.revert()


def test_names(hosts: Hosts) -> None:
    one = patch("mtp-shared-block", f"{hosts[0].__name__}:double")
    reg = registry(one)
    with pytest.raises(PatchError, match="no patch 'mtp-shard-block'; did you mean 'mtp-shared-block'"):
        reg.apply(["mtp-shard-block"])
    with pytest.raises(PatchError, match="list of patch names"):
        reg.apply("mtp-shared-block")
    with pytest.raises(PatchError, match="names must be unique"):
        registry(one, one)
    with pytest.raises(PatchError, match="refers to 'x'"):
        registry(patch("one", f"{hosts[0].__name__}:double", requires=("x",)))


def test_a_holder_that_cannot_be_rebound_undoes_everything(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = hosts

    class Stubborn:
        def __init__(self, **names: Any) -> None:
            object.__setattr__(self, "names", names)

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                return types.MappingProxyType(object.__getattribute__(self, "names"))
            return object.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if value is not self.names[name] and self.loud:
                raise AttributeError("read-only")

        loud = True

    before, name = state(*hosts), host.__name__
    reg = registry(patch("one", f"{name}:double"), patch("two", f"{name}:triple"))
    stubborn: Any = Stubborn(double=host.double)
    monkeypatch.setitem(sys.modules, "stubborn_module", stubborn)
    for loud, words in ((True, "read-only"), (False, "stubborn_module.double could not be given")):
        monkeypatch.setattr(Stubborn, "loud", loud)
        with pytest.raises(PatchError, match=words):
            reg.apply(["two", "one"])
        assert state(*hosts) == before
        assert reg.revert() == ()


def test_replacements_that_cannot_stand_in(hosts: Hosts) -> None:
    host, _ = hosts
    before = state(*hosts)

    def broken(original: Any) -> Any:
        raise RuntimeError("no kernel")

    for make, words in (
        (broken, "no kernel"),
        (lambda original: original, "the original itself"),
        (lambda original: 3, "cannot stand in"),
        (lambda original: len, "cannot carry"),
        (lambda original: functools.wraps(sorted)(lambda *a: a), "not the original"),
    ):
        with pytest.raises(PatchError, match=words):
            registry(patch("one", f"{host.__name__}:double", make=make)).apply(["one"])
        assert state(*hosts) == before


def test_foreign_wrappers_are_refused(hosts: Hosts) -> None:
    host, _ = hosts
    target, original = f"{host.__name__}:double", host.double
    one = patch("one", target)
    first, second = registry(one), registry(one)
    first.apply(["one"])
    with pytest.raises(PatchError, match="already carries the patch 'one'"):
        second.apply(["one"])
    first.revert()
    # functools.wraps makes the wrapper's source read as the original's: the fingerprint alone would accept it.
    host.double = wrapping(1)(original)
    assert fingerprint(target) == one.edits[0].fingerprints["0.19.2"]
    with pytest.raises(PatchError, match=r"wrapped by somebody else \(.*test_registry.py:\d+\)"):
        first.apply(["one"])
    host.double = original
    # A decorator that is in the source is upstream's own.
    own = registry(patch("own", f"{host.__name__}:decorated"))
    own.apply(["own"])
    assert host.decorated(1) == 101
    own.revert()
    assert host.decorated(1) == 1


def test_drift_is_reported_and_not_overwritten(hosts: Hosts) -> None:
    host, _ = hosts
    reg = registry(patch("one", f"{host.__name__}:double"))
    reg.apply(["one"])
    ours = host.double
    host.double = wrapping(1)(ours)
    for action in (reg.apply, reg.revert):
        with pytest.raises(PatchError, match="meanwhile holds something else"):
            action(["one"])
    with pytest.raises(PatchError, match="not in place"):
        reg.verify()
    assert reg.status()[0]["state"] == "lost"
    host.double = ours
    reg.revert()


def test_verify_names_a_module_that_got_the_original_later(hosts: Hosts) -> None:
    host, user = hosts
    reg = registry(patch("one", f"{host.__name__}:double"))
    reg.apply(["one"])
    user.renamed = host.double.__wrapped__
    with pytest.raises(PatchError, match=f"{user.__name__}.renamed holds the original"):
        reg.verify()
    reg.revert()


def test_a_replacement_with_a_home_keeps_it(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host, user = hosts
    home = types.ModuleType("patch_home")
    home.ours = lambda x: -x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "patch_home", home)
    ours, before = home.ours, state(*hosts)
    reg = registry(patch("one", f"{host.__name__}:double", make=lambda original: ours))
    for _ in range(2):
        reg.apply(["one"])
        assert user.renamed is ours
        reg.revert()
        assert home.ours is ours
        assert state(*hosts) == before


def test_status_is_json_and_one_line_is_logged_on_rank_0(
    hosts: Hosts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = f"{hosts[0].__name__}:double"
    reg = registry(patch("one", target))
    caplog.set_level(logging.INFO, logger="megacpp_mcore")
    reg.apply(["one"])
    (row,) = json.loads(json.dumps(reg.status()))
    assert row["state"] == "applied"
    assert row["fingerprints"] == {target: fingerprint_of(reg, "one")}
    assert row["megatron_core"] == "0.19.2"
    assert (row["cost"], row["gain"], row["superseded_in"]) == ("not measured", "not measured", None)
    assert (row["targets"], row["hook"], row["waits_for"]) == ([target], None, [])
    assert [record.getMessage() for record in caplog.records] == [
        f"patch one applied to {target} (megatron-core 0.19.2)"
    ]
    reg.revert()
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    reg.apply(["one"])
    assert caplog.records == []
    reg.revert()
    # Where the log drops the line, as it does unless somebody set it up, the line goes to stderr.
    caplog.set_level(logging.WARNING, logger="megacpp_mcore")
    reg.apply(["one"])
    assert capsys.readouterr().err == ""
    reg.revert()
    monkeypatch.setenv("RANK", "0")
    reg.apply(["one"])
    assert capsys.readouterr().err == f"megacpp-mcore: patch one applied to {target} (megatron-core 0.19.2)\n"
    assert caplog.records == []
    reg.revert()


def fingerprint_of(reg: Registry, name: str) -> str:
    (found,) = [p.edits[0].fingerprints["0.19.2"] for p in reg.patches if p.name == name]
    return found


def test_the_seal_covers_what_the_records_do(hosts: Hosts) -> None:
    name = hosts[0].__name__
    plain = patch("one", f"{name}:double")

    def seal(*patches: Patch, names: tuple[str, ...] = ("one",)) -> str:
        return registry(*patches).seal(names)

    assert seal(plain) == seal(patch("one", f"{name}:double", fixes="other words"))
    two = patch("two", f"{name}:triple")
    assert seal(plain, two) == seal(plain)
    assert seal(plain, two, names=("one", "two")) == seal(two, plain, names=("two", "one"))
    others = [
        patch("one", f"{name}:triple"),
        patch("one", f"{name}:double", fingerprints={"0.19.2": "0" * 64}),
        patch("one", f"{name}:double", megatron_versions=">=0.19"),
        patch("one", f"{name}:double", superseded_in=">=1"),
        patch("one", f"{name}:double", f"{name}:triple"),
        patch("one", f"{name}:double", separate=(f"{name}:double",)),
    ]
    assert len({seal(plain), *map(seal, others), seal(plain, two, names=("one", "two"))}) == 8


def test_threads_apply_once(hosts: Hosts) -> None:
    host, _ = hosts
    before = state(*hosts)
    reg = registry(patch("one", f"{host.__name__}:double"))
    results: list[tuple[str, ...]] = []
    threads = [threading.Thread(target=lambda: results.append(reg.apply(["one"]).applied)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [()] * 7 + [("one",)]
    assert host.double(1) == 102
    reg.revert()
    assert state(*hosts) == before


def test_what_an_import_applies_meanwhile_is_not_applied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a checkout is hooked: its line applies patches while a launch imports what it is to patch."""
    source = "def double(x):\n    return 2 * x\n"
    (tmp_path / "late_host.py").write_text(f"{source}\n\nimport builtins\nbuiltins.late_hook()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.late_hook", lambda: reg.apply(["one"]), raising=False)
    late = Edit(target="late_host:double", fingerprints={"0.19.2": digest(source)}, make=wrapping(100))
    reg = registry(record("one", (late,)))
    assert reg.apply(["one"]) == Applied((), ("one",))
    assert sys.modules["late_host"].double(1) == 102
    reg.revert()
    monkeypatch.delitem(sys.modules, "late_host")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_during_an_apply_sees_it_whole_and_can_revert(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, user = hosts
    original, inside, go = host.double, threading.Event(), threading.Event()

    class Slow:
        """Stops whoever looks for imports by name when the target has been exchanged and the imports have not."""

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            if threading.current_thread() is thread and host.double is not original:
                inside.set()
                assert go.wait(30)
            return {}

    def child(queue: Any) -> None:
        patched = (host.double(1), user.renamed(1))
        reg.revert()
        queue.put((patched, (host.double(1), user.renamed(1))))

    reg = registry(patch("one", f"{host.__name__}:double"))
    monkeypatch.setattr(sys, "modules", {"slow_module": Slow(), **sys.modules})
    thread = threading.Thread(target=reg.apply, args=(["one"],), daemon=True)
    thread.start()
    assert inside.wait(30)
    assert user.renamed is original
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    timer = threading.Timer(0.2, go.set)
    timer.start()
    process.start()
    try:
        process.join(30)
        assert process.exitcode == 0  # before the queue is asked, which a child that failed has left empty
        assert queue.get() == ((102, 102), (2, 2))
    finally:  # a child that hangs would be waited for when this process exits
        process.kill()
        process.join(30)
        timer.join(30)
        thread.join(30)
    assert user.renamed(1) == 102
    reg.revert()


def test_a_change_made_while_planning_is_planned_for(hosts: Hosts) -> None:
    """No lock is held while a replacement is built: it may import, and so wait for another thread's import."""
    host, user = hosts
    before, built = state(*hosts), []

    def make(original: Any) -> Any:
        built.append(original)
        if len(built) == 1:
            thread = threading.Thread(target=other.apply, args=(["triple"],))
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
        return wrapping(100)(original)

    other = registry(patch("triple", f"{host.__name__}:triple"))
    reg = registry(patch("one", f"{host.__name__}:double", make=make))
    assert reg.apply(["one"]).applied == ("one",)
    assert built == [host.double.__wrapped__] * 2
    assert (user.renamed(1), user.triple(1)) == (102, 103)
    # Two that want the same symbol at the same moment: one gets it, and the other is told.
    reg.revert()
    built.clear()
    other.revert()
    rival = registry(patch("one", f"{host.__name__}:double"))
    other = types.SimpleNamespace(apply=lambda names: rival.apply(["one"]))  # type: ignore[assignment]
    with pytest.raises(PatchError, match="already carries the patch 'one'"):
        reg.apply(["one"])
    rival.revert()
    assert state(*hosts) == before


MEGATRON_TARGETS = [
    "megatron.training.models.gpt:mtp_block_spec",  # a function
    "megatron.core.transformer.spec_utils:build_module",  # imported by name all over megatron.core
    "megatron.core.transformer.identity_op:IdentityOp",  # a class
    "megatron.core.transformer.transformer_layer:TransformerLayer.forward",  # a method
    "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",  # a static method
]
MEGATRON_ROUND_TRIP = """
import functools, importlib, itertools, json, sys
from megacpp_mcore.patches.machinery.registry import Edit, Patch, Registry, fingerprint, megatron_core_version

targets = json.loads(sys.argv[1])
for module in ("core.models.gpt.gpt_model", "core.models.gpt.gpt_layer_specs", "training.training"):
    importlib.import_module("megatron." + module)

def make(original):
    if isinstance(original, type):
        return type(original.__name__, (original,), {})
    return functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))

def everything():
    seen = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("megatron."):
            for key, value in vars(module).items():
                seen[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    seen.update({(name, key, inner): id(member) for inner, member in vars(value).items()})
    return seen

words = dict.fromkeys(("fixes", "source", "seam", "leaves_alone", "retire_when"), "for a test")
version = megatron_core_version()
patches = [
    Patch(name=f"p{i}", megatron_versions=">=0.19,<0.20", **words,
          edits=(Edit(target=t, fingerprints={version: fingerprint(t)}, make=make),))
    for i, t in enumerate(targets)
]
registry = Registry(patches)
names = [patch.name for patch in patches]
everything()
before = everything()
counts = []
subsets = [[name] for name in names] + [names] + [[n for n in names if n != out] for out in names]
for subset in subsets:
    registry.apply(subset)
    registry.verify()
    assert registry.apply(subset).applied == ()
    now = everything()
    counts.append(sum(now.get(key) != value for key, value in before.items()))
    for name in reversed(subset):
        registry.revert([name])
    assert everything() == before, subset
print(json.dumps({"version": version, "counts": counts[: len(names)], "file": sys.modules["megatron.core"].__file__}))
"""


def megatron_round_trip(pythonpath: list[Path]) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, pythonpath)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON_ROUND_TRIP, json.dumps(MEGATRON_TARGETS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kind_of_target_of_the_installed_megatron() -> None:
    found = megatron_round_trip([Path(__file__).parents[2]])
    assert found["version"] == megatron_core_version()
    # Many modules import build_module and IdentityOp by name, and every one of them was given the replacement.
    assert found["counts"][0] >= 1
    assert found["counts"][1] > 10
    assert found["counts"][2] > 10


def test_every_kind_of_target_of_a_checkout(megatron_lm: Path) -> None:
    found = megatron_round_trip([Path(__file__).parents[2], megatron_lm])
    assert Path(found["file"]).is_relative_to(megatron_lm)
    assert "+" not in found["version"]
    assert found["counts"][1] > 10


def test_the_default_registry_is_sound() -> None:
    reg = default()
    assert default() is reg
    assert Checkout.installed(reg).unfit() == []
    assert {row["state"] for row in reg.status()} == {"not applied"}
