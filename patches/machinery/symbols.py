"""Symbols of other packages: find one, read its source, and replace it in every module that imported it by name."""

from __future__ import annotations

import ast
import collections
import hashlib
import importlib
import inspect
import itertools
import operator
import sys
import textwrap
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import PatchError

MARK = "__megacpp_patch__"
"""Attribute set on every replacement, by which another copy of this package recognises it."""
_BELOW_MEGATRON = frozenset(("mpmath", "networkx", "numpy", "sympy", "torch", "triton"))
"""Packages that import nothing of it, and hold four in five of all names in a process."""


class Refusal(PatchError):
    """Why one target cannot be patched: ``state`` is machine-readable, ``text`` the source that was found instead, if any."""

    def __init__(self, state: str, message: str, text: str | None = None) -> None:
        super().__init__(message, code=state.replace(" ", "-"))
        self.state, self.text = state, text


@dataclass(frozen=True)
class Slot:
    """A resolved target: the symbol's owner and its current value."""

    target: str
    owner: Any  # the module or class that holds the symbol
    attribute: str
    raw: Any  # as stored, including any staticmethod or classmethod wrapper
    value: Any  # without one
    text: str  # its source


@dataclass(frozen=True)
class Change:
    """One checked edit: the slot with its original, and the replacement to store there."""

    patch: str
    slot: Slot
    replacement: Any
    fingerprint: str
    version: str  # of the Megatron that it was checked against

    @property
    def is_replaced(self) -> bool:
        """Whether the replacement is another object than the original."""
        return self.replacement is not self.slot.raw

    def in_place(self) -> bool:
        """Return whether the target, also of a module that has run or was imported again, holds the replacement, if any."""
        module, _, path = self.slot.target.partition(":")
        current: Any = sys.modules.get(module)
        for name in path.split("."):
            current = getattr(current, "__dict__", {}).get(name)
        return not self.is_replaced or current is self.replacement


def digest(text: str) -> str:
    """Return the SHA-256 of ``text``, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def resolve(target: str) -> Slot:
    """Import the module of ``module:attr`` or ``module:Class.attr`` and find the function or class in it.

    Raises:
        Refusal: ``target not found``, with the failing step; ``target changed``, its source cannot be read.
    """
    module_name, _, path = target.partition(":")
    try:
        # A module that exists is not imported again: another thread may be importing it while waiting for the registry's lock.
        owner: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    except Exception as error:  # with a broken driver a library raises RuntimeError or OSError
        reason = f"importing {module_name} failed: {type(error).__name__}: {error}"
        raise Refusal("target not found", f"{target} was not found: {reason}") from error
    *classes, attribute = path.split(".")
    for name in classes:
        inner = vars(owner).get(name)
        if not isinstance(inner, type):
            raise Refusal("target not found", f"{target} was not found: there is no class {name} in {_label(owner)}")
        owner = inner
    if attribute not in vars(owner):
        bases = [base for base in getattr(owner, "__mro__", ())[1:] if attribute in vars(base)]
        where = f"; it is inherited from {_label(bases[0])}, name it there" if bases else ""
        raise Refusal("target not found", f"{target} was not found: {_label(owner)} defines no {attribute}{where}")
    raw = vars(owner)[attribute]
    try:
        return Slot(target, owner, attribute, raw, _unwrapped(raw), inspect.getsource(_unwrapped(raw)))
    except (OSError, TypeError) as error:
        raise Refusal("target changed", f"the source of {target} cannot be read: {error}") from error


def refuse_wrapped(slot: Slot) -> None:
    """Refuse a target already replaced with a ``functools.wraps`` wrapper, whose text is still the original's source.

    Raises:
        Refusal: ``target already wrapped``.
    """
    names = getattr(slot.value, "__dict__", {})
    if MARK in names:
        state = f"{slot.target} already carries the patch {names[MARK]!r}; revert that one first"
        raise Refusal("target already wrapped", state)
    if "__wrapped__" not in names:
        return
    definition = ast.parse(textwrap.dedent(slot.text)).body[0]
    decorators = {ast.unparse(decorator) for decorator in getattr(definition, "decorator_list", [])}
    if decorators <= {"staticmethod", "classmethod"}:  # which leave no wrapper behind; any other is upstream's own
        code = getattr(slot.value, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        state = f"{slot.target} was wrapped by somebody else{place}; take that wrapper away first"
        raise Refusal("target already wrapped", state)


def build(patch: str, slot: Slot, make: Any, fingerprint: str, version: str) -> Change:
    """Build the replacement for the symbol in ``slot``, with the original on its ``__wrapped__``; without ``make``, none."""
    if make is None:
        return Change(patch, slot, slot.raw, fingerprint, version)
    replacement = make(slot.value)
    replacement.__wrapped__ = slot.value
    setattr(replacement, MARK, patch)
    if isinstance(slot.raw, staticmethod | classmethod):
        replacement = type(slot.raw)(replacement)
    return Change(patch, slot, replacement, fingerprint, version)


def exchange(changes: Sequence[Change], owner: Any, state: Mapping[str, Any], *, back: bool = False) -> None:
    """Put all replacements (``back``: all originals) in place, also in imports by name, and set ``state`` on ``owner``.

    All writes are one call into C: neither a signal's handler (Ctrl-C) nor another thread, nor its fork, comes between two.
    """
    new: dict[int, tuple[Any, Any]] = {}
    writes: list[tuple[Any, ...]] = [(vars(owner).update, state)]
    for change in (change for change in changes if change.is_replaced):
        old_raw, new_raw = (change.slot.raw, change.replacement)[:: -1 if back else 1]
        writes.append(_put(change.slot.owner, change.slot.attribute, new_raw))
        new[id(_unwrapped(old_raw))] = _unwrapped(old_raw), _unwrapped(new_raw)
    # A second pass finds what another thread has imported since the first.
    for _ in range(min(2, threading.active_count())):
        writes += [_put(module, attribute, new[key][1]) for module, attribute, key in holders(new)]
        collections.deque(itertools.starmap(operator.call, writes), maxlen=0)
        writes = []


def holders(wanted: Collection[int]) -> Iterator[tuple[Any, str, int]]:
    """Every ``(module, attribute, id)`` that holds one of the objects with the ``wanted`` ids, where Megatron can be."""
    ids = set(wanted)
    for path, module in list(sys.modules.items()) if ids else ():
        namespace = None if path.partition(".")[0] in _BELOW_MEGATRON else getattr(module, "__dict__", None)
        # Almost no module holds one; a single call into C, which no other thread's import interrupts, checks that.
        if isinstance(namespace, Mapping) and not ids.isdisjoint(map(id, namespace.values())):
            yield from ((module, name, id(value)) for name, value in list(namespace.items()) if id(value) in ids)


def _unwrapped(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _label(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def _put(owner: Any, attribute: str, value: Any) -> tuple[Any, ...]:
    """Return the C call that writes an attribute; neither a metaclass nor a lazy module type may act on it."""
    if isinstance(owner, type):
        return type.__setattr__, owner, attribute, value
    return vars(owner).__setitem__, attribute, value
