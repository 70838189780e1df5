"""Import hook behind a checkout's hook line: applies the named patches to this process as their targets are imported.

The line is the last one of ``megatron/core/__init__.py``. By then ``megatron.core`` is complete, but most of its submodules
are not imported yet, and ``megatron.training`` may be half imported (if it is what imported ``megatron.core``).
So nothing of Megatron is imported here. :meth:`Hook.install` first checks every patch against the *files*; then each edit
is applied, through the process's one registry, as soon as the module that defines its target has run.

Not wrapt's import hooks: those fire at once for a module in ``sys.modules``, half imported or not.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import megacpp_mcore
from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery.registry import Registry, announce, default, refuse
from megacpp_mcore.patches.machinery.source_tree import SourceTree


def install(file: str, names: Sequence[str], *, version: str, seal: str = "") -> None:
    """Install the hook; called by the hook line (older copies wrote a seal); see :meth:`Hook.install`."""
    _hook().install(file, names, version=version)


class Hook:
    """Applies the armed patches of one registry as imports complete.

    Args:
        registry: the patches and their state.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._watched: set[str] = set()

    def install(self, file: str, names: Sequence[str], *, version: str) -> None:
        """Install the hook; called by the hook line; see :meth:`Hook.install`.

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
        known = {row["name"] for row in self._registry.status() if row["state"] != "not applied"}
        fresh = [patch for patch in self._registry.select(names) if patch.name not in known]
        tree = SourceTree.of_process()
        problems = [problem for patch in fresh for problem in patch.unfit(tree)]
        problems += [
            f"{patch.name}: {module} is still being imported, and it was what imported megatron.core; "
            "put `import megatron.core` before that import"
            for patch in fresh
            for module in patch.modules
            if getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False)
        ]
        refuse(f"no patch of the hook in {file} was applied", problems)
        self._registry.arm([patch.name for patch in fresh], file)
        self._watched |= {module for patch in fresh for module in patch.modules}
        # Never removed, only idle when nothing is pending: another thread may be iterating over the list.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            atexit.register(self._report_pending_patches)
        self._advance([module for module in self._watched if sys.modules.get(module)])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """``sys.meta_path`` finder: for a module with pending edits, delegates to the other finders and watches it run."""
        if name not in self._watched:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        if (spec := next(filter(None, others), None)) is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the module may have been found twice
            run(module)
            self._advance([name])

        # Path-based finders create one loader per module: the attribute affects only this import, and the module itself
        # only ever sees its own loader.
        vars(loader)["exec_module"] = exec_module
        return spec

    def _advance(self, modules: Sequence[str]) -> None:
        """Apply all edits of armed patches in modules that have run; on failure revert everything this hook applied."""
        try:
            self._registry.advance(modules)
        except Exception as error:
            rows = [row for row in self._registry.status() if row["hook"]]  # what others have applied since stays
            in_place = [row["name"] for row in rows if row["state"] in ("applied", "lost")]
            self._watched.clear()  # apply nothing more, even if reverting fails
            self._registry.revert([row["name"] for row in rows])
            raise PatchError(
                f"a patch of the hook could not be applied ({error}); the patches that the hook had applied were reverted: "
                f"{', '.join(in_place) or 'none'}"
            ) from error

    def _report_pending_patches(self) -> None:
        """At process exit, name the patches still pending, lest anyone think that they were in place."""
        for row in self._registry.status():
            if row["state"] == "armed":
                missing = ", ".join(row["waits_for"])
                announce(f"patch {row['name']} was NOT applied; never imported in this process: {missing}")


@functools.cache
def _hook() -> Hook:
    return Hook(default())
