"""The patch registry: collects named patches, checks every one of them, then applies or reverts them as a whole.

One patch lives in one file of this folder and is one module-level record::

    PATCH = Patch(
        name="mtp-shared-block",
        fixes="...", source="...", seam="...", leaves_alone="...", retire_when="...",
        megatron_versions=">=0.19,<0.20",
        edits=(
            Edit(
                target="megatron.training.models.gpt:mtp_block_spec",
                fingerprints={"0.19.1": "<sha256>", "0.19.2": "<sha256>"},
                make=lambda original: ...,  # builds the replacement, usually a closure under functools.wraps(original)
            ),
        ),
    )

and its module's name is listed in ``_PATCH_MODULES`` below. ``python -c "from megacpp_mcore.patches.registry import
fingerprint; print(fingerprint('module:Class.attr'))"`` prints the SHA-256 to put down for the installed Megatron.

Importing this module, or a patch's module, changes nothing; only :meth:`Registry.apply` does.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.symbols import (
    ATOMS,
    MARK,
    Move,
    Refusal,
    Slot,
    digest,
    exchange,
    holders,
    overlap,
    refuse_wrapped,
    resolve,
    source_text,
)

logger = logging.getLogger(__name__)

_PATCH_MODULES: tuple[str, ...] = ("mtp_shared_block",)
"""Modules of this package that hold a ``PATCH``, in the order in which ``patch list`` shows them."""

# One lock for the whole process: two registries still patch the same modules. Forking waits for a change under way,
# so that a child never starts with half of a patch or with a lock that nobody will release.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One changed symbol of a patch.

    Attributes:
        target: dotted path ``module:attr`` or ``module:Class.attr``, defined there and not inherited.
        fingerprints: megatron-core version (``"0.19.2"``) to the SHA-256 of the target's source in that version.
        make: called with the original, returns the replacement. For a static or class method it is given the plain
            function, and the wrapping is put back; for a property it is given, and must return, a property. It has to
            build a new object on each call, and to reach the original through its argument only.
    """

    target: str
    fingerprints: Mapping[str, str]
    make: Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", self.target):
            raise PatchError(f"patch target {self.target!r} is not of the form 'module:attr' or 'module:Class.attr'")
        if not self.fingerprints:
            raise PatchError(f"patch target {self.target}: give the fingerprint of at least one megatron-core version")
        for version, sha256 in self.fingerprints.items():
            if not re.fullmatch(r"[0-9a-f]{64}", sha256):
                raise PatchError(
                    f"patch target {self.target}: {sha256!r} ({version}) is not a SHA-256 in lower-case hex"
                )
        object.__setattr__(self, "fingerprints", types.MappingProxyType(dict(self.fingerprints)))


@dataclass(frozen=True, kw_only=True)
class Patch:
    """What one patch is, in words and in symbols.

    Attributes:
        name: lower-case words joined by ``-``.
        fixes: what goes wrong without it.
        source: upstream issue, or file and version, that the fix is about.
        megatron_versions: the megatron-core range it is for, as in a requirement (``">=0.19,<0.20"``).
        edits: the symbols it replaces.
        seam: why it acts at that place and not at another.
        leaves_alone: what it deliberately does not touch.
        retire_when: what has to happen upstream for it to go.
        requires: names of patches without which it is wrong.
        conflicts: names of patches it cannot share a process with.
    """

    name: str
    fixes: str
    source: str
    megatron_versions: str
    edits: tuple[Edit, ...]
    seam: str
    leaves_alone: str
    retire_when: str
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise PatchError(f"patch name {self.name!r} must be lower-case words joined by '-'")
        for attribute in ("fixes", "source", "seam", "leaves_alone", "retire_when"):
            if not getattr(self, attribute).strip():
                raise PatchError(f"patch {self.name}: {attribute} is empty; say it, an operator has to judge by it")
        if not self.edits:
            raise PatchError(f"patch {self.name} has no edits")
        try:
            SpecifierSet(self.megatron_versions)
        except InvalidSpecifier as error:
            raise PatchError(
                f"patch {self.name}: {self.megatron_versions!r} is not a version range: {error}"
            ) from error


@dataclass(frozen=True)
class Applied:
    """What :meth:`Registry.apply` did: the patches it put in place, and those that already were."""

    applied: tuple[str, ...]
    already: tuple[str, ...]


