"""The patch registry: checks the named patches of the parent folder, then applies or reverts them as a whole.

It does so at once (:meth:`Registry.apply`), or, behind a checkout's hook line, as the targets are imported
(:meth:`Registry.install`). The line is the last one of ``megatron/core/__init__.py``: programs that import no
``megatron.training`` are patched, too. By then ``megatron.core`` is complete, but most of its submodules are not imported yet,
and ``megatron.training`` may be half imported (if it is what imported ``megatron.core``). So nothing of Megatron is imported
there: every patch is checked against the *files*, and each edit is applied as soon as the module that defines its target has
run. Not wrapt's import hooks: those fire at once for a module in ``sys.modules``, half imported or not.

One patch lives in one file of that folder: functions that run instead of their targets, and one module-level record of them::

    @edit("megatron.training.models.gpt:mtp_block_spec", "<sha256>")
    def _block_spec(original: Function, config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        ...  # may call the original

    PATCH = Patch(
        name="mtp-shared-block",
        fixes="...", source="...", seam="...", leaves_alone="...", retire_when="...", cost="...", gain="not measured",
        edits=(_block_spec,),
    )

(fields and other ways to make a replacement: :mod:`.record`); :func:`fingerprint` returns the SHA-256 to enter. Importing this
module, or a patch's module, changes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.machinery
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import megacpp_mcore
from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery import symbols
from megacpp_mcore.patches.machinery.record import Patch
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import Change, Refusal
from megacpp_mcore.util.nearest import nearest

logger = logging.getLogger(__name__)

_LOCK = threading.RLock()
"""Held while Megatron's modules are being changed, by any registry."""
# A thread that held it does not exist in the child; what it was changing is consistent.
os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.RLock()))


def fingerprint(target: str) -> str:
    """Return the SHA-256 (hex) of the source text of ``target`` (``module:attr`` or ``module:Class.attr``) as installed.

    Raises:
        PatchError: the symbol does not exist, or its source cannot be read.
    """
    return symbols.digest(symbols.resolve(target).text)


