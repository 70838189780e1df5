"""The patch registry: checks the named patches of the parent folder, then applies or reverts them as a whole.

One patch lives in one file of that folder and is one module-level record::

    PATCH = Patch(
        name="mtp-shared-block",
        fixes="...", source="...", seam="...", leaves_alone="...", retire_when="...", cost="...", gain="not measured",
        edits=(
            Edit.of(
                "megatron.training.models.gpt:mtp_block_spec",
                "<sha256>",
                lambda original: ...,  # builds the replacement, usually a closure under functools.wraps(original)
            ),
        ),
    )

(fields: :mod:`.record`); :func:`fingerprint` returns the SHA-256 to enter. Importing this module, or a patch's module, changes
nothing; only :meth:`Registry.apply` does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from packaging.version import Version

from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery import symbols
from megacpp_mcore.patches.machinery.record import Edit, Patch
from megacpp_mcore.patches.machinery.symbols import Change, Refusal
from megacpp_mcore.util.nearest import nearest
from megacpp_mcore.versions import MEGATRON_CORE

logger = logging.getLogger(__name__)

_LOCK = threading.RLock()
"""Held while Megatron's modules are being changed, by any registry."""
# A thread that held it is not in the child; what it was changing is whole.
os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.RLock()))


def fingerprint(target: str) -> str:
    """Return the SHA-256 (hex) of the source text of ``target`` (``module:attr`` or ``module:Class.attr``) as installed.

    Raises:
        PatchError: the symbol does not exist, or its source cannot be read.
    """
    try:
        return symbols.digest(symbols.source_text(symbols.resolve(target)))
    except Refusal as refusal:
        raise PatchError(str(refusal)) from refusal


def megatron_core_version() -> str:
    """Return the version of the megatron-core that this process imports, without its ``+commit`` part.

    Raises:
        PatchError: megatron-core cannot be imported.
    """
    try:
        found = importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise PatchError(f"megatron-core cannot be imported ({error}); install megatron-core{MEGATRON_CORE}") from error
    return Version(found).public


