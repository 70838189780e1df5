"""The patch registry: collects named patches, checks every one of them, then applies or reverts them as a whole.

One patch lives in one file of the folder above and is one module-level record::

    PATCH = Patch(
        name="mtp-shared-block",
        fixes="...", source="...", seam="...", leaves_alone="...", retire_when="...", cost="...", gain="not measured",
        megatron_versions=">=0.19,<0.20",
        edits=(
            Edit.of(
                "megatron.training.models.gpt:mtp_block_spec",
                "<sha256>",
                lambda original: ...,  # builds the replacement, usually a closure under functools.wraps(original)
            ),
        ),
    )

(:mod:`.record` says what each field is) and its module's name is listed in ``_PATCH_MODULES`` below; :func:`fingerprint` gives
the SHA-256 to put down. Importing this module, or a patch's module, changes nothing; only :meth:`Registry.apply` does.

Threads and forks: a plan is made without any lock, since it imports modules and so may wait for other threads' imports; then,
under the one lock and with no import, it is carried out if nothing has changed meanwhile, and made anew if something has.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery.record import Edit, Patch, nested
from megacpp_mcore.patches.machinery.symbols import (
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
from megacpp_mcore.util.nearest import nearest

logger = logging.getLogger(__name__)

_PATCH_MODULES: tuple[str, ...] = (
    "spec_import",
    "dataset_helpers",
    "mtp_shared_block",
    "mla_core_attention",
    "dsa_index_cache",
    "dsa_indexer_memory",
    "dsa_graph_safety",
    "linear_cross_entropy",
    "hybrid_flops",
    "sp_norm_gradients",
    "checkpoint_hosts",
    "checkpoint_layout",
    "mixed_precision_optimizer",
    "torch_adam_resume",
    "output_layer_fusion",
)
"""Modules of this package that hold a ``PATCH``, in the order in which ``patch list`` shows them."""


class _Process:
    """What all registries of a process share, as they patch the same modules: the lock, and a count of the changes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changes = 0
        if hasattr(os, "register_at_fork"):
            # Forking waits for a change under way, so that a child never starts with half of a patch or with a lock that
            # nobody will release.
            os.register_at_fork(
                before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.lock.release
            )


_PROCESS = _Process()


