"""Symbols of other packages: find one, read its source, and exchange it at every module that imported it by name."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import PatchError

ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)
"""Types whose equal values may be one shared object: identity says nothing about who imported it."""

MARK = "__megacpp_patch__"
"""Set on every replacement, so that another copy of this package is recognised."""


@dataclass(frozen=True)
class Slot:
    """A resolved target: where the symbol lives and what is there now."""

    target: str
    owners: tuple[Any, ...]  # the module, then the classes on the way; the last one holds the symbol
    attribute: str
    raw: Any  # as stored, that is with staticmethod or classmethod around it

    @property
    def owner(self) -> Any:
        """The module or class whose attribute it is."""
        return self.owners[-1]

    @property
    def value(self) -> Any:
        """The symbol without the static or class method around it."""
        return self.raw.__func__ if isinstance(self.raw, staticmethod | classmethod) else self.raw


@dataclass(frozen=True)
class Move:
    """One step of an exchange: ``owner.attribute`` goes from ``old_raw`` to ``new_raw``, imports of ``old`` to ``new``.

    ``homes`` are the (module name, attribute) pairs that keep ``old``, because they are where it was defined.
    """

    owner: Any
    attribute: str
    old_raw: Any
    new_raw: Any
    old: Any
    new: Any
    homes: frozenset[tuple[str, str]]


class Refusal(Exception):
    """Why one target cannot be patched: ``state`` for machines, the message for people."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


def resolve(target: str) -> Slot:
    """Import the module of ``module:attr`` or ``module:Class.attr`` and find the symbol in it.

    Raises:
        Refusal: ``target not found``, saying at which step.
    """
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:  # a library that a broken driver keeps from loading raises RuntimeError or OSError
        raise Refusal(
            "target not found",
            f"{target} was not found: importing {module_name} failed: {type(error).__name__}: {error}",
        ) from error
    *classes, attribute = path.split(".")
    owners = [owner]
    for name in classes:
        inner = vars(owner).get(name)
        if not isinstance(inner, type):
            raise Refusal("target not found", f"{target} was not found: there is no class {name} in {_label(owner)}")
        owner = inner
        owners.append(owner)
    if attribute not in vars(owner):
        bases = [base for base in getattr(owner, "__mro__", ())[1:] if attribute in vars(base)]
        where = f"; it is inherited from {_label(bases[0])}, name it there" if bases else ""
        raise Refusal("target not found", f"{target} was not found: {_label(owner)} defines no {attribute}{where}")
    raw = vars(owner)[attribute]
    if isinstance(owner, types.ModuleType) and isinstance(raw, ATOMS):
        raise Refusal(
            "target not found", f"{target} is a plain {type(raw).__name__}: who imported it by name cannot be known"
        )
    return Slot(target, tuple(owners), attribute, raw)


def _label(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def source_text(slot: Slot) -> str:
    """The source text of what is in ``slot``; for plain data, of the assignments that define it.

    Raises:
        Refusal: ``target changed``, when there is no source to read.
    """
    value: Any = slot.value.fget if isinstance(slot.value, property) else slot.value
    try:
        if inspect.isroutine(value) or inspect.isclass(value) or hasattr(value, "__wrapped__"):
            return inspect.getsource(value)
        text = assigned_text(inspect.getsource(slot.owner), slot.attribute, of_class=isinstance(slot.owner, type))
    except (OSError, TypeError) as error:
        raise Refusal("target changed", f"the source of {slot.target} cannot be read: {error}") from error
    if not text:
        raise Refusal("target changed", f"no assignment to {slot.attribute} in the source of {_label(slot.owner)}")
    return text


def assigned_text(owner_source: str, attribute: str, *, of_class: bool) -> str:
    """The assignments to ``attribute`` in the source of a module, or of a class; empty when there is none."""
    owner_source = textwrap.dedent(owner_source)
    tree = ast.parse(owner_source)
    body: ast.AST = tree.body[0] if of_class else tree
    found = []
    for node in _statements(body):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(name, ast.Name) and name.id == attribute for name in targets):
            found.append(ast.get_source_segment(owner_source, node) or "")
    return "\n".join(found)