@dataclass(frozen=True)
class _Change:
    """One checked edit: the slot with its original, and the replacement built for it."""

    patch: str
    slot: Slot
    replacement: Any
    raw_replacement: Any
    fingerprint: str
    version: str
    # (module name, attribute) pairs that held the replacement before it was applied: its home, no import of the target
    homes: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    def in_place(self) -> bool:
        """Whether the target, looked up anew, holds the replacement."""
        module = sys.modules.get(self.slot.target.partition(":")[0])
        return module is self.slot.owners[0] and vars(self.slot.owner).get(self.slot.attribute) is self.raw_replacement


def fingerprint(target: str) -> str:
    """The SHA-256 (hex) of the source text of ``target`` (``module:attr`` or ``module:Class.attr``) as installed.

    Raises:
        PatchError: there is no such symbol, or its source cannot be read.
    """
    try:
        return digest(source_text(resolve(target)))
    except Refusal as refusal:
        raise PatchError(str(refusal)) from refusal


def megatron_core_version() -> str:
    """The version of the megatron-core that this process imports, without its ``+commit`` part.

    Raises:
        PatchError: megatron-core cannot be imported.
    """
    try:
        found = importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise PatchError(f"megatron-core cannot be imported ({error}); install megatron-core>=0.19,<0.20") from error
    return Version(found).public


