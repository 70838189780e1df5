"""Patches of throw-away modules, for the tests of the registry and of the hook."""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.patches.machinery.record import Edit, Patch
from megacpp_mcore.patches.machinery.registry import Registry
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import digest
from tests.trees import WORDS

VERSION = SourceTree.of_process().version()
ONE = "def f(x):\n    return x + 1\n"
USER = "from PKG.a import f\n\ndef use(x):\n    return f(x)\n"
Modules = Callable[..., list[str]]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Write modules ``a="source", …`` of a fresh package, where ``PKG`` stands for its name; returns their full names."""
    package = f"throwaway_{tmp_path.name}"
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
    # One with a hook stays, and must then be idle.
    assert [it for it in left if not isinstance(it, Registry) or "armed" in states(it).values()] == []


def adding(amount: int) -> Callable[[Any], Any]:
    """Makes a replacement that calls the original and adds to its result."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + amount

        return replacement

    return make


def patch(name: str, *targets: str, make: Callable[[Any], Any] | None = None, **fields: Any) -> Patch:
    """A patch of the modules as they are on the disk; nothing is imported."""
    tree = SourceTree(tuple(map(Path, sys.path)))
    fingerprints = fields.pop("fingerprints", None)
    edits = tuple(
        Edit(target=target, fingerprints=fingerprints or (digest(tree.texts(target)[0]),), make=make or adding(100))
        for target in targets
    )
    return Patch(**{"name": name, "edits": edits, **WORDS, **fields})


def registry(*patches: Patch) -> Registry:
    return Registry(patches)


def states(reg: Registry) -> dict[str, str]:
    return {row["name"]: row["state"] for row in reg.status()}
