"""Git queries on a checkout: which tracked files differ from the last commit, and how; and patches made by git."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--text")


class GitUnavailable(Exception):
    """Git is not installed, or does not track the folder; the message says which."""


def modified(root: Path, file: str) -> list[str]:
    """Tracked files below ``root`` that differ from the last commit, as paths relative to it.

    Args:
        root: the checkout; it may be a folder of a larger repository.
        file: a file that must be tracked for the answer to mean anything.

    Raises:
        GitUnavailable: git cannot answer.
    """
    _git(root, "ls-files", "--error-unmatch", "--", file)
    # Not `git diff`, which rewrites the index.
    words = ("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", "--ignore-submodules", "--", ".")
    prefix = len(_git(root, "rev-parse", "--show-prefix").rstrip(b"\n"))
    _git(root, "rev-parse", "--verify", "HEAD")
    return [os.fsdecode(entry[len("XY ") + prefix :]) for entry in _git(root, *words).split(b"\0") if entry]


def difference(root: Path, file: Path) -> str:
    """Changes of ``file`` since the last commit, as shown by ``git diff``; empty if there are none.

    Raises:
        GitUnavailable: git cannot answer.
    """
    _git(root, "ls-files", "--error-unmatch", "--", str(file))
    return _git(root, "diff", *_PLAIN, "HEAD", "--", str(file)).decode(errors="replace")


def patch_between(before: bytes, after: bytes, file: str) -> bytes:
    """A patch for ``git apply`` that turns ``file`` from ``before`` into ``after``.

    Raises:
        GitUnavailable: git cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for side, content in (("a", before), ("b", after)):
            path = Path(folder, side, file)
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
        return _git(Path(folder), "diff", *_PLAIN, "--no-index", "--no-prefix", "a", "b", good=(0, 1))


def lock_file(root: Path) -> Path:
    """Path of a checkout's lock: in git's folder, hidden from ``git status``, or in the root if git does not track it."""
    try:
        return root / os.fsdecode(_git(root, "rev-parse", "--git-path", "megacpp-mcore.lock").rstrip(b"\n"))
    except GitUnavailable:
        return root / ".megacpp-mcore.lock"


def _git(root: Path, *words: str, good: Sequence[int] = (0,)) -> bytes:
    # Variables such as GIT_DIR, which git sets for its hooks, would select another repository; and nothing is written.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise GitUnavailable(f"git cannot be run: {error}") from error
    if done.returncode not in good:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(complaint[0] if complaint else f"git {words[0]} ended with status {done.returncode}")
    return done.stdout