class Registry:
    """A set of patches, and which of them are in place in this process.

    Args:
        patches: the records; names must be unique, and ``requires`` and ``conflicts`` must name patches of this set.
        version: returns the megatron-core version to check against (called when something is to be applied).

    Raises:
        PatchError: two patches share a name, or one refers to a patch that is not in the set.
    """

    def __init__(self, patches: Iterable[Patch], version: Callable[[], str] = megatron_core_version) -> None:
        self._patches: dict[str, Patch] = {}
        self._changes: dict[str, tuple[_Change, ...]] = {}
        self._version = version
        for patch in patches:
            if patch.name in self._patches:
                raise PatchError(f"two patches are called {patch.name!r}; names must be unique")
            self._patches[patch.name] = patch
        for patch in self._patches.values():
            for other in (*patch.requires, *patch.conflicts):
                if other not in self._patches:
                    raise PatchError(f"patch {patch.name} refers to {other!r}, which is not a patch of this registry")

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches, in the order in which they were given."""
        return tuple(self._patches.values())

    def apply(self, names: Iterable[str]) -> Applied:
        """Put the named patches in place: all of them, or none.

        Range, target, fingerprint, conflicts and requirements of every patch are checked, and every replacement is
        built, before the first change. Afterwards each module in ``sys.modules`` that had imported an original by name
        holds its replacement. References that are not module attributes (a default argument, a ``ModuleSpec`` made
        earlier, a bound method that was stored) are beyond the reach of any patch: choose a seam that has none.

        Raises:
            PatchError: with every problem that was found; nothing is changed.
        """
        with _LOCK:
            wanted = self._select(names)
            already = [patch for patch in wanted if patch.name in self._changes]
            fresh = [patch for patch in wanted if patch.name not in self._changes]
            problems = [problem for patch in already for problem in self._drift(patch.name)]
            problems += self._relation_problems(fresh)
            changes, found = self._plan(fresh)
            problems += found
            if problems:
                raise PatchError(_listing("no patch was applied", problems))
            moves = [
                Move(
                    owner=change.slot.owner,
                    attribute=change.slot.attribute,
                    old_raw=change.slot.raw,
                    new_raw=change.raw_replacement,
                    old=change.slot.value,
                    new=change.replacement,
                    homes=frozenset(),
                )
                for change in changes
            ]
            exchange(moves, "no patch was applied")
            for patch in fresh:
                self._changes[patch.name] = tuple(change for change in changes if change.patch == patch.name)
            for patch in fresh:  # when all are recorded: a handler of the log may raise
                targets = ", ".join(edit.target for edit in patch.edits)
                _log_on_rank_0(f"patch {patch.name} applied to {targets} (megatron-core {changes[0].version})")
        return Applied(tuple(patch.name for patch in fresh), tuple(patch.name for patch in already))

    def revert(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Take the named patches (all that are applied, if ``None``) out again, in any order; all of them, or none.

        Every target, and every import of it by name, holds the very object it held before.

        Returns:
            The patches that were reverted; a patch that was not applied is not among them.

        Raises:
            PatchError: a name is not known, or a target meanwhile holds something else; nothing is changed.
        """
        with _LOCK:
            wanted = [self._patches[name] for name in self._changes] if names is None else self._select(names)
            applied = [patch.name for patch in wanted if patch.name in self._changes]
            problems = [problem for name in applied for problem in self._drift(name)]
            if problems:
                raise PatchError(_listing("no patch was reverted", problems))
            changes = [change for name in applied for change in self._changes[name]]
            moves = [
                Move(
                    owner=change.slot.owner,
                    attribute=change.slot.attribute,
                    old_raw=change.raw_replacement,
                    new_raw=change.slot.raw,
                    old=change.replacement,
                    new=change.slot.value,
                    homes=change.homes,
                )
                for change in changes
            ]
            exchange(moves, "no patch was reverted")
            for name in applied:
                del self._changes[name]
            for name in applied:
                _log_on_rank_0(f"patch {name} reverted")
            for name in self._changes:
                if lacking := sorted(set(self._patches[name].requires) & set(applied)):
                    logger.warning("patch %s is still applied but requires %s", name, ", ".join(lacking))
            return tuple(applied)

    def verify(self) -> None:
        """Check that every applied patch is in place and that no module holds an original.

        Raises:
            PatchError: with every place where that is not so.
        """
        with _LOCK:
            problems = [problem for name in self._changes for problem in self._drift(name)]
            for name, changes in self._changes.items():
                held = holders(
                    {
                        id(change.slot.value): frozenset()
                        for change in changes
                        if not isinstance(change.slot.value, ATOMS)
                    }
                )
                problems += [f"{name}: {module}.{attribute} holds the original" for module, _, attribute, _ in held]
            if problems:
                raise PatchError(_listing("the patches are not in place", problems))

    def status(self) -> list[dict[str, Any]]:
        """One JSON-ready record a patch, for receipts; its state is ``applied``, ``not applied`` or ``lost``.

        Imports nothing. ``lost`` means that a target of an applied patch holds something else now.
        """
        with _LOCK:
            return [self._record(patch) for patch in self._patches.values()]

    def examine(self, name: str) -> tuple[str, str]:
        """What would become of ``name`` in this environment; imports the target's module and changes nothing.

        Returns:
            ``(state, reason)``; the state is one of ``applied``, ``lost``, ``not applied`` (it can be), ``version not
            supported``, ``target not found``, ``target changed``, ``target already wrapped``.

        Raises:
            PatchError: there is no such patch, or no megatron-core.
        """
        with _LOCK:
            (patch,) = self._select([name])
            if name in self._changes:
                drift = self._drift(name)
                return ("lost", "; ".join(drift)) if drift else ("applied", "")
            try:
                version = self._version()
                for edit in patch.edits:
                    _check(patch, edit, version)
            except Refusal as refusal:
                return refusal.state, str(refusal)
            return "not applied", ""

    def _select(self, names: Iterable[str]) -> list[Patch]:
        if isinstance(names, str):
            raise PatchError(f"expected a list of patch names, found the text {names!r}")
        chosen = list(dict.fromkeys(names))
        unknown = [name for name in chosen if name not in self._patches]
        if unknown:
            known = list(self._patches)
            problems = []
            for name in unknown:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known) or 'none'}"
                problems.append(f"there is no patch {name!r}; {hint}")
            raise PatchError(_listing("nothing was changed", problems))
        return [self._patches[name] for name in chosen]

    def _relation_problems(self, fresh: Sequence[Patch]) -> list[str]:
        together = {patch.name for patch in fresh} | set(self._changes)
        problems = []
        for patch in fresh:
            for other in patch.requires:
                if other not in together:
                    problems.append(f"{patch.name} requires {other}: name it as well")
        for name in together:
            for other in self._patches[name].conflicts:
                if other in together:
                    problems.append(f"{name} conflicts with {other}: choose one of them")
        return sorted(problems)

    def _plan(self, fresh: Sequence[Patch]) -> tuple[list[_Change], list[str]]:
        """Check and build every edit of ``fresh``; returns the changes and all problems, and touches nothing."""
        changes: list[_Change] = []
        problems: list[str] = []
        if not fresh:
            return changes, problems
        version = self._version()
        standing = [change.slot.target for applied in self._changes.values() for change in applied]
        for patch in fresh:
            for edit in patch.edits:
                taken = [target for target in standing if _nested(edit.target, target)]
                try:
                    if taken:
                        raise Refusal("target already wrapped", f"{taken[0]} is already changed by an applied patch")
                    change = _build(patch, edit, version)
                except Refusal as refusal:
                    problems.append(f"{patch.name}: {refusal}")
                    continue
                problems += [
                    f"{patch.name} and {other.patch} both change {edit.target} or a part of it: choose one of them"
                    for other in changes
                    if overlap(change.slot, other.slot)
                ]
                changes.append(change)
        return changes, problems

    def _drift(self, name: str) -> list[str]:
        return [
            f"{name} was applied to {change.slot.target}, which meanwhile holds something else "
            "(another patcher, or the module was imported anew); undo that first"
            for change in self._changes[name]
            if not change.in_place()
        ]

    def _record(self, patch: Patch) -> dict[str, Any]:
        changes = self._changes.get(patch.name, ())
        state = "not applied" if not changes else "lost" if self._drift(patch.name) else "applied"
        return {
            "name": patch.name,
            "state": state,
            "fixes": patch.fixes,
            "source": patch.source,
            "megatron_versions": patch.megatron_versions,
            "targets": [edit.target for edit in patch.edits],
            "megatron_core": changes[0].version if changes else None,
            "fingerprints": {change.slot.target: change.fingerprint for change in changes},
        }


