"""The files of a Megatron tree, read without importing them: a module's path, and the source text of a symbol."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from megacpp_mcore.errors import CheckoutError
from megacpp_mcore.patches.machinery.symbols import Refusal
from megacpp_mcore.versions import CHECKOUT_TAG, MEGATRON_CORE

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class SourceTree:
    """Python files below some folders, looked up like the import system: the first folder that has one wins.

    Attributes:
        roots: the folders that contain top-level packages.
    """

    roots: tuple[Path, ...]

    @classmethod
    def of_process(cls) -> SourceTree:
        """Return the files from which this process imports Megatron; nothing is imported.

        Raises:
            CheckoutError: there is none.
        """
        # What is imported already first, then as an import would search: only a finder knows the folder of an editable
        # install, and with an empty path no other finder finds anything.
        specs = (finder.find_spec("megatron.core", []) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        finders = [part for spec in filter(None, specs) for part in spec.submodule_search_locations or ()]
        folders = [Path(part).parents[1] for part in getattr(sys.modules.get("megatron.core"), "__path__", ())]
        folders += [Path(part) for part in sys.path if isinstance(part, str)]  # as Python does
        tree = cls(tuple(dict.fromkeys([*folders, *(Path(part).parents[1] for part in finders)])))
        try:
            tree.file("megatron.core")
        except Refusal as refusal:
            other = next((root / "megatron" for root in tree.roots if (root / "megatron").is_dir()), None)
            raise CheckoutError(
                f"megatron-core is not installed here{f': {other} is another package' if other else ''}; install "
                f"megatron-core{MEGATRON_CORE}, or name a checkout"
            ) from refusal
        return tree

    def file(self, module: str) -> Path:
        """Return the file of ``module``.

        Raises:
            Refusal: ``target not found``.
        """
        places: Sequence[str] = [str(root.absolute()) for root in self.roots]
        spec = None
        for part in module.split("."):
            spec = PathFinder.find_spec(part, places)  # which imports nothing, as the name has no dot
            places = (spec and spec.submodule_search_locations) or ()
        if spec is None or spec.origin is None:
            roots = ", ".join(str(root) for root in self.roots[:3]) + (", …" if len(self.roots) > 3 else "")
            raise Refusal("target not found", f"no file of the module {module} in {roots}")
        return Path(spec.origin)

    def texts(self, target: str) -> list[str]:
        """Return the source of every definition of ``target`` (``module:attr`` or ``module:Class.attr``), in file order.

        Each text equals ``inspect.getsource`` of the imported function or class. There are several if alternatives
        are defined under ``if`` or ``try``.

        Raises:
            Refusal: ``target not found``, or ``target changed`` if the file does not parse as Python.
        """
        lines, _ = self.parse(target.partition(":")[0])
        parts = ((node, *node.decorator_list) for node in self.definitions(target))
        return ["".join(inspect.getblock(lines[min(part.lineno for part in group) - 1 :])) for group in parts]

    def definitions(self, target: str) -> list[Definition]:
        """Return the syntax of every definition of ``target``; see :meth:`texts`."""
        module, _, path = target.partition(":")
        *classes, attribute = path.split(".")
        owners: list[ast.Module | ast.ClassDef] = [self.parse(module)[1]]
        for name in classes:
            owners = [node for node in _defined(owners, name) if isinstance(node, ast.ClassDef)]
            if not owners:
                raise Refusal("target not found", f"{target} was not found: {module} has no class {name}")
        matches = _defined(owners, attribute)
        if not matches:
            place = ".".join([module, *classes])
            raise Refusal("target not found", f"{target} was not found: {place} defines no {attribute}")
        return matches

    def version(self) -> str:
        """Return the version in ``megatron/core/package_info.py``, without the commit.

        The file is parsed, not run, since running it starts git.

        Raises:
            Refusal: it cannot be read, or states none.
        """
        lines: list[str] = []
        with contextlib.suppress(Refusal):  # if the file is not Python, it is named below
            lines, _ = self.parse("megatron.core.package_info")
        constants = dict(re.findall(r"""^([A-Z_]+) = ["']?(\w*)["']?\s*(?:#.*)?$""", "".join(lines), re.MULTILINE))
        numbers = [constants.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
        if not all(map(str.isdecimal, numbers)):
            raise Refusal(
                "target changed",
                f"{self.file('megatron.core.package_info')} does not say which version this is (expected whole numbers MAJOR, "
                f"MINOR and PATCH); nothing was changed: restore that file, or check out a release such as {CHECKOUT_TAG}",
            )
        return ".".join(numbers) + constants.get("PRE_RELEASE", "")

    def parse(self, module: str) -> tuple[list[str], ast.Module]:
        """Return the lines and the syntax tree of ``module``.

        Raises:
            Refusal: ``target not found``, or ``target changed`` if the file does not parse as Python.
        """
        file = self.file(module)
        try:
            with tokenize.open(file) as stream:
                lines = stream.readlines()
            # As in linecache, the last line also ends in a newline.
            lines[-1:] = [line.removesuffix("\n") + "\n" for line in lines[-1:]]
            return lines, _syntax("".join(lines))
        except (OSError, SyntaxError, ValueError) as error:
            raise Refusal("target changed", f"{module} ({file}) cannot be read as Python: {error}") from error


@functools.lru_cache(1024)
def _syntax(text: str) -> ast.Module:
    """Parse each text only once; callers must not modify the tree."""
    return ast.parse(text)


def _defined(owners: Sequence[ast.Module | ast.ClassDef], name: str) -> list[Definition]:
    return [node for owner in owners for node in nodes(owner) if isinstance(node, Definition) and node.name == name]


def nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a module or class body, including those under ``if`` and ``try``, without inner scopes."""
    for node in ast.iter_child_nodes(body):
        yield node
        if not isinstance(node, Definition | ast.Lambda):
            yield from nodes(node)