@dataclass(frozen=True)
class Applied:
    """What :meth:`Registry.apply` did: the patches of which it put edits in place, and those where there was none to put."""

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

    def move(self) -> Move:
        """What puts the replacement in place."""
        slot = self.slot
        new = self.raw_replacement, self.replacement
        return Move(slot.owner, slot.attribute, slot.raw, new[0], slot.value, new[1], frozenset())

    def move_back(self) -> Move:
        """What takes the replacement out again, but for where it is at home."""
        slot = self.slot
        new = self.raw_replacement, self.replacement
        return Move(slot.owner, slot.attribute, new[0], slot.raw, new[1], slot.value, self.homes)

    def in_place(self) -> bool:
        """Whether the target, looked up anew, holds the replacement; a reload gives a module, which stays, new classes."""
        module, _, path = self.slot.target.partition(":")
        found = sys.modules.get(module)
        for owner, name in zip(self.slot.owners, path.split("."), strict=True):
            if found is not owner:
                return False
            found = vars(owner).get(name)
        return found is self.raw_replacement


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
        self._armed: dict[str, str] = {}
        self.version = version
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

    def apply(self, names: Iterable[str], *, imported: Callable[[str], bool] | None = None) -> Applied:
        """Put the named patches in place: all of them, or none.

        Range, target, fingerprint, conflicts and requirements of every patch are checked, and every replacement is
        built, before the first change. Afterwards each module in ``sys.modules`` that had imported an original by name
        holds its replacement. References that are not module attributes (a default argument, a ``ModuleSpec`` made
        earlier, a bound method that was stored) are beyond the reach of any patch: choose a seam that has none.

        Args:
            names: patches; of one that is in place in part, the rest is put in place.
            imported: says of a module whether it is there; given it, edits that are not due are left for a later call
                (:meth:`megacpp_mcore.patches.machinery.record.Patch.due`).

        Raises:
            PatchError: with every problem that was found; nothing is changed.
        """
        wanted = self.select(names)
        while (result := self._apply_once(wanted, imported)) is None:
            pass  # another thread, or an import that the plan made, changed something: plan anew
        return result

    def _apply_once(self, wanted: Sequence[Patch], imported: Callable[[str], bool] | None) -> Applied | None:
        """Plan and carry out, or nothing and None when something changed in between."""
        with _PROCESS.lock:
            seen = _PROCESS.changes
            fresh = {
                patch.name: edits
                for patch in wanted
                if (edits := self._missing(patch, patch.due(imported) if imported else patch.edits))
            }
            problems = [
                problem for patch in wanted if patch.name in self._changes for problem in self._drift(patch.name)
            ]
            problems += self._relation_problems(self.select(fresh))
            standing = self._standing(fresh)
        changes, found = self._plan(fresh, standing)
        with _PROCESS.lock:
            if seen != _PROCESS.changes:
                return None
            problems += found
            if problems:
                raise PatchError(listing("no patch was applied", problems))
            if fresh:
                self._put_in_place(fresh, changes)
            already = tuple(patch.name for patch in wanted if patch.name in self._changes and patch.name not in fresh)
        return Applied(tuple(fresh), already)

    def _missing(self, patch: Patch, edits: Iterable[Edit]) -> tuple[Edit, ...]:
        """Those of the patch's ``edits`` that are not in place."""
        there = {change.slot.target for change in self._changes.get(patch.name, ())}
        return tuple(edit for edit in edits if edit.target not in there)

    def _put_in_place(self, fresh: Mapping[str, Sequence[Edit]], changes: Sequence[_Change]) -> None:
        exchange([change.move() for change in changes], "no patch was applied")
        _PROCESS.changes += 1
        for name in fresh:
            new = tuple(change for change in changes if change.patch == name)
            self._changes[name] = self._changes.get(name, ()) + new
        for name, edits in fresh.items():  # when all are recorded: a handler of the log may raise
            targets = ", ".join(edit.target for edit in edits)
            origin = f" by the hook in {self._armed[name]}" if name in self._armed else ""
            announce(f"patch {name} applied to {targets} (megatron-core {changes[0].version}){origin}")

    def arm(self, names: Iterable[str], origin: str) -> tuple[str, ...]:
        """Note that the named patches are to be applied when their targets' modules have been imported; changes nothing.

        Somebody else (:mod:`megacpp_mcore.patches.machinery.hook`) watches the imports and calls :meth:`apply`.

        Args:
            names: patches; those that are applied or armed already are left as they are.
            origin: what asked for it, for people.

        Returns:
            The patches that were newly armed.

        Raises:
            PatchError: a name is not known, a requirement is missing, or two patches cannot go together.
        """
        with _PROCESS.lock:
            wanted = self.select(names)
            there = [self._patches[name] for name in {*self._changes, *self._armed}]
            fresh = [patch for patch in wanted if patch not in there]
            problems = [
                problem for patch in wanted if patch.name in self._changes for problem in self._drift(patch.name)
            ]
            problems += relation_problems(fresh, there) + target_problems(fresh, there)
            if problems:
                raise PatchError(listing("no patch was armed", problems))
            self._armed |= {patch.name: origin for patch in fresh}
            _PROCESS.changes += bool(fresh)
            return tuple(patch.name for patch in fresh)

    def disarm(self, names: Iterable[str]) -> None:
        """Forget that the named patches were to be applied; those that are in place stay so."""
        with _PROCESS.lock:
            for patch in self.select(names):
                _PROCESS.changes += self._armed.pop(patch.name, None) is not None

    @property
    def armed(self) -> tuple[str, ...]:
        """The names of the patches that were armed, applied since or not, and have not been reverted or disarmed."""
        with _PROCESS.lock:
            return tuple(self._armed)

    @property
    def waiting(self) -> tuple[Patch, ...]:
        """The patches that are armed and not applied, not even in part."""
        with _PROCESS.lock:
            return tuple(self._patches[name] for name in self._armed if name not in self._changes)

    @property
    def pending(self) -> dict[str, tuple[Edit, ...]]:
        """The edits of armed patches that are not in place, by patch; all of its edits for one that is waiting."""
        with _PROCESS.lock:
            found = {name: self._missing(self._patches[name], self._patches[name].edits) for name in self._armed}
            return {name: edits for name, edits in found.items() if edits}

    def revert(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Take the named patches (all that are applied, if ``None``) out again, in any order; all of them, or none.

        Every target, and every import of it by name, holds the very object it held before. An armed patch is disarmed.

        Returns:
            The patches that were reverted; a patch that was not applied is not among them.

        Raises:
            PatchError: a name is not known, or a target meanwhile holds something else; nothing is changed.
        """
        with _PROCESS.lock:
            chosen = [*self._changes, *self._armed] if names is None else names
            wanted = self.select(chosen)
            applied = [patch.name for patch in wanted if patch.name in self._changes]
            problems = [problem for name in applied for problem in self._drift(name)]
            if problems:
                raise PatchError(listing("no patch was reverted", problems))
            for patch in wanted:
                self._armed.pop(patch.name, None)
            changes = [change for name in applied for change in self._changes[name]]
            exchange([change.move_back() for change in changes], "no patch was reverted")
            _PROCESS.changes += 1
            for name in applied:
                del self._changes[name]
            for name in applied:
                announce(f"patch {name} reverted")
            for name in self._changes:
                if lacking := sorted(set(self._patches[name].requires) & set(applied)):
                    logger.warning("patch %s is still applied but requires %s", name, ", ".join(lacking))
            return tuple(applied)

    def verify(self) -> None:
        """Check that every applied patch is in place and that no module holds an original.

        Raises:
            PatchError: with every place where that is not so.
        """
        with _PROCESS.lock:
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
                raise PatchError(listing("the patches are not in place", problems))

    def status(self) -> list[dict[str, Any]]:
        """One JSON-ready record a patch, for receipts; imports nothing.

        The state is ``applied``; ``lost``, when a target of an applied patch holds something else now; ``armed``, when a
        hook will apply it as soon as the modules in ``waits_for`` have been imported (of those of separate edits, see
        :class:`.record.Edit`, any one); or ``not applied``. An applied patch with ``waits_for`` is in
        place for all that was imported, and will be for these modules too when they are. The ``fingerprints`` are those of
        the sources that were found in place, by target.
        """
        with _PROCESS.lock:
            return [self._record(patch) for patch in self._patches.values()]

    def seal(self, names: Iterable[str]) -> str:
        """16 hex digits that change with all that the named records say but their prose: targets, fingerprints, ranges."""
        records = [
            [patch.name, patch.megatron_versions, patch.superseded_in, patch.requires, patch.conflicts]
            + [[edit.target, edit.separate, sorted(edit.fingerprints.items())] for edit in patch.edits]
            for patch in sorted(self.select(names), key=lambda patch: patch.name)
        ]
        return hashlib.sha256(json.dumps(records).encode()).hexdigest()[:16]

    def select(self, names: Iterable[str]) -> list[Patch]:
        """The records of ``names``, each once.

        Raises:
            PatchError: there is no such patch; the nearest names are offered.
        """
        if isinstance(names, str):
            raise PatchError(f"expected a list of patch names, found the text {names!r}")
        chosen = list(dict.fromkeys(names))
        unknown = [name for name in chosen if name not in self._patches]
        if unknown:
            known = list(self._patches)
            problems = [f"there is no patch {name!r}; {nearest(name, known)}" for name in unknown]
            raise PatchError(listing("nothing was changed", problems))
        return [self._patches[name] for name in chosen]

    def _relation_problems(self, fresh: Sequence[Patch]) -> list[str]:
        applied = [self._patches[name] for name in self._changes]
        # A requirement of what is in place in part may have been reverted since, with a warning: the rest goes with it.
        new = [patch for patch in fresh if patch.name not in self._changes]
        # What is only armed may never come: it satisfies no requirement, but a conflict with it is one already.
        return sorted({*relation_problems(new, applied), *conflict_problems([*new, *applied, *self.waiting])})

    def _standing(self, fresh: Iterable[str]) -> dict[str, str]:
        """Targets that are taken, each with what to say about it."""
        taken = {
            edit.target: f"{edit.target} is to be changed by the armed patch {name}"
            for name, edits in self.pending.items()
            if name not in fresh
            for edit in edits
        }
        applied = [change.slot.target for changes in self._changes.values() for change in changes]
        return taken | {target: f"{target} is already changed by an applied patch" for target in applied}

    def _plan(self, fresh: Mapping[str, Sequence[Edit]], standing: dict[str, str]) -> tuple[list[_Change], list[str]]:
        """Check and build every edit of ``fresh``; returns the changes and all problems, and touches nothing."""
        changes: list[_Change] = []
        problems: list[str] = []
        if not fresh:
            return changes, problems
        version = self.version()
        for name, edits in fresh.items():
            try:
                self._patches[name].check_version(version)
            except Refusal as refusal:
                problems.append(f"{name}: {refusal}")
                continue
            for edit in edits:
                taken = [reason for target, reason in standing.items() if nested(edit.target, target)]
                try:
                    if taken:
                        raise Refusal("target already wrapped", taken[0])
                    change = _build(name, edit, version)
                except Refusal as refusal:
                    problems.append(f"{name}: {refusal}")
                    continue
                problems += [
                    f"{name} and {other.patch} both change {edit.target} or a part of it: choose one of them"
                    for other in changes
                    if overlap(change.slot, other.slot)
                ]
                changes.append(change)
        return changes, problems

    def _drift(self, name: str) -> list[str]:
        return [
            f"{name} was applied to {change.slot.target}, which meanwhile holds something else "
            "(another patcher, or the module was imported anew); undo that first, or, as a reload cannot be undone, "
            "start the process anew"
            for change in self._changes[name]
            if not change.in_place()
        ]

    def _record(self, patch: Patch) -> dict[str, Any]:
        changes = self._changes.get(patch.name, ())
        state = "armed" if patch.name in self._armed else "not applied"
        if changes:
            state = "lost" if self._drift(patch.name) else "applied"
        awaited = dict.fromkeys(edit.module for edit in self.pending.get(patch.name, ()))
        return patch.describe() | {
            "state": state,
            "hook": self._armed.get(patch.name),
            "waits_for": [name for name in awaited if name not in sys.modules],
            "megatron_core": changes[0].version if changes else None,
            "fingerprints": {change.slot.target: change.fingerprint for change in changes},
        }


@functools.cache
def default() -> Registry:
    """The registry of this package's own patches, made on the first call."""
    modules = (importlib.import_module(f"megacpp_mcore.patches.{name}") for name in _PATCH_MODULES)
    return Registry([module.PATCH for module in modules])


def relation_problems(fresh: Sequence[Patch], there: Sequence[Patch]) -> list[str]:
    """What ``requires`` and ``conflicts`` say against adding ``fresh`` to the patches ``there``."""
    together = {patch.name for patch in (*fresh, *there)}
    lacking = [
        f"{patch.name} requires {other}: name it as well"
        for patch in fresh
        for other in patch.requires
        if other not in together
    ]
    return sorted(lacking + conflict_problems([*fresh, *there]))


def conflict_problems(together: Sequence[Patch]) -> list[str]:
    """The declared conflicts among these patches."""
    names = {patch.name for patch in together}
    pairs = ((patch.name, other) for patch in together for other in patch.conflicts if other in names)
    return sorted(f"{name} conflicts with {other}: choose one of them" for name, other in pairs)


def target_problems(fresh: Sequence[Patch], there: Sequence[Patch]) -> list[str]:
    """Pairs of patches, one of them in ``fresh``, that change the same symbol, or a class and a part of it."""
    problems = []
    for index, patch in enumerate(fresh):
        for other in (*there, *fresh[:index]):
            if shared := [e.target for e in patch.edits for o in other.edits if nested(e.target, o.target)]:
                problems.append(
                    f"{patch.name} and {other.name} both change {shared[0]} or a part of it: choose one of them"
                )
    return problems


def _build(patch: str, edit: Edit, version: str) -> _Change:
    """Presence, foreign wrappers and fingerprint of one edit of ``patch``, and its replacement."""
    slot = resolve(edit.target)
    text = source_text(slot)
    refuse_wrapped(slot, text)
    found = edit.check(text, version)
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
        _keep_original(edit.target, replacement, original, patch)
    raw = slot.raw
    raw_replacement = type(raw)(replacement) if isinstance(raw, staticmethod | classmethod) else replacement
    homes = frozenset((module, name) for module, _, name, _ in holders({id(replacement): frozenset()}))
    return _Change(patch, slot, replacement, raw_replacement, found, version, homes)


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


def listing(summary: str, problems: Sequence[str]) -> str:
    """One message of a summary and every problem."""
    if len(problems) == 1:
        return f"{summary}: {problems[0]}"
    return f"{summary}, {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def announce(message: str) -> None:
    """One line on rank 0: to the log, or to stderr while the log drops what is not a warning."""
    if os.environ.get("RANK", "0") not in ("", "0"):
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    else:
        print(f"megacpp-mcore: {message}", file=sys.stderr, flush=True)