@functools.cache
def default() -> Registry:
    """The registry of this package's own patches, made on the first call."""
    modules = (importlib.import_module(f"megacpp_mcore.patches.{name}") for name in _PATCH_MODULES)
    return Registry([module.PATCH for module in modules])


def _nested(one: str, other: str) -> bool:
    """Whether two targets are the same, or one is an attribute of the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _check(patch: Patch, edit: Edit, version: str) -> tuple[Slot, str]:
    """Range, presence, foreign wrappers and fingerprint of one edit; returns the slot and its fingerprint."""
    try:
        supported = SpecifierSet(patch.megatron_versions).contains(Version(version), prereleases=True)
    except InvalidVersion as error:
        raise Refusal("version not supported", f"megatron-core calls itself {version!r}: {error}") from error
    if not supported:
        raise Refusal(
            "version not supported", f"it is for megatron-core {patch.megatron_versions}, and {version} is here"
        )
    slot = resolve(edit.target)
    text = source_text(slot)
    refuse_wrapped(slot, text)
    found = digest(text)
    known = edit.fingerprints
    # A version that nobody listed may still have, to the byte, a source that was.
    expected = {known[version]} if version in known else set(known.values())
    if found not in expected:
        raise Refusal(
            "target changed",
            f"the source of {edit.target} in megatron-core {version} has SHA-256 {found}, expected "
            f"{' or '.join(sorted(expected))}: it is not the code this patch was written for (a local edit, or a "
            "version that was not tested); leave the patch out, or review the target and add its fingerprint",
        )
    return slot, found


def _build(patch: Patch, edit: Edit, version: str) -> _Change:
    slot, found = _check(patch, edit, version)
    original = slot.value
    try:
        replacement = edit.make(original)
    except Exception as error:
        raise Refusal("target changed", f"building the replacement of {edit.target} failed: {error!r}") from error
    if replacement is original:
        raise Refusal("target changed", f"the replacement of {edit.target} is the original itself")
    if callable(original) != callable(replacement) or isinstance(original, property) != isinstance(
        replacement, property
    ):
        raise Refusal(
            "target changed",
            f"the replacement of {edit.target} is a {type(replacement).__name__}, "
            f"which cannot stand in for a {type(original).__name__}",
        )
    if not isinstance(original, ATOMS):
        _keep_original(edit.target, replacement, original, patch.name)
    raw = slot.raw
    raw_replacement = type(raw)(replacement) if isinstance(raw, staticmethod | classmethod) else replacement
    homes = frozenset((module, name) for module, _, name, _ in holders({id(replacement): frozenset()}))
    return _Change(patch.name, slot, replacement, raw_replacement, found, version, homes)


def _keep_original(target: str, replacement: Any, original: Any, patch: str) -> None:
    """Leave ``original`` on ``replacement.__wrapped__`` (on the getters, for a property) and mark the replacement."""
    if isinstance(original, property):
        replacement, original = replacement.fget, original.fget
    try:
        if getattr(replacement, "__wrapped__", original) is not original:
            raise Refusal("target changed", f"the replacement of {target} has a __wrapped__ that is not the original")
        replacement.__wrapped__ = original
        setattr(replacement, MARK, patch)
    except (AttributeError, TypeError):
        # Plain data (a dict, a ModuleSpec with slots) cannot carry attributes; the registry itself keeps its original.
        if callable(original):
            raise Refusal("target changed", f"the replacement of {target} cannot carry __wrapped__") from None


def _listing(summary: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{summary}: {problems[0]}"
    return f"{summary}, {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def _log_on_rank_0(message: str) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = str(torch.distributed.get_rank())
    else:
        rank = os.environ.get("RANK") or "0"
    if rank == "0":
        logger.info(message)
