"""The patch registry, on throw-away modules."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery import registry as machinery
from megacpp_mcore.patches.machinery import symbols
from megacpp_mcore.patches.machinery.record import Function, named_replacement
from megacpp_mcore.patches.machinery.registry import Registry, fingerprint
from megacpp_mcore.patches.machinery.symbols import Refusal, exchange
from tests import forks
from tests.errors import raises
from tests.patches.throwaway import ONE, VERSION, Modules, adding, patch, registry, states

HOST = """
    import functools

    LIMIT = 3

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
        def inherited(self):
            return "base"

    class Host(Base):
        def method(self, x):
            return x + 1

        @staticmethod
        def static(x):
            return x + 2

        @classmethod
        def build(cls):
            return cls

        class Inner:
            def deep(self):
                return "deep"
"""
USER = "from PKG.host import double as renamed, triple, Host\n\ndef use(x):\n    return renamed(x)\n"
Hosts = tuple[types.ModuleType, types.ModuleType]


def state(host: types.ModuleType, user: types.ModuleType) -> list[int]:
    """The identity of everything that a patch could have touched."""
    names = [*vars(host).values(), *vars(user).values(), *vars(host.Host).values(), *vars(host.Host.Inner).values()]
    return [id(value) for value in names]


@pytest.fixture
def hosts(modules: Modules) -> Iterator[Hosts]:
    """A module with something of every kind, and another one that imports from it by name; in the end they are as before."""
    host, user = map(importlib.import_module, modules(host=HOST, user=USER))
    before = state(host, user)
    yield host, user
    assert state(host, user) == before


def test_every_kind_of_target(hosts: Hosts) -> None:
    host, user = hosts
    original_class, name = host.Host, host.__name__
    reg = registry(
        patch("method", f"{name}:Host.method"),
        patch("static", f"{name}:Host.static"),
        patch("build", f"{name}:Host.build", make=lambda original: lambda cls: (original(cls), "patched")),
        patch("deep", f"{name}:Host.Inner.deep", make=lambda original: lambda self: original(self) + "er"),
        patch("class", f"{name}:Host", make=lambda old: type("Host", (old,), {"method": lambda self, x: "new"})),
        patch("decorated", f"{name}:decorated"),  # a decorator that is in the source is upstream's own
    )
    reg.apply(["method", "static", "build", "deep", "decorated"])
    assert host.Host().method(1) == 102
    assert (host.Host.static(1), host.Host().static(1)) == (103, 103)
    assert host.Host.build() == (host.Host, "patched")
    assert host.Host.Inner().deep() == "deeper"
    assert isinstance(vars(host.Host)["static"], staticmethod)
    assert host.Host.Inner.deep.__wrapped__(host.Host.Inner()) == "deep"
    assert host.decorated(1) == 101
    reg.revert()
    reg.apply(["class"])
    assert user.Host is host.Host is not original_class
    assert host.Host().method(1) == "new"
    reg.revert()


def test_status_is_json_and_one_line_is_logged_on_rank_0(
    hosts: Hosts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{hosts[0].__name__}:double"
    only = patch("one", target)
    reg = registry(only)
    line = f"patch one applied to {target} (megatron-core {VERSION})"
    # Where the log drops the line, as it does unless it is configured, it goes to stderr; only on rank 0.
    for rank, level, logged, printed in (
        ("0", logging.INFO, [line], ""),
        ("1", logging.INFO, [], ""),
        ("1", logging.WARNING, [], ""),
        ("0", logging.WARNING, [], f"megacpp-mcore: {line}\n"),
    ):
        monkeypatch.setenv("RANK", rank)
        caplog.set_level(level, logger="megacpp_mcore")
        reg.apply(["one"])
        assert ([record.getMessage() for record in caplog.records], capsys.readouterr().err) == (logged, printed)
        (row,) = json.loads(json.dumps(reg.status()))
        reg.revert()
        caplog.clear()
        capsys.readouterr()
    assert (row["state"], row["megatron_core"], row["hook"], row["waits_for"]) == ("applied", VERSION, None, [])
    assert row["fingerprints"] == {target: only.edits[0].fingerprints[0]}
    assert (row["cost"], row["gain"]) == ("not measured", "not measured")


@pytest.mark.parametrize(
    ("names", "code", "values"),
    [
        (["noe"], "unknown", ["'noe'", "'one'"]),
        ("one", "", ["'one'"]),
        (["one", "changed", "gone"], "not-applied", ["changed", ":triple", "gone", ":quadruple", "2 problems"]),
    ],
)  # fmt: skip
def test_every_problem_is_named_and_nothing_is_changed(hosts: Hosts, names: Any, code: str, values: list[str]) -> None:
    name, other = hosts[0].__name__, ("0" * 64,)
    reg = registry(
        patch("one", f"{name}:double"),
        patch("changed", f"{name}:triple", fingerprints=other),
        patch("gone", f"{name}:quadruple", fingerprints=other),
    )
    with raises(PatchError, *values, code=code):
        reg.apply(names)
    assert set(states(reg).values()) == {"not applied"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nothing", "host:nothing"),
        ("Missing.method", "class Missing"),
        ("Host.inherited", "Base"),
        ("LIMIT", "host:LIMIT"),
    ],
)
def test_target_that_cannot_be_patched(hosts: Hosts, path: str, value: str) -> None:
    with raises(Refusal, value, code="target-changed" if path == "LIMIT" else "target-not-found"):
        fingerprint(f"{hosts[0].__name__}:{path}")
    with raises(Refusal, "no_such_module_at_all", code="target-not-found"):
        fingerprint(f"no_such_module_at_all:{path}")


def test_sources_decide_and_not_versions(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{hosts[0].__name__}:double"
    current, other = fingerprint(target), "0" * 64
    for accepted in ((current,), (other, current)):
        for version in ("0.18.4", "0.20.0rc1", "not a version"):
            monkeypatch.setattr(Registry, "version", version)
            reg = registry(patch("one", target, fingerprints=accepted))
            assert reg.apply(["one"]) == ("one",)
            reg.revert()
    with raises(PatchError, "not a version", ":double", current, other, "1" * 64, code="not-applied"):
        registry(patch("one", target, fingerprints=(other, "1" * 64))).apply(["one"])


def test_a_target_with_upstreams_own_fix_is_left_as_it_is(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    host, user = hosts
    fixed, other = f"{host.__name__}:double", f"{host.__name__}:triple"
    both = patch("one", fixed, other)
    ended = dataclasses.replace(both.edits[0], fingerprints=("0" * 64,), until=both.edits[0].fingerprints)
    reg = registry(
        dataclasses.replace(both, edits=(ended, both.edits[1])), dataclasses.replace(both, name="two", edits=(ended,))
    )
    before, double = state(host, user), host.double
    assert reg.apply(["one", "two"]) == ("one", "two")
    assert reg.apply(["one", "two"]) == ()
    reg.verify()
    assert (host.double(1), host.triple(1), states(reg)) == (2, 103, {"one": "applied", "two": "applied"})
    assert f"one applied to {other} (" in (printed := capsys.readouterr().err)
    assert "two applied to no target" in printed
    assert fixed not in printed
    host.double = wrapper = adding(1)(double)  # none of our business
    assert set(reg.revert()) == {"one", "two"}
    assert host.double is wrapper
    host.double = double
    assert state(host, user) == before
    unknown = dataclasses.replace(ended, until=("1" * 64,))
    with raises(PatchError, ":double", code="not-applied"):
        registry(dataclasses.replace(both, edits=(unknown,))).apply(["one"])


def test_a_body_that_takes_arguments_by_name_refuses_those_that_it_would_ignore(hosts: Hosts) -> None:
    host, _ = hosts

    @named_replacement("x y")
    def ten_times(original: Function, call: SimpleNamespace) -> Any:
        return original() if call.x < 0 else call.x * 10

    named = patch("one", f"{host.__name__}:double", make=ten_times)
    reg = registry(named)
    reg.apply(["one"])
    assert (host.double(x=4), host.double(-4)) == (40, -8)
    reg.revert()
    unknown = dataclasses.replace(named.edits[0], make=named_replacement("y xx")(ten_times))
    with raises(PatchError, ":double", "would ignore: x", code="not-applied"):
        registry(dataclasses.replace(named, edits=(unknown,))).apply(["one"])


def test_foreign_wrappers_are_refused(hosts: Hosts) -> None:
    host, _ = hosts
    target, original = f"{host.__name__}:double", host.double
    doubling = patch("one", target)
    first, second = registry(doubling), registry(doubling)
    first.apply(["one"])
    with raises(PatchError, "'one'", f"{hosts[0].__name__}:double", code="not-applied"):
        second.apply(["one"])
    first.revert()
    # functools.wraps makes the wrapper's source read as the original's: a fingerprint by itself would accept it.
    host.double = adding(1)(original)
    assert fingerprint(target) == doubling.edits[0].fingerprints[0]
    with pytest.raises(PatchError, match=r":double .* \(.*throwaway.py:\d+\)"):
        first.apply(["one"])
    host.double = original


def test_drift_is_reported_and_not_overwritten(hosts: Hosts) -> None:
    host, user = hosts
    reg = registry(patch("one", f"{host.__name__}:double"))
    reg.apply(["one"])
    ours, host.double = host.double, adding(1)(host.double)
    for code, action in (
        ("not-applied", lambda: reg.apply(["one"])),
        ("not-reverted", lambda: reg.revert(["one"])),
        ("not-in-place", reg.verify),
    ):
        with raises(PatchError, "one", ":double", code=code):
            action()
    assert states(reg) == {"one": "lost"}
    host.double = ours
    user.renamed = ours.__wrapped__  # a module that got the original later
    with raises(PatchError, f"one: {user.__name__}.renamed", code="not-in-place"):
        reg.verify()
    reg.revert()


@functools.cache
def guarded() -> dict[types.CodeType, int | None]:
    """The code of :func:`exchange` and its callers, with the line that takes the lock."""
    locks = {}
    for function in (Registry.apply, Registry.revert, exchange, symbols._put):
        lines, first = inspect.getsourcelines(function)
        locks[function.__code__] = next((first + at for at, line in enumerate(lines) if "with _LOCK" in line), None)
    return locks


def interrupted(call: Callable[[], object], number: int) -> bool:
    """Ctrl-C before the ``number``-th instruction of :func:`guarded`, ``with`` left out; False: none."""
    codes, seen = guarded(), 0

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lineno != codes[frame.f_code]:
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame when tracing starts
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        # A tracing function can raise where CPython's exception table has no entry, and `with` then leaves the lock held.
        while machinery._LOCK._is_owned():  # type: ignore[attr-defined]
            machinery._LOCK.release()
    return False


def test_ctrl_c_at_every_instruction_leaves_all_patches_or_none(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host, user = hosts
    targets = ("double", "Host.static")
    reg = registry(*(patch(target, f"{host.__name__}:{target}") for target in targets))
    monkeypatch.setattr(symbols, "sys", types.SimpleNamespace(modules={module.__name__: module for module in hosts}))

    def patched() -> set[bool]:
        functions = (host.double, user.renamed, host.Host.static)
        return {symbols.MARK in vars(value) for value in functions}

    for change, back in ((reg.apply, reg.revert), (reg.revert, reg.apply)):
        ends: list[set[bool]] = []
        while interrupted(lambda change=change: change(targets), len(ends) + 1):  # type: ignore[misc]
            ends.append(patched())
            assert set(states(reg).values()) == ({"applied"} if ends[-1] == {True} else {"not applied"})
            reg.verify()
            if ends[-1] == {change == reg.apply}:
                back(targets)
        assert len(ends) > 100
        assert sorted({tuple(end) for end in ends}) == [(False,), (True,)], "before the exchange, and after it"
    reg.revert()


FORK = """
    import os, sys, threading, time
    from tests.patches.throwaway import patch, registry

    begun, end = threading.Event(), threading.Event()

    def make(original):
        begun.set()
        end.wait(60)
        return lambda: original()

    reg = registry(patch("slow", "throwaway_module:f", make=make))
    thread = threading.Thread(target=reg.apply, args=(["slow"],))
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(7 if reg.status()[0]["state"] == "not applied" else 1)
    until = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, 9)
    end.set()
    thread.join()
    print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", reg.status()[0]["state"])
"""


def test_a_fork_while_another_thread_patches_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "throwaway_module.py").write_text(ONE)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = forks.run(["-c", textwrap.dedent(FORK)], PYTHONPATH=paths)
    assert done.stdout.split() == ["7", "applied"], done.stderr