def _statements(body: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Assignments of a module or class body, those under ``if`` and ``try`` too, but none of an inner scope."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(node)


def refuse_wrapped(slot: Slot, text: str) -> None:
    """Refuse a target that somebody replaced by a ``functools.wraps`` wrapper: ``text`` still is the original's source.

    Raises:
        Refusal: ``target already wrapped``.
    """
    value = slot.value.fget if isinstance(slot.value, property) else slot.value
    owner_mark = getattr(value, "__dict__", {}).get(MARK)
    if owner_mark is not None:
        raise Refusal(
            "target already wrapped",
            f"{slot.target} already carries the patch {owner_mark!r}; revert that one first",
        )
    if "__wrapped__" not in getattr(value, "__dict__", {}):
        return
    definition = ast.parse(textwrap.dedent(text)).body[0]
    decorators = [ast.unparse(one) for one in getattr(definition, "decorator_list", [])]
    if not set(decorators) - {"staticmethod", "classmethod", "property"}:  # these wrap nothing that stays
        code = getattr(value, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise Refusal(
            "target already wrapped", f"{slot.target} was wrapped by somebody else{place}; take that wrapper away first"
        )


def overlap(one: Slot, other: Slot) -> bool:
    """Whether two slots are the same place, hold the same object, or one lies inside the class that is in the other."""
    if one.owner is other.owner and one.attribute == other.attribute:
        return True
    if one.value is other.value and not isinstance(one.value, ATOMS):
        return True
    return any(one.value is owner for owner in other.owners) or any(other.value is owner for owner in one.owners)


def digest(text: str) -> str:
    """The SHA-256 of ``text``, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def exchange(moves: Sequence[Move], failure: str) -> None:
    """Carry out all moves and rebind imports by name; on any failure everything is put back as it was.

    Raises:
        PatchError: ``failure`` and its cause.
    """
    done: list[tuple[Any, str, Any]] = []
    tracked = {id(move.old): move for move in moves if not isinstance(move.old, ATOMS)}
    homes = {key: move.homes for key, move in tracked.items()}
    try:
        for move in moves:
            done.append((move.owner, move.attribute, move.old_raw))
            _put(move.owner, move.attribute, move.new_raw)
        for _, holder, attribute, key in list(holders(homes)):
            done.append((holder, attribute, tracked[key].old))
            _put(holder, attribute, tracked[key].new)
        left = [f"{module}.{attribute}" for module, _, attribute, _ in holders(homes)]
        if left:
            raise PatchError(f"{', '.join(left)} could not be given the other object")
    except BaseException as error:
        lost = [place for owner, attribute, value in reversed(done) if (place := _put_back(owner, attribute, value))]
        if isinstance(error, Exception):
            end = f"{', '.join(lost)} could not be put back: restart the process" if lost else "everything was put back"
            raise PatchError(f"{failure}: {error}; {end}") from error
        raise


def holders(homes: Mapping[int, frozenset[tuple[str, str]]]) -> Iterator[tuple[str, Any, str, int]]:
    """Every ``(module name, module, attribute, id)`` in ``sys.modules`` that holds one of the objects with these ids.

    ``homes`` gives for each id the (module name, attribute) pairs to leave out.
    """
    if not homes:
        return
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, Mapping):
            continue
        for attribute, value in list(namespace.items()):
            if id(value) in homes and (module_name, attribute) not in homes[id(value)]:
                yield module_name, module, attribute, id(value)


def _put(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, types.ModuleType):
        # Not setattr: a lazy module type may act on it.
        vars(owner)[attribute] = value
    else:
        setattr(owner, attribute, value)


def _put_back(owner: Any, attribute: str, value: Any) -> str:
    """Undo one step and return nothing, or what could not be undone; an owner that refused the change has its old value."""
    with contextlib.suppress(Exception):
        _put(owner, attribute, value)
    return "" if getattr(owner, "__dict__", {}).get(attribute) is value else f"{owner!r}.{attribute}"