class Registry:
    """A set of patches, and which of their edits are in place in this process.

    Args:
        patches: the records, with unique names.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = {patch.name: patch for patch in patches}
        self.patches = tuple(self._patches.values())
        """All patches, in the order in which they were passed."""
        self._changes: tuple[Change, ...] = ()  # those in place
        self._armed: dict[str, str] = {}  # patch to the file whose hook line named it

    def select(self, names: Iterable[str] | None) -> list[Patch]:
        """Return the records of ``names``, each once; of all patches for None.

        Raises:
            PatchError: no such patch; the message suggests the nearest names.
        """
        if isinstance(names, str):
            raise PatchError(f"expected a list of patch names, found the text {names!r}")
        chosen = list(dict.fromkeys(self._patches if names is None else names))
        if unknown := [name for name in chosen if name not in self._patches]:
            problems = [f"there is no patch {name!r}; {nearest(name, self._patches)}" for name in unknown]
            refuse("nothing was changed", problems, "unknown")
        return [self._patches[name] for name in chosen]

    def apply(self, names: Iterable[str], *, modules: Collection[str] | None = None) -> tuple[str, ...]:
        """Put the named patches in place: all of them, or none.

        Target and fingerprint of every edit are checked, and every replacement is built, before the first change.
        Afterwards each module in ``sys.modules`` that had imported an original by name holds its replacement. References that
        are not module attributes (a default argument, a ``ModuleSpec`` created earlier, a stored bound method) are out of
        reach of any patch: choose a seam without them.

        Args:
            names: patches; a partly applied one is completed.
            modules: if passed, nothing is imported, and edits of other modules are left for a later call.

        Returns:
            The patches with edits newly put in place.

        Raises:
            PatchError: lists every problem found; nothing is changed.
            CheckoutError: Megatron is not installed.
        """
        requested = self.select(names)
        # Before the lock: an import may wait for another thread that waits for the lock, or may apply patches itself.
        for module in (module for patch in requested for module in patch.modules if modules is None):
            with contextlib.suppress(Exception):  # symbols.resolve() hits the same error and names the target
                importlib.import_module(module)
        with _LOCK:
            changes, refusals = self._plan(requested, modules)
            refuse("no patch was applied", self._drift({patch.name for patch in requested}) + refusals, "not-applied")
            symbols.exchange(changes, self, {"_changes": (*self._changes, *changes)})
            applied = tuple(dict.fromkeys(change.patch for change in changes))
            for name in applied:  # after all are recorded: a log handler may raise
                replaced = [change.slot.target for change in changes if change.patch == name and change.is_replaced]
                targets = ", ".join(replaced) or "no target, as upstream has the fix"
                origin = f" by the hook in {self._armed[name]}" if name in self._armed else ""
                announce(f"patch {name} applied to {targets} (megatron-core {changes[0].version}){origin}")
        return applied

    def install(self, file: str, names: Sequence[str], *, version: str) -> None:
        """Let the named patches be applied as their modules are imported; called by the hook line.

        Patches that are already applied or armed are left alone.

        Args:
            file: the file that contains the line.
            names: patches.
            version: of the megacpp-mcore that wrote the line.

        Raises:
            PatchError: lists every problem; nothing was changed, and the import of ``megatron.core`` fails.
        """
        if version != megacpp_mcore.__version__:
            raise PatchError(
                f"the hook line in {file} was written by megacpp-mcore {version}, and {megacpp_mcore.__version__} is imported "
                f"(from {Path(megacpp_mcore.__file__).parent}); no patch was applied: write it anew with this copy "
                f"(`megacpp-mcore patch revert --checkout DIR`, then `apply {' '.join(names)}`), or install the other one"
            )
        with _LOCK:
            in_use = {*self._armed, *(change.patch for change in self._changes)}
            fresh = [patch for patch in self.select(names) if patch.name not in in_use]
            modules = [(patch.name, module) for patch in fresh for module in patch.modules]
            tree = SourceTree.of_process()
            problems = [problem for patch in fresh for problem in patch.unfit(tree)]
            problems += [
                f"{name}: {module} is still being imported, and it was what imported megatron.core; "
                "put `import megatron.core` before that import"
                for name, module in modules
                if _is_running(module)
            ]
            refuse(f"no patch of the hook in {file} was applied", problems)
            # A new one, as another thread may be going through the old one.
            self._armed = {**self._armed, **dict.fromkeys((patch.name for patch in fresh), file)}
        # Never removed, only idle when nothing is armed: another thread may be iterating over the list.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            atexit.register(self._report_armed_patches)
        self._advance()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """``sys.meta_path`` finder: for a module of armed patches, delegates to the other finders and watches it run."""
        if all(name not in self._patches[armed].modules for armed in self._armed):
            return None
        # Python, too, skips finders without find_spec (of old libraries).
        others = [it for it in sys.meta_path if it is not self and hasattr(it, "find_spec")]
        if (spec := next(filter(None, (it.find_spec(name, path, target) for it in others)), None)) is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the module may have been found twice
            run(module)
            own = f"{module.__name__}:"
            # Forget changes to this module that a reload has replaced, or that an unfinished import (Ctrl-C) had made.
            with _LOCK:
                self._changes = tuple(it for it in self._changes if it.in_place() or not it.slot.target.startswith(own))
            self._advance(module.__name__)

        # Path-based finders create one loader per module: the attribute affects only this import, and the module itself
        # only ever sees its own loader. Where others share one, the attribute may see another module run: hence its name.
        vars(loader)["exec_module"] = exec_module
        return spec

    def _advance(self, ran: str | None = None) -> None:
        """Apply all edits of armed patches in modules that have run; on failure revert everything the hook applied.

        Args:
            ran: a module that has run, although its import has not ended.
        """
        armed, applied = self._armed, {(change.patch, change.slot.target) for change in self._changes}
        edits = [(name, edit) for name in armed for edit in self._patches[name].edits]
        waiting = [(name, edit.module) for name, edit in edits if (name, edit.target) not in applied]
        # Not one that was run outside of sys.modules, which would be imported under the lock.
        ready = {name for _, name in waiting if name in sys.modules and (name == ran or not _is_running(name))}
        try:
            if due := dict.fromkeys(name for name, module in waiting if module in ready):
                self.apply(due, modules=ready)
        except Exception as error:
            in_place = [change.patch for change in self._changes if change.patch in armed]
            self._armed = {}  # apply nothing more, even if reverting fails
            self.revert(armed)  # what others have applied since stays
            raise PatchError(
                f"a patch of the hook could not be applied ({error}); the patches that the hook had applied were reverted: "
                f"{', '.join(dict.fromkeys(in_place)) or 'none'}"
            ) from error

    def _report_armed_patches(self) -> None:
        """At process exit, name the patches still armed, which never took effect."""
        for row in self.status():
            if row["state"] == "armed":
                missing = ", ".join(row["waits_for"])
                announce(f"patch {row['name']} was NOT applied; never imported in this process: {missing}")

    @property
    def version(self) -> str:
        """The version of the Megatron which this process imports, from its files, for messages and receipts."""
        return SourceTree.of_process().version()

    def revert(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Revert the named patches (``None``: all applied ones), in any order; all of them, or none.

        Every target, and every import of it by name, holds its original object again. Armed patches are disarmed.

        Returns:
            The reverted patches, without those that were not applied.

        Raises:
            PatchError: a name is unknown, or a target now holds something else; nothing is changed.
        """
        with _LOCK:
            in_place = dict.fromkeys(change.patch for change in self._changes)
            requested = [patch.name for patch in self.select({**in_place, **self._armed} if names is None else names)]
            applied = [name for name in requested if name in in_place]
            refuse("no patch was reverted", self._drift(applied), "not-reverted")
            changes = [change for change in self._changes if change.patch in requested]
            state: dict[str, Any] = {"_changes": tuple(it for it in self._changes if it.patch not in requested)}
            state["_armed"] = {name: origin for name, origin in self._armed.items() if name not in requested}
            symbols.exchange(changes, self, state, back=True)
            for name in applied:
                announce(f"patch {name} reverted")
            return tuple(applied)

    def verify(self) -> None:
        """Check that every applied patch is in place and that no module holds an original.

        Raises:
            PatchError: lists every violation.
        """
        with _LOCK:
            owners = {id(change.slot.value): change.patch for change in self._changes if change.is_replaced}
            held = symbols.holders(owners)
            problems = [f"{owners[key]}: {module.__name__}.{name} holds the original" for module, name, key in held]
            refuse("the patches are not in place", self._drift(self._patches) + problems, "not-in-place")

    def status(self) -> list[dict[str, Any]]:
        """One JSON-ready record per patch, for receipts; imports nothing.

        The state is ``applied``; ``lost``, if a target of an applied patch now holds something else; ``armed``, if a hook will
        apply it once the modules in ``waits_for`` have been imported; or ``not applied``. An applied patch with ``waits_for``
        is in place in all imported modules, and will be in those too once imported. ``fingerprints`` are those of the sources
        found in place, by target.
        """
        with _LOCK:
            return [self._record(patch) for patch in self.patches]

    def _plan(self, patches: Iterable[Patch], modules: Collection[str] | None) -> tuple[list[Change], list[str]]:
        """Check and build every edit that is not in place; returns the changes and all problems, and touches nothing."""
        in_place = {(change.patch, change.slot.target) for change in self._changes}
        changes: list[Change] = []
        problems: list[str] = []
        edits = [(patch.name, it) for patch in patches for it in patch.edits if (patch.name, it.target) not in in_place]
        edits = [(name, edit) for name, edit in edits if modules is None or edit.module in modules]
        version = self.version if edits else ""
        for name, edit in edits:
            try:
                slot = symbols.resolve(edit.target)
                symbols.refuse_wrapped(slot)
                sha256 = edit.check([slot.text], version)
                make = edit.make if sha256 in edit.fingerprints else None
                changes.append(symbols.build(name, slot, make, sha256, version))
            except Refusal as refusal:
                problems.append(f"{name}: {refusal}")
        return changes, problems

    def _drift(self, names: Collection[str]) -> list[str]:
        return [
            f"{it.patch} was applied to {it.slot.target}, which meanwhile holds something else (another patcher?); undo "
            "that first"
            for it in self._changes
            if it.patch in names and not it.in_place()
        ]

    def _record(self, patch: Patch) -> dict[str, Any]:
        changes = [change for change in self._changes if change.patch == patch.name]
        state = "armed" if patch.name in self._armed else "not applied"
        if changes:
            state = "lost" if self._drift([patch.name]) else "applied"
        return patch.describe() | {
            "state": state,
            "hook": self._armed.get(patch.name),
            "waits_for": [name for name in patch.modules if patch.name in self._armed and name not in sys.modules],
            "megatron_core": changes[0].version if changes else None,
            "fingerprints": {change.slot.target: change.fingerprint for change in changes},
        }


def _is_running(module: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


@functools.cache
def default() -> Registry:
    """Return the registry of this package's own patches, created on the first call."""
    from megacpp_mcore import patches

    files = sorted(module.name for module in pkgutil.iter_modules(patches.__path__))
    modules = [importlib.import_module(f"{patches.__name__}.{name}") for name in files]
    return Registry([module.PATCH for module in modules if hasattr(module, "PATCH")])


def refuse(summary: str, problems: Sequence[str], code: str = "") -> None:
    """Raise a PatchError that lists all problems, if there are any."""
    if len(problems) == 1:
        raise PatchError(f"{summary}: {problems[0]}", code=code)
    if problems:
        lines = (f"\n  - {problem}" for problem in problems)
        raise PatchError(f"{summary}, {len(problems)} problems:{''.join(lines)}", code=code)


def announce(message: str) -> None:
    """Print one line on rank 0: to the log, or to stderr if the log level would drop it."""
    if os.environ.get("RANK", "0") not in ("", "0"):
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    else:
        print(f"megacpp-mcore: {message}", file=sys.stderr, flush=True)