class Registry:
    """A set of patches, and which of their edits are in place in this process.

    Args:
        patches: the records, with unique names.
        version: returns the megatron-core version to check against (called when something is to be applied).
    """

    def __init__(self, patches: Iterable[Patch], version: Callable[[], str] = megatron_core_version) -> None:
        self._patches = {patch.name: patch for patch in patches}
        self.patches = tuple(self._patches.values())
        """All patches, in the order in which they were passed."""
        self._changes: dict[str, dict[str, Change]] = {}  # by patch, then by target
        self._armed: dict[str, str] = {}  # patch to the file whose hook line named it
        self.version = version

    def select(self, names: Iterable[str] | None) -> list[Patch]:
        """Return the records of ``names``, each once; of all patches for None.

        Raises:
            PatchError: no such patch; the message suggests the nearest names.
        """
        if isinstance(names, str):
            raise PatchError(f"expected a list of patch names, found the text {names!r}")
        chosen = list(dict.fromkeys(self._patches if names is None else names))
        if unknown := [name for name in chosen if name not in self._patches]:
            known = list(self._patches)
            problems = [f"there is no patch {name!r}; {nearest(name, known)}" for name in unknown]
            raise PatchError(listing("nothing was changed", problems), code="unknown")
        return [self._patches[name] for name in chosen]

    def apply(self, names: Iterable[str], *, imported: Callable[[str], bool] | None = None) -> tuple[str, ...]:
        """Put the named patches in place: all of them, or none.

        Target and fingerprint of every edit are checked, and every replacement is built, before the first change.
        Afterwards each module in ``sys.modules`` that had imported an original by name holds its replacement. References that
        are not module attributes (a default argument, a ``ModuleSpec`` created earlier, a stored bound method) are out of
        reach of any patch: choose a seam without them.

        Args:
            names: patches; a partly applied one is completed.
            imported: whether a module is imported; if passed, edits of other modules are left for a later call.

        Returns:
            The patches with edits newly put in place.

        Raises:
            PatchError: lists every problem found; nothing is changed.
        """
        wanted = self.select(names)
        # Before the lock: an import may wait for another thread that waits for the lock, or may apply patches itself.
        for module in (module for patch in wanted for module in patch.modules if imported is None):
            with contextlib.suppress(Exception):  # symbols.resolve() hits the same error and names the target
                importlib.import_module(module)
        with _LOCK:
            fresh = {patch.name: edits for patch in wanted if (edits := self._missing(patch, imported))}
            changes, refusals = self._plan(fresh)
            if problems := [problem for patch in wanted for problem in self._drift(patch.name)] + refusals:
                raise PatchError(listing("no patch was applied", problems), code="not-applied")
            after = {name: dict(there) for name, there in self._changes.items()}
            for change in changes:
                after.setdefault(change.patch, {})[change.slot.target] = change
            symbols.exchange(changes, self, {"_changes": after})
            for name in fresh:  # after all are recorded: a log handler may raise
                replaced = [change.slot.target for change in changes if change.patch == name and change.is_replaced]
                targets = ", ".join(replaced) or "no target, as upstream has the fix"
                origin = f" by the hook in {self._armed[name]}" if name in self._armed else ""
                announce(f"patch {name} applied to {targets} (megatron-core {changes[0].version}){origin}")
        return tuple(fresh)

    def arm(self, names: Iterable[str], origin: str) -> None:
        """Register the named patches for application once their modules have been imported; changes nothing.

        :mod:`megacpp_mcore.patches.machinery.import_hook` watches the imports and calls :meth:`apply`.

        Args:
            names: patches; those already applied or armed are left alone.
            origin: what requested it, for messages.

        Raises:
            PatchError: a name is unknown.
        """
        with _LOCK:
            wanted = self.select(names)
            there = {*self._changes, *self._armed}
            self._armed |= {patch.name: origin for patch in wanted if patch.name not in there}

    @property
    def pending(self) -> dict[str, tuple[Edit, ...]]:
        """The edits of armed patches that are not yet in place, by patch."""
        with _LOCK:
            return {name: edits for name in self._armed if (edits := self._missing(self._patches[name]))}

    def revert(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Revert the named patches (``None``: all applied ones), in any order; all of them, or none.

        Every target, and every import of it by name, holds its original object again. Armed patches are disarmed.

        Returns:
            The reverted patches, without those that were not applied.

        Raises:
            PatchError: a name is unknown, or a target now holds something else; nothing is changed.
        """
        with _LOCK:
            wanted = [patch.name for patch in self.select({**self._changes, **self._armed} if names is None else names)]
            applied = [name for name in wanted if name in self._changes]
            if problems := [problem for name in applied for problem in self._drift(name)]:
                raise PatchError(listing("no patch was reverted", problems), code="not-reverted")
            changes = [change for name in applied for change in self._changes[name].values()]
            left = {
                field: {name: value for name, value in getattr(self, field).items() if name not in wanted}
                for field in ("_changes", "_armed")
            }
            symbols.exchange(changes, self, left, back=True)
            for name in applied:
                announce(f"patch {name} reverted")
            return tuple(applied)

    def verify(self) -> None:
        """Check that every applied patch is in place and that no module holds an original.

        Raises:
            PatchError: lists every violation.
        """
        with _LOCK:
            problems = [problem for name in self._changes for problem in self._drift(name)]
            places = [(change, name) for name, changes in self._changes.items() for change in changes.values()]
            owners = {id(change.slot.value): name for change, name in places if change.is_replaced}
            held = symbols.holders(owners)
            problems += [f"{owners[key]}: {module.__name__}.{name} holds the original" for module, name, key in held]
            if problems:
                raise PatchError(listing("the patches are not in place", problems), code="not-in-place")

    def status(self) -> list[dict[str, Any]]:
        """One JSON-ready record per patch, for receipts; imports nothing.

        The state is ``applied``; ``lost``, if a target of an applied patch now holds something else; ``armed``, if a hook will
        apply it once the modules in ``waits_for`` have been imported; or ``not applied``. An applied patch with ``waits_for``
        is in place in all imported modules, and will be in those too once imported. ``fingerprints`` are those of the sources
        found in place, by target.
        """
        with _LOCK:
            return [self._record(patch) for patch in self._patches.values()]

    def _missing(self, patch: Patch, imported: Callable[[str], bool] | None = None) -> tuple[Edit, ...]:
        """Return the patch's edits that are not in place (only in modules that are ``imported``, if that is passed)."""
        there = self._changes.get(patch.name, {})
        return tuple(e for e in patch.edits if e.target not in there and (imported is None or imported(e.module)))

    def _plan(self, fresh: Mapping[str, Sequence[Edit]]) -> tuple[list[Change], list[str]]:
        """Check and build every edit of ``fresh``; returns the changes and all problems, and touches nothing."""
        changes: list[Change] = []
        problems: list[str] = []
        version = self.version() if fresh else ""
        for name, edits in fresh.items():
            for edit in edits:
                try:
                    slot = symbols.resolve(edit.target)
                    text = symbols.source_text(slot)
                    symbols.refuse_wrapped(slot, text)
                    found = edit.check(text, version)
                    make = edit.make if found in edit.fingerprints else None
                    changes.append(symbols.build(name, slot, make, found, version))
                except Refusal as refusal:
                    problems.append(f"{name}: {refusal}")
        return changes, problems

    def _drift(self, name: str) -> list[str]:
        return [
            f"{name} was applied to {target}, which meanwhile holds something else (another patcher?); undo that first"
            for target, change in self._changes.get(name, {}).items()
            if not change.in_place()
        ]

    def _record(self, patch: Patch) -> dict[str, Any]:
        changes = self._changes.get(patch.name, {})
        state = "armed" if patch.name in self._armed else "not applied"
        if changes:
            state = "lost" if self._drift(patch.name) else "applied"
        awaited = dict.fromkeys(edit.module for edit in self.pending.get(patch.name, ()))
        return patch.describe() | {
            "state": state,
            "hook": self._armed.get(patch.name),
            "waits_for": [name for name in awaited if name not in sys.modules],
            "megatron_core": next((change.version for change in changes.values()), None),
            "fingerprints": {target: change.fingerprint for target, change in changes.items()},
        }


@functools.cache
def default() -> Registry:
    """Return the registry of this package's own patches, created on the first call."""
    from megacpp_mcore import patches

    files = sorted(module.name for module in pkgutil.iter_modules(patches.__path__))
    modules = [importlib.import_module(f"{patches.__name__}.{name}") for name in files]
    return Registry([module.PATCH for module in modules if hasattr(module, "PATCH")])


def listing(summary: str, problems: Sequence[str]) -> str:
    """One message from a summary and all problems."""
    if len(problems) == 1:
        return f"{summary}: {problems[0]}"
    return f"{summary}, {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems)


def announce(message: str) -> None:
    """Print one line on rank 0: to the log, or to stderr if the log level would drop it."""
    if os.environ.get("RANK", "0") not in ("", "0"):
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    else:
        print(f"megacpp-mcore: {message}", file=sys.stderr, flush=True)
