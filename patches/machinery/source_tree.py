"""The files of a Megatron tree, read without importing them: a module's path, and the source text of a symbol."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megacpp_mcore.patches.machinery.symbols import Refusal

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PACKAGE_INFO = "megatron.core.package_info"


@dataclass(frozen=True)
class SourceTree:
    """Python files below some folders, looked up like the import system: the first folder that has one wins.

    Attributes:
        roots: the folders that contain top-level packages.
    """

    roots: tuple[Path, ...]
    _parsed: dict[str, tuple[list[str], ast.Module]] = field(default_factory=dict, compare=False, repr=False)

    def file(self, module: str) -> Path:
        """Return the file of ``module``.

        Raises:
            Refusal: ``target not found``.
        """
        folders: Sequence[Path] = self.roots
        *packages, last = module.split(".")
        for part in packages:
            # Folders without __init__.py are portions of a namespace package; a regular package ends the search.
            portions = [folder / part for folder in folders if (folder / part).is_dir()]
            regular = [portion for portion in portions if (portion / "__init__.py").is_file()]
            folders = regular[:1] or portions
        for folder in folders:
            for file in (folder / last / "__init__.py", folder / f"{last}.py"):
                if file.is_file():
                    return file
        places = ", ".join(str(root) for root in self.roots[:3]) + (", …" if len(self.roots) > 3 else "")
        raise Refusal("target not found", f"no file of the module {module} in {places}")

    def texts(self, target: str) -> list[str]:
        """Return the source of every definition of ``target`` (``module:attr`` or ``module:Class.attr``), in file order.

        Each text equals ``inspect.getsource`` of the imported function or class. There are several if alternatives
        are defined under ``if`` or ``try``.

        Raises:
            Refusal: ``target not found``, or ``target changed`` if the file does not parse as Python.
        """
        lines, _ = self.parse(target.partition(":")[0])
        return [_text(lines, node) for node in self.definitions(target)]

    def definitions(self, target: str) -> list[Definition]:
        """Return the syntax of every definition of ``target``; see :meth:`texts`."""
        module, _, path = target.partition(":")
        *classes, attribute = path.split(".")
        owners: list[ast.Module | ast.ClassDef] = [self.parse(module)[1]]
        for name in classes:
            owners = [node for node in _defined(owners, name) if isinstance(node, ast.ClassDef)]
            if not owners:
                raise Refusal("target not found", f"{target} was not found: {module} has no class {name}")
        found = _defined(owners, attribute)
        if not found:
            place = ".".join([module, *classes])
            raise Refusal("target not found", f"{target} was not found: {place} defines no {attribute}")
        return found

    def version(self) -> str | None:
        """Return the version in ``megatron/core/package_info.py``, without the commit; None if it cannot be read.

        The file is parsed, not run, since running it starts git.
        """
        try:
            text = "".join(self.parse(PACKAGE_INFO)[0])
        except Refusal:
            return None
        found = dict(re.findall(r"""^([A-Z_]+) = ["']?(\w*)["']?\s*(?:#.*)?$""", text, re.MULTILINE))
        numbers = [found.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(numbers) + found.get("PRE_RELEASE", "") if all(map(str.isdecimal, numbers)) else None

    def parse(self, module: str) -> tuple[list[str], ast.Module]:
        """Return the lines and the syntax tree of ``module``.

        Raises:
            Refusal: ``target not found``, or ``target changed`` if the file does not parse as Python.
        """
        if module not in self._parsed:
            try:
                with tokenize.open(self.file(module)) as stream:
                    lines = stream.readlines()
                # As in linecache, the last line also ends in a newline.
                lines[-1:] = [line.removesuffix("\n") + "\n" for line in lines[-1:]]
                self._parsed[module] = (lines, _syntax("".join(lines)))
            except (OSError, SyntaxError, ValueError) as error:
                raise Refusal("target changed", f"{module} cannot be read as Python: {error}") from error
        return self._parsed[module]


@functools.lru_cache(1024)
def _syntax(text: str) -> ast.Module:
    """Parse a file once for all trees that have it; nobody changes what is returned."""
    return ast.parse(text)


def _defined(owners: Sequence[ast.Module | ast.ClassDef], name: str) -> list[Definition]:
    return [node for owner in owners for node in nodes(owner) if isinstance(node, Definition) and node.name == name]


def nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a module or class body, including those under ``if`` and ``try``, without inner scopes."""
    for node in ast.iter_child_nodes(body):
        yield node
        if not isinstance(node, Definition | ast.Lambda):
            yield from nodes(node)


def _text(lines: Sequence[str], node: Definition) -> str:
    """Return the source of ``node`` with its decorators, with the same extent as in ``inspect``."""
    first = min(part.lineno for part in (node, *node.decorator_list)) - 1
    return "".join(inspect.getblock(lines[first:]))
