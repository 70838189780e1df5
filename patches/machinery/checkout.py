"""A patched checkout: adds the hook line to a Megatron-LM folder, removes it, and reports the folder's status."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore.errors import CheckoutError, PatchError
from megacpp_mcore.patches.machinery import git, hook_line
from megacpp_mcore.patches.machinery.hook_line import Content
from megacpp_mcore.patches.machinery.record import Edit
from megacpp_mcore.patches.machinery.registry import Registry, default, refuse
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import Refusal, digest
from megacpp_mcore.util.files import TEMPORARY, replace

HOOKED_FILE = "megatron/core/__init__.py"
PACKAGE_INFO_FILE = "megatron/core/package_info.py"


@dataclass(frozen=True)
class Outcome:
    """Result of changing a checkout.

    Attributes:
        changed: the patches that were added or removed.
        unchanged: those already in the requested state.
        hooked: the patches that the hook line names now.
        notices: what could not be checked, and other remarks.
    """

    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    hooked: tuple[str, ...]
    notices: tuple[str, ...] = ()


class Checkout:
    """A folder that contains ``megatron/core``. Reading needs no lock: the one file that changes is replaced atomically.

    Args:
        folder: the root of a Megatron-LM checkout.
        registry: the patches; by default those of this package.
        tree: the files to look up its modules in; by default those of the folder.

    Raises:
        CheckoutError: the folder is not Megatron.
        PatchError: the folder states no version.
    """

    def __init__(self, folder: str | Path, registry: Registry | None = None, tree: SourceTree | None = None) -> None:
        self.root = Path(os.path.realpath(folder))
        self.registry = default() if registry is None else registry
        self.tree = tree or SourceTree((self.root,))
        files = (HOOKED_FILE, PACKAGE_INFO_FILE)
        if not self.root.is_dir():
            message = f"{self.root} is not a folder; expected the root of a Megatron-LM checkout"
            raise CheckoutError(message, code="no-folder")
        if missing := [name for name in files if not (self.root / name).is_file()]:
            above = [folder for folder in self.root.parents if all((folder / name).is_file() for name in files)]
            hint = f"did you mean {above[0]}?" if above else "pass the folder that contains megatron/ and pretrain_gpt.py"
            message = f"{self.root} is not a Megatron-LM checkout: it has no {', '.join(missing)}; {hint}"
            raise CheckoutError(message, code="no-checkout")
        # If __init__.py is a symbolic link, its target is replaced, and the link stays.
        self.file = Path(os.path.realpath(self.root / HOOKED_FILE))
        self.version = self.tree.version()
        self._unchanged = f"nothing was changed in {self.root}"

    @classmethod
    def installed(cls) -> Checkout:
        """Find the Megatron that ``import megatron.core`` would find in this process; megatron.core is not imported.

        Raises:
            CheckoutError: none is found.
        """
        tree = SourceTree.of_process()
        return cls(tree.file("megatron.core").parents[2], tree=tree)

    def content(self) -> Content:
        """Return the hooked file, split into the hook line and the rest.

        Raises:
            PatchError: the file cannot be read, or the hook line is damaged.
        """
        try:
            return hook_line.take_apart(self.file.read_bytes())
        except (OSError, PatchError) as error:
            unread = " cannot be read" if isinstance(error, OSError) else ""
            raise PatchError(f"{self.file}{unread}: {error}") from error

    def apply(self, names: Iterable[str], *, allow_dirty: bool = False) -> Outcome:
        """Add the named patches to the hook line: all of them, or none.

        Modified files below ``megatron/`` are refused, as a patch may concern their content. A Python that cannot import this
        package from there is reported in ``notices``.

        Raises:
            PatchError: lists every problem found; nothing was changed.
        """
        chosen = [patch.name for patch in self.registry.select(names)]
        if not chosen:
            available = ", ".join(patch.name for patch in self.registry.patches)
            raise PatchError(f"no patch was named; available: {available}", code="unnamed")
        if dist_info := sorted(self.root.glob("megatron_core-*.dist-info")):
            raise PatchError(
                f"{self.root} holds an installed megatron-core ({dist_info[0].name}), not a checkout; nothing was changed: "
                "patch the process instead (`megacpp-mcore launch --patch NAME`, or megacpp_mcore.patches.apply)"
            )
        with self._locked():
            content = self.content()
            fresh = tuple(name for name in chosen if name not in content.names)
            hooked = (*content.names, *fresh)
            refuse(self._unchanged, self._copy_problems(content) or self.unfit(hooked))
            notices = self._refuse_dirty(content, allow_dirty) if fresh else []
            self._write(content, hooked, content.found_sha256)
        notices += [f"importing megatron.core now requires this package: {it}" for it in self._import_problems()]
        return Outcome(fresh, tuple(name for name in chosen if name not in fresh), hooked, tuple(notices))

    def revert(self, names: Iterable[str] | None = None) -> Outcome:
        """Remove the named patches from the hook line; with the last one, or with ``names`` None, the line itself.

        Without the line the file is byte for byte the original, unless someone else edited it.

        Raises:
            PatchError: nothing was changed.
        """
        chosen = None if names is None else [patch.name for patch in self.registry.select(names)]
        with self._locked():
            content = self.content()
            removed = tuple(name for name in (content.names if chosen is None else chosen) if name in content.names)
            remaining = tuple(name for name in content.names if name not in removed)
            if removed and remaining:  # rewriting the line needs the patch records of the copy that wrote it
                refuse(self._unchanged, self._copy_problems(content))
            self._write(content, remaining, content.sha256)
        unchanged = tuple(name for name in chosen or () if name not in removed)
        notice = f"{self.file} was otherwise edited since it was hooked: only the hook line was touched"
        return Outcome(removed, unchanged, remaining, (notice,) if removed and content.is_edited else ())

    def status(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Return one JSON-ready record per patch; changes nothing.

        ``state`` is ``applied``, ``not applied``, ``target changed``, ``target not found`` or
        ``hooked by another copy``; ``hooked`` says whether the line names the patch. For a
        changed target ``diff`` has the changes of its file since the last git commit, if any.

        Raises:
            PatchError: a name is unknown, or the hook line is damaged.
        """
        content = self.content()
        hooked, other_copy = content.names, "; ".join(self._copy_problems(content))
        patches = {patch.name: patch for patch in self.registry.select(names)}
        foreign = () if names is not None else (name for name in hooked if name not in patches)
        rows = []
        for name in (*patches, *foreign):
            problems = patches[name].problems(self.tree) if name in patches else {}
            state, reason = "applied" if name in hooked else "not applied", "; ".join(map(str, problems.values()))
            state = next((refusal.state for refusal in problems.values()), state)
            if name in hooked and other_copy:
                state, reason = "hooked by another copy", other_copy
            row = {"name": name, "hooked": name in hooked, "root": str(self.root), "megatron_core": self.version}
            targets = [self._target_row(*problem) for problem in problems.items()]
            rows.append(row | {"state": state, "reason": reason, "targets": targets})
        return rows

    def verify(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Check the hook line and everything it depends on; returns the patches it names.

        Raises:
            PatchError: lists every problem.
        """
        content = self.content()
        chosen = () if names is None else [patch.name for patch in self.registry.select(names)]
        if not content.names:
            raise PatchError(f"{self.file} has no hook line: no patch is applied to {self.root}", code="no-hook-line")
        problems = [f"{name} is not applied" for name in chosen if name not in content.names]
        if content.is_edited:
            problems.append(
                f"{self.file} was edited since it was hooked: without the hook line it has SHA-256 "
                f"{content.found_sha256}, expected {content.sha256}"
            )
        problems += self._copy_problems(content) or self.unfit(content.names)
        refuse(f"{self.root} is not as it should be", problems + self._import_problems())
        return content.names

    def unfit(self, names: Iterable[str] | None = None) -> list[str]:
        """Return what keeps the named patches (by default all) from being applied here."""
        return [text for patch in self.registry.select(names) for text in patch.unfit(self.tree)]

    def export(self, names: Iterable[str] | None = None) -> bytes:
        """Make a patch for ``git apply`` with byte-identical result to :meth:`apply`; for None, of what is applied now.

        Raises:
            PatchError: the patches do not fit, or there is nothing to export.
        """
        content = self.content()
        chosen = [patch.name for patch in self.registry.select(content.names if names is None else names)]
        if not chosen:
            raise PatchError("name the patches to export (none is applied to this checkout)", code="nothing-to-export")
        refuse("nothing was exported", self.unfit(chosen))
        return git.patch_between(content.without, self._hooked(content, chosen, content.found_sha256), HOOKED_FILE)

    def _copy_problems(self, content: Content) -> list[str]:
        own_version, own_names = megacpp_mcore.__version__, {patch.name for patch in self.registry.patches}
        if content.version in ("", own_version) and own_names.issuperset(content.names):
            return []
        return [
            f"{self.file} is already hooked by another copy, megacpp-mcore {content.version} with the patches "
            f"{', '.join(content.names)}; this is {own_version}, whose records differ: "
            f"`megacpp-mcore patch revert --checkout {self.root}` removes that hook; then apply with one copy only"
        ]

    def _import_problems(self) -> list[str]:
        """Problems if a fresh Python in the checkout does not find this version of the package, which the hook line imports."""
        command = [sys.executable, "-c", "import megacpp_mcore.patches.hook; print(megacpp_mcore.__version__)"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        start, imported, expected = f"a Python started in {self.root}", done.stdout.strip(), megacpp_mcore.__version__
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return [f"{start} cannot import megacpp_mcore ({last}): install it there with pip"]
        return [f"{start} imports megacpp-mcore {imported}, expected {expected}"] if imported != expected else []

    def _target_row(self, edit: Edit, refusal: Refusal) -> dict[str, Any]:
        row: dict[str, Any] = {"target": edit.target, "state": refusal.state, "diff": None}
        if refusal.text is not None:
            row |= {"sha256": digest(refusal.text), "expected": list(edit.fingerprints)}
            with contextlib.suppress(git.GitUnavailable):
                row["diff"] = git.difference(self.root, self.tree.file(edit.module)) or None
        return row

    def _refuse_dirty(self, content: Content, allow_dirty: bool) -> list[str]:
        """Refuse foreign changes below ``megatron/``, unless allowed; returns what could not be checked."""
        notices = []
        try:
            changed = [name for name in git.modified(self.root, HOOKED_FILE) if name.startswith("megatron/")]
            if HOOKED_FILE in changed and content.names and not content.is_edited:
                changed.remove(HOOKED_FILE)
        except git.GitUnavailable as error:  # fingerprints still check what the patches replace
            notices = [f"whether files were modified could not be checked: {error}"]
            changed = [HOOKED_FILE] if content.is_edited else []
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        if changed and not allow_dirty:
            raise PatchError(
                f"{self.root} is dirty: {shown} differ from what was committed or hooked; nothing was changed: commit or "
                "restore them (an update below the hook line: `patch revert`, then apply), or pass --allow-dirty to patch "
                "the checkout as it is",
                code="dirty",
            )
        return notices + [f"patched as it is, with modified files: {shown}"] * bool(changed)

    def _hooked(self, content: Content, names: Sequence[str], sha256: str) -> bytes:
        """Return the file with a line that names these patches."""
        if names and not content.without.endswith(b"\n"):
            raise PatchError(f"{self.file} does not end in a newline: restore it first", code="no-newline")
        return Content(content.without, tuple(names), megacpp_mcore.__version__, sha256).whole()

    def _write(self, content: Content, names: Sequence[str], sha256: str) -> None:
        if names != content.names:
            replace(self.file, self._hooked(content, names, sha256), like=self.file.stat())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one change of this checkout at a time, and remove leftovers of a killed one."""
        try:
            with contextlib.ExitStack() as stack:
                path = self.root / PACKAGE_INFO_FILE
                lock = None
                while lock is None or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    # Opened for writing where possible, as locks on NFS require it; git may replace the file meanwhile.
                    lock = stack.enter_context(open(path, "r+b" if os.access(path, os.W_OK) else "rb"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
                for leftover in self.file.parent.glob(f"{self.file.name}{TEMPORARY}*~"):
                    leftover.unlink()
                yield
        except OSError as error:
            raise PatchError(
                f"{self.root} cannot be written to ({error}); nothing was changed: make it writable for this user, "
                "or use a copy that is"
            ) from error
