"""What git knows of a checkout: which tracked files differ from the last commit, and what a module was there."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tokenize
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patches.sources import SourceTree, with_final_newline

_TIME_LIMIT_S = 120


class GitUnavailable(Exception):
    """Git is not installed, or the folder is nothing that it tracks; the message says which."""


def is_installed() -> bool:
    """Whether there is a git to ask."""
    return shutil.which("git") is not None


def modified(root: Path, file: str) -> list[str]:
    """Tracked files below ``root`` that differ from the last commit, as paths relative to it.

    Args:
        root: the checkout; it may be a folder of a larger repository.
        file: a file that must be tracked for the answer to mean anything.

    Raises:
        GitUnavailable: it cannot be known.
    """
    _git(root, "ls-files", "--error-unmatch", "--", file)
    # Not `git diff`, which writes the index anew.
    words = (
        "status",
        "--porcelain=v1",
        "-z",
        "--untracked-files=no",
        "--no-renames",
        "--ignore-submodules",
        "--",
        ".",
    )
    prefix = len(_git(root, "rev-parse", "--show-prefix").rstrip(b"\n"))
    _git(root, "rev-parse", "--verify", "HEAD")
    return [os.fsdecode(entry[len("XY ") + prefix :]) for entry in _git(root, *words).split(b"\0") if entry]


def is_committed(root: Path, file: str, content: bytes) -> bool:
    """Whether ``content`` would be, to git, the same as ``file`` in the last commit.

    Raises:
        GitUnavailable: it cannot be known.
    """
    ours = _git(root, "hash-object", "--stdin", "--path", file, given=content)
    return ours == _git(root, "rev-parse", f"HEAD:./{file}")


@dataclass(frozen=True)
class CommittedTree(SourceTree):
    """The files of the last commit, where the working tree has them too."""

    def lines(self, module: str) -> list[str]:
        """The lines of ``module``'s file as committed; see :meth:`SourceTree.lines`.

        Raises:
            OSError: git cannot tell.
        """
        file = self.file(module)
        root = next(root for root in self.roots if file.is_relative_to(root))
        try:
            content = _git(root, "show", f"HEAD:./{file.relative_to(root).as_posix()}")
        except GitUnavailable as error:
            raise OSError(str(error)) from error
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return with_final_newline(io.TextIOWrapper(io.BytesIO(content), encoding).readlines())


def _git(root: Path, *words: str, given: bytes | None = None) -> bytes:
    # Variables such as GIT_DIR, which git sets for its hooks, would name another repository; and nothing is written.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    try:
        done = subprocess.run(
            command, input=given, env=environment, capture_output=True, timeout=_TIME_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitUnavailable(f"git cannot be run: {error}") from error
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(complaint[0] if complaint else f"git {words[0]} ended with status {done.returncode}")
    return done.stdout
